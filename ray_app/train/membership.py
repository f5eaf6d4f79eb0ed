"""The membership of a worker in generations, and the messages between workers, rendezvous, driver and controller.

The training loop uses the interface `Membership`. A Ray Train worker has `cluster.rendezvous.client.RendezvousClient`,
and a process that trains alone has `SingleProcessMembership`. `StepWatchdog` decides for the rendezvous when a
generation is stalled, that is, when no step has finished for much longer than steps take.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from statistics import median
from typing import Literal, Protocol

from ray_app.reduction.world import World
from ray_app.runlog.journal import StepRecord

HEARTBEAT_S = 0.25
"""Seconds between two heartbeats of a worker; a large group has a longer period, see `HeartbeatReply.period_s`."""

KEY_BYTES = 32
"""Length of `GenerationInfo.key` in bytes."""

Phase = Literal["starting", "waiting", "forming", "data", "compute", "reduction", "saving", "evaluate", "done"]
"""The phase that a worker is in.

A worker that is `forming`, in `reduction` (the gradient reduction) or `done` waits for the others. So if no step
finishes, the workers in other phases stall the group, and the step watchdog ends those. A worker that is `saving` waits
for the storage; this pauses the watchdog, because ending the worker would not make the storage faster.
"""


class Flags(IntFlag):
    """The flags that all workers agree on with a step's statistics, and act upon at the end of that step."""

    STOP = 1
    """The run makes a checkpoint and ends."""
    REFORM = 2
    """All workers leave this generation and form the next one."""
    SAVE = 4
    """The workers make a checkpoint, because all that have the training state are draining."""


_NO_FLAGS = Flags(0)
"""To make it anew in every step would take four calls."""


@dataclass(frozen=True)
class Heartbeat:
    """A worker's heartbeat to the rendezvous.

    Args:
        worker: Ray actor id of the worker.
        node: Id of the worker's node.
        host: Address of the node.
        port: Port on which the worker's store listens.
        pid: Id of the worker's process on its node.
        generation: Generation that the worker is in, or was in last if it waits; 0 before the first.
        rank: The worker's rank in that generation.
        step: Number of finished steps; -1 without a state.
        phase: Phase that the worker is in.
        record: Record of the newest finished step; only from rank 0.
        stored_step: Last step with its record on storage; only from rank 0.
        progress_reports: Number of times that the worker has reported progress other than a finished step.
        wait_number: Number of the worker's current wait for a generation, from 1; 0 if it does not wait.
        was_broken: Whether the worker's generation broke, or the last one if it waits, so that the other workers must
            leave it, too.
        device: UUID of the device on which the worker computes, see `device_uuid`.
        uses_gloo: Whether no other backend can carry what the worker sends, as on a share or a slice of a GPU.
    """

    worker: str
    node: str
    host: str
    port: int
    pid: int = 0
    generation: int = 0
    rank: int = 0
    step: int = -1
    phase: Phase = "starting"
    record: StepRecord | None = None
    stored_step: int = 0
    progress_reports: int = 0
    wait_number: int = 0
    was_broken: bool = False
    device: str = ""
    uses_gloo: bool = False


@dataclass(frozen=True)
class HeartbeatReply:
    """The rendezvous's reply to a heartbeat; also pushed to all workers when it changes for all of them.

    Args:
        generation: Generation of the heartbeat; `REFORM` and `abort` apply to this generation only.
        flags: Flags that the worker brings into its next step.
        abort: Whether the worker must leave its generation at once, even in the middle of a collective.
        drain: Whether the worker must exit when its generation ends.
        dump: Whether the worker should record the stacks of its threads.
        exit: Whether the worker must end its process now, because it stalls its generation or was removed.
        stored_step: Last step with its record on storage.
        is_for_waiting: Whether the rendezvous knew that the worker waits for a generation when it made the reply. A
            waiting worker ignores `drain` in an earlier reply, because a rendezvous that knows of the wait may need the
            worker in one more generation.
        formed: The generation that the worker waited for; None until it has formed.
        period_s: Seconds until the next heartbeat is due.
    """

    generation: int = 0
    flags: Flags = Flags(0)
    abort: bool = False
    drain: bool = False
    dump: bool = False
    exit: bool = False
    stored_step: int = 0
    is_for_waiting: bool = False
    formed: GenerationInfo | None = None
    period_s: float = HEARTBEAT_S


@dataclass(frozen=True)
class GenerationInfo:
    """A generation, as one of its workers sees it.

    Args:
        number: Number of the generation; numbers only grow.
        rank: Rank of this worker.
        size: Number of workers.
        host: Address of rank 0.
        port: Port on which rank 0's store listens.
        hosts: Host of every rank; the ranks on one host are consecutive.
        key: The key with which a member signs its messages (`reduction.messages`), 64 hexadecimal digits; empty for
            a single worker, which has no peers.
        uses_gloo: Whether gloo carries what the workers send, because one of them `uses_gloo`.
        failed_forms: Number of generations in a row before this one that did not form although no member was lost.
    """

    number: int
    rank: int
    size: int
    host: str
    port: int
    hosts: tuple[str, ...] = ()
    key: str = field(default="", repr=False, compare=False)
    uses_gloo: bool = False
    failed_forms: int = 0


@dataclass(frozen=True)
class RendezvousStatus:
    """The status of the rendezvous, for the controller and the console.

    Args:
        live: Actor ids of the workers that send heartbeats and are to stay.
        draining: Actor ids of the workers that have to exit and have not exited yet.
        lost_for_s: Seconds since each lost worker was declared lost, by actor id, without those that came back or were
            removed.
        stepping: Number of workers in the current generation that do not wait for the next one.
        step: Number of finished steps.
        record: Record of the newest finished step.
        wait_reason: Why no generation may form; None if one may.
        stopping: Whether the driver has asked all workers to stop.
        limit_s: Seconds without a finished step after which the generation counts as stalled.
    """

    live: set[str]
    draining: set[str]
    lost_for_s: dict[str, float]
    stepping: int
    step: int
    record: StepRecord | None
    wait_reason: str | None
    stopping: bool
    limit_s: float


class SingleProcessMembership:
    """The membership of a process that trains alone, in one generation.

    Args:
        logical_workers: L; this worker runs all of them.
        stops: Returns whether the run is to stop after the next step.
    """

    recovers = False

    def __init__(self, logical_workers: int, stops: Callable[[], bool]) -> None:
        self._logical_workers, self._stops = logical_workers, stops
        self._stored_step = 0
        self.newest: StepRecord | None = None
        """Record of the newest finished step."""

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """Yields the only generation, see `Membership.generation`."""
        del step, was_broken
        yield World(0, 1, self._logical_workers), GenerationInfo(1, 0, 1, "", 0)

    def flags(self) -> Flags:
        """Returns `STOP` once the run is to stop, see `Membership.flags`."""
        return Flags.STOP if self._stops() else _NO_FLAGS

    def is_draining(self) -> bool:
        """Returns False, because no other process could continue the run."""
        return False

    def enter(self, phase: Phase) -> None:
        """Does nothing, because there is no rendezvous that needs the phase."""

    def report_progress(self) -> None:
        """Does nothing, because there is no step watchdog."""

    def report(self, step: int, record: StepRecord | None, stored_step: int) -> None:
        """Keeps the newest record and the last stored step, see `Membership.report`."""
        del step
        self.newest, self._stored_step = record or self.newest, stored_step

    def stored_step(self) -> int:
        """Returns the last step with its record on storage, see `Membership.stored_step`."""
        return self._stored_step


class DrainedError(Exception):
    """Raised if this worker has to exit while it waits for a generation."""


class Membership(Protocol):
    """The interface through which the training loop joins generations and exchanges messages with the rendezvous."""

    recovers: bool
    """Whether the workers form another generation after a peer is lost; otherwise the driver restarts the group."""

    def generation(self, step: int, was_broken: bool) -> AbstractContextManager[tuple[World, GenerationInfo]]:
        """Returns a context that waits for a new generation and yields its `World` and its `GenerationInfo`.

        At the end of the context the worker leaves the generation's process group.

        Args:
            step: Number of finished steps of this worker; -1 without a state.
            was_broken: Whether this worker's last generation broke.

        Raises:
            DrainedError: This worker has to exit before the generation forms.
        """

    def flags(self) -> Flags:
        """Returns the flags that this rank brings into its next step."""

    def is_draining(self) -> bool:
        """Returns whether this worker has to exit when its generation ends."""

    def enter(self, phase: Phase) -> None:
        """Reports the phase that this worker begins."""

    def report_progress(self) -> None:
        """Reports progress other than a finished step, which restarts the limit of the step watchdog."""

    def report(self, step: int, record: StepRecord | None, stored_step: int) -> None:
        """Reports this worker's finished steps; does not wait.

        Args:
            step: Number of finished steps.
            record: Record of the newest finished step; only from rank 0.
            stored_step: Last step with its record on storage; only from rank 0.
        """

    def stored_step(self) -> int:
        """Returns the last step with its record on storage, as far as this worker knows."""


_MIN_LIMIT_S = 60.0
_MEDIAN_STEPS = 50
"""The automatic limit, as a multiple of the median duration of a step."""
_FIRST_STEP_FACTOR = 5
"""Factor of the limit for the first step of a generation, which builds the step and may compile the model."""


class StepWatchdog:
    """Detects that the current generation is stalled: no step finishes within a limit.

    Args:
        step_timeout_s: The limit in seconds; None for 50 times the median duration of a step, at least 60 s, and 600 s
            before the duration of any step is known. For the first step of a generation the limit is five times that.
        clock: Returns the current time in seconds.

    Attributes:
        step: Highest number of finished steps that was reported; -1 before any worker has a state.
    """

    def __init__(self, step_timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_timeout_s, self._clock = step_timeout_s, clock
        self._step_s: deque[float] = deque(maxlen=101)
        self._timed_step = 0
        self.begin(-1)

    def begin(self, step: int) -> None:
        """Begins a generation that continues after `step` finished steps, with the longer limit of a first step."""
        self.step = step
        self._has_stepped = False
        self._stall_count = 0
        self.restart_limit()

    def restart_limit(self) -> None:
        """Restarts the limit, because a worker has made progress or all workers wait for the storage."""
        self._last_progress_s = self._clock()

    def note_step(self, step: int, record: StepRecord | None) -> None:
        """Notes the finished steps that a heartbeat reports, which may be the same as in earlier heartbeats.

        Args:
            step: Number of finished steps.
            record: Record of the newest finished step, which has its duration; None from ranks other than 0.
        """
        if step > self.step:
            # A change from -1 means that a state was initialized or restored, which is not a step.
            self._has_stepped = self.step >= 0
            self.step = step
            self._stall_count = 0
            self.restart_limit()
        # Each heartbeat repeats the newest record until there is another one.
        if record is not None and record.step != self._timed_step:
            self._timed_step = record.step
            self._step_s.append(record.step_ms / 1e3)

    @property
    def limit_s(self) -> float:
        """Seconds without a finished step after which the generation counts as stalled."""
        limit = self._step_timeout_s
        if limit is None:
            limit = max(_MIN_LIMIT_S, _MEDIAN_STEPS * median(self._step_s)) if self._step_s else 10 * _MIN_LIMIT_S
        return limit * (1 if self._has_stepped else _FIRST_STEP_FACTOR)

    def count_stalls(self, now: float) -> int:
        """Returns how many times the generation has stalled at this step, this stall included; 0 if it is not stalled.

        A stall restarts the limit, so each stall is returned once.

        Args:
            now: The current time by the clock.
        """
        if now - self._last_progress_s < self.limit_s:
            return 0
        self._last_progress_s = now
        self._stall_count += 1
        return self._stall_count
