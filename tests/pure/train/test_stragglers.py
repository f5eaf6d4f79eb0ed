"""Straggler detection and load balancing on simulated times of workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_app.plan.assignment import blocks_by_speed
from ray_app.reduction.world import World
from ray_app.train.step.step_stats import TimeBreakdown
from ray_app.train.stragglers import Straggler, StragglerDetector

Times = Callable[[int, int], tuple[float, ...]]
"""Returns for a step and a rank the seconds of a logical worker, of waiting for data, and of anything else."""


class SimulatedSteps:
    """Workers that synchronize in every step."""

    def __init__(self, workers: int, logical_workers: int, times: Times, balances: bool = False) -> None:
        self.world, self.times = World(0, workers, logical_workers), times
        self.detector = StragglerDetector(self.world, balances)
        self.reports: list[tuple[int, Straggler]] = []
        self.moves: list[tuple[int, list[int]]] = []
        self.done, self.step_s = 0, [0.0]

    def run(self, steps: int) -> SimulatedSteps:
        for _ in range(steps):
            times = [(*self.times(self.done, rank), 0.0, 0.0)[:3] for rank in range(self.world.size)]
            blocks = [self.world.assigned_to(rank) for rank in range(self.world.size)]
            breakdowns = [
                TimeBreakdown(*times[rank], self.step_s[-1])  # type: ignore[call-arg]
                for rank, block in enumerate(blocks)
                for _ in block
            ]
            self.done += 1
            self.reports += [(self.done, slow) for slow in self.detector.add(breakdowns) or []]
            busy = [len(block) * unit + data + other for block, (unit, data, other) in zip(blocks, times, strict=True)]
            self.step_s.append(max(busy) + 0.002)
            if self.detector.proposed_assignment is not None:
                self.world = World(
                    0, self.world.size, self.world.logical_workers, assignment=self.detector.proposed_assignment
                )
                self.moves.append((self.done, [len(block) for block in self.detector.proposed_assignment]))
                self.detector.begin(self.world)
        return self

    @property
    def events(self) -> list[tuple[str, int, str]]:
        return [(slow.event, slow.rank, slow.cause) for _, slow in self.reports]


def noisy_times(
    unit_s: float, slow: dict[int, float], seed: int = 0, noise: float = 0.1, data: dict[int, float] | None = None
) -> Times:
    random = np.random.default_rng(seed)

    def times(step: int, rank: int) -> tuple[float, float]:
        factor = random.lognormal(0, noise) * (1 + 3 * (random.random() < 0.01))
        return unit_s * slow.get(rank, 1.0) * factor, (data or {}).get(rank, 0.0)

    return times


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("seed", range(5))
def test_the_straggler_of_four_is_detected_within_fifty_steps(rank: int, seed: int) -> None:
    steps = SimulatedSteps(4, 8, noisy_times(0.02, {rank: 1.5}, seed)).run(50)
    assert steps.events == [("straggler_detected", rank, "compute")]
    [(step, slow)] = steps.reports
    assert step <= 50
    assert 1.3 < slow.slowdown < 1.8
    assert set(steps.detector.slow) == {rank}
    assert steps.detector.imbalance is not None
    assert steps.detector.imbalance > 1.2


@pytest.mark.parametrize("workers", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_no_straggler_is_detected_among_equal_workers(workers: int, seed: int) -> None:
    assert not SimulatedSteps(workers, workers, noisy_times(0.02, {}, seed)).run(1000).reports


def test_a_worker_that_waits_for_data_is_detected_with_that_cause() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 0.02, 0.1 if rank == 2 and step % 5 == 0 else 0.0

    assert SimulatedSteps(4, 4, times).run(100).events == [("straggler_detected", 2, "data")]


def test_a_worker_that_spends_other_time_is_detected_with_that_cause() -> None:
    assert SimulatedSteps(4, 4, lambda step, rank: (0.02, 0.0, 0.02 if rank == 1 else 0.0)).run(100).events == [
        ("straggler_detected", 1, "other")
    ]


def test_a_straggler_with_short_steps_is_observed_for_as_long() -> None:
    """After three steps come three windows, each of at least 0.2 s, that is, of 17 steps."""
    steps = SimulatedSteps(2, 2, lambda step, rank: (0.01 if rank else 0.005, 0.0)).run(100)
    assert [step for step, _ in steps.reports] == [3 + 3 * 17]


def test_one_long_wait_for_data_is_reported_once_as_stalled() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 0.02, 30.0 if rank == 1 and step == 40 else 0.0

    steps = SimulatedSteps(4, 4, times).run(300)
    assert steps.events == [("stalled", 1, "data")]
    assert steps.reports[0][1].lost == pytest.approx(30.0)


def test_a_step_in_which_all_are_slow_hides_no_stalled_one() -> None:
    """All but one may wait for the same disk for longer than a single rank stalls later."""

    def times(step: int, rank: int) -> tuple[float, float]:
        waits_s = {5: 9.0 if rank else 0.0, 6: 5.0 if rank == 1 else 0.0}
        return 0.01, waits_s.get(step, 0.0)

    assert SimulatedSteps(3, 3, times).run(60).events == [("stalled", 1, "data")]


def test_stalled_steps_are_reported_up_to_a_limit() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 5.0 if rank == 3 and step % 50 == 20 else 0.02, 0.0

    steps = SimulatedSteps(4, 4, times).run(1000)
    assert set(steps.events) == {("stalled", 3, "compute")}
    assert len(steps.events) == 10


def test_a_recovered_straggler_is_reported_once() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 0.04 if rank == 1 and step < 100 else 0.02, 0.0

    steps = SimulatedSteps(2, 2, times).run(300)
    assert steps.events == [("straggler_detected", 1, "compute"), ("straggler_recovered", 1, "compute")]
    assert not steps.detector.slow


def test_a_straggler_is_assigned_fewer_logical_workers() -> None:
    steps = SimulatedSteps(4, 16, noisy_times(0.02, {3: 2.0}, noise=0.02), balances=True).run(1000)
    assert steps.moves[0][0] <= 50
    assert [len(steps.world.assigned_to(rank)) for rank in range(4)] in ([5, 5, 4, 2], [5, 4, 5, 2], [4, 5, 5, 2])
    assert len(steps.moves) <= 3
    ideal = 16 * 0.02 / 3.5
    assert ideal / np.median(steps.step_s[-200:]) >= 0.85
    assert ideal / np.median(steps.step_s[:20]) < 0.6


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_change_the_assignment(seed: int) -> None:
    assert not SimulatedSteps(4, 16, noisy_times(0.02, {}, seed), balances=True).run(2000).moves


def test_a_move_without_gain_is_reverted_for_good() -> None:
    """The straggler waits for something that does not depend on its number of logical workers."""
    steps = SimulatedSteps(2, 8, lambda step, rank: (0.02, 0.0), balances=True)

    def times(step: int, rank: int) -> tuple[float, float]:
        return (0.02, 0.0) if rank == 0 else (0.16 / len(steps.world.assigned_to(1)), 0.0)

    steps.times = times
    steps.run(1000)
    assert [shares for _, shares in steps.moves][-1] == [4, 4]
    assert len(steps.moves) == 2


def test_moves_become_rare_where_they_do_not_help() -> None:
    """The worker with more logical workers is always the straggler."""
    steps = SimulatedSteps(2, 8, lambda step, rank: (0.02, 0.0), balances=True)
    steps.times = lambda step, rank: (0.02 * (1 + step % 997 / 300 if (step // 60 + rank) % 2 else 1.0), 0.0)
    steps.run(5000)
    assert len(steps.moves) <= 12


def test_the_pause_before_a_move_doubles_with_each_move() -> None:
    """Each move helps, but makes the other worker the straggler; the first window after one ends after 13 steps."""
    steps = SimulatedSteps(2, 8, lambda step, rank: (0.0, 0.0), balances=True)
    steps.times = lambda step, rank: (0.5 ** len(steps.moves) * (0.08 if rank == len(steps.moves) % 2 else 0.02), 0.0)
    steps.run(175)
    assert np.diff([0, *(step for step, _ in steps.moves)]).tolist() == [23, 23, 43, 83]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 10))
def test_no_other_blocks_are_faster_than_blocks_by_speed(seconds: list[float], extra: int) -> None:
    blocks = blocks_by_speed(seconds, len(seconds) + extra)
    assert [v for block in blocks for v in block] == list(range(len(seconds) + extra))
    assert all(blocks)
    slowest_s = max(len(block) * unit_s for block, unit_s in zip(blocks, seconds, strict=True))
    # The counts are how many logical workers each rank could run in less than the time of the slowest one.
    faster_counts = [int(slowest_s * (1 - 1e-9) / unit_s) for unit_s in seconds]
    assert sum(faster_counts) < len(seconds) + extra or min(faster_counts) < 1


def test_time_fractions_attribute_the_step_time_to_causes() -> None:
    steps = SimulatedSteps(2, 2, lambda step, rank: (0.02 + 0.02 * rank, 0.01 * (1 - rank))).run(100)
    first, second = steps.detector.time_fractions()
    assert first == pytest.approx({"compute": 20 / 42, "data": 10 / 42, "other": 0.0, "waits": 12 / 42}, abs=0.01)
    assert second["waits"] == pytest.approx(2 / 42, abs=0.01)
