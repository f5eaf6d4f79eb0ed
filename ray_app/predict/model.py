"""Which model predicts: a version of the registry, an export, or the best checkpoint of a run."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from ray_app.checkpoint.format import MODEL
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config, default_tracking_uri
from ray_app.errors import ConfigError
from ray_app.models.package_files import class_path
from ray_app.models.packaged import fetch_package, is_export, read_export
from ray_app.predict.actor import Model
from ray_app.record.files import location, read_json
from ray_app.record.paths import RunPaths
from ray_app.record.stored_config import read_config
from ray_app.runs.outcome.stored import chosen, trained_job
from ray_app.runs.preparing.prepare import make_task

Found = tuple[Model, dict[str, Any], list[dict[str, Any]]]
"""A model, what it is called, and name, dtype and shape of the inputs that it needs, as far as they are known."""


def model_of_package(config: Config, model: str | None) -> Found:
    """The model, what it is called, and the inputs that it was trained on.

    Its class is the configuration's, which is trusted; its settings are those that it was trained with, as the package says.
    """
    name = config.tracking.registered_model
    if model is None and name is None:
        raise ConfigError(
            "Say which model: --predict.model models:/NAME@champion or the folder of an export, --predict.run runs/NAME, or"
            " tracking.registered_model."
        )
    wanted = model or f"models:/{name}@champion"
    found = read_export(wanted) if is_export(wanted) else fetch_package(default_tracking_uri(config), wanted)
    called = found.called
    made = make_task(config)
    if class_path(made) != found.class_path:
        raise ConfigError(
            f"{called} is of the task {found.class_path}, task.class_path is {class_path(made)}. Give that one's configuration."
        )
    for argument, parameter in inspect.signature(type(made)).parameters.items():
        value = config.task.init_args.get(argument, parameter.default)
        if value is not None and argument in found.settings and found.settings[argument] != value:
            raise ConfigError(
                f"task.init_args.{argument} is {value!r}, but {called} was trained with {found.settings[argument]!r}. Give that."
            )
    task = type(made).of_settings(found.settings)
    inputs = [spec["name"] for spec in found.inputs] if found.format == "torch.export" else None
    return Model(task, found.weights, inputs, found.params_digest), found.source, found.inputs


def model_of_run(config: Config, run: str) -> Found:
    """The best checkpoint of a run that ended."""
    paths = RunPaths(location(run))
    if read_json(paths.summary) is None:
        raise ConfigError(f"predict.run {run!r} has no summary.json: there is no such run, or it has not ended. Give a run's directory.")
    trained = read_config(paths)
    if trained.task != config.task:
        raise ConfigError(f"The run {paths.name!r} was trained with {asdict(trained.task)}, the configuration has {asdict(config.task)}.")
    job = trained_job(paths)
    commit = chosen(job, "best")
    source = {"run": paths.name, "step": commit.step, "config_digest": commit.config_digest}
    return Model(job.task, CheckpointStore(paths).load(commit)[MODEL], None, commit.params_digest), source, []
