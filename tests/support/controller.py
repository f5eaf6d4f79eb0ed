"""The controller without Ray: fakes of Ray and of the rendezvous, and a worker group that has not started."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import RestartingState
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from ray_app.cluster.controller import controller as module
from ray_app.cluster.controller.controller import ElasticController
from ray_app.cluster.controller.failure_budget import FailureBudget
from ray_app.cluster.controller.pending_workers import PendingWorkers, Slot
from ray_app.cluster.controller.worker_group import ElasticGroup
from ray_app.config.config import Config
from ray_app.runlog.journal import read_events
from ray_app.train.membership import Heartbeat, RendezvousStatus

TRAINS, EXITED = WorkerStatus(running=True), WorkerStatus(running=False)
FAILED = WorkerStatus(running=False, error=OSError("lost"))
SLOT = Slot({"CPU": 1.0}, {})


class FakeGroup:
    """A worker group; each worker is on a node of its own."""

    pending: FakePendingWorkers

    def __init__(self, **workers: WorkerStatus) -> None:
        self.polls, self.workers = workers, list(workers)

    def __len__(self) -> int:
        return len(self.workers)

    def get_workers(self) -> list[Any]:
        return [
            SimpleNamespace(actor=name, metadata=SimpleNamespace(node_id=name, gpu_ids=[0])) for name in self.workers
        ]

    def drop(self, actor_ids: frozenset[str]) -> None:
        self.workers = [name for name in self.workers if name not in actor_ids]

    def join(self, max_workers: int) -> int:
        self.workers += [f"new{index}" for index in range(max_workers)]
        self.pending.count -= max_workers
        return max_workers


class FakePendingWorkers:
    """A fake of `PendingWorkers` in which all pending workers are ready."""

    def __init__(self) -> None:
        self.count = self.failed_rounds = self.num_held = 0
        self.started, self.reasons = list[int](), list[str]()
        self.excluded = list[tuple[str, ...]]()

    def __len__(self) -> int:
        return self.count

    def count_ready(self, since_s: float = 0.0) -> int:
        return self.count

    def poll(self, draining_nodes: frozenset[str]) -> list[str]:
        reasons, self.reasons = self.reasons, []
        self.count -= len(reasons)
        return reasons

    def exclude(self, device: tuple[str, ...]) -> None:
        self.excluded.append(device)

    def include_all_devices(self) -> None:
        self.excluded, self.num_held = [], 0

    def limit_to(self, max_pending: int) -> None:
        self.count = min(self.count, max_pending)

    def start(self, count: int, slot: Slot) -> None:
        if count > 0:
            self.started.append(count)
            self.count += count


class FakeRendezvous:
    """A fake of the rendezvous that records the calls."""

    def __init__(self) -> None:
        self.calls, self.heartbeats = list[Any](), list[Heartbeat]()
        self.now = RendezvousStatus(set(), set(), {}, 0, 7, None, None, False, 60.0)

    def status(self) -> RendezvousStatus:
        return self.now

    def workers(self) -> list[Heartbeat]:
        return self.heartbeats

    def set_expected(self, *expected: Any) -> None:
        self.calls.append(expected)

    def drain(self, draining: set[str]) -> None:
        self.draining = draining

    def remove(self, workers: frozenset[str]) -> None:
        self.calls.append(sorted(workers))


class ControllerHarness:
    """A controller of 1 to 3 workers without Ray; the test moves its clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        shape = {"scaling__max_workers": 3, "scaling__logical_workers": 3} | fields
        config = Config().replace(**shape)
        self.budget = FailureBudget(str(folder), 1, config.failure)
        self.pending = FakePendingWorkers()
        self.rendezvous = FakeRendezvous()
        self.policy: Any = SimpleNamespace(
            draining_nodes=frozenset(), excluded_nodes=(), suspected=set(), include_all_nodes=lambda: None
        )
        self.policy.suspect = self.policy.suspected.update
        self.policy.possible_workers = lambda current: self.possible - self.held_slots
        self.policy.set_held_slots = lambda count: setattr(self, "held_slots", count)
        self.policy.exclude_node = lambda node: setattr(self.policy, "excluded_nodes", (node,))
        self.policy.capacity_without = lambda node, current: 1
        self.possible, self.held_slots = 3, 0
        self.now_s = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=lambda s: None))
        monkeypatch.setattr(module, "actor_id_of", lambda actor: actor)
        monkeypatch.setattr(TrainController, "__init__", lambda self, **_: None)
        monkeypatch.setattr(TrainController, "_poll_workers", ControllerHarness._poll)
        monkeypatch.setattr(
            TrainController, "_shutdown_worker_group", lambda ours: setattr(ours, "_worker_group", None)
        )
        self.abandoned, slot = threading.Event(), SLOT
        collaborators: Any = (config, self.rendezvous, self.budget, self.pending, slot, self.abandoned, self.policy)
        self.controller: Any = ElasticController(*collaborators)
        self.group, self.controller._run_attempt_id = None, "attempt"

    @staticmethod
    async def _poll(controller: Any) -> WorkerGroupPollStatus:
        group = controller._worker_group
        return WorkerGroupPollStatus(dict(enumerate(group.polls.get(name, TRAINS) for name in group.workers)), {})

    def poll(self, group: FakeGroup | None = None) -> list[str]:
        """Polls a group of workers as Ray does while they train; returns the workers that are in it afterwards."""
        if group is not None:
            self.group = group
        self.group.pending = self.pending
        status = asyncio.run(self.controller._poll_workers())
        if status.errors:
            self.decide()
        return [] if self.group is None else self.group.workers

    def decide(self) -> Any:
        """Returns Ray's next state after a failure, or without workers."""
        decide = self.controller._make_and_handle_scaling_decision_for_non_running_worker_group
        return decide(RestartingState(training_failed_error=None)).next_state

    def decide_after(self, group: FakeGroup, *ended: str) -> Any:
        """Returns Ray's next state after a poll in which these workers of a group have ended with an error."""
        self.group, self.controller._polls = group, dict.fromkeys(ended, (False, FAILED.error))
        return self.decide()

    def start(self) -> None:
        """Starts a group of two workers as Ray does."""
        self.controller._start_worker_group(num_workers=2)

    def iterate(self) -> None:
        """Makes an iteration of Ray's control loop."""
        asyncio.run(self.controller._run_control_loop_iteration())

    @property
    def group(self) -> Any:
        return self.controller._worker_group

    @group.setter
    def group(self, group: Any) -> None:
        self.controller._worker_group = group

    def events(self, *kinds: str) -> list[Any]:
        return [(event.kind, event.details) for event in read_events(self.budget.paths, *kinds)]


def make_group(pending_workers: PendingWorkers) -> Any:
    """Returns a worker group of two workers that starts."""
    group: Any = ElasticGroup.__new__(ElasticGroup)
    context = SimpleNamespace(num_workers=2, resources_per_worker={"CPU": 1.0})
    vars(group).update(_pending_workers=pending_workers, _slot=SLOT, _callbacks=[], _worker_group_state=None)
    vars(group)["_worker_group_context"] = context
    return group


def create_workers(group: Any, num_workers: int) -> None:
    """Waits for the workers of a group, as Ray does when it starts the group."""
    group._create_workers(num_workers)


def start_group(group: Any) -> None:
    """Starts a group as Ray does."""
    vars(group).update(_replica_groups=None, _worker_rank_to_replica_group_rank=None, _world_rank_to_ongoing_poll={})
    group._start()


def initialize_contexts(group: Any, workers: list[Any]) -> None:
    """Initializes the contexts of workers as Ray does."""
    vars(group).update(_train_run_context=None, _storage_context=None, _worker_callbacks_to_propagate=[])
    group._init_train_context_on_workers(workers, None, {})
