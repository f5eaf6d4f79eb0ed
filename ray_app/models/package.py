"""A trained model as an MLflow model; what it holds besides MLflow's own files is made by `package_files`.

::

    MLmodel  requirements.txt  ...             MLflow's own: signature, input example, environment
    code/  data/model/                         see `package_files`
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
from torch import nn

from ray_app.models.package_files import LOADER_MODULE, Files, write_files
from ray_app.models.sources import requirements
from ray_app.task.base import Task


@dataclass(frozen=True)
class Package:
    """An MLflow model in a folder.

    Args:
        folder: Where it is.
        format: See `Files`.
        outputs: See `Files`.
        refused: See `Files`.
    """

    folder: Path
    format: str
    outputs: Literal["equal", "close"]
    refused: tuple[str, ...]


def make_package(task: Task, model: nn.Module, example: dict[str, npt.NDArray], folder: Path) -> Package:
    """Writes an MLflow model that predicts what a trained one does, and has compared the two.

    Args:
        task: See `write_files`.
        model: See `write_files`.
        example: See `write_files`.
        folder: Where to; it must not exist.

    Raises:
        RegistryError: It can be stored in no way without pickle; the message says why.
    """
    with tempfile.TemporaryDirectory() as temporary:
        files = write_files(task, model, example, Path(temporary))
        _save(folder, files)
    return Package(folder, files.format, files.outputs, files.refused)


def _save(folder: Path, files: Files) -> None:
    """Lets MLflow make a model of the files; nothing is logged anywhere."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature

    inputs, outputs = files.example, files.predicted
    only = len(inputs) == 1
    mlflow.pyfunc.save_model(
        path=str(folder),
        loader_module=LOADER_MODULE,
        data_path=str(files.data),
        code_paths=[str(path) for path in sorted(files.code.iterdir())],
        pip_requirements=[f"mlflow=={importlib.metadata.version('mlflow')}", *requirements(files.libraries)],
        signature=ModelSignature(_schema(inputs, only, files.ragged), _schema(outputs, "" in outputs)),
        input_example=next(iter(inputs.values())) if only else inputs,
    )


def _schema(arrays: dict[str, npt.NDArray], only: bool, ragged: Container[str] = ()) -> Any:
    """MLflow's schema of arrays with any number of rows, and ragged ones of any length; a single one has no name."""
    from mlflow.types import Schema, TensorSpec

    shapes = {name: (-1, -1, *v.shape[2:]) if name in ragged else (-1, *v.shape[1:]) for name, v in arrays.items()}
    return Schema([TensorSpec(v.dtype, shapes[name], None if only else name) for name, v in arrays.items()])
