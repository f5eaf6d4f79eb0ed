"""Shared parts of the benchmarks of the input pipeline: data sets as a run reads them, epochs through a worker's feed,
and a small cluster.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from ray_app.data.bad_rows import Decode
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.feed import Feed
from ray_app.data.probes import probe
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.reader import Fetch, Reader, RowSource, rows_per_task
from ray_app.data.windows import StreamedWindows, Windows
from ray_app.plan.order import Cursor, Plan
from ray_app.task.image import ImageClassification

BATCH, PIXELS = 32, 224
READ_TASK_MB = 64.0
STORE_BYTES = 256 << 20


def source_of(dataset: Dataset, decode: Decode) -> RowSource:
    """Returns the data set as a run reads it."""
    fields = probe(dataset, ["image", "label"], decode)
    return RowSource(
        Reader(dataset.root, ["image", "label"], decode, fields), dataset.manifest, rows_per_task(fields, READ_TASK_MB)
    )


def photos_of(folder: Path) -> RowSource:
    """Returns a data set of image files, decoded as for ResNet-18."""
    dataset = open_dataset(str(folder))
    return source_of(dataset, ImageClassification(model="resnet18", size=PIXELS).prepare(dataset.facts).decode)


@dataclass(frozen=True)
class Epochs:
    """Epochs of a data set through the feed of one worker.

    Args:
        source: The rows.
        batch: Rows of a step.
        epochs: Number of epochs.
        window_rows: Rows that are shuffled together.
        fetch: Function that runs read tasks.
    """

    source: RowSource
    batch: int = BATCH
    epochs: int = 1
    window_rows: int = 10_000
    fetch: Fetch = fetch_ray

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the epochs."""
        return Plan(self.source.manifest, 0, 1, self.batch, self.window_rows)

    def feed(self, windows: Windows | None = None) -> Feed:
        """Returns a feed at the first step; without windows, it streams."""

        def open_windows(cursor: Cursor, assigned: range) -> Windows:
            return windows or StreamedWindows(self.plan, cursor, assigned, self.epochs, self.fetch, self.source)

        feed = Feed(self.plan, open_windows, torch.device("cpu"))
        feed.seek(Cursor(0, 0), range(1))
        return feed

    def steps(self, feed: Feed) -> Iterator[int]:
        """Yields the number of rows of each step."""
        for _ in range(self.epochs * self.plan.steps_per_epoch):
            yield sum(batch.rows for batch in feed.next())
        feed.close()


@contextmanager
def small_cluster(folder: Path) -> Iterator[Path]:
    """Ray on two CPUs with a small object store; yields the folder into which it spills."""
    import ray

    spilled = folder / "spilled"
    spilled.mkdir()
    torch.set_num_threads(1)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=STORE_BYTES,
        object_spilling_directory=str(spilled),
    )
    try:
        yield spilled
    finally:
        ray.shutdown()
