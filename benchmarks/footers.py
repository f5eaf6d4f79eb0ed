"""Opening a data set of very many files: seconds and memory, with footers from the files and from an ingest's copy.

python benchmarks/footers.py                # 20,000 files of 10 row groups of 10 columns, and what 100,000 would take
python benchmarks/footers.py --files 100000 # all of them, 2.7 GB
python benchmarks/footers.py --files 20     # that it runs
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_app.data.dataset import open_dataset
from ray_app.data.parquet_files import FOOTERS_FILE, read_footers
from ray_app.storage.data_files import files_below

ROW_GROUPS, ROWS = 10, 10
ROUNDS = 3
MANY, DIFFERENT = 100_000, 50


def write_files(folder: Path, files: int) -> None:
    """Writes files of nine columns of numbers and one of text; most of them are copies."""
    generator = np.random.default_rng(0)
    for number in range(files):
        path = folder / f"part-{number:06d}.parquet"
        if number >= DIFFERENT:
            path.write_bytes((folder / f"part-{number % DIFFERENT:06d}.parquet").read_bytes())
            continue
        rows = ROW_GROUPS * ROWS
        numbers = {f"n{i}": generator.integers(0, 1000, rows) for i in range(6)} | {
            f"x{i}": generator.random(rows) for i in range(3)
        }
        pq.write_table(pa.table({**numbers, "text": [str(n) for n in numbers["n0"]]}), path, row_group_size=ROWS)
    os.sync()


def forget(folder: Path) -> None:
    """Removes the files from the page cache; their names and inodes stay in the kernel's memory."""
    for path in folder.iterdir():
        opened = os.open(path, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def resident_mb(field: str) -> float:
    """Returns megabytes of this process: `VmRSS`, the current value, or `VmHWM`, the peak since the last write to
    `clear_refs`.
    """
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


def measure(folder: str) -> tuple[float, float, str]:
    """Returns seconds, additional peak megabytes, and the digest; runs in another process."""
    # This write resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = resident_mb("VmRSS")
    began = time.perf_counter()
    digest = open_dataset(folder).manifest.digest
    return time.perf_counter() - began, resident_mb("VmHWM") - before_mb, digest


def main() -> None:
    """Prints seconds and megabytes of each way, and their extrapolation to 100,000 files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000, help="how many")
    files = parser.parse_args().files
    context = multiprocessing.get_context("spawn")
    samples_by_way: dict[str, list[tuple[float, float, str]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, files)
        kept = folder / FOOTERS_FILE
        for _ in range(ROUNDS):
            for way in ("footers, not in the page cache", "footers, in the page cache", "kept", "kept again"):
                if way == "kept":
                    read_footers(folder, files_below(folder, ".parquet")).put(folder)
                if way.startswith("footers, not"):
                    kept.unlink(missing_ok=True)
                    forget(folder)
                with context.Pool(1) as pool:
                    samples_by_way.setdefault(way, []).append(pool.apply(measure, (name,)))
    assert len({digest for samples in samples_by_way.values() for *_, digest in samples}) == 1
    print(
        f"{files:,} files of {ROW_GROUPS} row groups of 10 columns, {ROUNDS} rounds, {os.cpu_count()} cores; bars for"
        f" {MANY:,}:"
    )
    print("60 s with footers, 10 s without, 1,000 MB more than after the imports")
    for way, samples in samples_by_way.items():
        seconds, megabytes = [s for s, *_ in samples], [m for _, m, _ in samples]
        many = MANY / files
        print(
            f"{way:<32} {median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f}), {median(megabytes):.0f} MB;"
            f" of {MANY:,} {many * median(seconds):.1f} s, {many * median(megabytes):,.0f} MB"
        )


if __name__ == "__main__":
    main()
