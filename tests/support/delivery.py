"""What feeds deliver of small data sets of images: windows of all kinds, plans, and the comparison of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ray_app.data.bad_rows import Decode
from ray_app.data.dataset import Dataset
from ray_app.data.feed import Feed
from ray_app.data.probes import probe
from ray_app.data.reader import Fetch, Reader, RowSource, choose_fetch, fetch_in_process, load_all
from ray_app.data.windows import CachedWindows, MicroBatch, StreamedWindows, Windows
from ray_app.plan.assignment import logical_workers_of
from ray_app.plan.order import Cursor, Plan
from tests.support.local_world import feed_of

EPOCHS = 2
COLUMNS = ["image", "id"]
CPU = torch.device("cpu")


def decode(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns the rows as they are stored."""
    return {"image": rows["image"], "id": rows["id"]}


def source_of(dataset: Dataset, plan: Plan, task_rows: int, decode: Decode = decode) -> RowSource:
    """Returns the source of a plan's rows."""
    fields = probe(dataset, COLUMNS, decode)
    return RowSource(Reader(dataset.root, COLUMNS, decode, fields), plan.manifest, task_rows)


def open_streamed(
    dataset: Dataset, plan: Plan, cursor: Cursor, assigned: range, fetch: Fetch = fetch_in_process, task_rows: int = 5
) -> Windows:
    """Opens windows that are read meanwhile."""
    return StreamedWindows(plan, cursor, assigned, EPOCHS, fetch, source_of(dataset, plan, task_rows))


def open_threaded(dataset: Dataset, plan: Plan, cursor: Cursor, assigned: range) -> Windows:
    """Opens windows that two threads read."""
    return open_streamed(dataset, plan, cursor, assigned, choose_fetch(2, fetch_in_process))


def open_cached(dataset: Dataset, plan: Plan, cursor: Cursor, assigned: range) -> Windows:
    """Opens windows of rows in memory."""
    del cursor, assigned
    return CachedWindows(load_all(fetch_in_process, source_of(dataset, plan, 6)))


OPENERS = [open_streamed, open_threaded, open_cached]
OpenWindows = Callable[[Dataset, Plan, Cursor, range], Windows]
BatchId = tuple[int, int, int]
"""Epoch, step and logical worker of a micro-batch."""


def deliver(
    dataset: Dataset, plan: Plan, open_windows: OpenWindows, world_size: int, start: Cursor = Cursor()
) -> dict[BatchId, MicroBatch]:
    """Returns what the feeds of all ranks deliver from a cursor to the end of the run, and compares tensors
    with positions.
    """
    batches_by_id: dict[BatchId, MicroBatch] = {}
    for rank in range(world_size):
        assigned = logical_workers_of(rank, world_size, plan.logical_workers)
        feed = feed_of(plan, start, assigned, open_windows(dataset, plan, start, assigned))
        cursor = start
        while cursor < Cursor(EPOCHS, 0):
            batches = feed.next()
            assert [batch.logical_worker for batch in batches] == list(assigned)
            assert [batch.rows for batch in batches] == [plan.rows_of_step(cursor.step)[v] for v in assigned]
            for batch in batches:
                assert batch.fields["id"].tolist() == batch.positions.tolist(), (
                    "the tensors have other rows than the positions of the batch"
                )
                assert len(batch.fields["image"]) == len(batch.keys) == batch.rows
                batch_id = (cursor.epoch, cursor.step, batch.logical_worker)
                assert batch_id not in batches_by_id
                batches_by_id[batch_id] = batch
            cursor = cursor.next(plan.steps_per_epoch)
        feed.close()
    return batches_by_id


def run_epoch(feed: Feed, plan: Plan) -> None:
    """Takes the batches of an epoch."""
    for _ in range(plan.steps_per_epoch):
        feed.next()


def assert_equal_batches(first: dict[BatchId, MicroBatch], second: dict[BatchId, MicroBatch]) -> None:
    """Asserts that both have the same batch ids, with equal rows, pixels, keys and hashes."""
    assert first.keys() == second.keys()
    for batch_id, batch in first.items():
        expected = second[batch_id]
        assert batch.positions.tolist() == expected.positions.tolist(), batch_id
        assert torch.equal(batch.fields["image"], expected.fields["image"]), batch_id
        assert torch.equal(batch.keys, expected.keys), batch_id
        assert batch.row_hash == expected.row_hash, batch_id


def assert_exactly_once(plan: Plan, delivered: dict[BatchId, MicroBatch]) -> None:
    """Asserts that every epoch has every row once; without `keep_last`, at most once and less than a step is
    missing.
    """
    for epoch in range(EPOCHS):
        counts: Counter[int] = Counter()
        for batch_id, batch in delivered.items():
            if batch_id[0] == epoch:
                counts.update(batch.fields["id"].tolist())
        assert sum(counts.values()) == plan.rows_per_epoch
        all_rows = Counter(range(plan.manifest.num_rows))
        if plan.keep_last:
            assert counts == all_rows
        else:
            assert counts <= all_rows
            assert counts.total() > all_rows.total() - plan.global_batch_size - plan.logical_workers


def plan_of(
    dataset: Dataset,
    *,
    logical_workers: int = 4,
    batch: int = 12,
    window: int = 6,
    keep_last: bool = True,
    seed: int = 3,
) -> Plan:
    """Returns a plan for the rows of a data set."""
    return Plan(dataset.manifest, seed, logical_workers, batch, window, keep_last)
