"""How the controller carries out its decisions, with fakes of Ray and of the rendezvous."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import RestartingState, RunningState, SchedulingState
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from ray_app.cluster.controller import controller as module
from ray_app.cluster.controller.controller import ElasticController
from ray_app.cluster.controller.decisions import StoppedWaitingError
from ray_app.cluster.controller.failure_budget import FailureBudget
from ray_app.cluster.controller.pending_workers import Slot
from ray_app.cluster.controller.worker_group import WorkersFailedToStartError
from ray_app.config.config import Config
from ray_app.config.sections import FailureSection
from ray_app.errors import BudgetSpentError, DeviceFaultError, RepeatedFailureError
from ray_app.runlog.journal import StepRecord, read_events
from ray_app.train.membership import Heartbeat, RendezvousStatus

TRAINS, EXITED = WorkerStatus(running=True), WorkerStatus(running=False)
FAILED = WorkerStatus(running=False, error=OSError("lost"))
# The controller keeps this part of a status such as `FAILED`.
ENDED = False, FAILED.error


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
        self.group = None
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=lambda s: None))
        monkeypatch.setattr(module, "actor_id_of", lambda actor: actor)
        monkeypatch.setattr(TrainController, "__init__", lambda self, **_: None)
        monkeypatch.setattr(TrainController, "_poll_workers", ControllerHarness._poll)
        monkeypatch.setattr(
            TrainController, "_shutdown_worker_group", lambda ours: setattr(ours, "_worker_group", None)
        )
        self.abandoned, slot = threading.Event(), Slot({"CPU": 1.0}, {})
        collaborators: Any = (config, self.rendezvous, self.budget, self.pending, slot, self.abandoned, self.policy)
        self.controller: Any = ElasticController(*collaborators)
        self.controller._worker_group, self.controller._run_attempt_id = None, "attempt"

    @staticmethod
    async def _poll(controller: Any) -> WorkerGroupPollStatus:
        group = controller._worker_group
        return WorkerGroupPollStatus(dict(enumerate(group.polls.get(name, TRAINS) for name in group.workers)), {})

    def poll(self, group: FakeGroup | None = None) -> list[str]:
        """Polls a group of workers as Ray does while they train; returns the workers that are in it afterwards."""
        if group is not None:
            self.controller._worker_group = group
        self.controller._worker_group.pending = self.pending
        status = asyncio.run(self.controller._poll_workers())
        if status.errors:
            self.decide()
        group = self.controller._worker_group
        return [] if group is None else group.workers

    def decide(self) -> Any:
        """Returns Ray's next state after a failure, or without workers."""
        decide = self.controller._make_and_handle_scaling_decision_for_non_running_worker_group
        return decide(RestartingState(training_failed_error=None)).next_state

    def events(self, *kinds: str) -> list[Any]:
        return [(event.kind, event.details) for event in read_events(self.budget.paths, *kinds)]


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControllerHarness:
    return ControllerHarness(tmp_path, monkeypatch)


def test_a_failed_worker_is_charged_and_dropped_and_replaced_at_the_next_poll(harness: ControllerHarness) -> None:
    assert harness.poll(FakeGroup(a=TRAINS, b=FAILED, c=TRAINS)) == ["a", "c"]
    [(_, failed)] = harness.events("failed")
    assert (failed["errors"], failed["step"], failed["left"]) == ({"1": "OSError: lost"}, 7, 2)
    assert harness.policy.suspected == {"b"}
    assert harness.rendezvous.calls == [["b"], (2, None, False)]
    assert harness.pending.started == []
    assert harness.poll() == ["a", "c"]
    assert harness.pending.started == [1], "the worker starts in the iteration that decides it"
    assert harness.poll() == ["a", "c", "new0"]
    assert [event.details for event in read_events(harness.budget.paths, "replaced")] == [
        {"before": 2, "after": 3, "step": 7, "reason": "a worker would run 1 logical workers instead of 2"}
    ]
    assert harness.rendezvous.calls[-1] == (3, None, False)


def test_a_standby_worker_joins_at_the_first_poll_after_a_failure(tmp_path: Path, monkeypatch: Any) -> None:
    harness = ControllerHarness(tmp_path, monkeypatch, scaling__standby_workers=1)
    harness.pending.count, harness.possible = 1, 4
    harness.poll(FakeGroup(a=TRAINS, b=FAILED, c=TRAINS))
    assert harness.poll() == ["a", "c", "new0"]
    assert harness.pending.started == [1], "another standby worker starts for the one that has joined"


def test_a_worker_on_a_draining_node_is_dropped_and_replaced_in_the_same_poll(
    harness: ControllerHarness,
) -> None:
    harness.policy.draining_nodes, harness.pending.count = frozenset("b"), 1
    assert harness.poll(FakeGroup(a=TRAINS, b=EXITED, c=TRAINS)) == ["a", "c", "new0"]
    assert harness.events("failed", "preempted") == [("preempted", {"number": 1, "workers": 1, "step": 7, "left": 2})]
    assert harness.rendezvous.draining == {"b"}


def test_a_worker_that_exited_while_another_failed_is_charged_as_a_preemption(harness: ControllerHarness) -> None:
    harness.policy.draining_nodes = frozenset("a")
    assert harness.poll(FakeGroup(a=EXITED, b=FAILED, c=TRAINS)) == ["c"]
    charged = [(kind, details["left"]) for kind, details in harness.events("failed", "preempted")]
    assert charged == [("failed", 2), ("preempted", 1)]


def test_all_workers_restart_after_all_of_them_are_lost(harness: ControllerHarness) -> None:
    harness.controller._worker_group, harness.controller._polls = (
        FakeGroup(a=FAILED, b=FAILED),
        {"a": ENDED, "b": ENDED},
    )
    state = harness.decide()
    assert isinstance(state, SchedulingState)
    decision = state.scaling_decision
    assert (decision.num_workers, decision.resources_per_worker) == (3, {"CPU": 1.0})
    assert harness.controller._worker_group is None
    assert harness.policy.suspected == {"a", "b"}
    assert harness.events("failed")[0][1]["left"] == 0


def test_without_capacity_the_controller_waits_with_a_reason_until_a_stop(harness: ControllerHarness) -> None:
    harness.possible = 0
    assert isinstance(harness.decide(), RestartingState)
    assert harness.rendezvous.calls == [(0, "nodes for 0 of at least 1 workers; waiting for capacity", False)]
    harness.rendezvous.now = RendezvousStatus(set(), set(), {}, 0, 7, None, None, True, 60.0)
    with pytest.raises(StoppedWaitingError):
        harness.decide()


def test_a_worker_that_is_declared_lost_is_charged_to_the_failure_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = ControllerHarness(tmp_path, monkeypatch, failure__max_failures=0)
    harness.rendezvous.now = RendezvousStatus(set(), set(), {"b": 3.0}, 0, 7, None, None, False, 60.0)
    with pytest.raises(BudgetSpentError):
        harness.poll(FakeGroup(a=TRAINS, b=TRAINS))
    assert harness.events("failed")[0][1]["errors"] == {"1": "ConnectionError: no heartbeat for 5 s"}


def test_the_only_worker_that_is_declared_lost_is_replaced(harness: ControllerHarness) -> None:
    lost = RendezvousStatus(set(), set(), {"a": 3.0}, 0, 7, None, None, False, 60.0)
    harness.rendezvous.now, harness.possible = lost, 1
    assert harness.poll(FakeGroup(a=TRAINS)) == []
    assert (harness.pending.started, harness.rendezvous.calls[-1]) == ([1], (0, None, False))
    assert harness.poll() == ["new0"]


def test_no_worker_joins_at_the_end_of_a_run(harness: ControllerHarness) -> None:
    harness.pending.count, harness.now_s = 1, harness.now_s + 60
    assert harness.poll(FakeGroup(a=EXITED, b=TRAINS)) == ["a", "b", "new0"]
    assert harness.rendezvous.calls[-1] == (3, None, True)
    harness.pending.count = 1
    assert harness.poll(FakeGroup(a=EXITED, b=EXITED)) == ["a", "b"]
    assert harness.pending.started == []


def record(slow: dict[str, float]) -> StepRecord:
    return StepRecord(8, 0, 0.0, 0.5, 0.1, 1.0, 1.0, 0.0, 3, [4], [0], "1.1", slow=slow)


def test_a_worker_that_stays_slow_is_evicted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ControllerHarness(tmp_path, monkeypatch, scaling__evict_straggler_after_s=60.0)
    harness.controller._worker_group = FakeGroup(a=TRAINS, b=TRAINS, c=TRAINS)
    harness.rendezvous.heartbeats = [Heartbeat(n, n, "host", 1, 5, generation=1, rank=r) for r, n in enumerate("abc")]

    def poll(slow: dict[str, float], seconds: float) -> None:
        harness.rendezvous.now = RendezvousStatus(set(), set(), {}, 0, 9, record(slow), None, False, 60.0)
        harness.poll()
        harness.now_s += seconds

    poll({"1": 3.0}, 59)
    # The worker has recovered for one poll, so the time starts again.
    poll({}, 1)
    poll({"1": 3.0}, 59)
    poll({"1": 3.0}, 2)
    assert harness.events("evicted") == []
    poll({"1": 3.0}, 100)
    [(_, details)] = harness.events("evicted")
    assert (details["rank"], details["pid"], details["step"]) == (1, 5, 8)
    assert (harness.rendezvous.draining, harness.policy.excluded_nodes) == ({"b"}, ("b",))
    poll({"1": 3.0}, 100)
    assert len(harness.events("evicted")) == 1


def test_failed_starts_are_retried_with_backoff_while_other_workers_train(harness: ControllerHarness) -> None:
    start_s, harness.now_s = harness.now_s, harness.now_s
    harness.controller._worker_group, started_s = FakeGroup(a=TRAINS, b=TRAINS), list[float]()
    rounds = itertools.count(-2)
    while harness.now_s - start_s < 400:
        before = len(harness.pending.started)
        harness.poll()
        if len(harness.pending.started) > before:
            started_s.append(harness.now_s)
            harness.pending.reasons, harness.pending.failed_rounds = ["the node kills it"], max(0, next(rounds))
        harness.now_s += 1
    pauses = [later - earlier for earlier, later in itertools.pairwise(started_s)]
    assert pauses[:6] == [6, 6, 6, 11, 21, 41]
    assert set(pauses[6:]) == {81}
    assert len(harness.events("start_failed")) in (len(started_s), len(started_s) - 1)
    assert not harness.events("failed")


@pytest.mark.parametrize("is_charged", [True, False])
def test_starts_whose_workers_fail_three_times_in_a_row_end_the_run(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch, is_charged: bool
) -> None:
    """Ray Train retries a start without limit unless the controller raises another error."""
    reasons = ["the node kills it", "the cluster has no capacity"]

    def start(controller: Any, **_: Any) -> None:
        raise WorkersFailedToStartError("1 of 2 workers are ready", reasons, is_charged)

    monkeypatch.setattr(TrainController, "_start_worker_group", start)
    for _ in range(2):
        with pytest.raises(WorkersFailedToStartError):
            harness.controller._start_worker_group(num_workers=2)
    with pytest.raises(RepeatedFailureError if is_charged else WorkersFailedToStartError):
        harness.controller._start_worker_group(num_workers=2)
    assert [details["reason"] for _, details in harness.events("start_failed")] == ["the node kills it"] * 3
    charged = [details["errors"] for _, details in harness.events("failed")]
    assert charged == [{"start": "RuntimeError: the node kills it"}] * (3 if is_charged else 0)
    reasons[:] = ["the cluster has no capacity"]
    with pytest.raises(WorkersFailedToStartError):
        harness.controller._start_worker_group(num_workers=2)
    assert len(harness.events("start_failed")) == 3


def test_an_abandoned_run_ends_its_workers_and_its_pending_workers(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[Any]()

    async def iterate(self: Any) -> None:
        ended.append("iterated")
        harness.abandoned.set()

    monkeypatch.setattr(TrainController, "_run_control_loop_iteration", iterate)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    controller, harness.pending.count = harness.controller, 2
    controller._worker_group = SimpleNamespace(abort=lambda: ended.append("aborted"))
    controller._set_state = lambda state: ended.append(state.is_terminal())
    asyncio.run(controller._run_control_loop_iteration())
    assert ended == ["iterated"]
    asyncio.run(controller._run_control_loop_iteration())
    assert (ended, harness.pending.count) == (["iterated", "aborted", True], 0)


def test_the_remaining_workers_continue_in_the_state_that_ray_polls(harness: ControllerHarness) -> None:
    harness.controller._worker_group, harness.controller._polls = FakeGroup(a=TRAINS, b=FAILED), {"b": ENDED}
    assert isinstance(harness.decide(), RunningState)
    assert FailureSection().max_failures == 5, "the default budget allows the failure that `decide` charged"


def test_a_device_that_has_failed_twice_is_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ControllerHarness(tmp_path, monkeypatch, failure__max_failures=-1)
    fault = DeviceFaultError("CUDA error: an illegal memory access was encountered", "cuda NVIDIA H200, 5fd4", "node-b")
    failed = WorkerStatus(running=False, error=fault)
    group = FakeGroup(a=TRAINS, b=failed, c=failed)
    for excluded in ([], [("b", "0"), ("c", "0")]):
        group.workers = ["a", "b", "c"]
        harness.poll(group)
        assert harness.pending.excluded == excluded
    details = {"name": "node-b", "device": "cuda NVIDIA H200, 5fd4", "times": 2}
    assert harness.events("device_excluded") == [("device_excluded", details)] * 2


@pytest.mark.parametrize(("possible", "started", "slots"), [(3, [1], 1), (1, [], 0)])
def test_an_excluded_device_is_used_again_if_a_run_would_wait_for_another(
    harness: ControllerHarness, possible: int, started: list[int], slots: int
) -> None:
    """Of three devices one is excluded, so that the second worker starts on another; a run with one device uses it."""
    harness.possible, harness.pending.num_held = possible, 1
    harness.now_s += 60
    harness.poll(FakeGroup(a=TRAINS))
    assert (harness.pending.started, harness.pending.num_held) == (started, slots)
