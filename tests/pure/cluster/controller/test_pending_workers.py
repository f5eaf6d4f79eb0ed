"""Pending workers: the query for the slot of each, the wait until they are ready, and workers that die at the start."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from ray_app.cluster.controller import pending_workers as module
from ray_app.cluster.controller.pending_workers import NO_CAPACITY, PendingWorkers, Slot
from ray_app.cluster.controller.worker_group import WorkersFailedToStartError
from tests.support.controller import SLOT, create_workers, initialize_contexts, make_group, start_group


class WorkerDiedError(ray.exceptions.RayError):
    """A pending worker died."""


class Method:
    """A method of an actor; it records its calls and returns one reference."""

    def __init__(self, answer: str) -> None:
        self.answer, self.calls = answer, list[tuple[Any, ...]]()

    def remote(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return self.answer


class Node:
    """A node on which new workers are as `now` says: `dead`, `ready`, or `slow` (they answer once it `is_fast`)."""

    def __init__(self) -> None:
        self.now = "dead"
        self.prepared = list[bool]()
        self.number, self.waited_s = 0, 0.0
        self.is_fast, self.reserved = False, dict[str, Any]()

    def options(self, **unused: Any) -> Node:
        return self

    def remote(self) -> Any:
        self.number += 1
        answer = f"{self.now} {self.number}"
        return SimpleNamespace(execute=SimpleNamespace(remote=self.prepare(answer)), get_metadata=Method(answer))

    def prepare(self, answer: str) -> Any:
        def called(function: Any, env: dict[str, str], prepare: list[Any]) -> str:
            self.prepared.append(prepare[0] is not None)
            return answer

        return called


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    """Replaces Ray by a node on which pending workers start."""
    fake_node = Node()

    def get(reference: str) -> Any:
        if reference.startswith("dead"):
            raise WorkerDiedError("the node kills who comes")
        return SimpleNamespace(node_id="n", gpu_ids=reference.split()[1:])

    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        fake_node.waited_s += timeout
        return [ref for ref in references if fake_node.is_fast or not ref.startswith("slow")], []

    fake_ray = {
        "get": get,
        "wait": wait,
        "kill": lambda actor: None,
        "exceptions": ray.exceptions,
        "remote": lambda **reserved: (fake_node.reserved.update(reserved), lambda worker_class: fake_node)[1],
    }
    monkeypatch.setattr(module, "ray", SimpleNamespace(**fake_ray))
    for name in ("placement_group", "remove_placement_group", "PlacementGroupSchedulingStrategy"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(module, "placement_group_table", lambda group: {"state": "CREATED"})
    return fake_node


def test_each_slot_is_queried_once_and_workers_without_a_slot_are_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, names = Counter[str](), iter(["a", "no slot", "b"])

    def table(group: str) -> dict[str, Any]:
        queries[group] += 1
        return {"state": "PENDING" if group == "no slot" else "CREATED"}

    monkeypatch.setattr(module, "placement_group", lambda *_, **__: next(names))
    monkeypatch.setattr(module, "placement_group_table", table)
    monkeypatch.setattr(module, "_PLACEMENT_TIMEOUT_S", -60.0)
    pending_workers, node.now = PendingWorkers(None, 1, bool), "slow"
    pending_workers.start(3, SLOT)
    assert pending_workers.poll() == [NO_CAPACITY]
    assert [pending_workers.poll() for _ in range(9)] == [[]] * 9
    assert len(pending_workers) == 2
    assert queries == {"a": 1, "no slot": 1, "b": 1}


def test_a_worker_reserves_what_its_slot_has(node: Node) -> None:
    PendingWorkers(None, 1, bool).start(1, Slot({"GPU": 0.5, "TPU": 1.0}, {}))
    assert node.reserved == {"num_cpus": 0, "num_gpus": 0.5, "resources": {"TPU": 1.0}}


def test_a_ready_worker_does_not_hide_that_others_die_during_preparation(node: Node) -> None:
    """The healthy worker answers each poll; the workers of the other node still die, and finally start without
    preparation.
    """
    pending_workers = PendingWorkers("prepare", 2, bool)
    node.now = "ready"
    pending_workers.start(1, SLOT)
    pending_workers.wait_until_ready(1)
    node.now, node.prepared = "dead", []
    for _ in range(5):
        pending_workers.start(1, SLOT)
        assert pending_workers.wait_until_ready(2) == ["the node kills who comes"]
    assert node.prepared == [True, True, True, False, False]
    assert pending_workers.failed_rounds == 2
    node.now = "ready"
    pending_workers.start(1, SLOT)
    pending_workers.wait_until_ready(2)
    assert (pending_workers.count_ready(), pending_workers.failed_rounds) == (2, 0)


def test_a_start_whose_workers_keep_dying_is_charged_after_three_rounds(node: Node) -> None:
    """The preparation may have caused the first deaths; the next workers skip it."""
    pending_workers = PendingWorkers("prepare", 2, bool)
    group, charged = make_group(pending_workers), list[bool]()
    for _ in range(6):
        pending_workers.start(1, SLOT)
        with pytest.raises(WorkersFailedToStartError, match="0 of 2 workers are ready") as caught:
            create_workers(group, 2)
        assert caught.value.reasons == ["the node kills who comes"]
        charged.append(caught.value.is_charged)
    assert charged == [False, False, False, True, True, True]


def test_a_node_without_capacity_is_not_charged_as_a_failure(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "placement_group_table", lambda group: {"state": "PENDING"})
    monkeypatch.setattr(module, "_PLACEMENT_TIMEOUT_S", -60.0)
    node.now, pending_workers = "slow", PendingWorkers("prepare", 2, bool)
    group = make_group(pending_workers)
    for _ in range(9):
        pending_workers.start(2, SLOT)
        with pytest.raises(WorkersFailedToStartError) as caught:
            create_workers(group, 2)
        assert (caught.value.reasons, caught.value.is_charged) == ([NO_CAPACITY] * 2, False)


@pytest.mark.parametrize(
    ("min_workers", "elapsed_s", "waited_s"), [(2, 1.0, 10.0), (2, 30.0, 30.0), (1, 1.0, 10.0), (3, 1.0, 600.0)]
)
def test_a_worker_that_is_not_ready_delays_a_start_for_a_limited_time(
    node: Node, monkeypatch: pytest.MonkeyPatch, min_workers: int, elapsed_s: float, waited_s: float
) -> None:
    """Of three workers two are ready and the third never is: the run starts with two if that is enough."""
    now = {"s": 1000.0}
    poll = PendingWorkers.poll

    def poll_a_second_later(self: PendingWorkers) -> list[str]:
        now["s"] += 1
        return poll(self)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now["s"]))
    monkeypatch.setattr(PendingWorkers, "poll", poll_a_second_later)
    pending_workers = PendingWorkers("prepare", min_workers, bool)
    node.now, now["s"] = "ready", 1001 - elapsed_s
    pending_workers.start(2, SLOT)
    node.now, now["s"] = "slow", 1000.0
    pending_workers.start(1, SLOT)
    with pytest.raises(WorkersFailedToStartError, match="2 of 3 workers are ready") as caught:
        create_workers(make_group(pending_workers), 3)
    assert now["s"] - 1001 == waited_s
    assert (pending_workers.count_ready(), len(pending_workers)) == (2, 3 if waited_s < 600 else 2)
    assert not caught.value.is_charged


def test_waiting_for_pending_workers_ends_at_a_stop(node: Node) -> None:
    stop_checks = itertools.count()
    pending_workers = PendingWorkers("prepare", 2, lambda: next(stop_checks) > 3)
    node.now = "slow"
    pending_workers.start(2, SLOT)
    assert pending_workers.wait_until_ready(2) == []
    assert next(stop_checks) == 5
    assert node.waited_s == 4 * 0.5, "it waits between two polls"


def test_the_worker_that_has_been_ready_for_the_longest_time_is_taken_first(node: Node) -> None:
    pending_workers = PendingWorkers(None, 1, bool)
    for now in ("slow", "ready"):
        node.now = now
        pending_workers.start(1, SLOT)
    pending_workers.poll()
    node.is_fast = True
    pending_workers.poll()
    assert [worker.metadata.gpu_ids for worker in pending_workers.take_ready(2)] == [["2"], ["1"]]


class ActorDiedError(ray.exceptions.RayActorError):
    """A worker died."""

    def __str__(self) -> str:
        return "the node is gone"


@pytest.mark.parametrize("raised", [ActorDiedError(), ray.exceptions.RayTaskError("run", "wrong", ValueError("wrong"))])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_worker_lost_while_the_group_starts_is_charged_and_the_start_is_retried(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, has_begun: bool
) -> None:
    """Ray launches the training outside the block that detects lost workers; before that it names no cause."""
    group, ended = make_group(PendingWorkers("prepare", 2, bool)), list[Any]()

    def start(self: Any, builder: Any) -> None:
        if has_begun:
            vars(self)["_worker_group_state"] = SimpleNamespace(shutdown=lambda: ended.append(self))
            raise raised
        raise WorkerGroupStartupFailedError("At least one of the worker actors failed to initialize.") from raised

    is_lost = isinstance(raised, ActorDiedError)
    monkeypatch.setattr(WorkerGroup, "_start_impl", start)
    with pytest.raises(WorkerGroupStartupFailedError if is_lost or not has_begun else type(raised)) as caught:
        start_group(group)
    assert (ended, group.has_started()) == ([group] if has_begun else [], False)
    assert (type(caught.value) is WorkersFailedToStartError) == is_lost
    if is_lost:
        assert (caught.value.reasons, caught.value.is_charged) == (["the node is gone"], True)


def test_a_worker_that_does_not_answer_at_the_start_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out of Ray would end the run without naming the worker that did not answer."""
    group, actor_ids = make_group(PendingWorkers("prepare", 2, bool)), [ray.ActorID.from_random() for _ in range(2)]
    actors = [
        SimpleNamespace(_actor_id=actor_id, init_train_context=SimpleNamespace(remote=lambda _id=actor_id, **_: _id))
        for actor_id in actor_ids
    ]
    workers = [SimpleNamespace(actor=actor, distributed_context=None) for actor in actors]
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    with pytest.raises(
        ray.exceptions.RayActorError, match=f"{actor_ids[1].hex()} is unavailable: .* has not answered for 120 s"
    ):
        initialize_contexts(group, workers)


def test_the_unused_sync_actor_is_killed_before_the_group_waits_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports would take CPU time from the workers."""
    group = make_group(PendingWorkers(None, 1, bool))
    builder = SimpleNamespace(sync_actor=None)
    calls = list[Any]()

    def start(self: Any, builder: Any) -> None:
        builder.sync_actor = "made"
        self._create_workers(0)

    monkeypatch.setattr(WorkerGroup, "_start_impl", start)
    monkeypatch.setattr(ray, "kill", calls.append)
    vars(group).update(_adopt_workers=calls.append)
    group._start_impl(builder)
    assert calls == ["made", []]


def test_a_pending_worker_disables_garbage_collection_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    gc_states = list[bool]()
    monkeypatch.setattr(ray, "get", lambda ref: lambda: gc_states.append(gc.isenabled()))
    module._prepare({}, ["a reference"])
    assert (gc_states, gc.isenabled()) == ([False], True)


def test_the_slot_of_an_excluded_device_stays_reserved_until_its_node_is_lost(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending_workers, node_of = PendingWorkers(None, 1, bool), {"a": "n", "b": "n"}
    removed = list[str]()
    monkeypatch.setattr(
        module, "placement_group", lambda *_, **__: "ab"[len(pending_workers) + pending_workers.num_held]
    )
    monkeypatch.setattr(module, "remove_placement_group", removed.append)
    monkeypatch.setattr(
        module, "placement_group_table", lambda group: {"state": "CREATED", "bundles_to_node_id": {0: node_of[group]}}
    )
    node.now = "ready"
    # The number of the reference of a fake worker is its GPU.
    pending_workers.exclude(("n", "1"))
    pending_workers.start(1, SLOT)
    assert pending_workers.poll() == []
    pending_workers.start(1, SLOT)
    assert (pending_workers.poll(), len(pending_workers), pending_workers.num_held) == ([], 1, 1)
    assert removed == []
    node_of["a"] = "another node, to which Ray moves the slot"
    pending_workers.poll()
    assert (removed, pending_workers.num_held) == (["a"], 0)
    pending_workers.include_all_devices()
    node.number = 0
    pending_workers.start(1, SLOT)
    pending_workers.poll()
    assert pending_workers.num_held == 0
