"""The unit scheduler of parameter servers has a constant cost per unit, and finishes each unit once."""

from random import Random

import pytest

from ray_app.train.strategies.parameter_server.coordinator import UnitScheduler
from tests.support.operations import count_operations


def run_step(units: UnitScheduler, workers: int) -> None:
    """All workers take a unit and finish it."""
    for i in range(workers):
        assert (unit := units.take(f"w{i}", 1000)) is not None
        assert units.finish(*unit)


@pytest.mark.exact_versions
def test_the_cost_of_a_unit_does_not_grow_with_the_number_of_workers() -> None:
    costs = []
    for workers in (16, 1024):
        units = UnitScheduler(workers, 0, 0)
        run_step(units, workers)
        costs.append(count_operations(lambda units=units, workers=workers: run_step(units, workers)) / workers)
    assert costs[1] < 1.02 * costs[0]


def test_units_are_assigned_and_finished_once_while_workers_come_and_go() -> None:
    for seed in range(300):
        random = Random(seed)
        logical = random.randint(1, 12)
        done = set()
        units = UnitScheduler(logical, 0, random.randint(0, 2))
        unit_of_worker: dict[str, tuple[int, int]] = {}
        for _ in range(400):
            worker = f"w{random.randrange(4)}"
            if random.random() < 0.05:
                units.lose(worker)
                unit_of_worker.pop(worker, None)
                continue
            if worker in unit_of_worker:
                unit = unit_of_worker.pop(worker)
                if units.finish(*unit):
                    assert unit not in done
                    done.add(unit)
            if (next_unit := units.take(worker, 10**6)) is not None:
                assert next_unit not in unit_of_worker.values()
                unit_of_worker[worker] = next_unit
        assignments = [units.assigned_to(worker) for worker in units.workers]
        assert sorted(v for assigned in assignments for v in assigned) == sorted(set().union(*assignments))
        assert units.complete == min(max((s for s, v in done if v == w), default=-1) + 1 for w in range(logical))
