"""Resuming late in an epoch costs as much as resuming early: seconds to the first batch at 90 % of an epoch and at 1 %.

200,000 rows of 64 numbers from Parquet, shuffled in windows of 10,000, read by Ray Data on a local cluster. The time is
that of a worker that starts at a cursor, from making the feed to the first batch. The base, 1 %, is measured twice for
the null. The reading processes exist before and stay: starting one takes seconds at any cursor.

python benchmarks/resume.py --rounds 9      # about 6 minutes
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.harness import ROOT, ingest_rows, store_ratios
from ray_app.data.feed import Feed
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.windows import StreamedWindows
from ray_app.plan.order import Cursor
from ray_app.train.job import Job

ROWS, COLUMNS = 200_000, 64
BATCH, WINDOW = 100, 10_000
EARLY, LATE = "at 1 %", "at 90 %"
AGAIN = "at 1 % again"
SIDES = {EARLY: 0.01, LATE: 0.9, AGAIN: 0.01}
BAR, STRETCH = 1.1, 1.05
_READ_AHEAD_S = 3.0
"""Seconds until all is read: Ray Data kills the processes of canceled reads, and the next sample would wait for new
ones.
"""


def make_job(folder: Path) -> Job:
    """Makes a run over random rows."""
    from ray_app import load_config
    from ray_app.preflight.prepare import prepare

    generator = np.random.default_rng(0)
    ingest_rows(folder, generator.random((ROWS, COLUMNS), dtype=np.float32), generator.integers(0, 10, ROWS))
    config = load_config(
        ROOT / "conf" / "mnist_dense.yaml",
        task__init_args__features=None,
        run__storage_path=str(folder / "runs"),
        data__path=str(folder / "rows"),
        data__eval_path=None,
        data__global_batch_size=BATCH,
        data__shuffle_window_rows=WINDOW,
        data__cache="none",
        train__epochs=3,
        tracking__enabled=False,
    )
    return prepare(config).job


def first_batch_s(job: Job, fraction: float) -> float:
    """Returns the seconds from a new feed to the first batch at a fraction of the second epoch."""
    cursor = Cursor(1, int(fraction * job.plan.steps_per_epoch))
    data, epochs = job.config.data, job.config.train.epochs

    def open_windows(at: Cursor, assigned: range) -> StreamedWindows:
        source = job.source
        return StreamedWindows(job.plan, at, assigned, epochs, fetch_ray, source, data.prefetch_windows)

    began = time.perf_counter()
    feed = Feed(job.plan, open_windows, torch.device("cpu"))
    try:
        feed.seek(cursor, range(1))
        [batch] = feed.next()
        elapsed_s = time.perf_counter() - began
        time.sleep(_READ_AHEAD_S)
    finally:
        feed.close()
    assert batch.rows == BATCH
    return elapsed_s


def report(seconds_by_side: dict[str, list[float]]) -> None:
    """Prints the table."""
    machine = platform.processor() or platform.machine()
    print(
        f"\n{machine}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {len(seconds_by_side[EARLY])} rounds;"
        f" medians (range)"
    )
    print(f"{'first batch':<16}{'seconds':>24}{'/ at 1 %':>24}{'bar':>7}{'stretch':>9}")
    early = seconds_by_side[EARLY]
    store_ratios(
        "first batch",
        EARLY,
        {n: [s / e for s, e in zip(seconds_by_side[n], early, strict=True)] for n in (LATE, AGAIN)},
    )
    for name, seconds in seconds_by_side.items():
        ratio = median(seconds) / median(seconds_by_side[EARLY])
        ratios = [s / base for s, base in zip(seconds, seconds_by_side[EARLY], strict=True)]
        goals, verdict = "", ""
        if name == LATE:
            goals = f"{BAR:>7g}{STRETCH:>9g}"
            verdict = "stretch met" if ratio <= STRETCH else "met" if ratio <= BAR else "MISSED"
        print(
            f"{name:<16}{spread(seconds):>24}{f'{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})':>24}{goals} "
            f" {verdict}"
        )


def spread(values: list[float]) -> str:
    """Formats median and range."""
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> None:
    """Measures all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=list(SIDES), help="one place, to look into it")
    options = parser.parse_args()
    # The reading processes must stay alive between two samples.
    os.environ |= {"PYTHONPATH": str(ROOT), "RAY_idle_worker_killing_time_threshold_ms": "3600000"}
    torch.set_num_threads(1)
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(Path(folder))
            # These reads start the reading processes.
            for fraction in (0.5, 0.5):
                first_batch_s(job, fraction)
            names = [options.only] if options.only else list(SIDES)
            seconds_by_side: dict[str, list[float]] = {name: [] for name in names}
            for number in range(options.rounds):
                for name in names if number % 2 == 0 else reversed(names):
                    seconds_by_side[name].append(median(first_batch_s(job, SIDES[name]) for _ in range(3)))
                    print(
                        f"  round {number + 1}/{options.rounds} {name}: {seconds_by_side[name][-1]:.3f} s",
                        file=sys.stderr,
                        flush=True,
                    )
        if not options.only:
            report(seconds_by_side)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
