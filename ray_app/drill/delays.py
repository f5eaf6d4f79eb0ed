"""Hooks of the drill that delay a run: frozen and slow workers, slow and failing storage, and pauses.

As in `faults`, every hook is pickled and writes evidence when it acts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ray_app.checkpoint.store import Commit
from ray_app.drill.faults import Evidence
from ray_app.storage.files import put_json, read_json, to_location
from ray_app.train.job import Job

MAX_WAIT_S = 120.0
"""Maximum time that a worker waits at a step boundary until the drill has disturbed its node or its driver."""


@dataclass(frozen=True)
class Freeze:
    """Stops a rank with SIGSTOP after a step; a separate process sends SIGCONT after some seconds."""

    evidence: Evidence
    name: str
    step: int
    rank: int
    seconds: float

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if (
            step == self.step
            and rank == self.rank
            and self.evidence.claim([self.name], rank=rank, step=step, seconds=self.seconds, stopped=True)
        ):
            wake = f"sleep {self.seconds:g}; kill -CONT {os.getpid()}"
            null = subprocess.DEVNULL
            subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True, stdin=null, stdout=null, stderr=null)
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Slow:
    """Makes a rank a straggler: it sleeps after each of the steps `first` to `last`.

    The evidence at the end has the seconds that it has slept. `factor` is the duration of a step with the sleep,
    divided by that without.
    """

    evidence: Evidence
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
            self.evidence.put(self.name, rank=rank, step=self.first, seconds=self._wasted_s)
        self._since_s = time.monotonic()


@dataclass(frozen=True)
class SlowCommit:
    """Delays the commit of the first checkpoint at or after a step."""

    evidence: Evidence
    name: str
    step: int
    seconds: float

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit`."""
        if commit.step >= self.step and self.evidence.claim([self.name], step=commit.step, seconds=self.seconds):
            time.sleep(self.seconds)


@dataclass(frozen=True)
class RefusedCommit:
    """Makes the storage refuse the first checkpoint at or after a step, for some seconds or (None) always.

    `number` is that of the error, see `errno`.
    """

    evidence: Evidence
    name: str
    step: int
    seconds: float | None
    number: int

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit`."""
        if commit.step < self.step:
            return
        self.evidence.claim([self.name], step=commit.step, seconds=self.seconds)
        entry = self.evidence.get(self.name)
        assert entry is not None
        if commit.step == entry["step"] and (self.seconds is None or time.time() < entry["time_s"] + self.seconds):
            raise OSError(self.number, f"{os.strerror(self.number)} (the drill's)")


@dataclass(frozen=True)
class WaitForEvidence:
    """Makes a rank wait after a step until the evidence `until` exists; in the next step the others wait for it."""

    evidence: Evidence
    name: str
    until: str
    step: int
    rank: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank == self.rank and self.evidence.claim([self.name], rank=rank, step=step):
            self.evidence.wait([self.until], MAX_WAIT_S)


@dataclass(frozen=True)
class ActOnWaits:
    """Acts in the driver while a rank waits for evidence, and then writes this evidence; an `Observe`.

    Args:
        evidence: Has the waits.
        acts: By the name of a wait: the name of the evidence that ends it, and the action. The action gets the entry
            of the wait and the job, and returns the facts of the evidence, or None to be called again later.
    """

    evidence: Evidence
    acts: Mapping[str, tuple[str, Callable[[dict[str, Any], Job], dict[str, Any] | None]]]

    def __call__(self, job: Job) -> None:
        """See `Observe`."""
        for name, (until, act) in self.acts.items():
            wait = self.evidence.get(name)
            if wait is None or self.evidence.has(until):
                continue
            # On an error the scenario counts as failed, but the run must go on: the evidence ends the wait.
            try:
                facts = act(wait, job)
            except Exception as error:
                self.evidence.put("trouble", error=f"{type(error).__name__}: {error}")
                facts = {}
            if facts is not None:
                self.evidence.put(until, **{"step": wait["step"]} | facts)


@dataclass(frozen=True)
class DelayPlan:
    """Pauses the run for a short time after each of some steps, so that a starting worker joins before the last step.

    Args:
        evidence: Records the pauses by step; the drill subtracts them from its measurements.
        sizes: World sizes at which the pauses end.
        limit_s: Maximum of all pauses together, in seconds.
        min_s: Minimum of all pauses together, in seconds.
    """

    evidence: Evidence
    first: int
    last: int
    sizes: range
    limit_s: float
    min_s: float = 0.0

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank != 0 or not self.first <= step <= self.last:
            return
        # Another process may have been rank 0 before; its pauses count, too.
        file = to_location(self.evidence.folder) / f"paced-{self.first}.json"
        pauses = (read_json(file) or {"pauses": {}})["pauses"]
        paused_s = sum(pauses.values())
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size in self.sizes and paused_s >= self.min_s:
            return
        pause_s = max(0.0, self.limit_s - paused_s) / (self.last - step + 1)
        time.sleep(pause_s)
        put_json(file, {"pauses": pauses | {str(step): pauses.get(str(step), 0.0) + pause_s}})
