"""`collective` and `translate_peer_errors` turn errors that a lost peer causes into `PeerLostError`.

After an abort, backends raise errors of many classes with many messages (those of "nccl" in torch 2.15 are plain
`RuntimeError`s), so these first ask whether the group is broken (`is_broken`), and only otherwise read the message.
torch.distributed has one default group per process at a time, so its state is kept in this module and not in an object.
"""

import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from ray_app.errors import PeerLostError, TaskError
from ray_app.reduction.world import World
from ray_app.torch_private import OPERATORS_FILE

_PEER_ERRORS = re.compile(
    "gloo|pair closure|by peer|broken pipe"
    "|nccl (communicator|operation|unique id|stream resources)|nccl [a-z ]+ failed|async error"
    "|processgroupnccl (not initialized|already finalized|has been finalized)|remote process exited|unhandled system"
    " error"
)
"""Matches the lower-case message of an error that a lost peer, or the connection to it, has caused.

Only its message tells such an error of gloo, and of a call that is given to "nccl" of torch 2.15
(`ProcessGroupNCCL2`): both raise plain `RuntimeError` without a code. The store (`DistNetworkError`, `DistStoreError`)
and a wait for NCCL (`DistBackendError`) raise types of their own.
"""
_LOCAL_ERRORS = re.compile(
    "out of memory|allocate memory|cuda error|cuda failure|invalid usage|invalid argument \\(run with nccl"
)
"""Matches the lower-case message of an error of this rank's own device, memory or calls that NCCL passes on.

NCCL raises the types of a lost peer for these, too. Errors that torch itself raises are in `_LOCAL_ERROR_TYPES`.
"""
_LOCAL_ERROR_TYPES = (torch.OutOfMemoryError, torch.AcceleratorError)
"""The types of errors of this rank's own device."""


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
        """Waits for the device and raises if a collective failed, see the function `check_device_errors`."""


_group: Breakable | None = None
"""The group of this process; None outside of a generation, and in a generation of one worker."""


def is_broken() -> bool:
    """Returns whether this process has aborted its group, or the backend of the group has failed."""
    return _group is not None and (_group.is_aborted or _group.has_failed())


def set_group(breakable: Breakable) -> None:
    """Sets the group of this process."""
    global _group
    _group = breakable


def clear_group(breakable: Breakable) -> None:
    """Unsets the group of this process, unless it is another one by now."""
    global _group
    if _group is breakable:
        _group = None


@contextmanager
def collective() -> Iterator[None]:
    """Turns an error of torch.distributed that a lost peer, or the connection to it, has caused into `PeerLostError`.

    Every other error passes unchanged, because the same error would come again in another generation. While the group
    is broken, every `RuntimeError` counts as caused by a lost peer, see `_is_peer_error`. The block may contain a
    forward or a backward, too.

    Raises:
        PeerLostError: This process has aborted its group before the block, or a collective of the block failed.
    """
    if _group is not None and _group.is_aborted:
        raise PeerLostError("the process group is aborted; no further collective runs in it")
    try:
        yield
    except RuntimeError as error:
        if not _is_peer_error(error):
            raise
        raise PeerLostError(f"a collective failed: {_message_of(error)}") from error


def launch_guard(world: World) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context manager for blocks that launch collectives and, on a device, wait for none of them.

    It translates errors as `collective` does. On a device an abort from another thread waits until the block has ended,
    see `launch_lock`.
    """
    return _locked_collective if world.has_device_collectives else collective


@contextmanager
def _locked_collective() -> Iterator[None]:
    """Does what `collective` does, and delays aborts by other threads by holding `launch_lock`."""
    with launch_lock, collective():
        yield


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turns an error of a step that a lost peer has caused into `PeerLostError`, also an error of user code.

    A lost peer may cause an error in user code: an optimizer of sharded parameters runs collectives of its own, and a
    forward may read what a failed collective has left. While the group is not broken, an error of user code becomes
    `PeerLostError` only if it was raised inside torch.distributed.
    """
    try:
        yield
    except (RuntimeError, TaskError) as error:
        cause = error.__cause__ if isinstance(error, TaskError) else error
        if not _is_peer_error(cause) or not (cause is error or is_broken() or _was_raised_in_distributed(cause)):
            raise
        raise PeerLostError(f"a peer was lost meanwhile: {_message_of(error)}") from error


def _is_peer_error(error: BaseException | None) -> bool:
    """Returns whether a lost peer may have caused an error, so that the step may succeed in another generation.

    While the group is broken this holds for every error: the next generation repeats the step, and an error with
    another cause is raised again there. Otherwise the type of the error, or its message if the backend has no type for
    it, has to indicate a failed connection or collective.
    """
    if is_broken():
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, _LOCAL_ERROR_TYPES):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    message = str(error).lower()
    if _LOCAL_ERRORS.search(message):
        return False
    return isinstance(error, dist.DistError) or _PEER_ERRORS.search(message) is not None


def _was_raised_in_distributed(error: BaseException | None) -> bool:
    """Returns whether code of torch.distributed raised an error.

    Its collectives call operators, so frames of the module that calls operators do not count.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)] if error is not None else []
    innermost = next((Path(name) for name in reversed(files) if name != OPERATORS_FILE), Path())
    return innermost.is_relative_to(Path(dist.__file__).parent)


def _message_of(error: Exception) -> str:
    """Returns the message of an error, without the causes that gloo suggests after the words "This is typically"."""
    message = error.message if isinstance(error, TaskError) else str(error)
    return message.partition(" This is typically")[0]


def check_device_errors() -> None:
    """Waits until the device has done its queued work, and raises if a collective of that work failed.

    It is needed if the device carries the collectives (`World.has_device_collectives`): a wait for a collective of NCCL
    only orders streams, and a failed collective leaves garbage in its output. Waits of gloo raise the error themselves.

    Raises:
        PeerLostError: A collective failed.
    """
    if _group is not None:
        _group.check_device_errors()
