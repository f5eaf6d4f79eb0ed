"""Jobs with their rows in a disk cache, and the micro-batches that are read with and without it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ray_app.data.disk_cache import DiskCache, open_cache
from ray_app.data.reader import Reader, ReadSpec, fetch_in_process
from ray_app.data.windows import MicroBatch, StreamedWindows
from ray_app.plan.order import Cursor
from ray_app.task.base import Batch
from ray_app.task.ragged import Ragged
from ray_app.train.job import Job
from tests.support.local_world import TinyImages, feed_of, make_job


class TinyTexts(TinyImages):
    """Images with a list of numbers, some of them empty, on which the loss depends."""

    def decode(self, rows: dict[str, Any]) -> dict[str, Any]:
        texts = (np.arange(row % 7 * 3) + row for row in np.asarray(rows["id"]).tolist())
        return {**super().decode(rows), "text": Ragged.of(texts, np.int16, fill=-1, multiple=4)}

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss(outputs, batch) * (2 + batch["text"].float().sin().mean(1))


def cached_job(folder: Path, data: Path, task: TinyImages) -> Job:
    """Returns a job of two epochs with its disk cache in `folder`."""
    fields = {
        "data__cache": "disk",
        "data__cache_dir": str(folder / "cache"),
        "train__epochs": 2,
        "data__shuffle_window_rows": 6,
    }
    return make_job(folder / "run", data, logical_workers=4, batch=12, task=task, **fields)


class CountingFetch:
    """A fetch that reads in this process and counts the rows."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
        for spec in specs:
            self.rows += sum(split.rows for split in spec)
            yield from reader.read(spec)


def open_job_cache(job: Job, gb: float = 1.0) -> DiskCache:
    return open_cache(job.source, "", job.config.data.cache_dir, gb)


def epoch_of(job: Job, epoch: int, fetch: Any, assigned: range = range(4)) -> list[MicroBatch]:
    """Returns all micro-batches of an epoch."""
    windows = StreamedWindows(job.plan, Cursor(epoch, 0), assigned, epoch + 1, fetch, replace(job.source, task_rows=7))
    feed = feed_of(job.plan, Cursor(epoch, 0), assigned, windows)
    batches = [batch for _ in range(job.plan.steps_per_epoch) for batch in feed.next()]
    feed.close()
    return batches


def assert_equal_to_uncached(job: Job, epoch: int, batches: list[MicroBatch], assigned: range = range(4)) -> None:
    """Asserts that the micro-batches are bit-identical to those that are read without a cache."""
    expected = epoch_of(job, epoch, fetch_in_process, assigned)
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.positions.tolist() == other.positions.tolist()
        assert batch.fields.keys() == other.fields.keys()
        assert all(torch.equal(batch.fields[name], other.fields[name]) for name in batch.fields)
        assert batch.bad == other.bad
