"""Exports of trained models: folders without a registry, which are written here and loaded on machines without Ray.

::

    code/  data/model/    the files of a package as in a version of the registry, see `ray_app.models.package`
    export.json           the origin of the model, and the SHA-256 of every other file

`read_export` and `fetch_package` return an export, or a version of a registered model, as the `Packaged` that a
prediction needs; they execute and unpickle nothing of it.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ray_app.checkpoint.format import StoredTensor, write_model
from ray_app.data.dataset import sha256
from ray_app.devices import kind_of
from ray_app.errors import ConfigError, RegistryError
from ray_app.models import loader
from ray_app.models.inputs import read_decoded
from ray_app.models.package import write_files
from ray_app.models.predictor import ModelPredictor, make_predictor, names_code
from ray_app.models.registry import download_version, load_parameters, resolve_version
from ray_app.storage.files import to_json
from ray_app.task.base import Batch, Task
from ray_app.task.ragged import Arrays, to_batch
from ray_app.task.table_encoding import encode_raw_rows
from ray_app.task.user_code import user_code

EXPORT = "export.json"
_NAMES_CODE = (
    "and that class, or import paths in its settings, would be imported. Pass trust=True if you trust the author."
)


def refuse_taken(folder: Path, overwrite: bool) -> None:
    """Raises ConfigError for a folder that exists without `overwrite`, or that is not an export."""
    if not (folder.exists() or folder.is_symlink()):
        return
    if not overwrite:
        raise ConfigError(
            f"{folder} exists already. Name another folder, or set --overwrite true to replace an export."
        )
    if not (folder / EXPORT).is_file():
        raise ConfigError(f"{folder} has no {EXPORT}, so it is not an export and is not replaced. Name another folder.")


def write_export(
    task: Task,
    model: nn.Module,
    example: Arrays,
    folder: Path,
    source: dict[str, Any],
    overwrite: bool = False,
    tokenizer: bytes | None = None,
) -> dict[str, Any]:
    """Writes a model to a folder, which appears complete or not at all; returns the content of `export.json`.

    Raises:
        ConfigError: See `refuse_taken`.
        RegistryError: The model cannot be stored without pickle; the message has the reasons.
    """

    def write(temporary: Path) -> dict[str, Any]:
        files = write_files(task, model, example, temporary, tokenizer)
        with user_code(lambda: "writing an export"):
            task.export_files(model, temporary)
        described = source | {"format": files.format, "outputs": files.outputs, "refused": list(files.refused)}
        return described | {"libraries": sorted(files.libraries)}

    return _make_folder(folder, write, overwrite)


def write_parameters(
    model: Mapping[str, StoredTensor], folder: Path, source: dict[str, Any], max_bytes: int, overwrite: bool = False
) -> dict[str, Any]:
    """Writes the parameters of a model that may not fit into memory; returns the content of `export.json`.

    The folder has files of at most `max_bytes`, see `write_model`, and neither a program nor `package.json`.

    Raises:
        ConfigError: See `refuse_taken`.
    """

    def write(temporary: Path) -> dict[str, Any]:
        write_model(model, temporary, max_bytes)
        return source | {"format": "safetensors", "refused": ["the model is in parts"]}

    return _make_folder(folder, write, overwrite)


def _make_folder(folder: Path, write: Callable[[Path], dict[str, Any]], overwrite: bool) -> dict[str, Any]:
    """Makes the folder of an export, of which `write` writes the files and returns a part of `export.json`.

    A folder that is replaced is missing for a moment.
    """
    refuse_taken(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp" for _ in range(2))
    temporary.mkdir()
    try:
        described = write(temporary)
        described |= {"files": _digests(temporary)}
        (temporary / EXPORT).write_text(to_json(described, indent=1))
        refuse_taken(folder, overwrite)
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except BaseException:
            if old.exists():
                os.rename(old, folder)
            raise
    finally:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return described


def load_model(folder: str | Path, trust: bool = False) -> ModelPredictor:
    """Loads an exported model, or a downloaded version of a registered one, on the CPU, without Ray and MLflow.

    Args:
        folder: The folder of the export.
        trust: Whether code of the export may run. The package of a model that `torch.export` refused, one without
            `model.pt2`, is code: its Python files, and the functions that its settings name. Others run none.

    Returns:
        A `ModelPredictor`: its `predict` takes images, rows or texts, its `module` takes and returns tensors.

    Raises:
        ConfigError: The folder has no such model, or it is code, without `trust`.
        RegistryError: Its files differ from those that were written.
        ValueError: The package requires unpickling, or another module with the name of one of its modules is imported.
    """
    data, described = check_export(Path(folder).expanduser())
    encoding = described.get("encoding")
    if described["format"] == "safetensors":
        _trust(data, trust, loader.UNTRUSTED)
    module, settings = loader.load(data, trust), encoding["settings"] if encoding else None
    return make_predictor(data, described, loader.Predictor(module, described["inputs"], settings, encode_raw_rows))


def load_for_training(folder: str | Path, trust: bool = False) -> tuple[Task, nn.Module]:
    """Restores task and model of an export in plain PyTorch to continue training, without Ray and MLflow.

    Args:
        folder: The folder of the export.
        trust: Whether code that the export names may run: the class of the task, unless it is one of ray_app, and the
            models, losses and transforms that its settings name by import paths.

    Returns:
        The prepared task, and its model with the exported parameters, on the CPU and in training mode.

    Raises:
        ConfigError: The folder has no such model, or the class of its task cannot be imported; or it names code,
            without `trust`.
        RegistryError: Its files differ from those that were written, or lack the settings of the task.
    """
    data, described = check_export(Path(folder).expanduser())
    stored = described["task"]
    if stored["settings"] is None:
        raise RegistryError(f"{folder} lacks the settings of its task: JSON cannot store them, or one is a secret.")
    if names_code(stored):
        _trust(data, trust, f"the task is {stored['class_path']}, {_NAMES_CODE}")
    task = _import_task_class(stored["class_path"]).from_settings(stored["settings"])
    model = task.build_model()
    model.load_state_dict(load_parameters(data))
    return task, model.train()


def read_rows(task: Task, path: str) -> Batch:
    """Reads a whole data set in this process as the batch that a task's model takes, without Ray and MLflow.

    Args:
        task: A prepared task.
        path: Folder or file of Parquet with the columns of the training data, on a disk or in a bucket.

    Returns:
        A tensor for each decoded field, its first axis the rows.

    Raises:
        DataError: The data does not exist, the task cannot use it, or a row cannot be decoded.
    """
    return to_batch(read_decoded(task, path))


def check_export(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Compares all files of an export with `export.json`; returns the folder with `package.json` and its content.

    Raises:
        ConfigError: The folder has no `package.json`.
        RegistryError: A file is missing, or differs.
    """
    data = folder / "data" / "model"
    if not (data / loader.DESCRIPTION).is_file():
        raise ConfigError(
            f"{folder} is not an exported model: data/model/{loader.DESCRIPTION} is missing. ray-app export writes one"
            " from a run."
        )
    origin = read_origin(folder)
    if origin is not None:
        digests = _digests(folder)
        wrong = sorted(name for name, digest in origin["files"].items() if digests.get(name) != digest)
        if wrong:
            raise RegistryError(f"{folder} is damaged: {', '.join(wrong)} changed since the export.")
    described = _read_object(
        data / loader.DESCRIPTION, {"format": str, "inputs": list, "params_digest": str, "task": dict}
    )
    if not {"class_path", "settings"} <= described["task"].keys():
        raise RegistryError(f"{data / loader.DESCRIPTION} is damaged: the model's task is missing.")
    try:
        loader.check_inputs(described["inputs"])
    except ValueError as error:
        raise RegistryError(f"{data / loader.DESCRIPTION} is damaged: {error}.") from error
    return data, described


def _trust(data: Path, trust: bool, reason: str) -> None:
    """Makes the code of a package importable; raises ConfigError without `trust`."""
    if not trust:
        raise ConfigError(f"{data.parents[1]} is refused, and none of its code was executed: {reason}")
    code = str((data.parents[1] / "code").resolve())
    if code not in sys.path:
        sys.path.append(code)


def read_origin(folder: Path) -> dict[str, Any] | None:
    """Returns the content of `export.json`, None if there is none; raises RegistryError if it is damaged."""
    file, fields = folder / EXPORT, {"run": str, "step": int, "params_digest": str, "files": dict}
    return _read_object(file, fields) if file.is_file() else None


def _read_object(file: Path, fields: dict[str, type]) -> dict[str, Any]:
    """Reads a JSON object with required fields."""
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise RegistryError(f"{file} is damaged: {error}.") from error
    values = content if isinstance(content, dict) else {}
    wrong = sorted(name for name, kind in fields.items() if not isinstance(values.get(name), kind))
    if wrong:
        raise RegistryError(f"{file} is damaged: {', '.join(wrong)} is missing or invalid.")
    return content


def _import_task_class(class_path: str) -> type[Task]:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The task's class {class_path} cannot be imported here: {error}. Put its file on PYTHONPATH."
        ) from error


def _digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of a folder except `export.json` and Python's bytecode, by relative path."""
    files = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.suffix != ".pyc" and f.name != EXPORT)
    return {file.relative_to(folder).as_posix(): sha256(file) for file in files}


_FILES = {"torch.export": loader.EXPORTED, "safetensors": loader.WEIGHTS}


@dataclass(frozen=True)
class Packaged:
    """A packaged model.

    Args:
        format: The format of its model: `torch.export` or `safetensors`.
        inputs: Name, dtype and shape of one row of every input.
        weights: Content of `model.pt2` or `model.safetensors`.
    """

    called: str
    source: dict[str, Any]
    format: str
    inputs: list[dict[str, Any]]
    params_digest: str
    class_path: str
    settings: dict[str, Any]
    weights: bytes


def fetch_package(uri: str, model: str) -> Packaged:
    """Downloads `models:/NAME@ALIAS` or `models:/NAME/VERSION`; raises ConfigError if ray_app did not package it."""
    version = resolve_version(uri, model)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            folder = download_version(uri, version, Path(temporary))
        except RegistryError as error:
            raise ConfigError(str(error)) from error
        source = {"name": version.name, "version": version.version}
        return _read_package(folder, f"{version.name} version {version.version}", source, version.params_digest)


def is_export(model: str) -> bool:
    """Whether a text names the folder of an exported model, or of a downloaded version."""
    return (Path(model).expanduser() / "data" / "model" / loader.DESCRIPTION).is_file()


def read_export(folder: str) -> Packaged:
    """Reads an export, or a downloaded version; raises ConfigError for others, RegistryError for changed files."""
    path = Path(folder).expanduser()
    data, described = check_export(path)
    origin = read_origin(path)
    source = {"run": origin["run"], "step": origin["step"]} if origin else {"folder": path.resolve().name}
    return _read_package(data, folder, source, (origin or described)["params_digest"])


def _read_package(data: Path, called: str, source: dict[str, Any], digest: str) -> Packaged:
    """Reads a package from its folder with `package.json`, without loading its parameters."""
    try:
        described = loader.describe(data)
        stored, form = described["task"], described["format"]
        if not isinstance(stored["settings"], dict):
            raise KeyError("the settings of its task")
        weights = (data / _FILES[form]).read_bytes()
        class_path, settings = stored["class_path"], stored["settings"]
        return Packaged(called, source, form, described["inputs"], digest, class_path, settings, weights)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{called} cannot predict, because its package lacks {error}: it was written by another program or an older"
            " version of ray_app, or its task has settings that JSON cannot store or that are secret. Use --predict.run"
            " with its run, or register the run again."
        ) from error


def exported_module(exported: torch.export.ExportedProgram, device: torch.device) -> nn.Module:
    """Returns the module of an exported program on a device.

    `Module.to` would move only the parameters: operations of the graph that make a tensor, such as `arange`, keep the
    device of the export, and the module checks that its inputs are on it.
    """
    from torch.export.passes import move_to_device_pass

    return (move_to_device_pass(exported, device) if not kind_of(device).is_host else exported).module()
