"""Random schedules of everything that happens to workers, around the real rendezvous: see `tests/support/rendezvous_world.py`."""

from __future__ import annotations

import random
import time

import pytest

from ray_app.cluster import rendezvous
from tests.support.rendezvous_world import BrokenPromiseError, World


def search(first: int, schedules: int, limit_s: float) -> int:
    """Plays schedules until they or the time are up; returns how many."""
    until_s = time.monotonic() + limit_s
    for seed in range(first, first + schedules):
        shape = random.Random(seed)
        World(seed, shape.randint(1, 5), shape.randint(4, 12), shape.randint(1, 6)).run()
        if time.monotonic() > until_s:
            return seed + 1 - first
    return schedules


def test_no_schedule_breaks_a_promise() -> None:
    """Ten seconds on a quiet core."""
    assert search(0, 2000, 120) == 2000


@pytest.mark.rest
@pytest.mark.parametrize("part", range(10))
def test_no_schedule_of_many_breaks_a_promise(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """20,000 each, as far as two minutes go."""
    played = search(10_000 + 20_000 * part, 20_000, 120)
    with capsys.disabled():
        print(f" {played} schedules of the rendezvous")


@pytest.mark.rest
@pytest.mark.parametrize("workers", [100, 1000])
def test_many_workers(workers: int) -> None:
    World(workers, workers, 4, 4).run()


def test_a_newcomer_that_counted_as_one_who_keeps_the_state_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that this search was made for, put back."""
    monkeypatch.setattr(rendezvous, "_has_state", lambda member: True)
    with pytest.raises(BrokenPromiseError, match=r"(?s)drain.*nobody else has it|begins with step"):
        search(0, 2000, 120)
