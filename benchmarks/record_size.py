"""Memory and number of files of the record of a long run, with the real writer, readers, report and feed of MLflow.

    python benchmarks/record_size.py      # 10^6 steps of 64 logical workers; about 2.5 GB of disk
    python benchmarks/record_size.py --steps 20000 --logical-workers 8

Nothing is trained: steps are recorded as by rank 0, and every ten steps a sample of two nodes as by the driver. Then
another process runs the final work of a driver, and its peak is read from the kernel, next to the memory of an idle
process with the same imports.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from ray_app.config.config import Config
from ray_app.report.facts import read_facts
from ray_app.report.html import render
from ray_app.runlog.history import goodput, read_steps, recoveries, world_sizes
from ray_app.runlog.journal import MAX_SMALL_FILES, MetricsWriter, StepRecord, join_segments, put_event, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.track.mlflow_client import Backlog, SentState

_FLUSH_STEPS = 50
_MASK = 2**64 - 1


def main() -> None:
    """Writes the record, and reads it in another process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--logical-workers", type=int, default=64)
    parser.add_argument("--read", help="for the other process: the run, and what to do with it")
    parser.add_argument("--what", default="")
    options = parser.parse_args()
    if options.read:
        _read(RunPaths(Path(options.read)), options.what, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run")
        began_s = time.perf_counter()
        # Syncing a hundred thousand files would take long, and this record need not survive a power failure.
        with mock.patch("os.fsync"):
            max_files = _write(paths, options.steps, options.logical_workers)
        files = len([file for file in Path(str(paths.root)).rglob("*") if file.is_file()])
        wrote_s = time.perf_counter() - began_s
        print(
            f"{options.steps:,} steps, L = {options.logical_workers}: {files:,} files, at most {max_files:,} meanwhile;"
            f" {wrote_s:.0f} s"
        )
        for part in ("nothing", "summary", "tracker", "report"):
            arguments = ["--read", str(paths.root), "--what", part, "--steps", str(options.steps)]
            subprocess.run([sys.executable, __file__, *arguments], check=True)


def _write(paths: RunPaths, steps: int, logical_workers: int) -> int:
    """Records steps; returns the maximum number of files at any time."""
    Path(str(paths.root)).mkdir(parents=True)
    Path(str(paths.config)).write_text(Config().to_yaml())
    put_event(paths, "started", 1, metric="loss", mode="min", total_steps=steps)
    writer, max_files = MetricsWriter(paths, 1, flush_s=1e9), 0
    for step in range(1, steps + 1):
        hashes = [(step * 0x9E3779B97F4A7C15 + v * 0xBF58476D1CE4E5B9) & _MASK for v in range(logical_workers)]
        rows = [32] * logical_workers
        writer.add(
            StepRecord(step, step // 10_000, 1e9 + step, 2.0 / step, 1e-3, 1.5 / step, 1e3, 1.0, 2, rows, hashes, "1.1")
        )
        if step % _FLUSH_STEPS == 0:
            writer.flush()
            if step // _FLUSH_STEPS % MAX_SMALL_FILES == 0:
                max_files = max(max_files, len(os.listdir(str(paths.metrics))))
                join_segments(paths, min_age_s=0)
    writer.close()
    return max_files


def _read(paths: RunPaths, part: str, steps: int) -> None:
    """Runs a part of the final work of a driver, and prints the peak."""
    idle_mb, began_s = _peak_mb(), time.perf_counter()
    if part == "summary":
        course, events = read_steps(paths), read_events(paths)
        assert len(course.records) == steps
        assert world_sizes(course.records)
        goodput(course.records, course.repeated)
        recoveries(events, course.in_time)
    elif part == "tracker":
        Backlog(paths, 10).read(SentState(sent_step=steps))
    elif part == "report":
        render(read_facts(paths))
    print(
        f"  {part:<8} peak {_peak_mb():,.0f} MB, of which {_peak_mb() - idle_mb:,.0f} MB for it;"
        f" {time.perf_counter() - began_s:.0f} s"
    )


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
