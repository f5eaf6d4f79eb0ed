"""Who has to leave for being slow: only who stays so, if another can come or the rest is faster, one at a time, and not
without end.
"""

from __future__ import annotations

import pytest

from ray_app.cluster.controller.scaling_policy import Eviction, StragglerEvictor, slow_workers
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Heartbeat


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def retiring(
    clock: Clock, after_s: float | None = 60.0, logical: int = 4, least: int = 1, most: int = 4
) -> StragglerEvictor:
    return StragglerEvictor(after_s, logical, least, most, clock)


def decide(
    found: StragglerEvictor,
    clock: Clock,
    slow: dict[str, float],
    workers: int = 4,
    room: int = 1,
    ready: int = 0,
    seconds: float = 61.0,
) -> Eviction | None:
    """What is decided once they have been slow for a while."""
    found.decide(slow, workers, ready, lambda worker: room)
    clock.now_s += seconds
    return found.decide(slow, workers, ready, lambda worker: room)


def test_who_stays_slow_leaves_for_another(clock: Clock) -> None:
    found = decide(retiring(clock), clock, {"a": 1.5})
    assert found == Eviction("a", 1.5, "1.5 times as slow as the others for 61 s; another takes its place")


def test_who_is_slow_for_a_while_stays(clock: Clock) -> None:
    ours = retiring(clock)
    assert decide(ours, clock, {"a": 3.0}, seconds=59) is None
    assert ours.decide({}, 4, 0, lambda worker: 1) is None  # it keeps up again
    assert decide(ours, clock, {"a": 3.0}, seconds=59) is None


def test_nobody_leaves_unless_told_so(clock: Clock) -> None:
    assert decide(retiring(clock, after_s=None), clock, {"a": 9.0}) is None


@pytest.mark.parametrize(("times", "leaves"), [(2.1, False), (2.3, True)])
def test_without_another_it_leaves_if_the_rest_is_faster(clock: Clock, times: float, leaves: bool) -> None:
    """Of four workers with a share each, three have one with two: a step takes twice as long as an undisturbed one."""
    found = decide(retiring(clock), clock, {"a": times}, room=0)
    assert (found is not None) == leaves
    assert found is None or found.reason.endswith("without it a step takes 0.87 of the time")


def test_there_stay_as_many_as_there_must(clock: Clock) -> None:
    assert decide(retiring(clock, least=4), clock, {"a": 9.0}, room=1) is None, (
        "the room may be gone when another would take it"
    )
    assert decide(retiring(clock, least=4), clock, {"a": 9.0}, room=0, ready=1) is not None
    assert decide(retiring(clock, least=4), clock, {"a": 9.0}, room=0) is None
    assert decide(retiring(clock), clock, {"a": 9.0}, workers=1, room=0) is None


def test_the_slowest_first_one_at_a_time_and_so_many_at_most(clock: Clock) -> None:
    ours = retiring(clock, most=2)
    slow = {"a": 2.0, "b": 3.0, "c": 2.5}
    first = decide(ours, clock, slow)
    assert first is not None
    assert first.worker == "b"
    second = ours.decide(slow, 4, 0, lambda worker: 1)
    assert second is not None
    assert second.worker == "c"
    assert ours.decide(slow, 4, 0, lambda worker: 1) is None
    assert ours.evicted == {"b", "c"}


def record_of(generation: str, slow: dict[str, float]) -> StepRecord:
    return StepRecord(8, 0, 0.0, 0.5, 0.1, 1.0, 1.0, 0.0, 3, [4], [0], generation, slow=slow)


def test_a_rank_is_that_of_the_workers_in_the_generation_of_the_record() -> None:
    """Rank 1 waits already, so that rank 2 is the second of the workers that step."""
    heartbeats = [Heartbeat(name, "n", "h", 1, generation=7, rank=rank) for name, rank in (("a", 0), ("c", 2))]
    assert slow_workers(record_of("1.7", {"2": 3.0, "1": 2.0}), heartbeats) == {"c": 3.0}
    assert slow_workers(record_of("1.6", {"2": 3.0}), heartbeats) == {}, "ranks of an earlier generation"
    assert slow_workers(record_of("1.17", {"2": 3.0}), heartbeats) == {}
