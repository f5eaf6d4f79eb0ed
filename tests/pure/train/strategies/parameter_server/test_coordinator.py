"""The unit scheduler of parameter servers has a constant cost per unit, finishes each once, and spreads them evenly."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200)
"""Workers that ask for a unit after they have done their last one, and whether they are lost instead."""


@given(st.integers(1, 6), st.integers(0, 3), REQUESTS)
def test_units_run_in_order_within_the_bound_and_never_on_two_workers(
    logical_workers: int, staleness: int, requests: list[tuple[str, bool]]
) -> None:
    units, end = UnitScheduler(logical_workers, 3, staleness), 9
    running: dict[str, tuple[int, int]] = {}
    done = [3] * logical_workers
    for worker, dies in requests:
        if dies:
            units.lose(worker)
            running.pop(worker, None)
            continue
        if worker in running:
            step, v = running.pop(worker)
            assert units.finish(step, v)
            assert not units.finish(step, v), "a unit counts twice"
            done[v] += 1
        unit = units.take(worker, end)
        if unit is not None:
            step, v = unit
            assert step == done[v] < min(end, min(done) + staleness + 1)
            assert v not in [other for _, other in running.values()], "two workers have the same unit"
            running[worker] = unit
    assert units.complete == min(done)


@given(st.integers(1, 6), st.integers(0, 3), REQUESTS)
def test_logical_workers_are_spread_evenly_after_each_worker_has_asked(
    logical_workers: int, staleness: int, requests: list[tuple[str, bool]]
) -> None:
    units, running = UnitScheduler(logical_workers, 3, staleness), dict[str, tuple[int, int]]()

    def ask(worker: str) -> None:
        if worker in running:
            units.finish(*running.pop(worker))
        unit = units.take(worker, 9)
        if unit is not None:
            running[worker] = unit

    for worker, dies in requests:
        if dies:
            units.lose(worker)
            running.pop(worker, None)
        else:
            ask(worker)
    ask("a")
    for worker in units.workers:
        ask(worker)
    assigned = [units.assigned_to(worker) for worker in units.workers]
    assert sorted(itertools.chain(*assigned)) == list(range(logical_workers))
    counts = [len(of_worker) for of_worker in assigned]
    assert max(counts) - min(counts) <= 1
