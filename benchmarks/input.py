"""The input pipeline: decoding images, small rows, waiting for data, and the memory of the object store.

- JPEG images per CPU second against a bare loop that decodes, resizes and crops: the reader alone, and all of Ray Data's processes
- small rows (28x28 bytes) in batches of 32 against stock `iter_torch_batches`
- waiting for data, where the source alone is twice as fast as the step
- the object store, while an epoch of a data set that is larger streams through

python benchmarks/input.py                 # needs a quiet machine; about 10 minutes
python benchmarks/input.py --tiny          # that it runs
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil
import torch

from benchmarks.harness import Sample, alternate, ingest_rows, report
from ray_app.data.bad_rows import Decode
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.decoded import load_all
from ray_app.data.feed import Feed
from ray_app.data.ingest import IngestOptions, ingest
from ray_app.data.source import Fetch, Reader, RowSource, fetch_here, fetch_ray, probe, rows_per_task, whole
from ray_app.data.streamed import StreamedWindows
from ray_app.data.windows import CachedWindows, Windows
from ray_app.plan.cursor import Cursor
from ray_app.plan.order import Plan
from ray_app.task.image import ImageClassification

BATCH, PIXELS, READ_TASK_MB = 32, 224, 64.0
STORE_BYTES = 256 << 20


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Args:
        images: JPEG images of 500 x 375 pixels.
        rows: Small rows.
        wait_steps: Steps of the run that may wait for data.
        large_rows: Rows of 150 kB of the data set that is larger than the object store.
        rounds: Rounds of each comparison.
    """

    images: int
    rows: int
    wait_steps: int
    large_rows: int
    rounds: int


FULL = Sizes(images=2000, rows=200_000, wait_steps=400, large_rows=8000, rounds=5)
TINY = Sizes(images=40, rows=6000, wait_steps=30, large_rows=2200, rounds=1)


def make_images(folder: Path, count: int) -> None:
    """Smooth pictures with some noise, about as big as photographs of this size are as JPEG."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
        noisy = np.asarray(coarse, np.int16) + generator.integers(-12, 13, (375, 500, 3))
        path = folder / "photos" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    ingest(IngestOptions("images", str(folder / "images"), str(folder / "photos"), check=False, row_group_rows=250))


def cpu_s() -> float:
    """CPU seconds of this process and all that it started, Ray's processes included."""
    here = psutil.Process()
    total = 0.0
    for process in [here, *here.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def timed(count: int, run: Callable[[], object]) -> Sample:
    """Milliseconds for each of `count` things that `run` does."""
    wall, cpu = time.perf_counter(), cpu_s()
    run()
    return Sample((time.perf_counter() - wall) / count * 1e3, (cpu_s() - cpu) / count * 1e3)


def source_of(dataset: Dataset, decode: Decode) -> RowSource:
    """The data set as a run reads it."""
    fields = probe(dataset, ["image", "label"], decode)
    return RowSource(Reader(dataset.root, ["image", "label"], decode, fields), dataset.manifest, rows_per_task(fields, READ_TASK_MB))


def photos_of(folder: Path) -> RowSource:
    """A data set of image files, decoded as for ResNet-18."""
    dataset = open_dataset(str(folder))
    return source_of(dataset, ImageClassification(model="resnet18", size=PIXELS).prepare(dataset.facts).decode)


def measure_images(folder: Path, sizes: Sizes) -> None:
    """A step is an image."""
    import torchvision
    from torchvision.transforms.v2 import functional as transforms

    make_images(folder, sizes.images)
    files = [path.read_bytes() for path in sorted((folder / "photos").rglob("*.jpg"))]
    source = photos_of(folder / "images")
    specs = whole(source.manifest, source.task_rows)

    def bare() -> None:
        for data in files:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            image = torchvision.io.decode_image(encoded, mode=torchvision.io.ImageReadMode.RGB)
            transforms.center_crop(transforms.resize(image, [PIXELS], antialias=True), [PIXELS])

    def read(fetch: Fetch) -> None:
        rows = sum(table.num_rows for table in fetch(source.reader, specs))
        assert rows == sizes.images

    read(fetch_ray)
    sides = {
        "bare decode and resize": lambda: timed(sizes.images, bare),
        "reader": lambda: timed(sizes.images, lambda: read(fetch_here)),
        "Ray Data read tasks": lambda: timed(sizes.images, lambda: read(fetch_ray)),
    }
    report("JPEG images, milliseconds per image", alternate(sides, sizes.rounds), {"reader": 1 / 0.85, "Ray Data read tasks": 1 / 0.85})


def as_read(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Small rows need no decoding."""
    return rows


@dataclass(frozen=True)
class Epochs:
    """Epochs of a data set through the feed of one worker.

    Args:
        source: The data.
        batch: Rows of a step.
        epochs: How many.
        window_rows: Rows that are shuffled together.
    """

    source: RowSource
    batch: int = BATCH
    epochs: int = 1
    window_rows: int = 10_000

    @functools.cached_property
    def plan(self) -> Plan:
        """The order."""
        return Plan(self.source.manifest, 0, 1, self.batch, self.window_rows)

    def feed(self, windows: Windows | None = None) -> Feed:
        """A feed at the beginning, that streams where no windows are given."""

        def open_windows(cursor: Cursor, played: range) -> Windows:
            return windows or StreamedWindows(self.plan, cursor, played, self.epochs, fetch_ray, self.source)

        feed = Feed(self.plan, open_windows, torch.device("cpu"))
        feed.play(Cursor(0, 0), range(1))
        return feed

    def steps(self, feed: Feed) -> Iterator[int]:
        """Rows of each step."""
        for _ in range(self.epochs * self.plan.steps_per_epoch):
            yield sum(batch.rows for batch in feed.next())
        feed.close()


def small_rows(folder: Path, rows: int) -> RowSource:
    """Rows of 28x28 bytes and a label, as ours in `rows` and as Ray Data writes them in `stock`."""
    import ray.data

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
    ingest_rows(folder, pixels, pixels[:, 0, 0] % 10)
    stock = ray.data.from_numpy([pixels[i : i + 10_000] for i in range(0, rows, 10_000)])
    stock.map_batches(lambda batch: {"image": batch["data"], "label": batch["data"][:, 0, 0] % 10}).write_parquet(str(folder / "stock"))
    return source_of(open_dataset(str(folder / "rows")), as_read)


def measure_rows(folder: Path, source: RowSource, sizes: Sizes) -> None:
    """A step is a batch of 32."""
    import ray.data

    epochs = Epochs(source)
    steps, rows = epochs.plan.steps_per_epoch, source.manifest.num_rows
    arrays = CachedWindows(load_all(fetch_here, source))

    def stock() -> None:
        dataset = ray.data.read_parquet(str(folder / "stock"))
        assert sum(len(batch["label"]) for batch in dataset.iter_torch_batches(batch_size=BATCH)) == rows

    def ours(windows: Windows | None) -> None:
        assert sum(epochs.steps(epochs.feed(windows))) == rows

    stock()
    ours(None)
    sides = {
        "stock iter_torch_batches": lambda: timed(steps, stock),
        "cache: none": lambda: timed(steps, lambda: ours(None)),
        "cache: memory": lambda: timed(steps, lambda: ours(arrays)),
    }
    found = alternate(sides, sizes.rounds)
    report(f"Small rows, batch {BATCH}, milliseconds per batch", found, {"cache: none": 0.2, "cache: memory": 0.2})


def measure_wait(source: RowSource, sizes: Sizes) -> None:
    """How long a step waits for data when it is on a device, so that the CPU is free, and takes twice as long as the source alone."""
    batch = min(512, source.manifest.num_rows // 4)
    epochs = -(-sizes.wait_steps * batch // source.manifest.num_rows) + 1
    alone = Epochs(source, batch, epochs)
    began = time.perf_counter()
    steps = sum(1 for _ in alone.steps(alone.feed()))
    source_s = (time.perf_counter() - began) / steps
    feed = alone.feed()
    first = True
    for _ in alone.steps(feed):
        if first:  # the first batch has nothing to overlap with
            first, began, feed.wait_s = False, time.perf_counter(), 0.0
        time.sleep(2 * source_s)
    fraction = feed.wait_s / (time.perf_counter() - began)
    print(
        f"\nWaiting for data: {fraction:.2%} of {steps} steps of {2e3 * source_s:.2f} ms; the source alone {1e3 * source_s:.2f} ms; bar 2 %"
    )


def store_peak_mb() -> float:
    """The most megabytes that Ray's object store has held: pages of its shared memory that were ever written."""
    for process in psutil.Process().children(recursive=True):
        if process.name() == "raylet":
            opened = [Path(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
            return max(file.stat().st_blocks * 512 for file in opened if "plasma" in os.readlink(file)) / 1e6
    raise AssertionError("this process has started no raylet")


def megabytes(folder: Path) -> float:
    """Size of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def measure_store(folder: Path, sizes: Sizes) -> None:
    """The most that the store holds during an epoch of decoded images that are together larger than it."""
    generator = np.random.default_rng(0)
    (folder / "photos2" / "0").mkdir(parents=True)
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(generator.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)).save(file, "jpeg")
    for i in range(sizes.large_rows):
        (folder / "photos2" / "0" / f"{i}.jpg").write_bytes(file.getvalue())
    ingest(IngestOptions("images", str(folder / "large"), str(folder / "photos2"), check=False, row_group_rows=250))
    epochs = Epochs(photos_of(folder / "large"), window_rows=500)
    spilled = 0.0
    for _ in epochs.steps(epochs.feed()):
        spilled = max(spilled, megabytes(folder / "spilled"))
    decoded_mb = sizes.large_rows * 3 * PIXELS**2 / 1e6
    print(f"\nObject store of {STORE_BYTES / 1e6:.0f} MB: at most {store_peak_mb():.0f} MB used while {decoded_mb:.0f} MB went through")
    print(f"At most {spilled:.0f} MB spilled to disk")


def main() -> None:
    """Measures everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only that it runs; the figures say nothing")
    sizes = TINY if parser.parse_args().tiny else FULL
    import ray

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spilled").mkdir()
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=STORE_BYTES,
            object_spilling_directory=str(folder / "spilled"),
        )
        measure_store(folder, sizes)  # first, since the store's peak is that of all that went before
        measure_images(folder, sizes)
        source = small_rows(folder, sizes.rows)
        measure_rows(folder, source, sizes)
        measure_wait(source, sizes)
        ray.shutdown()


if __name__ == "__main__":
    main()
