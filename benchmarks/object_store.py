"""The object store while an epoch of decoded images streams through it; the epoch is larger than the store.

python benchmarks/object_store.py                          # 1.2 GB through a store of 268 MB, about two minutes
python benchmarks/object_store.py --window-rows 500        # with a small window instead of the default one
python benchmarks/object_store.py --rows 2200              # 0.3 GB
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil
from PIL import Image

from benchmarks.reading import PIXELS, STORE_BYTES, Epochs, photos_of, small_cluster
from ray_app.config.sections import DataSection
from ray_app.ingest.ingest import IngestOptions, ingest


def store_peak_mb() -> float:
    """Returns the peak megabytes of Ray's object store: pages of its shared memory that were ever written."""
    for process in psutil.Process().children(recursive=True):
        if process.name() == "raylet":
            opened = [Path(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
            return max(file.stat().st_blocks * 512 for file in opened if "plasma" in os.readlink(file)) / 1e6
    raise AssertionError("this process has started no raylet")


def megabytes(folder: Path) -> float:
    """Returns the megabytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def make_photos(folder: Path, count: int) -> None:
    """Ingests the data set `folder/large`: copies of one picture of noise."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)).save(file, "jpeg")
    (folder / "photos" / "0").mkdir(parents=True)
    for i in range(count):
        (folder / "photos" / "0" / f"{i}.jpg").write_bytes(file.getvalue())
    ingest(IngestOptions("images", str(folder / "large"), str(folder / "photos"), check=False))


def main() -> None:
    """Measures the peak of the store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000, help="images of 150 kB decoded")
    parser.add_argument(
        "--window-rows", type=int, default=DataSection().shuffle_window_rows, help="as data.shuffle_window_rows"
    )
    options = parser.parse_args()
    rows, window_rows = options.rows, options.window_rows
    with tempfile.TemporaryDirectory() as name, small_cluster(Path(name)) as spilled:
        make_photos(Path(name), rows)
        idle_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        epochs = Epochs(photos_of(Path(name) / "large"), window_rows=window_rows)
        spilled_mb = 0.0
        for _ in epochs.steps(epochs.feed()):
            spilled_mb = max(spilled_mb, megabytes(spilled))
        print(f"Object store of {STORE_BYTES / 1e6:.0f} MB, {rows * 3 * PIXELS**2 / 1e6:.0f} MB through it:")
        print(f"  at most {store_peak_mb():.0f} MB used, {spilled_mb:.0f} MB spilled to disk")
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"  windows of {min(window_rows, rows):,} rows; this process held at most {peak_mb:,.0f} MB, {idle_mb:,.0f}"
            f" MB before"
        )


if __name__ == "__main__":
    main()
