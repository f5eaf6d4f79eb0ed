"""The method of the benchmarks: both sides in one run, alternating, several rounds, with a side measured against itself
as the null.

A ratio counts as below a bar when it is below by more than the null's spread; where wall time is too noisy, CPU seconds
decide.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RATIOS_FILE = "RAY_APP_BENCHMARK_RATIOS"
"""The environment variable with the file to which `report` appends a line of JSON for each table."""
QUICK = "RAY_APP_BENCHMARK_QUICK"
"""The environment variable that `all.py --quick` sets: a third of the steps."""
NULL = "again"
"""The last word of the name of the side that measures the base a second time."""


def scaled(count: int) -> int:
    """Returns a number of steps or rows, or a third of it in a quick measurement."""
    return count // 3 if QUICK in os.environ else count


@dataclass(frozen=True)
class Sample:
    """One measurement of one side.

    Args:
        wall_ms: Wall milliseconds per step.
        cpu_ms: CPU milliseconds per step of the processes that compute.
    """

    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Stopwatch:
    """A hook for `Hooks.after_step` that notes wall and CPU time of a worker at two steps; pickled to the worker.

    Args:
        path: Beginning of the names of the files with the readings of each rank.
        first: Number of finished steps at which it starts.
        last: Number of finished steps at which it stops.
    """

    path: str
    first: int
    last: int

    def __call__(self, rank: int, step: int) -> None:
        """Notes the time."""
        if step in (self.first, self.last):
            reading = {"step": step, "wall_s": time.perf_counter(), "cpu_s": time.process_time()}
            Path(f"{self.path}-{rank}-{step}").write_text(json.dumps(reading))

    def sample(self, ranks: int = 1) -> Sample:
        """Returns the sample between the two steps: wall time of rank 0, CPU time of all ranks."""
        walls, cpus = [], []
        for rank in range(ranks):
            start, end = (
                json.loads(Path(f"{self.path}-{rank}-{step}").read_text()) for step in (self.first, self.last)
            )
            steps = self.last - self.first
            walls.append((end["wall_s"] - start["wall_s"]) / steps * 1e3)
            cpus.append((end["cpu_s"] - start["cpu_s"]) / steps * 1e3)
        return Sample(walls[0], sum(cpus))


def ingest_rows(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Makes the data set `folder/rows` of images and labels."""
    from ray_app.ingest.ingest import IngestOptions, ingest

    np.savez(folder / "rows.npz", x=pixels, y=labels)
    ingest(IngestOptions(source="numpy", input=str(folder / "rows.npz"), out=str(folder / "rows")))


def run_side(command: Sequence[str], root: Path = ROOT) -> Sample:
    """Runs a side of the checkout `root` in another process; its last line of output is `wall_ms cpu_ms`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    wall, cpu = done.stdout.strip().splitlines()[-1].split()
    return Sample(float(wall), float(cpu))


def alternate(sides: dict[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Measures all sides in turn, `rounds` times; the first is the base, and is measured twice for the null."""
    base = next(iter(sides))
    order = {**sides, f"{base} {NULL}": sides[base]}
    samples: dict[str, list[Sample]] = {name: [] for name in order}
    for number in range(rounds):
        for name, measure in order.items():
            samples[name].append(measure())
            print(
                f"  round {number + 1}/{rounds} {name}: {samples[name][-1].wall_ms:.3f} ms", file=sys.stderr, flush=True
            )
    return samples


def report(title: str, samples_by_side: dict[str, list[Sample]], bars: dict[str, float]) -> None:
    """Prints medians, ranges and ratios to the base, computed per round, and the bars; see `RATIOS_FILE`."""
    base = next(iter(samples_by_side))
    print(f"\n{title}")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')},"
        f" {len(samples_by_side[base])} rounds"
    )
    print(f"{'side':<26}{'wall ms':>24}{'CPU ms':>24}{'wall / base':>24}{'CPU / base':>24}{'bar':>7}")
    ratios: dict[str, dict[str, list[float]]] = {}
    for name, samples in samples_by_side.items():
        walls = [s.wall_ms / b.wall_ms for s, b in zip(samples, samples_by_side[base], strict=True)]
        cpus = [s.cpu_ms / b.cpu_ms for s, b in zip(samples, samples_by_side[base], strict=True)]
        ratios[name] = {"wall": walls, "cpu": cpus}
        columns = [
            _spread([s.wall_ms for s in samples]),
            _spread([s.cpu_ms for s in samples]),
            _spread(walls),
            _spread(cpus),
        ]
        bar = f"{bars[name]:.2f}" if name in bars else ""
        print(f"{name:<26}" + "".join(f" {column:>23}" for column in columns) + f"{bar:>7}")
    _store(title, base, ratios, bars)


def store_ratios(title: str, base: str, ratios_by_side: dict[str, list[float]]) -> None:
    """Stores ratios of wall time by side, which a benchmark prints in a table of its own; see `RATIOS_FILE`."""
    _store(title, base, {side: {"wall": ratios, "cpu": ratios} for side, ratios in ratios_by_side.items()}, {})


def _store(title: str, base: str, ratios: dict[str, dict[str, list[float]]], bars: dict[str, float]) -> None:
    if path := os.environ.get(RATIOS_FILE):
        with open(path, "a") as file:
            file.write(json.dumps({"title": title, "base": base, "ratios": ratios, "bars": bars}) + "\n")


def _spread(values: list[float]) -> str:
    digits = 3 if max(values) < 1000 else 0
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
