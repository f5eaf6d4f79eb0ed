"""A prediction of a table takes columns of other types than in training, where the encoding does not depend on them."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ray_app import load_config
from ray_app.checkpoint.format import params_digest
from ray_app.config.config import Config
from ray_app.data.dataset import open_dataset
from ray_app.data.reader import RowSource, fetch_in_process, load_all
from ray_app.errors import DataError
from ray_app.models.export import write_export
from ray_app.models.inputs import read_decoded
from ray_app.predict.predict import PredictSection, PreparedPrediction, prepare_prediction
from ray_app.preflight.inputs import make_task
from ray_app.task.schema import prepare_task

COLUMNS: dict[str, Any] = {"age": [22, 38, 26], "ward": [3, 1, 3], "day": ["2026-11-27"] * 3, "label": [0, 1, 0]}
ARGUMENTS = {"categories": ["ward"], "dates": {"day": ["day"]}, "hidden": [4], "standardize": False}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A configuration, and the export of a task that it prepares with `COLUMNS`."""
    folder = tmp_path_factory.mktemp("trained")
    data = str(folder / "train.parquet")
    pq.write_table(pa.table(COLUMNS), data)
    class_path = "ray_app.task.tabular.TabularClassification"
    config = load_config(None, task__class_path=class_path, task__init_args=ARGUMENTS, data__path=data)
    torch.manual_seed(1)
    task = prepare_task(make_task(config), open_dataset(data).facts)
    model = task.build_model().eval()
    arrays: Any = read_decoded(task, data)
    source = {"run": "run", "step": 1, "params_digest": params_digest(model.state_dict())}
    write_export(task, model, arrays, folder / "export", source)
    return config, folder / "export"


def prepare(trained: tuple[Config, Path], folder: Path, columns: dict[str, Any]) -> PreparedPrediction:
    config, export = trained
    pq.write_table(pa.table(columns), folder / "later.parquet")
    return prepare_prediction(config, PredictSection(str(folder / "later.parquet"), str(folder / "out"), str(export)))


def test_numbers_categories_and_dates_of_other_types_are_encoded(trained: tuple[Config, Path], tmp_path: Path) -> None:
    days = [datetime.date(2026, 11, 27), datetime.date(2026, 11, 28), datetime.date(2026, 11, 29)]
    columns = {"age": [30.5, 1.0, 2.0], "ward": ["3", "east", "1"], "day": days}
    prepared = prepare(trained, tmp_path, columns)
    rows = RowSource(prepared.reader, open_dataset(str(tmp_path / "later.parquet")).manifest, 100)
    arrays: Any = load_all(fetch_in_process, rows).arrays
    assert arrays["features"].tolist() == [[30.5, 27], [1, 28], [2, 29]]
    assert arrays["categories"][:, 0].tolist() == [1, 2, 0]
    (note,) = (line for line in prepared.columns if "lacks" in line)
    assert note.startswith("1 of 3 rows")
    assert "'ward' that the training data lacks ('east')" in note


def test_rows_as_other_tools_write_them_are_encoded_alike(trained: tuple[Config, Path], tmp_path: Path) -> None:
    columns = {
        "age": pa.array([Decimal(age) for age in COLUMNS["age"]], pa.decimal128(38, 2)),
        "ward": pa.array(["3", "1", "3"]).dictionary_encode(),
        "day": pa.array(COLUMNS["day"], pa.string_view()),
    }
    encoded = []
    for values in (COLUMNS, columns):
        prepared = prepare(trained, tmp_path, values)
        rows = RowSource(prepared.reader, open_dataset(str(tmp_path / "later.parquet")).manifest, 100)
        arrays: Any = load_all(fetch_in_process, rows).arrays
        encoded.append({name: arrays[name].tolist() for name in ("features", "categories")})
    assert encoded[0] == encoded[1]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("age", ["22", "38", "x"], "Column 'age' of .* holds text; in the training data of the model it holds integer"),
        ("ward", [b"3", b"1", b"3"], "Column 'ward' of .* holds bytes"),
        ("day", [1, 2, 3], "Column 'day' of .* holds integer int64; in the training data of the model it holds text"),
        ("label", [0.5, 1.0, 0.0], "Column 'label' of .* holds number float64"),
    ],
)
def test_columns_that_cannot_be_encoded_are_refused(
    trained: tuple[Config, Path], tmp_path: Path, name: str, values: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(trained, tmp_path, COLUMNS | {name: values})
