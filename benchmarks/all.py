"""Measures all ratios of docs/figures.md that need no GPU, one benchmark after the other, and stores them in a file.

python benchmarks/all.py --quick --out before.json     # few rounds and steps; about 20 minutes on two cores
python benchmarks/all.py --out ratios.json             # the rounds of docs/figures.md; about three hours
python benchmarks/compare.py before.json ratios.json

The machine must be quiet. A benchmark that fails is named at the end, and the others run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import QUICK, RATIOS_FILE, ROOT

BENCHMARKS: dict[str, tuple[list[str], list[str]]] = {
    "small_step.py": (["--rounds", "5"], ["--rounds", "1"]),
    "model_steps.py": ([], ["--rounds", "1", "--model", "gru", "--model", "table"]),
    "keras_fit.py": (["--rounds", "5"], ["--rounds", "1"]),
    "ddp_step.py": (["--rounds", "5"], ["--rounds", "1"]),
    "ddp_step.py --strategy fsdp": (["--rounds", "5"], ["--rounds", "1"]),
    "start.py": (["--rounds", "5"], ["--rounds", "1", "--parts", "command"]),
    "images.py": ([], []),
    "input.py": ([], ["--tiny"]),
    "ingest.py": ([], ["--tiny"]),
    "tracking.py": (["--rounds", "5"], ["--rounds", "1"]),
    "evaluator.py": (["--rounds", "3"], ["--rounds", "1"]),
    "checkpoint_stall.py": (["--rounds", "5"], ["--rounds", "1"]),
    "resume.py": (["--rounds", "9"], ["--rounds", "1"]),
    "recovery.py": ([], ["--only", "kill", "--rounds", "1", "--without", "torchrun"]),
    "strategies.py": ([], ["--tiny", "--models", "small"]),
    "tune.py": ([], ["--quick", "--rounds", "1"]),
    "long_run.py": (["--rounds", "3"], ["--steps", "20000", "--rounds", "1"]),
}
"""The further arguments of a whole measurement, and of a quick one, by benchmark."""


def main() -> None:
    """Runs the benchmarks; the exit code is 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and rows")
    parser.add_argument("--out", type=Path, required=True, help="file for the ratios, one line of JSON for each table")
    parser.add_argument("--only", choices=list(BENCHMARKS), action="append")
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"{options.out} exists. Remove it, or name another file.")
    environment = os.environ | {RATIOS_FILE: str(options.out.resolve())} | ({QUICK: "1"} if options.quick else {})
    failed, first_start = [], time.monotonic()
    for name in options.only or BENCHMARKS:
        whole, quick = BENCHMARKS[name]
        file, *arguments = name.split()
        command = [sys.executable, str(ROOT / "benchmarks" / file), *arguments, *(quick if options.quick else whole)]
        start = time.monotonic()
        print(f"== {name}", flush=True)
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
        now = time.monotonic()
        print(f"== {name}: {now - start:.0f} s, {now - first_start:.0f} s in all", flush=True)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
