"""Gathering by recursive doubling and sharing of step records, on real connections.

The tests lower the maximum number of ranks of a ring instead of raising the number of ranks.
"""

from pathlib import Path

import pytest

from ray_app.errors import PeerLostError
from ray_app.reduction import transport
from ray_app.reduction.world import World
from ray_app.runlog.journal import StepRecord
from ray_app.task.losses import MetricKey
from ray_app.testing import WorkerPool
from ray_app.train.checkpointing.step_log import gather_records
from ray_app.train.step.step_stats import ReplicaStats, StepResult, StepStats
from tests.support.local_world import LocalMembership


def _make_rows(world: World) -> list[ReplicaStats]:
    times = 0.25, 0.5, 0.75, 1.0
    return [
        ReplicaStats(
            v, v + 1, 2**64 - 1 - v, v % 3, 1.0 / (v + 1), v, *times, 0.1 * v, float(v), {MetricKey("a"): v / 7}
        )
        for v in world.assigned
    ]


def _gather_tables(rank: int, store: Path, size: int) -> tuple[StepResult, StepResult]:
    """Returns a table gathered by doubling, and one gathered by torch's ring."""
    tables = []
    with LocalMembership(World(rank, size, 2 * size), store).generation(0, False) as (world, _):
        for max_ring_ranks in (1, 16):
            transport.MAX_RING_RANKS = max_ring_ranks
            tables.append(StepStats(world).gather(_make_rows(world)))
    return tables[0], tables[1]


@pytest.mark.parametrize("size", [2, 3])
def test_doubling_gathers_the_same_table_as_a_ring(worker_pool: WorkerPool, size: int) -> None:
    tables = worker_pool.run(size, _gather_tables, size)
    assert all(pair == tables[0] for pair in tables)
    assert tables[0][0] == tables[0][1]


def _leave_between_gathers(rank: int, store: Path, size: int) -> str:
    transport.MAX_RING_RANKS = 1
    try:
        with LocalMembership(World(rank, size, size), store).generation(0, False) as (world, _):
            table = StepStats(world)
            table.gather(_make_rows(world))
            if rank == 1:
                raise InterruptedError
            table.gather(_make_rows(world))
        return "went on"
    except (PeerLostError, InterruptedError) as error:
        return type(error).__name__
    finally:
        transport.MAX_RING_RANKS = 16


def test_a_rank_that_waits_for_one_that_left_raises_peer_lost_error(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(3, _leave_between_gathers, 3) == ["PeerLostError", "InterruptedError", "PeerLostError"]


def _share_records(rank: int, store: Path, size: int) -> list[StepRecord]:
    """Shares records: rank 0 lacks the first one, rank 1 has one more than its peers, rank 2 has none."""
    steps = {0: [2, 3], 1: [1, 2, 3, 4], 2: []}[rank]
    records = [
        StepRecord(step, 0, 1.0, 0.5, 0.1, 1.0, float(rank), 0.0, size, [3] * 4, [1] * 4, "1.1") for step in steps
    ]
    with LocalMembership(World(rank, size, size), store).generation(0, False) as (world, _):
        return list(gather_records(records, world).values())


def test_all_ranks_get_all_records_and_keep_their_own(worker_pool: WorkerPool) -> None:
    records_by_rank = worker_pool.run(3, _share_records, 3)
    assert [[(r.step, r.step_ms) for r in records] for records in records_by_rank] == [
        [(1, 1.0), (2, 0.0), (3, 0.0), (4, 1.0)],
        [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)],
        [(1, 1.0), (2, 0.0), (3, 0.0), (4, 1.0)],
    ]
