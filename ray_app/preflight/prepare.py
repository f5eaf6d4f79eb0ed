"""Makes the checks of `CHECKS`: `prepare` those of a start, `check_task` all; and claims the run directory.

`prepare` makes the job of the workers and of the evaluator without writing anything. `claim` writes the files of a new
run, or updates the stored configuration of an existing one. `ray-app check` prints what `check_task` has found.
"""

from __future__ import annotations

import logging
import os
import time
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors.torch
from torch import Tensor

from ray_app.config.config import Config, digest_json
from ray_app.config.strategies import strategy_with_workers
from ray_app.data.probes import put_rows
from ray_app.errors import BadRowError, ConfigError, RayAppError, RunExistsError, TaskError, is_refusal
from ray_app.evaluate.job import EvaluationJob
from ray_app.models.package import storable_settings
from ray_app.preflight.branch import copy_checkpoint, remove_leftovers
from ray_app.preflight.changes import (
    CodeVersions,
    DataVersions,
    changed_fields,
    fill_defaults,
    store_code,
    store_data_versions,
)
from ray_app.preflight.checks import CHECKS, Check
from ray_app.preflight.context import Branch, PreflightContext, ReadingRates
from ray_app.process import why_not_writable
from ray_app.runlog.journal import put_event
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact, redact_value, register_secrets
from ray_app.runlog.stored_config import parse_config
from ray_app.storage.data_files import find_file
from ray_app.storage.files import put_atomic, put_json, to_json, to_location, try_writing
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays
from ray_app.task.schema import stored_schema
from ray_app.task.texts import TOKENIZER_FILE
from ray_app.train.job import Job
from ray_app.watch.terminal import Finding, has_refusal

logger = logging.getLogger(__name__)

_passed: dict[str, list[int] | None] = {}
"""The `ModuleTask.target_range` of each task with which a trial of a study has passed the dry run in this process."""


@dataclass(frozen=True)
class Prepared:
    """A run that has passed all checks and may start.

    Args:
        job: The job of the training workers.
        evaluation_job: The job of the evaluator, if it runs concurrently with training.
        resumes: Whether the run exists already.
        initial: The initial parameters, if this start has read them from `train.init_from`.
        code: The source files and library versions of the configured classes.
        changed_code: Differences of `code` from the last start, each a phrase.
        warnings: Warnings about the data, the metrics and the model, each one or two sentences.
        columns: Lines that describe the columns that the task uses.
        example: One or two decoded rows.
        data_versions: Size and modification time, or ETag, of the data files.
        changed_data: Differences of `data_versions` from the last start, each a sentence.
        constant_scores: The metrics of a constant prediction on the evaluation data.
        reading_rates: How fast rows are decoded and trained on, with GPUs and without a cache.
        branch: The checkpoint of another run that a new run continues from.
    """

    job: Job
    evaluation_job: EvaluationJob | None
    resumes: bool
    initial: dict[str, Tensor] | None = None
    code: CodeVersions | None = None
    changed_code: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    example: Arrays | None = None
    data_versions: DataVersions | None = None
    changed_data: tuple[str, ...] = ()
    constant_scores: Mapping[str, float] = field(default_factory=dict)
    reading_rates: ReadingRates | None = None
    branch: Branch | None = None


def prepare(config: Config, pause_epochs: int | None = None) -> Prepared:
    """Makes the checks of a start and returns the prepared run, without writing anything.

    The fence of the jobs is 0 until `claim`.

    Args:
        config: The configuration as the user wrote it.
        pause_epochs: Epochs after which the start ends, see `Job.pause_step`. It is that of a trial then, and makes the
            checks that run rows through the task only if no earlier trial in this process has, of the same task.

    Raises:
        ConfigError: Values do not fit together, or the task fails in the dry run.
        RunExistsError: The run exists with other values.
        DataError: The data does not fit the task or the stored run.
    """
    with closing(PreflightContext(config)) as context:
        warnings = list[str]()
        for check in _checks_of_start(context, pause_epochs is not None):
            if (outcome := check.execute(context)) is not None:
                warnings += outcome.warnings
        job, eval_source = context.job, context.eval_source
        evaluation_job = None
        if eval_source is not None and not job.workers_evaluate:
            evaluation_job = EvaluationJob.of(context.config, job.task, job.run_root, 0, eval_source)
        pause_step = None if pause_epochs is None else pause_epochs * job.steps_per_epoch
        return Prepared(
            job=replace(job, eval_source=eval_source, pause_step=pause_step),
            evaluation_job=evaluation_job,
            resumes=context.before is not None,
            initial=context.initial.params,
            code=context.code,
            changed_code=tuple(context.changed_code),
            warnings=tuple(warnings),
            columns=tuple(context.used_columns),
            example={name: values[:2] for name, values in (context.eval_rows or context.rows).items()},
            data_versions=context.data_versions,
            changed_data=tuple(context.changed_data),
            constant_scores=context.constant_scores,
            reading_rates=context.reading_rates,
            branch=context.branch and context.branch.compare(job.config),
        )


def _checks_of_start(context: PreflightContext, is_trial: bool) -> Iterator[Check]:
    """Yields the checks of a start; for a trial without those that an earlier one has passed in this process."""
    key = ""
    for check in CHECKS:
        if is_trial and "one row" in (check.name, *check.needs):
            key = key or _dry_run_key(context)
            if key in _passed:
                if isinstance(context.task, ModuleTask):
                    context.task.target_range = _passed[key]
                continue
        if check.at_start:
            yield check
    if key:
        _passed[key] = getattr(context.task, "target_range", None)


def _dry_run_key(context: PreflightContext) -> str:
    """Returns a digest of what decides whether the rows pass through the task."""
    fields = context.config.to_dict()
    for name in ("run", "optimizer", "schedule", "seed"):
        del fields[name]
    return digest_json([fields, context.plan.manifest.digest])


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
            f"The run {job.paths.name!r} was started by another process at this moment; start again to continue it."
        )
    if not prepared.resumes:
        remove_leftovers(job.paths)
    if prepared.branch is not None:
        copy_checkpoint(prepared.branch, job.paths, fence, job.config_digest)
        details = {"source": str(prepared.branch.paths.root), "step": prepared.branch.commit.step}
        put_event(job.paths, "branched", fence, **details, changed=prepared.branch.changed)
    if prepared.initial is not None:
        put_atomic(job.paths.initial, safetensors.torch.save(prepared.initial))
    if not prepared.resumes:
        put_atomic(job.paths.manifest, job.plan.manifest.to_json().encode())
        put_json(job.paths.schema, stored_schema(job.task))
        if job.plan.classes is not None:
            put_json(job.paths.classes, {"rows": job.plan.classes.totals.tolist(), "digest": job.plan.classes.digest})
    if prepared.example is not None:
        put_atomic(job.paths.task, to_json(storable_settings(job.task), indent=1).encode(), mode=0o644)
        put_rows(job.paths.example, prepared.example)
        if (tokenizer := find_file(to_location(job.config.data.sources[0]) / TOKENIZER_FILE)) is not None:
            put_atomic(job.paths.tokenizer, tokenizer.location.read_bytes())
    if prepared.code is not None and (prepared.changed_code or not prepared.resumes):
        store_code(job.paths, prepared.code)
    if prepared.data_versions is not None:
        store_data_versions(job.paths, prepared.data_versions)
    if not prepared.resumes:
        put_config(job.paths, fill_defaults(job.config)[0])
    else:
        update_stored_config(replace(job, fence=fence))
    evaluation_job = replace(prepared.evaluation_job, fence=fence) if prepared.evaluation_job else None
    return replace(prepared, job=replace(job, fence=fence), evaluation_job=evaluation_job)


def update_stored_config(job: Job) -> None:
    """Updates the stored configuration of an existing run to this start, and records the changed fields as an event.

    Fields that decide the result are the same, or the start was refused before. The stored classes are kept, because
    they also have the default arguments that `code.json` names.
    """
    before = parse_config(job.paths)
    now = replace(
        job.config, task=before.task, optimizer=before.optimizer, optimizers=before.optimizers, schedule=before.schedule
    )
    if changed := changed_fields(before, now):
        put_event(job.paths, "reconfigured", job.fence, fields=changed)
    if now != before:
        put_config(job.paths, now)


def put_config(paths: RunPaths, config: Config) -> None:
    """Writes the `config.yaml`, since the run is resumed from it; only its owner can write it, and read a secret."""
    values = config.to_dict()
    register_secrets(values)
    secret = redact_value(values) != values
    put_atomic(paths.config, config.to_yaml().encode(), mode=0o600 if secret else 0o644)
    if secret:
        logger.warning(
            "The configuration holds a secret. %s contains it, and on a disk only its owner can read the file; MLflow,"
            " logs and events do not contain it. Keep secrets in environment variables.",
            paths.config,
        )


def check_storage(config: Config) -> None:
    """Refuses a storage folder that cannot be created or written to. S3 is not checked here.

    The check writes and removes files in the nearest existing parent.

    Raises:
        ConfigError: No folder can be created there, or the name of the run is that of another one to the file system.
    """
    folder = to_location(config.run.storage_path)
    if not isinstance(folder, Path):
        return
    if (why := why_not_writable(folder)) is None:
        try:
            try_writing(next(parent for parent in (folder, *folder.parents) if parent.exists()))
            _refuse_name_of_other_case(folder, config.run.name)
            return
        except OSError as error:
            why = f"{error.strerror or error} ({folder})"
    raise ConfigError(
        f"No run can be stored in run.storage_path {config.run.storage_path!r}: {why}. Set run.storage_path to a"
        " writable folder that all nodes see under the same path, or to a prefix in a bucket."
    )


def _refuse_name_of_other_case(folder: Path, name: str | None) -> None:
    """Refuses `a` beside a run `A` where a file system finds it under both names (SMB, exFAT, Azure Files)."""
    if name is None or not (folder / name).exists():
        return
    # A file system of macOS may compose letters in another way.
    present = {unicodedata.normalize("NFC", file) for file in os.listdir(folder)}
    if unicodedata.normalize("NFC", name) not in present:
        other = next((file for file in present if file.casefold() == name.casefold()), name)
        raise ConfigError(
            f"run.name is {name!r}, but {folder} has a run {other!r}, and its file system treats both names as the"
            f" same. Choose another name, or {other!r} to continue the existing run."
        )


@dataclass(frozen=True)
class TaskCheck:
    """The findings of `check_task`.

    Args:
        findings: At least one finding for each check; the level is `ok`, `warning`, `failed` or `refused`.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Returns whether a run would start and keep its guarantees."""
        return all(finding.level in ("ok", "warning") for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Returns the exit code of `ray-app check`: 2 if the run is refused, 1 if a check failed, otherwise 0."""
        return 2 if has_refusal(list(self.findings)) else int(not self.ok)

    def __str__(self) -> str:
        return "\n".join(f"{finding.level:<8} {finding.topic}: {redact(finding.text)}" for finding in self.findings)


def check_task(config: Config) -> TaskCheck:
    """Runs some rows through everything that a run does with a task, on the CPU and without Ray, and returns findings.

    The checks are those of a start; and decoding, training on one worker and on four, a resume in the middle,
    evaluation and export. They also look for random numbers that come neither from torch's generators nor from the
    keys. All processes and files of the check are gone when it returns. A test of a project can be
    `check = check_task(load_config("train.yaml")); assert check.ok, check`.

    Args:
        config: A configuration, for example from `load_config`. Its `run` section does not matter.

    Returns:
        The findings of all checks, also if the configuration or the data is refused.
    """
    return TaskCheck(tuple(iter_findings(config)))


def iter_findings(config: Config) -> Iterator[Finding]:
    """Yields the findings of `check_task` as the checks end."""
    # The short trainings need workers.
    strategy = strategy_with_workers(config.train.strategy)
    refused, untried = list[str](), list[str]()
    with closing(PreflightContext(config.replace(run__name=None, train__strategy=strategy))) as context:
        for check in CHECKS:
            if refused and (not check.at_start or not {*refused, *untried}.isdisjoint(check.needs)):
                untried.append(check.name)
                continue
            start_s = time.monotonic()
            try:
                outcome = check.execute(context)
            except RayAppError as error:
                refused.append(check.name)
                # Errors of the task's code and of rows are failures.
                is_bad_row = isinstance(error, BadRowError)
                is_of_task = is_bad_row or isinstance(error.__cause__, TaskError) or not is_refusal(error)
                text = f"{error}. Fix Task.decode, or the row." if is_bad_row else str(error)
                yield Finding("failed" if is_of_task else "refused", check.name, text, time.monotonic() - start_s)
                continue
            if outcome is not None:
                seconds = time.monotonic() - start_s if outcome.seconds is None else outcome.seconds
                yield Finding(outcome.level, check.name, outcome.text or check.message, seconds)
                yield from (Finding("warning", check.name, text) for text in outcome.warnings)
    if untried:
        yield Finding("warning", "the rest", f"{len(untried)} more were not run: they need what is refused above.")
