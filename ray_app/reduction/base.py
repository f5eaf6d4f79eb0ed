"""The interface of a gradient reducer, and what every reducer and collective of a step shares.

- `GradientReducer` is what a step calls; `bucketed.py` and `sharded.py` implement it.
- `World` is one worker's view of the group, and `plan_stages` decides how partial sums travel: first within each host,
  then between the hosts, so that little crosses the network. In a stage each rank of a group cuts its sums into as many
  shards as the group has ranks, receives its shard of all sums of the group, and adds them in the tree. After the last
  stage each rank has its shard of the total; on the way back the shards are gathered. Two stages are the hierarchical
  all-reduce of Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018, with additions
  in one fixed order.
- `collective` and `translate_peer_errors` turn errors that a lost peer causes into `PeerLostError`.
- `checksum` maps a gradient to one integer, for the check for silent data corruption.
"""

from __future__ import annotations

import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from ray_app.errors import ConfigError, PeerLostError, TaskError
from ray_app.plan.assignment import Node, logical_workers_of, subtrees
from ray_app.reduction import group_state

_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(gradient: Tensor, position: int) -> Tensor:
    """Returns the checksum of a tensor, shape (): the sum of its elements, read as integers, times an odd number,
    modulo 2**64.

    A change of any one element changes it. It does not depend on the order of the additions, since integers are added.

    Args:
        gradient: The checksum of zeros is 0, so a missing gradient counts as zeros.
        position: The index of the tensor among others; it decides the odd number.
    """
    # There is no integer type of the 16 bytes of complex128.
    if gradient.element_size() not in _INTEGER_DTYPES:
        gradient = torch.view_as_real(gradient)
    return (2 * position + 1) * gradient.view(_INTEGER_DTYPES[gradient.element_size()]).sum(dtype=torch.int64)


@dataclass(frozen=True)
class Stage:
    """One stage of the reduction, as one rank takes part in it.

    Args:
        ranks: The ranks of the group that exchanges shards, this one among them, in ascending order.
        nodes: For each of these ranks, the nodes of the tree for which it has sums before the stage.
    """

    ranks: tuple[int, ...]
    nodes: tuple[tuple[Node, ...], ...]


def stage_groups(hosts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """Returns the groups of ranks of each stage.

    Args:
        hosts: The host of every rank. There are two stages if the hosts have equally many ranks (more than one) and the
            ranks of a host are consecutive; otherwise there is one.
    """
    size, per_host = len(hosts), hosts.count(hosts[0])
    if not 1 < per_host < size or list(hosts) != [host for host in dict.fromkeys(hosts) for _ in range(per_host)]:
        return [[tuple(range(size))]]
    within = [tuple(range(first, first + per_host)) for first in range(0, size, per_host)]
    return [within, list(zip(*within, strict=True))]


def plan_stages(rank: int, hosts: Sequence[str], logical_workers: int, assignment: Sequence[range] = ()) -> list[Stage]:
    """Returns the stages of a rank.

    Args:
        rank: The rank.
        hosts: See `stage_groups`.
        logical_workers: L.
        assignment: See `World`.
    """
    blocks = list(assignment) or [logical_workers_of(r, len(hosts), logical_workers) for r in range(len(hosts))]
    stages = []
    for groups in stage_groups(hosts):
        [ranks] = (group for group in groups if rank in group)
        stages.append(Stage(ranks, tuple(tuple(subtrees(blocks[r], logical_workers)) for r in ranks)))
        # After the stage every rank of a group has sums over the logical workers of the whole group.
        for group in groups:
            for r in group:
                blocks[r] = range(blocks[group[0]].start, blocks[group[-1]].stop)
    return stages


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The group of workers that step together in this generation, as one of them sees it.

    Args:
        rank: The rank of this worker.
        size: W, the number of workers.
        logical_workers: L.
        hosts: The host of every rank; if empty, all ranks count as one host.
        groups: The process group of this rank in each stage of the reduction, see `plan_stages`. None is torch's
            default group, or means that the stage needs no group.
        strided: Whether each rank runs every W-th logical worker instead of a block, so that the logical workers of one
            pass are neighbours in the tree.
        assignment: The block of logical workers of every rank, if the blocks are not as equal as possible.
        check_device_errors: Waits until the device has done its queued work, and raises `PeerLostError` if a collective
            of it failed: NCCL's waits only order streams, and a failed collective leaves garbage. None if waits raise
            by themselves, as gloo's do.
    """

    rank: int
    size: int
    logical_workers: int
    hosts: tuple[str, ...] = ()
    groups: tuple[Any, ...] = (None,)
    strided: bool = False
    assignment: tuple[range, ...] = ()
    check_device_errors: Callable[[], None] | None = None

    def assigned_to(self, rank: int) -> range:
        """Returns the logical workers of a rank."""
        if self.assignment:
            return self.assignment[rank]
        return logical_workers_of(rank, self.size, self.logical_workers, self.strided)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages by which the sums of this rank reach the others."""
        return plan_stages(self.rank, self.hosts or ("",) * self.size, self.logical_workers, self.assignment)

    @cached_property
    def assigned(self) -> range:
        """The logical workers of this rank."""
        return self.assigned_to(self.rank)

    @cached_property
    def launch_guard(self) -> Callable[[], AbstractContextManager[None]]:
        """The context for calls that launch collectives on the device and wait for none.

        It is `collective`, and on a device an abort from another thread waits until the block has ended.
        """
        return collective if self.check_device_errors is None else _locked_collective


_PEER_ERRORS = re.compile(
    "gloo|pair closure|by peer|broken pipe"
    "|nccl (communicator|operation|unique id|stream resources)|nccl [a-z ]+ failed|async error"
    "|processgroupnccl (not initialized|already finalized|has been finalized)|remote process exited|unhandled system"
    " error"
)
"""Messages, in lower case, of errors for which a peer is to blame, from backends without error types of their own:
gloo, and "nccl" of torch 2.15 (`ProcessGroupNCCL2`).
"""
_LOCAL_ERRORS = re.compile(
    "out of memory|allocate memory|cuda error|cuda failure|invalid usage|invalid argument \\(run with nccl"
)
"""Messages, in lower case, of errors of a rank's own device, memory and calls, also those that NCCL passes on."""


@contextmanager
def collective() -> Iterator[None]:
    """Turns the failure of a torch.distributed call for which a peer, or the connection to it, is to blame into
    `PeerLostError`.

    Every other error passes unchanged: another generation would not fix it. The block may contain a forward or a
    backward, too.
    """
    if (group := group_state.group) is not None and group.is_aborted:
        raise PeerLostError("the group was given up; nothing more is exchanged in it")
    try:
        yield
    except RuntimeError as error:
        if not _is_peer_error(error):
            raise
        raise PeerLostError(f"a collective failed: {_message_of(error)}") from error


@contextmanager
def _locked_collective() -> Iterator[None]:
    """Like `collective`, while `group_state.launch_lock` keeps aborts of other threads out."""
    with group_state.launch_lock, collective():
        yield


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turns the failure of a step for which a lost peer is to blame into `PeerLostError`, whether `ray_app` or user
    code raised it.

    User code may have computed with values that never arrived: an optimizer of sharded parameters has collectives of
    its own, and a forward may read what a failed collective has left. While the group is whole, an error of user code
    counts as a peer's only if it was raised inside torch.distributed.
    """
    try:
        yield
    except (RuntimeError, TaskError) as error:
        cause = error.__cause__ if isinstance(error, TaskError) else error
        if not _is_peer_error(cause) or not (
            cause is error or group_state.is_broken() or _was_raised_in_distributed(cause)
        ):
            raise
        raise PeerLostError(f"a peer was lost meanwhile: {_message_of(error)}") from error


def _is_peer_error(error: BaseException | None) -> bool:
    """Returns whether another generation may not meet this error again.

    While the group is broken this holds for every error: the next generation repeats the step, and an error with
    another cause is raised again. Otherwise the type or the message of an error has to name a peer.
    """
    if group_state.is_broken():
        return True
    message = str(error).lower()
    if not isinstance(error, RuntimeError) or _LOCAL_ERRORS.search(message):
        return False
    return isinstance(error, dist.DistError) or _PEER_ERRORS.search(message) is not None


def _was_raised_in_distributed(error: BaseException | None) -> bool:
    """Returns whether the innermost frame, except for the call of an operator, is one of torch.distributed."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)] if error is not None else []
    innermost = next((Path(name) for name in reversed(files) if Path(name) != Path(torch._ops.__file__)), Path())
    return innermost.is_relative_to(Path(dist.__file__).parent)


def _message_of(error: Exception) -> str:
    """Returns the message of an error without gloo's guesses at its cause."""
    message = error.message if isinstance(error, TaskError) else str(error)
    return message.partition(" This is typically")[0]


def gather(value: T, world: World) -> list[T]:
    """Returns the values of all ranks, in the order of the ranks; a collective.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    with collective():
        dist.all_gather_object(values, value)
    return values


def partial_gradient_error(name: str) -> ConfigError:
    """Returns the error for a parameter that receives its gradient in several parts in one backward."""
    return ConfigError(
        f"The gradient of the parameter {name} came in several parts in one backward; a part that comes after the"
        " others have left would be lost, so that the result depended on the number of workers. Activation"
        " checkpointing of layers that share parameters does this: call torch.utils.checkpoint.checkpoint with"
        " use_reentrant=False, or checkpoint the layers together. With train.strategy fsdp so does a gradient that"
        " training_loss takes itself (torch.autograd.grad): use ddp."
    )


def run_backward(losses: Tensor, weights: Tensor) -> None:
    """Runs backward of the weighted sum of losses, both of shape (rows,).

    This is `losses.backward(weights)` without its checks, which take 30 us in a step.
    """
    # A subclass of Tensor may have a backward of its own.
    if type(losses) is not Tensor:
        losses.backward(weights)
        return
    _engine_run_backward((losses,), (weights,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def check_errors_on_all_ranks(world: World) -> None:
    """Waits until the collectives of the device have succeeded on all ranks; their results must not be kept before.

    Raises:
        PeerLostError: A collective failed, on this rank or another one.
    """
    if world.check_device_errors is not None:
        world.check_device_errors()
        gather(None, world)


class GradientReducer(ABC):
    """Adds the gradients of all logical workers and leaves the sum in every parameter's `.grad`.

    In each step a rank calls `backward` or `skip` for each logical worker that it runs, in their order, then `launch`,
    then `finish`. The weights are one over the global number of rows, so the gradients are added, never averaged.
    """

    @abstractmethod
    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """Runs backward of the weighted sum of one logical worker's losses, both of shape (rows,), and adds its
        gradients.
        """

    def collect_from(self, compute: Callable[[], T], logical_worker: int) -> T:
        """Adds the gradients that a call leaves in every `.grad`, instead of those of `backward`; returns the result of
        the call.
        """
        raise NotImplementedError(f"{type(self).__name__} takes gradients from a backward alone")

    @abstractmethod
    def skip(self, logical_worker: int) -> None:
        """Adds zeros for a logical worker without rows."""

    @abstractmethod
    def launch(self) -> None:
        """Starts each part of the reduction that has not started yet; other collectives of the step may follow."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for the reduction; afterwards every parameter's `.grad` holds the sum.

        Raises:
            PeerLostError: A peer left during the reduction; the step can be repeated.
        """

    @abstractmethod
    def close(self) -> None:
        """Removes the hooks and gradients of this reducer from the model."""
