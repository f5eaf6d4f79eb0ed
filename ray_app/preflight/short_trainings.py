"""Short trainings on some rows of a run's data, which `ray-app check` compares: on the CPU, without Ray.

A few steps of the real training run in one process and in several, with the real gradient reduction, and once more
after a resume. All of them run in a sandbox.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
from torch import Tensor

from ray_app.checkpoint.store import CheckpointStore
from ray_app.data.probes import decode_first_rows
from ray_app.data.reader import RowSource, fetch_in_process, load_all
from ray_app.data.windows import CachedWindows, StreamedWindows, Windows
from ray_app.devices import HOST
from ray_app.errors import PeerLostError, RayAppError
from ray_app.models.package import write_files
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Cursor
from ray_app.preflight.inputs import make_plan
from ray_app.preflight.purity import find_impurities
from ray_app.preflight.sandbox import Call, CallResult, Sandbox
from ray_app.reduction.world import World
from ray_app.runlog.evaluations import read_scores
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.loop import train
from ray_app.train.membership import Membership
from ray_app.train.process_group import FileStoreMembership
from ray_app.train.state.state import seed_init

MembershipFactory = Callable[[World, Path], Membership]
"""Makes the membership of a worker from its rank and size, and from the file at which the process group meets."""
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

_SHORT_SETTINGS: dict[str, Any] = {
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
    "train__local_steps": 1,
    "train__outer_lr": 1.0,
    "train__outer_momentum": 0.0,
    "train__compile": False,
    "train__capture": False,
    "train__steps_per_epoch": None,
    "train__epochs": STEPS,
    "train__max_steps": STEPS,
    "run__branch_from": None,
    "run__branch_point": None,
    "checkpoint__every_steps": MIDDLE,
    "checkpoint__every_epochs": None,
    "checkpoint__keep_last": STEPS,
    "checkpoint__snapshot_every_steps": None,
    "evaluate__where": "workers",
    "evaluate__batch_size": _FORWARD,
}


def stream_windows(job: Job, cursor: Cursor, assigned: range) -> Windows:
    """Opens windows that are read ahead in the worker, in read tasks of a few rows."""
    source = replace(job.source, task_rows=7)
    return StreamedWindows(job.plan, cursor, assigned, job.passes, fetch_in_process, source)


def cache_windows(job: Job, cursor: Cursor, assigned: range) -> Windows:
    """Opens windows that are gathered from the memory of the worker, which reads all data once."""
    del cursor, assigned
    return CachedWindows(load_all(fetch_in_process, job.source))


def train_rank(
    rank: int, store: Path, job: Job, size: int, hooks: Hooks, windows: OpenWindows, membership: MembershipFactory
) -> None:
    """Runs the training loop as one rank of several; the process group meets at the file `store`."""
    world = World(rank, size, job.plan.logical_workers)
    train(WorkerContext(job, membership(world, store), windows, HOST, hooks))


def make_short_job(job: Job, initial: dict[str, Tensor] | None, folder: Path) -> Job:
    """Returns a job of a few steps on some rows of a run's data: on the CPU, with `ddp` and exact reduction."""
    micro_batch = min(_MICRO_BATCH, job.plan.micro_batch)
    config = job.config.replace(
        run__storage_path=str(folder), data__global_batch_size=WORKERS * micro_batch, **_SHORT_SETTINGS
    )
    # A cache cannot hold rows that are decoded differently in every epoch.
    if job.task.has_epoch_decode:
        config = config.replace(data__cache="none")
    # fp16 needs a GPU.
    if config.train.precision == "fp16":
        config = config.replace(train__precision="fp32")
    # The few rows are used without weights.
    config = config.replace(data__path=config.data.sources[0])
    plan = make_plan(config, _sample_manifest(job.plan.manifest), None)
    evaluation, initial_file = job.eval_source, None
    if evaluation is not None:
        evaluation = RowSource(evaluation.reader, _sample_manifest(evaluation.manifest), evaluation.task_rows)
    if initial is not None:
        initial_file = str(folder / "initial.safetensors")
        safetensors.torch.save_file(initial, initial_file)
    job = replace(job, config=config, plan=plan, run_root=str(folder / "run"), fence=1)
    return replace(job, eval_source=evaluation, initial=initial_file)


def _sample_manifest(manifest: Manifest) -> Manifest:
    """Returns a manifest of the first rows of a few row groups, evenly spaced over the data."""
    small = [i for i, rows in enumerate(manifest.rows) if 0 < rows <= _FEW_ROWS]
    small = small or [min((i for i, rows in enumerate(manifest.rows) if rows), key=lambda i: int(manifest.rows[i]))]
    chosen = np.unique(np.linspace(0, len(small) - 1, min(_GROUPS, len(small))).round().astype(np.int64))
    groups = np.array(small, np.int64)[chosen]
    rows = np.minimum(manifest.rows[groups], -(-_ROWS // len(groups)))
    index_in_file = manifest.index_in_file[groups]
    return replace(manifest, file_of=manifest.file_of[groups], index_in_file=index_in_file, rows=rows)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training in some processes.

    Args:
        seconds: Duration of the slowest process.
        error: An error of one of the processes.
        params: Digest of the parameters after the last step.
        scores: The metrics of every evaluation with its step, as text with all digits.
    """

    seconds: float
    error: RayAppError | None
    params: str = ""
    scores: tuple[tuple[int, str], ...] = ()

    @classmethod
    def collect(cls, job: Job, call_results: Sequence[CallResult]) -> TrainingResult:
        """Returns the result of a training from the results of its calls and the files of the run."""
        seconds = max(result.seconds for result in call_results)
        errors = [result.error for result in call_results if result.error is not None]
        if errors:
            # The error of the failed process comes before the errors of the peers that lost it.
            return cls(seconds, min(errors, key=lambda error: isinstance(error, PeerLostError)))
        scores = sorted(
            (e.step, ", ".join(f"{name} {value!r}" for name, value in sorted(e.metrics.items())))
            for e in read_scores(job.paths)
        )
        return cls(seconds, None, CheckpointStore(job.paths).commits()[-1].params_digest, tuple(scores))


class FirstResults(NamedTuple):
    """The results of the calls that need no training before them.

    Args:
        impurities: The result of `find_impurities`.
        export: The result of `export_untrained`.
        one: A training on one worker.
        repeated: The same training once more.
    """

    impurities: CallResult
    export: CallResult
    one: TrainingResult
    repeated: TrainingResult


class ShortTrainings:
    """Trainings and other calls of a short job in a sandbox, each of which runs once, most of them concurrently.

    Args:
        job: The job, from `make_short_job`.
        sandbox: The sandbox.
    """

    def __init__(self, job: Job, sandbox: Sandbox) -> None:
        self._job = job
        self._sandbox = sandbox

    def _copy(self, name: str) -> Job:
        """Returns the job in a folder of its own."""
        return replace(self._job, run_root=f"{self._job.run_root}-{name}")

    @cached_property
    def first(self) -> FirstResults:
        """The results of the calls that need no training before them."""
        alone, again = self._copy("alone"), self._copy("again")
        calls: list[Call] = [(find_impurities, (self._job,)), (export_untrained, (self._job,))]
        calls += [*_training_calls(alone, 1), *_training_calls(again, 1)]
        impurities, export, *trained = self._sandbox.run(calls, _CALL_TIMEOUT_S)
        one, repeated = TrainingResult.collect(alone, trained[:1]), TrainingResult.collect(again, trained[1:])
        return FirstResults(impurities, export, one, repeated)

    @cached_property
    def later(self) -> tuple[TrainingResult, TrainingResult]:
        """A training on several workers, and one on two from the middle of `first.one` on, which has succeeded."""
        together, resumed = self._copy("together"), _copy_from_middle(self._copy("alone"), "resumed")
        calls = [*_training_calls(together, WORKERS), *_training_calls(resumed, 2)]
        results = self._sandbox.run(calls, _CALL_TIMEOUT_S)
        return TrainingResult.collect(together, results[:WORKERS]), TrainingResult.collect(resumed, results[WORKERS:])


def _training_calls(job: Job, size: int) -> list[Call]:
    """Returns the calls, one per process, that together train a job with `size` processes."""
    windows = cache_windows if job.config.data.cache == "memory" else stream_windows
    store = Path(f"{job.run_root}.store")
    return [(train_rank, (rank, store, job, size, Hooks(), windows, FileStoreMembership)) for rank in range(size)]


def _copy_from_middle(job: Job, name: str) -> Job:
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


def export_untrained(job: Job) -> tuple[str, tuple[str, ...]]:
    """Exports the untrained model and compares it; returns the format, and why it is not a `torch.export` program."""
    seed_init(job.config.seed, HOST)
    source = job.eval_source or job.source
    with tempfile.TemporaryDirectory() as folder:
        export = write_files(
            job.task, job.task.build_model(), decode_first_rows(source.reader, source.manifest, 2), Path(folder)
        )
        return export.format, export.refused
