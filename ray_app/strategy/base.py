"""What every strategy offers the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from ray_app.errors import PeerLostError
from ray_app.plan.assign import logical_workers_of

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The workers that step together now.

    Args:
        rank: This worker.
        size: W, their number.
        logical_workers: L.
    """

    rank: int
    size: int
    logical_workers: int

    def played_by(self, rank: int) -> range:
        """Logical workers of a rank."""
        return logical_workers_of(rank, self.size, self.logical_workers)

    @property
    def played(self) -> range:
        """Logical workers of this rank."""
        return self.played_by(self.rank)


@contextmanager
def collective() -> Iterator[None]:
    """Turns the failure of a torch.distributed call into `PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
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


class Strategy(ABC):
    """Adds the gradients of all logical workers and leaves the sum in every parameter's `.grad`.

    In each step a rank calls `backward` or `skip` for each logical worker that it plays, in their order, then `launch`, then
    `finish`. The weights are one over the global number of rows, so the gradients are added, never averaged.
    """

    @abstractmethod
    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """Runs backward of the weighted sum of one logical worker's losses, both of shape (rows,), and adds its gradients."""

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
