"""The notebooks run in a kernel, as in Jupyter."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from tests.support.notebooks import copy_project, execute, has_bar, kernel, pictures, text_output

_PNG = b"\x89PNG\r\n"


@pytest.fixture
def kernel_name(tmp_path: Path) -> Iterator[str]:
    with kernel(tmp_path / "kernel") as name:
        yield name


@pytest.fixture
def project(tmp_path: Path) -> Path:
    copy_project(tmp_path / "project")
    return tmp_path / "project"


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def assert_pictures(notebook: nbformat.NotebookNode, number: int) -> None:
    assert len(pictures(notebook)) == number
    assert all(picture.startswith(_PNG) and len(picture) > 5000 for picture in pictures(notebook))


def test_the_quickstart_runs_and_learns_the_digits(kernel_name: str, project: Path) -> None:
    notebook = execute("01_quickstart.ipynb", project, kernel_name)
    [summary_file] = (project / "runs").glob("*/summary.json")
    summary = json.loads(summary_file.read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 690
    assert summary["metrics"]["accuracy"] >= 0.97
    assert summary["best"]["value"] >= 0.97
    assert summary["mlflow_run_id"]
    assert has_bar(notebook)
    assert "epoch 30/30 step 23/23" in text_output(notebook)
    assert_pictures(notebook, 2)


@pytest.mark.timeout(900)
def test_a_resized_run_that_loses_workers_ends_bit_identical(kernel_name: str, project: Path) -> None:
    notebook = execute("02_watch_it_survive.ipynb", project, kernel_name)
    runs = project / "runs" / "survive"
    disturbed, undisturbed = summary_of(runs / "disturbed"), summary_of(runs / "undisturbed")
    assert disturbed["params_digest"] == undisturbed["params_digest"]
    assert disturbed["metrics"] == undisturbed["metrics"]
    assert disturbed["metrics"]["accuracy"] >= 0.95
    assert [workers for _, workers in disturbed["world_sizes"]][:5] == [1, 2, 1, 2, 1]
    assert len(undisturbed["world_sizes"]) == 1
    assert disturbed["restarts"]["failures"] == 2
    assert disturbed["redone_steps"] == 0
    [output] = [cell.outputs[-1].data["text/plain"] for cell in notebook.cells if cell.source.startswith("killed = ")]
    [killed] = map(int, re.findall(r"<worker 0: process (\d+)", output))
    assert not psutil.pid_exists(killed) or "RayTrainWorker" not in psutil.Process(killed).name()
    assert_pictures(notebook, 1)


def test_the_better_run_becomes_the_champion(kernel_name: str, project: Path) -> None:
    import mlflow

    notebook = execute("03_compare_and_promote.ipynb", project, kernel_name)
    runs = project / "runs" / "compare"
    first, longer = summary_of(runs / "first"), summary_of(runs / "longer")
    assert longer["best"]["value"] > first["best"]["value"]
    client = mlflow.MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    champion = client.get_model_version_by_alias("digits", "champion")
    assert champion.tags["ray_app.params_digest"] == longer["params_digest"]
    assert champion.tags["ray_app.promoted_because"] == "and forward again"
    assert client.get_model_version("digits", "1").tags["ray_app.promoted_because"] == "trying the way back"
    assert f"the champion reads {longer['best']['value']:.2%} of 359 held-out digits" in text_output(notebook)
    assert_pictures(notebook, 1)


def test_a_user_task_trains_on_user_data(kernel_name: str, project: Path) -> None:
    notebook = execute("04_own_task_and_data.ipynb", project, kernel_name)
    folder = project / "build" / "spirals"
    [summary_file] = (folder / "runs").glob("*/summary.json")
    summary = json.loads(summary_file.read_text())
    assert summary["status"] == "finished"
    assert summary["metrics"]["accuracy"] >= 0.97
    assert f"accuracy {summary['best']['value']:.4f}" in text_output(notebook)
    assert "class Spirals(Task)" in (folder / "spirals_task.py").read_text()
    assert_pictures(notebook, 1)
