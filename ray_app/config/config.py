"""The configuration of a run as a frozen dataclass, its conversion from and to YAML, and its digest.

Fields that change the resulting parameters are declared with `result_field(...)`. The digest of a run covers those that
differ from their default, so a new field at its default never changes a digest.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
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
from ray_app.config.strategies import strategy_with_workers
from ray_app.config.variables import tracking_uri
from ray_app.errors import ConfigError, RunExistsError
from ray_app.process import current_folder

YAML_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader in C, which takes a tenth of the time; a build of PyYAML without libyaml has only the other one."""
_SQLITE = "sqlite:///"


class TextDumper(yaml.SafeDumper):
    """A YAML dumper that also puts texts in quotes which are numbers to other readers than PyYAML, such as 1e3."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    with suppress(ValueError):
        float(text)
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")
    return dumper.represent_str(text)


TextDumper.add_representer(str, _represent_text)


def expand_home(value: Any) -> Any:
    """Returns a value of a configuration with `~/...` and `~user/...` expanded, also inside lists and mappings.

    A shell expands these only on a command line. A single `~` stays: in the arguments of a class it may be any text.
    """
    if isinstance(value, dict):
        return {name: expand_home(item) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(f"{_SQLITE}~/"):
        return _SQLITE + os.path.expanduser(value.removeprefix(_SQLITE))
    return os.path.expanduser(value) if value.startswith("~") and "/" in value else value


def with_absolute_paths(config: Config) -> Config:
    """Returns the configuration with absolute paths of storage and data, so that a run can be used from any folder.

    In a job they stay as they are: Ray removes its copy of the working directory.
    """
    if "_ray_pkg_" in str(current_folder()):
        return config

    def absolute(path: str) -> str:
        return os.path.abspath(path) if path and "://" not in path else path

    data, uri = config.data, config.tracking.uri
    path: str | list[dict[str, Any]]
    if isinstance(data.path, str):
        path = absolute(data.path)
    else:
        path = [{**source, "path": absolute(source["path"])} for source in data.path]
    if uri and uri.startswith(_SQLITE):
        uri = _SQLITE + absolute(uri.removeprefix(_SQLITE))
    return dataclasses.replace(
        config,
        run=dataclasses.replace(
            config.run,
            storage_path=absolute(config.run.storage_path),
            branch_from=config.run.branch_from and absolute(config.run.branch_from),
        ),
        data=dataclasses.replace(data, path=path, eval_path=data.eval_path and absolute(data.eval_path)),
        tracking=dataclasses.replace(config.tracking, uri=uri),
    )


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
        """Returns L, the number of data-parallel replicas that define the arithmetic."""
        return self.scaling.logical_workers or self.scaling.worker_limit

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as plain nested dictionaries, as in YAML."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """Returns the configuration as YAML that `load_config` and `--config` read."""
        return yaml.dump(self.to_dict(), Dumper=TextDumper, sort_keys=False, allow_unicode=True)

    def replace(self, **fields: Any) -> Config:
        """Returns a copy with changed values; keys are dotted names with `__` for the dot (`train__epochs=3`)."""
        values = self.to_dict()
        for name, value in fields.items():
            *section, last = name.split("__")
            target = values
            for part in section:
                target = target[part]
            target[last] = value
        return from_dict(values)


def from_dict(values: dict[str, Any]) -> Config:
    """Builds a configuration from nested dictionaries; raises `ConfigError` for unknown names, checks no values."""
    _check_field_names(values)
    fields: dict[str, Any] = dict(expand_home(values))
    for name, section in SECTIONS.items():
        if name in fields:
            fields[name] = section(**fields[name])
    for name, spec_class in (("task", ClassSpec), ("optimizer", OptimizerSpec), ("schedule", ClassSpec)):
        if fields.get(name) is not None:
            fields[name] = spec_class(**{**fields[name], "init_args": dict(fields[name].get("init_args") or {})})
    if fields.get("observers") is not None:
        fields["observers"] = [_make_class_spec(spec) for spec in fields["observers"]]
    if fields.get("optimizers") is not None:
        fields["optimizers"] = {name: _make_turn_spec(spec) for name, spec in fields["optimizers"].items()}
    return Config(**fields)


def _make_class_spec(spec: dict[str, Any]) -> ClassSpec:
    """Returns the class and arguments of a mapping with `class_path` and perhaps `init_args`."""
    return ClassSpec(spec["class_path"], dict(spec.get("init_args") or {}))


def _make_turn_spec(spec: dict[str, Any]) -> TurnSpec:
    """Returns one of several optimizers from its mapping."""
    schedule = spec.get("schedule")
    return TurnSpec(**{**spec, "schedule": schedule and _make_class_spec(schedule)})


def _check_field_names(values: dict[str, Any]) -> None:
    """Raises `ConfigError` with all unknown fields, with the nearest known names, and sections that are no mappings."""
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration is {values!r:.60}; it must be a mapping of fields.")
    sections = {"": Config, **{f"{name}.": section for name, section in SECTIONS.items() if name in values}}
    problems = []
    for prefix, section in sections.items():
        section_values = values if not prefix else values[prefix[:-1]]
        field_names = [field.name for field in dataclasses.fields(section)]
        if not isinstance(section_values, dict):
            problems.append(f"{prefix[:-1]} is {section_values!r}; it must be a mapping of fields.")
            continue
        for name in sorted(section_values.keys() - set(field_names), key=str):
            nearest = difflib.get_close_matches(str(name), field_names, 1)
            hint = f"; the nearest is {prefix}{nearest[0]}" if nearest else ""
            problems.append(f"{prefix}{name} is not a field{hint}.")
    if problems:
        raise ConfigError("\n".join(problems))


def from_yaml(text: str) -> Config:
    """Builds a configuration from the output of `Config.to_yaml`, with `from_dict`."""
    return from_dict(yaml.load(text, YAML_LOADER))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dictionaries as one level with dotted names, without empty dictionaries."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            # A key among the arguments of a class may be a number.
            flat[f"{prefix}{name}"] = value
    return flat


def result_fields(config: Config, manifest_digest: str) -> dict[str, Any]:
    """Returns the fields that decide the result and differ from their default, by their dotted names."""
    fields: dict[str, Any] = {
        "manifest": manifest_digest,
        "scaling.logical_workers": config.logical_workers,
        "scaling.threads_per_worker": config.scaling.threads_per_worker,
    }
    # Folders may move, the ratio of their rows may not.
    if config.data.weights is not None:
        fields["data.weights"] = config.data.weights
    # With early stopping the evaluations decide which checkpoint is the result.
    if config.evaluate.patience is not None:
        section, cadence = config.evaluate, config.checkpoint
        fields |= {
            "evaluate.metric": section.metric,
            "evaluate.mode": section.mode,
            "evaluate.min_delta": section.min_delta,
        }
        fields |= {"evaluate.where": section.where, "evaluate.batch_size": section.batch_size}
        if section.half is not None:
            fields["evaluate.half"] = section.half
        fields |= {"checkpoint.every_steps": cadence.every_steps, "checkpoint.every_epochs": cadence.every_epochs}
    for owner, prefix in [(config, ""), *((getattr(config, name), f"{name}.") for name in SECTIONS)]:
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            # A strategy and its form in the calling process give bit-identical results, so a run of one may be resumed
            # as the other.
            if prefix + field.name == "train.strategy":
                value = strategy_with_workers(value)
            if field.metadata.get("affects_result") and value != field.default:
                fields[prefix + field.name] = _drop_unset(value)
    return flatten(fields)


def _drop_unset(value: Any) -> Any:
    """Returns a value as it enters the digest: dataclasses as dictionaries without the fields that are None."""
    if isinstance(value, dict):
        return {name: _drop_unset(item) for name, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    return {name: item for name, item in dataclasses.asdict(value).items() if item is not None}  # type: ignore[arg-type]


def digest(config: Config, manifest_digest: str) -> str:
    """Returns the SHA-256 of the fields that decide the result."""
    return digest_json(result_fields(config, manifest_digest))


def digest_json(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_same_config(
    name: str, old: dict[str, Any], new: dict[str, Any], whole: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
) -> None:
    """Raises `RunExistsError` with a diff if the `result_fields` of a stored run and of this start differ.

    `whole` are all fields of both, also those at their defaults, by dotted names; the diff shows those that the other
    side sets.
    """
    if old == new:
        return
    shown_old = {key: value for key, value in whole[0].items() if key in new} | old
    shown_new = {key: value for key, value in whole[1].items() if key in old} | new
    diff = describe_changes(shown_old, shown_new)
    raise RunExistsError(
        f"The run {name!r} exists with another configuration or other data:\n{diff}\n(-: of the run, +: of this start)."
        " Nothing was changed. Choose another run.name for a new run, or restore the run's values to resume it."
    )


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns the fields that differ, a line for each: `-` and the old value, `+` and the new one."""
    before, after = ([f"{key}: {value}" for key, value in sorted(fields.items())] for fields in (old, new))
    return "\n".join(line for line in difflib.ndiff(before, after) if line[0] in "-+")


def default_tracking_uri(config: Config) -> str:
    """Returns the MLflow tracking URI of a run; raises `ConfigError` if it would be a SQLite file on S3."""
    if uri := tracking_uri(config.tracking):
        return uri
    if "://" in config.run.storage_path:
        raise ConfigError(
            f"run.storage_path is {config.run.storage_path!r}, which cannot hold MLflow's SQLite file, and tracking.uri"
            " is not set. Set tracking.uri to an MLflow server (http://host:5000) or to a local file"
            " (sqlite:////folder/mlflow.db), or set tracking.enabled to false."
        )
    return f"sqlite:///{Path(config.run.storage_path).expanduser().resolve() / 'mlflow.db'}"
