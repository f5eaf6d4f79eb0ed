"""Opening a data set of very many files: seconds and memory, with footers read and with what an ingest keeps of them.

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

ROW_GROUPS, ROWS, ROUNDS, MANY, DIFFERENT = 10, 10, 3, 100_000, 50


def write_files(folder: Path, files: int) -> None:
    """Files of nine columns of numbers and one of text; of each there are copies."""
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
    """Takes the files out of the page cache; their names and inodes stay in the kernel's memory."""
    for path in folder.iterdir():
        opened = os.open(path, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def resident_mb(what: str) -> float:
    """Megabytes of this process, `VmRSS` now or `VmHWM` at most since it began or `clear_refs` was written."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) / 1024


def measure(folder: str) -> tuple[float, float, str]:
    """Seconds, peak megabytes more than before, and the digest, in a process of its own."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_mb = resident_mb("VmRSS")
    began = time.perf_counter()
    digest = open_dataset(folder).manifest.digest
    return time.perf_counter() - began, resident_mb("VmHWM") - before_mb, digest


def main() -> None:
    """Prints seconds and megabytes of each way, and what they would be for 100,000 files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000, help="how many")
    files = parser.parse_args().files
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, float, str]]] = {}
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
                    found.setdefault(way, []).append(pool.apply(measure, (name,)))
    assert len({digest for samples in found.values() for *_, digest in samples}) == 1
    print(
        f"{files:,} files of {ROW_GROUPS} row groups of 10 columns, {ROUNDS} rounds, {os.cpu_count()} cores; bars for"
        f" {MANY:,}:"
    )
    print("60 s with footers, 10 s without, 1,000 MB more than after the imports")
    for way, samples in found.items():
        seconds, megabytes = [s for s, *_ in samples], [m for _, m, _ in samples]
        many = MANY / files
        print(
            f"{way:<32} {median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f}), {median(megabytes):.0f} MB;"
            f" of {MANY:,} {many * median(seconds):.1f} s, {many * median(megabytes):,.0f} MB"
        )


if __name__ == "__main__":
    main()
