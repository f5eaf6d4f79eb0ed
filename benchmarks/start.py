"""Time from a command to its first step and to its end, against the minimum that Ray needs for two actors with torch.

The minimum is a script: it imports Ray and torch and starts a cluster, two actors that import torch answer, the cluster
ends. A run is one step of conf/digits.yaml with two workers, without evaluator and tracking; `single` is the same in
the calling process. The minimum is measured twice for the null.

python benchmarks/start.py --rounds 5      # about 4 minutes
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT
from ray_app.runlog.history import read_steps
from ray_app.runlog.paths import RunPaths

BASELINE, AGAIN = "the least of Ray", "the least again"
RUN, SINGLE = "two workers", "single"
BARS = {RUN: "1.25", SINGLE: "4 s"}
_BASELINE_SCRIPT = """
import time, ray, torch
ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
@ray.remote(num_cpus=1)
class Actor:
    def ready(self):
        import torch
        return torch.ones(1).item()
ray.get([actor.ready.remote() for actor in [Actor.remote(), Actor.remote()]])
print(time.time(), flush=True)
ray.shutdown()
"""


class Sample(NamedTuple):
    """Seconds since the command was typed.

    Args:
        first_s: Seconds until the first step is done, or the actors answer.
        end_s: Seconds until the command has ended.
        cpu_s: CPU seconds of the command and of the processes that it waited for.
    """

    first_s: float
    end_s: float
    cpu_s: float


def timed(command: list[str], first: Callable[[str], float]) -> Sample:
    """Runs a command; `first` returns the time of the first step from its output."""
    began, before = time.time(), getrusage(RUSAGE_CHILDREN)
    # Modules are compiled before, like installed ones.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    ended, after = time.time(), getrusage(RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(first(done.stdout) - began, ended - began, cpu_s)


def run(folder: Path, strategy: str) -> Sample:
    """Runs one step of conf/digits.yaml."""
    fields = {"storage_path": folder, "name": f"{time.time_ns()}"}
    command = [
        sys.executable,
        "-m",
        "ray_app",
        "train",
        "--config",
        "conf/digits.yaml",
        "--data.path",
        f"{folder}/digits/train",
    ]
    command += [f"--run.{name}={value}" for name, value in fields.items()]
    command += [
        "--data.eval_path=null",
        "--train.max_steps=1",
        "--tracking.enabled=false",
        f"--train.strategy={strategy}",
    ]
    return timed(command, lambda _: read_steps(RunPaths(folder / str(fields["name"]))).records[0].time_s)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ingested = [sys.executable, "-m", "ray_app", "ingest", "--source", "digits", "--out", f"{folder}/digits"]
        subprocess.run(ingested, check=True, capture_output=True, cwd=ROOT)
        measure_baseline = lambda: timed([sys.executable, "-c", _BASELINE_SCRIPT], float)  # noqa: E731
        sides: dict[str, Callable[[], Sample]] = {
            BASELINE: measure_baseline,
            RUN: lambda: run(folder, "ddp"),
            SINGLE: lambda: run(folder, "single"),
            AGAIN: measure_baseline,
        }
        samples_by_side: dict[str, list[Sample]] = {side: [] for side in sides}
        for number in range(rounds):
            for side, measure in sides.items():
                samples_by_side[side].append(measure())
                print(f"  round {number + 1}/{rounds} {side}: {samples_by_side[side][-1]}", file=sys.stderr, flush=True)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {rounds}"
        f" rounds"
    )
    print(
        f"{'side':<20}{'first step s':>22}{'end s':>22}{'CPU s':>22}{'first / least':>24}{'end / least':>24}{'bar':>6}"
    )
    for side, samples in samples_by_side.items():
        pairs = list(zip(samples, samples_by_side[BASELINE], strict=True))
        columns = [spread([getattr(s, part) for s in samples], 1) for part in Sample._fields]
        columns += [spread([getattr(s, part) / getattr(b, part) for s, b in pairs], 2) for part in ("first_s", "end_s")]
        print(
            f"{side:<20}"
            + "".join(f"{c:>{22 if i < 3 else 24}}" for i, c in enumerate(columns))
            + f"{BARS.get(side, ''):>6}"
        )


def spread(values: list[float], digits: int) -> str:
    """Formats median and range."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
