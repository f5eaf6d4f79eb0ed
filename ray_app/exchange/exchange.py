"""What every exchange offers the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from ray_app.errors import ConfigError, PeerLostError
from ray_app.plan.assign import logical_workers_of
from ray_app.plan.route import Stage, route

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The workers that step together now.

    Args:
        rank: This worker.
        size: W, their number.
        logical_workers: L.
        hosts: The host of every rank; none: they count as one.
        groups: The process group of this rank in each stage of the exchange, see `plan.route`; None is torch's default group, or that the
            stage needs none.
        strided: Whether each plays every W-th logical worker, so that those of one pass are neighbours in the tree, instead of a block.
        shares: The block of every rank, where they are not as equal as can be.
        settle: Waits until the device has done what it was given and raises `PeerLostError` if an exchange of it was broken: the waits of
            NCCL only put streams in order, and what was broken leaves garbage. None where waits raise by themselves, as gloo's do.
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
        return self.shares[rank] if self.shares else logical_workers_of(rank, self.size, self.logical_workers, self.strided)

    @cached_property
    def route(self) -> list[Stage]:
        """By which stages what this rank has added reaches the others."""
        return route(self.rank, self.hosts or ("",) * self.size, self.logical_workers, self.shares)

    @cached_property
    def played(self) -> range:
        """Logical workers of this rank."""
        return self.played_by(self.rank)


_OF_A_PEER = ("gloo", "pair closure", "by peer", "broken pipe")
"""What gloo, which has no type of its own for errors, and the network say, in lower case."""
_OF_THE_DEVICE = ("out of memory", "allocate memory", "CUDA error", "Cuda failure")
"""What errors of a rank's own device and memory say, also where NCCL passes them on."""


@contextmanager
def collective() -> Iterator[None]:
    """Turns the failure of a torch.distributed call that a peer, or the way to it, is to blame for into `PeerLostError`.

    Everything else keeps its own words: another generation would not mend it. A forward or backward may be inside, too.
    """
    try:
        yield
    except RuntimeError as error:
        is_of_a_peer = isinstance(error, dist.DistError) or any(words in str(error).lower() for words in _OF_A_PEER)
        if not is_of_a_peer or any(words in str(error) for words in _OF_THE_DEVICE):
            raise
        said = str(error).partition(" This is typically")[0]  # gloo's guesses at a cause
        raise PeerLostError(f"a collective failed: {said}") from error


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
        f"The gradient of the parameter {name} came in several parts in one backward; a part that comes after the others have left"
        " would be lost, so that the result depended on the number of workers. Activation checkpointing of layers that share parameters"
        " does this: call torch.utils.checkpoint.checkpoint with use_reentrant=False, or checkpoint the layers together. With"
        " train.strategy fsdp so does a gradient that training_loss takes itself (torch.autograd.grad): use ddp."
    )


def backward_of(losses: Tensor, weights: Tensor) -> None:
    """Backward of the weighted sum of losses, both of shape (rows,), as `losses.backward(weights)` without its checks (30 us in a step)."""
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


class Exchange(ABC):
    """Adds the gradients of all logical workers and leaves the sum in every parameter's `.grad`.

    In each step a rank calls `backward` or `skip` for each logical worker that it plays, in their order, then `launch`, then
    `finish`. The weights are one over the global number of rows, so the gradients are added, never averaged.
    """

    @abstractmethod
    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """Runs backward of the weighted sum of one logical worker's losses, both of shape (rows,), and adds its gradients."""

    def take(self, leave: Callable[[], T], logical_worker: int) -> T:
        """In the place of `backward`: takes the gradients that a call leaves in every `.grad`, all at once; returns what it returns."""
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
