"""Compares this checkout with another one, for example with a commit from before a change.

Each side is a process in its checkout, which calls the benchmarks there; the sides alternate, and the other checkout is
measured twice for the null.

git worktree add /tmp/before COMMIT
python benchmarks/two_checkouts.py /tmp/before            # needs a quiet machine; about 25 minutes
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Sample, alternate, report, run_side

_STEP = """
import logging, sys, tempfile
from pathlib import Path
import ray
from benchmarks.{module} import Ours
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
with tempfile.TemporaryDirectory() as folder:
    sample = Ours(Path(folder)).measure("{argument}")
ray.shutdown()
print(sample.wall_ms, sample.cpu_ms)
"""
_START = """
import subprocess, sys, tempfile
from pathlib import Path
from benchmarks.start import run
with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "ray_app", "ingest", "--source", "digits", "--out", f"{folder}/digits"]
    subprocess.run(command, check=True, capture_output=True)
    run(Path(folder), "ddp")
    sample = run(Path(folder), "ddp")
print(sample.first_s * 1e3, sample.cpu_s * 1e3)
"""
_KILL = """
from benchmarks.recovery import measure
measured = measure("ours", "kill")
if "error" in measured:
    raise SystemExit(measured["error"])
print(measured["next_s"] * 1e3, measured["next_s"] * 1e3)
"""
FIGURES = {
    "small step, cache: memory": _STEP.format(module="small_step", argument="memory"),
    "small step, cache: none": _STEP.format(module="small_step", argument="none"),
    "step of ResNet-18, reduction: exact": _STEP.format(module="ddp_step", argument="exact"),
    "from the command to the first step": _START,
    "from SIGKILL of a worker to the next step": _KILL,
}


def measure(checkout: Path, code: str) -> Sample:
    """Runs the code of one figure in a checkout."""
    return run_side([sys.executable, "-c", f"import os; os.chdir({str(checkout)!r})\n{code}"], checkout)


def main() -> None:
    """Measures all figures, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(FIGURES), action="append")
    options = parser.parse_args()
    for name in ("RAY_ADDRESS", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"):
        os.environ.pop(name, None)
    for figure in options.only or FIGURES:
        code = FIGURES[figure]
        sides: dict[str, Callable[[], Sample]] = {
            "other": partial(measure, options.other.resolve(), code),
            "this": partial(measure, ROOT, code),
        }
        report(f"Milliseconds {figure}", alternate(sides, options.rounds), {})


if __name__ == "__main__":
    main()
