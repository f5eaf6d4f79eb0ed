"""What parameter servers' bookkeeping of units costs, in operations of Python, and that it is even whoever comes and
goes.
"""

from __future__ import annotations

from random import Random

from ray_app.train.strategies.parameter_server.coordinator import UnitScheduler
from tests.support.operations import operations


def step(units: UnitScheduler, workers: int) -> None:
    """All take a unit, and finish it."""
    for i in range(workers):
        assert (found := units.take(f"w{i}", 1000)) is not None
        assert units.finish(*found)


def test_a_unit_costs_the_same_among_sixteen_workers_and_among_a_thousand() -> None:
    costs = []
    for workers in (16, 1024):
        units = UnitScheduler(workers, 0, 0)
        step(units, workers)
        costs.append(operations(lambda units=units, workers=workers: step(units, workers)) / workers)  # type: ignore[misc]
    assert costs[1] < 1.02 * costs[0]


def test_what_is_held_is_even_and_every_unit_is_done_once_whoever_comes_and_goes() -> None:
    for seed in range(300):
        random = Random(seed)
        logical, units, done = random.randint(1, 12), None, set()
        units = UnitScheduler(logical, 0, random.randint(0, 2))
        asked: dict[str, tuple[int, int]] = {}
        for _ in range(400):
            worker = f"w{random.randrange(4)}"
            if random.random() < 0.05:
                units.lose(worker)
                asked.pop(worker, None)
                continue
            if worker in asked:
                unit = asked.pop(worker)
                if units.finish(*unit):
                    assert unit not in done
                    done.add(unit)
            if (found := units.take(worker, 10**6)) is not None:
                assert found not in asked.values()
                asked[worker] = found
        held = [units.assigned_to(worker) for worker in units.workers]
        assert sorted(v for each in held for v in each) == sorted(set().union(*held))
        assert units.complete == min(max((s for s, v in done if v == w), default=-1) + 1 for w in range(logical))
