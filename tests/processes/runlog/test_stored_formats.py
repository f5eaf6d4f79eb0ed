"""What earlier code has written can be read and continued: a data set, a run with checkpoints, an export, packages in
both formats.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ray_app import compare_runs, load_config, load_for_training, load_model, read_rows
from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.report import main as report
from ray_app.data.dataset import open_dataset
from ray_app.driver.finalize import close_orphan, summarize
from ray_app.driver.result import Result
from ray_app.driver.trained_run import trained_job
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.models.export import read_export
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.journal import MetricsReader
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import read_json
from tests.support.local_world import Pool
from tests.support.places import SUPPORT

WRITTEN = SUPPORT / "written_before"
DIGEST = "be321efb2c578734dcf517ad3e047c9b784bc3e3526744976712ba1356df57e8"
FORMATS = ["torch.export", "safetensors"]

SERVE = """
import sys
import mlflow.pyfunc, numpy
model = mlflow.pyfunc.load_model(sys.argv[1])
numpy.save(sys.argv[3], model.predict(numpy.load(sys.argv[2])))
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in the working directory, from which the paths in it count."""
    shutil.copytree(WRITTEN, tmp_path / "written")
    monkeypatch.chdir(tmp_path / "written")
    return tmp_path / "written"


@pytest.fixture
def run(written: Path) -> RunPaths:
    return RunPaths(written / "runs" / "digits")


def opened(run: RunPaths) -> Result:
    return Result(run.root, json.loads(run.summary.read_text()), trained_job(run).task)


def test_a_data_set(written: Path) -> None:
    assert [open_dataset(f"data/{part}").manifest.num_rows for part in ("train", "eval")] == [99, 29]
    assert (
        open_dataset("data/train").manifest.digest == read_json(written / "runs" / "digits" / "manifest.json")["digest"]
    )
    for part in ingest(IngestOptions("numpy", "again", "digits.npz", eval_fraction=0.25, row_group_rows=16)).parts:
        before, now = (read_json(written / folder / part / "dataset.json") for folder in ("data", "again"))
        kept = before.keys() - {"made_from", "shards"}
        assert {name: now[name] for name in kept} == {name: before[name] for name in kept}, (
            "what was added since may be more"
        )
        old, new = (
            pq.read_table(f"{folder}/{part}/part-00000.parquet").sort_by("row_id") for folder in ("data", "again")
        )
        assert old.equals(new), "the same rows, whose order is mixed now"


def test_a_result(run: RunPaths) -> None:
    result = opened(run)
    assert repr(result).startswith("<finished run of 28 steps, accuracy 0.3448 at step 7")
    assert params_digest(result.load_model("newest").state_dict()) == result.summary["params_digest"] == DIGEST
    assert [e.step for e in result.evaluations()] == [7, 14, 21, 28]
    assert sum(sum(record.rows) for record in result.metrics()) == 4 * 99
    scores = result.task.forward(result.load_model("step-28"), result.read("data/eval"))
    accuracy = float((scores.argmax(1) == result.read("data/eval")["label"]).float().mean())
    assert accuracy == pytest.approx(result.summary["metrics"]["accuracy"], abs=1e-6)


def test_a_report_and_a_comparison(run: RunPaths) -> None:
    assert report(["--run", str(run.root)]) == 0
    page = run.report.read_text()
    assert all(text in page for text in (DIGEST, "accuracy", "nothing went wrong"))
    assert "digits" in compare_runs([run.root, opened(run)])._repr_html_()


def test_a_run_that_has_ended_in_order_is_left_alone(run: RunPaths) -> None:
    before = run.summary.read_bytes()
    assert not close_orphan(str(run.root))
    assert run.summary.read_bytes() == before
    stored, found = json.loads(before), summarize(trained_job(run), "finished")
    found["restarts"] = {cause: found["restarts"][cause] for cause in stored["restarts"]}
    assert {name: found[name] for name in stored} == stored, "what was added since may be more, and nothing else"


def test_a_run_goes_on_to_the_same_bits(run: RunPaths, pool: Pool) -> None:
    """Its last two checkpoints are lost; other workers than before do their steps again."""
    [*_, newest] = CheckpointStore(run).commits()
    for step in (21, 28):
        shutil.rmtree(run.checkpoint(step, 1))
    prepared = prepare(load_config("digits.yaml"))
    assert prepared.resumes
    with acquire_lease(run) as lease:
        job = claim(prepared, lease.fence).job
        pool.run_job(job, 3)
    again = CheckpointStore(run).commits()[-1]
    assert (again.step, again.fence, again.config_digest) == (28, 2, newest.config_digest)
    reader = MetricsReader(run)
    reader.poll()
    again_done = sorted(reader.repeated, key=lambda record: record.step)
    assert [(r.step, r.workers, r.generation) for r in again_done] == [(step, 3, "2.1") for step in range(15, 29)]
    first_done = [reader.records[record.step] for record in again_done]
    assert [r.row_hash for r in again_done] == [r.row_hash for r in first_done]
    if again.environment != newest.environment:
        warnings.warn(
            f"no bits compared: they were made on another kind of device, {newest.environment}, not"
            f" {again.environment}",
            stacklevel=1,
        )
        return
    assert [(r.loss, r.grad_norm) for r in again_done] == [(r.loss, r.grad_norm) for r in first_done]
    assert again.params_digest == DIGEST


def test_an_export(written: Path) -> None:
    torch.set_num_threads(1)
    task, model = load_for_training("export")
    assert params_digest(model.state_dict()) == DIGEST == read_export("export").params_digest
    rows = read_rows(task, "data/eval")
    with torch.inference_mode():
        scores = task.forward(model.eval(), rows).numpy()
    np.testing.assert_allclose(load_model("export").predict(rows["image"].numpy()), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.rest
def test_a_package_is_served_by_mlflow(form: str, written: Path, run: RunPaths) -> None:
    """As on a machine that has nothing of this repository: code that a package needs is in it."""
    result = opened(run)
    images = result.read("data/eval")["image"]
    with torch.inference_mode():
        scores = result.task.forward(result.load_model("newest"), {"image": images}).numpy()
    np.save("images.npy", images.numpy())
    done = subprocess.run(
        [sys.executable, "-I", "-c", SERVE, f"packages/{form}", "images.npy", "scores.npy"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    predicted = np.load("scores.npy")
    if form == "safetensors":
        scores = np.where(scores.max() > 0, scores, -scores)
    np.testing.assert_allclose(predicted, scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_a_package_is_what_predictions_and_training_read(
    form: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = read_export(f"packages/{form}")
    assert (package.format, package.params_digest) == (form, DIGEST)
    monkeypatch.syspath_prepend(str(written))
    task, model = load_for_training(f"packages/{form}")
    assert type(task).__name__ == ("Doubtful" if form == "safetensors" else "ImageClassification")
    assert params_digest(model.state_dict()) == DIGEST
