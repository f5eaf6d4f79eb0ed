"""Checks of the configuration, the data and the stored run; those of the model are in `dry_run.py`."""

from __future__ import annotations

from ray_app.cluster.resources import resolve_max_workers
from ray_app.config.checks import check_config
from ray_app.config.config import Config, digest
from ray_app.config.import_paths import TASK_OPTIMIZER
from ray_app.data.arrays import spec_of_values
from ray_app.data.dataset import open_dataset
from ray_app.data.probes import sample_ragged_rows, sample_rows
from ray_app.errors import ConfigError, DataError
from ray_app.preflight import changes, data_summary, initial_parameters, inputs
from ray_app.preflight.context import Outcome, PreflightContext
from ray_app.preflight.initial_parameters import InitialParameters
from ray_app.preflight.metric_checks import MAX_ROWS
from ray_app.preflight.model_checks import check_picklable
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import register_secrets
from ray_app.runlog.stored_config import read_manifest, stored_config
from ray_app.storage.files import read_json, to_location
from ray_app.task.metrics import resolve_mode
from ray_app.task.schema import prepare_task, refuse_other_names, refuse_other_schema
from ray_app.train.job import Job


def complete_config(context: PreflightContext) -> None:
    """Completes the configuration by the name of the run and the numbers of workers."""
    config = context.config
    register_secrets(config.to_dict())
    check_config(config)
    config = config if config.run.name else config.replace(run__name=inputs.make_run_name())
    context.paths = RunPaths(to_location(config.run.storage_path) / str(config.run.name))
    context.before = before = stored_config(context.paths)
    if config.scaling.max_workers == "all":
        config = resolve_max_workers(config, before)
        check_config(config)
    if config.scaling.logical_workers is None:
        config = config.replace(scaling__logical_workers=before.logical_workers if before else config.logical_workers)
        check_config(config)
    context.config, context.initial = config, InitialParameters(config)


def read_initial_parameters(context: PreflightContext) -> list[str]:
    """Reads the initial parameters, and completes the configuration by their digest."""
    context.initial = initial_parameters.load_initial_parameters(context.config, context.before)
    context.config = context.initial.config
    return initial_parameters.replaced_weights_warnings(context.config)


def open_training_data(context: PreflightContext) -> None:
    """Opens the training data."""
    context.dataset = open_dataset(context.config.data.path)


def fit_task(context: PreflightContext) -> Outcome:
    """Makes the task, prepares it with the training data, and completes the configuration by what it decides."""
    config, dataset = context.config, context.dataset
    context.task = task = prepare_task(inputs.make_task(config), dataset.facts)
    check_picklable(task)
    where, of = f"data.path {config.data.path}", f"train.init_from {config.train.init_from}"
    refuse_other_names(context.initial.classes, task.data_schema["classes"], where, of)
    if problems := task.validate_config(config):
        raise ConfigError(f"{type(task).__name__} does not go with the configuration: {' '.join(problems)}")
    if config.optimizer == Config.optimizer and config.optimizers is None and task.has_own_optimizer:
        config = config.replace(optimizer={"class_path": TASK_OPTIMIZER})
        check_config(config)
    mode = resolve_mode(task, config.evaluate.metric, config.evaluate.mode)
    context.config = config.replace(evaluate__mode=mode)
    context.used_columns = data_summary.describe_training_columns(task, dataset)
    return Outcome("\n".join(context.used_columns), warnings=data_summary.similar_class_warnings(dataset.facts))


def plan_rows(context: PreflightContext) -> list[str]:
    """Plans the order of the rows."""
    config, dataset = context.config, context.dataset
    context.plan = inputs.make_plan(config, dataset.manifest, inputs.read_classes(config, dataset))
    return data_summary.shuffle_warnings(config, dataset, context.plan)


def check_stored_run(context: PreflightContext) -> None:
    """Refuses to resume the run if what decides its result has changed."""
    assert context.before is not None
    paths, plan = context.paths, context.plan
    facts = context.dataset.facts
    changes.check_resume_compatibility(paths.name, context.before, read_manifest(paths).digest, context.config, plan)
    changes.check_same_classes(paths, plan)
    refuse_other_schema(read_json(paths.schema) or {}, facts, facts.path, f"the data that {paths.name!r} began with")


def read_code(context: PreflightContext) -> None:
    """Reads the versions of the code, and compares them with those of the last start."""
    context.code = changes.read_code_versions(context.config)
    if context.before is not None:
        context.changed_code = changes.describe_code_changes(context.paths, context.config, context.code)


def decode_rows(context: PreflightContext) -> None:
    """Decodes the first training rows, and makes the job of the workers, with fence 0 and without evaluation data."""
    config, dataset = context.config, context.dataset
    task = context.task
    context.undecoded_row, row = inputs.read_training_row(config, dataset, task)
    context.rows = sample_ragged_rows(row, dataset, task.columns(), task.decode, config.data.on_bad_row == "skip")
    context.fields = {name: spec_of_values(values) for name, values in context.rows.items()}
    context.job = Job(
        config,
        digest(config, context.plan.manifest.digest),
        task,
        context.plan,
        dataset.root,
        context.fields,
        str(context.paths.root),
        0,
        config.evaluate.metric or task.best_metric,
        config.evaluate.mode or task.best_mode,
        initial=str(context.paths.initial) if config.train.init_from is not None else None,
    )


def check_cache(context: PreflightContext) -> None:
    """Refuses a cache of rows that are decoded differently in every epoch."""
    if context.task.has_epoch_decode:
        raise ConfigError(
            f"data.cache is {context.config.data.cache}, but {type(context.task).__name__} decodes a row another way in"
            " every epoch, which a cache cannot hold. Set data.cache to none, or draw in augment, after the cache."
        )


def check_length_field(context: PreflightContext) -> None:
    """Refuses `data.by_length` if it is not a decoded field with rows of different lengths."""
    ragged = sorted(name for name, spec in context.fields.items() if spec.padding is not None)
    if context.config.data.by_length not in ragged:
        raise ConfigError(
            f"data.by_length is {context.config.data.by_length!r}; the decoded fields whose rows have different lengths"
            f" are {', '.join(ragged) or 'none'}. Name one of them, or leave it out."
        )


def check_rounds(context: PreflightContext) -> None:
    """Refuses checkpoints at the end of epochs that end within a round of `local_sgd`, without a common state."""
    steps, rounds = context.job.steps_per_epoch, context.job.steps_per_round
    if steps % rounds and context.config.checkpoint.every_epochs is not None:
        below = steps // rounds * rounds
        valid = " or ".join(str(n) for n in (below, below + rounds) if n)
        raise ConfigError(
            f"An epoch has {steps} steps, no multiple of train.local_steps = {rounds}, so it ends where the logical"
            f" workers have no common state to keep. Set train.steps_per_epoch to {valid}, or checkpoint.every_epochs"
            f" to null and checkpoint.every_steps to a multiple of {rounds}."
        )


def open_evaluation_data(context: PreflightContext) -> list[str]:
    """Opens the evaluation data, and refuses data that is unlike the training data or that of earlier evaluations."""
    config, task = context.config, context.task
    dataset = open_dataset(str(config.data.eval_path))
    names = f"data.eval_path {config.data.eval_path}", f"data.path {config.data.path}"
    refuse_other_schema(task.data_schema, dataset.facts, *names)
    context.eval_dataset, context.eval_task = dataset, task.prepare(dataset.facts)
    source = inputs.open_source(task, dataset, config.data.read_task_mb)
    if source.fields != context.fields:
        raise DataError(
            f"A decoded row of {names[0]} is {source.fields}, of {names[1]} it is {context.fields}; both must be alike."
            " Ingest them the same way."
        )
    inputs.check_evaluation_data(context.paths, config, source.manifest.digest)
    context.eval_source = source
    context.eval_rows = sample_rows(dataset, task.columns(), task.decode, MAX_ROWS)
    return data_summary.constant_target_warnings(task, dataset.facts, source.manifest.num_rows)


def read_data_files(context: PreflightContext) -> None:
    """Reads the versions of the data files, and compares them with those of the last start."""
    context.data_versions = changes.read_data_versions(context.job.source, context.eval_source)
    if context.before is not None:
        context.changed_data = changes.describe_data_changes(context.paths, context.config, context.data_versions)
