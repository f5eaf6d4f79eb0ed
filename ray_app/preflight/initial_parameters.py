"""Initial parameters from `train.init_from`: read and checked before the first start of a run, then stored with it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ray_app.checkpoint.format import params_digest
from ray_app.config.config import Config, default_tracking_uri
from ray_app.errors import ConfigError
from ray_app.models.export import is_export
from ray_app.models.loader import DESCRIPTION, WEIGHTS
from ray_app.models.registry import download_version, load_parameters, resolve_version
from ray_app.runlog.redaction import redact
from ray_app.storage.files import read_json, to_location
from ray_app.task.schema import named_classes
from ray_app.train.state.parameters import check_parameters_digest, read_parameters, unreadable_parameters_error

_REGISTRY_SCHEME = "models:/"
_MODEL_ARGUMENTS = ("model", "model_args", "module", "detector")
"""Arguments of tasks that declare the model."""
_PRETRAINED_ARGUMENTS = ("weights", "weights_backbone", "pretrained")
"""Arguments of models (torchvision, timm) that request pretrained parameters."""


@dataclass(frozen=True)
class InitialParameters:
    """The initial parameters of a run.

    Args:
        config: The configuration, with the digest of the parameters of `train.init_from`.
        params: The parameters; None without `train.init_from`, or if the existing run has stored them.
        classes: Names of the classes that they were trained on, if they come from a model package with class names.
    """

    config: Config
    params: dict[str, Tensor] | None = None
    classes: Sequence[str] | None = None


def load_initial_parameters(config: Config, before: Config | None) -> InitialParameters:
    """Reads the parameters of `train.init_from`, unless the run exists and has stored them at its first start.

    Args:
        config: The configuration of this start.
        before: The stored configuration, if the run exists.

    Raises:
        ConfigError: The parameters cannot be read, or do not have the digest `train.init_digest`.
    """
    if config.train.init_from is None:
        return InitialParameters(config)
    source = _normalize_source(config.train.init_from)
    config = config.replace(train__init_from=source)
    if before is not None and before.train.init_from == source:
        return InitialParameters(
            config.replace(train__init_digest=config.train.init_digest or before.train.init_digest)
        )
    if source.startswith(_REGISTRY_SCHEME):
        params, classes = _fetch_registered(config, source)
    else:
        try:
            params = read_parameters(source, None)
        except OSError as error:
            # An error of the storage refuses the start, unlike errors later in the run.
            raise unreadable_parameters_error(source, error) from error
        classes = _read_package_classes(source)
    check_parameters_digest(params, source, config.train.init_digest)
    return InitialParameters(config.replace(train__init_digest=params_digest(params)), params, classes)


def replaced_weights_warnings(config: Config) -> list[str]:
    """Returns warnings about pretrained parameters of a model that `train.init_from` replaces."""
    if config.train.init_from is None:
        return []
    arguments = config.task.init_args
    names = [
        name for key in _MODEL_ARGUMENTS for name in _pretrained_arguments(arguments.get(key), f"task.init_args.{key}")
    ]
    return [f"{name} has no effect: the parameters are those of train.init_from. Set it to null." for name in names]


def _pretrained_arguments(value: Any, name: str) -> list[str]:
    """Returns the names of the arguments that request pretrained parameters, at any depth of `value`."""
    if isinstance(value, list):
        return [argument for i, item in enumerate(value) for argument in _pretrained_arguments(item, f"{name}[{i}]")]
    if not isinstance(value, dict):
        return []
    names = [
        f"{name}.{key}" for key in _PRETRAINED_ARGUMENTS if isinstance(value.get(key), str) or value.get(key) is True
    ]
    for key, item in value.items():
        names += _pretrained_arguments(item, f"{name}.{key}")
    return names


def _normalize_source(source: str) -> str:
    """Returns the name of a registered model, or the absolute path of a file, since a run may be resumed elsewhere."""
    if source.startswith(_REGISTRY_SCHEME):
        return source
    return str(to_location(source) / "data" / "model" / WEIGHTS if is_export(source) else to_location(source))


def _read_package_classes(source: str) -> Sequence[str] | None:
    """Returns the class names of the model package that a file of parameters belongs to, or None if there are none."""
    file = to_location(source)
    if not isinstance(file, Path):
        return None
    try:
        description = read_json(file.parent / DESCRIPTION)
    except ValueError:
        # Another program has written a file of the same name.
        return None
    return named_classes(description.get("classes") or []) if isinstance(description, dict) else None


def _fetch_registered(config: Config, model: str) -> tuple[dict[str, Tensor], Sequence[str] | None]:
    """Downloads a registered model and returns its parameters and class names."""
    uri = default_tracking_uri(config)
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = download_version(uri, resolve_version(uri, model), Path(folder))
            return load_parameters(data), _read_package_classes(str(data / WEIGHTS))
    except ConfigError:
        raise
    except Exception as error:  # MLflow raises many types of errors, mostly because it cannot be reached.
        raise ConfigError(
            f"train.init_from {model!r} cannot be had from {redact(uri)}: {type(error).__name__}: {error}. Check"
            " tracking.uri, or name model.safetensors of an export."
        ) from error
