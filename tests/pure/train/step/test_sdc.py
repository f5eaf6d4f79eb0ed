"""Which shares are computed twice, by whom, and who is found guilty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_app.plan.assignment import logical_workers_of
from ray_app.reduction.base import checksum
from ray_app.train.step.sdc import RecomputedShare, corrupt_rank, draw_recomputed_shares, tie_breaking_ranks


def blocks(workers: int, logical_workers: int) -> list[range]:
    return [logical_workers_of(rank, workers, logical_workers) for rank in range(workers)]


@given(st.integers(2, 9), st.integers(0, 20), st.floats(0.01, 0.9), st.integers(0, 1000))
def test_the_rate_is_that_asked_for_and_nobody_does_more(workers: int, more: int, rate: float, seed: int) -> None:
    shares, steps = blocks(workers, workers + more), 300
    found = [draw_recomputed_shares(step, seed, rate, shares, [range(workers)]) for step in range(steps)]
    total = sum(map(len, found))
    assert total == pytest.approx(
        rate * (workers + more) * steps, abs=6 * workers * (1 + (rate * (1 + more) * steps) ** 0.5)
    )
    for each in found:
        done = [again.by for again in each]
        assert not each or max(done.count(rank) for rank in range(workers)) <= -(-(workers + more) // workers) + 1
        assert all(again.logical_worker in shares[again.owner] and again.owner != again.by for again in each)


def test_all_are_computed_twice_at_a_rate_of_one() -> None:
    for workers in (2, 3, 4):
        shares = blocks(workers, 8)
        assert all(
            {each.logical_worker for each in draw_recomputed_shares(step, 7, 1.0, shares, [range(workers)])}
            == set(range(8))
            for step in range(50)
        )


def test_every_share_and_every_rank_has_its_turn() -> None:
    found = {
        (each.logical_worker, each.by)
        for step in range(3000)
        for each in draw_recomputed_shares(step, 1, 0.05, blocks(4, 8), [range(4)])
    }
    assert found == {(v, by) for v in range(8) for by in range(4) if by != v // 2}


def test_only_equals_are_compared() -> None:
    found = [
        each
        for step in range(500)
        for each in draw_recomputed_shares(step, 1, 0.2, blocks(5, 10), [[0, 2], [1, 4], [3]])
    ]
    assert {frozenset((each.owner, each.by)) for each in found} == {frozenset((0, 2)), frozenset((1, 4))}


@pytest.mark.parametrize(
    ("bits", "third", "expected"),
    [((1, 2), 2, 0), ((1, 2), 1, 1), ((1, 2), 3, None)],
    ids=["the owner", "the other", "nobody knows"],
)
def test_a_third_decides(bits: tuple[int, int], third: int, expected: int | None) -> None:
    share = RecomputedShare(5, 0, 1)
    assert tie_breaking_ranks(share, [[0, 1, 2, 3]]) == [2]
    assert corrupt_rank(share, bits, [(2, third)]) == expected


@pytest.mark.parametrize(("again", "expected"), [((2, 2), 0), ((1, 1), 1), ((1, 2), None), ((3, 3), None)])
def test_of_two_both_compute_once_more(again: tuple[int, int], expected: int | None) -> None:
    """A bit that was flipped once is found; of a device that errs always nobody knows which of two it is."""
    share = RecomputedShare(5, 0, 1)
    assert tie_breaking_ranks(share, [[0, 1]]) == [0, 1]
    assert corrupt_rank(share, (1, 2), list(zip((0, 1), again, strict=True))) == expected


@given(st.integers(0, 31), st.integers(0, 99), st.integers(0, 5))
def test_every_bit_counts(bit: int, at: int, place: int) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(at))
    other = values.clone()
    other.view(torch.int32)[at] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert int(checksum(values, place)) != int(checksum(other, place))
    assert int(checksum(values, place)) == int(checksum(values.view(10, 10).t(), place)), "wherever they lie"
    assert int(checksum(values, place)) != int(checksum(values, place + 1))
