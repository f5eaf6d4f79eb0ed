"""The state of this process's group besides what its calls raise: whether it is broken, and whether it is being used
just now.

A process has one default group at a time (`torch.distributed`), and so one state of it. Backends raise errors of many
classes with many words after an abort (those of "nccl" in torch 2.15 are plain `RuntimeError`), so words are only asked
where this state says nothing.
"""

from __future__ import annotations

import threading
from typing import Protocol

launch_lock = threading.RLock()
"""Held while the device is given exchanges, while the backend is asked for its error, and while the group is closed. An
abort from another thread frees what these calls use, so it waits for them, see `ProcessGroup.abort`. Reentrant: a
launch that fails asks for the error.
"""


class Breakable(Protocol):
    """A group that knows its state.

    Attributes:
        is_aborted: Whether this process has aborted the group.
    """

    @property
    def is_aborted(self) -> bool:
        """See the attributes."""

    def has_failed(self) -> bool:
        """Whether the backend says by itself that it has failed."""


group: Breakable | None = None
"""The group of this process; None outside of a generation, and in a generation of one worker."""


def is_broken() -> bool:
    """Whether this process has aborted its group, or the backend of the group has failed."""
    return group is not None and (group.is_aborted or group.has_failed())


def set_group(breakable: Breakable) -> None:
    """Makes a group the one of this process."""
    global group
    group = breakable


def clear_group(breakable: Breakable) -> None:
    """Forgets a group, unless another one has taken its place."""
    global group
    if group is breakable:
        group = None
