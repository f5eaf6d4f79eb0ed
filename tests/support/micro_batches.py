"""All micro-batches that the feeds of some workers deliver, for comparison with those of other workers."""

from collections.abc import Callable

import torch

from ray_app.data.windows import MicroBatch, Windows
from ray_app.plan.assignment import logical_workers_of
from ray_app.plan.order import Cursor, Plan
from tests.support.local_world import feed_of

BatchPosition = tuple[int, int, int]
"""Epoch, step of the epoch, logical worker."""


def collect_batches(
    plan: Plan, epochs: int, size: int, start: Cursor, windows: Callable[[range], Windows]
) -> dict[BatchPosition, MicroBatch]:
    """Returns all micro-batches from a cursor to the end of the run; `windows` opens the rows of logical workers."""
    batches: dict[BatchPosition, MicroBatch] = {}
    for rank in range(size):
        assigned = logical_workers_of(rank, size, plan.logical_workers)
        feed, cursor = feed_of(plan, start, assigned, windows(assigned)), start
        while cursor < Cursor(epochs, 0):
            for batch in feed.next():
                batches[cursor.epoch, cursor.step, batch.logical_worker] = batch
            cursor = cursor.next(plan.steps_per_epoch)
        feed.close()
    return batches


def assert_equal_batches(some: dict[BatchPosition, MicroBatch], others: dict[BatchPosition, MicroBatch]) -> None:
    """Asserts that rows, keys and fields of all micro-batches are equal."""
    assert some.keys() == others.keys()
    for key, batch in some.items():
        other = others[key]
        assert batch.positions.tolist() == other.positions.tolist(), key
        assert (batch.row_hash, batch.bad, batch.num_skipped) == (other.row_hash, other.bad, other.num_skipped), key
        assert batch.fields.keys() == other.fields.keys()
        assert all(torch.equal(values, other.fields[name]) for name, values in batch.fields.items()), key
        assert torch.equal(batch.keys, other.keys), key
