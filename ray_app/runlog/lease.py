"""The writer's lease: at most one driver writes a run.

A start claims the next *fence*, a number, by creating its file `fences/0003.json`; only one can. The file is also the
lease: its holder alone writes it again, every third of its life, and at the end to say that it is released. Whoever
wants to start looks at the file of the highest fence, and either refuses or creates the next, which takes the lease
over. So no file is ever written by two, and a holder that slept through its own end finds a higher fence before its
next commit (`refuse_if_lost`).

Clocks of different machines are not trusted. On the same machine the holder's process and the time tell at once whether
the lease is live. For one of another machine the observer waits for the life of the lease by its own clock and watches
whether the file changes; only what was not renewed for a quarter of an hour (S3 refuses clocks that differ by more)
counts as expired without watching.

Who holds a run, as the file of a fence says it, and what another process can tell from it at one look.
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
from types import TracebackType
from typing import Literal

from ray_app.errors import LeaseLostError, RunHeldError
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, list_files, put_json, read_json

_CLOCKS_DIFFER_S = 900.0


@dataclass(frozen=True)
class LeaseHolder:
    """A process, so that others on its machine can tell whether it lives.

    Args:
        host: Name of its machine, for people.
        machine: Id of the machine's boot and of the process namespace; equal for processes that see each other.
        pid: Its id.
        pid_ticks: When it started, in clock ticks since the boot: ids are used again.
    """

    host: str
    machine: str
    pid: int
    pid_ticks: int | None

    @classmethod
    def here(cls) -> LeaseHolder:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> LeaseHolder:
        """A process of this machine that lives."""
        return cls(platform.node(), _machine(), pid, _ticks(pid))

    def is_gone(self) -> bool:
        """Whether the process has ended; to be asked on its machine."""
        return _ticks(self.pid) != self.pid_ticks


@dataclass(frozen=True)
class LeaseRecord:
    """What a fence's file says.

    Args:
        holder: Who claimed it.
        since_s: When, seconds since 1970 (UTC) by the holder's clock.
        renewed_s: When it was renewed last, likewise.
        life_s: Seconds after that at which it expires.
        released: Whether its holder has ended.
        closing: Whether it only says what became of the run, which takes seconds: a start waits for it.
    """

    holder: LeaseHolder
    since_s: float
    renewed_s: float
    life_s: float
    released: bool = False
    closing: bool = False

    def state(self, here: LeaseHolder, now_s: float) -> Literal["free", "held", "unclear"]:
        """What an observer can say at one look.

        Args:
            here: The observer.
            now_s: Its time, seconds since 1970 (UTC).
        """
        overdue_s = now_s - self.renewed_s - self.life_s
        if self.released:
            return "free"
        if self.holder.machine == here.machine:
            return "free" if self.holder.is_gone() else "unclear" if overdue_s > 0 else "held"
        return "free" if overdue_s > _CLOCKS_DIFFER_S else "unclear"


def _machine() -> str:
    """Id of this boot of the machine and of the namespace of the processes that this one sees."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.urandom(16).hex()}"  # not Linux: equal to no other


def _ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if there is none, or it is dead and not yet
    reaped.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


logger = logging.getLogger(__name__)

LIFE_S = 30.0
"""Seconds that a lease lasts unless it is renewed."""
_FENCE = re.compile(r"(\d+)\.json")
_CLOSING_S, _CLOSING_LOOK_S = 60.0, 0.2
_REMEMBERED = 100
_RENEWALS_PER_LIFE, _TRIES_PER_LIFE, _LOOKS_PER_LIFE = 3, 30, 30


class Lease:
    """The right to write a run, renewed by a thread until it is released; leave it as a context manager to release it.

    Args:
        paths: The run.
        fence: The number that was claimed.
        record: The content of its file.
    """

    def __init__(self, paths: RunPaths, fence: int, record: LeaseRecord) -> None:
        self._paths, self.fence, self._record = paths, fence, record
        self._lost: LeaseLostError | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def lost(self) -> LeaseLostError | None:
        """How the lease was lost, if it was; the run must then end and write nothing more."""
        return self._lost

    def on_lost(self, call: Callable[[], None]) -> None:
        """Calls something as soon as the lease is found to be lost, in the lease's thread."""
        self._on_lost = call

    def release(self) -> None:
        """Ends the renewals and says that the run is free."""
        self._ended.set()
        self._thread.join()
        if self._lost is None:
            try:
                put_json(self._paths.fence(self.fence), asdict(replace(self._record, released=True)))
            except OSError as error:
                logger.warning(
                    "The lease of %s could not be released; it expires by itself: %s", self._paths.name, error
                )

    def _run(self) -> None:
        life_s = self._record.life_s
        pause_s = life_s / _RENEWALS_PER_LIFE
        while not self._ended.wait(pause_s):
            try:
                self._renew()
                pause_s = life_s / _RENEWALS_PER_LIFE
            except OSError as error:
                logger.warning("The lease of %s could not be renewed, will try again: %s", self._paths.name, error)
                pause_s = life_s / _TRIES_PER_LIFE
            except LeaseLostError as error:
                self._lost = error
                self._on_lost()
                return

    def _renew(self) -> None:
        check_lease(self._paths, self.fence)
        self._record = replace(self._record, renewed_s=time.time())
        put_json(self._paths.fence(self.fence), asdict(self._record))


class LeaseWatch:
    """Tells whether the holder of a fence still lives, without waiting and without trusting its clock.

    Args:
        paths: The run.
        fence: The fence that is watched.
    """

    def __init__(self, paths: RunPaths, fence: int) -> None:
        self._paths, self._fence = paths, fence
        self._last: LeaseRecord | None = None
        self._changed_s, self._renewed = time.monotonic(), False

    def look(self) -> Literal["held", "unclear", "over", "superseded"]:
        """Looks once; to be called several times in the life of a lease.

        Returns:
            `unclear`: the holder is on another machine, or lives and is overdue, and has not been seen to renew its
            lease yet; within a life of it that becomes `held` or `over`. `superseded`: a later start has taken the run
            over.

        Raises:
            OSError: The storage does not answer.
        """
        try:
            if newest_fence(self._paths) > self._fence:
                return "superseded"
            record = _read(self._paths.fence(self._fence))
        except OSError:
            self._changed_s = time.monotonic()  # nor could the holder renew its lease
            raise
        if record is None:
            return "over"
        state = record.state(LeaseHolder.here(), time.time())
        if record != self._last:
            seen_before, self._last, self._changed_s = self._last is not None, record, time.monotonic()
            self._renewed = self._renewed or seen_before
        if state == "unclear":
            is_overdue = time.monotonic() - self._changed_s > record.life_s
            return "over" if is_overdue else "held" if self._renewed else "unclear"
        return "over" if state == "free" else "held"


def acquire_lease(paths: RunPaths, life_s: float = LIFE_S, closing: bool = False, waits: bool = True) -> Lease:
    """Claims a run for this process; takes over what a dead driver left. Blocks for the life of a lease if that must be
    watched.

    Args:
        paths: The run; it need not exist yet.
        life_s: Seconds that the lease lasts unless it is renewed.
        closing: It is only to say what became of the run, so an evaluator goes on.
        waits: For somebody else who only does that.

    Raises:
        RunHeldError: Another driver writes this run.
        OSError: The storage does not answer.
    """
    while True:
        fence = newest_fence(paths)
        if fence:
            _refuse_if_held(paths, fence, waits)
        now_s = time.time()
        record = LeaseRecord(LeaseHolder.here(), now_s, now_s, life_s, closing=closing)
        if put_json(paths.fence(fence + 1), asdict(record), if_absent=True):
            return Lease(paths, fence + 1, record)


def is_held(paths: RunPaths) -> bool:
    """Whether a driver seems to write the run, at one look; for people, not for deciding to write.

    Raises:
        OSError: The storage does not answer.
    """
    fence = newest_fence(paths)
    record = _read(paths.fence(fence)) if fence else None
    return record is not None and record.state(LeaseHolder.here(), time.time()) != "free"


def newest_fence(paths: RunPaths) -> int:
    """The highest fence that was claimed; 0 for a run that was never started."""
    return max(_claimed(paths), default=0)


def _claimed(paths: RunPaths) -> list[int]:
    """The fences that were claimed; other files beside them are none."""
    return [int(found[1]) for name in list_files(paths.fences) if (found := _FENCE.fullmatch(name))]


def remove_old_fences(paths: RunPaths, fence: int) -> None:
    """Removes the files of starts long before one that holds the lease, which say nothing any more, as far as the
    storage lets us.
    """
    with suppress(OSError):
        for number in _claimed(paths):
            if number < fence - _REMEMBERED:
                paths.fence(number).unlink(missing_ok=True)


def is_taken_over(paths: RunPaths, fence: int) -> bool:
    """Whether a later start has taken a run over; who only says what became of it has not.

    Raises:
        OSError: The storage does not answer.
    """
    later = (_read(paths.fence(number)) for number in range(fence + 1, newest_fence(paths) + 1))
    return any(record is None or not record.closing for record in later)


def is_released(paths: RunPaths) -> bool:
    """Whether the last holder of the run has ended in order."""
    fence = newest_fence(paths)
    record = _read(paths.fence(fence)) if fence else None
    return record is None or record.released


def check_lease(paths: RunPaths, fence: int) -> None:
    """Refuses to go on writing if a later start has taken the run over; called before every commit.

    Raises:
        LeaseLostError: A higher fence was claimed.
        OSError: The storage does not answer.
    """
    newest = newest_fence(paths)
    if newest > fence:
        record = _read(paths.fence(newest))
        by = (
            f"process {record.holder.pid} on {record.holder.host}, {_utc(record.since_s)}"
            if record
            else "another driver"
        )
        raise LeaseLostError(
            f"The run {paths.name!r} was taken over by its start number {newest} ({by}); this one, number {fence}, must"
            f" not write it any"
            " more and ends. Its lease was not renewed in time: the process or its machine stood still, or the storage"
            " was out of reach."
        )


def _refuse_if_held(paths: RunPaths, fence: int, waits: bool) -> None:
    observer, record = LeaseWatch(paths, fence), _read(paths.fence(fence))
    state = observer.look()
    if record and state == "unclear":
        logger.warning(
            "The run %s was last written by process %d on %s; watching for up to %g s whether it still is.",
            paths.name, record.holder.pid, record.holder.host, record.life_s,
        )  # fmt: skip
        while state == "unclear":
            time.sleep(record.life_s / _LOOKS_PER_LIFE)
            state = observer.look()
    deadline_s = time.monotonic() + _CLOSING_S
    while waits and record and record.closing and state == "held" and time.monotonic() < deadline_s:
        time.sleep(_CLOSING_LOOK_S)
        state = observer.look()
    if record and state == "held":
        raise RunHeldError(
            f"The run {paths.name!r} is being written by process {record.holder.pid} on {record.holder.host}, since"
            f" {_utc(record.since_s)}; its lease lasts until {_utc(record.renewed_s + record.life_s)} unless it is"
            f" renewed, as it is every"
            f" {record.life_s / _RENEWALS_PER_LIFE:g} s. Wait until that run has ended, or end that process and start"
            f" again; for a run of"
            " its own give another run.name."
        )


def _read(place: Location) -> LeaseRecord | None:
    """The record of a fence; None if its file is gone or damaged, which nobody holds then."""
    try:
        values = read_json(place)
        return LeaseRecord(**values | {"holder": LeaseHolder(**values["holder"])})
    except (ValueError, TypeError, KeyError):
        return None


def _utc(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
