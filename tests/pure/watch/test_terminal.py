"""What a person reads while a run trains, word for word, as the pages quote it."""

from __future__ import annotations

import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ray_app.checkpoint.store import Commit
from ray_app.cluster.controller.scaling_policy import ElasticPolicy
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.journal import StepRecord, put_event
from ray_app.watch import terminal as module
from ray_app.watch.terminal import RunConsole, SafeConsole
from tests.support.local_world import TinyImages, make_job, write_images

NOW_S = 1040.0


def record(step: int) -> StepRecord:
    return StepRecord(step, 0, 1.0, 0.5, 0.1, 1.0, 5.0, 0.0, 2, [3] * 4, [1] * 4, "1.1")


def commit(step: int) -> Commit:
    return Commit(step, 1, 0, step, "cadence", "", "", 4, "", {}, NOW_S - 40 + step - 4)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    data = write_images(tmp_path / "data", [[50, 1], [45]])
    return make_job(tmp_path / "run", data, logical_workers=4, batch=12, task=TinyImages(), train__epochs=2)


def shown(
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    *looks: tuple[StepRecord | None, str, bool],
    waiting: tuple[int, ...] = (),
) -> list[str]:
    """The lines that a console without a terminal shows at some looks, ten seconds from one to the next."""
    times = iter(range(10, 1000, 10))
    now = {"s": 0.0}
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW_S, monotonic=lambda: now["s"]))
    said = StringIO()
    with RunConsole(
        job, 4, SafeConsole(Console(file=said, width=300)), lambda: [commit(step) for step in waiting]
    ) as console:
        for look in looks:
            now["s"] = next(times)
            console.show(*look)
    return said.getvalue().splitlines()


def test_a_line_says_how_far_how_good_how_late_and_what_went_wrong(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_evaluation(job.paths, Evaluation(4, 0, "", {"accuracy": 0.75}, 20, 0.1, NOW_S))
    put_event(job.paths, "failed", 1, number=1, errors={}, step=5, left=1)
    put_event(job.paths, "preempted", 1, number=1, workers=1, step=6, left=1)
    [line] = shown(job, monkeypatch, (record(10), "", False), waiting=(4, 8, 12))
    assert line == (
        "epoch 2/2 step 2/8 loss 0.5000  - rows/s  2 of 4 workers  accuracy 0.7500 (step 4, 3 checkpoints, 40 s behind)"
        "  1 of 5 failures, 1 of unlimited preemptions"
    )


def test_what_is_waited_for_is_said_once_and_again_when_it_is_something_else(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, room = (
        (None, "waiting for the workers to start ...", False),
        (record(3), "1 of at least 2 workers; waiting for capacity", True),
    )
    lines = shown(job, monkeypatch, start, start, room, room, (record(3), "", False))
    assert lines[:2] == [start[1], room[1]]
    assert len(lines) == 3
    assert lines[2].startswith("epoch 1/2 step 3/8 ")


class Ready:
    """Newcomers that are all ready."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def count_ready(self, since_s: float = 0.0) -> int:
        return self.count


def decided(
    monkeypatch: pytest.MonkeyPatch, now: int, possible: int, ready: int = 0
) -> tuple[str | None, int | None, int]:
    """What `ElasticPolicy` waits for with this many workers, room for this many and at least two wanted, how many are
    to train, if that is to change, and how many are to be on their way.
    """
    waits: list[str | None] = []
    scaling = SimpleNamespace(resize_interval_s=30.0, min_workers=2, worker_limit=4, standby_workers=1)
    config = SimpleNamespace(logical_workers=4, scaling=scaling)
    control = SimpleNamespace(config=config)
    policy: Any = SimpleNamespace(
        context=control,
        pending_workers=Ready(ready),
        target_pending=0,
        is_stopping=lambda: False,
        _maybe_send_resource_request=lambda: None,
        _get_resize_decision=lambda workers: workers,
        possible_workers=lambda *_: possible,
        set_waiting_reason=lambda reason, *_: waits.append(reason),
        no_starts_until_s=0.0,
        last_change_s=0.0,
    )
    if now:
        found: Any = ElasticPolicy.make_decision_for_running_worker_group(
            policy, SimpleNamespace(num_workers=now), None
        )
    else:
        found = ElasticPolicy.make_decision_for_non_running_worker_group(policy)
    [reason] = waits
    return reason, found if isinstance(found, int) else None, policy.target_pending


def test_below_the_minimum_it_waits_and_goes_on_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, 0, 1) == ("nodes for 1 of at least 2 workers; waiting for capacity", None, 0)
    assert decided(monkeypatch, 0, 3) == (None, 3, 0)
    assert decided(monkeypatch, 1, 1) == ("1 of at least 2 workers; waiting for capacity", None, 0)
    assert decided(monkeypatch, 1, 2) == (None, None, 1), "one begins"
    assert decided(monkeypatch, 1, 2, ready=1) == (None, 2, 1), "and joins once it is ready"


def test_spares_are_begun_where_there_is_room_and_start_alone_if_all_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, 4, 4) == (None, None, 0)
    assert decided(monkeypatch, 4, 5) == (None, None, 1)
    assert decided(monkeypatch, 4, 9) == (None, None, 1)
    assert decided(monkeypatch, 0, 5, ready=1) == (None, 4, 1), "one is fewer than there must be"
    assert decided(monkeypatch, 0, 5, ready=2) == (None, 2, 3), "two begin at once, the others are kept and join"


class Late(Ready):
    """Pending workers, of which some have been ready for a while."""

    def __init__(self, count: int, since: int) -> None:
        super().__init__(count)
        self.since = since

    def count_ready(self, since_s: float = 0.0) -> int:
        return self.since if since_s else self.count


def decision_of(changed_s: float, now: int, possible: int, ready: int, ready_since: int = 0) -> tuple[Any, Any, int]:
    """The policy, its decision, and how often it asked the autoscaler for nodes."""
    requests: list[None] = []
    scaling = SimpleNamespace(resize_interval_s=30.0, min_workers=1, worker_limit=4, standby_workers=0)
    policy: Any = SimpleNamespace(
        context=SimpleNamespace(config=SimpleNamespace(logical_workers=4, scaling=scaling)),
        pending_workers=Late(ready, ready_since),
        target_pending=0,
        is_stopping=lambda: False,
        _maybe_send_resource_request=lambda: requests.append(None),
        _get_resize_decision=lambda workers: workers,
        possible_workers=lambda *_: possible,
        set_waiting_reason=lambda *_: None,
        no_starts_until_s=0.0,
        last_change_s=changed_s,
    )
    if now:
        decision: Any = ElasticPolicy.make_decision_for_running_worker_group(
            policy, SimpleNamespace(num_workers=now), None
        )
    else:
        decision = ElasticPolicy.make_decision_for_non_running_worker_group(policy)
    return policy, decision, len(requests)


def test_the_autoscaler_is_asked_for_nodes_before_and_while_workers_run() -> None:
    assert decision_of(0.0, now=0, possible=4, ready=0)[2] == 1
    assert decision_of(0.0, now=2, possible=4, ready=0)[2] == 1


def test_a_start_with_fewer_workers_than_possible_may_grow_at_once() -> None:
    began = time.monotonic()
    policy, decision, _ = decision_of(0.0, now=0, possible=4, ready=2)
    assert decision == 2
    assert policy.last_change_s <= time.monotonic() - 30.0
    policy, decision, _ = decision_of(0.0, now=0, possible=4, ready=4)
    assert decision == 4
    assert policy.last_change_s >= began


@pytest.mark.parametrize(("ready", "ready_since", "workers"), [(1, 0, None), (1, 1, 3), (2, 0, 4)])
def test_a_worker_that_is_ready_waits_a_while_for_the_others(ready: int, ready_since: int, workers: int | None) -> None:
    _, decision, _ = decision_of(0.0, now=2, possible=4, ready=ready, ready_since=ready_since)
    assert (decision if isinstance(decision, int) else None) == workers
