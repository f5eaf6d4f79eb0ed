"""The state of this process's default group: whether it is broken, and a lock for its launches.

A process has one default group at a time (`torch.distributed`), so this is a module and not a class. After an abort
backends raise errors of many classes with many messages (those of "nccl" in torch 2.15 are plain `RuntimeError`), so
`reduction.base` looks at messages only if this state does not decide.
"""

from __future__ import annotations

import threading
from typing import Protocol

launch_lock = threading.RLock()
"""Locked while collectives are launched on the device, while the backend is asked for its error, and while the group is
closed. An abort from another thread frees the memory that these calls use, so it waits for them, see
`ProcessGroup.abort`. The lock is reentrant, since a launch that fails asks for the error.
"""


class Breakable(Protocol):
    """A process group that can break.

    Attributes:
        is_aborted: Whether this process has aborted the group.
    """

    @property
    def is_aborted(self) -> bool:
        """Returns whether this process has aborted the group."""

    def has_failed(self) -> bool:
        """Returns whether the backend reports a failure."""


group: Breakable | None = None
"""The group of this process; None outside a generation, and in a generation of one worker."""


def is_broken() -> bool:
    """Returns whether this process has aborted its group, or the backend of the group has failed."""
    return group is not None and (group.is_aborted or group.has_failed())


def set_group(breakable: Breakable) -> None:
    """Sets the group of this process."""
    global group
    group = breakable


def clear_group(breakable: Breakable) -> None:
    """Unsets the group of this process, unless it is another one by now."""
    global group
    if group is breakable:
        group = None
