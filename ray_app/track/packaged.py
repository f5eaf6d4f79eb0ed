"""A version of a registered model, or an export, as what a prediction needs; nothing of it is executed or unpickled here."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.errors import ConfigError
from ray_app.record.files import read_json
from ray_app.track import loader
from ray_app.track.client import connect
from ray_app.track.exported import EXPORT, checked
from ray_app.track.registry import PARAMS_DIGEST

_URI = re.compile(r"models:/([^/@]+)(?:@([\w-]+)|/(\d+))")
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
    wanted = _parsed(model)
    client = connect(uri)
    version = _version(client, model, *wanted)
    root = str(client.get_run(version.run_id).info.artifact_uri)
    with tempfile.TemporaryDirectory() as temporary:
        place = str(version.source).removeprefix(root).strip("/") + "/data/model"
        folder = Path(client.download_artifacts(version.run_id, place, temporary))
        source = {"name": version.name, "version": str(version.version)}
        return _read(folder, f"{version.name} version {version.version}", source, version.tags.get(PARAMS_DIGEST, ""))


def is_export(model: str) -> bool:
    """Whether a text names the folder of an exported model, or of a downloaded version."""
    return (Path(model) / "data" / "model" / loader.DESCRIPTION).is_file()


def read_export(folder: str) -> Packaged:
    """Reads an exported model, or a downloaded version of a registered one.

    Raises:
        ConfigError: It is no folder of ours.
        RegistryError: Its files are not those that were exported.
    """
    said = read_json(Path(folder) / EXPORT) or {}
    source = {"run": said["run"], "step": said["step"]} if said else {"folder": Path(folder).resolve().name}
    return _read(checked(Path(folder)), folder, source, said.get("params_digest"))


def _read(data: Path, called: str, source: dict[str, Any], digest: str | None) -> Packaged:
    """A package from its folder with `package.json`; without a digest from elsewhere it is held to its own."""
    try:
        described = loader.describe(data)
        made, form = described["task"], described["format"]
        if made["settings"] is None:
            raise KeyError("the settings of its task")
        weights = (data / _FILES[form]).read_bytes()
        digest = described["params_digest"] if digest is None else digest
        return Packaged(called, source, form, described["inputs"], digest, made["class_path"], made["settings"], weights)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{called} cannot be predicted with, its package lacks {error}: it comes from something else, from an older version of ray_app,"
            " or its task has settings that JSON does not keep or that are secret. Use --predict.run with the run that it came from, or"
            " register that again."
        ) from error


def _parsed(model: str) -> tuple[str, str | None, str | None]:
    """Name, alias and version; one of the latter two is None."""
    match = _URI.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"predict.model is {model!r}; it must be models:/NAME@ALIAS or models:/NAME/VERSION, as models:/m@champion, or"
            " the folder of an export."
        )
    return match[1], match[2], match[3]


def _version(client: Any, model: str, name: str, alias: str | None, version: str | None) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(
            f"MLflow has no {model}: {error.message} `mlflow ui` shows what there is; jobs/register.py adds to it."
        ) from error
