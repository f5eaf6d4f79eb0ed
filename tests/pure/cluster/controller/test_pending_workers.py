"""Newcomers that take long: each is asked once whether it has its slot, however often one looks, and given up if it has
none.

And those that die, again and again.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from ray_app.cluster.controller import pending_workers as module
from ray_app.cluster.controller.pending_workers import NO_CAPACITY, PendingWorker, PendingWorkers, Slot
from ray_app.cluster.controller.worker_group import ElasticGroup, WorkersFailedToStartError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Ray was asked about which slot; none that begins with `no` is there, and nobody answers."""
    found: Counter[str] = Counter()

    def table(group: str) -> dict[str, Any]:
        found[group] += 1
        return {"state": "PENDING" if group.startswith("no") else "CREATED"}

    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda refs, **_: ([], refs), kill=lambda actor: None))
    monkeypatch.setattr(module, "placement_group_table", table)
    monkeypatch.setattr(module, "remove_placement_group", lambda group: None)
    return found


def test_each_is_asked_for_its_slot_once_and_those_without_are_given_up(asked: Counter[str]) -> None:
    ours, now = PendingWorkers(None, 1, bool), time.monotonic()
    ours._pending = [PendingWorker(None, group, None, group, now - 1, now + 60) for group in ("a", "no slot", "b")]  # type: ignore[arg-type]
    assert ours.poll() == [NO_CAPACITY]
    assert [ours.poll() for _ in range(9)] == [[]] * 9
    assert len(ours) == 2
    assert asked == {"a": 1, "no slot": 1, "b": 1}


class DiedError(ray.exceptions.RayError):
    """A newcomer is no more."""


class Method:
    """A method of an actor: what it is called with, and what its references are."""

    def __init__(self, answer: str) -> None:
        self.answer, self.calls = answer, list[tuple[Any, ...]]()

    def remote(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return self.answer


class Node:
    """A node that makes of newcomers what `now` says: `dead`, `ready`, or `slow`, which do not answer."""

    def __init__(self) -> None:
        self.now, self.prepared, self.number = "dead", list[bool](), 0

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
    """Where newcomers begin."""
    found = Node()

    def get(reference: str) -> Any:
        if reference.startswith("dead"):
            raise DiedError("the node kills who comes")
        return SimpleNamespace(node_id="n")

    def wait(asked: list[str], **_: Any) -> tuple[list[str], list[str]]:
        return [ref for ref in asked if not ref.startswith("slow")], []

    said = {
        "get": get,
        "wait": wait,
        "kill": lambda actor: None,
        "exceptions": ray.exceptions,
        "remote": lambda **_: lambda made: found,
    }
    monkeypatch.setattr(module, "ray", SimpleNamespace(**said))
    for name in ("placement_group", "remove_placement_group", "PlacementGroupSchedulingStrategy"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(module, "placement_group_table", lambda group: {"state": "CREATED"})
    return found


SLOT = Slot(1.0, 0.0, {})


def test_who_is_ready_does_not_hide_that_others_die_while_they_prepare_themselves(node: Node) -> None:
    """A healthy newcomer answers at every look; those of the other node die nevertheless, and at last begin without
    preparation.
    """
    ours = PendingWorkers("prepare", 2, bool)
    node.now = "ready"
    ours.start(1, SLOT)
    ours.wait_until_ready(1)
    node.now, node.prepared = "dead", []
    for _ in range(5):
        ours.start(1, SLOT)
        assert ours.wait_until_ready(2) == ["the node kills who comes"]
    assert node.prepared == [True, True, True, False, False]
    assert ours.failed_rounds == 2
    node.now = "ready"
    ours.start(1, SLOT)
    ours.wait_until_ready(2)
    assert (ours.count_ready(), ours.failed_rounds) == (2, 0)


def group_of(newcomers: PendingWorkers) -> Any:
    """A worker group that begins."""
    group = ElasticGroup.__new__(ElasticGroup)
    context = SimpleNamespace(num_workers=2, resources_per_worker={"CPU": 1.0})
    vars(group).update(_pending_workers=newcomers, _slot=SLOT, _callbacks=[], _worker_group_state=None)
    vars(group)["_worker_group_context"] = context
    return group


def test_a_start_at_which_workers_die_again_and_again_counts_as_a_failure_at_last(node: Node) -> None:
    """The first deaths may be those of the preparation, which the next workers skip."""
    ours = PendingWorkers("prepare", 2, bool)
    group, charged = group_of(ours), list[bool]()
    for _ in range(6):
        ours.start(1, SLOT)
        with pytest.raises(WorkersFailedToStartError, match="0 of 2 workers are ready") as caught:
            group._create_workers(2)
        assert caught.value.reasons == ["the node kills who comes"]
        charged.append(caught.value.is_charged)
    assert charged == [False, False, False, True, True, True]


def test_a_node_without_room_is_no_failure(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "placement_group_table", lambda group: {"state": "PENDING"})
    monkeypatch.setattr(module, "_PLACEMENT_TIMEOUT_S", -60.0)
    node.now, ours = "slow", PendingWorkers("prepare", 2, bool)
    group = group_of(ours)
    for _ in range(9):
        ours.start(2, SLOT)
        with pytest.raises(WorkersFailedToStartError) as caught:
            group._create_workers(2)
        assert (caught.value.reasons, caught.value.is_charged) == ([NO_CAPACITY] * 2, False)


@pytest.mark.parametrize(
    ("least", "took_s", "waited_s"), [(2, 1.0, 10.0), (2, 30.0, 30.0), (1, 1.0, 10.0), (3, 1.0, 600.0)]
)
def test_who_is_not_ready_holds_a_start_up_for_a_while_only(
    node: Node, monkeypatch: pytest.MonkeyPatch, least: int, took_s: float, waited_s: float
) -> None:
    """Of three two are ready, and the third prepares itself for ever: the run starts with two if that is enough."""
    now = {"s": 1000.0}
    look = PendingWorkers.poll

    def later(self: PendingWorkers) -> list[str]:
        now["s"] += 1
        return look(self)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now["s"]))
    monkeypatch.setattr(PendingWorkers, "poll", later)
    ours = PendingWorkers("prepare", least, bool)
    node.now = "ready"
    ours.start(2, SLOT)
    for newcomer in ours._pending:
        newcomer.started_s = now["s"] + 1 - took_s
    node.now = "slow"
    ours.start(1, SLOT)
    with pytest.raises(WorkersFailedToStartError, match="2 of 3 workers are ready") as caught:
        group_of(ours)._create_workers(3)
    assert now["s"] - 1001 == waited_s
    assert (ours.count_ready(), len(ours)) == (2, 3 if waited_s < 600 else 2)
    assert not caught.value.is_charged


def test_who_waits_for_newcomers_heeds_a_stop(node: Node) -> None:
    asked = itertools.count()
    ours = PendingWorkers("prepare", 2, lambda: next(asked) > 3)
    node.now = "slow"
    ours.start(2, SLOT)
    assert ours.wait_until_ready(2) == []
    assert next(asked) == 5


class Died(ray.exceptions.RayActorError):
    """A worker is no more."""

    def __str__(self) -> str:
        return "the node is gone"


@pytest.mark.parametrize("raised", [Died(), ray.exceptions.RayTaskError("run", "wrong", ValueError("wrong"))])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_worker_lost_while_the_group_starts_is_a_failure_and_it_starts_again(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, has_begun: bool
) -> None:
    """Ray launches the training outside of where it looks for lost workers; before that it names no cause."""
    group, ended = group_of(PendingWorkers("prepare", 2, bool)), list[Any]()

    def start(self: Any, builder: Any) -> None:
        if has_begun:
            vars(self)["_worker_group_state"] = SimpleNamespace(shutdown=lambda: ended.append(self))
            raise raised
        raise WorkerGroupStartupFailedError("At least one of the worker actors failed to initialize.") from raised

    is_lost = isinstance(raised, Died)
    monkeypatch.setattr(WorkerGroup, "_start_impl", start)
    vars(group).update(_replica_groups=None, _worker_rank_to_replica_group_rank=None, _world_rank_to_ongoing_poll={})
    with pytest.raises(WorkerGroupStartupFailedError if is_lost or not has_begun else type(raised)) as caught:
        group._start()
    assert (ended, group.has_started()) == ([group] if has_begun else [], False)
    assert (type(caught.value) is WorkersFailedToStartError) == is_lost
    if is_lost:
        assert (caught.value.reasons, caught.value.is_charged) == (["the node is gone"], True)


def test_a_worker_that_does_not_answer_at_the_start_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out of Ray's would end the run, and does not say who was asked."""
    group, ids = group_of(PendingWorkers("prepare", 2, bool)), [ray.ActorID.from_random() for _ in range(2)]
    actors = [
        SimpleNamespace(_actor_id=each, init_train_context=SimpleNamespace(remote=lambda _id=each, **_: _id))
        for each in ids
    ]
    workers = [SimpleNamespace(actor=actor, distributed_context=None) for actor in actors]
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    vars(group).update(_train_run_context=None, _storage_context=None, _worker_callbacks_to_propagate=[])
    with pytest.raises(
        ray.exceptions.RayActorError, match=f"{ids[1].hex()} is unavailable: .* has not answered for 120 s"
    ):
        group._init_train_context_on_workers(workers, None, {})


def test_the_unused_collectives_actor_is_ended_before_the_workers_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a worker's time to import what it needs."""
    group, builder, done = (
        group_of(PendingWorkers(None, 1, bool)),
        SimpleNamespace(sync_actor=None),
        list[Any](),
    )

    def start(self: Any, builder: Any) -> None:
        builder.sync_actor = "made"
        self._create_workers(0)

    monkeypatch.setattr(WorkerGroup, "_start_impl", start)
    monkeypatch.setattr(ray, "kill", done.append)
    vars(group).update(_adopt_workers=done.append)
    group._start_impl(builder)
    assert done == ["made", []]


def test_a_newcomer_looks_for_no_garbage_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[bool]()
    monkeypatch.setattr(ray, "get", lambda ref: lambda: looks.append(gc.isenabled()))
    module._prepare({}, ["a reference"])
    assert (looks, gc.isenabled()) == ([False], True)
