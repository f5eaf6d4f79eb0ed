"""The plan at 10^6 row groups and 10^9 rows: time and memory of an epoch's order and assignment, from an arbitrary
cursor.

python benchmarks/plan_scale.py
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from ray_app.plan.assignment import logical_workers_of
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Plan

ROW_GROUPS, FILES = 1_000_000, 10_000
ROUNDS = 5
LOGICAL_WORKERS, WORLD_SIZE = 64, 48
BATCH = 4096


def big_manifest() -> Manifest:
    """Returns a manifest of 10^6 row groups of 500 to 1,500 rows in 10^4 files, 10^9 rows in all."""
    per_file = ROW_GROUPS // FILES
    rows = 500 + (np.arange(ROW_GROUPS, dtype=np.int64) * 7919) % 1001
    rows[-1] += 1_000_000_000 - rows.sum()
    assert rows.min() > 0
    return Manifest(
        paths=tuple(f"part-{i:05d}.parquet" for i in range(FILES)),
        file_of=np.repeat(np.arange(FILES, dtype=np.int64), per_file),
        index_in_file=np.tile(np.arange(per_file, dtype=np.int64), FILES),
        rows=rows,
    )


def measure(fraction: float) -> tuple[float, float]:
    """Returns seconds and peak megabytes of making an epoch's order and the next two windows of every logical worker of
    one rank.
    """
    manifest = big_manifest()
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    plan = Plan(manifest, 1, LOGICAL_WORKERS, BATCH, 10_000)
    order = plan.epoch(3)
    window = int(fraction * (plan.windows_per_epoch - 2))
    for v in logical_workers_of(5, WORLD_SIZE, LOGICAL_WORKERS):
        for w in (window, window + 1):
            assert len(order.stored_positions(v, w)[order.window_order(v, w)]) > 0
    elapsed_s = time.perf_counter() - began
    return elapsed_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mb


def main() -> None:
    """Prints time and memory for cursors at the start, at 50 % and at 99 % of the epoch, and the start again as the
    null.
    """
    context = multiprocessing.get_context("spawn")
    cursors = {"start": 0.0, "50 %": 0.5, "99 %": 0.99, "start again": 0.0}
    measurements: dict[str, list[tuple[float, float]]] = {name: [] for name in cursors}
    for _ in range(ROUNDS):
        for name, fraction in cursors.items():
            with context.Pool(1) as pool:
                measurements[name].append(pool.apply(measure, (fraction,)))
    print(
        f"{ROW_GROUPS:,} row groups, 1,000,000,000 rows, {LOGICAL_WORKERS} logical workers, {ROUNDS} rounds; bars: 5 s,"
        f" 1,000 MB"
    )
    for name, samples in measurements.items():
        seconds, megabytes = [s for s, _ in samples], [m for _, m in samples]
        print(
            f"cursor at {name:<12} {median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f}),"
            f" {median(megabytes):.0f} MB more"
        )


if __name__ == "__main__":
    main()
