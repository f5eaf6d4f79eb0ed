"""Everything that only a GPU can show, on one GPU, within nine minutes; with two or more also what NCCL does.

make gpu                     # or: python benchmarks/gpu.py
make gpu DEVICE=cpu          # that it runs: small sizes, a few minutes; the figures say nothing

Needs what the application needs, but no network and no MLflow. Prints a table in Markdown, for docs/gpu.md, and writes it as JSON. A line
that fails says what failed, and the others go on; lines for which no time was left are named. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import ray
import torch

from benchmarks import gpu_cluster, gpu_digests, gpu_speed
from benchmarks.gpu_lines import HEAD, Line, Result, as_json, look_at
from benchmarks.gpu_workers import Bench
from benchmarks.harness import ROOT
from ray_app.task.environment import driver_version

TOTAL_S, GRACE_S = 500.0, 25.0
LINES: list[Line] = [*gpu_digests.LINES, *gpu_cluster.LINES, *gpu_speed.LINES]


def describe(device: str) -> dict[str, Any]:
    """The machine and what computes."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"no GPU, {os.cpu_count()} cores {platform.machine()}"
    found = {"device": name, "torch": torch.__version__, "ray": ray.__version__, "date": time.strftime("%Y-%m-%d")}
    if device == "cuda":
        found |= {"cuda": f"{torch.version.cuda}, driver for {driver_version()}", "gpus": torch.cuda.device_count()}
    return found


class Table:
    """What is known so far, printed line by line; it ends the process if a line would not end."""

    def __init__(self, machine: dict[str, Any], out: Path) -> None:
        self._machine, self._out, self.results = machine, out, list[Result]()
        print(", ".join(f"{name}: {value}" for name, value in machine.items()) + f"\n\n{HEAD}", flush=True)

    def tell(self, result: Result) -> None:
        """Adds a line."""
        self.results.append(result)
        print(result.row(), flush=True)

    def end(self) -> int:
        """Writes the file; returns the exit code."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(as_json(self._machine, self.results), indent=1) + "\n")
        failed = [result.name for result in self.results if result.status == "failed"]
        print(
            f"\n{len(self.results)} lines in {self._out}; " + (f"failed: {', '.join(failed)}" if failed else "no check failed"), flush=True
        )
        return 1 if failed else 0

    def give_up(self, lines: list[Line]) -> None:
        """Ends the process and what it started, since a line would not end."""
        for line in lines[len(self.results) :]:
            self.tell(Result(line.name, line.bar, "failed", "it, or one before it, could not be ended in time", 0, {}))
        self.end()
        for process in psutil.Process().children(recursive=True):
            process.kill()
        os._exit(1)


def main() -> int:
    """Looks at all lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="seconds after which lines are left out")
    parser.add_argument("--out", type=Path, help="the JSON file; not given: build/gpu/NAME-OF-THE-GPU.json")
    parser.add_argument("--only", default="", help="lines whose name holds this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no GPU here that this PyTorch can use. A dry run: make gpu DEVICE=cpu")
    machine = describe(options.device)
    lines = [line for line in LINES if options.only in line.name]
    out = options.out or ROOT / "build" / "gpu" / f"{re.sub(r'[^A-Za-z0-9]+', '-', machine['device'])}.json"
    table = Table(machine, out)
    last = threading.Timer(options.total_s + GRACE_S, table.give_up, [lines])
    last.daemon = True
    last.start()
    with tempfile.TemporaryDirectory(prefix="ray_app-gpu-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"  # what a process that was killed left half written is not read
        look_at(lines, Bench(options.device, Path(folder)), options.total_s, table.tell)
    return table.end()


if __name__ == "__main__":
    sys.exit(main())
