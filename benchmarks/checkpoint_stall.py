"""The cost of a checkpoint for the training: the stall of the step that makes it, and the throughput with one every 20
steps.

One process, one thread of computation, the real loop, step log, writer and store, on the disk of the temporary folder.
The state is that of a 784-4096-4096-10 network with Adam, 240 MB. The other side writes the same state with
`torch.save` and fsync between two steps.

python benchmarks/checkpoint_stall.py --rounds 5     # about 12 minutes

The stall is the time by which the step after a checkpoint exceeds the median step: the call, and any other delay of
the next step. Throughput is measured over whole periods of 20 steps, so it includes the cost of the background
writing. Periods with a checkpoint in their middle and periods without alternate within one run, since the speed of a
virtual machine drifts by more than the measured effect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.harness import NULL, ROOT, ingest_rows, scaled, store_ratios
from ray_app.config.config import Config
from ray_app.runlog.journal import read_events, read_records
from ray_app.train.job import Job
from ray_app.train.membership import SingleProcessMembership

BATCH = 64
PERIOD, PAIRS = 20, max(2, scaled(4))
FIRST = PERIOD + PERIOD // 2
LAST = FIRST + 2 * PERIOD * PAIRS
"""Steps between which throughput is measured: periods of 20 steps in turn with one checkpoint in the middle, and with
none.
"""
_LIMIT_S = 600.0
NONE = "no checkpoint"
OURS, SAVE = "ours", "torch.save + fsync"


@dataclass(frozen=True)
class Cost:
    """Measurements of one run.

    Args:
        step_ms: Median time of a step.
        throughput: Throughput of a period with a checkpoint / of the next period without; median of the pairs.
        cpu: CPU time of the whole process, as a ratio in the same way.
        stall_ms: Median stall of a checkpoint; 0 without checkpoints.
        call_ms: Part of the stall inside the call that makes the checkpoint.
        write_ms: Median time of the background writing.
    """

    step_ms: float
    throughput: float
    cpu: float
    stall_ms: float = 0.0
    call_ms: float = 0.0
    write_ms: float = 0.0


class Periods:
    """A hook that notes wall and CPU time at the ends of the periods, and calls a function in the middle of every
    second one.

    Args:
        act: The function.
    """

    def __init__(self, act: Callable[[], object] | None) -> None:
        self._act = act
        self.act_ms: list[float] = []
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def __call__(self, rank: int, step: int) -> None:
        """Called after every step."""
        del rank
        if FIRST <= step <= LAST and (step - FIRST) % PERIOD == 0:
            self.wall_s.append(time.perf_counter())
            self.cpu_s.append(time.process_time())
        if self._act is not None and step % (2 * PERIOD) == 0:
            began = time.perf_counter()
            self._act()
            self.act_ms.append((time.perf_counter() - began) * 1e3)


def make_config(folder: Path, every: int | None) -> Config:
    """Returns the configuration of the run."""
    from ray_app import load_config

    return load_config(
        ROOT / "conf" / "mnist_dense.yaml",
        task__init_args__features=None,
        task__init_args__hidden=[4096, 4096],
        run__storage_path=str(folder / "runs"),
        run__name="run",
        data__path=str(folder / "rows"),
        data__eval_path=None,
        data__global_batch_size=BATCH,
        train__epochs=LAST // PERIOD + 1,
        train__max_steps=LAST + 1,
        checkpoint__every_steps=every,
        checkpoint__every_epochs=None,
        tracking__enabled=False,
    )


def make_saver(job: Job, folder: Path) -> Callable[[], None]:
    """Returns a function that stores a state like that of the run by `torch.save` and fsync."""
    from ray_app.train.state.state import TrainingState

    state = TrainingState(job.config, job.task, torch.device("cpu"), job.total_steps)
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()

    def save() -> None:
        with (folder / "state.pt").open("wb") as file:
            torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    return save


def run_side(name: str, folder: Path) -> Cost:
    """Runs one side in this process."""
    from ray_app.data.reader import fetch_in_process, load_all
    from ray_app.data.windows import CachedWindows
    from ray_app.preflight.prepare import claim, prepare
    from ray_app.runlog.lease import acquire_lease
    from ray_app.train.context import WorkerContext
    from ray_app.train.job import Hooks
    from ray_app.train.loop import train

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (BATCH * PERIOD, 28, 28), dtype=np.uint8)
    ingest_rows(folder, pixels, generator.integers(0, 10, BATCH * PERIOD))
    prepared = prepare(make_config(folder, 2 * PERIOD if name == OURS else None))
    with acquire_lease(prepared.job.paths) as lease:
        job = claim(prepared, lease.fence).job
        windows = CachedWindows(load_all(fetch_in_process, job.source))
        hook = Periods(make_saver(job, folder) if name == SAVE else None)
        membership, hooks = SingleProcessMembership(1, lambda: False), Hooks(after_step=hook)
        train(WorkerContext(job, membership, lambda job, cursor, assigned: windows, torch.device("cpu"), hooks))
    records, _ = read_records(job.paths)
    steps = {step: record.step_ms for step, record in records.items() if FIRST < step <= LAST}
    throughput, cpu = 1 / median_ratio(hook.wall_s), median_ratio(hook.cpu_s)
    plain = median(ms for step, ms in steps.items() if step % (2 * PERIOD) != 1)
    if name == NONE:
        return Cost(plain, throughput, cpu)
    stall = median(ms for step, ms in steps.items() if step % (2 * PERIOD) == 1) - plain
    if name == SAVE:
        return Cost(plain, throughput, cpu, stall, median(hook.act_ms), 0.0)
    calls = read_events(job.paths, "worker_exit")[0].details["stalls_ms"][:-1]
    writes = [e.details["duration_s"] * 1e3 for e in read_events(job.paths, "checkpointed")][:-1]
    return Cost(plain, throughput, cpu, stall, median(calls), median(writes))


def median_ratio(ends: list[float]) -> float:
    """Returns the median over the pairs of periods: the first period's length / the second's."""
    lengths = [high - low for low, high in pairwise(ends)]
    return median(a / b for a, b in zip(lengths[::2], lengths[1::2], strict=True))


def measure(name: str) -> Cost:
    """Runs one side in another process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--side", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return Cost(**json.loads(done.stdout.strip().splitlines()[-1]))


def report(costs_by_side: dict[str, list[Cost]]) -> None:
    """Prints the table."""
    machine = platform.processor() or platform.machine()
    print(
        f"\n{machine}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {len(costs_by_side[NONE])} rounds; medians"
        f" (range)"
    )
    print(
        f"{'side':<24}{'step ms':>24}{'throughput':>24}{'CPU':>24}{'stall ms':>24}{'of it, call ms':>24}{'write ms':>24}"  # noqa: E501
    )
    for name, costs in costs_by_side.items():
        columns = [spread([getattr(cost, field) for cost in costs]) for field in Cost.__dataclass_fields__]
        print(f"{name:<24}" + "".join(f"{column:>24}" for column in columns))
    print(f"\n{'figure':<50}{'value':>24}{'bar':>8}{'stretch':>9}")
    stalls = [ours.stall_ms / save.call_ms for ours, save in zip(costs_by_side[OURS], costs_by_side[SAVE], strict=True)]
    print_bar(
        "stall of a checkpoint / torch.save + fsync", stalls, 0.08, 0.05, median(stalls) <= 0.08, median(stalls) <= 0.05
    )
    through = [ours.throughput for ours in costs_by_side[OURS]]
    store_ratios("stall of a checkpoint", SAVE, {OURS: stalls})
    slower = {name: [1 / cost.throughput for cost in costs] for name, costs in costs_by_side.items()}
    store_ratios("time with a checkpoint every 20 steps", NONE, {OURS: slower[OURS], f"{NONE} {NULL}": slower[NONE]})
    print_bar(
        "throughput, a checkpoint every 20 steps / none",
        through,
        0.95,
        0.965,
        median(through) >= 0.95,
        median(through) >= 0.965,
    )
    print(f"{'null: throughput, none / none':<50}{spread([none.throughput for none in costs_by_side[NONE]]):>24}")
    print(f"{'CPU, a checkpoint every 20 steps / none':<50}{spread([ours.cpu for ours in costs_by_side[OURS]]):>24}")


def print_bar(title: str, values: list[float], bar: float, stretch: float, met: bool, stretch_met: bool) -> None:
    """Prints one measurement with its bars."""
    verdict = "stretch met" if stretch_met else "met" if met else "MISSED"
    print(f"{title:<50}{spread(values):>24}{bar:>8.3g}{stretch:>9.3g}  {verdict}")


def spread(values: list[float]) -> str:
    """Formats median and range."""
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> None:
    """Measures all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=[NONE, OURS, SAVE], help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=[NONE, OURS, SAVE], help="one side, to look into it")
    options = parser.parse_args()
    if options.side:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(vars(run_side(options.side, Path(folder)))))
        return
    sides = [options.only] if options.only else [NONE, OURS, SAVE]
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in sides:
            costs[name].append(measure(name))
            print(f"  round {number + 1}/{options.rounds} {name}: {costs[name][-1]}", file=sys.stderr, flush=True)
    if not options.only:
        report(costs)


if __name__ == "__main__":
    main()
