"""Every strategy next to `ddp`: step time, and memory of each worker, with the same model, rows, logical workers and
global batch.

python benchmarks/strategies.py            # needs a quiet machine; about 20 minutes
python benchmarks/strategies.py --tiny     # a smoke test of two minutes; the measurements say nothing
python benchmarks/strategies.py --gpu      # one GPU per worker: memory is the peak allocated by CUDA

Two workers of one thread, two logical workers, 64 rows of the digits per step, cached in memory; `parameter_server` has
two additional servers on the same cores. `small` is the network of conf/digits.yaml, `medium` a dense one of 12.7
million parameters (51 MB) with Adam.

Time is taken from the run's own record; CPU time is that of the workers and servers. Memory without a GPU, in MB (10^6
bytes):

- `state`: parameters, gradients and optimizer state that would be on a device, by adding up the tensors between two
  steps;
- `tensors`: all tensors of the process at that time, including buckets and the full copies that some strategies keep;
- `peak`: the largest resident set up to the last measured step, minus that of the process before it built anything. No
  checkpoint is made before that; one costs each strategy a copy of the state.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import ray
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness import ROOT, Sample, alternate, report
from ray_app import load_config, run_training
from ray_app.config.config import Config
from ray_app.driver.run import Faults
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks
from ray_app.train.state.state import TrainingState
from ray_app.train.strategies.parameter_server.actors import server_names
from ray_app.train.strategies.parameter_server.layout import Layout

WORKERS, SERVERS = 2, 2
ROUND = 8
_SERVED: dict[str, Any] = {"train__strategy": "parameter_server", "train__servers": SERVERS}
SIDES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, overlapped": {"train__reduction": "overlapped"},
    "single": {"train__strategy": "single", "scaling__min_workers": 1, "scaling__max_workers": 1},
    "local_sgd, H = 1": {"train__strategy": "local_sgd"},
    f"local_sgd, H = {ROUND}": {"train__strategy": "local_sgd", "train__local_steps": ROUND},
    "parameter_server, 0": _SERVED,
    "parameter_server, 4": _SERVED | {"train__staleness": 4},
    "fsdp": {"train__strategy": "fsdp"},
    "fsdp, overlapped": {"train__strategy": "fsdp", "train__reduction": "overlapped"},
    "central_storage": {"train__strategy": "central_storage"},
}
"""Settings of each side; the number behind `parameter_server` is its staleness."""


@dataclass(frozen=True)
class Model:
    """A model and the number of its steps.

    Args:
        name: Name in the tables.
        fields: Fields as for `Config.replace`.
        warm_up: Steps that are not measured.
        steps: Steps that are measured; both numbers are multiples of `ROUND`.
    """

    name: str
    fields: dict[str, Any]
    warm_up: int
    steps: int


def dense(width: int) -> dict[str, Any]:
    """Returns the fields of a model of five dense layers with Adam."""
    return {
        "task__class_path": "ray_app.task.tabular.TabularClassification",
        "task__init_args": {"features": ["image"], "scale": 16, "hidden": [width] * 4},
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.0001}},
        "schedule": None,
    }


FULL = (Model("small", {}, 160, 640), Model("medium", dense(2048), 16, 64))
TINY = (Model("small", {}, 16, 16), Model("medium", dense(512), 8, 8))


@dataclass(frozen=True)
class Memory:
    """Megabytes of one process; see the module."""

    state: float
    tensors: float
    peak: float


class Gauge:
    """A hook for `Hooks.after_step` that notes the memory and CPU time of a worker.

    The baseline is the worker's memory when the hook is unpickled, before the training builds anything.

    Args:
        path: Beginning of the names of the files that each rank writes.
        first: The step after which tensors are counted; CPU time counts from the next step.
        last: The step after which the notes are written.
        servers: Names of the parameter servers.
    """

    def __init__(self, path: str, first: int, last: int, servers: list[str]) -> None:
        self._path, self._servers = path, servers
        self._first, self._last = first, last
        self._began: tuple[int, float] | None = None
        self._tensors = (0.0, 0.0)
        self._helpers: list[tuple[int, float, float]] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        gc.collect()
        self._base = psutil.Process().memory_info().rss
        # This write resets the peak.
        Path("/proc/self/clear_refs").write_text("5")

    def __call__(self, rank: int, step: int) -> None:
        """Notes memory and CPU time at the configured steps."""
        if step == self._first:
            self._tensors = count_tensors()
            if rank == 0:
                handles = [ray.get_actor(name) for name in self._servers]
                server_notes = ray.get(
                    [handle.__ray_call__.remote(lambda self: (os.getpid(), *count_tensors())) for handle in handles]
                )
                self._helpers = list(server_notes)
        elif step > self._first and self._began is None:
            self._began = step, self._cpu_s()
        if step == self._last and self._began is not None:
            cpu_ms = (self._cpu_s() - self._began[1]) / (step - self._began[0]) * 1e3
            peak = (
                torch.cuda.max_memory_allocated()
                if torch.cuda.is_initialized()
                else peak_bytes(os.getpid()) - self._base
            )
            servers = [[state, tensors_mb, peak_bytes(pid) / 1e6] for pid, state, tensors_mb in self._helpers]
            note = {"cpu_ms": cpu_ms, "worker": [*self._tensors, peak / 1e6], "servers": servers}
            Path(f"{self._path}-{rank}").write_text(json.dumps(note))

    def _cpu_s(self) -> float:
        """Returns the CPU seconds of this process and, on rank 0, of the servers."""
        used = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *(pid for pid, _, _ in self._helpers))]
        return sum(times.user + times.system for times in used)


def peak_bytes(pid: int) -> int:
    """Returns the largest resident set of a process."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def count_tensors() -> tuple[float, float]:
    """Returns the megabytes of training state for a device, and of all tensors, in this process."""
    # The training loop freezes objects that live as long as the run.
    gc.unfreeze()
    objects = gc.get_objects()
    gc.freeze()
    states = [o for o in objects if issubclass(type(o), TrainingState)]
    parts = [[*s.model.parameters(), *(_values_of(s) if s.master is s.model else ())] for s in states]
    # The workers of parameter servers have no training state.
    parts += [o.trained for o in objects if issubclass(type(o), Layout)]
    return _megabytes(t for part in parts for t in part), _megabytes(o for o in objects if issubclass(type(o), Tensor))


def _values_of(state: TrainingState) -> list[Tensor]:
    return [v for values in state.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]


def _megabytes(tensors: Iterable[Tensor]) -> float:
    """Returns the megabytes of the storage of tensors and their gradients, each storage once; of sharded tensors, only
    the local shards.
    """
    bytes_by_storage: dict[int, int] = {}
    for tensor in tensors:
        for t in (tensor, tensor.grad if tensor.is_leaf else None):
            local = getattr(t, "_local_tensor", t)
            if local is not None and local.device.type != "meta":
                storage = local.untyped_storage()
                bytes_by_storage[storage.data_ptr()] = storage.nbytes()
    return sum(bytes_by_storage.values()) / 1e6


class Measured:
    """Runs of all sides on the connected cluster.

    Args:
        folder: Folder for data and runs.
        gpu: Whether each worker has a GPU.
    """

    def __init__(self, folder: Path, gpu: bool = False) -> None:
        self._folder, self._gpu = folder, gpu
        self._number = 0
        self.memory: dict[tuple[str, str], dict[str, Memory]] = {}
        """Memory of each process in the newest run, by model and side."""
        ingest(IngestOptions(source="digits", out=str(folder / "digits")))

    def run(self, side: str, model: Model) -> Sample:
        """Trains once; returns the time of a step."""
        self._number += 1
        name, last = f"run-{self._number}", model.warm_up + model.steps
        config = load_config(ROOT / "conf" / "digits.yaml").replace(
            **{
                "run__storage_path": str(self._folder / "runs"),
                "run__name": name,
                "data__path": str(self._folder / "digits" / "train"),
                "data__eval_path": None,
                "data__shuffle_window_rows": 200,
                "scaling__logical_workers": WORKERS,
                "scaling__min_workers": WORKERS,
                "scaling__max_workers": WORKERS,
                "scaling__gpus_per_worker": float(self._gpu),
                "train__epochs": 1000,
                "train__max_steps": last + ROUND,
                "checkpoint__every_epochs": None,
                "tracking__enabled": False,
                **model.fields,
                **SIDES[side],
            }
        )
        is_served = config.train.strategy == "parameter_server"
        servers = server_names(RunPaths(self._folder / "runs" / name), 1, SERVERS) if is_served else []
        gauge = Gauge(str(self._folder / name), model.warm_up - 1, last, servers)
        # The run has its own process, so that `single`, which trains in the calling process, begins with as little
        # memory as a worker.
        times = ray.get(ray.remote(num_cpus=0, max_calls=1)(_train).remote(config, gauge))
        workers = config.scaling.worker_limit
        wall_ms = (times[last] - times[model.warm_up]) / model.steps * 1e3
        notes = [json.loads((self._folder / f"{name}-{rank}").read_text()) for rank in range(workers)]
        used = {f"worker {rank}": Memory(*note["worker"]) for rank, note in enumerate(notes)}
        used |= {f"server {number}": Memory(*values) for number, values in enumerate(notes[0]["servers"])}
        self.memory[model.name, side] = used
        return Sample(wall_ms, sum(note["cpu_ms"] for note in notes))


def _train(config: Config, gauge: Gauge) -> dict[int, float]:
    """Trains; returns the time at which each step finished, in seconds."""
    result = run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=gauge)))
    return {record.step: record.time_s for record in result.metrics()}


def report_memory(memory: dict[tuple[str, str], dict[str, Memory]]) -> None:
    """Prints the memory of each process."""
    print(f"\n{'model':<8}{'side':<22}{'process':<12}{'state MB':>10}{'tensors MB':>12}{'peak MB':>10}")
    for (model, side), processes in memory.items():
        for name, used in processes.items():
            print(f"{model:<8}{side:<22}{name:<12}{used.state:>10.1f}{used.tensors:>12.1f}{used.peak:>10.1f}")


def main() -> None:
    """Measures all sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="only that it runs; the figures say nothing")
    parser.add_argument("--gpu", action="store_true", help="one GPU per worker")
    parser.add_argument("--models", nargs="+", choices=[m.name for m in FULL], default=[m.name for m in FULL])
    parser.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="the first one is the base"
    )
    options = parser.parse_args()
    ray.init(address="local", num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), options.gpu)
        for model in (m for m in (TINY if options.tiny else FULL) if m.name in options.models):
            sides: dict[str, Callable[[], Sample]] = {
                side: partial(measured.run, side, model) for side in options.sides
            }
            samples = alternate(sides, 1 if options.tiny else options.rounds)
            report(f"Time per step, {model.name} model, {WORKERS} workers of one thread", samples, {})
        report_memory(measured.memory)
    ray.shutdown()


if __name__ == "__main__":
    main()
