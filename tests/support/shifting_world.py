"""Workers as plain processes; their set changes while they train, as planned or because one is killed."""

import dataclasses
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray_app.reduction.world import World
from ray_app.testing import RankResult, WorkerPool, cache_windows
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.loop import train
from ray_app.train.membership import DrainedError, Flags, GenerationInfo
from tests.support.local_world import CPU, LocalMembership


@dataclass(frozen=True)
class KillOnce:
    """A hook that kills the worker of a rank after a step, the first time that it gets there, and creates `proof`."""

    proof: Path
    step: int
    rank: int

    def __call__(self, rank: int, step: int) -> None:
        if (rank, step) == (self.rank, self.step) and not self.proof.exists():
            self.proof.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class ShiftingMembership(LocalMembership):
    """The membership of a worker in generations that are planned beforehand.

    Args:
        worker: The number of this worker.
        groups: The workers of each generation, in the order of their ranks.
        reforms: The number of steps after which the workers of a generation form the next; 0: they do not.
        store: The file of the process group's store.
        logical_workers: Number of logical workers.
        backend: Backend of the process groups.
    """

    recovers = True

    def __init__(
        self, worker: int, groups: list[list[int]], reforms: list[int], store: Path, logical_workers: int, backend: str
    ) -> None:
        super().__init__(World(0, 1, logical_workers), store, backend=backend)
        self._worker = worker
        self._groups = groups
        self._reforms = reforms
        self._folder, self._at = store, -1

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`."""
        self._at += 1
        while self._at < 0 or (self._worker not in self._groups[self._at] and step < 0):
            self._at += 1
        group = self._groups[self._at]
        if self._worker not in group:
            raise DrainedError
        self._num_calls = 0
        self._world = World(group.index(self._worker), len(group), self._world.logical_workers)
        self._store = Path(f"{self._folder}-{self._at}")
        with super().generation(step, was_broken) as (world, formed):
            yield world, dataclasses.replace(formed, number=self._at + 1)

    def flags(self) -> Flags:
        """See `Membership.flags`; the loop calls it once a step."""
        if not self._groups[self._at]:
            # All workers leave.
            return Flags.SAVE
        self._num_calls += 1
        return (
            Flags.REFORM if self._at < len(self._reforms) and self._num_calls == self._reforms[self._at] else Flags(0)
        )

    def is_draining(self) -> bool:
        """See `Membership.is_draining`."""
        return self._at + 1 < len(self._groups) and self._worker not in self._groups[self._at + 1]


def train_shifting(
    pool: WorkerPool,
    job: Job,
    groups: list[list[int]],
    reforms: list[int],
    hooks: Hooks = Hooks(),
    windows: OpenWindows = cache_windows,
    backend: str = "gloo",
) -> list[RankResult]:
    """Trains in several generations; returns the result of each worker."""
    return pool.call(
        1 + max(max(group, default=0) for group in groups),
        train_in_groups,
        job,
        groups,
        reforms,
        hooks,
        windows,
        backend,
    )


def train_in_groups(
    worker: int,
    store: Path,
    job: Job,
    groups: list[list[int]],
    reforms: list[int],
    hooks: Hooks,
    windows: OpenWindows,
    backend: str,
) -> str:
    try:
        train(
            WorkerContext(
                job,
                ShiftingMembership(worker, groups, reforms, store, job.plan.logical_workers, backend),
                windows,
                CPU,
                hooks,
            )
        )
    except BaseException:
        traceback.print_exc()
        raise
    return "done"
