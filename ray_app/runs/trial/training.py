"""A few steps of the real training on some rows, by one process or several with the real exchange, and what came of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from ray_app.data.feed.streamed import StreamedWindows
from ray_app.data.feed.windows import CachedWindows, Windows
from ray_app.data.read.reader import RowSource
from ray_app.data.read.slices import fetch_here
from ray_app.data.read.whole import load_all
from ray_app.errors import PeerLostError, RayAppError
from ray_app.exchange.exchange import World, collective
from ray_app.plan.cursor import Cursor
from ray_app.plan.manifest import Manifest
from ray_app.record.evaluations import read_scores
from ray_app.runs.preparing.plan import make_plan
from ray_app.runs.preparing.prepare import Prepared
from ray_app.runs.trial.processes import EndedCall
from ray_app.train.group.alone import Alone
from ray_app.train.group.messages import Formed
from ray_app.train.job import Job
from ray_app.train.loop import train

STEPS, MIDDLE, WORKERS = 6, 3, 4
_ROWS, _MICRO_BATCH, _GROUPS, _FORWARD = 64, 4, 4, 8
_FEW_ROWS = 20_000
"""More rows than these of a row group are read only if there is no smaller one."""
_EXCHANGE_S = 30.0

_AS_IN_THE_TRIAL: dict[str, Any] = {
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


def trial_job(prepared: Prepared, folder: Path) -> Job:
    """A job of a few steps with some rows of a run's data, in a folder; on the CPU, with `ddp` and exact reduction."""
    job = prepared.job
    micro_batch = min(_MICRO_BATCH, job.plan.micro_batch)
    config = job.config.replace(run__storage_path=str(folder), data__global_batch_size=WORKERS * micro_batch, **_AS_IN_THE_TRIAL)
    if job.task.decodes_by_epoch:  # which a cache cannot hold
        config = config.replace(data__cache="none")
    if config.train.precision == "fp16":  # needs a GPU
        config = config.replace(train__precision="fp32")
    plan = make_plan(config, _some_rows(job.plan.manifest), None)
    evaluation, initial = job.evaluation, None
    if evaluation is not None:
        evaluation = RowSource(evaluation.reader, _some_rows(evaluation.manifest), evaluation.task_rows)
    if prepared.initial is not None:
        initial = str(folder / "initial.safetensors")
        safetensors.torch.save_file(prepared.initial, initial)
    return replace(job, config=config, plan=plan, run_root=str(folder / "run"), fence=1, evaluation=evaluation, initial=initial)


def _some_rows(manifest: Manifest) -> Manifest:
    """The first rows of some row groups, from all over the data."""
    small = [i for i, rows in enumerate(manifest.rows) if 0 < rows <= _FEW_ROWS]
    small = small or [min((i for i, rows in enumerate(manifest.rows) if rows), key=lambda i: int(manifest.rows[i]))]
    chosen = np.unique(np.linspace(0, len(small) - 1, min(_GROUPS, len(small))).round().astype(np.int64))
    groups = np.array(small, np.int64)[chosen]
    rows = np.minimum(manifest.rows[groups], -(-_ROWS // len(groups)))
    return Manifest(manifest.paths, manifest.file_of[groups], manifest.index_in_file[groups], rows)


class _Together(Alone):
    """The membership of processes that share a file; they are there from beginning to end."""

    def __init__(self, world: World, store: Path) -> None:
        super().__init__(world.logical_workers, lambda: False)
        self._world, self._store = world, store

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, Formed]]:
        """See `Membership.generation`; there is one."""
        del step, lost
        rank, size = self._world.rank, self._world.size
        formed = Formed(1, rank, size, "", 0)
        if size == 1:
            yield self._world, formed
            return
        with collective():
            timeout = timedelta(seconds=_EXCHANGE_S)
            dist.init_process_group("gloo", store=FileStore(str(self._store), size), rank=rank, world_size=size, timeout=timeout)
            dist.barrier()  # nobody leaves while another still connects
        try:
            yield self._world, formed
        finally:
            dist.destroy_process_group()


def _train_as(job: Job, rank: int, size: int, store: Path) -> None:
    """Trains as one of several processes; called in each."""
    evaluation = job.evaluation
    load = (lambda: load_all(fetch_here, evaluation).arrays) if evaluation is not None else None
    membership = _Together(World(rank, size, WORKERS), store)
    train(job, membership, _open_windows, torch.device("cpu"), load_evaluation=load)


def _open_windows(job: Job, cursor: Cursor, played: range) -> Windows:
    """The data as training has it, decoded another way in every epoch where the task does that."""
    if job.config.data.cache == "none":
        return StreamedWindows(job.plan, cursor, played, job.passes, fetch_here, job.source)
    return CachedWindows(load_all(fetch_here, job.source))


@dataclass(frozen=True)
class Trained:
    """What a training of some processes gave.

    Args:
        error: What one of them raised.
        params: Digest of the parameters after the last step.
        scores: The metrics of every evaluation, by step, as text with all their digits.
    """

    error: RayAppError | None
    params: str = ""
    scores: tuple[tuple[int, str], ...] = ()


def calls(job: Job, size: int) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The calls that train a job with so many processes, at the same time."""
    return [(_train_as, (job, rank, size, Path(f"{job.run_root}.store"))) for rank in range(size)]


def outcome(job: Job, ended: Sequence[EndedCall]) -> Trained:
    """What came of them."""
    errors = [each.error for each in ended if each.error is not None]
    errors.sort(key=lambda error: isinstance(error, PeerLostError))  # what a peer met comes first
    if errors:
        return Trained(errors[0])
    scores = tuple(
        sorted((e.step, ", ".join(f"{name} {value!r}" for name, value in sorted(e.metrics.items()))) for e in read_scores(job.paths))
    )
    return Trained(None, CheckpointStore(job.paths).commits()[-1].params_digest, scores)


def from_the_middle(job: Job, name: str) -> Job:
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
