"""What goes by doubling, and whose records travel, on real connections; the limit for a ring is lowered, not the number
of ranks raised.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app.errors import PeerLostError
from ray_app.reduction import transport
from ray_app.reduction.base import World
from ray_app.runlog.journal import StepRecord
from ray_app.testing import WorkerPool
from ray_app.train.checkpointing.step_log import gather_records
from ray_app.train.step.step_stats import ReplicaStats, StepResult, StepStats
from tests.support.local_world import LocalMembership


def _rows(world: World) -> list[ReplicaStats]:
    spent = 0.25, 0.5, 0.75, 1.0
    return [
        ReplicaStats(v, v + 1, 2**64 - 1 - v, 0.1 * v, v % 3, 1.0 / (v + 1), v, float(v), *spent, {"a": v / 7})
        for v in world.assigned
    ]


def _tables(rank: int, store: Path, size: int) -> tuple[StepResult, StepResult]:
    """A table by doubling, and by torch's ring."""
    found = []
    with LocalMembership(World(rank, size, 2 * size), store).generation(0, False) as (world, _):
        for most in (1, 16):
            transport.MAX_RING_RANKS = most
            found.append(StepStats(world).gather(_rows(world)))
    return found[0], found[1]


@pytest.mark.parametrize("size", [2, 3])
def test_the_table_is_that_of_the_ring(pool: WorkerPool, size: int) -> None:
    found = pool.run(size, _tables, size)
    assert all(pair == found[0] for pair in found)
    assert found[0][0] == found[0][1]


def _leave(rank: int, store: Path, size: int) -> str:
    transport.MAX_RING_RANKS = 1
    try:
        with LocalMembership(World(rank, size, size), store).generation(0, False) as (world, _):
            table = StepStats(world)
            table.gather(_rows(world))
            if rank == 1:
                raise InterruptedError
            table.gather(_rows(world))
        return "went on"
    except (PeerLostError, InterruptedError) as error:
        return type(error).__name__
    finally:
        transport.MAX_RING_RANKS = 16


def test_who_waits_for_one_that_left_is_set_free(pool: WorkerPool) -> None:
    assert pool.run(3, _leave, 3) == ["PeerLostError", "InterruptedError", "PeerLostError"]


def _share(rank: int, store: Path, size: int) -> list[StepRecord]:
    """Rank 0 has forgotten the first, rank 1 has one more than others, rank 2 is new."""
    steps = {0: [2, 3], 1: [1, 2, 3, 4], 2: []}[rank]
    kept = [StepRecord(step, 0, 1.0, 0.5, 0.1, 1.0, float(rank), 0.0, size, [3] * 4, [1] * 4, "1.1") for step in steps]
    with LocalMembership(World(rank, size, size), store).generation(0, False) as (world, _):
        return list(gather_records(kept, world).values())


def test_all_have_all_records_afterwards_and_their_own_where_they_had_one(pool: WorkerPool) -> None:
    found = pool.run(3, _share, 3)
    assert [[(r.step, r.step_ms) for r in records] for records in found] == [
        [(1, 1.0), (2, 0.0), (3, 0.0), (4, 1.0)],
        [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)],
        [(1, 1.0), (2, 0.0), (3, 0.0), (4, 1.0)],
    ]
