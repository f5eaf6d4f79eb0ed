"""The decisions of the controller: every row of its table, and which row a state reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_app.cluster.controller.decisions import (
    TRANSITIONS,
    ControllerState,
    Decision,
    Drop,
    Evict,
    Finish,
    Resize,
    Restart,
    SlowWorker,
    Start,
    StopWaiting,
    Wait,
    WorkerState,
    decide,
    slow_workers,
)
from ray_app.config.config import Config
from ray_app.errors import PreemptedError
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Heartbeat
from tests.support.paths import ROOT

ERROR = PreemptedError("all are drained")
TRAINS: dict[str, Any] = {}
EXITED = {"is_running": False}
FAILED = {"is_running": False, "error": ERROR}


def state_of(workers: dict[str, dict[str, Any]] | int = 0, config: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Returns a state of 2 to 4 workers, each on a node of its own, and 4 logical workers."""
    shape: dict[str, Any] = {"min_workers": 2, "max_workers": 4, "logical_workers": 4, "resize_interval_s": 30.0}
    settings = {f"scaling__{name}": value for name, value in (shape | (config or {})).items()}
    if isinstance(workers, int):
        workers = dict.fromkeys("abcdefgh"[:workers], TRAINS)
    states = tuple(WorkerState(name, name, **of) for name, of in workers.items())
    fields = {"has_worker_group": bool(workers), "since_change_s": 60.0} | fields
    return ControllerState(Config().replace(**settings), workers=states, **fields)


def slow(worker: str, slowdown: float, is_replaceable: bool = True) -> SlowWorker:
    return SlowWorker(Heartbeat(worker, worker, "host", 1), slowdown, 61.0, is_replaceable)


def name_of(state: ControllerState) -> str:
    return next(row.name for row in TRANSITIONS if row.decide(state) is not None)


STATES: list[tuple[str, ControllerState, Decision]] = [
    ("stop", state_of(possible=4, is_stopping=True), StopWaiting()),
    ("start", state_of(possible=3), Start(3, may_grow=False)),
    ("start", state_of(possible=2), Start(2, may_grow=False)),
    ("wait", state_of(possible=1), Wait("nodes for 1 of at least 2 workers; waiting for capacity")),
    ("restart", state_of({"a": FAILED, "b": FAILED}), Restart({0: ERROR, 1: ERROR})),
    (
        "drop failed",
        state_of({"a": TRAINS, "b": FAILED}),
        Drop(frozenset("b"), "the worker failed, or exited while others failed", {1: ERROR}),
    ),
    (
        "drop drained",
        state_of({"a": EXITED, "b": TRAINS}, draining_nodes=frozenset("a")),
        Drop(frozenset("a"), "its node is leaving", preempted=1),
    ),
    (
        "drop evicted",
        state_of({"a": EXITED, "b": TRAINS}, evicted=frozenset("a")),
        Drop(frozenset("a"), "the worker was a straggler"),
    ),
    ("finish", state_of({"a": EXITED, "b": EXITED}, possible=4, ready=2), Finish()),
    (
        "evict",
        state_of(4, slow=(slow("a", 1.5),)),
        Evict(slow("a", 1.5), "1.5 times as slow as the others for 61 s; another worker replaces it"),
    ),
    ("resize", state_of(4, possible=4), Resize(4, 0, 0, "as many as configured")),
]


@pytest.mark.parametrize(("name", "state", "decision"), STATES)
def test_each_row_of_the_table_is_reached(name: str, state: ControllerState, decision: Decision) -> None:
    assert (name_of(state), decide(state)) == (name, decision)


def test_a_worker_that_was_declared_lost_is_dropped_after_a_while() -> None:
    silent = state_of({"a": TRAINS, "b": {"lost_for_s": 2.1}})
    decision = decide(silent)
    assert isinstance(decision, Drop)
    assert (name_of(silent), decision.workers, decision.reason) == ("drop silent", {"b"}, "no heartbeat for 5 s")
    [(position, error)] = decision.errors.items()
    assert (position, type(error)) == (1, ConnectionError)
    assert name_of(state_of({"a": TRAINS, "b": {"lost_for_s": 1.9}}, possible=2)) == "resize"


def test_the_tests_and_the_page_name_all_rows_of_the_table() -> None:
    names = [row.name for row in TRANSITIONS]
    assert {name for name, *_ in STATES} | {"drop silent"} == set(names)
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| the controller | when | ")[1].split("\n\n")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == names


@pytest.mark.parametrize(
    ("workers", "draining", "evicted", "stay", "preempted"),
    [
        ({"a": EXITED, "b": FAILED}, {"a", "b"}, set(), None, 0),
        ({"a": EXITED, "b": FAILED}, set(), {"a"}, None, 0),
        ({"a": EXITED, "b": FAILED, "c": TRAINS}, {"a"}, set(), ["c"], 1),
        ({"a": EXITED, "b": FAILED, "c": TRAINS}, set(), {"a"}, ["c"], 0),
        ({"a": TRAINS, "b": FAILED}, {"a"}, set(), ["a"], 0),
        # It exited because it has done all steps.
        ({"a": EXITED, "b": FAILED}, set(), set(), ["a"], 0),
    ],
)
def test_a_worker_that_has_exited_does_not_count_as_running(
    workers: dict[str, dict[str, Any]], draining: set[str], evicted: set[str], stay: list[str] | None, preempted: int
) -> None:
    """A `stay` of None means that all restart. If all workers ended without an error, the run ends at the next poll."""
    state = state_of(workers, draining_nodes=frozenset(draining), evicted=frozenset(evicted))
    decision = decide(state)
    if stay is None:
        assert decision == Restart({1: ERROR})
    else:
        assert isinstance(decision, Drop)
        assert [name for name in workers if name not in decision.workers] == stay
        assert (decision.errors, decision.preempted) == ({1: ERROR}, preempted)


def test_only_a_worker_that_exited_without_drain_or_eviction_shows_the_end_of_the_run() -> None:
    state = state_of({"a": EXITED, "b": EXITED, "c": TRAINS}, draining_nodes=frozenset("a"), evicted=frozenset("b"))
    assert not state.is_run_over
    assert replace(state, evicted=frozenset()).is_run_over


def resize_of(workers: int, possible: int, config: dict[str, Any] | None = None, **fields: Any) -> Resize:
    decision = decide(state_of(workers, config, possible=possible, **fields))
    assert isinstance(decision, Resize)
    return decision


def test_below_the_minimum_the_run_waits_and_continues_when_there_is_capacity() -> None:
    one_starts = resize_of(1, 2)
    assert (one_starts.joining, one_starts.pending, one_starts.wait_reason) == (0, 1, None)
    it_joins = resize_of(1, 2, pending=1, ready=1)
    assert (it_joins.joining, it_joins.pending, it_joins.wait_reason) == (1, 0, None)


def test_a_group_without_workers_gets_pending_workers() -> None:
    """All of its former workers were declared lost."""
    joins = resize_of(0, 2, has_worker_group=True, pending=2, ready=2)
    assert (joins.workers, joins.joining, joins.wait_reason) == (2, 2, None)
    grows = resize_of(2, 4, pending=2, ready=2)
    assert (grows.joining, grows.reason) == (2, "a worker would run 1 logical workers instead of 2")
    holds = resize_of(0, 1, has_worker_group=True)
    assert (holds.joining, holds.wait_reason) == (0, "0 of at least 2 workers; waiting for capacity")


def test_standby_workers_start_with_free_capacity_and_replace_all_lost_workers() -> None:
    standby = {"standby_workers": 1}
    assert [resize_of(4, possible, standby).pending for possible in (4, 5, 9)] == [0, 1, 1]
    assert decide(state_of(config=standby, possible=5, ready=1)) == Start(4, may_grow=False), (
        "one ready worker is below the minimum"
    )
    assert decide(state_of(config=standby, possible=5, ready=2)) == Start(2, may_grow=True)
    joins = resize_of(3, 5, standby, pending=1, ready=1)
    assert (joins.joining, joins.pending) == (1, 1), "another standby worker starts for the one that joins"


@pytest.mark.parametrize(("ready", "has_waited", "joining"), [(1, False, 0), (1, True, 1), (2, False, 2)])
def test_a_worker_that_is_ready_waits_a_while_for_the_others(ready: int, has_waited: bool, joining: int) -> None:
    decision = resize_of(2, 4, pending=2, ready=ready, has_waited=has_waited)
    assert (decision.joining, decision.pending) == (joining, 2 - joining)


def test_after_failed_starts_only_pending_workers_join() -> None:
    assert resize_of(2, 4, can_start=False).pending == 0
    assert resize_of(2, 4, can_start=False, pending=2, ready=2).joining == 2


STRAGGLERS = {"min_workers": 1, "evict_straggler_after_s": 60.0}


def evict_decision(
    *stragglers: SlowWorker, workers: int = 4, config: dict[str, Any] | None = None, **fields: Any
) -> Evict | None:
    decision = decide(state_of(workers, STRAGGLERS | (config or {}), slow=stragglers, possible=workers, **fields))
    return decision if isinstance(decision, Evict) else None


@pytest.mark.parametrize(("slowdown", "is_evicted"), [(2.1, False), (2.3, True)])
def test_without_a_replacement_a_straggler_is_evicted_if_the_others_are_faster(
    slowdown: float, is_evicted: bool
) -> None:
    """Without one of four workers, one of the remaining three runs two logical workers: a step takes twice as long."""
    decision = evict_decision(slow("a", slowdown, is_replaceable=False))
    assert (decision is not None) == is_evicted
    assert decision is None or decision.reason.endswith("without this worker, a step takes 0.87 of the time")


def test_no_straggler_is_evicted_below_the_minimum_of_workers() -> None:
    fast, four = slow("a", 9.0), {"min_workers": 4}
    assert evict_decision(fast, config=four) is None, "the capacity may be gone when a replacement would take it"
    assert evict_decision(replace(fast, is_replaceable=False), config=four, pending=1, ready=1) is not None
    assert evict_decision(replace(fast, is_replaceable=False), config=four) is None
    assert evict_decision(replace(fast, is_replaceable=False), workers=1) is None


def test_the_slowest_straggler_is_evicted_first_up_to_the_maximum() -> None:
    stragglers, two = [slow("a", 2.0), slow("b", 3.0), slow("c", 2.5)], {"max_workers": 2}
    decision = evict_decision(*stragglers, config=two)
    assert decision is not None
    assert decision.slow == stragglers[1]
    second = evict_decision(stragglers[0], stragglers[2], config=two, evicted=frozenset("b"))
    assert second is not None
    assert second.slow == stragglers[2]
    assert evict_decision(stragglers[0], config=two, evicted=frozenset("bc")) is None


def record_of(generation: str, slow: dict[str, float]) -> StepRecord:
    return StepRecord(8, 0, 0.0, 0.5, 0.1, 1.0, 1.0, 0.0, 3, [4], [0], generation, slow=slow)


def test_ranks_are_resolved_in_the_generation_of_the_record() -> None:
    """Rank 1 waits already, so rank 2 is the second of the workers that step."""
    heartbeats = [Heartbeat(name, "n", "h", 1, generation=7, rank=rank) for name, rank in (("a", 0), ("c", 2))]
    assert slow_workers(record_of("1.7", {"2": 3.0, "1": 2.0}), heartbeats) == {"c": 3.0}
    assert slow_workers(record_of("1.6", {"2": 3.0}), heartbeats) == {}, "ranks of an earlier generation are ignored"
    assert slow_workers(record_of("1.17", {"2": 3.0}), heartbeats) == {}
