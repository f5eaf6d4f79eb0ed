"""Workers on their way: they begin while the others train on, so that nobody waits for their processes, their imports
and their device.

Every worker is a newcomer first: those that a run starts with, those that replace a lost one or use new room, and the
spares of `scaling.standby_workers`, which have prepared themselves and wait for somebody to be lost or for room. Each
has a placement group of its own, so that the slot of a lost worker is free again at once and one for a new one can be
anywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_app.process import without_gc

_PLACE_S, _PLACE_EACH_S = 5.0, 0.01  # Ray makes some hundred slots a second
_READY_S, _PATIENCE_S = 600.0, 10.0
_MOST_DEATHS = 3
NO_ROOM = "there is no room"
"""Why a newcomer was given up that found no slot."""


@dataclass(frozen=True)
class Slot:
    """What each worker reserves, and where.

    Args:
        resources: By Ray's names.
        strategy: How Ray places it.
        labels: Labels of the node, see `scaling.label_selector`, and Ray's own.
    """

    resources: dict[str, float]
    strategy: str
    labels: dict[str, str]


@dataclass(eq=False)
class PendingWorker:
    """A worker that is not one yet.

    Args:
        actor: Handle of its actor.
        group: The placement group that it runs in.
        prepared: Reference of its preparation, which returns nothing.
        answer: Reference of its next sign of life, which is where it is (Ray's `ActorMetadata`).
        place_until_s: When it is given up if there is no room for it, by the monotonic clock.
        ready_until_s: When it is given up if it has not prepared itself.
        placed: Whether it was seen to have its slot.
        ready_s: When it was seen to be ready.
        metadata: Where it is, once it is ready.
        began_s: When it began.
    """

    actor: Any
    group: PlacementGroup
    prepared: Any
    answer: Any
    place_until_s: float
    ready_until_s: float
    placed: bool = False
    ready_s: float | None = None
    metadata: Any = None
    began_s: float = field(default_factory=time.monotonic)

    def hear(self) -> None:
        """Takes its answer, and asks again.

        Raises:
            RayError: It died, or its preparation failed.
        """
        ray.get(self.prepared)
        self.metadata, self.answer = ray.get(self.answer), self.actor.get_metadata.remote()
        self.ready_s = self.ready_s or time.monotonic()

    def give_up(self) -> None:
        """Ends it and gives its slot back."""
        ray.kill(self.actor)
        remove_placement_group(self.group)


class PendingWorkers(ControllerCallback, WorkerGroupCallback):
    """All that are on their way; lives in the controller's process, longer than its groups of workers.

    Where one after the other dies while it prepares itself, the next do not: what kills them does so when they train,
    where it is counted. Some die all the same (`in_vain`): at a start that is a failure of its own, while others train
    it is tried less and less often.

    Args:
        prepare: Reference of a function without arguments that each calls first.
        least: With so many a run may start.
        stopping: Whether the run is to stop.
    """

    def __init__(self, prepare: Any, least: int, stopping: Callable[[], bool]) -> None:
        self._prepare, self._least, self._stopping = prepare, least, stopping
        self._all: list[PendingWorker] = []
        self._deaths = self._rounds = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def in_vain(self) -> int:
        """How often in a row some died and nobody became ready, beyond the tries after which they need not prepare
        themselves.
        """
        return max(0, self._rounds - _MOST_DEATHS)

    def begin(self, count: int, slot: Slot) -> None:
        """Has `count` more of them prepare themselves, each as soon as there is room for it."""
        if count <= 0:
            return
        made = ray.remote(**bundle_to_remote_args(slot.resources))(
            RayTrainWorker
        )  # no `runtime_env`: processes that are there can be used
        env, now = get_env_vars_to_propagate(), time.monotonic()
        for _ in range(count):
            group = placement_group(
                [slot.resources], strategy=slot.strategy, bundle_label_selector=[slot.labels] if slot.labels else None
            )
            actor = made.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            ).remote()
            prepare = self._prepare if self._deaths < _MOST_DEATHS else None
            prepared, answer = actor.execute.remote(_prepare, env, [prepare]), actor.get_metadata.remote()
            self._all.append(
                PendingWorker(actor, group, prepared, answer, now + _PLACE_S + count * _PLACE_EACH_S, now + _READY_S)
            )

    def look(self, draining: Collection[str] = ()) -> list[str]:
        """Finds out who is ready, and gives up those for whom there is no room, who failed, who take too long, or whose
        node goes away.

        Args:
            draining: Ids of nodes that go away.

        Returns:
            Why each was given up, but for nodes that go away.
        """
        reasons, deaths, ready = list[str](), 0, False
        for newcomer in self._answering(0):
            was_ready = newcomer.ready_s is not None
            try:
                newcomer.hear()
                ready |= not was_ready
            except ray.exceptions.RayError as error:
                deaths += not was_ready
                reasons.append(str(error))
                self._give_up(newcomer)
        now = time.monotonic()
        for newcomer in [n for n in self._all if n.ready_s is None and now > n.place_until_s]:
            newcomer.placed = newcomer.placed or placement_group_table(newcomer.group)["state"] == "CREATED"
            if not newcomer.placed:
                reasons.append(NO_ROOM)
                self._give_up(newcomer)
            elif now > newcomer.ready_until_s:
                reasons.append(f"it was not ready after {_READY_S:g} s")
                deaths += 1
                self._give_up(newcomer)
        self._deaths, self._rounds = (0, 0) if ready else (self._deaths + deaths, self._rounds + (deaths > 0))
        for newcomer in [n for n in self._all if n.ready_s is not None and n.metadata.node_id in draining]:
            self._give_up(newcomer)
        return reasons

    def wait(self, count: int) -> list[str]:
        """Waits until so many are ready, or as many as are left; not for those who take long, if a run may start
        without them.

        Returns:
            Why others were given up, see `look`.
        """
        reasons = self.look()
        while self.ready() < min(count, len(self)) and not self._is_enough() and not self._stopping():
            self._answering(_PLACE_S / 10)
            reasons += self.look()
        return reasons

    def _is_enough(self) -> bool:
        """Whether a run may start with those who are ready, and they have waited for the others for as long as they
        took themselves.
        """
        ready = sorted((n.ready_s, n.began_s) for n in self._all if n.ready_s is not None)
        if len(ready) < self._least:
            return False
        ready_s, began_s = ready[self._least - 1]
        return time.monotonic() - ready_s >= max(_PATIENCE_S, ready_s - began_s)

    def _answering(self, timeout_s: float) -> list[PendingWorker]:
        asked = {newcomer.answer: newcomer for newcomer in self._all}
        return (
            [asked[ref] for ref in ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)[0]] if asked else []
        )

    def ready(self, since_s: float = 0.0) -> int:
        """How many are ready, since so many seconds at least."""
        return sum(n.ready_s is not None and time.monotonic() - n.ready_s >= since_s for n in self._all)

    def take(self, count: int) -> list[PendingWorker]:
        """Those who join now: ready ones, as many as there are of `count`, who have waited longest first."""
        taken = sorted((n for n in self._all if n.ready_s is not None), key=lambda n: n.ready_s or 0.0)[:count]
        self._all = [n for n in self._all if n not in taken]
        return taken

    def keep(self, most: int) -> None:
        """Gives up those who are too many, who began last first."""
        for newcomer in self._all[most:]:
            self._give_up(newcomer)

    def _give_up(self, newcomer: PendingWorker) -> None:
        newcomer.give_up()
        self._all.remove(newcomer)

    async def before_controller_shutdown(self) -> None:
        """None of them is needed any more."""
        self.keep(0)


def _prepare(env: dict[str, str], prepare: list[Any]) -> None:
    os.environ |= env
    if prepare[0] is not None:
        with without_gc():
            function: Callable[[], None] = ray.get(
                prepare[0]
            )  # not earlier: imports come with it, which look at the environment
            function()
