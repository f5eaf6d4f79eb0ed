"""The state of torch's default process group in this process: whether it is broken, and a lock for launches in it.

torch.distributed has one default group per process at a time, so the state is kept in a module and not in an object.
After an abort, backends raise errors of many classes with many messages (those of "nccl" in torch 2.15 are plain
`RuntimeError`). So `reduction.base` first asks here whether the group is broken, and only otherwise reads the message.
"""

from __future__ import annotations

import threading
from typing import Protocol

launch_lock = threading.RLock()
"""Held while collectives are launched on the device, the backend is asked for its error, or the group is closed.

An abort from another thread frees the memory that these calls use, so it waits for this lock, see `ProcessGroup.abort`.
The lock is reentrant, because a launch that fails asks the backend for the error.
"""


class Breakable(Protocol):
    """A process group that can break."""

    @property
    def is_aborted(self) -> bool:
        """Returns whether this process has aborted the group."""

    def has_failed(self) -> bool:
        """Returns whether the backend reports a failed collective."""

    def check_device_errors(self) -> None:
        """Waits for the device and raises if a collective failed, see `reduction.base.check_device_errors`."""


group: Breakable | None = None
"""The group of this process; None outside of a generation, and in a generation of one worker."""


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
