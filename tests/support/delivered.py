"""Everything that the feeds of some workers deliver, to be compared with what others get."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_app.data.windows import MicroBatch, Windows
from ray_app.plan.assignment import logical_workers_of
from ray_app.plan.order import Cursor, Plan
from tests.support.local_world import feed_of

Place = tuple[int, int, int]
"""Epoch, step of the epoch, logical worker."""


def delivered(
    plan: Plan, epochs: int, size: int, start: Cursor, windows: Callable[[range], Windows]
) -> dict[Place, MicroBatch]:
    """All micro-batches from a cursor to the end of the run; `windows`: where the rows of some logical workers come
    from.
    """
    found: dict[Place, MicroBatch] = {}
    for rank in range(size):
        played = logical_workers_of(rank, size, plan.logical_workers)
        feed, cursor = feed_of(plan, start, played, windows(played)), start
        while cursor < Cursor(epochs, 0):
            for batch in feed.next():
                found[cursor.epoch, cursor.step, batch.logical_worker] = batch
            cursor = cursor.next(plan.steps_per_epoch)
        feed.close()
    return found


def assert_same(some: dict[Place, MicroBatch], others: dict[Place, MicroBatch]) -> None:
    """The same rows, keys and fields everywhere."""
    assert some.keys() == others.keys()
    for place, batch in some.items():
        other = others[place]
        assert batch.positions.tolist() == other.positions.tolist(), place
        assert (batch.row_hash, batch.bad, batch.num_skipped) == (other.row_hash, other.bad, other.num_skipped), place
        assert batch.fields.keys() == other.fields.keys()
        assert all(torch.equal(values, other.fields[name]) for name, values in batch.fields.items()), place
        assert torch.equal(batch.keys, other.keys), place
