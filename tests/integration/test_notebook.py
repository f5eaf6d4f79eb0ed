"""The quickstart notebook, executed in a kernel as Jupyter does it."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import install
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = Path("notebooks") / "01_quickstart.ipynb"
_PNG = b"\x89PNG\r\n"


def pictures(notebook: nbformat.NotebookNode) -> list[bytes]:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel of this Python, whatever kernels the user has; it joins no Ray cluster that is there by chance."""
    install(kernel_name="quickstart", prefix=str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter" / "share" / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return "quickstart"


def test_the_quickstart_runs_and_learns_the_digits(kernel: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("ray_app", "jobs", "conf", "notebooks"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    notebook = nbformat.read(project / NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(project / NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=240, kernel_name=kernel, resources=resources).execute()

    [found] = (project / "runs").glob("*/summary.json")
    summary = json.loads(found.read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 690
    assert summary["metrics"]["accuracy"] >= 0.97
    assert summary["best"]["value"] >= 0.97
    assert summary["mlflow_run_id"]
    assert len(pictures(notebook)) == 2
    assert all(picture.startswith(_PNG) and len(picture) > 5000 for picture in pictures(notebook))


def test_the_stored_notebook_shows_what_it_does_on_any_machine() -> None:
    text = (ROOT / NOTEBOOK).read_text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert len(pictures(notebook)) == 2
    assert not any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", []))
    assert "def " not in "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert not any(place in text for place in ("/home/", "/root/", "/Users/", "/tmp/", str(ROOT)))
