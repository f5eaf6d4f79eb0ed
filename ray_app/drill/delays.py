"""How the drill holds up what goes on: workers that stand still or are slow, storage that is, and pauses of its own.

As in `faults`, everything is pickled, and what happens first leaves a proof.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field

import torch.distributed as dist

from ray_app.checkpoint.store import Commit
from ray_app.drill.faults import Evidence
from ray_app.storage.files import put_json, to_location

HELD_S = 120.0
"""Longest that a worker waits at a step boundary for what is about to happen to its node or its driver."""


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP of a rank after a step; it goes on later, whatever has become of the run by then.

    Args:
        proofs: Where it is recorded.
        name: Name of the proof.
        step: Finished steps at which it happens.
        rank: To which rank.
        seconds: Until it goes on.
    """

    proofs: Evidence
    name: str
    step: int
    rank: int
    seconds: float

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if (
            step == self.step
            and rank == self.rank
            and self.proofs.claim([self.name], rank=rank, step=step, seconds=self.seconds)
        ):
            wake = f"sleep {self.seconds:g}; kill -CONT {os.getpid()}"
            null = subprocess.DEVNULL
            subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True, stdin=null, stdout=null, stderr=null)
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Slow:
    """A rank that takes longer than it needs.

    Args:
        proofs: Where it is recorded, with the seconds that it has wasted, at the end.
        name: Name of the proof.
        first: Finished steps at which it begins.
        last: Finished steps at which it ends.
        rank: Which rank.
        factor: How much longer.
    """

    proofs: Evidence
    name: str
    first: int
    last: int
    rank: int
    factor: float
    _since_s: float = 0.0
    _wasted_s: float = 0.0

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank != self.rank or not self.first <= step <= self.last:
            return
        if step > self.first:
            waste_s = (self.factor - 1) * (time.monotonic() - self._since_s)
            time.sleep(waste_s)
            self._wasted_s += waste_s
        if step == self.last:
            self.proofs.put(self.name, rank=rank, step=self.first, seconds=self._wasted_s)
        self._since_s = time.monotonic()


@dataclass(frozen=True)
class SlowCommit:
    """The first checkpoint from a step on takes long to be written.

    Args:
        proofs: Where it is recorded.
        name: Name of the proof.
        step: From which step on.
        seconds: How much longer.
    """

    proofs: Evidence
    name: str
    step: int
    seconds: float

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit`."""
        if commit.step >= self.step and self.proofs.claim([self.name], step=commit.step, seconds=self.seconds):
            time.sleep(self.seconds)


@dataclass(frozen=True)
class RefusedCommit:
    """The storage takes nothing of the first checkpoint from a step on.

    Args:
        proofs: Where it is recorded.
        name: Name of the proof.
        step: From which step on.
        seconds: For how long; None: of this checkpoint never.
        number: The error's, see `errno`.
    """

    proofs: Evidence
    name: str
    step: int
    seconds: float | None
    number: int

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit`."""
        if commit.step < self.step:
            return
        self.proofs.claim([self.name], step=commit.step, seconds=self.seconds)
        said = self.proofs.get(self.name)
        assert said is not None
        if commit.step == said["step"] and (self.seconds is None or time.time() < said["time_s"] + self.seconds):
            raise OSError(self.number, f"{os.strerror(self.number)} (the drill's)")


@dataclass(frozen=True)
class Hold:
    """A rank that waits after a step, in which the others wait for it, until something happens outside.

    Args:
        proofs: Where it is recorded.
        name: Name of the proof that it waits.
        until: Name of the proof to wait for.
        step: Finished steps at which it happens.
        rank: Which rank.
    """

    proofs: Evidence
    name: str
    until: str
    step: int
    rank: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank == self.rank and self.proofs.claim([self.name], rank=rank, step=step):
            self.proofs.wait([self.until], HELD_S)


@dataclass
class DelayPlan:
    """Short pauses after steps, so that a worker that starts, which takes seconds, can join before the last step.

    Args:
        proofs: Where the pauses are recorded, by step; they are taken out of what the drill reports.
        first: Finished steps at which it begins.
        last: The last step with a pause.
        sizes: Numbers of workers that are awaited; then it ends.
        limit_s: Seconds of all pauses at most.
        least_s: Seconds of all pauses at least.
    """

    proofs: Evidence
    first: int
    last: int
    sizes: range
    limit_s: float
    least_s: float = 0.0
    _pauses: dict[int, float] = field(default_factory=dict)

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank != 0 or not self.first <= step <= self.last:
            return
        spent_s = sum(self._pauses.values())
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size in self.sizes and spent_s >= self.least_s:
            return
        pause_s = max(0.0, self.limit_s - spent_s) / (self.last - step + 1)
        time.sleep(pause_s)
        self._pauses[step] = pause_s
        put_json(to_location(self.proofs.folder) / f"paced-{self.first}-{os.getpid()}.json", {"pauses": self._pauses})
