"""Batch prediction on real Ray and MLflow: every row is predicted once, in order, with the outputs of the model, and
with the same bytes after a kill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import safetensors.torch
import torch

from ray_app import load_model
from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.predict import main
from ray_app.cli.train import main as train
from ray_app.data.arrays import from_column, spec_of_field
from ray_app.data.dataset import open_dataset
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, fetch_in_process, plan_all_reads
from ray_app.driver.model_export import ExportOptions, export_run
from ray_app.errors import BadRowError
from ray_app.predict.actor import Model, PredictActor, PredictJob
from ray_app.predict.predict import cut_parts
from ray_app.task.base import Task
from ray_app.task.tabular import TabularRegression
from tests.support.finished_run import CHAMPION, FinishedRun, make_champion_run, predict_command
from tests.support.mlflow_server import make_database
from tests.support.paths import ROOT
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> FinishedRun:
    return make_champion_run(tmp_path_factory.mktemp("storage"), digits)


def read_parts(out: Path) -> pa.Table:
    return pa.concat_tables(
        pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))
    ).replace_schema_metadata()


def state_of(out: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("part-*.parquet")}


def images_of(path: Path) -> tuple[list[str], np.ndarray]:
    table = pq.read_table(path / "part-00000.parquet")
    pixels = from_column(table.column("image"), spec_of_field(table.schema.field("image")))
    return table.column("row_id").to_pylist(), np.ascontiguousarray(
        pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    )


@pytest.mark.rest
def test_the_champion_predicts_every_row_once_in_order(
    ray_cluster: None, run: FinishedRun, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(predict_command(run, digits / "eval", out, *CHAMPION, "--predict.workers", "2")) == 0
    printed = capsys.readouterr().out
    ids, images = images_of(digits / "eval")
    predictions = read_parts(out)
    assert pq.read_table(out).num_rows == len(ids), "other programs read the folder"
    assert Counter(predictions.column("row_id").to_pylist()) == Counter(ids)
    assert predictions.column("row_id").to_pylist() == ids
    assert predictions.column("position").to_pylist() == list(range(len(ids)))
    scores = torch.from_numpy(run.predictions(images))
    confidence, index = scores.softmax(-1).max(-1)
    assert predictions.column("predicted_index").to_pylist() == index.tolist()
    assert predictions.column("predicted").to_pylist() == [str(i) for i in index.tolist()]
    assert np.allclose(predictions.column("confidence").to_numpy(), confidence.numpy(), rtol=1e-5, atol=0)
    assert len(set(confidence.tolist())) > 10, "the predictions do not differ between rows"

    facts = json.loads((out / "_predictions.json").read_text())
    assert (facts["rows_in"], facts["rows_out"], facts["model"]) == (
        len(ids),
        len(ids),
        {"name": "digits", "version": "1"},
    )
    assert facts["params_digest"] == CheckpointStore(run.job.paths).commits()[0].params_digest
    assert facts["counts"] == Counter(predictions.column("predicted").to_pylist())
    assert facts["means"]["confidence"] == pytest.approx(float(confidence.mean()), rel=1e-5)
    assert [part["rows"] for part in facts["parts"]] == [50] * (len(ids) // 50) + [len(ids) % 50]
    assert f"{len(ids)} in, {len(ids)} out" in printed
    assert "confidence 0." in printed

    before = state_of(out)
    # One part is truncated, one has a flipped bit in its values, and one is missing.
    (out / "part-00001.parquet").write_bytes(before["part-00001.parquet"][0][:-100])
    page = bytearray(before["part-00003.parquet"][0])
    page[60] ^= 1
    (out / "part-00003.parquet").write_bytes(page)
    (out / "part-00005.parquet").unlink()
    assert main(predict_command(run, digits / "eval", out, *CHAMPION)) == 0
    after = state_of(out)
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in before.items()}
    kept = {name for name in after if after[name][1] == before[name][1]}
    assert set(after) - kept == {"part-00001.parquet", "part-00003.parquet", "part-00005.parquet"}


def test_predictions_without_labels_are_bit_identical_with_and_without_a_cluster(
    ray_cluster: None, run: FinishedRun, digits: Path, tmp_path: Path
) -> None:
    table = pq.read_table(digits / "eval" / "part-00000.parquet")
    data = tmp_path / "unlabelled"
    data.mkdir()
    pq.write_table(table.drop_columns(["label"])[:200], data / "part-a.parquet", row_group_size=33)
    pq.write_table(table.drop_columns(["label"])[200:], data / "part-b.parquet", row_group_size=120)
    arguments = ["--predict.run", str(run.job.paths.root), "--predict.columns", "image,row_id"]
    assert main(predict_command(run, data, tmp_path / "out", *arguments)) == 0
    exported = export_run(ExportOptions(str(run.job.paths.root), str(tmp_path / "model")))
    assert (
        main(predict_command(run, digits / "eval", tmp_path / "labelled", "--predict.model", str(tmp_path / "model")))
        == 0
    )
    predictions, labelled = read_parts(tmp_path / "out"), read_parts(tmp_path / "labelled")
    assert predictions.column_names == ["image", "row_id", "position", "predicted", "predicted_index", "confidence"]
    assert predictions.column("image").to_pylist() == table.column("image").to_pylist()
    for name in ("row_id", "position", "predicted", "predicted_index"):
        assert predictions.column(name).to_pylist() == labelled.column(name).to_pylist()
    assert np.allclose(
        predictions.column("confidence").to_numpy(), labelled.column("confidence").to_numpy(), rtol=1e-5, atol=0
    )
    facts = json.loads((tmp_path / "out" / "_predictions.json").read_text())
    assert facts["model"] == {"run": "run", "step": 8, "config_digest": "c" * 64}
    assert [part["rows"] for part in facts["parts"]] == [33] * 5 + [33 + 2, 50, 50, 20, 39]
    assert json.loads((tmp_path / "labelled" / "_predictions.json").read_text())["model"] == {
        "run": "run",
        "step": exported["step"],
    }
    torch.set_num_threads(1)
    predictor, images = load_model(tmp_path / "model"), images_of(digits / "eval")[1]
    scores = [
        torch.from_numpy(predictor.predict(images[first : first + 50], scores=True))
        for first in range(0, len(images), 50)
    ]
    confidence = torch.cat([part.softmax(-1).max(-1).values for part in scores])
    assert np.array_equal(labelled.column("confidence").to_numpy(), confidence.numpy()), (
        "the exported model and the job differ in a bit"
    )


def test_an_interrupted_or_killed_prediction_continues(ray_cluster: None, digits: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    gate.mkdir()
    uri, task = make_database(tmp_path / "mlflow.db"), "tests.support.gated_task.GatedPrediction"
    settings = {"gate": str(gate), "wait_before": 4}
    run = FinishedRun(tmp_path, digits, uri, task=task, init_args=settings)
    more = ["--task.class_path", task, *(f"--task.init_args.{name}={value}" for name, value in settings.items())]
    arguments = predict_command(run, digits / "eval", out, "--predict.run", str(run.job.paths.root), *more)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def exit_code_after(sent: signal.Signals) -> int:
        """Returns the exit code of a driver that gets a signal once three parts exist."""
        driver = subprocess.Popen([sys.executable, "jobs/predict.py", *arguments], cwd=ROOT, env=environment)
        try:
            wait_until(lambda: (gate / "reached").exists() or driver.poll() is not None)
            assert driver.poll() is None
            wait_until(lambda: len(state_of(out)) == 3)
        finally:
            driver.send_signal(sent)
            driver.wait(60)
        return driver.returncode

    assert exit_code_after(signal.SIGTERM) == 75, "Ray's own signal handler ended the driver"
    shutil.rmtree(out)
    (gate / "reached").unlink()
    assert exit_code_after(signal.SIGKILL) == -signal.SIGKILL
    before = state_of(out)
    assert len(before) == 3, "three parts must be finished (read tasks end in any order, so any three)"
    assert not (out / "_predictions.json").exists()
    (gate / "open").touch()
    assert main(arguments) == 0
    assert {name: fact for name, fact in state_of(out).items() if name in before} == before, (
        "finished parts were written again"
    )
    assert main([str(undisturbed) if argument == str(out) else argument for argument in arguments]) == 0
    assert {name: data for name, (data, _) in state_of(out).items()} == {
        name: data for name, (data, _) in state_of(undisturbed).items()
    }
    ids, _ = images_of(digits / "eval")
    assert read_parts(out).column("row_id").to_pylist() == ids


def predictor_of(task: Task, data: Path, out: Path) -> tuple[PredictActor, list[pa.Table], Any]:
    """Returns a prediction actor in this process, the tables that it would get, and its model."""
    dataset = open_dataset(str(data))
    reader = Reader(dataset.root, task.columns(), task.decode, probe(dataset, task.columns(), task.decode))
    model = task.build_model().eval()
    state = dict(model.state_dict())
    parts = {spec[0].position: (f"part-{i:05d}.parquet", spec) for i, spec in enumerate(cut_parts(dataset.manifest, 4))}
    packed_model = Model(task, safetensors.torch.save(state), None, params_digest(state))
    job = PredictJob(
        packed_model, dataset.root, reader.fields, [], {}, parts, str(out), "digest", 3, torch.get_num_threads(), "cpu"
    )
    return PredictActor(ray.put(job)), list(fetch_in_process(reader, plan_all_reads(dataset.manifest, 4))), model


def test_a_regression_is_predicted_and_a_row_without_a_value_is_named(ray_cluster: None, tmp_path: Path) -> None:
    features = np.arange(8, dtype=np.float64)
    for name, values in (("good", features), ("bad", np.where(features == 6, np.nan, features))):
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.table({"a": values, "target": features}), tmp_path / name / "part-00000.parquet", row_group_size=4
        )
    task = TabularRegression(missing={"default": "refuse"}, standardize=False).prepare(
        open_dataset(str(tmp_path / "good")).facts
    )
    predictor, tables, model = predictor_of(task, tmp_path / "good", tmp_path / "out")
    for table in tables:
        predictor(table)
    with torch.inference_mode():
        expected = model(torch.from_numpy(features.astype(np.float32))[:, None])[:, 0].numpy()
    assert np.allclose(read_parts(tmp_path / "out").column("predicted").to_numpy(), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(BadRowError, match=r"part-00000\.parquet, row group 1, row 2: column 'a' is NaN or infinite"):
        predictor_of(task, tmp_path / "bad", tmp_path / "out2")


@pytest.mark.parametrize("value", [np.nan, np.inf, None])
def test_a_missing_value_is_filled_and_an_infinite_one_is_refused(
    ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float | None
) -> None:
    features = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 3.0]
    for name, last in (("good", 3.0), ("bad", value)):
        (tmp_path / name).mkdir()
        columns = {"a": [*features[:-1], last], "note": ["x"] * 8}
        pq.write_table(pa.table({**columns, "target": features}), tmp_path / name / "part-0.parquet", row_group_size=4)
    storage = [
        "--run.storage_path",
        str(tmp_path / "runs"),
        "--tracking.enabled",
        "false",
        "--train.strategy",
        "single",
    ]
    task = ["--task.class_path", "ray_app.task.tabular.TabularRegression"]
    data = ["--data.path", str(tmp_path / "good"), "--data.global_batch_size", "4", "--train.epochs", "1"]
    assert train([*task, *data, *storage, "--run.name", "run"]) == 0
    predict_options = ["--predict.run", str(tmp_path / "runs" / "run"), "--predict.data", str(tmp_path / "bad")]
    capsys.readouterr()
    code = main([*task, *data, *storage, *predict_options, "--predict.out", str(tmp_path / "out")])
    output = capsys.readouterr()
    assert "Columns used: a, note\nColumns not used: 'target' (number, not named)\n" in output.out
    if value == np.inf:
        assert code == 2
        assert "part-0.parquet, row group 1, row 3: column 'a' is NaN or infinite" in output.err
    else:
        # The median of the training data is 3.
        predicted = read_parts(tmp_path / "out").column("predicted").to_pylist()
        assert (code, predicted[7]) == (0, predicted[3])
        assert len(set(predicted)) == 7
