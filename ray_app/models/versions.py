"""Versions of a registered model: what is known of one, its package, its parameters, and more tags."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ray_app.checkpoint.format import params_digest
from ray_app.errors import ConfigError, RegistryError
from ray_app.models import loader
from ray_app.models.registry import PARAMS_DIGEST, champion_of
from ray_app.record.redact import redact
from ray_app.track.client import connect

_TAG_CHARS = 5000
_URI = re.compile(r"models:/([^/@]+)(?:@([\w-]+)|/(\d+))")


@dataclass(frozen=True)
class Version:
    """A version of a registered model.

    Args:
        name: Name of the model.
        version: Its number.
        run_id: The MLflow run that it comes from.
        source: Where its files are.
        tags: What is known of it.
    """

    name: str
    version: str
    run_id: str
    source: str
    tags: dict[str, str]

    @property
    def params_digest(self) -> str:
        """Digest of its parameters; empty if it was not registered by this application."""
        return self.tags.get(PARAMS_DIGEST, "")

    @property
    def age_days(self) -> float | None:
        """Days since it was promoted; None if it was not."""
        at = self.tags.get("ray_app.promoted_at")
        return None if at is None else (time.time() - datetime.fromisoformat(at).timestamp()) / 86400


def version_of(client: Any, name: str, version: str) -> Version:
    """What MLflow knows of a version."""
    found = client.get_model_version(name, version)
    return Version(name, str(version), found.run_id, found.source, dict(found.tags))


def tagged(client: Any, name: str, tag: str, value: str) -> list[str]:
    """The versions of a model that have a tag of this value; none if there is no such model."""
    return [str(v.version) for v in client.search_model_versions(f"name = '{name}'") if v.tags.get(tag) == value]


def champion(client: Any, name: str) -> Version | None:
    """The version that serves, or None."""
    serves = champion_of(client, name)
    return None if serves is None else version_of(client, name, serves)


def named(uri: str, model: str) -> Version:
    """The version that a text names.

    Args:
        uri: MLflow tracking URI; nobody is asked if the text names none.
        model: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        ConfigError: It names none, or MLflow has no such version.
        Exception: Whatever else MLflow raises, mostly because it cannot be reached.
    """
    from mlflow.exceptions import MlflowException

    match = _URI.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"The model is {model!r}; it must be models:/NAME@ALIAS or models:/NAME/VERSION, as models:/m@champion, or the folder of an"
            " export."
        )
    name, alias, version = match.groups()
    client = connect(uri)
    try:
        return version_of(client, name, version or str(client.get_model_version_by_alias(name, alias).version))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(
            f"MLflow has no {model}: {error.message} `mlflow ui` shows what there is; ray-app register adds to it."
        ) from error


def fetch(uri: str, version: Version, folder: Path) -> Path:
    """Downloads a version's model, but not the code that it brings along; returns the folder with `package.json`.

    Args:
        uri: Tracking URI.
        version: Which one.
        folder: An empty folder to download into.

    Raises:
        RegistryError: It is none of this application.
        Exception: Whatever MLflow raises, mostly because it cannot be reached.
    """
    from mlflow.artifacts import download_artifacts

    if not version.params_digest:
        raise RegistryError(
            f"Version {version.version} of {version.name!r} was not packaged by ray_app. Give or promote a version that"
            " ray-app register, or a run with tracking.registered_model, has made."
        )
    return Path(download_artifacts(artifact_uri=f"{version.source}/data/model", dst_path=str(folder), tracking_uri=uri))


def parameters(folder: Path) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a package, of either format, by their names in the model.

    Args:
        folder: The folder with `package.json`.

    Raises:
        RegistryError: They are not those that were packaged.
    """
    described = loader.describe(folder)
    if (folder / loader.WEIGHTS).exists():
        found = safetensors.torch.load_file(folder / loader.WEIGHTS)
    else:
        state: Mapping[str, Tensor] = loader.load_exported(folder / loader.EXPORTED).state_dict
        found = {name.removeprefix("model."): values.detach().clone().contiguous() for name, values in state.items()}
    if params_digest(found) != described["params_digest"]:
        raise RegistryError(f"{folder} holds other parameters than it says: {params_digest(found)}, not {described['params_digest']}.")
    return found


def tag(client: Any, version: Version, tags: dict[str, str]) -> None:
    """Adds tags to a version; those that are there already are written over."""
    for name, value in tags.items():
        client.set_model_version_tag(version.name, version.version, name, redact(value)[:_TAG_CHARS])


def tag_model(client: Any, name: str, tags: dict[str, str]) -> None:
    """Adds tags to a registered model; if there is none of that name yet, there is nothing to add them to."""
    from mlflow.exceptions import MlflowException

    try:
        for key, value in tags.items():
            client.set_registered_model_tag(name, key, redact(value)[:_TAG_CHARS])
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def log_figures(client: Any, version: Version, figures: dict[str, float], time_s: float) -> None:
    """Adds metrics to the MLflow run of a version; logged again with the same time they are there once.

    Args:
        client: MLflow's client.
        version: Which one.
        figures: Value by name.
        time_s: When they were found, seconds since 1970 (UTC).
    """
    from mlflow.entities import Metric

    client.log_batch(version.run_id, [Metric(name, value, int(time_s * 1000), 0) for name, value in figures.items()])
