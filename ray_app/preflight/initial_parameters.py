"""The parameters that a run begins with where it does not draw them: found before its first start, and from then on
kept with the run.
"""

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
"""Arguments of tasks that say how a model is made."""
_PRETRAINED_ARGUMENTS = ("weights", "weights_backbone", "pretrained")
"""Arguments of models (torchvision, timm) that ask for pretrained parameters."""


@dataclass(frozen=True)
class InitialParameters:
    """What a run begins with.

    Args:
        config: The configuration, with the digest of the parameters that `train.init_from` names.
        params: These parameters; None, if there are none, or the run exists and has them.
        classes: Names of the classes that they were trained on, if a model's package says so.
    """

    config: Config
    params: dict[str, Tensor] | None = None
    classes: Sequence[str] | None = None


def load_initial_parameters(config: Config, before: Config | None) -> InitialParameters:
    """Finds out what `train.init_from` names, unless the run exists and began with it.

    Args:
        config: As the user gave it.
        before: That of the run as it is.

    Raises:
        ConfigError: There are none.
    """
    if config.train.init_from is None:
        return InitialParameters(config)
    place = _normalize_source(config.train.init_from)
    config = config.replace(train__init_from=place)
    if before is not None and before.train.init_from == place:
        return InitialParameters(
            config.replace(train__init_digest=config.train.init_digest or before.train.init_digest)
        )
    found, classes = (
        _fetch_registered(config, place)
        if place.startswith(_REGISTRY_SCHEME)
        else (_read_file(place), _read_package_classes(place))
    )
    check_parameters_digest(found, place, config.train.init_digest)
    return InitialParameters(config.replace(train__init_digest=params_digest(found)), found, classes)


def replaced_weights_warnings(config: Config) -> list[str]:
    """What to say of pretrained parameters that a model is made with, and that `train.init_from` replaces."""
    if config.train.init_from is None:
        return []
    given = config.task.init_args
    names = [
        name for key in _MODEL_ARGUMENTS for name in _pretrained_arguments(given.get(key), f"task.init_args.{key}")
    ]
    return [f"{name} has no effect: the parameters are those of train.init_from. Set it to null." for name in names]


def _pretrained_arguments(given: Any, place: str) -> list[str]:
    """Where arguments ask for pretrained parameters."""
    if isinstance(given, list):
        return [name for i, one in enumerate(given) for name in _pretrained_arguments(one, f"{place}[{i}]")]
    if not isinstance(given, dict):
        return []
    own = [
        f"{place}.{key}" for key in _PRETRAINED_ARGUMENTS if isinstance(given.get(key), str) or given.get(key) is True
    ]
    return own + [name for key, one in given.items() for name in _pretrained_arguments(one, f"{place}.{key}")]


def _normalize_source(given: str) -> str:
    """A registered model, or a file; a run may be continued from another folder."""
    if given.startswith(_REGISTRY_SCHEME):
        return given
    return str(to_location(given) / "data" / "model" / WEIGHTS if is_export(given) else to_location(given))


def _read_file(place: str) -> dict[str, Tensor]:
    """A storage that does not answer refuses the start; later it is a failure like others."""
    try:
        return read_parameters(place, None)
    except OSError as error:
        raise unreadable_parameters_error(place, error) from error


def _read_package_classes(place: str) -> Sequence[str] | None:
    """Names of the classes of the package that a file of parameters is part of; None, if it is part of none, or these
    have no names.
    """
    file = to_location(place)
    if not isinstance(file, Path):
        return None
    try:
        described = read_json(file.parent / DESCRIPTION)
    except ValueError:  # a file of the same name of another program
        return None
    return named_classes(described.get("classes") or []) if isinstance(described, dict) else None


def _fetch_registered(config: Config, model: str) -> tuple[dict[str, Tensor], Sequence[str] | None]:
    uri = default_tracking_uri(config)
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = download_version(uri, resolve_version(uri, model), Path(folder))
            return load_parameters(data), _read_package_classes(str(data / WEIGHTS))
    except ConfigError:
        raise
    except Exception as error:  # whatever MLflow raises, mostly because it cannot be reached
        raise ConfigError(
            f"train.init_from {model!r} cannot be had from {redact(uri)}: {type(error).__name__}: {error}. Check"
            f" tracking.uri, or name"
            " model.safetensors of an export."
        ) from error
