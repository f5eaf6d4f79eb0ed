"""Training in the calling process, without workers: for debugging with a breakpoint, with the bits that workers would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ray_app.data.decoded import load_all
from ray_app.data.source import fetch_here
from ray_app.data.streamed import StreamedWindows
from ray_app.data.windows import CachedWindows, Windows
from ray_app.plan.cursor import Cursor
from ray_app.record.journal import StepRecord
from ray_app.strategy.base import World
from ray_app.train.environment import use_deterministic_algorithms
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job
from ray_app.train.loop import train
from ray_app.train.messages import Flags, Formed, Phase


class Alone:
    """The membership of the only worker, see `Membership`.

    Args:
        logical_workers: L, all of which it plays.
        stops: Tells whether to stop.
    """

    recovers = False

    def __init__(self, logical_workers: int, stops: Callable[[], bool]) -> None:
        self._logical_workers, self._stops = logical_workers, stops
        self._recorded = 0
        self.newest: StepRecord | None = None
        """The newest finished step."""
        self.phase: Phase = "starting"
        """What it is doing."""

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, Formed]]:
        """See `Membership.generation`; there is one."""
        del step, lost
        yield World(0, 1, self._logical_workers), Formed(1, 0, 1, "", 0)

    def flags(self) -> Flags:
        """See `Membership.flags`."""
        return Flags.STOP if self._stops() else Flags(0)

    def is_leaving(self) -> bool:
        """See `Membership.is_leaving`."""
        return False

    def enter(self, phase: Phase) -> None:
        """See `Membership.enter`."""
        self.phase = phase

    def moved(self) -> None:
        """See `Membership.moved`; nobody waits."""

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """See `Membership.report`."""
        del step
        self.newest, self._recorded = record or self.newest, recorded

    def recorded(self) -> int:
        """See `Membership.recorded`."""
        return self._recorded


def train_here(job: Job, membership: Alone, hooks: Hooks) -> None:
    """Trains in this process; blocks until the run ends or is to stop. An error ends it: nobody starts it again.

    Args:
        job: What to train.
        membership: Of this process.
        hooks: For fault tests.
    """
    device = torch.device("cuda", 0) if job.config.scaling.gpus_per_worker else torch.device("cpu")
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    evaluation = job.evaluation
    load = (lambda: load_all(fetch_here, evaluation).arrays) if job.workers_evaluate and evaluation is not None else None
    try:
        train(job, membership, _open_windows, device, hooks, load_evaluation=load)
    finally:
        torch.set_num_threads(threads)
        use_deterministic_algorithms(deterministic)


def _open_windows(job: Job, cursor: Cursor, played: range) -> Windows:
    source, data = job.source, job.config.data
    if data.cache == "memory":
        return CachedWindows(load_all(fetch_here, source))
    return StreamedWindows(job.plan, cursor, played, job.passes, job.through_cache(fetch_here), source, data.prefetch_windows)
