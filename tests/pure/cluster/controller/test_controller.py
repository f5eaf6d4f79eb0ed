"""How the controller carries out its decisions, with fakes of Ray and of the rendezvous."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import RestartingState, RunningState, SchedulingState
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus

from ray_app.cluster.controller.decisions import StoppedWaitingError
from ray_app.cluster.controller.worker_group import WorkersFailedToStartError
from ray_app.config.sections import FailureSection
from ray_app.errors import BudgetSpentError, DeviceFaultError, RepeatedFailureError
from ray_app.runlog.journal import StepRecord, read_events
from ray_app.train.membership import Heartbeat, RendezvousStatus
from tests.support.controller import EXITED, FAILED, TRAINS, ControllerHarness, FakeGroup


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
    state = harness.decide_after(FakeGroup(a=FAILED, b=FAILED), "a", "b")
    assert isinstance(state, SchedulingState)
    decision = state.scaling_decision
    assert (decision.num_workers, decision.resources_per_worker) == (3, {"CPU": 1.0})
    assert harness.group is None
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
    harness.group = FakeGroup(a=TRAINS, b=TRAINS, c=TRAINS)
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
    harness.group, started_s = FakeGroup(a=TRAINS, b=TRAINS), list[float]()
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
            harness.start()
    with pytest.raises(RepeatedFailureError if is_charged else WorkersFailedToStartError):
        harness.start()
    assert [details["reason"] for _, details in harness.events("start_failed")] == ["the node kills it"] * 3
    charged = [details["errors"] for _, details in harness.events("failed")]
    assert charged == [{"start": "RuntimeError: the node kills it"}] * (3 if is_charged else 0)
    reasons[:] = ["the cluster has no capacity"]
    with pytest.raises(WorkersFailedToStartError):
        harness.start()
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
    monkeypatch.setattr(TrainController, "_set_state", lambda _, state: ended.append(state.is_terminal()))
    harness.pending.count, harness.group = 2, SimpleNamespace(abort=lambda: ended.append("aborted"))
    harness.iterate()
    assert ended == ["iterated"]
    harness.iterate()
    assert (ended, harness.pending.count) == (["iterated", "aborted", True], 0)


def test_the_remaining_workers_continue_in_the_state_that_ray_polls(harness: ControllerHarness) -> None:
    assert isinstance(harness.decide_after(FakeGroup(a=TRAINS, b=FAILED), "b"), RunningState)
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
