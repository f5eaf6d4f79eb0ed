"""SDC checks: which shares are recomputed, by which rank, and which rank is corrupt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_app.plan.assignment import logical_workers_of
from ray_app.reduction.reducer import checksum
from ray_app.train.step.sdc import RecomputedShare, corrupt_rank, draw_recomputed_shares, tie_breaking_ranks


def blocks(workers: int, logical_workers: int) -> list[range]:
    return [logical_workers_of(rank, workers, logical_workers) for rank in range(workers)]


@pytest.mark.rest
@given(st.integers(2, 9), st.integers(0, 20), st.floats(0.01, 0.9), st.integers(0, 1000))
def test_shares_are_drawn_at_the_rate_and_spread_over_the_ranks(
    workers: int, extra: int, rate: float, seed: int
) -> None:
    shares, steps = blocks(workers, workers + extra), 300
    draws = [draw_recomputed_shares(step, seed, rate, shares, [range(workers)]) for step in range(steps)]
    total = sum(map(len, draws))
    assert total == pytest.approx(
        rate * (workers + extra) * steps, abs=6 * workers * (1 + (rate * (1 + extra) * steps) ** 0.5)
    )
    for draw in draws:
        recomputing_ranks = [share.by for share in draw]
        assert (
            not draw
            or max(recomputing_ranks.count(rank) for rank in range(workers)) <= -(-(workers + extra) // workers) + 1
        )
        assert all(share.logical_worker in shares[share.owner] and share.owner != share.by for share in draw)


def test_a_rate_of_one_recomputes_every_share() -> None:
    for workers in (2, 3, 4):
        shares = blocks(workers, 8)
        assert all(
            {share.logical_worker for share in draw_recomputed_shares(step, 7, 1.0, shares, [range(workers)])}
            == set(range(8))
            for step in range(50)
        )


def test_every_share_is_recomputed_by_every_other_rank() -> None:
    pairs = {
        (share.logical_worker, share.by)
        for step in range(3000)
        for share in draw_recomputed_shares(step, 1, 0.05, blocks(4, 8), [range(4)])
    }
    assert pairs == {(v, rank) for v in range(8) for rank in range(4) if rank != v // 2}


def test_only_ranks_of_one_group_recompute_each_others_shares() -> None:
    draws = [
        share
        for step in range(500)
        for share in draw_recomputed_shares(step, 1, 0.2, blocks(5, 10), [[0, 2], [1, 4], [3]])
    ]
    assert {frozenset((share.owner, share.by)) for share in draws} == {frozenset((0, 2)), frozenset((1, 4))}


@pytest.mark.parametrize(
    ("checksums", "third_checksum", "expected"),
    [((1, 2), 2, 0), ((1, 2), 1, 1), ((1, 2), 3, None)],
    ids=["owner", "recomputing rank", "unknown"],
)
def test_a_third_rank_breaks_the_tie(checksums: tuple[int, int], third_checksum: int, expected: int | None) -> None:
    share = RecomputedShare(5, 0, 1)
    assert tie_breaking_ranks(share, [[0, 1, 2, 3]]) == [2]
    assert corrupt_rank(share, checksums, [(2, third_checksum)]) == expected


@pytest.mark.parametrize(("checksums", "expected"), [((2, 2), 0), ((1, 1), 1), ((1, 2), None), ((3, 3), None)])
def test_of_two_ranks_both_recompute_to_break_the_tie(checksums: tuple[int, int], expected: int | None) -> None:
    """A bit that was flipped once is attributed to its rank; of a device that always errs, two ranks cannot say
    which one it is.
    """
    share = RecomputedShare(5, 0, 1)
    assert tie_breaking_ranks(share, [[0, 1]]) == [0, 1]
    assert corrupt_rank(share, (1, 2), list(zip((0, 1), checksums, strict=True))) == expected


@given(st.integers(0, 31), st.integers(0, 99), st.integers(0, 5))
def test_a_checksum_depends_on_every_bit_and_the_position(bit: int, index: int, position: int) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(index))
    other = values.clone()
    other.view(torch.int32)[index] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert int(checksum(values, position)) != int(checksum(other, position))
    assert int(checksum(values, position)) == int(checksum(values.view(10, 10).t(), position)), (
        "the checksum depends on the layout in memory"
    )
    assert int(checksum(values, position)) != int(checksum(values, position + 1))
