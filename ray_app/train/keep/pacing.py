"""What is told of the time of the workers: which of them is slow and why, that logical workers moved, and what each did with its time."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ray_app.exchange.exchange import World, gather
from ray_app.record.progress.journal import put_event
from ray_app.task.environment import describe
from ray_app.train.job import Job
from ray_app.train.step.pace import Pace, SlowRank
from ray_app.train.step.timer import SpentOf

_MOST_TOLD = 64


class Pacing:
    """The `Pace` of a generation, where its workers compute on their own until they meet: not with `fsdp`, nor of one worker.

    Args:
        job: The run.
        world: The workers.
        hosts: Their addresses, if they are known.
        device: Where this one computes.

    Attributes:
        shares, imbalance: See `Pace`.
        slow: Of each slow worker, by its rank, how many times as long as the others it takes.
    """

    def __init__(self, job: Job, world: World, hosts: Sequence[str], device: torch.device) -> None:
        self._job, self._world, self._hosts, self._device = job, world, hosts, device
        self._pace = Pace(world, job.config.scaling.balance == "speed") if world.size > 1 and not world.strided else None
        self.shares: tuple[range, ...] | None = None
        self.imbalance: float | None = None
        self.slow: dict[str, float] = {}
        self._step = 0

    def add(self, step: int, spent: Sequence[SpentOf]) -> None:
        """Takes note of the finished step of a number; a collective if that tells something.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        if self._pace is None:
            return
        self._step, pace = step, self._pace
        if (found := pace.add(spent)) is None:
            return
        self.shares, self.imbalance = pace.shares, pace.imbalance
        self.slow = {str(rank): round(slow.times, 2) for rank, slow in pace.slow.items()}
        if found:
            self._tell(found)

    def _tell(self, found: list[SlowRank]) -> None:
        places = gather({"name": platform.node(), "pid": os.getpid(), "device": describe(self._device)["device"]}, self._world)
        if self._world.rank == 0:
            for slow in found:
                details = asdict(slow) | {"host": self._host(slow.rank)} | places[slow.rank]
                put_event(self._job.paths, details.pop("what"), self._job.fence, step=self._step, **details)

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if self._hosts else ""

    def begin(self, world: World) -> None:
        """Goes on after logical workers have moved."""
        assert self._pace is not None
        if world.rank == 0:
            before, after = ([len(w.played_by(rank)) for rank in range(w.size)] for w in (self._world, world))
            put_event(self._job.paths, "balanced", self._job.fence, step=self._step, before=before, after=after)
        self._world, self.shares = world, None
        self._pace.begin(world)

    def end(self) -> None:
        """Tells what the workers did with their time."""
        if self._pace is None or self._world.rank or not (spent := self._pace.spent()):
            return
        workers: list[dict[str, Any]] = [{"rank": rank, "host": self._host(rank)} | each for rank, each in enumerate(spent)]
        workers.sort(key=lambda worker: worker["waits"])
        put_event(self._job.paths, "spent", self._job.fence, step=self._step, workers=workers[:_MOST_TOLD])
