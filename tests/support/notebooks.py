"""Executes the notebooks in a kernel, as Jupyter does it, in a copy of the project.

As a script (`python -m tests.support.notebooks`) it stores their outputs without names of this machine.
"""

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

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = "ray-app-tests"
_CELL_S = 400


@contextmanager
def kernel(folder: Path) -> Iterator[str]:
    """Installs a kernel of this Python, independent of the user's kernels; it joins no Ray cluster of the machine.

    Args:
        folder: Folder for its files.
    """
    install(kernel_name=KERNEL, prefix=str(folder / "jupyter"))
    folders = {
        "JUPYTER_PATH": str(folder / "jupyter" / "share" / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    before = {name: os.environ.get(name) for name in (*folders, "RAY_ADDRESS")}
    os.environ.update(folders)
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield KERNEL
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def copy_project(project: Path) -> None:
    """Copies the parts of the repository that a notebook needs."""
    for name in ("ray_app", "jobs", "conf", "notebooks", "datasets"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))


def execute(name: str, project: Path, kernel_name: str) -> nbformat.NotebookNode:
    """Executes all cells of a notebook in a new kernel.

    Args:
        name: The file name of the notebook.
        project: The copy of the repository.
        kernel_name: The name that `kernel` returned.

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
    """Returns all outputs of its cells, in order."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def has_bar(notebook: nbformat.NotebookNode) -> bool:
    """Returns whether it shows a progress bar."""
    return any("<progress" in output.get("data", {}).get("text/html", "") for output in outputs(notebook))


def pictures(notebook: nbformat.NotebookNode) -> list[bytes]:
    """Returns its images as PNG files."""
    images = [output.get("data", {}).get("image/png") for output in outputs(notebook)]
    return [base64.b64decode(picture) for picture in images if picture]


def text_output(notebook: nbformat.NotebookNode) -> str:
    """Returns all its output that is text."""
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook))


def save(notebook: nbformat.NotebookNode, project: Path, file: Path) -> None:
    """Saves an executed notebook with paths relative to the repository, and without names of this machine.

    Raises:
        ValueError: The notebook still has a path of this machine.
    """
    text = nbformat.writes(notebook)
    for old, new in ((f"{project}/", ""), (str(project), "."), (sys.prefix, ".venv")):
        text = text.replace(old, new)
    text = re.sub(r"/tmp/ray/session_[\w./-]*", "the worker's log", text)
    text = re.sub(r"\b\d+\.\d+\.\d+\.\d+:\d+", "HOST:PORT", text)
    local_paths = re.findall(r"/(?:home|root|tmp|Users)/[^\s\"\\]*", text)
    if local_paths:
        raise ValueError(f"{file.name} names places of this machine: {sorted(set(local_paths))}")
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
