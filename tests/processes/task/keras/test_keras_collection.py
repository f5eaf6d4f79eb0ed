"""Ten programs of users of Keras: each trains by its configuration, and plain Keras loads and runs its export."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ray_app import Ragged, run_training
from ray_app.config.config import Config
from ray_app.data.arrays import to_column
from ray_app.testing import WorkerPool, make_job
from tests.support.keras_collection import COLLECTION, Program
from tests.support.plain_keras import predict_by_plain_keras

ROWS, UNSEEN = 36, 7
RTOL, ATOL = 1e-5, 1e-6
"""Tolerance of float32: Keras predicts the rows in a batch of another size."""


@pytest.fixture(scope="module")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    preloaded = ("ray_app.testing", "torchmetrics", "ray_app.task.keras", "tests.support.keras_collection")
    with WorkerPool(2, tmp_path_factory.mktemp("stores"), preloaded) as pool:
        yield pool


def write_rows(folder: Path, columns: dict[str, Any]) -> Path:
    fields, data = [], []
    for name, values in columns.items():
        if isinstance(values, list) or values.ndim == 1:
            array = pa.array(values)
            field = pa.field(name, array.type)
        else:
            field, array = to_column(name, values)
        fields.append(field)
        data.append(array)
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_arrays(data, schema=pa.schema(fields)), folder / "part-0.parquet")
    return folder


def keras_inputs(program: Program, columns: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the columns that a program takes as a user of Keras gives them to `Model.predict`."""
    names = program.inputs
    arrays = {}
    for name in [names] if isinstance(names, str) else names.values() if isinstance(names, dict) else names:
        values = columns[name]
        if isinstance(values, list):
            longest = max(map(len, values))
            values = np.array([row + [0] * (longest - len(row)) for row in values])
        elif values.dtype == np.uint8:
            values = values.astype(np.float32)
            values = values[..., None] if values.ndim == 3 else values
        arrays[name] = values[:, None] if values.ndim == 1 else values
    return arrays


@pytest.mark.rest
@pytest.mark.parametrize("function", COLLECTION)
def test_a_program_trains_by_its_configuration_and_plain_keras_runs_its_export(
    worker_pool: WorkerPool, tmp_path: Path, function: str
) -> None:
    program = COLLECTION[function]
    columns = program.rows(ROWS + UNSEEN)
    data = write_rows(tmp_path / "data", {name: values[:ROWS] for name, values in columns.items()})
    init_args = {
        "model": f"tests.support.keras_collection.{function}",
        "inputs": program.inputs,
        "target": program.target,
    }
    config = Config().replace(
        task={"class_path": "ray_app.task.keras.KerasTask", "init_args": init_args},
        data__path=str(data),
        data__eval_path=str(data),
        data__global_batch_size=12,
        scaling__max_workers=1,
        scaling__logical_workers=2,
        train__strategy="single",
        train__epochs=1,
        evaluate__where="workers",
        tracking__enabled=False,
        run__storage_path=str(tmp_path / "runs"),
        run__name="run",
    )
    result = run_training(config, Console(file=StringIO()))
    assert result.status == "finished"
    two = make_job(config.replace(train__strategy="ddp", scaling__max_workers=2, data__eval_path=None), tmp_path / "2")
    assert worker_pool.train_new_run(two, 2).commit.params_digest == result.summary["params_digest"]

    unseen = {name: values[ROWS:] for name, values in columns.items()}
    rows = {name: unseen[name] for name in keras_inputs(program, unseen)}
    lists = {name: Ragged.of(rows[name], np.int64) for name in rows if isinstance(rows[name], list)}
    predicted = result.predict({**rows, **lists})
    described = result.export(str(tmp_path / "export"))
    assert "model.keras" in described["files"]
    arrays, classes = keras_inputs(program, unseen), ("tests.support.keras_collection",)
    alone = predict_by_plain_keras(tmp_path / "export", arrays, program.inputs, classes)
    assert alone.keys() == predicted.keys()
    for name, values in alone.items():
        np.testing.assert_allclose(values, predicted[name], RTOL, ATOL, err_msg=name)
