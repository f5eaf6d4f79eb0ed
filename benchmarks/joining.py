"""How soon a lost worker is replaced, and a run whose workers are all lost steps again: with `scaling.standby_workers`
and without.

python benchmarks/joining.py              # needs a quiet machine; 3 rounds, about 4 minutes

How soon new room is used is `recovery.py --only capacity`.

The small network of the digits on 2 workers, steps of 50 ms, a snapshot in memory after each. Every measurement is a
process of its own with its own Ray cluster; the sides take turns.

kill   SIGKILL of one of two workers to the first step of two workers again.
all    SIGKILL of both workers to the next finished step, and the steps that are done again.
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
AT, STEP_S, SETTLED_S = 40, 0.05, 2.0
"""The step after which workers die; how long a step takes at least; how long the run goes on before, or with a spare
that is ready.
"""


@dataclass(frozen=True)
class Dies:
    """A hook: steps take their time, and some ranks die after one of them, once, as soon as a file says that all is
    ready.
    """

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


def side(kind: str, spares: int) -> None:
    """One measurement, printed as JSON."""
    from rich.console import Console

    from ray_app import load_config, run_training
    from ray_app.driver.run import Faults
    from ray_app.ingest.ingest import IngestOptions, ingest
    from ray_app.runlog.journal import MetricsReader, read_events
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
        scaling__standby_workers=spares,
        train__epochs=1000,
        checkpoint__snapshot_every_steps=1,
        tracking__enabled=False,
    )
    reader = MetricsReader(RunPaths(folder / "run"))
    ranks = {"kill": (1,), "all": (0, 1)}[kind]
    stopped: list[bool] = []

    def began() -> float | None:
        """When it happened."""
        died = [float(file.read_text()) for file in folder.glob("died-*")]
        return max(died) if len(died) == len(ranks) else None

    def watch(job: Job) -> None:
        reader.poll()
        records = list(reader.records.values())
        if len(records) < AT:
            return
        events = read_events(job.paths, "standbys")
        if not spares or (
            events and events[-1].details["ready"] == spares and time.time() - events[-1].time_s > SETTLED_S
        ):
            (folder / "ready").touch()
        since = began()
        after = [r for r in records if since is not None and r.time_s > since and (kind == "all" or r.workers == 2)]
        if len(after) > 5 and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    hooks = Faults(train=Hooks(after_step=Dies(str(folder), ranks)))
    result = run_training(config, Console(quiet=True), hooks, observe=watch)
    reader.poll()
    since = began()
    assert since is not None
    first = min(r.time_s for r in reader.records.values() if r.time_s > since and (kind == "all" or r.workers == 2))
    print(json.dumps({"s": first - since, "redone": result.summary["redone_steps"]}))


def measure(kind: str, spares: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--side", kind, "--spares", str(spares)]
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
        return side(options.side, options.spares)
    found: dict[tuple[str, int], list[dict[str, float]]] = {each: [] for each in BARS}
    for _ in range(options.rounds):
        for kind, spares in BARS:
            found[kind, spares].append(measure(kind, spares))
            print(kind, spares, found[kind, spares][-1], flush=True)
    print(
        f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {options.rounds} rounds; median (range), bar, steps done"
        f" again"
    )
    for (kind, spares), all_found in found.items():
        seconds = [each["s"] for each in all_found]
        verdict = "met" if median(seconds) <= BARS[kind, spares] else "MISSED"
        spread = f"{median(seconds):6.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
        redone = max(each["redone"] for each in all_found)
        print(
            f"{kind:<6}{'a spare' if spares else 'no spare':<10}{spread:<26}{BARS[kind, spares]:>4g} s  {verdict} "
            f" {redone:.0f}"
        )
    return None


if __name__ == "__main__":
    main()
