"""The configuration: frozen dataclasses, one per section, and their digest.

Fields that change the resulting parameters are made with `result(...)`; the digest of a run covers those that differ
from their default, so a new field at its default never changes a digest.

The home folder in paths: what a shell makes of `~` where it reads a path itself, and nobody makes of it in a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ray_app.config.import_paths import OptimizerSpec, TurnSpec
from ray_app.config.sections import (
    CheckpointSection,
    ClassSpec,
    DataSection,
    EvaluateSection,
    FailureSection,
    RunSection,
    ScalingSection,
    TrackingSection,
    TrainSection,
    result_field,
)
from ray_app.errors import ConfigError, RunExistsError

_SQLITE = "sqlite:///"


def expand_home(value: Any) -> Any:
    """A value of a configuration with `~/...` and `~user/...` replaced by the home folder, also inside lists and
    mappings.

    A lone `~` stays: in arguments of a class it may be any text, and a path of it is expanded where it is opened.
    """
    if isinstance(value, dict):
        return {name: expand_home(one) for name, one in value.items()}
    if isinstance(value, list):
        return [expand_home(one) for one in value]
    if not isinstance(value, str):
        return value
    if value.startswith(f"{_SQLITE}~/"):
        return _SQLITE + os.path.expanduser(value.removeprefix(_SQLITE))
    return os.path.expanduser(value) if value.startswith("~") and "/" in value else value


SECTIONS: dict[str, type] = {
    "run": RunSection,
    "scaling": ScalingSection,
    "data": DataSection,
    "train": TrainSection,
    "checkpoint": CheckpointSection,
    "failure": FailureSection,
    "evaluate": EvaluateSection,
    "tracking": TrackingSection,
}


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    task: ClassSpec = result_field(ClassSpec(""))
    optimizer: OptimizerSpec = result_field(OptimizerSpec("torch.optim.Adam"))
    optimizers: dict[str, TurnSpec] | None = result_field(None)
    schedule: ClassSpec | None = result_field(None)
    observers: list[ClassSpec] | None = None
    seed: int = result_field(0)
    run: RunSection = RunSection()
    scaling: ScalingSection = ScalingSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    failure: FailureSection = FailureSection()
    evaluate: EvaluateSection = EvaluateSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def logical_workers(self) -> int:
        """L: the number of data-parallel replicas of the arithmetic."""
        return self.scaling.logical_workers or self.scaling.worker_limit

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as they stand in YAML."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """The configuration as YAML that `load` and `--config` read."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def replace(self, **fields: Any) -> Config:
        """A copy with other values; keys are dotted names, with `__` for the dot (`train__epochs=3`)."""
        values = self.to_dict()
        for name, value in fields.items():
            *section, last = name.split("__")
            target = values
            for part in section:
                target = target[part]
            target[last] = value
        return from_dict(values)


def from_dict(values: dict[str, Any]) -> Config:
    """Builds a configuration from nested dictionaries, without checking its values.

    Raises:
        ConfigError: A section or a field is not known.
    """
    _check_field_names(values)
    made: dict[str, Any] = dict(expand_home(values))
    for name, section in SECTIONS.items():
        if name in made:
            made[name] = section(**made[name])
    for name, kind in (("task", ClassSpec), ("optimizer", OptimizerSpec), ("schedule", ClassSpec)):
        if made.get(name) is not None:
            made[name] = kind(**{**made[name], "init_args": dict(made[name].get("init_args") or {})})
    if made.get("observers") is not None:
        made["observers"] = [
            ClassSpec(given["class_path"], dict(given.get("init_args") or {})) for given in made["observers"]
        ]
    if made.get("optimizers") is not None:
        made["optimizers"] = {name: _make_turn_spec(dict(given)) for name, given in made["optimizers"].items()}
    return Config(**made)


def _make_turn_spec(given: dict[str, Any]) -> TurnSpec:
    schedule = given.pop("schedule", None)
    return TurnSpec(
        **given, schedule=schedule and ClassSpec(schedule["class_path"], dict(schedule.get("init_args") or {}))
    )


def _check_field_names(values: dict[str, Any]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"it is {values!r:.60}; it must be fields by name.")
    sections = {"": Config, **{f"{name}.": kind for name, kind in SECTIONS.items() if name in values}}
    problems = []
    for prefix, kind in sections.items():
        given = values if not prefix else values[prefix[:-1]]
        known = [item.name for item in dataclasses.fields(kind)]
        if not isinstance(given, dict):
            problems.append(f"{prefix[:-1]} is {given!r}; it must be fields by name.")
            continue
        for name in sorted(given.keys() - set(known), key=str):
            near = difflib.get_close_matches(str(name), known, 1)
            problems.append(f"{prefix}{name} is no field{f'; the nearest is {prefix}{near[0]}' if near else ''}.")
    if problems:
        raise ConfigError("\n".join(problems))


def from_yaml(text: str) -> Config:
    """Reads what `Config.to_yaml` wrote; see `from_dict`."""
    return from_dict(yaml.safe_load(text))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one level with dotted names; empty dictionaries vanish."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value  # a name in arguments of a class may be a number
    return flat


def result_fields(config: Config, manifest_digest: str) -> dict[str, Any]:
    """The fields that decide the result and differ from their default, with dotted names."""
    found: dict[str, Any] = {
        "manifest": manifest_digest,
        "scaling.logical_workers": config.logical_workers,
        "scaling.threads_per_worker": config.scaling.threads_per_worker,
    }
    if config.evaluate.patience is not None:  # then evaluations choose the result
        section, cadence = config.evaluate, config.checkpoint
        found |= {
            "evaluate.metric": section.metric,
            "evaluate.mode": section.mode,
            "evaluate.min_delta": section.min_delta,
        }
        found |= {"evaluate.where": section.where, "evaluate.batch_size": section.batch_size}
        found |= {"checkpoint.every_steps": cadence.every_steps, "checkpoint.every_epochs": cadence.every_epochs}
    for owner, prefix in [(config, ""), *((getattr(config, name), f"{name}.") for name in SECTIONS)]:
        for item in dataclasses.fields(owner):
            value = getattr(owner, item.name)
            if prefix + item.name == "train.strategy" and value == "single":
                value = "ddp"  # the same bits, so one may be continued as the other
            if item.metadata.get("affects_result") and value != item.default:
                found[prefix + item.name] = _drop_unset(value)
    return flatten(found)


def _drop_unset(value: Any) -> Any:
    """A value as it stands in a digest; a class's without what is not given."""
    if isinstance(value, dict):
        return {name: _drop_unset(each) for name, each in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    return {name: each for name, each in dataclasses.asdict(value).items() if each is not None}  # type: ignore[arg-type]


def digest(config: Config, manifest_digest: str) -> str:
    """SHA-256 of the fields that decide the result."""
    return hashlib.sha256(json.dumps(result_fields(config, manifest_digest), sort_keys=True).encode()).hexdigest()


def check_same_config(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuses to resume a run with another configuration or other data.

    Args:
        name: The run's name.
        old: `result_fields` of the run as it is.
        new: `result_fields` of what was asked for.

    Raises:
        RunExistsError: They differ; the message is a diff.
    """
    if old == new:
        return
    before, after = ([f"{key}: {value}" for key, value in sorted(fields.items())] for fields in (old, new))
    diff = "\n".join(line for line in difflib.ndiff(before, after) if line[0] in "-+")
    raise RunExistsError(
        f"The run {name!r} exists with another configuration or other data:\n{diff}\n"
        "(-: of the run, +: asked for now). Nothing was changed. Give another run.name for a new run, or the run's own"
        " values to resume"
        " it."
    )


def default_tracking_uri(config: Config) -> str:
    """The MLflow tracking URI of a run.

    Raises:
        ConfigError: None is given and the run is stored on S3, where no database can be.
    """
    if not config.tracking.uri and "://" in config.run.storage_path:
        raise ConfigError(
            f"run.storage_path is {config.run.storage_path!r}, where MLflow's SQLite file cannot be, and tracking.uri"
            f" is not given. Set"
            " tracking.uri to an MLflow server (http://host:5000) or to a file of this machine"
            " (sqlite:////folder/mlflow.db), or set"
            " tracking.enabled to false."
        )
    return config.tracking.uri or f"sqlite:///{Path(config.run.storage_path).expanduser().resolve() / 'mlflow.db'}"
