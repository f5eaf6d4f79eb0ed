"""Prepares a run: checks everything that can be refused before anything is written, and claims the run directory.

`prepare` reads the configuration, the data and the stored run, if it exists, and makes the job of the workers and of
the evaluator. `claim` writes the files of a new run, or updates the stored configuration of an existing one. An
existing run may be extended by more `train.epochs` or `train.max_steps` than at its last start.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import safetensors.torch
from torch import Tensor

from ray_app.cluster.resources import resolve_max_workers
from ray_app.config.checks import check_config
from ray_app.config.config import Config, check_same_config, digest, flatten, result_fields
from ray_app.config.import_paths import TASK_OPTIMIZER, load_class
from ray_app.data.arrays import ArraySpec, spec_of_values
from ray_app.data.dataset import Dataset, open_dataset, read_labels
from ray_app.data.probes import decode_first_row, probe, sample_ragged_rows, sample_rows
from ray_app.data.reader import Reader, RowSource, rows_per_task
from ray_app.errors import ConfigError, DataError, RunExistsError
from ray_app.evaluate.job import EvaluationJob
from ray_app.plan.class_balancing import Classes
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Plan, count_rows_by_file
from ray_app.preflight.changes import (
    CodeVersions,
    DataVersions,
    describe_code_changes,
    describe_data_changes,
    fill_defaults,
    is_stored,
    read_code_versions,
    read_data_versions,
    store_code,
    store_data_versions,
)
from ray_app.preflight.data_summary import (
    constant_target_warnings,
    describe_training_columns,
    shuffle_warnings,
    similar_class_warnings,
)
from ray_app.preflight.dry_run import dry_run
from ray_app.preflight.initial_parameters import load_initial_parameters, replaced_weights_warnings
from ray_app.preflight.metric_checks import MAX_ROWS
from ray_app.preflight.model_checks import check_picklable
from ray_app.preflight.probe_rows import longest_of, shortest_of
from ray_app.preflight.rare_rows import RareRows, check_training_decode
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.journal import put_event
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact_value, register_secrets
from ray_app.runlog.stored_config import parse_config, read_manifest, stored_config
from ray_app.storage.files import put_atomic, put_json, read_json, to_location
from ray_app.task.base import Rows, Task
from ray_app.task.metrics import resolve_mode
from ray_app.task.ragged import Arrays
from ray_app.task.schema import prepare_task, refuse_other_names, refuse_other_schema
from ray_app.task.user_loop import LoopTask
from ray_app.train.job import Job
from ray_app.train.state.state import has_total_steps_argument

logger = logging.getLogger(__name__)

_ADJECTIVES = (
    *("amber", "bold", "brave", "bright", "calm", "clear", "crisp", "eager"),
    *("fair", "glad", "keen", "kind", "mild", "neat", "quiet"),
)
_NOUNS = (
    *("alder", "aspen", "beech", "birch", "cedar", "cliff", "coast", "creek"),
    *("delta", "elm", "fern", "fjord", "grove", "heath", "lake"),
)


def make_run_name() -> str:
    """Returns a readable run name that sorts by time, such as `20261120-140512-calm-birch-3f9c02`.

    The random suffix keeps the names different if a thousand runs start in the same second.
    """
    words = f"{secrets.choice(_ADJECTIVES)}-{secrets.choice(_NOUNS)}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{words}-{secrets.token_hex(3)}"


def update_stored_config(job: Job) -> None:
    """Updates the stored configuration of an existing run to this start, and records the changed fields as an event.

    Fields that decide the result are the same, or the start was refused before. The stored classes are kept, because
    they also have the default arguments that `code.json` names.
    """
    before = parse_config(job.paths, job.paths.config.read_text())
    now = replace(
        job.config, task=before.task, optimizer=before.optimizer, optimizers=before.optimizers, schedule=before.schedule
    )
    old_values = flatten(redact_value(before.to_dict()))
    new_values = flatten(redact_value(now.to_dict()))
    changed = {
        name: [old_values.get(name), new_values.get(name)]
        for name in sorted(old_values.keys() | new_values.keys())
        if old_values.get(name) != new_values.get(name)
    }
    if changed:
        put_event(job.paths, "reconfigured", job.fence, fields=changed)
    if now != before:
        put_config(job.paths, now)


def put_config(paths: RunPaths, config: Config) -> None:
    """Writes the `config.yaml`, since the run is resumed from it; with a secret, only its owner can read it."""
    secret = register_secrets(config.to_dict())
    put_atomic(paths.config, config.to_yaml().encode(), mode=0o600 if secret else 0o666)
    if secret:
        logger.warning(
            "The configuration holds a secret: %s is complete, and on a disk readable by its owner alone; MLflow, logs"
            " and events get it without. Secrets are better kept in environment variables.",
            paths.config,
        )


def check_resume_compatibility(name: str, before: Config, stored_digest: str, config: Config, plan: Plan) -> None:
    """Refuses to resume a run with other values of the fields that decide the result.

    More steps than at the last start are allowed if they do not change the steps that are done: an extended run is
    bit-identical to one that had the same length from the start.

    Args:
        name: Name of the run.
        before: Configuration of its last start.
        stored_digest: Manifest digest of the data at its first start.
        config: Configuration of this start.
        plan: Order of the rows of the present data.

    Raises:
        RunExistsError: The result would be another one; the message has the differences.
    """
    longer = before.replace(train__epochs=config.train.epochs, train__max_steps=config.train.max_steps)
    check_same_config(name, result_fields(longer, stored_digest), result_fields(config, plan.manifest.digest))
    old_steps = before.train.total_steps(plan.steps_per_epoch)
    new_steps = config.train.total_steps(plan.steps_per_epoch)
    if new_steps != old_steps and (reason := _explain_length_refusal(config, old_steps, new_steps, plan)):
        raise RunExistsError(
            f"The run {name!r} exists with train.epochs {before.train.epochs} and train.max_steps"
            f" {before.train.max_steps}, {old_steps} steps; asked for now are {config.train.epochs} and"
            f" {config.train.max_steps}, {new_steps} steps. {reason} Nothing was changed. Give another run.name for a"
            " new run."
        )


def _explain_length_refusal(config: Config, old_steps: int, new_steps: int, plan: Plan) -> str | None:
    """Returns why a run of `old_steps` steps cannot be changed to `new_steps` steps, or None if it can."""
    train, cadence = config.train, config.checkpoint
    if new_steps < old_steps:
        return "A run can become longer, not shorter."
    if config.schedule is not None and has_total_steps_argument(config.schedule):
        return (
            f"Its schedule {config.schedule.class_path} spreads over all steps of a run, so a longer one has had other"
            " learning rates from the beginning. Schedules whose arguments say all, such as CosineAnnealingLR with"
            " T_max, StepLR and LambdaLR, let a run grow."
        )
    if old_steps % train.local_steps:
        return (
            f"Its logical workers averaged at its end, in the middle of a round of train.local_steps ="
            f" {train.local_steps}."
        )
    planned = (
        cadence.every_steps,
        cadence.every_epochs and cadence.every_epochs * (train.steps_per_epoch or plan.steps_per_epoch),
    )
    if config.evaluate.patience is not None and not any(every and old_steps % every == 0 for every in planned):
        return (
            "The checkpoint of its end counts for evaluate.patience, but in a longer run checkpoint.every_steps and"
            " every_epochs plan none there."
        )
    return None


def make_plan(config: Config, manifest: Manifest, classes: Classes | None) -> Plan:
    """Returns the order of the rows of a run.

    Raises:
        DataError: The data has less than one step, or too few files.
    """
    data, logical_workers = config.data, config.logical_workers
    files = int((count_rows_by_file(manifest) > 0).sum())
    if data.shard == "file" and files < logical_workers:
        raise DataError(
            f"data.shard is file, but {data.path} has {files} files with rows for {logical_workers} logical workers;"
            " each needs at least one. Ingest into more files (--shard_rows), lower scaling.logical_workers, or set"
            " data.shard to row."
        )
    plan = Plan(
        manifest,
        config.seed,
        logical_workers,
        data.global_batch_size,
        data.shuffle_window_rows,
        data.last_batch == "keep",
        data.shard,
        classes,
        data.by_length,
    )
    if not plan.steps_per_epoch:
        raise DataError(
            f"{data.path} has {plan.all_rows} rows for an epoch, too few for one global batch of"
            f" {data.global_batch_size} rows, and data.last_batch is drop: there is nothing to train on. Set"
            " data.last_batch: keep or lower data.global_batch_size."
        )
    return plan


def read_classes(config: Config, dataset: Dataset) -> Classes | None:
    """Returns the classes of all rows if `data.balance_by` names them, otherwise None.

    Raises:
        DataError: The column `data.balance_by` does not exist or does not hold classes.
    """
    if config.data.balance_by is None:
        return None
    return Classes.of(dataset.manifest, read_labels(dataset.root, dataset.manifest, config.data.balance_by)[1])


def check_same_classes(paths: RunPaths, plan: Plan) -> None:
    """Refuses to resume a run if rows have other classes than at its first start.

    Raises:
        DataError: The digest of the classes is another one.
    """
    if plan.classes is not None and (read_json(paths.classes) or {}).get("digest") != plan.classes.digest:
        raise DataError(
            f"Rows have other classes than when the run {paths.name!r} began, so they would be repeated otherwise."
            " Give the data of before, or another run.name."
        )


@dataclass(frozen=True)
class Prepared:
    """A run that has passed all checks and may start.

    Args:
        job: The job of the training workers.
        evaluation: The job of the evaluator, if it runs concurrently with training.
        resumes: Whether the run exists already.
        initial: The initial parameters, if this start has read them from `train.init_from`.
        code: The source files and library versions of the configured classes.
        changed: Differences of `code` from the last start, each a phrase.
        warnings: Warnings about the data, the metrics and the model, each one or two sentences.
        data: Lines that describe the columns that the task uses.
        data_files: Size and modification time, or ETag, of the data files.
        changed_data: Differences of `data_files` from the last start, each a sentence.
    """

    job: Job
    evaluation: EvaluationJob | None
    resumes: bool
    initial: dict[str, Tensor] | None = None
    code: CodeVersions | None = None
    changed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    data_files: DataVersions | None = None
    changed_data: tuple[str, ...] = ()


def prepare(config: Config) -> Prepared:
    """Checks everything that can be known before the start and returns the prepared run, without writing anything.

    The fence of the jobs is 0 until `claim`.

    Args:
        config: The configuration as the user wrote it.

    Raises:
        ConfigError: Values do not fit together, or the task fails in the dry run.
        RunExistsError: The run exists with other values.
        DataError: The data does not fit the task or the stored run.
    """
    register_secrets(config.to_dict())
    check_config(config)
    config = config if config.run.name else config.replace(run__name=make_run_name())
    paths = RunPaths(to_location(config.run.storage_path) / str(config.run.name))
    before = stored_config(paths)
    if config.scaling.max_workers == "all":
        config = resolve_max_workers(config, before)
        check_config(config)
    if config.scaling.logical_workers is None:
        config = config.replace(scaling__logical_workers=before.logical_workers if before else config.logical_workers)
        check_config(config)
    initial = load_initial_parameters(config, before)
    config = initial.config
    dataset = open_dataset(config.data.path)
    task = _prepare_task(config, initial.classes, dataset)
    if config.optimizer == Config.optimizer and config.optimizers is None and task.has_own_optimizer:
        config = config.replace(optimizer={"class_path": TASK_OPTIMIZER})
        check_config(config)
    config = config.replace(evaluate__mode=resolve_mode(task, config.evaluate.metric, config.evaluate.mode))
    plan = make_plan(config, dataset.manifest, read_classes(config, dataset))
    code, changed = read_code_versions(config), list[str]()
    if before is not None:
        stored_digest = read_manifest(paths).digest
        check_resume_compatibility(paths.name, before, stored_digest, config, plan)
        check_same_classes(paths, plan)
        refuse_other_schema(
            read_json(paths.schema) or {}, dataset.facts, dataset.facts.path, f"the data that {paths.name!r} began with"
        )
        changed = describe_code_changes(paths, config, code)
    stored_row, row = read_training_row(config, dataset, task)
    rows = sample_ragged_rows(row, dataset, task.columns(), task.decode, config.data.on_bad_row == "skip")
    fields = {name: spec_of_values(values) for name, values in rows.items()}
    _check_cache(config, task, fields)
    check_training_decode(task, stored_row, fields)
    metric, mode = config.evaluate.metric or task.best_metric, config.evaluate.mode or task.best_mode
    job = Job(
        config, digest(config, plan.manifest.digest), task, plan, dataset.root, fields, str(paths.root), 0, metric, mode
    )
    if config.train.init_from is not None:
        job = replace(job, initial=str(paths.initial))
    _check_rounds(job)
    rare_rows = [RareRows.find(f"data.path {config.data.path}", task, dataset, fields, candidate=longest_of(rows))]
    data = sampled = None
    evaluation_warnings = list[str]()
    if config.data.eval_path is not None:
        data, eval_rare_rows, sampled, evaluation_warnings = _prepare_evaluation(job, config.data.eval_path)
        rare_rows.append(eval_rare_rows)
    # The script of a `LoopTask` runs once, so that its only row is the longest one.
    first = longest_of(rows) if isinstance(task, LoopTask) else shortest_of(rows)
    has_all = data is not None and data.manifest.num_rows <= MAX_ROWS
    dry_run_warnings = dry_run(
        job,
        first,
        initial.params,
        rare_rows,
        sampled,
        has_all,
        partial(sample_rows, dataset, task.columns(), task.decode, MAX_ROWS),
    )
    is_exact = config.train.reduction == "exact"
    evaluation = (
        EvaluationJob(config.evaluate, task, job.run_root, 0, data, deterministic=is_exact)
        if data is not None and not job.workers_evaluate
        else None
    )
    files = read_data_versions(job.source, data)
    return Prepared(
        replace(job, evaluation=data),
        evaluation,
        before is not None,
        initial.params,
        code,
        tuple(changed),
        (
            *shuffle_warnings(config, dataset, plan),
            *replaced_weights_warnings(config),
            *evaluation_warnings,
            *dry_run_warnings,
            *similar_class_warnings(dataset.facts),
        ),
        tuple(describe_training_columns(task, dataset)),
        files,
        tuple(describe_data_changes(paths, config, files) if before is not None else ()),
    )


def _prepare_task(config: Config, initial_classes: Sequence[str] | None, dataset: Dataset) -> Task:
    """Returns the configured task, prepared with its training data.

    Args:
        initial_classes: Names of the classes that the initial parameters were trained on, if they are known.

    Raises:
        ConfigError: The task cannot be pickled for other processes, or does not fit the configuration.
        DataError: The data does not fit the task, or its classes are not those of the initial parameters.
    """
    task = prepare_task(make_task(config), dataset.facts)
    check_picklable(task)
    where, of = f"data.path {config.data.path}", f"train.init_from {config.train.init_from}"
    refuse_other_names(initial_classes, task.data_schema["classes"], where, of)
    if problems := task.validate_config(config):
        raise ConfigError(f"{type(task).__name__} does not go with the configuration: {' '.join(problems)}")
    return task


def _check_cache(config: Config, task: Task, fields: dict[str, ArraySpec]) -> None:
    """Refuses `data.by_length` and `data.cache` if the decoded rows do not allow them.

    Raises:
        ConfigError: `data.by_length` is not a decoded field with rows of different lengths, or the task decodes rows
            differently in every epoch, so that a cache cannot hold them.
    """
    ragged = sorted(name for name, spec in fields.items() if spec.padding is not None)
    if config.data.by_length is not None and config.data.by_length not in ragged:
        raise ConfigError(
            f"data.by_length is {config.data.by_length!r}; the decoded fields whose rows have different lengths are"
            f" {', '.join(ragged) or 'none'}. Name one of them, or leave it out."
        )
    if config.data.cache != "none" and task.has_epoch_decode:
        raise ConfigError(
            f"data.cache is {config.data.cache}, but {type(task).__name__} decodes a row another way in every epoch,"
            " which a cache cannot hold. Set data.cache to none, or draw in augment, after the cache."
        )


def read_training_row(config: Config, dataset: Dataset, task: Task) -> tuple[Rows, Arrays]:
    """Returns the first training row that can be decoded, before and after decoding, each field of shape (1, ...).

    Raises:
        BadRowError: More rows before it cannot be decoded than the configuration allows to skip.
    """
    max_bad_rows = config.data.max_bad_rows if config.data.on_bad_row == "skip" else 0
    undecoded = list[Rows]()

    def decode(rows: Rows) -> Arrays:
        undecoded.append(rows)
        return task.decode(rows)

    decoded = decode_first_row(dataset, task.columns(), decode, max_bad_rows)
    return undecoded[-1], decoded


def make_task(config: Config) -> Task:
    """Instantiates and returns the configured task.

    Raises:
        ConfigError: The class cannot be imported or instantiated, or is not a subclass of `Task`.
    """
    try:
        task = load_class(config.task)(**config.task.init_args)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"task.class_path {config.task.class_path!r} with init_args {config.task.init_args} cannot be made:"
            f" {error}. Name an importable subclass of ray_app.task.base.Task and its arguments."
        ) from error
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.class_path {config.task.class_path!r} is not a subclass of ray_app.task.base.Task; derive it."
        )
    return task


def _check_rounds(job: Job) -> None:
    """Refuses epochs that end in the middle of a round of `local_sgd`.

    Between two averages the logical workers have no common state that could be saved or evaluated.

    Raises:
        ConfigError: Checkpoints are planned by epochs, and the steps of an epoch are not a multiple of the steps of a
            round.
    """
    steps, rounds = job.steps_per_epoch, job.steps_per_round
    if steps % rounds and job.config.checkpoint.every_epochs is not None:
        below = steps // rounds * rounds
        valid = " or ".join(str(n) for n in (below, below + rounds) if n)
        raise ConfigError(
            f"An epoch has {steps} steps, no multiple of train.local_steps = {rounds}, so it ends where the logical"
            f" workers have no common state to keep. Set train.steps_per_epoch to {valid}, or checkpoint.every_epochs"
            f" to null and checkpoint.every_steps to a multiple of {rounds}."
        )


def check_evaluation_data(paths: RunPaths, config: Config, digest: str) -> None:
    """Refuses to change the evaluation data of a run with early stopping, since its result depends on the evaluations.

    Raises:
        DataError: The digest of the data differs from that of earlier evaluations.
    """
    before = {e.data_digest for e in read_scores(paths)} - {digest}
    if before and config.evaluate.patience is not None:
        raise DataError(
            f"data.eval_path {config.data.eval_path} (digest {digest}) is not what this run was evaluated on before"
            f" ({', '.join(before)}), but evaluate.patience makes the result depend on it. Give the data of before, or"
            " another run.name."
        )


def _prepare_evaluation(job: Job, path: str) -> tuple[RowSource, RareRows, Arrays | None, list[str]]:
    """Opens the evaluation data.

    Returns:
        The source of the rows, the rare rows of the data, some decoded rows (None if they cannot be decoded), and
        warnings about the target.

    Raises:
        DataError: The data does not fit the training data, or is not the data of earlier evaluations of this run.
    """
    config, dataset = job.config, open_dataset(path)
    refuse_other_schema(job.task.data_schema, dataset.facts, f"data.eval_path {path}", f"data.path {config.data.path}")
    prepared_task = job.task.prepare(dataset.facts)
    source = _open_source(job.task, dataset, config.data.read_task_mb)
    if source.fields != job.fields:
        raise DataError(
            f"A decoded row of data.eval_path {path} is {source.fields}, of data.path {config.data.path} it is"
            f" {job.fields}; both must be alike. Ingest them the same way."
        )
    check_evaluation_data(job.paths, config, source.manifest.digest)
    sampled = sample_rows(dataset, job.task.columns(), job.task.decode, MAX_ROWS)
    rare_rows = RareRows.find(f"data.eval_path {path}", job.task, dataset, job.fields, prepared_task)
    return source, rare_rows, sampled, constant_target_warnings(job.task, dataset.facts, source.manifest.num_rows)


def open_evaluation_source(task: Task, path: str, read_task_mb: float) -> RowSource:
    """Opens a data set for evaluation and returns the source of its rows.

    Args:
        task: The task, prepared with the training data.
        path: Folder (or file) of Parquet.
        read_task_mb: Largest size of the decoded rows of one read task in megabytes.

    Raises:
        DataError: The task cannot be evaluated on the data.
    """
    dataset = open_dataset(path)
    refuse_other_schema(task.data_schema, dataset.facts, path, "what the task was trained on")
    task.prepare(dataset.facts)
    return _open_source(task, dataset, read_task_mb)


def _open_source(task: Task, dataset: Dataset, read_task_mb: float) -> RowSource:
    """Returns the source of all rows of a data set, decoded by the task."""
    fields = probe(dataset, task.columns(), task.decode)
    reader = Reader(dataset.root, task.columns(), task.decode, fields, partitions=dataset.manifest.partitions)
    return RowSource(reader, dataset.manifest, rows_per_task(fields, read_task_mb))


def claim(prepared: Prepared, fence: int) -> Prepared:
    """Claims the run directory for this start and returns the prepared run with its fence.

    The files of a new run are written with the manifest first and the configuration last: a run exists when its
    configuration does. The stored configuration of an existing run is updated to this start, so that every reader uses
    the metric that decides now.

    Args:
        prepared: The prepared run.
        fence: Number of this start, from the lease that it holds.

    Raises:
        RunExistsError: Another start has created the run since `prepare`.
    """
    job = prepared.job
    if not prepared.resumes and job.paths.config.exists():
        raise RunExistsError(
            f"The run {job.paths.name!r} was started by someone else at this moment; start again to continue it."
        )
    if prepared.initial is not None:
        put_atomic(job.paths.initial, safetensors.torch.save(prepared.initial))
    if not prepared.resumes:
        put_atomic(job.paths.manifest, job.plan.manifest.to_json().encode())
        put_json(job.paths.schema, job.task.data_schema)
        if job.plan.classes is not None:
            put_json(job.paths.classes, {"rows": job.plan.classes.totals.tolist(), "digest": job.plan.classes.digest})
    if prepared.code is not None and (prepared.changed or not prepared.resumes):
        store_code(job.paths, prepared.code)
    if prepared.data_files is not None and not (prepared.resumes and is_stored(job.paths, prepared.data_files)):
        store_data_versions(job.paths, prepared.data_files)
    if not prepared.resumes:
        put_config(job.paths, fill_defaults(job.config)[0])
    else:
        update_stored_config(replace(job, fence=fence))
    evaluation = replace(prepared.evaluation, fence=fence) if prepared.evaluation else None
    return replace(prepared, job=replace(job, fence=fence), evaluation=evaluation)


def check_storage(config: Config) -> None:
    """Refuses a storage folder that cannot be created or written to. S3 is not checked here.

    The check creates and removes a folder in the nearest existing parent.

    Raises:
        ConfigError: No folder can be created there.
    """
    folder = to_location(config.run.storage_path)
    if not isinstance(folder, Path):
        return
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if existing.is_dir():
            Path(tempfile.mkdtemp(prefix=".ray_app-", dir=existing)).rmdir()
            return
        why = f"{existing} is a file"
    except OSError as error:
        why = f"{error.strerror or error} ({error.filename or folder})"
    raise ConfigError(
        f"run.storage_path is {config.run.storage_path!r}, where no run can be stored: {why}. Give a folder that you"
        " may write to, which all nodes see under the same path, or a prefix in a bucket."
    )
