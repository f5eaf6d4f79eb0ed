"""`data.by_length` with every other option of the plan: it uses each row as often as the plan without it, and every
reader yields the same micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ray_app.data.windows import MicroBatch
from ray_app.plan.order import Cursor
from ray_app.testing import WorkerPool, cache_windows, stream_windows
from ray_app.train.job import Job, OpenWindows
from tests.support.bad_rows import BAD_ROWS, BadRowTexts, job_of
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import disk_cached, write_images
from tests.support.micro_batches import BatchPosition, assert_equal_batches, collect_batches

FILES = [[30, 7], [1, 22], [19], [18]]
ORDERS = [
    ("row", None),
    ("file", None),
    pytest.param("off", None, marks=pytest.mark.rest),
    ("row", "label"),
    pytest.param("off", "label", marks=pytest.mark.rest),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("by_length") / "data", FILES)


def texts_job(folder: Path, data: Path, bad: tuple[int, ...] = BAD_ROWS, **fields: Any) -> Job:
    more = {
        "data__by_length": "text",
        "data__shuffle_window_rows": 12,
        "data__cache": "disk",
        "data__cache_dir": str(folder / "cache"),
    }
    return job_of(folder / "run", data, BadRowTexts(bad), **(more | fields))


def delivered(job: Job, size: int, windows: OpenWindows, start: Cursor = Cursor()) -> dict[BatchPosition, MicroBatch]:
    return collect_batches(job.plan, 2, size, start, lambda assigned: windows(job, start, assigned))


def count_used_rows(job: Job, batches: dict[BatchPosition, MicroBatch], epoch: int) -> Counter[int]:
    """Counts how often an epoch trains on each row, or skips it since it cannot be decoded."""
    counts: Counter[int] = Counter()
    for (batch_epoch, step, v), batch in batches.items():
        if batch_epoch == epoch:
            assert batch.rows + batch.num_skipped == job.plan.rows_of_step(step)[v]
            assert batch.fields["id"].tolist() == batch.positions.tolist()
            assert not set(batch.positions.tolist()) & set(BAD_ROWS)
            counts.update(batch.positions.tolist())
            counts.update({row: batch.num_skipped // len(batch.bad) for row in batch.bad})
    return counts


def count_planned_rows(job: Job, epoch: int) -> Counter[int]:
    order = job.plan.epoch(epoch)
    slots = product(range(job.plan.logical_workers), range(job.plan.steps_per_epoch))
    return Counter(row for v, step in slots for row in order.rows_at(v, step).tolist())


def count_keys(batches: dict[BatchPosition, MicroBatch]) -> Counter[tuple[int, int, int]]:
    """Counts the augmentation keys of each row in each epoch."""
    return Counter(
        (slot[0], *pair)
        for slot, b in batches.items()
        for pair in zip(b.positions.tolist(), b.keys.tolist(), strict=True)
    )


def count_values(batches: dict[BatchPosition, MicroBatch]) -> int:
    return sum(batch.fields["text"].numel() for batch in batches.values())


def resume_cursors(job: Job) -> Iterator[Cursor]:
    """Yields a cursor in the middle of a window and one in the second epoch."""
    yield Cursor(0, job.plan.steps_per_window + 1)
    yield Cursor(1, 2)


@pytest.mark.rest
@pytest.mark.parametrize("last", ["keep", "drop"])
@pytest.mark.parametrize(("shard", "balance_by"), ORDERS)
def test_micro_batches_are_the_same_for_every_reader_and_worker_count(
    tmp_path: Path, data: Path, shard: str, balance_by: str | None, last: str
) -> None:
    options = {"data__shard": shard, "data__balance_by": balance_by, "data__last_batch": last}
    job = texts_job(tmp_path, data, **options)
    first = delivered(job, 1, stream_windows)
    for size, windows in (
        (1, disk_cached),
        (2, stream_windows),
        (2, disk_cached),
        (4, cache_windows),
        (4, disk_cached),
    ):
        assert_equal_batches(first, delivered(job, size, windows))
    for start in resume_cursors(job):
        rest = {slot: batch for slot, batch in first.items() if slot[:2] >= (start.epoch, start.step)}
        for size, windows in ((1, cache_windows), (2, disk_cached), (4, stream_windows)):
            assert_equal_batches(rest, delivered(job, size, windows, start))
    for epoch in range(2):
        counts = count_used_rows(job, first, epoch)
        assert counts == count_planned_rows(job, epoch), "data.by_length changed the rows of an epoch"
        if last == "keep" and balance_by is None:
            assert counts == Counter({row: 4 if shard == "off" else 1 for row in range(job.plan.manifest.num_rows)})
    plain = delivered(texts_job(tmp_path / "plain", data, **options, data__by_length=None), 1, cache_windows)
    assert count_keys(first) == count_keys(plain)
    assert count_values(first) < 0.9 * count_values(plain)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("shard", "balance_by"),
    [
        ("file", None),
        ("row", "label"),
        ("off", None),
    ],
)
def test_training_is_bit_identical_for_any_worker_count_and_after_a_resume(
    worker_pool: WorkerPool, tmp_path: Path, data: Path, shard: str, balance_by: str | None
) -> None:
    fields = {
        "data__shard": shard,
        "data__balance_by": balance_by,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 4,
    }
    job = texts_job(tmp_path, data, **fields)
    windows = (cache_windows, stream_windows, disk_cached)
    train_and_resume(worker_pool, job, (1, 2, 4), ends=(4, 7), windows=windows)
