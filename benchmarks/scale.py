"""The overhead of a run with 10 to 10,000 workers: the real rendezvous, plan, reduction plan, table of statistics,
record and summary, in one process.

Workers, their clock and their network are simulated: eight workers on a node, one logical worker each, a step for each
segment of the record. CPU time is that of this process; messages and bytes are counted. `--actor` also measures the
rendezvous as an actor of Ray with real connections, and Ray's own calls.

python benchmarks/scale.py --json build/scale.json --picture docs/pictures/scale.svg      # about 3 minutes
python benchmarks/scale.py --workers 1000 --actor
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.scale_picture import draw
from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.cluster.rendezvous.server import decode_heartbeat, decode_reply, encode
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Plan
from ray_app.reduction.transport import MAX_RING_RANKS, doubling_rounds
from ray_app.reduction.world import World, plan_stages
from ray_app.runlog import journal
from ray_app.runlog.history import RecordColumns
from ray_app.runlog.journal import FLUSH_S, MAX_SMALL_FILES, StepRecord
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import list_files
from ray_app.task.losses import MetricKey
from ray_app.train.membership import Heartbeat
from ray_app.train.step import step_stats
from ray_app.train.step.step_stats import ReplicaStats, StepStats

SIZES = (10, 100, 1000, 3000, 10_000)
WORKERS_PER_NODE, LOOKS_PER_S = 8, 5
LOOKS_S = (1 + 1 / MAX_SMALL_FILES) / 10
"""Objects per second for the samples of the nodes."""
BARS = {
    "rendezvous, % of a core": 10.0,
    "forming, s of CPU": 1.0,
    "driver after 10^6 steps, MB": 500.0,
    "objects written per s": 1.0,
}


def cpu_s(act: Callable[[], Any], times: int = 1) -> float:
    """Returns the mean CPU seconds of several calls."""
    began = time.process_time()
    for _ in range(times):
        act()
    return (time.process_time() - began) / times


class SimulatedRendezvous:
    """The rendezvous and its simulated workers; each message is encoded and decoded as in the network.

    Args:
        workers: Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self.now_s = 1000.0
        self.messages, self.bytes = 0, 0
        self.rendezvous = Rendezvous(5.0, None, lambda: self.now_s)
        self.rendezvous.set_expected(workers)
        hosts = [f"10.0.{node // 250}.{node % 250}" for node in range(-(-workers // WORKERS_PER_NODE))]
        self.beats = [
            Heartbeat(f"{i:032x}", f"{i // WORKERS_PER_NODE:056x}", hosts[i // WORKERS_PER_NODE], 40000, i)
            for i in range(workers)
        ]

    def handle(self, frame: bytes) -> bytes:
        """Handles a heartbeat; returns the encoded reply."""
        answer = encode(self.rendezvous.handle_heartbeat(decode_heartbeat(frame)))
        self.messages, self.bytes = self.messages + 2, self.bytes + len(frame) + len(answer)
        return answer

    def form_generation(self) -> float:
        """Forms a generation of all workers; returns the CPU seconds of the rendezvous."""
        frames = [encode(replace_fields(beat, wait_number=1)) for beat in self.beats]
        forming_s = cpu_s(lambda: [self.handle(frame) for frame in frames])
        replies: list[bytes] = []
        forming_s += cpu_s(
            lambda: replies.extend(encode(self.rendezvous.reply_for(beat.worker)) for beat in self.beats)
        )
        self.messages, self.bytes = self.messages + len(replies), self.bytes + sum(map(len, replies))
        for i, frame in enumerate(replies):
            formed = decode_reply(frame).formed
            assert formed is not None
            self.beats[i] = replace_fields(self.beats[i], generation=1, rank=formed.rank, phase="compute")
        return forming_s

    def measure_second(self) -> tuple[float, float, float]:
        """Returns CPU seconds, messages and bytes of the rendezvous per second of a run without silent workers."""
        self.handle(encode(self.beats[0]))
        period_s = self.rendezvous._period_s
        before, seconds = (self.messages, self.bytes), max(10, round(2 * period_s))
        spent, due = 0.0, 0.0
        for tick in range(seconds * LOOKS_PER_S):
            self.now_s += 1 / LOOKS_PER_S
            due += len(self.beats) / period_s / LOOKS_PER_S
            frames = [encode(self._next(tick)) for _ in range(int(due))]
            due -= len(frames)
            spent += cpu_s(lambda frames=frames: [self.handle(frame) for frame in frames])  # type: ignore[misc]
            spent += cpu_s(lambda: self.rendezvous.check_liveness(self.now_s))
        assert not self.rendezvous._lost
        return spent / seconds, (self.messages - before[0]) / seconds, (self.bytes - before[1]) / seconds

    def _next(self, tick: int) -> Heartbeat:
        self.beats.append(beat := replace_fields(self.beats.pop(0), step=tick // LOOKS_PER_S))
        return beat


def replace_fields(beat: Heartbeat, **fields: Any) -> Heartbeat:
    """Returns a heartbeat with other fields."""
    return Heartbeat(**{**vars(beat), **fields})


def measure_plan(workers: int) -> dict[str, float]:
    """Measures the order of an epoch and the first window of a rank, and the stages of the reduction."""
    groups = 100 * workers
    paths, number = tuple(f"part-{i:05d}.parquet" for i in range(workers)), np.arange(groups, dtype=np.int64)
    manifest = Manifest(
        paths=paths, file_of=number // 100, index_in_file=number % 100, rows=np.full(groups, 1000, dtype=np.int64)
    )
    hosts = [f"10.0.0.{rank // WORKERS_PER_NODE}" for rank in range(workers)]
    stages: list[Any] = []

    def rank() -> None:
        plan = Plan(manifest, 1, workers, 32 * workers, 10_000)
        order = plan.epoch(0)
        order.stored_positions(workers // 2, 0)[order.window_order(workers // 2, 0)]

    plan_s, route_s = cpu_s(rank), cpu_s(lambda: stages.extend(plan_stages(workers // 2, hosts, workers)))
    doubling = max(len(doubling_rounds(rank, workers)) for rank in range(workers))
    hops = doubling if workers > MAX_RING_RANKS else 2 * (workers - 1)
    return {
        "plan of an epoch, ms of a rank": 1e3 * plan_s,
        "exchange plan, ms of a rank": 1e3 * route_s,
        "peers of a rank per bucket": float(sum(len(stage.ranks) - 1 for stage in stages)),
        "table, messages one after the other": float(hops),
    }


def measure_table(workers: int) -> dict[str, float]:
    """Measures the table of a step; the rows of other ranks come from the simulated network."""
    world = World(0, workers, workers)
    stats = [
        ReplicaStats(v, 32, 2**63 + v, 0, 0.1, 0, 0.1, 0.0, 0.0, 0.1, 0.1, 32.0, {MetricKey("accuracy"): 16.0})
        for v in range(workers)
    ]
    step, sent = StepStats(world), dict[int, torch.Tensor]()
    with patch.multiple(
        step_stats,
        gather=lambda value, world: [value],
        sum_over_ranks=lambda row_sums, world: sent.setdefault(0, row_sums),
    ):
        # The first call has all rows; the simulated network returns them from then on.
        step.gather(stats)
        table_s = cpu_s(lambda: step.gather(stats[:1]), max(3, 3000 // workers))
    return {"table of a step, ms of a rank": 1e3 * table_s, "table of a step, kB": sent[0].nbytes / 1e3}


def measure_record(workers: int, folder: Path) -> dict[str, float]:
    """Measures an hour of records of the metrics writer, by a simulated clock; with many workers a part of the hour."""
    now, counted = [1_700_000_000.0], {"put": 0, "bytes": 0, "listed": 0}
    hour = round(3600 / FLUSH_S)
    flushes = min(hour, max(2 * MAX_SMALL_FILES, 600_000 // workers))

    def put(path: Any, data: bytes) -> None:
        counted["put"], counted["bytes"] = counted["put"] + 1, counted["bytes"] + len(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(str(path)).write_bytes(data)

    def list_and_count(path: Any) -> list[str]:
        counted["listed"] += 1
        return list_files(path)

    clock = SimpleNamespace(time_ns=lambda: int(now[0] * 1e9))
    paths = RunPaths(folder / f"run-{workers}")
    rows, hashes = [32] * workers, [2**63 + v for v in range(workers)]
    began = time.process_time()
    with patch.multiple(journal, put_atomic=put, list_files=list_and_count, time=clock):
        for step in range(1, flushes + 1):
            now[0] += FLUSH_S
            record = StepRecord(step, 0, now[0], 0.5, 0.1, 1.0, 1000.0, 1.0, workers, rows, hashes, "1.1")
            journal.put_segment(paths, 1, [record])
            if step % MAX_SMALL_FILES == 0:
                journal.join_segments(paths)
    return {
        "record, ms of rank 0 per step": 1e3 * (time.process_time() - began) / flushes,
        "record, kB written per step": counted["bytes"] / flushes / 1e3,
        "objects written per s": counted["put"] / flushes / FLUSH_S + LOOKS_S,
        "objects there after an hour, at most": len(list((folder / f"run-{workers}").rglob("*.json"))) * hour / flushes,
        "listings per hour": counted["listed"] * hour / flushes,
    }


def measure_memory(workers: int, steps: int) -> dict[str, float]:
    """Measures the memory of the driver for the steps, and of a rank for its world and an unstored step."""
    record = StepRecord(
        1,
        0,
        1.0,
        0.5,
        0.1,
        1.0,
        1.0,
        1.0,
        workers,
        [32] * workers,
        [2**63] * workers,
        "1.1",
        0,
        None,
        {"accuracy": 0.5},
    )
    gc.collect()
    tracemalloc.start()
    columns = RecordColumns()
    columns.add(journal._to_table(journal._to_columns([record] * steps)), {"1.1": 1})
    columns.show()
    driver = tracemalloc.get_traced_memory()[0] / steps * 1e6
    del columns
    before = tracemalloc.get_traced_memory()[0]
    hosts = [f"10.0.0.{rank // WORKERS_PER_NODE}" for rank in range(workers)]
    kept = [
        list(range(2**62, 2**62 + workers)),
        [1000 + v for v in range(workers)],
        hosts,
        plan_stages(0, hosts, workers),
    ]
    rank = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept
    return {"driver after 10^6 steps, MB": driver / 1e6, "rank, kB of plan and record": rank / 1e3}


def measure_all(workers: int, folder: Path, steps: int) -> dict[str, float]:
    """Runs all measurements for a number of workers."""
    simulation = SimulatedRendezvous(workers)
    forming = simulation.form_generation()
    formed_bytes = simulation.bytes
    spent, messages, sent = simulation.measure_second()
    return {
        "forming, s of CPU": forming,
        "forming, MB": formed_bytes / 1e6,
        "rendezvous, % of a core": 100 * spent,
        "rendezvous, us per sign of life": 2e6 * spent / messages,
        "messages per s": messages,
        "kB per s": sent / 1e3,
        **measure_plan(workers),
        **measure_table(workers),
        **measure_record(workers, folder),
        **measure_memory(workers, steps),
    }


def show(figures_by_size: dict[int, dict[str, float]]) -> None:
    """Prints a line for each measurement, with a column for each number of workers."""
    print(f"{'workers':<40}" + "".join(f"{workers:>12,}" for workers in figures_by_size) + f"{'bar at 1,000':>14}")
    for name in next(iter(figures_by_size.values())):
        bar = f"{BARS[name]:>14g}" if name in BARS else ""
        print(f"{name:<40}" + "".join(f"{figures[name]:>12.4g}" for figures in figures_by_size.values()) + bar)


def main() -> int:
    """Measures, prints, draws; returns 0 if all bars hold at 1,000 workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES)
    parser.add_argument(
        "--steps", type=int, default=20_000, help="steps that the driver remembers, taken times 10^6 / STEPS"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--actor", action="store_true", help="the rendezvous as an actor of Ray, with real connections")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures_by_size = {workers: measure_all(workers, Path(folder), options.steps) for workers in options.workers}
    if options.actor:
        from benchmarks.scale_actor import as_actor

        figures_by_size = {workers: figures | as_actor(workers) for workers, figures in figures_by_size.items()}
    show(figures_by_size)
    if options.json is not None:
        options.json.write_text(json.dumps(figures_by_size, indent=1))
    if options.picture is not None:
        options.picture.write_text(draw(figures_by_size))
    return int(any(figures_by_size[1000][name] > bar for name, bar in BARS.items())) if 1000 in figures_by_size else 0


if __name__ == "__main__":
    sys.exit(main())
