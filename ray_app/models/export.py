"""A trained model in a folder of its own, without a registry: how it is written, and how it is used on a machine
without Ray.

::

    code/  data/model/                         see `package_files`, as in a version of the registry
    export.json                                where it comes from, and the SHA-256 of every other file

A version of a registered model, or an export, as what a prediction needs; nothing of it is executed or unpickled here.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from ray_app.data.dataset import open_dataset
from ray_app.data.local_readers import load_all
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, RowSource, fetch_in_process, rows_per_task
from ray_app.errors import ConfigError, RegistryError
from ray_app.models import loader
from ray_app.models.package import write_files
from ray_app.models.registry import download_version, load_parameters, resolve_version
from ray_app.storage.files import to_json
from ray_app.task.base import Batch, Task, WithoutTargets
from ray_app.task.ragged import Arrays, to_batch
from ray_app.task.schema import refuse_other_schema
from ray_app.task.user_code import user_code

EXPORT = "export.json"
_READ_MB = 64.0


def refuse_taken(folder: Path, overwrite: bool) -> None:
    """Refuses a folder for an export that must not be replaced.

    Raises:
        ConfigError: It is there, without `overwrite`; or it is no export.
    """
    if not (folder.exists() or folder.is_symlink()):
        return
    if not overwrite:
        raise ConfigError(
            f"{folder} is there already. Give another folder, or --overwrite true if it is an export to be replaced."
        )
    if not (folder / EXPORT).is_file():
        raise ConfigError(f"{folder} holds no {EXPORT}, so it is no export, and is not replaced. Give another folder.")


def write_export(
    task: Task,
    model: nn.Module,
    example: dict[str, npt.NDArray],
    folder: Path,
    source: dict[str, Any],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a model to a folder, which is there whole or not at all; one that is replaced is away for a moment.

    Args:
        task: See `write_files`.
        model: See `write_files`.
        example: See `write_files`.
        folder: Where to.
        source: Where the model comes from, for `export.json`.
        overwrite: Replace an export that is there.

    Returns:
        The content of `export.json`.

    Raises:
        ConfigError: See `refuse_taken`.
        RegistryError: It can be stored in no way without pickle; the message says why.
    """
    refuse_taken(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp" for _ in range(2))
    temporary.mkdir()
    try:
        files = write_files(task, model, example, temporary)
        with user_code(lambda: "writing an export"):
            task.export_files(model, temporary)
        stored = {
            "format": files.format,
            "outputs": files.outputs,
            "refused": list(files.refused),
            "libraries": sorted(files.libraries),
        }
        described = source | stored | {"files": _digests(temporary)}
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
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)
    return described


def load_model(folder: str | Path) -> loader.Predictor:
    """Loads an exported model, or a downloaded version of a registered one, on the CPU; needs neither Ray nor MLflow.

    A model that `torch.export` refused brings Python files along, which are run: load those only if you trust them.

    Args:
        folder: The folder of the export.

    Returns:
        A `Predictor`, whose `predict` takes and returns arrays and whose `module` takes and returns tensors.

    Raises:
        ConfigError: The folder holds no such model.
        RegistryError: Its files are not those that were written.
        ValueError: It asks for code to be unpickled, or another module of the name of one of its own is imported.
    """
    data, described = check_export(Path(folder).expanduser())
    return loader.Predictor(loader.load(data), described["inputs"])


def load_for_training(folder: str | Path) -> tuple[Task, nn.Module]:
    """Makes task and model of an export again in plain PyTorch, to train on from its parameters; needs neither Ray nor
    MLflow.

    It imports the class of the task by its name: do this only with an export that you trust.

    Args:
        folder: See `load_model`.

    Returns:
        The prepared task, and its model with the exported parameters, on the CPU and in training mode.

    Raises:
        ConfigError: The folder holds no such model, or the class of its task cannot be imported here.
        RegistryError: Its files are not those that were written, or do not say how to make the task again.
    """
    data, described = check_export(Path(folder).expanduser())
    made = described["task"]
    if made["settings"] is None:
        raise RegistryError(
            f"{folder} does not hold the settings of its task: JSON does not keep them, or one is a secret."
        )
    task = _import_task_class(made["class_path"]).from_settings(made["settings"])
    model = task.build_model()
    model.load_state_dict(load_parameters(data))
    return task, model.train()


def read_rows(task: Task, path: str) -> Batch:
    """Reads a data set as a task's model takes it, whole, in this process; needs neither Ray nor MLflow.

    Args:
        task: A prepared task.
        path: Folder (or file) of Parquet with the columns of the training data, on a disk or S3.

    Returns:
        A tensor for each decoded field, its first axis the rows.

    Raises:
        DataError: It is not there, the task cannot use it, or a row cannot be decoded.
    """
    return to_batch(read_decoded(task, path))


def read_decoded(task: Task, path: str, targets: bool = True) -> Arrays:
    """Decodes a data set, whole, in this process; see `read_rows`.

    Args:
        task, path: See `read_rows`.
        targets: Whether it has the columns that `Task.targets` names; otherwise what is decoded of them is of zeros.
    """
    dataset, unread = open_dataset(path), WithoutTargets(task)
    columns, decode = (task.columns(), task.decode) if targets else (unread.columns, unread)
    refuse_other_schema(task.data_schema, dataset.facts, path, "what the model was trained on")
    if targets:
        task.prepare(dataset.facts)
    fields = probe(dataset, columns, decode)
    reader = Reader(dataset.root, columns, decode, fields, partitions=dataset.manifest.partitions)
    return load_all(fetch_in_process, RowSource(reader, dataset.manifest, rows_per_task(fields, _READ_MB))).arrays


def check_export(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder with `package.json` and its content, after all files were compared with `export.json`; code becomes
    importable.

    Raises:
        ConfigError: There is none.
        RegistryError: A file is missing, or is another.
    """
    data = folder / "data" / "model"
    if not (data / loader.DESCRIPTION).is_file():
        raise ConfigError(
            f"{folder} holds no data/model/{loader.DESCRIPTION}: it is no exported model. ray-app export makes one of a"
            " run."
        )
    said = read_origin(folder)
    if said is not None:
        found = _digests(folder)
        wrong = sorted(name for name, digest in said["files"].items() if found.get(name) != digest)
        if wrong:
            raise RegistryError(
                f"{folder} is damaged: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not what was exported."
            )
    described = _read_object(
        data / loader.DESCRIPTION, {"format": str, "inputs": list, "params_digest": str, "task": dict}
    )
    if not {"class_path", "settings"} <= described["task"].keys():
        raise RegistryError(f"{data / loader.DESCRIPTION} is damaged: it does not say which task the model is of.")
    code = str((folder / "code").resolve())
    if described["format"] == "safetensors" and code not in sys.path:
        sys.path.append(code)
    return data, described


def read_origin(folder: Path) -> dict[str, Any] | None:
    """The content of `export.json`; None if there is none, as in a downloaded version.

    Raises:
        RegistryError: It is damaged.
    """
    place = folder / EXPORT
    return (
        _read_object(place, {"run": str, "step": int, "params_digest": str, "files": dict}) if place.is_file() else None
    )


def _read_object(file: Path, fields: dict[str, type]) -> dict[str, Any]:
    """The JSON object in a file, which has some fields."""
    try:
        said = json.loads(file.read_text())
    except ValueError as error:
        raise RegistryError(f"{file} is damaged: {error}.") from error
    wrong = sorted(
        name for name, kind in fields.items() if not isinstance(said, dict) or not isinstance(said.get(name), kind)
    )
    if wrong:
        raise RegistryError(f"{file} is damaged: it does not say {', '.join(wrong)}.")
    return said


def _import_task_class(class_path: str) -> type[Task]:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The task's class {class_path} cannot be imported here: {error}. Put its file on PYTHONPATH."
        ) from error


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder but `export.json` and what Python makes of code when it is run."""
    files = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.suffix != ".pyc" and f.name != EXPORT)
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


_FILES = {"torch.export": loader.EXPORTED, "safetensors": loader.WEIGHTS}


@dataclass(frozen=True)
class Packaged:
    """A packaged model.

    Args:
        called: What it is called in messages.
        source: Name and version, or the run and the step that it was exported from.
        format: How it is stored: `torch.export` or `safetensors`.
        inputs: Name, dtype and shape of one row of every input.
        params_digest: Digest of the parameters that were registered.
        class_path: Class of the task.
        settings: Settings of the prepared task.
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
    """Downloads a version.

    Args:
        uri: MLflow tracking URI.
        model: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        ConfigError: There is no such version, or its files are none of ours.
        Exception: Whatever MLflow raises, mostly because it cannot be reached.
    """
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
    """Reads an exported model, or a downloaded version of a registered one.

    Raises:
        ConfigError: It is no folder of ours.
        RegistryError: Its files are not those that were exported.
    """
    place = Path(folder).expanduser()
    data, described = check_export(place)
    said = read_origin(place)
    source = {"run": said["run"], "step": said["step"]} if said else {"folder": place.resolve().name}
    return _read_package(data, folder, source, (said or described)["params_digest"])


def _read_package(data: Path, called: str, source: dict[str, Any], digest: str) -> Packaged:
    """A package from its folder with `package.json`, whose parameters must have a digest."""
    try:
        described = loader.describe(data)
        made, form = described["task"], described["format"]
        if made["settings"] is None:
            raise KeyError("the settings of its task")
        weights = (data / _FILES[form]).read_bytes()
        return Packaged(
            called, source, form, described["inputs"], digest, made["class_path"], made["settings"], weights
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{called} cannot be predicted with, its package lacks {error}: it comes from something else, from an older"
            " version of ray_app, or its task has settings that JSON does not keep or that are secret. Use"
            " --predict.run with the run that it came from, or register that again."
        ) from error


def exported_module(exported: torch.export.ExportedProgram, device: torch.device) -> nn.Module:
    """Returns the module of an exported program on a device.

    `Module.to` would move the parameters alone: the operations of the graph that make a tensor, such as `arange`, keep
    the device that they were exported on, and the module checks that its inputs are there.
    """
    from torch.export.passes import move_to_device_pass

    return (move_to_device_pass(exported, device) if device.type != "cpu" else exported).module()
