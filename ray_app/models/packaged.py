"""A version of a registered model, or an export, as what a prediction needs; nothing of it is executed or unpickled here."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.errors import ConfigError, RegistryError
from ray_app.models import loader
from ray_app.models.exported import checked, origin
from ray_app.models.versions import fetch, named

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
    version = named(uri, model)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            folder = fetch(uri, version, Path(temporary))
        except RegistryError as error:
            raise ConfigError(str(error)) from error
        source = {"name": version.name, "version": version.version}
        return _read(folder, f"{version.name} version {version.version}", source, version.params_digest)


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
    data, described = checked(place)
    said = origin(place)
    source = {"run": said["run"], "step": said["step"]} if said else {"folder": place.resolve().name}
    return _read(data, folder, source, (said or described)["params_digest"])


def _read(data: Path, called: str, source: dict[str, Any], digest: str) -> Packaged:
    """A package from its folder with `package.json`, whose parameters must have a digest."""
    try:
        described = loader.describe(data)
        made, form = described["task"], described["format"]
        if made["settings"] is None:
            raise KeyError("the settings of its task")
        weights = (data / _FILES[form]).read_bytes()
        return Packaged(called, source, form, described["inputs"], digest, made["class_path"], made["settings"], weights)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{called} cannot be predicted with, its package lacks {error}: it comes from something else, from an older version of ray_app,"
            " or its task has settings that JSON does not keep or that are secret. Use --predict.run with the run that it came from, or"
            " register that again."
        ) from error
