"""The input pipeline: decoding images, small rows and waiting for data; the memory of the object store is in
`object_store.py`.

- JPEG images per CPU second against a bare loop that decodes, resizes and crops: the reader alone, in threads, all of
  Ray Data's processes; two busy CPUs may each be slower than one alone, so the loop also runs in two threads
- random transforms of tiny images, which readers apply without a cache
- small rows (28x28 bytes) in batches of 32 against stock `iter_torch_batches`
- waiting for data when the source alone is twice as fast as the step

python benchmarks/input.py                 # needs a quiet machine; about 10 minutes
python benchmarks/input.py --tiny          # that it runs
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil
import torch

from benchmarks.harness import Sample, alternate, ingest_rows, report
from benchmarks.reading import BATCH, PIXELS, Epochs, photos_of, small_cluster, source_of
from ray_app.data.dataset import open_dataset
from ray_app.data.disk_cache import cached_fetch
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.reader import Fetch, RowSource, choose_fetch, fetch_in_process, load_all, plan_all_reads
from ray_app.data.windows import CachedWindows, Windows
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.task.images import IMAGE, decode_columns


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Args:
        images: Number of JPEG images of 500 x 375 pixels.
        rows: Number of small rows.
        wait_steps: Steps of the run that may wait for data.
        rounds: Rounds of each comparison.
        rest_s: Seconds for which Ray's idle processes are measured.
    """

    images: int
    rows: int
    wait_steps: int
    rounds: int
    rest_s: float


TINY_IMAGES = 64
FULL = Sizes(images=2000, rows=200_000, wait_steps=400, rounds=5, rest_s=5.0)
TINY = Sizes(images=40, rows=2000, wait_steps=6, rounds=1, rest_s=0.5)


def make_images(folder: Path, count: int) -> None:
    """Ingests smooth pictures with some noise; as JPEG, they are about as big as photographs of this size."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
        noisy = np.asarray(coarse, np.int16) + generator.integers(-12, 13, (375, 500, 3))
        path = folder / "photos" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    ingest(IngestOptions("images", str(folder / "images"), str(folder / "photos"), check=False))


def cpu_s() -> float:
    """Returns the CPU seconds of this process and its descendants, Ray's processes included."""
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
    """Returns the milliseconds for each of the `count` items that `run` processes."""
    wall, cpu = time.perf_counter(), cpu_s()
    run()
    return Sample((time.perf_counter() - wall) / count * 1e3, (cpu_s() - cpu) / count * 1e3)


def measure_images(folder: Path, sizes: Sizes) -> None:
    """Compares readers of images; a step is an image."""
    import torchvision
    from torchvision.transforms.v2 import functional as transforms

    make_images(folder, sizes.images)
    files = [path.read_bytes() for path in sorted((folder / "photos").rglob("*.jpg"))]
    source = photos_of(folder / "images")
    specs = plan_all_reads(source.manifest, source.task_rows)

    def bare(files: list[bytes] = files) -> None:
        for data in files:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            image = torchvision.io.decode_image(encoded, mode=torchvision.io.ImageReadMode.RGB)
            transforms.center_crop(transforms.resize(image, [PIXELS], antialias=True), [PIXELS])

    def bare_in_two() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(bare, [files[::2], files[1::2]]))

    def read(fetch: Fetch) -> None:
        rows = sum(table.num_rows for table in fetch(source.reader, specs))
        assert rows == sizes.images

    cached = on_disk(source, folder)
    read(fetch_ray)
    read(cached)
    sides = {
        "bare decode and resize": lambda: timed(sizes.images, bare),
        "bare, two threads": lambda: timed(sizes.images, bare_in_two),
        "reader": lambda: timed(sizes.images, lambda: read(fetch_in_process)),
        "two reader threads": lambda: timed(sizes.images, lambda: read(choose_fetch(2, fetch_in_process))),
        "Ray Data read tasks": lambda: timed(sizes.images, lambda: read(fetch_ray)),
        "cache: disk": lambda: timed(sizes.images, lambda: read(cached)),
    }
    print(f"\nRay's processes at rest: {100 * at_rest(sizes.rest_s):.1f} % of a CPU, which counts for Ray Data's side")
    bars = dict.fromkeys(("reader", "two reader threads", "Ray Data read tasks"), 1 / 0.85)
    report("JPEG images, milliseconds per image", alternate(sides, sizes.rounds), bars)


def at_rest(seconds: float) -> float:
    """Returns the CPU seconds per second of all processes while they are idle."""
    before = cpu_s()
    time.sleep(seconds)
    return (cpu_s() - before) / seconds


def as_read(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows unchanged, since small rows need no decoding."""
    return rows


def small_rows(folder: Path, rows: int) -> RowSource:
    """Writes rows of 28x28 bytes and a label, in the application's format in `rows` and by Ray Data in `stock`."""
    import ray.data

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
    ingest_rows(folder, pixels, pixels[:, 0, 0] % 10)
    stock = ray.data.from_numpy([pixels[i : i + 10_000] for i in range(0, rows, 10_000)])
    stock.map_batches(lambda batch: {"image": batch["data"], "label": batch["data"][:, 0, 0] % 10}).write_parquet(
        str(folder / "stock")
    )
    return source_of(open_dataset(str(folder / "rows")), as_read)


def measure_rows(folder: Path, source: RowSource, sizes: Sizes) -> None:
    """Compares readers of small rows; a step is a batch of 32."""
    import ray.data

    epochs = Epochs(source)
    from_disk = replace(epochs, fetch=on_disk(source, folder))
    steps, rows = epochs.plan.steps_per_epoch, source.manifest.num_rows
    arrays = CachedWindows(load_all(fetch_in_process, source))

    def stock() -> None:
        dataset = ray.data.read_parquet(str(folder / "stock"))
        assert sum(len(batch["label"]) for batch in dataset.iter_torch_batches(batch_size=BATCH)) == rows

    def ours(epochs: Epochs, windows: Windows | None = None) -> None:
        assert sum(epochs.steps(epochs.feed(windows))) == rows

    stock()
    ours(epochs)
    ours(from_disk)
    sides = {
        "stock iter_torch_batches": lambda: timed(steps, stock),
        "cache: none": lambda: timed(steps, lambda: ours(epochs)),
        "cache: memory": lambda: timed(steps, lambda: ours(epochs, arrays)),
        "cache: disk": lambda: timed(steps, lambda: ours(from_disk)),
    }
    samples = alternate(sides, sizes.rounds)
    report(
        f"Small rows, batch {BATCH}, milliseconds per batch",
        samples,
        {"cache: none": 0.2, "cache: memory": 0.2, "cache: disk": 0.2},
    )


def on_disk(source: RowSource, folder: Path) -> Fetch:
    """Returns a fetch function with a disk cache, which the first use fills."""
    return cached_fetch(fetch_ray, source, "", str(folder / "cache"), 50)


def measure_transforms(rounds: int) -> None:
    """Measures the cost of random transforms in a reader, for a step of tiny images."""
    from torchvision.transforms import v2

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (TINY_IMAGES, 32, 32, 3), dtype=np.uint8)
    keys = generator.integers(0, 1 << 62, TINY_IMAGES)
    transforms = [v2.RandomResizedCrop([32, 32]), v2.RandAugment()]

    def steps(keys: np.ndarray | None) -> Sample:
        return timed(
            10, lambda: [decode_columns({"image": images}, {"image": IMAGE}, transforms, keys) for _ in range(10)]
        )

    sides = {"without keys": lambda: steps(None), "drawing by keys": lambda: steps(keys)}
    report(
        f"RandomResizedCrop and RandAugment, milliseconds per {TINY_IMAGES} images of 32 x 32",
        alternate(sides, rounds),
        {},
    )


def measure_wait(title: str, source: RowSource, batch: int, window_rows: int, sizes: Sizes) -> None:
    """Measures how long a step waits for data when it runs on a device, so that the CPU is free, and takes twice as
    long as the source alone.
    """
    epochs = -(-sizes.wait_steps * batch // source.manifest.num_rows) + 1
    alone = Epochs(source, batch, epochs, window_rows)
    began = time.perf_counter()
    steps = sum(1 for _ in alone.steps(alone.feed()))
    source_s = (time.perf_counter() - began) / steps
    feed = alone.feed()
    first = True
    for _ in alone.steps(feed):
        # The first batch has nothing to overlap with.
        if first:
            first = False
            began, feed.wait_s = time.perf_counter(), 0.0
        time.sleep(2 * source_s)
    fraction = feed.wait_s / (time.perf_counter() - began)
    ms = 1e3 * source_s
    print(
        f"\nWaiting for {title}: {fraction:.2%} of {steps} steps of {2 * ms:.2f} ms; the source alone {ms:.2f} ms;"
        f" bar 2 %"
    )


def main() -> None:
    """Measures everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only that it runs; the figures say nothing")
    sizes = TINY if parser.parse_args().tiny else FULL
    with tempfile.TemporaryDirectory() as name, small_cluster(Path(name)):
        folder = Path(name)
        measure_images(folder, sizes)
        measure_transforms(sizes.rounds)
        source = small_rows(folder, sizes.rows)
        measure_rows(folder, source, sizes)
        measure_wait("small rows", source, min(512, sizes.rows // 4), 10_000, sizes)
        measure_wait("images", photos_of(folder / "images"), BATCH, sizes.images // 4, sizes)


if __name__ == "__main__":
    main()
