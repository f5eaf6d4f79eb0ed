"""The checks before a run: `CHECKS`, at the end, is the list of all of them, in the order in which they run.

The start of a run (`prepare`) makes those with `at_start` and ends with the error of the first that refuses it.
`ray-app check` (`check_task`) makes all of them and reports each with its duration. The functions before the list check
the configuration, the data and the stored run, and compare short trainings; other modules have those of the model.
"""

from __future__ import annotations

import logging
import os
import tempfile
import unicodedata
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from ray_app.cluster.resources import needs_cluster, ray_address, resolve_scaling
from ray_app.config.checks import check_config
from ray_app.config.config import Config, digest, flatten, with_absolute_paths
from ray_app.config.import_paths import refuse_hiding_files
from ray_app.config.variables import check_variables, complete_tracking, describe_overridden
from ray_app.data import folds
from ray_app.data.arrays import spec_of_values
from ray_app.data.probes import sample_ragged_rows, sample_rows
from ray_app.errors import ConfigError, DataError
from ray_app.models.inputs import open_source
from ray_app.preflight import (
    batch_checks,
    branch,
    changes,
    data_summary,
    dry_run,
    gradient_checks,
    inputs,
    kept_state,
    metric_checks,
    rare_rows,
)
from ray_app.preflight.context import CheckResult, PreflightContext
from ray_app.preflight.inputs import InitialParameters
from ray_app.preflight.metric_checks import MAX_ROWS
from ray_app.preflight.model_checks import check_picklable, check_shardable
from ray_app.preflight.sandbox import Sandbox
from ray_app.preflight.short_trainings import MIDDLE, STEPS, WORKERS, ShortTrainings, TrainingResult, make_short_job
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact, register_secrets
from ray_app.runlog.stored_config import read_manifest, stored_config
from ray_app.storage.files import read_json, to_location
from ray_app.task.base import Task
from ray_app.task.constant_scores import constant_scores
from ray_app.task.metrics import resolve_mode
from ray_app.task.module import ModuleTask
from ray_app.task.schema import prepare_task, refuse_other_data, refuse_other_names, refuse_other_schema
from ray_app.task.user_loop import LoopTask
from ray_app.task.whole_batches import BatchTask
from ray_app.train.checkpointing.persistence import check_snapshot_memory
from ray_app.train.job import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Check:
    """A check before a run.

    Args:
        name: The subject, in a word or two.
        cost_s: The seconds that it roughly adds, for a small model and a few files; 0 if they are not noticed, or if it
            runs concurrently with a check before it.
        message: What is true if nothing is wrong, as a sentence.
        run: Makes the check, and sets what checks after it use. It returns warnings, an outcome, or nothing; an error
            that it raises refuses the run.
        needs: Names of the checks before this one that set what it uses.
        applies: Returns whether there is anything to check.
        calls_task: Whether `run` calls the task, for which it needs `PreflightContext.dry_run`.
        at_start: Whether the start of a run makes the check, too; otherwise only `ray-app check` does, if a run would
            start.
    """

    name: str
    cost_s: float
    message: str
    run: Callable[[PreflightContext], CheckResult | list[str] | None]
    needs: tuple[str, ...] = ()
    applies: Callable[[PreflightContext], bool] = lambda context: True
    calls_task: bool = False
    at_start: bool = True

    def execute(self, context: PreflightContext) -> CheckResult | None:
        """Makes the check and returns its outcome, or None if it does not apply.

        Raises:
            ConfigError: The configuration or the task is refused.
            DataError: The data is refused.
        """
        if not self.applies(context):
            return None
        with context.dry_run() if self.calls_task else nullcontext():
            result = self.run(context)
        return result if isinstance(result, CheckResult) else CheckResult(warnings=result or ())


def check_environment(context: PreflightContext) -> list[str]:
    """Refuses environment variables and names of files with which Ray, or a process of the run, cannot start.

    It returns a warning for each variable that the configuration overrides.
    """
    starts_cluster = needs_cluster(context.config) and not ray_address(context.config) and not ray.is_initialized()
    check_variables(os.environ, starts_cluster)
    refuse_hiding_files()
    return list(map(redact, describe_overridden(flatten(context.config.to_dict()), os.environ)))


def complete_config(context: PreflightContext) -> list[str]:
    """Completes the configuration by the name of the run, the number of workers and their GPUs."""
    config = context.config
    register_secrets(config.to_dict())
    check_config(config)
    config = with_absolute_paths(config)
    # Two forms of one name look the same: a letter with a mark, or a letter and a mark.
    config = config.replace(run__name=unicodedata.normalize("NFC", config.run.name or inputs.make_run_name()))
    context.paths = RunPaths(to_location(config.run.storage_path) / str(config.run.name))
    context.before = before = stored_config(context.paths)
    if (resolved := resolve_scaling(config, before)) != config:
        config = resolved
        check_config(config)
    if config.scaling.logical_workers is None:
        config = config.replace(scaling__logical_workers=before.logical_workers if before else config.logical_workers)
        check_config(config)
    config = replace(config, tracking=complete_tracking(config.tracking, before.tracking if before else None))
    context.config, context.initial = config, InitialParameters(config)
    if config.checkpoint.keep_last > 1:
        return []
    return [
        "checkpoint.keep_last is 1: if that checkpoint is damaged, the run starts again from its first step. Set it to"
        " 2 to keep an older one."
    ]


def read_initial_parameters(context: PreflightContext) -> list[str]:
    """Reads the initial parameters, and completes the configuration by their digest."""
    context.initial = inputs.load_initial_parameters(context.config, context.before)
    context.config = context.initial.config
    return inputs.replaced_weights_warnings(context.config)


def open_training_data(context: PreflightContext) -> None:
    """Opens the training data."""
    context.dataset = folds.open_training_data(context.config)


def fit_task(context: PreflightContext) -> CheckResult:
    """Makes the task, prepares it with the training data, and completes the configuration by what it decides."""
    config, dataset = context.config, context.dataset
    stored = read_json(context.paths.schema) if context.before is not None else None
    context.task = task = prepare_task(inputs.make_task(config), dataset.facts, stored)
    check_picklable(task)
    where, of = f"data.path {config.data.path}", f"train.init_from {config.train.init_from}"
    refuse_other_names(context.initial.classes, task.data_schema["classes"], where, of)
    if problems := task.validate_config(config):
        raise ConfigError(f"{type(task).__name__} does not fit the configuration: {' '.join(problems)}")
    if config.optimizer == Config.optimizer and config.optimizers is None and (fields := task.optimizer_fields()):
        # A schedule of the configuration counts more than that of the task.
        if config.schedule is not None:
            fields = {name: value for name, value in fields.items() if name != "schedule"}
        config = config.replace(**fields)
        check_config(config)
    config = _add_task_fields(config, task)
    mode = resolve_mode(task, config.evaluate.metric, config.evaluate.mode)
    context.config = config.replace(evaluate__mode=mode)
    context.used_columns = data_summary.describe_training_columns(task, dataset)
    return CheckResult("\n".join(context.used_columns))


def _add_task_fields(config: Config, task: Task) -> Config:
    """Returns the configuration with the values that the task sets for fields which are at their defaults."""
    changes: dict[str, Any] = {}
    for name, value in task.configuration_fields().items():
        section_name, _, field = name.partition(".")
        section = getattr(config, section_name)
        if (set_value := getattr(section, field)) == getattr(type(section), field):
            changes[name] = value
        elif set_value != value:
            logger.info("%s of the configuration, %r, overrides %r of the task.", name, set_value, value)
    if changes:
        logger.info("Set by the task: %s.", ", ".join(f"{name} {value!r}" for name, value in changes.items()))
        config = config.replace(**{name.replace(".", "__"): value for name, value in changes.items()})
        check_config(config)
    return config


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
    batch_checks.refuse_other_batches(paths.name, context.before.evaluate, context.config.evaluate.batch_size)
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
            f"data.cache is {context.config.data.cache}, but {type(context.task).__name__} decodes a row differently in"
            " each epoch, which a cache cannot hold. Set data.cache to none, or draw in augment, after the cache."
        )


def check_length_field(context: PreflightContext) -> None:
    """Refuses `data.by_length` if it is not a decoded field with rows of different lengths."""
    ragged = sorted(name for name, spec in context.fields.items() if spec.padding is not None)
    if context.config.data.by_length not in ragged:
        raise ConfigError(
            f"data.by_length is {context.config.data.by_length!r}; the decoded fields whose rows have different lengths"
            f" are {', '.join(ragged) or 'none'}. Name one of these fields, or leave data.by_length out."
        )


def check_rounds(context: PreflightContext) -> None:
    """Refuses checkpoints at the end of epochs that end within a round of `local_sgd`, without a common state."""
    steps, rounds = context.job.steps_per_epoch, context.job.steps_per_round
    if steps % rounds and context.config.checkpoint.every_epochs is not None:
        below = steps // rounds * rounds
        valid = " or ".join(str(n) for n in (below, below + rounds) if n)
        raise ConfigError(
            f"An epoch has {steps} steps, which is not a multiple of train.local_steps = {rounds}, so the logical"
            f" workers have no common state to store at its end. Set train.steps_per_epoch to {valid}, or"
            f" checkpoint.every_epochs to null and checkpoint.every_steps to a multiple of {rounds}."
        )


def open_evaluation_data(context: PreflightContext) -> list[str]:
    """Opens the evaluation data, and refuses data that is unlike the training data or that of earlier evaluations."""
    config, task = context.config, context.task
    dataset = folds.open_evaluation_data(config, task.data_schema.get("classes"))
    names = config.data.evaluation_name, f"data.path {config.data.path}"
    refuse_other_data(task, dataset.facts, *names)
    context.eval_dataset, context.eval_task = dataset, task.prepare(dataset.facts)
    source = open_source(task, dataset, True, config.data.read_task_mb, config.evaluate.max_rows)
    if source.fields != context.fields:
        raise DataError(
            f"A decoded row of {names[0]} has the fields {source.fields}, one of {names[1]} has {context.fields}; the"
            " fields must be the same. Ingest both data sets with the same options."
        )
    inputs.check_evaluation_data(context.paths, config, source.manifest.digest)
    context.eval_source = source
    context.eval_rows = sample_rows(dataset, task.columns(), task.decode, MAX_ROWS)
    context.constant_scores = constant_scores(task, context.dataset.facts, dataset.facts)
    return task.describe_differences(dataset.facts)


def read_data_files(context: PreflightContext) -> None:
    """Reads the versions of the data files, and compares them with those of the last start."""
    context.data_versions = changes.read_data_versions(context.job.source, context.eval_source)
    if context.before is not None:
        context.changed_data = changes.describe_data_changes(context.paths, context.config, context.data_versions)


def try_repetitions(context: PreflightContext) -> CheckResult:
    """Starts the sandbox, and looks for random numbers that come neither from torch's generators nor from the keys."""
    # The model of the dry run would take the memory of one more process.
    context.close()
    del context.row_probe
    enter = context.exit_stack.enter_context
    folder = Path(enter(tempfile.TemporaryDirectory(prefix="ray_app-check-")))
    job = make_short_job(replace(context.job, eval_source=context.eval_source), context.initial.params, folder)
    context.short_trainings = ShortTrainings(job, enter(closing(Sandbox(folder / "processes"))))
    result = context.short_trainings.first.impurities
    if result.error is not None or result.value:
        text = str(result.error) if result.error is not None else "\n".join(result.value)
        return CheckResult(text, "failed", seconds=result.seconds)
    return CheckResult(seconds=result.seconds)


def compare_repetition(context: PreflightContext) -> CheckResult:
    """Compares a training on one worker with its repetition."""
    _, _, one, repeated = context.short_trainings.first
    if one.error is not None:
        return CheckResult(f"{STEPS} steps on one worker: {one.error}", "failed", seconds=one.seconds)
    advice = "docs/own-task.md says where random numbers must come from."
    return _compare_params(context, f"{STEPS} steps on one worker, twice", repeated, advice)


def is_repeatable(context: PreflightContext) -> bool:
    """Returns whether a training and its repetition agree; if not, no other comparison says anything."""
    _, _, one, repeated = context.short_trainings.first
    return one.error is None and repeated.error is None and one.params == repeated.params


def has_comparable_scores(context: PreflightContext) -> bool:
    """Returns whether trainings on one worker and on several agree, or there are no metrics to compare."""
    if not is_repeatable(context):
        return False
    one, (together, _) = context.short_trainings.first.one, context.short_trainings.later
    return not one.scores or (together.error is None and together.params == one.params)


_KEPT = (
    "Only the model's parameters and buffers may carry state from one batch to the next: a worker sees only its own"
    " rows, and a resumed worker has only the checkpoint."
)


def compare_workers(context: PreflightContext) -> CheckResult:
    """Compares a training on one worker with one on several."""
    together, _ = context.short_trainings.later
    return _compare_params(context, f"{STEPS} steps on one worker and on {WORKERS}", together, _KEPT)


def compare_resume(context: PreflightContext) -> CheckResult:
    """Compares a training with one that was resumed in the middle."""
    description = f"{STEPS} steps, and the same from step {MIDDLE} on after a resume on 2 workers"
    return _compare_params(context, description, context.short_trainings.later[1], _KEPT)


def _compare_params(context: PreflightContext, description: str, other: TrainingResult, advice: str) -> CheckResult:
    """Compares the final parameters of a training on one worker with those of another training."""
    one, text = context.short_trainings.first.one, ""
    if other.error is not None:
        text = f"{description}: {other.error}"
    elif other.params != one.params:
        text = f"{description}: different parameters ({one.params[:12]}, {other.params[:12]}). {advice}"
    return CheckResult(text, "failed" if text else "ok", seconds=other.seconds)


def compare_scores(context: PreflightContext) -> CheckResult:
    """Compares the metrics by one worker with those by several."""
    one, (together, _) = context.short_trainings.first.one, context.short_trainings.later
    if not one.scores:
        return CheckResult("No metrics are compared: data.eval_path is not set.", "warning")
    if one.scores == together.scores:
        return CheckResult(f"One worker and {WORKERS} workers compute the same metrics: {one.scores[-1][1]}.")
    return CheckResult(
        f"One worker computes {one.scores[-1][1]}, {WORKERS} workers compute {together.scores[-1][1]}. A metric's"
        " states must be sums, minima, maxima or lists, and depend neither on the updating process nor on the order.",
        "failed",
    )


def try_export(context: PreflightContext) -> CheckResult:
    """Reports whether the model can be exported, and predicts the same."""
    result = context.short_trainings.first.export
    if result.error is not None:
        text = f"{result.error}\nTraining is not affected, but ray-app export and register would refuse the model."
        return CheckResult(text, "failed", seconds=result.seconds)
    export_format, refused = result.value
    if refused:
        text = f"The export is {export_format} with the task's code, not a standalone program ({'; '.join(refused)})."
        return CheckResult(text, "warning", seconds=result.seconds)
    return CheckResult(f"The export as {export_format} predicts the same.", seconds=result.seconds)


# fmt: off
CHECKS = (
    # The configuration, the environment, the data, and the run if it exists.
    Check("configuration", 0.01, "The values are valid together.", complete_config),
    Check("environment", 0.01, "No variable and no name of a file here prevents a start.", check_environment,
          ("configuration",)),
    Check("initial parameters", 0.1, "The parameters can be read.", read_initial_parameters, ("configuration",),
          applies=lambda context: context.config.train.init_from is not None),
    Check("data", 0.1, "The data can be read.", open_training_data, ("configuration",)),
    Check("task", 0.01, "The task fits the data and the configuration.", fit_task, ("data",)),
    Check("plan", 0.01, "An epoch has at least one step.", plan_rows, ("data",)),
    Check("branch", 0.1, "The other run has the checkpoint, and reads the same rows.", branch.open_branch,
          ("task", "plan"), applies=lambda context: context.config.run.branch_from is not None),
    Check("stored run", 0.1, "Nothing that decides its result has changed.", check_stored_run, ("task", "plan"),
          applies=lambda context: context.before is not None),
    Check("code", 0.1, "The code can be read.", read_code, ("task",)),
    Check("rows", 0.01, "The first rows can be decoded.", decode_rows, ("task", "plan")),
    Check("cache", 0, "The cache can hold the decoded rows.", check_cache, ("task",),
          applies=lambda context: context.config.data.cache != "none"),
    Check("row lengths", 0, "The field of data.by_length is a decoded field.", check_length_field, ("rows",),
          applies=lambda context: context.config.data.by_length is not None),
    Check("decoding", 0.01, "Training rows and evaluation rows are decoded to the same fields.",
          rare_rows.check_training_decode, ("rows",), applies=lambda context: context.task.has_epoch_decode),
    Check("decoded again", 0.01, "A row is the same again.",
          kept_state.check_decoding_state, ("rows",), calls_task=True),
    Check("rounds", 0, "Each round ends in the epoch in which it begins.", check_rounds, ("rows",),
          applies=lambda context: context.job.steps_per_round > 1),
    Check("evaluation data", 0.01, "The fields match the training data's.", open_evaluation_data, ("rows",),
          applies=lambda context: context.config.data.evaluation_path is not None),

    # The dry run: the model on a few rows, and what trains it.
    Check("model", 0.1, "The model, the optimizer and the schedule can be built.", dry_run.make_state, ("rows",),
          calls_task=True),
    Check("one row", 2, "One row passed through training and evaluation.", dry_run.try_first_row, ("model",),
          calls_task=True),
    Check("kept state", 0.1, "The task, the loss and the transforms keep no state outside the model.",
          kept_state.check_kept_state, ("one row",), calls_task=True),
    Check("outputs", 0.01, "The training loss depends on every output of the model.",
          kept_state.name_unused_outputs, ("one row",), calls_task=True,
          applies=lambda context: not isinstance(context.task, BatchTask)),
    Check("normalization", 0, "Statistics are over several values.", gradient_checks.check_normalization, ("one row",)),
    Check("value ranges", 0.1, "The model has classes and embeddings for the smallest and largest values.",
          lambda context: rare_rows.check_value_ranges(context.row_probe, context.accepted_rows), ("one row",),
          applies=lambda context: isinstance(context.task, ModuleTask) and not isinstance(context.task, LoopTask),
          calls_task=True),
    Check("targets", 0, "The loss accepts the targets of the first evaluation rows.", dry_run.check_eval_targets,
          ("one row", "evaluation data"), calls_task=True,
          applies=lambda context: isinstance(context.task, ModuleTask) and context.eval_rows is not None),
    Check("rare rows", 0.1, "The model can be trained and evaluated on the longest rows.", rare_rows.try_rare_rows,
          ("one row", "evaluation data"), calls_task=True),
    Check("batches", 0.1, "The evaluation of a row does not depend on the other rows of its batch.",
          batch_checks.try_batches, ("one row", "evaluation data"), calls_task=True,
          applies=lambda context: context.config.data.evaluation_path is not None),
    Check("reading time", 0.01, "The time to decode a row is known.", dry_run.measure_reading, ("one row",),
          calls_task=True,
          applies=lambda context: context.config.scaling.worker_gpus > 0 and context.config.data.cache == "none"
          and not isinstance(context.task, LoopTask)),
    Check("evaluation time", 0.1, "An evaluation takes less time than the steps between two checkpoints.",
          dry_run.check_evaluation_time, ("one row", "evaluation data"), calls_task=True,
          applies=lambda context: context.eval_rows is not None and not isinstance(context.task, LoopTask)),
    Check("metrics", 0.2, "The metrics do not depend on how rows are divided into batches.", metric_checks.try_metrics,
          ("one row", "evaluation data"), calls_task=True,
          applies=lambda context: context.config.data.evaluation_path is not None),
    Check("gradients", 0.1, "The gradients of the logical workers add up to the gradient of the batch.",
          gradient_checks.try_gradients, ("one row",), calls_task=True,
          applies=lambda context: bool(context.unused_parameters) or isinstance(context.task, BatchTask)),
    Check("optimizer", 0.01, "Steps work, and a checkpoint holds its state.", dry_run.try_optimizers, ("model",)),
    Check("snapshots", 0, "Snapshots fit into the memory of this machine.",
          lambda context: check_snapshot_memory(context.model, psutil.virtual_memory().available), ("model",),
          applies=lambda context: context.config.checkpoint.snapshot_every_steps is not None),
    Check("parameter servers", 0, "The servers can hold parts of the model.", dry_run.check_server_parts, ("model",),
          applies=lambda context: context.config.train.strategy_traits.has_servers),
    Check("parameter groups", 0, "The strategy keeps the parameter groups.", dry_run.check_parameter_groups, ("model",),
          applies=lambda context: not context.config.train.strategy_traits.keeps_parameter_groups),
    Check("shards", 0, "The model can be cut into shards.", lambda context: check_shardable(context.model), ("model",),
          applies=lambda context: context.config.train.strategy_traits.shards_parameters),
    Check("schedule", 0, "The schedule lasts for all steps of the run.", dry_run.try_schedules, ("model",)),
    Check("branch state", 0.1, "Model and optimizer can continue from the checkpoint.", branch.continue_state,
          ("optimizer", "schedule"), calls_task=True, applies=lambda context: context.branch is not None),
    Check("data files", 0.01, "The versions of the data files are known.", read_data_files, ("evaluation data",)),

    # Trainings of a few steps in processes of their own, several at a time.
    Check("randomness", 7, "Equal rows, keys and torch seeds give equal results; no other generator is used.",
          try_repetitions, at_start=False),
    Check("training", 0, f"{STEPS} steps on one worker give bit-identical parameters when repeated.",
          compare_repetition, at_start=False),
    Check("workers", 3, f"{STEPS} steps on one worker and on {WORKERS} give bit-identical parameters.",
          compare_workers, applies=is_repeatable, at_start=False),
    Check("resume", 0, f"{STEPS} steps, and the same steps resumed from step {MIDDLE} on 2 workers, give bit-identical"
                       " parameters.", compare_resume, applies=is_repeatable, at_start=False),
    Check("evaluation", 0, f"One worker and {WORKERS} workers compute the same metrics.", compare_scores,
          applies=has_comparable_scores, at_start=False),
    Check("export", 0, "The model can be exported.", try_export, at_start=False),
    Check("GPU", 0, "The GPU was not tried: a check computes on the CPU.", lambda context: CheckResult(level="warning"),
          applies=lambda context: context.config.scaling.worker_gpus > 0, at_start=False),
)
# fmt: on
"""All checks before a run. One that needs what was refused is not made."""
