"""From a configuration to a run that may start: everything that can be refused is refused here, before anything is
written.

Names of runs whose user gave none.

`config.yaml` of a run: written at its first start, and again by a start that changes what does not decide the result.

A run that exists may be told to go on for longer: with more `train.epochs` or `train.max_steps` than at its last start.

From a configuration and a data set to the order of its rows.

Whether a run can be stored where the configuration says, asked before anything starts.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
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
from ray_app.preflight.data_summary import constant_target_warnings, describe_training_columns, similar_class_warnings
from ray_app.preflight.dry_run import dry_run
from ray_app.preflight.initial_parameters import InitialParameters, load_initial_parameters, replaced_weights_warnings
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

_ADJECTIVES = (
    "amber",
    "bold",
    "brave",
    "bright",
    "calm",
    "clear",
    "crisp",
    "eager",
    "fair",
    "glad",
    "keen",
    "kind",
    "mild",
    "neat",
    "quiet",
)
_NOUNS = (
    "alder",
    "aspen",
    "beech",
    "birch",
    "cedar",
    "cliff",
    "coast",
    "creek",
    "delta",
    "elm",
    "fern",
    "fjord",
    "grove",
    "heath",
    "lake",
)


def make_run_name() -> str:
    """A readable name that sorts by time: `20261120-140512-calm-birch-3f9c02`, also of a thousand starts at once
    different.
    """
    words = f"{secrets.choice(_ADJECTIVES)}-{secrets.choice(_NOUNS)}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{words}-{secrets.token_hex(3)}"


logger = logging.getLogger(__name__)


def update_stored_config(job: Job) -> None:
    """Makes the stored configuration that of this start, and records what has changed; what decides the result has not.

    The classes stay as they are stored: with the arguments that were not given, as `code.json` names them.
    """
    before = parse_config(job.paths, job.paths.config.read_text())
    now = replace(
        job.config, task=before.task, optimizer=before.optimizer, optimizers=before.optimizers, schedule=before.schedule
    )
    one, other = (flatten(redact_value(config.to_dict())) for config in (before, now))
    changed = {
        name: [one.get(name), other.get(name)]
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    }
    if changed:
        put_event(job.paths, "reconfigured", job.fence, fields=changed)
    if now != before:
        put_config(job.paths, now)


def put_config(paths: RunPaths, config: Config) -> None:
    """Writes `config.yaml` whole, since the run is continued from it; with a secret in it, for its owner alone."""
    secret = register_secrets(config.to_dict())
    put_atomic(paths.config, config.to_yaml().encode(), mode=0o600 if secret else 0o666)
    if secret:
        logger.warning(
            "The configuration holds a secret: %s is complete, and on a disk readable by its owner alone; MLflow, logs"
            " and events get it"
            " without. Secrets are better kept in environment variables.",
            paths.config,
        )


def check_resume_compatibility(name: str, before: Config, stored_digest: str, config: Config, plan: Plan) -> None:
    """Refuses to continue a run with other values that decide the result, but for a later end that leaves what is done
    as it is.

    A run that has grown has the bits of one that was as long from the beginning.

    Args:
        name: The run's name.
        before: The configuration of its last start.
        stored_digest: Digest of the manifest of its data.
        config: What is asked for now.
        plan: The order of the data that is there now.

    Raises:
        RunExistsError: It would be another run.
    """
    longer = before.replace(train__epochs=config.train.epochs, train__max_steps=config.train.max_steps)
    check_same_config(name, result_fields(longer, stored_digest), result_fields(config, plan.manifest.digest))
    ended, ends = (each.train.total_steps(plan.steps_per_epoch) for each in (before, config))
    if ends != ended and (reason := _explain_length_refusal(config, ended, ends, plan)):
        raise RunExistsError(
            f"The run {name!r} exists with train.epochs {before.train.epochs} and train.max_steps"
            f" {before.train.max_steps}, {ended} steps;"
            f" asked for now are {config.train.epochs} and {config.train.max_steps}, {ends} steps. {reason} Nothing was"
            f" changed. Give"
            " another run.name for a new run."
        )


def _explain_length_refusal(config: Config, ended: int, ends: int, plan: Plan) -> str | None:
    """Why a run that was to end after some steps cannot end after others; None where it can."""
    train, cadence = config.train, config.checkpoint
    if ends < ended:
        return "A run can become longer, not shorter."
    if config.schedule is not None and has_total_steps_argument(config.schedule):
        return (
            f"Its schedule {config.schedule.class_path} spreads over all steps of a run, so a longer one has had other"
            f" learning rates from"
            " the beginning. Schedules whose arguments say all, such as CosineAnnealingLR with T_max, StepLR and"
            " LambdaLR, let a run grow."
        )
    if ended % train.local_steps:
        return (
            f"Its logical workers averaged at its end, in the middle of a round of train.local_steps ="
            f" {train.local_steps}."
        )
    planned = (
        cadence.every_steps,
        cadence.every_epochs and cadence.every_epochs * (train.steps_per_epoch or plan.steps_per_epoch),
    )
    if config.evaluate.patience is not None and not any(every and ended % every == 0 for every in planned):
        return (
            "The checkpoint of its end counts for evaluate.patience, but in a longer run checkpoint.every_steps and"
            " every_epochs plan none"
            " there."
        )
    return None


def make_plan(config: Config, manifest: Manifest, classes: Classes | None) -> Plan:
    """Makes the order of a run.

    Raises:
        DataError: The data has less than one step, or too few files.
    """
    data, logical_workers = config.data, config.logical_workers
    files = int((count_rows_by_file(manifest) > 0).sum())
    if data.shard == "file" and files < logical_workers:
        raise DataError(
            f"data.shard is file, but {data.path} has {files} files with rows for {logical_workers} logical workers;"
            f" each needs at least"
            " one. Ingest into more files (--shard_rows), lower scaling.logical_workers, or set data.shard to row."
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
            f" {data.global_batch_size} rows, and"
            " data.last_batch is drop: there is nothing to train on. Set data.last_batch: keep or lower"
            " data.global_batch_size."
        )
    return plan


def shuffle_warnings(config: Config, dataset: Dataset, plan: Plan) -> list[str]:
    """What the footers say against the mixing of the rows, for people, each a sentence or two with its figures."""
    rows = dataset.manifest.rows[dataset.manifest.rows > 0]
    window, name = plan.window_rows, config.data.balance_by
    if window >= plan.manifest.num_rows:
        return []
    doubts = []
    facts = dataset.facts.columns.get(name)
    if facts is not None and facts.group_span is not None and facts.minimum is not None and facts.maximum is not None:
        values, groups = facts.maximum - facts.minimum + 1, window / float(rows.mean()) + 1
        if groups * facts.group_span < 0.5 * min(values, window):
            doubts.append(
                f"{config.data.path} looks sorted by {name!r}: a row group spans {facts.group_span:,.1f} of"
                f" {values:,.0f} values on an"
                f" average, and a shuffle window of {window:,} rows mixes about {groups:.1f} row groups, so at most"
                f" about"
                f" {groups * facts.group_span:,.0f} values. Ingest it again (ray-app ingest mixes), or raise"
                f" data.shuffle_window_rows."
            )
    if (largest := int(rows.max())) > window:
        doubts.append(
            f"{config.data.path} has row groups of up to {largest:,} rows, more than a shuffle window of {window:,}"
            f" rows, which then mixes"
            " the rows of one or two. Where rows that are near each other are alike, ingest it (ray-app ingest mixes),"
            " or raise"
            " data.shuffle_window_rows."
        )
    return doubts


def read_classes(config: Config, dataset: Dataset) -> Classes | None:
    """The classes of all rows, if they are to be balanced.

    Raises:
        DataError: There is no such column, or it holds no classes.
    """
    if config.data.sampling == "none":
        return None
    return Classes.of(dataset.manifest, read_labels(dataset.root, dataset.manifest, config.data.balance_by)[1])


def check_same_classes(paths: RunPaths, plan: Plan) -> None:
    """Refuses to go on if rows have other classes than when the run began.

    Raises:
        DataError: They have.
    """
    if plan.classes is not None and (read_json(paths.classes) or {}).get("digest") != plan.classes.digest:
        raise DataError(
            f"Rows have other classes than when the run {paths.name!r} began, so they would be repeated otherwise. Give"
            f" the data of before,"
            " or another run.name."
        )


@dataclass(frozen=True)
class Prepared:
    """A run that may start.

    Args:
        job: What its workers get.
        evaluation: What its evaluator gets, if there is evaluation data.
        resumes: Whether the run exists already.
        initial: The parameters to begin with, if they were read.
        code: What the result depends on besides.
        changed: What of that is not as at the last start, in words.
        doubts: What is to be said of the data, the metrics and the model at the start, in sentences.
        data: What the task uses of the data, a line each.
        data_files: Size and time, or ETag, of the data files.
        changed_data: Which of them are not as at the last start, in sentences.
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
    """Checks everything that can be known before the start, without writing anything; the fence is 0 until `claim`.

    Args:
        config: As the user gave it.

    Raises:
        ConfigError: Values do not fit together or the run exists with others.
        DataError: The data does not fit.
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
    begins = load_initial_parameters(config, before)
    config, initial = begins.config, begins.params
    dataset = open_dataset(config.data.path)
    task = _prepare_task(config, begins, dataset)
    if config.optimizer == Config.optimizer and config.optimizers is None and task.has_own_optimizer:
        config = config.replace(optimizer={"class_path": TASK_OPTIMIZER})
        check_config(config)
    config = config.replace(evaluate__mode=resolve_mode(task, config.evaluate.metric, config.evaluate.mode))
    plan = make_plan(config, dataset.manifest, read_classes(config, dataset))
    code, changed = read_code_versions(config), list[str]()
    if before is not None:
        stored = read_manifest(paths).digest
        check_resume_compatibility(paths.name, before, stored, config, plan)
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
    beyond = [RareRows.of(f"data.path {config.data.path}", task, dataset, fields, seen=longest_of(rows))]
    data, some, constant = None, None, list[str]()
    if config.data.eval_path is not None:
        data, more, some, constant = _prepare_evaluation(job, config.data.eval_path)
        beyond.append(more)
    first = longest_of(rows) if isinstance(task, LoopTask) else shortest_of(rows)  # a script takes all at once
    has_all = data is not None and data.manifest.num_rows <= MAX_ROWS
    doubts = dry_run(
        job, first, initial, beyond, some, has_all, partial(sample_rows, dataset, task.columns(), task.decode, MAX_ROWS)
    )
    evaluation = None
    if data is not None and not job.workers_evaluate:
        evaluation = EvaluationJob(
            config.evaluate, task, job.run_root, 0, data, deterministic=config.train.reduction == "exact"
        )
    files = read_data_versions(job.source, data)
    return Prepared(
        replace(job, evaluation=data),
        evaluation,
        before is not None,
        initial,
        code,
        tuple(changed),
        (
            *shuffle_warnings(config, dataset, plan),
            *replaced_weights_warnings(config),
            *constant,
            *doubts,
            *similar_class_warnings(dataset.facts),
        ),
        tuple(describe_training_columns(task, dataset)),
        files,
        tuple(describe_data_changes(paths, config, files) if before is not None else ()),
    )


def _prepare_task(config: Config, begins: InitialParameters, dataset: Dataset) -> Task:
    """The configured task, prepared with its training data, which can be sent to other processes.

    Raises:
        ConfigError: It cannot, or does not go with the configuration.
        DataError: The data does not fit the task, or the parameters to begin with.
    """
    task = prepare_task(make_task(config), dataset.facts)
    check_picklable(task)
    where, of = f"data.path {config.data.path}", f"train.init_from {config.train.init_from}"
    refuse_other_names(begins.classes, task.data_schema["classes"], where, of)
    if problems := task.validate_config(config):
        raise ConfigError(f"{type(task).__name__} does not go with the configuration: {' '.join(problems)}")
    return task


def _check_cache(config: Config, task: Task, fields: dict[str, ArraySpec]) -> None:
    """Refuses what the decoded rows do not allow.

    Raises:
        ConfigError: A cache cannot hold them, or `data.by_length` is none of their fields.
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
            f" which a"
            " cache cannot hold. Set data.cache to none, or draw in augment, after the cache."
        )


def read_training_row(config: Config, dataset: Dataset, task: Task) -> tuple[Rows, Arrays]:
    """The first row to train on that can be decoded, as it was read and decoded, each field of shape (1, ...).

    Raises:
        BadRowError: More rows before it than the configuration allows to skip cannot be decoded.
    """
    most_bad, read = config.data.max_bad_rows if config.data.on_bad_row == "skip" else 0, list[Rows]()

    def decode(rows: Rows) -> Arrays:
        read.append(rows)
        return task.decode(rows)

    decoded = decode_first_row(dataset, task.columns(), decode, most_bad)
    return read[-1], decoded


def make_task(config: Config) -> Task:
    """Makes the configured task.

    Raises:
        ConfigError: It cannot be made, or is no `Task`.
    """
    try:
        task = load_class(config.task)(**config.task.init_args)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"task.class_path {config.task.class_path!r} with init_args {config.task.init_args} cannot be made:"
            f" {error}. Name an importable"
            " subclass of ray_app.task.base.Task and its arguments."
        ) from error
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.class_path {config.task.class_path!r} is no subclass of ray_app.task.base.Task; derive it."
        )
    return task


def _check_rounds(job: Job) -> None:
    """Refuses epochs that end in the middle of a round of `local_sgd`, where there is nothing to keep or to evaluate.

    Raises:
        ConfigError: They do.
    """
    steps, rounds = job.steps_per_epoch, job.steps_per_round
    if steps % rounds and job.config.checkpoint.every_epochs is not None:
        below = steps // rounds * rounds
        valid = " or ".join(str(n) for n in (below, below + rounds) if n)
        raise ConfigError(
            f"An epoch has {steps} steps, no multiple of train.local_steps = {rounds}, so it ends where the logical"
            f" workers have no common"
            f" state to keep. Set train.steps_per_epoch to {valid}, or checkpoint.every_epochs to null and"
            f" checkpoint.every_steps to a"
            f" multiple of {rounds}."
        )


def check_evaluation_data(paths: RunPaths, config: Config, digest: str) -> None:
    """Refuses other data than before for a run whose result depends on its evaluations.

    Raises:
        DataError: It is other data.
    """
    before = {e.data_digest for e in read_scores(paths)} - {digest}
    if before and config.evaluate.patience is not None:
        raise DataError(
            f"data.eval_path {config.data.eval_path} (digest {digest}) is not what this run was evaluated on before"
            f" ({', '.join(before)}),"
            " but evaluate.patience makes the result depend on it. Give the data of before, or another run.name."
        )


def _prepare_evaluation(job: Job, path: str) -> tuple[RowSource, RareRows, Arrays | None, list[str]]:
    """The evaluation data, what it has that the training data does not have, some of its rows, decoded, and what is to
    be said of it.

    Raises:
        DataError: It is not like the training data, or not what this run was evaluated on before.
    """
    config, dataset = job.config, open_dataset(path)
    refuse_other_schema(job.task.data_schema, dataset.facts, f"data.eval_path {path}", f"data.path {config.data.path}")
    ready = job.task.prepare(dataset.facts)
    source = _open_source(job.task, dataset, config.data.read_task_mb)
    if source.fields != job.fields:
        raise DataError(
            f"A decoded row of data.eval_path {path} is {source.fields}, of data.path {config.data.path} it is"
            f" {job.fields}; both must be"
            " alike. Ingest them the same way."
        )
    check_evaluation_data(job.paths, config, source.manifest.digest)
    some = sample_rows(dataset, job.task.columns(), job.task.decode, MAX_ROWS)
    constant = constant_target_warnings(job.task, dataset.facts, source.manifest.num_rows)
    return source, RareRows.of(f"data.eval_path {path}", job.task, dataset, job.fields, ready), some, constant


def open_evaluation_source(task: Task, path: str, read_task_mb: float) -> RowSource:
    """A data set to evaluate on.

    Args:
        task: The task, prepared with the training data.
        path: Folder (or file) of Parquet.
        read_task_mb: Most decoded megabytes of one read task.

    Raises:
        DataError: The task cannot be evaluated on it.
    """
    dataset = open_dataset(path)
    refuse_other_schema(task.data_schema, dataset.facts, path, "what the task was trained on")
    task.prepare(dataset.facts)
    return _open_source(task, dataset, read_task_mb)


def _open_source(task: Task, dataset: Dataset, read_task_mb: float) -> RowSource:
    fields = probe(dataset, task.columns(), task.decode)
    reader = Reader(dataset.root, task.columns(), task.decode, fields, partitions=dataset.manifest.partitions)
    return RowSource(reader, dataset.manifest, rows_per_task(fields, read_task_mb))


def claim(prepared: Prepared, fence: int) -> Prepared:
    """Makes the run this start's. A new run's manifest is written first, its configuration last: with that it exists.

    The configuration of a run that exists becomes that of this start, so that whoever reads it judges by the metric
    that decides now.

    Args:
        prepared: What may start.
        fence: Number of the start, from the lease that it holds.

    Raises:
        RunExistsError: Another start made the run since `prepare` looked.
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
    """Refuses a folder that cannot be made or written to: in the nearest one that is there a folder is made and removed
    again.

    Raises:
        ConfigError: It cannot. Of S3 nothing is asked here.
    """
    folder = to_location(config.run.storage_path)
    if not isinstance(folder, Path):
        return
    try:
        near = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if near.is_dir():
            Path(tempfile.mkdtemp(prefix=".ray_app-", dir=near)).rmdir()
            return
        why = f"{near} is a file"
    except OSError as error:
        why = f"{error.strerror or error} ({error.filename or folder})"
    raise ConfigError(
        f"run.storage_path is {config.run.storage_path!r}, where no run can be stored: {why}. Give a folder that you"
        f" may write to, which"
        " all nodes see under the same path, or s3://bucket/prefix."
    )
