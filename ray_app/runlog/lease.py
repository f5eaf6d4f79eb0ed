"""The writer's lease of a run: at most one driver writes it.

A start claims the next *fence*, a number, by creating its file `fences/0003.json`; only one process can. The file is
also the lease: only its holder writes it again, three times per life of the lease, and at the end to release it. A
start reads the file of the highest fence, and either refuses or creates the next one, which takes the lease over. So no
two processes write the same file, and a holder that was suspended beyond the end of its lease finds a higher fence
before its next commit (`check_lease`).

Clocks of different machines are not trusted. On the same machine the holder's process and the time show at once whether
the lease is live. For a lease of another machine the observer waits for the life of the lease by its own clock and
watches whether the file changes; only a lease that was not renewed for a quarter of an hour (S3 refuses clocks that
differ by more) counts as expired without watching.

All functions raise `OSError` while the storage does not answer.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ray_app.errors import LeaseLostError, RunHeldError
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, list_files, put_json, read_json

_MAX_CLOCK_DIFFERENCE_S = 900.0


@dataclass(frozen=True)
class LeaseHolder:
    """The process that has a lease, identified so that others on its machine can check whether it is alive.

    Args:
        host: Name of its machine, for messages.
        machine: Id of the machine's boot and of the process namespace; equal for processes that see each other.
        pid_ticks: Start of the process, in clock ticks since the boot, since ids are used again.
    """

    host: str
    machine: str
    pid: int
    pid_ticks: int | None

    @classmethod
    def here(cls) -> LeaseHolder:
        """Returns the holder for this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> LeaseHolder:
        """Returns the holder for a live process of this machine."""
        return cls(platform.node(), _machine(), pid, _ticks(pid))

    def is_gone(self) -> bool:
        """Returns whether the process has ended; only valid on its machine."""
        return _ticks(self.pid) != self.pid_ticks


@dataclass(frozen=True)
class LeaseRecord:
    """The contents of the file of a fence; times are seconds since 1970 (UTC) by the holder's clock.

    Args:
        holder: The process that claimed the fence.
        life_s: Seconds from the last renewal until the lease expires.
        released: Whether the holder has released the lease.
        closing: Whether the holder only closes an orphaned run, which takes seconds: a start waits for it.
    """

    holder: LeaseHolder
    since_s: float
    renewed_s: float
    life_s: float
    released: bool = False
    closing: bool = False

    def state(self, here: LeaseHolder, now_s: float) -> Literal["free", "held", "unclear"]:
        """Returns the state of the lease as far as one read by the process `here` at `now_s` shows it."""
        overdue_s = now_s - self.renewed_s - self.life_s
        if self.released:
            return "free"
        if self.holder.machine == here.machine:
            return "free" if self.holder.is_gone() else "unclear" if overdue_s > 0 else "held"
        return "free" if overdue_s > _MAX_CLOCK_DIFFERENCE_S else "unclear"


def _machine() -> str:
    """Returns an id of this boot of the machine and of the process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        # On other systems than Linux the id differs from all others, so every lease counts as one of another machine.
        return f"{platform.node()} {os.urandom(16).hex()}"


def _ticks(pid: int) -> int | None:
    """Returns the start of a process in clock ticks since the boot; None if it does not exist or is a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


logger = logging.getLogger(__name__)

LIFE_S = 30.0
"""Seconds after which a lease expires unless it is renewed."""
_FENCE = re.compile(r"(\d+)\.json")
_CLOSING_TIMEOUT_S = 60.0
_CLOSING_POLL_S = 0.2
_KEPT_FENCES = 100
_RENEWALS_PER_LIFE = 3
_RETRIES_PER_LIFE = 30
_POLLS_PER_LIFE = 30


class Lease:
    """The right to write a run. A thread renews it until it is released; it is a context manager that releases it."""

    def __init__(self, paths: RunPaths, fence: int, record: LeaseRecord) -> None:
        self._paths = paths
        self.fence = fence
        self._record = record
        self._lost: LeaseLostError | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def lost(self) -> LeaseLostError | None:
        """The error that says how the lease was lost, or None; the run must then end and write nothing more."""
        return self._lost

    def on_lost(self, call: Callable[[], None]) -> None:
        """Sets a function to be called as soon as the lease is lost, in the lease's thread."""
        self._on_lost = call

    def release(self) -> None:
        """Ends the renewals and releases the lease."""
        self._ended.set()
        self._thread.join()
        if self._lost is None:
            try:
                put_json(self._paths.fence(self.fence), asdict(replace(self._record, released=True)))
            except OSError as error:
                logger.warning("The lease of %s could not be released; it will expire: %s", self._paths.name, error)

    def _run(self) -> None:
        life_s = self._record.life_s
        pause_s = life_s / _RENEWALS_PER_LIFE
        while not self._ended.wait(pause_s):
            try:
                self._renew()
                pause_s = life_s / _RENEWALS_PER_LIFE
            except OSError as error:
                logger.warning("The lease of %s could not be renewed, trying again: %s", self._paths.name, error)
                pause_s = life_s / _RETRIES_PER_LIFE
            except LeaseLostError as error:
                self._lost = error
                self._on_lost()
                return

    def _renew(self) -> None:
        check_lease(self._paths, self.fence)
        self._record = replace(self._record, renewed_s=time.time())
        put_json(self._paths.fence(self.fence), asdict(self._record))


class LeaseWatch:
    """Watches whether the holder of a fence is alive, without waiting and without trusting its clock."""

    def __init__(self, paths: RunPaths, fence: int) -> None:
        self._paths, self._fence = paths, fence
        self._last: LeaseRecord | None = None
        self._changed_s, self._renewed = time.monotonic(), False

    def poll(self) -> Literal["held", "unclear", "over", "superseded"]:
        """Reads the lease once and returns its state; to be called several times in the life of a lease.

        Returns:
            `unclear`: the holder is on another machine, or alive and overdue, and no renewal was observed yet; within
            one life of the lease the state becomes `held` or `over`. `superseded`: a later start has taken the run
            over.
        """
        try:
            if newest_fence(self._paths) > self._fence:
                return "superseded"
            record = _read(self._paths.fence(self._fence))
        except OSError:
            # While the storage does not answer, the holder cannot renew its lease either.
            self._changed_s = time.monotonic()
            raise
        if record is None:
            return "over"
        state = record.state(LeaseHolder.here(), time.time())
        if record != self._last:
            # The first record that is read is no sign of a renewal.
            self._renewed = self._renewed or self._last is not None
            self._last, self._changed_s = record, time.monotonic()
        if state == "unclear":
            is_overdue = time.monotonic() - self._changed_s > record.life_s
            return "over" if is_overdue else "held" if self._renewed else "unclear"
        return "over" if state == "free" else "held"


def acquire_lease(paths: RunPaths, life_s: float = LIFE_S, closing: bool = False, waits: bool = True) -> Lease:
    """Claims a run, which need not exist yet, for this process, or takes it over from a dead driver; returns the lease.

    Blocks for the life of the present lease if that has to be watched.

    Args:
        life_s: Seconds after which the lease expires unless it is renewed.
        closing: Whether this process only closes an orphaned run, so that an evaluator goes on.
        waits: Whether to wait for another process that only closes the run.

    Raises:
        RunHeldError: Another driver writes this run.
    """
    while True:
        fence = newest_fence(paths)
        if fence:
            _check_free(paths, fence, waits)
        now_s = time.time()
        record = LeaseRecord(LeaseHolder.here(), now_s, now_s, life_s, closing=closing)
        if put_json(paths.fence(fence + 1), asdict(record), if_absent=True):
            return Lease(paths, fence + 1, record)


def is_held(paths: RunPaths) -> bool:
    """Returns whether a driver seems to write the run, by one read; for display, not for a decision to write."""
    fence = newest_fence(paths)
    record = _read(paths.fence(fence)) if fence else None
    return record is not None and record.state(LeaseHolder.here(), time.time()) != "free"


def newest_fence(paths: RunPaths) -> int:
    """Returns the highest claimed fence; 0 for a run that was never started."""
    return max(_claimed(paths), default=0)


def _claimed(paths: RunPaths) -> list[int]:
    """Returns the claimed fences; other files in the folder are ignored."""
    return [int(match[1]) for name in list_files(paths.fences) if (match := _FENCE.fullmatch(name))]


def remove_old_fences(paths: RunPaths, fence: int) -> None:
    """Removes the files of starts long before the one with the lease, as far as the storage permits it."""
    with suppress(OSError):
        for number in _claimed(paths):
            if number < fence - _KEPT_FENCES:
                paths.fence(number).unlink(missing_ok=True)


def is_taken_over(paths: RunPaths, fence: int) -> bool:
    """Returns whether a later start has taken a run over; a process that only closes the run does not count."""
    later = (_read(paths.fence(number)) for number in range(fence + 1, newest_fence(paths) + 1))
    return any(record is None or not record.closing for record in later)


def is_released(paths: RunPaths) -> bool:
    """Returns whether the last holder of the run has released its lease."""
    fence = newest_fence(paths)
    record = _read(paths.fence(fence)) if fence else None
    return record is None or record.released


def check_lease(paths: RunPaths, fence: int) -> None:
    """Raises `LeaseLostError` if a later start has taken the run over; to be called before every commit."""
    newest = newest_fence(paths)
    if newest > fence:
        record = _read(paths.fence(newest))
        by = (
            f"process {record.holder.pid} on {record.holder.host}, {_utc(record.since_s)}"
            if record
            else "another driver"
        )
        raise LeaseLostError(
            f"The run {paths.name!r} was taken over by its start number {newest} ({by}); this start, number {fence},"
            " may no longer write it and ends. Its lease was not renewed in time: the process or its machine was"
            " stalled, or the storage was out of reach."
        )


def _check_free(paths: RunPaths, fence: int, waits: bool) -> None:
    """Raises `RunHeldError` if a live driver has the lease of a fence; watches it if one read does not show that."""
    watch, record = LeaseWatch(paths, fence), _read(paths.fence(fence))
    state = watch.poll()
    if record and state == "unclear":
        logger.warning(
            "The run %s was last written by process %d on %s; waiting up to %g s for a sign that it still is.",
            paths.name, record.holder.pid, record.holder.host, record.life_s,
        )  # fmt: skip
        while state == "unclear":
            time.sleep(record.life_s / _POLLS_PER_LIFE)
            state = watch.poll()
    deadline_s = time.monotonic() + _CLOSING_TIMEOUT_S
    while waits and record and record.closing and state == "held" and time.monotonic() < deadline_s:
        time.sleep(_CLOSING_POLL_S)
        state = watch.poll()
    if record and state == "held":
        raise RunHeldError(
            f"The run {paths.name!r} is being written by process {record.holder.pid} on {record.holder.host}, since"
            f" {_utc(record.since_s)}; its lease lasts until {_utc(record.renewed_s + record.life_s)} unless it is"
            f" renewed, as it is every {record.life_s / _RENEWALS_PER_LIFE:g} s. Wait until that run has ended, or end"
            " that process and start again; for a separate run, choose another run.name."
        )


def _read(file: Location) -> LeaseRecord | None:
    """Returns the record of a fence; None if its file is missing or damaged, so that no process has the lease."""
    try:
        values = read_json(file)
        return LeaseRecord(**values | {"holder": LeaseHolder(**values["holder"])})
    except (ValueError, TypeError, KeyError):
        return None


def _utc(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
