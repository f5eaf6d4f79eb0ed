"""Executes the notebooks in a kernel, as Jupyter does it, in a copy of the project.

As a script (`python -m tests.support.notebooks`) it stores their outputs, without anything that names this machine.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import install
from nbclient import NotebookClient

from tests.support.places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = "ray-app-tests"
_CELL_S = 400


@contextmanager
def kernel(folder: Path) -> Iterator[str]:
    """A kernel of this Python, whatever kernels the user has; it joins no Ray cluster that is there by chance.

    Args:
        folder: For its files.
    """
    install(kernel_name=KERNEL, prefix=str(folder / "jupyter"))
    places = {
        "JUPYTER_PATH": str(folder / "jupyter" / "share" / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    before = {name: os.environ.get(name) for name in (*places, "RAY_ADDRESS")}
    os.environ.update(places)
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield KERNEL
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def copy_project(project: Path) -> None:
    """Copies what a notebook needs of the repository."""
    for name in ("ray_app", "jobs", "conf", "notebooks", "datasets"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))


def execute(name: str, project: Path, kernel_name: str) -> nbformat.NotebookNode:
    """Executes a notebook from its first cell to its last, in a kernel of its own.

    Args:
        name: Its file.
        project: The copy of the repository.
        kernel_name: From `kernel`.

    Returns:
        The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(project / "notebooks" / name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(project / "notebooks")}}
    NotebookClient(
        notebook, timeout=_CELL_S, kernel_name=kernel_name, resources=resources, coalesce_streams=True
    ).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list[Any]:
    """All outputs of its cells, in order."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def has_bar(notebook: nbformat.NotebookNode) -> bool:
    """Whether it shows how far a run has come."""
    return any("<progress" in output.get("data", {}).get("text/html", "") for output in outputs(notebook))


def pictures(notebook: nbformat.NotebookNode) -> list[bytes]:
    """Its pictures, as PNG files."""
    found = [output.get("data", {}).get("image/png") for output in outputs(notebook)]
    return [base64.b64decode(picture) for picture in found if picture]


def printed(notebook: nbformat.NotebookNode) -> str:
    """All that it says as text."""
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook))


def save(notebook: nbformat.NotebookNode, project: Path, file: Path) -> None:
    """Saves an executed notebook without anything that names this machine: paths become relative to the repository.

    Raises:
        ValueError: Something is left that does.
    """
    text = nbformat.writes(notebook)
    for place, instead in ((f"{project}/", ""), (str(project), "."), (sys.prefix, ".venv")):
        text = text.replace(place, instead)
    text = re.sub(r"/tmp/ray/session_[\w./-]*", "the worker's log", text)
    text = re.sub(r"\b\d+\.\d+\.\d+\.\d+:\d+", "HOST:PORT", text)
    left = re.findall(r"/(?:home|root|tmp|Users)/[^\s\"\\]*", text)
    if left:
        raise ValueError(f"{file.name} names places of this machine: {sorted(set(left))}")
    cleaned = nbformat.reads(text, as_version=4)
    cleaned.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for cell in cleaned.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(cleaned, file)


def store(name: str) -> None:
    """Executes a notebook and stores it with its outputs."""
    with tempfile.TemporaryDirectory() as folder, kernel(Path(folder) / "kernel") as kernel_name:
        project = Path(folder) / "project"
        copy_project(project)
        save(execute(name, project, kernel_name), project, ROOT / "notebooks" / name)
    print(f"{name} is stored")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or [path.name for path in NOTEBOOKS]:
        store(chosen)
