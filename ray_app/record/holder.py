"""Who holds a run, as the file of a fence says it, and what another process can tell from it at one look."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_CLOCKS_DIFFER_S = 900.0


@dataclass(frozen=True)
class Holder:
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
    def here(cls) -> Holder:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Holder:
        """A process of this machine that lives."""
        return cls(platform.node(), _machine(), pid, _ticks(pid))

    def is_gone(self) -> bool:
        """Whether the process has ended; to be asked on its machine."""
        return _ticks(self.pid) != self.pid_ticks


@dataclass(frozen=True)
class Record:
    """What a fence's file says.

    Args:
        holder: Who claimed it.
        since_s: When, seconds since 1970 (UTC) by the holder's clock.
        renewed_s: When it was renewed last, likewise.
        life_s: Seconds after that at which it expires.
        released: Whether its holder has ended.
        closing: Whether it only says what became of the run, which takes seconds: a start waits for it.
    """

    holder: Holder
    since_s: float
    renewed_s: float
    life_s: float
    released: bool = False
    closing: bool = False

    def state(self, here: Holder, now_s: float) -> Literal["free", "held", "unclear"]:
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
    """When a process started, in clock ticks since the boot; None if there is none, or it is dead and not yet reaped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])
