"""60 hours of training, simulated: 10^6 steps, 10^4 checkpoints with evaluations, 100 resizes.

A run of ten steps of the digits is trained, its record is replaced by that of a long one, and its checkpoint by one of
the last step; the real writers of the record, the events, the evaluations and the checkpoints do it, with a clock that
jumps. Then each part of a driver's and of a reader's work runs in a process of its own: seconds, and the peak of its
memory above that of an idle process with the same imports. At last `ray-app train` continues the run, compared with
its first start.

python benchmarks/long_run.py --rounds 3              # 10 minutes, 0.5 GB of disk
python benchmarks/long_run.py --steps 20000 --rounds 0
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.footers import resident_mb
from benchmarks.harness import NULL, ROOT, Sample, report
from benchmarks.start import run_command
from ray_app.checkpoint.format import file_writers, params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cluster.controller.failure_budget import failure_events
from ray_app.driver.finalize import stored_job, summarize
from ray_app.report.facts import FactsReader
from ray_app.report.html import write_report
from ray_app.runlog import journal
from ray_app.runlog.evaluations import put_evaluation, read_evaluations, read_scores
from ray_app.runlog.history import column, read_steps
from ray_app.runlog.journal import (
    MAX_SMALL_FILES,
    StepRecord,
    join_events,
    join_segments,
    put_event,
    put_segment,
    read_events,
)
from ray_app.runlog.paths import RunPaths
from ray_app.track.mlflow_client import RUN_EVALUATOR, Backlog, TrackingState
from ray_app.watch.live_views import RunState, render_screen

HOURS, FIRST_STEPS = 60, 10
STEPS_PER_CHECKPOINT, STEPS_PER_RESIZE = 100, 10_000
STEPS_PER_SEGMENT, RETAINED = 50, 100
BARS = {"bytes": 100, "MB": 300, "resume": 1.2, "report": 3}


class Simulation:
    """The record of a long run, written by the real writers with a clock of its own."""

    def __init__(self, paths: RunPaths, steps: int, logical_workers: int) -> None:
        self._paths = paths
        self._steps, self._logical_workers = steps, logical_workers
        self._now_s, self._step_s = time.time() - HOURS * 3600, HOURS * 3600 / steps
        self._random = random.Random(0)
        self._evaluation = read_evaluations(paths)[-1]
        self._store = CheckpointStore(paths)
        [self._commit] = self._store.commits()
        self._snapshot = self._store.open_verified(self._commit)
        self.retain_s: list[float] = []
        self.max_files = 0

    def write(self) -> None:
        """Replaces the record of the short run."""
        clock = SimpleNamespace(time=lambda: self._now_s, time_ns=lambda: int(self._now_s * 1e9))
        [started] = read_events(self._paths, "started")
        for folder in (self._paths.metrics, self._paths.events):
            shutil.rmtree(str(folder))
        # Syncing would take long, and this record need not survive a power failure.
        with mock.patch("os.fsync"), mock.patch.object(journal, "time", clock):
            put_event(self._paths, "started", 1, **started.details)
            for first in range(1, self._steps + 1, STEPS_PER_SEGMENT):
                last = min(self._steps, first + STEPS_PER_SEGMENT - 1)
                put_segment(self._paths, 1, [self._record(step) for step in range(first, last + 1)])
                if last % STEPS_PER_CHECKPOINT == 0:
                    self._put_checkpoint(last)
                if last % STEPS_PER_RESIZE == 0:
                    self._put_resize(last)
                if last // STEPS_PER_SEGMENT % MAX_SMALL_FILES == 0:
                    join_segments(self._paths)
                    join_events(self._paths)
                    self.max_files = max(self.max_files, len(list(Path(str(self._paths.metrics)).iterdir())))
            self._now_s += 1
            put_event(self._paths, "interrupted", 1, reason=None)
        tracking = TrackingState.load(self._paths)
        tracking.sent_step = self._steps
        tracking.evaluations = {RUN_EVALUATOR: list(range(STEPS_PER_CHECKPOINT, self._steps + 1, STEPS_PER_CHECKPOINT))}
        tracking.store(self._paths)

    def _record(self, step: int) -> StepRecord:
        self._now_s += self._step_s
        draw, resizes = self._random.random, step // STEPS_PER_RESIZE
        hashes = [self._random.getrandbits(64) for _ in range(self._logical_workers)]
        rows = [64 // self._logical_workers] * self._logical_workers
        times = 216 * (1 + draw() / 10), draw()
        floats = 2 / step**0.5 * (1 + draw() / 10), 1e-3 * (1 - step / self._steps), 1 + draw()
        return StepRecord(step, step // 23, self._now_s, *floats, *times, 2 - resizes % 2, rows, hashes, f"1.{resizes}")

    def _put_checkpoint(self, step: int) -> None:
        """Records a checkpoint and its evaluation; the first and last checkpoints are also written and retained."""
        put_event(self._paths, "checkpointed", 1, step=step, why="cadence", duration_s=0.05)
        metrics = {name: value * (1 + self._random.random() / 10) for name, value in self._evaluation.metrics.items()}
        evaluation = replace(self._evaluation, step=step, metrics=metrics, time_s=self._now_s, epoch=step // 23)
        put_evaluation(self._paths, evaluation)
        put_event(self._paths, "evaluated", 1, step=step, metrics=metrics)
        if not RETAINED * STEPS_PER_CHECKPOINT < step <= self._steps - RETAINED * STEPS_PER_CHECKPOINT:
            snapshot = replace(self._snapshot, step=step)
            commit = replace(self._commit, step=step, epoch=step // 23, epoch_step=step % 23)
            commit = replace(commit, params_digest=params_digest(snapshot.model), time_s=self._now_s)
            began = time.process_time()
            self._store.write(file_writers(snapshot), commit)
            self._store.retain(3, [])
            self.retain_s.append(time.process_time() - began)

    def _put_resize(self, step: int) -> None:
        resizes = step // STEPS_PER_RESIZE
        workers = 2 - resizes % 2
        put_event(self._paths, "resized", 1, workers=workers, step=step, reason="capacity")
        put_event(self._paths, "formed", 1, generation=resizes, workers=workers, step=step)


def look(reader: FactsReader) -> object:
    """Reads a run and shows it as `ray-app watch` does."""
    return render_screen([RunState(reader.paths, reader.read())])


def poll(paths: RunPaths) -> object:
    """Reads what the console of a driver reads while it trains."""
    return read_scores(paths), failure_events(paths)


def work_on(paths: RunPaths, part: str) -> list[float]:
    """Returns the wall seconds of two runs of a part, the second with warm caches, and the peak of memory in MB."""
    reader, job = FactsReader(paths), stored_job(paths)
    backlog, sent = Backlog(paths, 10), TrackingState.load(paths)
    acts: dict[str, Callable[[], object]] = {
        "poll": lambda: poll(paths),
        "tracker": lambda: backlog.read(sent),
        "summary": lambda: summarize(job, "interrupted"),
        "report": lambda: write_report(paths),
        "watch": lambda: look(reader),
    }
    # This write resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    idle_mb, seconds = resident_mb("VmRSS"), []
    for _ in range(2):
        began = time.perf_counter()
        acts[part]()
        seconds.append(time.perf_counter() - began)
    return [*seconds, resident_mb("VmHWM") - idle_mb]


def start(folder: Path, name: str, max_steps: int, logical_workers: int) -> Sample:
    """Starts or continues a run; returns the time from the command to its first step, and the CPU time of all of it."""
    command = [sys.executable, "-m", "ray_app", "train", "--config", "conf/digits.yaml", f"--run.name={name}"]
    command += [f"--run.storage_path={folder}", f"--data.path={folder}/digits/train", f"--train.max_steps={max_steps}"]
    command += [f"--data.eval_path={folder}/digits/eval", "--train.strategy=single", "--train.epochs=100000"]
    command += [f"--tracking.uri=sqlite:///{folder}/mlflow.db", "--schedule=null", "--scaling.max_workers=1"]
    _, began, wall_s, cpu_s = run_command([*command, f"--scaling.logical_workers={logical_workers}"])
    times_s = column(read_steps(RunPaths(folder / name)).records, "time_s")
    assert len(times_s) == max_steps
    first_s = float(times_s[times_s > began].min()) - began
    print(f"  {name} to step {max_steps}: {first_s:.2f} s to the first step, {wall_s:.2f} s in all, CPU {cpu_s:.2f} s")
    return Sample(first_s * 1e3, cpu_s * 1e3)


def make_run(folder: Path, steps: int, logical_workers: int) -> RunPaths:
    """Trains the short run and makes the long one of it."""
    run_command([sys.executable, "-m", "ray_app", "ingest", "--source", "digits", "--out", f"{folder}/digits"])
    start(folder, "long", FIRST_STEPS, logical_workers)
    paths = RunPaths(folder / "long")
    began, simulation = time.perf_counter(), Simulation(paths, steps, logical_workers)
    simulation.write()
    shutil.rmtree(str(paths.checkpoint(FIRST_STEPS, 1)), ignore_errors=True)
    sizes = [file.stat().st_size for file in Path(str(paths.metrics)).iterdir()]
    retained = simulation.retain_s
    first_ms, last_ms = (1e3 * median(part) for part in (retained[:RETAINED], retained[-RETAINED:]))
    print(f"{steps:,} steps, L = {logical_workers}, written in {time.perf_counter() - began:.0f} s:")
    print(f"  record {sum(sizes) / steps:.1f} bytes per step (bar {BARS['bytes']}), {len(sizes)} files")
    print(f"  at most {simulation.max_files} files; checkpoint {first_ms:.1f} ms first, {last_ms:.1f} ms last")
    return paths


def main() -> None:
    """Writes the record, and measures each part of the work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--logical-workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each side")
    parser.add_argument("--parts", nargs="*", default=["poll", "tracker", "summary", "report", "watch"])
    parser.add_argument("--run", type=Path, help="a long run that exists, instead of a new one")
    parser.add_argument("--keep", type=Path, help="where the long run stays")
    parser.add_argument("--work", help="for the other processes: the part")
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work_on(RunPaths(options.run), options.work)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        workers = options.logical_workers
        paths = RunPaths(options.run) if options.run else make_run(folder, options.steps, workers)
        folder = Path(str(paths.root)).parent
        for part in options.parts:
            command = [sys.executable, __file__, "--work", part, "--run", str(paths.root)]
            first, again, peak = json.loads(subprocess.run(command, check=True, stdout=-1, cwd=ROOT).stdout)
            print(f"  {part:<8} {first:.2f} s, again {again:.2f} s, peak {peak:.0f} MB above idle", flush=True)
        samples: dict[str, list[Sample]] = {"fresh": [], "resume": [], f"fresh {NULL}": []}
        for number in range(1, options.rounds + 1):
            for side, of_side in samples.items():
                run, steps = ("long", options.steps) if side == "resume" else (str(time.time_ns()), 0)
                of_side.append(start(folder, run, steps + number * FIRST_STEPS, workers))
        if options.rounds:
            report(f"Command to first step after {options.steps:,} steps", samples, {"resume": BARS["resume"]})


if __name__ == "__main__":
    main()
