"""Who is found to be slow, who is not, and where logical workers move: on made-up times of workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_app.plan.assignment import blocks_by_speed
from ray_app.reduction.base import World
from ray_app.train.step.step_stats import TimeBreakdown
from ray_app.train.stragglers import Straggler, StragglerDetector

Times = Callable[[int, int], tuple[float, ...]]
"""Of a step and a rank: seconds for a logical worker, of waiting for data, and of anything else."""


class Steps:
    """Workers that meet in every step."""

    def __init__(self, workers: int, logical_workers: int, times: Times, balances: bool = False) -> None:
        self.world, self._times = World(0, workers, logical_workers), times
        self.pace = StragglerDetector(self.world, balances)
        self.found: list[tuple[int, Straggler]] = []
        self.moves: list[tuple[int, list[int]]] = []
        self.done, self.step_s = 0, [0.0]

    def go(self, steps: int) -> Steps:
        for _ in range(steps):
            times = [(*self._times(self.done, rank), 0.0, 0.0)[:3] for rank in range(self.world.size)]
            blocks = [self.world.assigned_to(rank) for rank in range(self.world.size)]
            spent = [TimeBreakdown(*times[rank], self.step_s[-1]) for rank, block in enumerate(blocks) for _ in block]
            self.done += 1
            self.found += [(self.done, slow) for slow in self.pace.add(spent) or []]
            busy = [len(block) * unit + data + other for block, (unit, data, other) in zip(blocks, times, strict=True)]
            self.step_s.append(max(busy) + 0.002)
            if self.pace.proposed_assignment is not None:
                self.world = World(
                    0, self.world.size, self.world.logical_workers, assignment=self.pace.proposed_assignment
                )
                self.moves.append((self.done, [len(block) for block in self.pace.proposed_assignment]))
                self.pace.begin(self.world)
        return self

    @property
    def told(self) -> list[tuple[str, int, str]]:
        return [(slow.event, slow.rank, slow.cause) for _, slow in self.found]


def noisy(
    unit_s: float, slow: dict[int, float], seed: int = 0, noise: float = 0.1, data: dict[int, float] | None = None
) -> Times:
    random = np.random.default_rng(seed)

    def times(step: int, rank: int) -> tuple[float, float]:
        factor = random.lognormal(0, noise) * (1 + 3 * (random.random() < 0.01))
        return unit_s * slow.get(rank, 1.0) * factor, (data or {}).get(rank, 0.0)

    return times


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("seed", range(5))
def test_the_right_one_of_four_is_found_within_fifty_steps(rank: int, seed: int) -> None:
    steps = Steps(4, 8, noisy(0.02, {rank: 1.5}, seed)).go(50)
    assert steps.told == [("straggler_detected", rank, "compute")]
    [(at, slow)] = steps.found
    assert at <= 50
    assert 1.3 < slow.slowdown < 1.8
    assert set(steps.pace.slow) == {rank}
    assert steps.pace.imbalance is not None
    assert steps.pace.imbalance > 1.2


@pytest.mark.parametrize("workers", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_none_is_found_where_none_is_slow(workers: int, seed: int) -> None:
    assert not Steps(workers, workers, noisy(0.02, {}, seed)).go(1000).found


def test_who_waits_for_data_is_found_with_the_cause() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 0.02, 0.1 if rank == 2 and step % 5 == 0 else 0.0

    assert Steps(4, 4, times).go(100).told == [("straggler_detected", 2, "data")]


def test_who_does_something_else_is_found_with_the_cause() -> None:
    assert Steps(4, 4, lambda step, rank: (0.02, 0.0, 0.02 if rank == 1 else 0.0)).go(100).told == [
        ("straggler_detected", 1, "other")
    ]


def test_one_long_wait_for_data_is_one() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 0.02, 30.0 if rank == 1 and step == 40 else 0.0

    steps = Steps(4, 4, times).go(300)
    assert steps.told == [("stalled", 1, "data")]
    assert steps.found[0][1].lost == pytest.approx(30.0)


def test_a_stalled_step_is_told_and_only_some_of_them() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 5.0 if rank == 3 and step % 50 == 20 else 0.02, 0.0

    steps = Steps(4, 4, times).go(1000)
    assert set(steps.told) == {("stalled", 3, "compute")}
    assert len(steps.told) == 10


def test_who_keeps_up_again_is_told_once() -> None:
    def times(step: int, rank: int) -> tuple[float, float]:
        return 0.04 if rank == 1 and step < 100 else 0.02, 0.0

    steps = Steps(2, 2, times).go(300)
    assert steps.told == [("straggler_detected", 1, "compute"), ("straggler_recovered", 1, "compute")]
    assert not steps.pace.slow


def test_a_slow_worker_gets_less_to_do() -> None:
    steps = Steps(4, 16, noisy(0.02, {3: 2.0}, noise=0.02), balances=True).go(1000)
    assert steps.moves[0][0] <= 50
    assert [len(steps.world.assigned_to(rank)) for rank in range(4)] in ([5, 5, 4, 2], [5, 4, 5, 2], [4, 5, 5, 2])
    assert len(steps.moves) <= 3
    ideal = 16 * 0.02 / 3.5
    assert ideal / np.median(steps.step_s[-200:]) >= 0.85
    assert ideal / np.median(steps.step_s[:20]) < 0.6


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_nobody(seed: int) -> None:
    assert not Steps(4, 16, noisy(0.02, {}, seed), balances=True).go(2000).moves


def test_what_was_not_worth_it_is_taken_back_for_good() -> None:
    """The slow one waits for something that does not depend on how much it plays."""
    steps = Steps(2, 8, lambda step, rank: (0.02, 0.0), balances=True)

    def times(step: int, rank: int) -> tuple[float, float]:
        return (0.02, 0.0) if rank == 0 else (0.16 / len(steps.world.assigned_to(1)), 0.0)

    steps._times = times
    steps.go(1000)
    assert [shares for _, shares in steps.moves][-1] == [4, 4]
    assert len(steps.moves) == 2


def test_moves_become_rare() -> None:
    """Whoever plays more is always the slow one."""
    steps = Steps(2, 8, lambda step, rank: (0.02, 0.0), balances=True)
    steps._times = lambda step, rank: (0.02 * (1 + step % 997 / 300 if (step // 60 + rank) % 2 else 1.0), 0.0)
    steps.go(5000)
    assert len(steps.moves) <= 12


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 10))
def test_shares_are_the_quickest(seconds: list[float], more: int) -> None:
    shares = blocks_by_speed(seconds, len(seconds) + more)
    assert [v for block in shares for v in block] == list(range(len(seconds) + more))
    assert all(shares)
    ends = max(len(block) * each for block, each in zip(shares, seconds, strict=True))
    better = [int(ends * (1 - 1e-9) / each) for each in seconds]  # what each could play to be done before
    assert sum(better) < len(seconds) + more or min(better) < 1


def test_where_the_time_went() -> None:
    steps = Steps(2, 2, lambda step, rank: (0.02 + 0.02 * rank, 0.01 * (1 - rank))).go(100)
    first, second = steps.pace.time_fractions()
    assert first == pytest.approx({"compute": 20 / 42, "data": 10 / 42, "other": 0.0, "waits": 12 / 42}, abs=0.01)
    assert second["waits"] == pytest.approx(2 / 42, abs=0.01)
