"""`check_task` and `ray-app check`: what a run would show much later, in seconds and without Ray.

A few steps of the real training on some rows, by one process or several with the real exchange, and what came of them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

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
from ray_app.reduction.base import World, collective
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.redaction import redact
from ray_app.train.job import Job
from ray_app.train.loop import train
from ray_app.train.membership import GenerationInfo, SingleProcessMembership
from ray_app.train.state.state import seed_init
from ray_app.watch.terminal import Finding

STEPS, MIDDLE, WORKERS = 6, 3, 4
_ROWS, _MICRO_BATCH, _GROUPS, _FORWARD = 64, 4, 4, 8
_FEW_ROWS = 20_000
"""More rows than these of a row group are read only if there is no smaller one."""
_REDUCTION_TIMEOUT_S = 30.0

_CHECK_SETTINGS: dict[str, Any] = {
    "scaling__max_workers": WORKERS,
    "scaling__logical_workers": WORKERS,
    "scaling__threads_per_worker": 1,
    "scaling__gpus_per_worker": 0,
    "data__shuffle_window_rows": 2 * _MICRO_BATCH,
    "data__sampling": "none",
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
    """A job of a few steps with some rows of a run's data, in a folder; on the CPU, with `ddp` and exact reduction."""
    job = prepared.job
    micro_batch = min(_MICRO_BATCH, job.plan.micro_batch)
    config = job.config.replace(
        run__storage_path=str(folder), data__global_batch_size=WORKERS * micro_batch, **_CHECK_SETTINGS
    )
    if job.task.has_epoch_decode:  # which a cache cannot hold
        config = config.replace(data__cache="none")
    if config.train.precision == "fp16":  # needs a GPU
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
    """The first rows of some row groups, from all over the data."""
    small = [i for i, rows in enumerate(manifest.rows) if 0 < rows <= _FEW_ROWS]
    small = small or [min((i for i, rows in enumerate(manifest.rows) if rows), key=lambda i: int(manifest.rows[i]))]
    chosen = np.unique(np.linspace(0, len(small) - 1, min(_GROUPS, len(small))).round().astype(np.int64))
    groups = np.array(small, np.int64)[chosen]
    rows = np.minimum(manifest.rows[groups], -(-_ROWS // len(groups)))
    return Manifest(manifest.paths, manifest.file_of[groups], manifest.index_in_file[groups], rows)


class _FileStoreMembership(SingleProcessMembership):
    """The membership of processes that share a file; they are there from beginning to end."""

    def __init__(self, world: World, store: Path) -> None:
        super().__init__(world.logical_workers, lambda: False)
        self._world, self._store = world, store

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`; there is one."""
        del step, lost
        rank, size = self._world.rank, self._world.size
        formed = GenerationInfo(1, rank, size, "", 0)
        if size == 1:
            yield self._world, formed
            return
        with collective():
            timeout = timedelta(seconds=_REDUCTION_TIMEOUT_S)
            dist.init_process_group(
                "gloo", store=FileStore(str(self._store), size), rank=rank, world_size=size, timeout=timeout
            )
            dist.barrier()  # nobody leaves while another still connects
        try:
            yield self._world, formed
        finally:
            dist.destroy_process_group()


def _train_rank(job: Job, rank: int, size: int, store: Path) -> None:
    """Trains as one of several processes; called in each."""
    evaluation = job.evaluation
    load = (lambda: load_all(fetch_in_process, evaluation).arrays) if evaluation is not None else None
    membership = _FileStoreMembership(World(rank, size, WORKERS), store)
    train(job, membership, _open_windows, torch.device("cpu"), load_evaluation=load)


def _open_windows(job: Job, cursor: Cursor, played: range) -> Windows:
    """The data as training has it, decoded another way in every epoch where the task does that."""
    if job.config.data.cache == "none":
        return StreamedWindows(job.plan, cursor, played, job.passes, fetch_in_process, job.source)
    return CachedWindows(load_all(fetch_in_process, job.source))


@dataclass(frozen=True)
class TrainingResult:
    """What a training of some processes gave.

    Args:
        error: What one of them raised.
        params: Digest of the parameters after the last step.
        scores: The metrics of every evaluation, by step, as text with all their digits.
    """

    error: RayAppError | None
    params: str = ""
    scores: tuple[tuple[int, str], ...] = ()


def training_calls(job: Job, size: int) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The calls that train a job with so many processes, at the same time."""
    return [(_train_rank, (job, rank, size, Path(f"{job.run_root}.store"))) for rank in range(size)]


def collect_result(job: Job, ended: Sequence[CallResult]) -> TrainingResult:
    """What came of them."""
    errors = [each.error for each in ended if each.error is not None]
    errors.sort(key=lambda error: isinstance(error, PeerLostError))  # what a peer met comes first
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
    """A copy of a job that was trained, in a folder of this name, as it was in the middle."""
    assert isinstance(job.paths.root, Path)
    root = job.paths.root.with_name(name)
    shutil.copytree(job.paths.root, root)
    made = replace(job, run_root=str(root))
    for commit in CheckpointStore(made.paths).commits():
        if commit.step > MIDDLE:
            shutil.rmtree(made.paths.checkpoint(commit.step, commit.fence))  # type: ignore[arg-type]
    for evaluation in (root / "evaluations").glob("*.json"):
        evaluation.unlink()
    return made


_CALL_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class TaskCheck:
    """What a check of a task found.

    Args:
        findings: Line by line; the level is `ok`, `failed` or `warning`.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.level in ("ok", "warning") for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(f"{finding.level:<8} {finding.topic}: {redact(finding.text)}" for finding in self.findings)


def check_task(config: Config) -> TaskCheck:
    """Takes some rows of the data through everything that a run does with a task, on the CPU and without Ray: decoding,
    training by one worker and by four, a resume in the middle, evaluation, export; and looks for random numbers that do
    not come from torch or the keys.

    Nothing is left behind: the processes that do it, and their files, are gone at the end. A test of a project's can be
    `check = check_task(load_config("train.yaml")); assert check.ok, check`.

    Args:
        config: From `load_config`; where a run would be stored does not matter.

    Raises:
        ConfigError: The configuration is refused, as a run would refuse it.
        DataError: The data is refused, likewise.
    """
    try:
        prepared = prepare(config.replace(run__name=None, train__strategy=_checked_strategy(config)))
    except BadRowError as error:
        return TaskCheck((Finding("failed", "rows", f"{error}. Mend Task.decode, or the row."),))
    except ConfigError as error:
        if not isinstance(error.__cause__, TaskError):
            raise
        return TaskCheck((Finding("failed", "one row", str(error)),))
    with tempfile.TemporaryDirectory(prefix="ray_app-check-") as name:
        folder = Path(name)
        job = make_short_job(prepared, folder)
        with closing(Sandbox(folder / "processes")) as processes:
            said = [Finding("ok", "data", line) for line in prepared.data] + [
                Finding("warning", "data", line) for line in prepared.warnings
            ]
            done = Finding("ok", "one row", "went through training and evaluation.")
            return TaskCheck((*said, done, *_run_checks(prepared, job, processes)))


def _checked_strategy(config: Config) -> str:
    return "ddp" if config.train.strategy == "single" else config.train.strategy


def _run_checks(prepared: Prepared, job: Job, processes: Sandbox) -> Iterator[Finding]:
    """All checks; what needs nothing of others runs at the same time."""
    alone, again, together = (
        replace(job, run_root=f"{job.run_root}-{name}") for name in ("alone", "again", "together")
    )
    pure, exported, *ended = processes.run(
        [(find_impurities, (job,)), (export_untrained, (job,)), *training_calls(alone, 1), *training_calls(again, 1)],
        _CALL_TIMEOUT_S,
    )
    yield _report_randomness(pure)
    one, repeated = collect_result(alone, ended[:1]), collect_result(again, ended[1:])
    if one.error is not None:
        yield Finding("failed", "training", f"{STEPS} steps on one worker: {one.error}")
    else:
        resumed = copy_from_middle(alone, "resumed")
        ended = processes.run([*training_calls(together, WORKERS), *training_calls(resumed, 2)], _CALL_TIMEOUT_S)
        yield from _compare_trainings(
            one, repeated, collect_result(together, ended[:WORKERS]), collect_result(resumed, ended[WORKERS:])
        )
    yield _report_export(exported)
    if prepared.job.config.scaling.gpus_per_worker:
        yield Finding("warning", "GPU", "was not tried: a check computes on the CPU.")


def _report_randomness(pure: CallResult) -> Finding:
    if pure.error is not None:
        return Finding("failed", "randomness", str(pure.error))
    if pure.value:
        return Finding("failed", "randomness", "\n".join(pure.value))
    return Finding(
        "ok", "randomness", "the same rows, keys and seeds of torch's give the same; nothing else is drawn from."
    )


def _compare_trainings(
    one: TrainingResult, repeated: TrainingResult, together: TrainingResult, resumed: TrainingResult
) -> Iterator[Finding]:
    """Compares trainings; what is wrong with the first of these is told, since the others then follow."""
    many = f"{STEPS} steps on one worker and on {WORKERS}"
    again = f"{STEPS} steps, and the same from step {MIDDLE} on after a resume on 2 workers"
    if repeated.error is not None or repeated.params != one.params:
        why = (
            f": {repeated.error}"
            if repeated.error
            else " give other parameters each time. See docs/own-task.md on where randomness must come from."
        )
        yield Finding("failed", "training", f"{STEPS} steps on one worker, twice,{why}")
        return
    kept = (
        "A worker has only its own rows: nothing may be kept from one batch for the next but in the model's parameters"
        " and buffers."
    )
    yield _compare_params("workers", many, one, together, kept)
    kept = (
        "A worker that resumes has the checkpoint alone: what a task or a model keeps elsewhere than in parameters and"
        " buffers is gone."
    )
    yield _compare_params("resume", again, one, resumed, kept)
    if not one.scores:
        yield Finding("warning", "evaluation", "there is none: data.eval_path is not given.")
    elif together.error is None and together.params == one.params:
        kept = (
            "The metrics' states must be sums, minima, maxima or lists, and say nothing of who updates them, or of the"
            " order."
        )
        if one.scores == together.scores:
            yield Finding(
                "ok", "evaluation", f"the same metrics from one worker and from {WORKERS}: {one.scores[-1][1]}."
            )
        else:
            yield Finding(
                "failed",
                "evaluation",
                f"one worker finds {one.scores[-1][1]}, {WORKERS} find {together.scores[-1][1]}. {kept}",
            )


def _compare_params(topic: str, what: str, one: TrainingResult, other: TrainingResult, advice: str) -> Finding:
    if other.error is not None:
        return Finding("failed", topic, f"{what}: {other.error}")
    if other.params != one.params:
        return Finding("failed", topic, f"{what}: other parameters ({one.params[:12]}, {other.params[:12]}). {advice}")
    return Finding("ok", topic, f"{what}: the same parameters, bit for bit.")


def export_untrained(job: Job) -> tuple[str, tuple[str, ...]]:
    """Writes the model as it is before the first step, loads it again and compares; called in a process of its own."""
    seed_init(job.config.seed, torch.device("cpu"))
    source = job.evaluation or job.source
    with tempfile.TemporaryDirectory() as folder:
        made = write_files(
            job.task, job.task.build_model(), decode_first_rows(source.reader, source.manifest, 2), Path(folder)
        )
        return made.format, made.refused


def _report_export(exported: CallResult) -> Finding:
    if exported.error is not None:
        return Finding(
            "failed",
            "export",
            f"{exported.error}\nA run trains all the same; ray-app export and register would refuse its model.",
        )
    form, refused = exported.value
    if refused:
        return Finding(
            "warning", "export", f"as {form} with the task's code; not as a program of its own ({'; '.join(refused)})."
        )
    return Finding("ok", "export", f"as {form}, which predicts the same.")
