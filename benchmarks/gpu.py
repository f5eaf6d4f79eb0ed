"""All checks and measurements that need a GPU, on one GPU, within eight minutes; with two or more also NCCL.

make gpu                     # or: python benchmarks/gpu.py
make gpu DEVICE=cpu          # a dry run: small sizes, a few minutes; the measurements say nothing

Needs the requirements of the application, but no network and no MLflow. Prints a table in Markdown, and writes it as
JSON after every line, into the folder `$OUT` if that is set. A line that fails reports the error, with the end of its
traceback on stderr, and the others continue, unless it is the line "start": all others would fail for the same reason.
Lines for which no time was left are listed. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
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

from benchmarks import gpu_cluster, gpu_digests, gpu_speed, gpu_start
from benchmarks.gpu_lines import HEAD, Line, Result, as_json, look_at
from benchmarks.gpu_workers import Bench
from benchmarks.harness import ROOT
from ray_app.task import environment

TOTAL_S, GRACE_S = 455.0, 25.0
ORDER = (
    # The most informative lines come first; lines that are slow without a warm cache come last.
    "names of libraries",
    "start: two steps, a checkpoint between them",
    "NCCL, a group of one",
    "NCCL, buckets of a group of one",
    "bits: ResNet-18, batch-norm",
    "bits: transformer, dropout",
    "bits: capture",
    "bits: ResNet-18, bf16, channels last",
    "bits: ResNet-18 on a device that is nearly full",
    "bits: checkpoint, resume at another W",
    "bits: NCCL, a GPU each",
    "SIGKILL of a worker, in place",
    "Ray: SIGKILL to the next step",
    "copies: host to device, device to host",
    "an error of the device in a child",
    "ResNet-50, bf16, channels last, batch 256, in memory: images/s / bare loop as a CUDA graph",
    "small step: captured / eager",
    "profile of a step: kernels, gaps",
    "bits: detection, RoIAlign",
    "bits: ResNet-18, fp16",
    "memory: exact at W = L / torch's DDP",
    "stall of a checkpoint with 1 GB of state",
    "step on 2 workers: exact, overlapped / plain DDP",
    "NCCL: overlap of the reduction in a profile",
    "bits: fsdp",
    "bits: fsdp, cpu_offload",
    "bits: central_storage",
    "bits: local_sgd, 2 local steps",
    "bits: parameter_server",
    "bits: transformer, bf16",
    "memory of each strategy",
    "recipe of CIFAR-10's size: s per epoch",
    "bits: transformer, compile",
    "the same, fed from Parquet",
)
_ALL = [*gpu_start.LINES, *gpu_digests.LINES, *gpu_cluster.LINES, *gpu_speed.LINES]
LINES: list[Line] = sorted(_ALL, key=lambda line: ORDER.index(line.name))


def describe(device: str) -> dict[str, Any]:
    """Returns facts about the machine and the libraries."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"no GPU, {os.cpu_count()} cores {platform.machine()}"
    facts = {"device": name, "torch": torch.__version__, "ray": ray.__version__, "date": time.strftime("%Y-%m-%d")}
    if device == "cuda":
        described = environment.describe(torch.device("cuda", 0))
        facts |= {
            "gpus": torch.cuda.device_count(),
            "driver": _smi(),
            **{name: described[name] for name in ("cuda", "cudnn", "nccl")},
        }
    return facts


def _smi() -> str:
    """Returns the output of nvidia-smi about the GPUs, or its error."""
    command = [
        "nvidia-smi",
        "--query-gpu=driver_version,memory.total,memory.used,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join(done.stdout.split("\n")).strip("; ")


class Table:
    """The results so far, printed line by line; it ends the process if a line does not end."""

    def __init__(self, machine: dict[str, Any], out: Path) -> None:
        self._machine, self._out = machine, out
        self.results = list[Result]()
        print(", ".join(f"{name}: {value}" for name, value in machine.items()) + f"\n\n{HEAD}", flush=True)

    def tell(self, result: Result) -> None:
        """Adds a line to the table and to the file; its traceback goes to stderr."""
        self.results.append(result)
        # The process may be killed before its end.
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(as_json(self._machine, self.results), indent=1) + "\n")
        print(result.row(), flush=True)
        if result.trace:
            print("\n".join(f"    {line}" for line in result.trace.splitlines()), file=sys.stderr, flush=True)

    def end(self) -> int:
        """Prints what has failed; returns the exit code."""
        failed = [result.name for result in self.results if result.status == "failed"]
        print(
            f"\n{len(self.results)} lines in {self._out}; "
            + (f"failed: {', '.join(failed)}" if failed else "no check failed"),
            flush=True,
        )
        return 1 if failed else 0

    def give_up(self, lines: list[Line]) -> None:
        """Ends the process and its children, since a line does not end."""
        for line in lines[len(self.results) :]:
            self.tell(Result(line.name, line.bar, "failed", "it, or one before it, could not be ended in time", 0, {}))
        self.end()
        for process in psutil.Process().children(recursive=True):
            process.kill()
        os._exit(1)


def main() -> int:
    """Runs all lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="seconds after which lines are left out")
    parser.add_argument("--out", type=Path, help="the JSON file; default: NAME-OF-THE-GPU.json in $OUT or build/gpu")
    parser.add_argument("--only", default="", help="lines whose name holds this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no GPU here that this PyTorch can use. A dry run: make gpu DEVICE=cpu")
    machine = describe(options.device)
    lines = [line for line in LINES if options.only in line.name]
    name = re.sub(r"[^A-Za-z0-9]+", "-", machine["device"])
    out = options.out or Path(os.environ.get("OUT") or ROOT / "build" / "gpu") / f"{name}.json"
    table = Table(machine, out)
    last = threading.Timer(options.total_s + GRACE_S, table.give_up, [lines])
    last.daemon = True
    last.start()
    with tempfile.TemporaryDirectory(prefix="ray_app-gpu-", ignore_cleanup_errors=True) as folder:
        # In a new folder, incomplete files of a killed process are not read.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        look_at(lines, Bench(options.device, Path(folder)), options.total_s, table.tell)
    return table.end()


if __name__ == "__main__":
    sys.exit(main())
