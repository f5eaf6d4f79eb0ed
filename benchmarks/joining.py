"""Time until a lost worker is replaced, and until a run that lost all workers steps again: with
`scaling.standby_workers` and without.

python benchmarks/joining.py              # needs a quiet machine; 3 rounds, about 4 minutes

`recovery.py --only capacity` measures how soon new capacity is used.

The small network of the digits on 2 workers, steps of 50 ms, a snapshot in memory after each. Every measurement is a
process with its own Ray cluster; the sides alternate.

kill   SIGKILL of one of two workers to the first step of two workers again.
all    SIGKILL of both workers to the next finished step, and the steps that are redone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT

BARS = {("kill", 1): 2.0, ("kill", 0): 8.0, ("all", 1): 6.0, ("all", 0): 8.0}
AT = 40
STEP_S, STABLE_S = 0.05, 2.0
"""The step after which workers die; minimum duration of a step; seconds for which the run continues before the kill, or
with a ready standby worker.
"""


@dataclass(frozen=True)
class DieOnce:
    """A hook that lengthens steps and kills some ranks after one of them, once, as soon as the file `ready` exists."""

    folder: str
    ranks: tuple[int, ...]

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        time.sleep(STEP_S)
        ready, done = Path(self.folder, "ready"), Path(self.folder, f"died-{rank}")
        if step < AT or rank not in self.ranks or done.exists():
            return
        while not ready.exists():
            time.sleep(0.01)
        done.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def run_side(kind: str, standbys: int) -> None:
    """Runs one measurement and prints it as JSON."""
    from rich.console import Console

    from ray_app import load_config, run_training
    from ray_app.driver.run import Faults
    from ray_app.ingest.ingest import IngestOptions, ingest
    from ray_app.runlog.journal import read_events, read_records
    from ray_app.runlog.paths import RunPaths
    from ray_app.train.job import Hooks, Job

    folder = Path(tempfile.mkdtemp())
    ingest(IngestOptions(source="digits", out=str(folder / "data")))
    config = load_config(
        ROOT / "conf" / "digits.yaml",
        data__path=str(folder / "data" / "train"),
        data__eval_path=None,
        run__storage_path=str(folder),
        run__name="run",
        scaling__min_workers=1,
        scaling__max_workers=2,
        scaling__standby_workers=standbys,
        train__epochs=1000,
        checkpoint__snapshot_every_steps=1,
        tracking__enabled=False,
    )
    ranks = {"kill": (1,), "all": (0, 1)}[kind]
    stopped: list[bool] = []

    def began() -> float | None:
        """Returns the time of the last kill, or None before it."""
        died = [float(file.read_text()) for file in folder.glob("died-*")]
        return max(died) if len(died) == len(ranks) else None

    def watch(job: Job) -> None:
        records = list(read_records(job.paths)[0].values())
        if len(records) < AT:
            return
        events = read_events(job.paths, "standbys")
        if not standbys or (
            events and events[-1].details["ready"] == standbys and time.time() - events[-1].time_s > STABLE_S
        ):
            (folder / "ready").touch()
        since = began()
        after = [r for r in records if since is not None and r.time_s > since and (kind == "all" or r.workers == 2)]
        if len(after) > 5 and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    hooks = Faults(train=Hooks(after_step=DieOnce(str(folder), ranks)))
    result = run_training(config, Console(quiet=True), hooks, observe=watch)
    since = began()
    assert since is not None
    first = min(
        r.time_s
        for r in read_records(RunPaths(folder / "run"))[0].values()
        if r.time_s > since and (kind == "all" or r.workers == 2)
    )
    print(json.dumps({"s": first - since, "redone": result.summary["redone_steps"]}))


def measure(kind: str, standbys: int) -> dict[str, float]:
    """Runs one measurement in another process."""
    command = [sys.executable, __file__, "--side", kind, "--spares", str(standbys)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if not done.stdout.strip():
        sys.exit(f"{kind} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measures all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=["kill", "all"], help=argparse.SUPPRESS)
    parser.add_argument("--spares", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return run_side(options.side, options.spares)
    measurements: dict[tuple[str, int], list[dict[str, float]]] = {side_key: [] for side_key in BARS}
    for _ in range(options.rounds):
        for kind, standbys in BARS:
            measurements[kind, standbys].append(measure(kind, standbys))
            print(kind, standbys, measurements[kind, standbys][-1], flush=True)
    print(
        f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {options.rounds} rounds; median (range), bar, steps done"
        f" again"
    )
    for (kind, standbys), side_measurements in measurements.items():
        seconds = [one["s"] for one in side_measurements]
        verdict = "met" if median(seconds) <= BARS[kind, standbys] else "MISSED"
        spread = f"{median(seconds):6.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
        redone = max(one["redone"] for one in side_measurements)
        print(
            f"{kind:<6}{'a spare' if standbys else 'no spare':<10}{spread:<26}{BARS[kind, standbys]:>4g} s  {verdict} "
            f" {redone:.0f}"
        )
    return None


if __name__ == "__main__":
    main()
