"""Training state that no rank alone has all of while a generation steps, and the whole copies that it is made of again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.errors import PeerLostError
from ray_app.exchange.exchange import World, collective, gather, settled
from ray_app.task.base import Task
from ray_app.train.state.state import NOTHING, TrainingState
from ray_app.train.state.transfer import lacking, transfer
from ray_app.train.strategies.copies import Copies


class SpreadState(TrainingState):
    """See the module.

    Every snapshot is a collective and leaves a whole copy in the host memory of every rank. One is made at each checkpoint and snapshot,
    and at the end of a generation that ends as planned. When a peer is lost, the ranks go on from the newest copy that one of them has, or
    from what they keep of each other after every step (`train.second_copy`).
    """

    is_spread: ClassVar[bool] = True

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        self._world = World(0, 1, 1)
        self._whole: Snapshot | None = None
        self._copies = Copies()
        super().__init__(config, task, device, total_steps)

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """See `TrainingState.snapshot`; a collective, unless there is a whole copy of this step already.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        del into  # should this copy fail half-way, the one before it is needed
        if self._whole is None or self._whole.step != self.step:
            with collective():
                collected = self._collected()
            settled(self._world)
            self._whole = collected
        return self._whole

    def load(self, snapshot: Snapshot) -> None:
        """See `TrainingState.load`; takes effect with `share`."""
        self._whole, self.step = snapshot, snapshot.step

    @contextmanager
    def among(self, world: World) -> Iterator[World]:
        """See `TrainingState.among`."""
        self._world = world
        try:
            yield world
            self.snapshot()
        except PeerLostError:
            self._fall_back()
            raise

    def _fall_back(self) -> None:
        """Goes back to what this rank has alone."""
        self.step = self._whole.step if self._whole is not None else NOTHING

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """See `TrainingState.share`; whole copies are not compared: they are made of what has settled on all ranks."""
        del was_broken
        found = self._copies.newest(world, self.step)
        if found is not None:
            self.step, self._whole = found[0], Snapshot(found[0], *found[1])
        steps = gather(self.step, world)
        if max(steps) == NOTHING and world.rank == 0:
            restore()
        source = steps.index(max(steps))
        if world.rank == source:
            self._whole = self._own()
        self._whole = self._sent(source, lacking(steps, source))
        self.step = self._whole.step
        self._take(self._whole)
        self._copies.clear()
        return []

    def pass_over(self) -> None:
        """See `TrainingState.pass_over`; a collective if there are second copies."""
        super().pass_over()
        if self._config.train.second_copy and self._world.size > 1:
            self._copies.keep(self.step, self._part(), self._world, self._owners)

    def _part(self) -> Any:
        """What this rank alone has of the state, see `Copies.keep`."""
        live = self._live()
        return live.model, live.optimizer, live.schedule, live.more

    @property
    def _owners(self) -> int:
        """How many of the first ranks have a part."""
        return self._world.size

    def _sent(self, source: int, to: Sequence[int]) -> Snapshot:
        """The whole copy of one rank, on it and those who get it; a collective of these.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        whole = transfer(self._whole, self._world.rank, source, to)
        assert whole is not None
        return whole

    def _own(self) -> Snapshot:
        """A whole copy of the state that this rank has alone: that of before the first step if it has none."""
        return self._whole if self._whole is not None else super().snapshot()

    @abstractmethod
    def _collected(self) -> Snapshot:
        """Makes a whole copy; a collective of all ranks."""

    @abstractmethod
    def _take(self, whole: Snapshot) -> None:
        """Begins a generation with a state, which stays as it is."""
