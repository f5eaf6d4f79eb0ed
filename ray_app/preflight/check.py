"""`check_task` and `ray-app check`: a run in miniature that finds errors of a task in seconds, on the CPU, without Ray.

A few steps of the real training on some rows run in one process and in several, with the real gradient reduction, and
once more after a resume; the parameters and metrics of these trainings are compared.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.data.local_readers import load_all
from ray_app.data.prefetch import StreamedWindows
from ray_app.data.probes import decode_first_rows
from ray_app.data.reader import RowSource, fetch_in_process
from ray_app.data.windows import CachedWindows, Windows
from ray_app.errors import BadRowError, ConfigError, PeerLostError, RayAppError, TaskError
from ray_app.models.package import write_files
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Cursor
from ray_app.preflight.prepare import Prepared, make_plan, prepare
from ray_app.preflight.purity import find_impurities
from ray_app.preflight.sandbox import CallResult, Sandbox
from ray_app.reduction.base import World
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.redaction import redact
from ray_app.train.job import Job
from ray_app.train.loop import train
from ray_app.train.process_group import FileStoreMembership
from ray_app.train.state.state import seed_init
from ray_app.watch.terminal import Finding

STEPS = 6
MIDDLE = 3
WORKERS = 4
_ROWS = 64
_MICRO_BATCH = 4
_GROUPS = 4
_FORWARD = 8
_FEW_ROWS = 20_000
"""Largest row group that is read, in rows, unless all row groups are larger."""
_CALL_TIMEOUT_S = 300.0

_CHECK_SETTINGS: dict[str, Any] = {
    "scaling__max_workers": WORKERS,
    "scaling__logical_workers": WORKERS,
    "scaling__threads_per_worker": 1,
    "scaling__gpus_per_worker": 0,
    "data__shuffle_window_rows": 2 * _MICRO_BATCH,
    "data__balance_by": None,
    "data__shard": "row",
    "data__last_batch": "keep",
    "data__cache": "memory",
    "train__strategy": "ddp",
    "train__reduction": "exact",
    "train__gradient_compression": "none",
    "train__local_steps": 1,
    "train__outer_lr": 1.0,
    "train__outer_momentum": 0.0,
    "train__compile": False,
    "train__capture": False,
    "train__steps_per_epoch": None,
    "train__epochs": STEPS,
    "train__max_steps": STEPS,
    "checkpoint__every_steps": MIDDLE,
    "checkpoint__every_epochs": None,
    "checkpoint__keep_last": STEPS,
    "checkpoint__snapshot_every_steps": None,
    "evaluate__where": "workers",
    "evaluate__batch_size": _FORWARD,
}


def make_short_job(prepared: Prepared, folder: Path) -> Job:
    """Returns a job of a few steps on some rows of a run's data: on the CPU, with `ddp` and exact reduction."""
    job = prepared.job
    micro_batch = min(_MICRO_BATCH, job.plan.micro_batch)
    config = job.config.replace(
        run__storage_path=str(folder), data__global_batch_size=WORKERS * micro_batch, **_CHECK_SETTINGS
    )
    # A cache cannot hold rows that are decoded differently in every epoch.
    if job.task.has_epoch_decode:
        config = config.replace(data__cache="none")
    # fp16 needs a GPU.
    if config.train.precision == "fp16":
        config = config.replace(train__precision="fp32")
    plan = make_plan(config, _sample_manifest(job.plan.manifest), None)
    evaluation, initial = job.evaluation, None
    if evaluation is not None:
        evaluation = RowSource(evaluation.reader, _sample_manifest(evaluation.manifest), evaluation.task_rows)
    if prepared.initial is not None:
        initial = str(folder / "initial.safetensors")
        safetensors.torch.save_file(prepared.initial, initial)
    return replace(
        job, config=config, plan=plan, run_root=str(folder / "run"), fence=1, evaluation=evaluation, initial=initial
    )


def _sample_manifest(manifest: Manifest) -> Manifest:
    """Returns a manifest of the first rows of a few row groups, evenly spaced over the data."""
    small = [i for i, rows in enumerate(manifest.rows) if 0 < rows <= _FEW_ROWS]
    small = small or [min((i for i, rows in enumerate(manifest.rows) if rows), key=lambda i: int(manifest.rows[i]))]
    chosen = np.unique(np.linspace(0, len(small) - 1, min(_GROUPS, len(small))).round().astype(np.int64))
    groups = np.array(small, np.int64)[chosen]
    rows = np.minimum(manifest.rows[groups], -(-_ROWS // len(groups)))
    return Manifest(manifest.paths, manifest.file_of[groups], manifest.index_in_file[groups], rows)


def _train_rank(job: Job, rank: int, size: int, store: Path) -> None:
    """Trains a job as one rank of several; runs in each process."""
    evaluation = job.evaluation
    load = (lambda: load_all(fetch_in_process, evaluation).arrays) if evaluation is not None else None
    membership = FileStoreMembership(World(rank, size, WORKERS), store)
    train(job, membership, _open_windows, torch.device("cpu"), load_evaluation=load)


def _open_windows(job: Job, cursor: Cursor, assigned: range) -> Windows:
    """Returns the windows of the training data, as in a run; decoded anew in every epoch if the task requires it."""
    if job.config.data.cache == "none":
        return StreamedWindows(job.plan, cursor, assigned, job.passes, fetch_in_process, job.source)
    return CachedWindows(load_all(fetch_in_process, job.source))


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training in some processes.

    Args:
        error: An error of one of the processes.
        params: Digest of the parameters after the last step.
        scores: The metrics of every evaluation with its step, as text with all digits.
    """

    error: RayAppError | None
    params: str = ""
    scores: tuple[tuple[int, str], ...] = ()


def training_calls(job: Job, size: int) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns the calls, one per process, that together train a job with `size` processes."""
    return [(_train_rank, (job, rank, size, Path(f"{job.run_root}.store"))) for rank in range(size)]


def collect_result(job: Job, call_results: Sequence[CallResult]) -> TrainingResult:
    """Returns the result of a training from the results of its calls and the files of the run."""
    errors = [result.error for result in call_results if result.error is not None]
    # The error of the failed process comes before the errors of the peers that lost it.
    errors.sort(key=lambda error: isinstance(error, PeerLostError))
    if errors:
        return TrainingResult(errors[0])
    scores = tuple(
        sorted(
            (e.step, ", ".join(f"{name} {value!r}" for name, value in sorted(e.metrics.items())))
            for e in read_scores(job.paths)
        )
    )
    return TrainingResult(None, CheckpointStore(job.paths).commits()[-1].params_digest, scores)


def copy_from_middle(job: Job, name: str) -> Job:
    """Copies the run of a trained job to a folder `name`, reset to its middle checkpoint; returns the copied job."""
    assert isinstance(job.paths.root, Path)
    root = job.paths.root.with_name(name)
    shutil.copytree(job.paths.root, root)
    copied_job = replace(job, run_root=str(root))
    for commit in CheckpointStore(copied_job.paths).commits():
        if commit.step > MIDDLE:
            shutil.rmtree(copied_job.paths.checkpoint(commit.step, commit.fence))  # type: ignore[arg-type]
    for evaluation in (root / "evaluations").glob("*.json"):
        evaluation.unlink()
    return copied_job


@dataclass(frozen=True)
class TaskCheck:
    """The findings of `check_task`.

    Args:
        findings: One finding per line of output; the level is `ok`, `failed` or `warning`.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Returns whether no finding has the level `failed`."""
        return all(finding.level in ("ok", "warning") for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(f"{finding.level:<8} {finding.topic}: {redact(finding.text)}" for finding in self.findings)


def check_task(config: Config) -> TaskCheck:
    """Runs some rows through everything that a run does with a task, on the CPU and without Ray, and returns findings.

    The check covers decoding, training on one worker and on four, a resume in the middle, evaluation and export. It
    also looks for random numbers that come neither from torch's generators nor from the keys. All processes and files
    of the check are gone when it returns. A test of a project can be
    `check = check_task(load_config("train.yaml")); assert check.ok, check`.

    Args:
        config: A configuration, for example from `load_config`. Its `run` section does not matter.

    Raises:
        ConfigError: The configuration is refused, as a run would refuse it.
        DataError: The data is refused, as a run would refuse it.
    """
    try:
        prepared = prepare(config.replace(run__name=None, train__strategy=_checked_strategy(config)))
    except BadRowError as error:
        return TaskCheck((Finding("failed", "rows", f"{error}. Fix Task.decode, or the row."),))
    except ConfigError as error:
        if not isinstance(error.__cause__, TaskError):
            raise
        return TaskCheck((Finding("failed", "one row", str(error)),))
    with tempfile.TemporaryDirectory(prefix="ray_app-check-") as name:
        folder = Path(name)
        job = make_short_job(prepared, folder)
        with closing(Sandbox(folder / "processes")) as sandbox:
            data_findings = [Finding("ok", "data", line) for line in prepared.data]
            data_findings += [Finding("warning", "data", line) for line in prepared.warnings]
            dry_run_finding = Finding("ok", "one row", "went through training and evaluation.")
            return TaskCheck((*data_findings, dry_run_finding, *_run_checks(prepared, job, sandbox)))


def _checked_strategy(config: Config) -> str:
    """Returns the strategy of the configuration, or `ddp` for `single`, which has no workers."""
    return "ddp" if config.train.strategy == "single" else config.train.strategy


def _run_checks(prepared: Prepared, job: Job, sandbox: Sandbox) -> Iterator[Finding]:
    """Yields the findings of all checks; independent checks run concurrently."""
    alone, again, together = (
        replace(job, run_root=f"{job.run_root}-{name}") for name in ("alone", "again", "together")
    )
    impurities, exported, *training_results = sandbox.run(
        [(find_impurities, (job,)), (export_untrained, (job,)), *training_calls(alone, 1), *training_calls(again, 1)],
        _CALL_TIMEOUT_S,
    )
    yield _report_randomness(impurities)
    one = collect_result(alone, training_results[:1])
    repeated = collect_result(again, training_results[1:])
    if one.error is not None:
        yield Finding("failed", "training", f"{STEPS} steps on one worker: {one.error}")
    else:
        resumed = copy_from_middle(alone, "resumed")
        call_results = sandbox.run([*training_calls(together, WORKERS), *training_calls(resumed, 2)], _CALL_TIMEOUT_S)
        many = collect_result(together, call_results[:WORKERS])
        yield from _compare_trainings(one, repeated, many, collect_result(resumed, call_results[WORKERS:]))
    yield _report_export(exported)
    if prepared.job.config.scaling.gpus_per_worker:
        yield Finding("warning", "GPU", "was not tried: a check computes on the CPU.")


def _report_randomness(impurities: CallResult) -> Finding:
    """Returns the finding of `find_impurities`."""
    if impurities.error is not None:
        return Finding("failed", "randomness", str(impurities.error))
    if impurities.value:
        return Finding("failed", "randomness", "\n".join(impurities.value))
    return Finding(
        "ok", "randomness", "the same rows, keys and seeds of torch's give the same; nothing else is drawn from."
    )


def _compare_trainings(
    one: TrainingResult, repeated: TrainingResult, together: TrainingResult, resumed: TrainingResult
) -> Iterator[Finding]:
    """Yields the differences of a training from a repetition, from one on several workers and from a resumed one.

    If the repetition differs already, the other comparisons say nothing and are left out.
    """
    many = f"{STEPS} steps on one worker and on {WORKERS}"
    again = f"{STEPS} steps, and the same from step {MIDDLE} on after a resume on 2 workers"
    if repeated.error is not None or repeated.params != one.params:
        difference = (
            f": {repeated.error}"
            if repeated.error
            else " give other parameters each time. See docs/own-task.md on where randomness must come from."
        )
        yield Finding("failed", "training", f"{STEPS} steps on one worker, twice,{difference}")
        return
    advice = (
        "A worker has only its own rows: nothing may be kept from one batch for the next but in the model's parameters"
        " and buffers."
    )
    yield _compare_params("workers", many, one, together, advice)
    advice = (
        "A worker that resumes has the checkpoint alone: what a task or a model keeps elsewhere than in parameters and"
        " buffers is gone."
    )
    yield _compare_params("resume", again, one, resumed, advice)
    if not one.scores:
        yield Finding("warning", "evaluation", "there is none: data.eval_path is not set.")
    elif together.error is None and together.params == one.params:
        advice = (
            "The metrics' states must be sums, minima, maxima or lists, and must not depend on the process"
            " that updates them, or on the order."
        )
        if one.scores == together.scores:
            yield Finding(
                "ok", "evaluation", f"the same metrics from one worker and from {WORKERS}: {one.scores[-1][1]}."
            )
        else:
            yield Finding(
                "failed",
                "evaluation",
                f"one worker finds {one.scores[-1][1]}, {WORKERS} find {together.scores[-1][1]}. {advice}",
            )


def _compare_params(topic: str, description: str, one: TrainingResult, other: TrainingResult, advice: str) -> Finding:
    """Returns the finding of a comparison of the final parameters of two trainings."""
    if other.error is not None:
        return Finding("failed", topic, f"{description}: {other.error}")
    if other.params != one.params:
        return Finding(
            "failed", topic, f"{description}: other parameters ({one.params[:12]}, {other.params[:12]}). {advice}"
        )
    return Finding("ok", topic, f"{description}: the same parameters, bit for bit.")


def export_untrained(job: Job) -> tuple[str, tuple[str, ...]]:
    """Exports the untrained model, loads it again and compares the outputs; runs in a process of the sandbox.

    Returns:
        The format of the export, and the reasons why it is not a `torch.export` program.
    """
    seed_init(job.config.seed, torch.device("cpu"))
    source = job.evaluation or job.source
    with tempfile.TemporaryDirectory() as folder:
        export = write_files(
            job.task, job.task.build_model(), decode_first_rows(source.reader, source.manifest, 2), Path(folder)
        )
        return export.format, export.refused


def _report_export(exported: CallResult) -> Finding:
    """Returns the finding of `export_untrained`."""
    if exported.error is not None:
        return Finding(
            "failed",
            "export",
            f"{exported.error}\nA run trains all the same; ray-app export and register would refuse its model.",
        )
    export_format, refused = exported.value
    if refused:
        return Finding(
            "warning",
            "export",
            f"as {export_format} with the task's code; not as a program of its own ({'; '.join(refused)}).",
        )
    return Finding("ok", "export", f"as {export_format}, which predicts the same.")
