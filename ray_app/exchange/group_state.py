"""The state of this process's group besides what its calls raise: whether it is broken, and whether it is being used just now.

A process has one default group at a time (`torch.distributed`), and so one state of it. Backends raise errors of many classes with many
words after an abort (those of "nccl" in torch 2.15 are plain `RuntimeError`), so words are only asked where this state says nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

launches = threading.RLock()
"""Held while the device is given exchanges, while the backend is asked for its error, and while the group is closed. An abort from another
thread frees what these calls use, so it waits for them, see `ProcessGroup.abort`. Reentrant: a launch that fails asks for the error."""


class Breakable(Protocol):
    """A group that knows its state.

    Attributes:
        is_aborted: Whether this process has given it up.
    """

    @property
    def is_aborted(self) -> bool:
        """See the attributes."""

    def has_failed(self) -> bool:
        """Whether the backend says by itself that it has failed."""


group: Breakable | None = None
"""The one of this process, if it is watched."""


def is_broken() -> bool:
    """Whether the group was given up here, or its backend has failed."""
    return group is not None and (group.is_aborted or group.has_failed())


@contextmanager
def watched(breakable: Breakable) -> Iterator[None]:
    """The time in which a group is the one of this process."""
    watch(breakable)
    try:
        yield
    finally:
        unwatch(breakable)


def watch(breakable: Breakable) -> None:
    """Makes a group the one of this process."""
    global group
    group = breakable


def unwatch(breakable: Breakable) -> None:
    """Forgets a group, unless another one has taken its place."""
    global group
    if group is breakable:
        group = None
