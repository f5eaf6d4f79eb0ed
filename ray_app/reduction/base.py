"""The bits of a gradient as one number, which does not depend on the order of its making: integers are added.

By which stages the partial sums of the tree travel: within the hosts first, then between them, so that little crosses
from host to host.

In a stage the ranks of a group cut what they hold into as many shards as they are; each gets its shard of what all of
them hold, and adds in the tree. After the last stage each rank has its shard of the whole sum, and the way back gathers
the shards. Two stages are the hierarchical all-reduce of Jia et al., "Highly Scalable Deep Learning Training System
with Mixed-Precision", 2018, with reductions in one fixed order.

What every exchange offers the step.
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

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(gradient: Tensor, place: int) -> Tensor:
    """The sum of a tensor's bits as integers, times an odd number, modulo 2**64, shape (): a change of any one value
    changes it.

    Args:
        gradient: One that is missing counts as zeros, whose bits are 0.
        place: That of the tensor among others, which decides the odd number.
    """
    if gradient.element_size() not in _INTEGERS:  # complex128
        gradient = torch.view_as_real(gradient)
    return (2 * place + 1) * gradient.view(_INTEGERS[gradient.element_size()]).sum(dtype=torch.int64)


@dataclass(frozen=True)
class Stage:
    """What one rank does in a stage.

    Args:
        ranks: Those who exchange with each other, itself among them, by rank.
        held: For each of them, the nodes of the tree whose sums it holds before.
    """

    ranks: tuple[int, ...]
    held: tuple[tuple[Node, ...], ...]


def groups(hosts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """For each stage the ranks of its groups.

    Args:
        hosts: The host of every rank. Two stages need hosts of equally many ranks, one host after the other; else there
            is one.
    """
    size, each = len(hosts), hosts.count(hosts[0])
    if not 1 < each < size or list(hosts) != [host for host in dict.fromkeys(hosts) for _ in range(each)]:
        return [[tuple(range(size))]]
    within = [tuple(range(first, first + each)) for first in range(0, size, each)]
    return [within, list(zip(*within, strict=True))]


def route(rank: int, hosts: Sequence[str], logical_workers: int, shares: Sequence[range] = ()) -> list[Stage]:
    """The stages of a rank; for `hosts` see `groups`, for `shares` `exchange.World`."""
    blocks = list(shares) or [logical_workers_of(r, len(hosts), logical_workers) for r in range(len(hosts))]
    stages = []
    for stage in groups(hosts):
        [ranks] = (group for group in stage if rank in group)
        stages.append(Stage(ranks, tuple(tuple(subtrees(blocks[r], logical_workers)) for r in ranks)))
        for group in stage:
            for r in group:
                blocks[r] = range(blocks[group[0]].start, blocks[group[-1]].stop)
    return stages


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The workers that step together now.

    Args:
        rank: This worker.
        size: W, their number.
        logical_workers: L.
        hosts: The host of every rank; none: they count as one.
        groups: The process group of this rank in each stage of the exchange, see `plan.route`; None is torch's default
            group, or that the stage needs none.
        strided: Whether each plays every W-th logical worker, so that those of one pass are neighbours in the tree,
            instead of a block.
        shares: The block of every rank, where they are not as equal as can be.
        settle: Waits until the device has done what it was given and raises `PeerLostError` if an exchange of it was
            broken: the waits of NCCL only put streams in order, and what was broken leaves garbage. None where waits
            raise by themselves, as gloo's do.
    """

    rank: int
    size: int
    logical_workers: int
    hosts: tuple[str, ...] = ()
    groups: tuple[Any, ...] = (None,)
    strided: bool = False
    shares: tuple[range, ...] = ()
    settle: Callable[[], None] | None = None

    def played_by(self, rank: int) -> range:
        """Logical workers of a rank."""
        return (
            self.shares[rank]
            if self.shares
            else logical_workers_of(rank, self.size, self.logical_workers, self.strided)
        )

    @cached_property
    def route(self) -> list[Stage]:
        """By which stages what this rank has added reaches the others."""
        return route(self.rank, self.hosts or ("",) * self.size, self.logical_workers, self.shares)

    @cached_property
    def played(self) -> range:
        """Logical workers of this rank."""
        return self.played_by(self.rank)

    @cached_property
    def launching(self) -> Callable[[], AbstractContextManager[None]]:
        """`collective`, for calls that give the device exchanges and wait for none: an abort from another thread waits
        for their end.
        """
        return collective if self.settle is None else _launching


_OF_A_PEER = re.compile(
    "gloo|pair closure|by peer|broken pipe"
    "|nccl (communicator|operation|unique id|stream resources)|nccl [a-z ]+ failed|async error"
    "|processgroupnccl (not initialized|already finalized|has been finalized)|remote process exited|unhandled system"
    " error"
)
"""What backends whose errors have no type of their own say, in lower case: gloo, and "nccl" of torch 2.15
(`ProcessGroupNCCL2`).
"""
_OF_THIS_RANK = re.compile(
    "out of memory|allocate memory|cuda error|cuda failure|invalid usage|invalid argument \\(run with nccl"
)
"""What errors of a rank's own device, memory and calls say, in lower case, also where NCCL passes them on."""


@contextmanager
def collective() -> Iterator[None]:
    """Turns the failure of a torch.distributed call that a peer, or the way to it, is to blame for into
    `PeerLostError`.

    Everything else keeps its own words: another generation would not mend it. A forward or backward may be inside, too.
    """
    if (group := group_state.group) is not None and group.is_aborted:
        raise PeerLostError("the group was given up; nothing more is exchanged in it")
    try:
        yield
    except RuntimeError as error:
        if not _is_of_a_peer(error):
            raise
        raise PeerLostError(f"a collective failed: {_words_of(error)}") from error


@contextmanager
def peers_to_blame() -> Iterator[None]:
    """Turns the failure of a step that a lost peer is to blame for into `PeerLostError`, whether our code or user code
    raised it.

    User code may have computed from values that never came: an optimizer of sharded parameters has collectives of its
    own, and a forward may meet what a broken exchange has left. While the group is whole, an error of user code is only
    a peer's if it was raised inside torch.distributed.
    """
    try:
        yield
    except (RuntimeError, TaskError) as error:
        cause = error.__cause__ if isinstance(error, TaskError) else error
        if not _is_of_a_peer(cause) or not (
            cause is error or group_state.is_broken() or _was_raised_in_distributed(cause)
        ):
            raise
        raise PeerLostError(f"a peer was lost meanwhile: {_words_of(error)}") from error


def _is_of_a_peer(error: BaseException | None) -> bool:
    """Whether an error may not come again in another generation.

    While the group is broken this holds for every error: the next generation repeats the step, and an error with
    another cause comes again. Otherwise the type or the words of an error have to name a peer.
    """
    if group_state.is_broken():
        return True
    message = str(error).lower()
    if not isinstance(error, RuntimeError) or _OF_THIS_RANK.search(message):
        return False
    return isinstance(error, dist.DistError) or _OF_A_PEER.search(message) is not None


def _was_raised_in_distributed(error: BaseException | None) -> bool:
    """Whether the innermost call, but for that of an operator, is one of torch.distributed."""
    calls = [call.filename for call in traceback.extract_tb(error.__traceback__)] if error is not None else []
    inner = next((Path(name) for name in reversed(calls) if Path(name) != Path(torch._ops.__file__)), Path())
    return inner.is_relative_to(Path(dist.__file__).parent)


def _words_of(error: Exception) -> str:
    return (error.said if isinstance(error, TaskError) else str(error)).partition(" This is typically")[
        0
    ]  # gloo's guesses at a cause


@contextmanager
def _launching() -> Iterator[None]:
    with group_state.launches, collective():
        yield


def gather(value: T, world: World) -> list[T]:
    """Every rank's value, in the order of the ranks.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    with collective():
        dist.all_gather_object(values, value)
    return values


def in_parts(name: str) -> ConfigError:
    """The refusal of a parameter whose gradient comes more than once in a backward."""
    return ConfigError(
        f"The gradient of the parameter {name} came in several parts in one backward; a part that comes after the"
        f" others have left"
        " would be lost, so that the result depended on the number of workers. Activation checkpointing of layers that"
        " share parameters"
        " does this: call torch.utils.checkpoint.checkpoint with use_reentrant=False, or checkpoint the layers"
        " together. With"
        " train.strategy fsdp so does a gradient that training_loss takes itself (torch.autograd.grad): use ddp."
    )


def backward_of(losses: Tensor, weights: Tensor) -> None:
    """Backward of the weighted sum of losses, both of shape (rows,), as `losses.backward(weights)` without its checks
    (30 us in a step).
    """
    if type(losses) is not Tensor:  # it may have a backward of its own
        losses.backward(weights)
        return
    _engine_run_backward((losses,), (weights,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def settled(world: World) -> None:
    """Returns when what the device exchanged is there, on all ranks; before, nothing of it may be kept.

    Raises:
        PeerLostError: It was broken, here or elsewhere.
    """
    if world.settle is not None:
        world.settle()
        gather(None, world)


class GradientReducer(ABC):
    """Adds the gradients of all logical workers and leaves the sum in every parameter's `.grad`.

    In each step a rank calls `backward` or `skip` for each logical worker that it plays, in their order, then `launch`,
    then `finish`. The weights are one over the global number of rows, so the gradients are added, never averaged.
    """

    @abstractmethod
    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """Runs backward of the weighted sum of one logical worker's losses, both of shape (rows,), and adds its
        gradients.
        """

    def take(self, leave: Callable[[], T], logical_worker: int) -> T:
        """In the place of `backward`: takes the gradients that a call leaves in every `.grad`, all at once; returns
        what it returns.
        """
        raise NotImplementedError(f"{type(self).__name__} takes gradients from a backward alone")

    @abstractmethod
    def skip(self, logical_worker: int) -> None:
        """Adds zeros for a logical worker without rows."""

    @abstractmethod
    def launch(self) -> None:
        """Starts whatever part of the exchange has not started yet; other collectives of the step may follow."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for the exchange; afterwards every parameter's `.grad` holds the sum.

        Raises:
            PeerLostError: A peer left in mid-exchange; the step can be repeated.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves the model as it was found."""
