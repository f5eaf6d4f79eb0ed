"""Downtime of a disturbed run: this application, stock Ray Train and torchrun with the same network, rows, steps and
disturbance.

A 784-512-512-10 network, 256 rows a step over all workers, a checkpoint every 200 steps, gloo, one thread per worker.
Every measurement is a process with its own Ray cluster and a time limit; the sides alternate. See `disturb.py` for the
clock.

python benchmarks/recovery.py                         # all measurements, 3 rounds: about 45 minutes
python benchmarks/recovery.py --only kill --rounds 5  # about 12 minutes

kill      SIGKILL of one of two workers (the last rank, then rank 0) to the next finished step.
node      Loss of one of two nodes, 1 to 4 workers, to the next finished step.
capacity  A node is added, 2 of 1 to 4 workers, 3 s after the first step, when the resize timers of both sides have just
          begun; to the first step on more workers.
drain     A node announces its end in 60 s, 1 to 4 workers, to the first step on the other nodes. It is removed after
          60 s.
all       SIGKILL of both workers with `checkpoint.snapshot_every_steps: 1`: steps redone.
goodput   One SIGKILL every 60 s for 4 minutes: see `disturb.goodput`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.disturb import BATCH, CHECKPOINT_EVERY, ROWS, Disturber, Scenario, StepLog, goodput, start_nodes
from benchmarks.harness import ROOT, ingest_rows, store_ratios
from benchmarks.stock_recovery import make_rows, run_ray, run_torchrun

_TWO_NODES = Scenario("lose", workers=(1, 4), before=4, nodes=(2, 2), stable_s=8.0)
SCENARIOS = {
    "kill": Scenario("kill", times=2, stable_s=6.0, limit_s=180.0),
    "node": _TWO_NODES,
    "capacity": Scenario("grow", workers=(1, 4), before=2, nodes=(2,), stable_s=3.0),
    "drain": replace(_TWO_NODES, kind="drain", limit_s=420.0),
    "all": Scenario("wipe", times=3, stable_s=4.0, snapshot_every_steps=1),
    "goodput": Scenario("kill", times=4, stable_s=25.0, every_s=60.0, end_s=60.0, limit_s=420.0),
}
Measured = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """A bar for a measurement.

    Args:
        other: The other side; empty: none, the bar is for the value of this application itself.
        bar: Required value.
        stretch: Desired value.
        value: Name of the number.
        is_lower_bound: Whether larger values are better.
    """

    other: str
    bar: float
    stretch: float
    value: str = "next_s"
    is_lower_bound: bool = False

    def verdict(self, value: float) -> str:
        """Returns whether a value reaches the stretch goal, the bar, or neither."""
        reached = [value >= goal if self.is_lower_bound else value <= goal for goal in (self.bar, self.stretch)]
        return "stretch met" if reached[1] else "met" if reached[0] else "MISSED"


BARS = {
    "kill": [Bar("stock", 0.3, 0.1), Bar("torchrun", 1.0, 0.5), Bar("", 0, 0, "redone")],
    "node": [Bar("stock", 0.2, 0.05), Bar("", 0, 0, "redone")],
    "capacity": [Bar("stock", 0.25, 0.18), Bar("", 0, 0, "redone")],
    "drain": [Bar("stock", 0.25, 0.1), Bar("", 0, 0, "redone")],
    "all": [Bar("", 1, 0, "redone")],
    "goodput": [Bar("", 0.92, 0.97, "goodput", is_lower_bound=True)],
}


def run_ours(scenario: Scenario, folder: Path) -> tuple[Disturber, dict[str, Any]]:
    """Runs and disturbs this application in this process; returns its summary, too."""
    from rich.console import Console

    from ray_app import load_config, run_training
    from ray_app.driver.run import Faults
    from ray_app.runlog.journal import read_events
    from ray_app.runlog.paths import RunPaths
    from ray_app.train.job import Hooks, Job

    # The CPU of the head is for reading.
    cluster = start_nodes(scenario, head_cpus=1)
    disturber = Disturber(scenario, folder, cluster)
    ended = False

    def watch(job: Job) -> None:
        nonlocal ended
        del job
        if not ended and disturber.poll():
            ended = True
            os.kill(os.getpid(), signal.SIGTERM)

    min_workers, max_workers = scenario.workers
    config = load_config(
        ROOT / "conf" / "mnist_dense.yaml",
        task__init_args__features=None,
        task__init_args__hidden=[512, 512],
        run__storage_path=str(folder),
        run__name="run",
        run__ray_address=cluster.address if cluster is not None else None,
        data__path=str(folder / "rows"),
        data__eval_path=None,
        data__global_batch_size=BATCH,
        scaling__min_workers=min_workers,
        scaling__max_workers=max_workers,
        train__epochs=100_000,
        checkpoint__every_steps=CHECKPOINT_EVERY,
        checkpoint__every_epochs=None,
        checkpoint__snapshot_every_steps=scenario.snapshot_every_steps,
        failure__max_failures=-1,
        tracking__enabled=False,
    )
    try:
        console = Console(quiet=not os.environ.get("SHOW"))
        summary = run_training(
            config, console, Faults(train=Hooks(after_step=StepLog(str(folder)))), observe=watch
        ).summary
    finally:
        if cluster is not None:
            cluster.shutdown()
    events = [asdict(event) for event in read_events(RunPaths(folder / "run"))]
    return disturber, summary | {"events": events}


def run_side(name: str, figure: str) -> None:
    """Measures one side in this process; prints the result as JSON."""
    scenario = SCENARIOS[figure]

    def done(disturber: Disturber, summary: dict[str, Any] | None = None) -> None:
        result: Measured = {"disturbances": [asdict(d) for d in disturber.done], "stuck": disturber.stuck}
        if figure == "goodput":
            result |= goodput(disturber.steps.lines, disturber.done, scenario.before)
        if summary is not None:
            result["summary"] = {key: summary[key] for key in ("redone_steps", "recovery_s", "goodput")}
            result["noticed_s"] = noticed(summary["events"], disturber)
        print(json.dumps(result), flush=True)

    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        pixels, labels = make_rows(ROWS)
        ingest_rows(folder, pixels, labels)
        if name == "ours":
            done(*run_ours(scenario, folder))
        else:
            {"stock": run_ray, "torchrun": run_torchrun}[name](scenario, folder, done)
    # A `fit` in a thread cannot be ended otherwise.
    os._exit(0)


def noticed(events: list[dict[str, Any]], disturber: Disturber) -> list[float]:
    """Returns the seconds from each disturbance until a worker noticed a broken generation, if one did."""
    lost = sorted(e["details"]["lost_s"] for e in events if "lost_s" in e["details"])
    return [
        round(lost_s - d.at_s, 3)
        for d in disturber.done
        for lost_s in [next((t for t in lost if t > d.at_s), None)]
        if lost_s
    ]


def measure(name: str, figure: str) -> Measured:
    """Measures one side in another process."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    for inherited in ("RAY_ADDRESS", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"):
        environment.pop(inherited, None)
    process = subprocess.Popen(
        [sys.executable, __file__, "--side", name, "--only", figure],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=SCENARIOS[figure].limit_s + 120)
    except BaseException as error:
        end_tree(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        out, err = process.communicate()
        err += "\n(ended: it took too long)"
    lines = [line for line in out.splitlines() if line.startswith('{"disturbances"')]
    if not lines:
        return {"error": f"exit code {process.returncode}: {err.strip()[-3000:]}"}
    measured = json.loads(lines[0])
    for value in ("next_s", "caught_up_s", "redone"):
        values = [d[value] for d in measured["disturbances"]]
        measured[value] = max(values) if value == "redone" else median(values)
    return measured


def end_tree(process: subprocess.Popen[str]) -> None:
    """Ends a process and its descendants."""
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in tree:
        one.terminate()
    _, alive = psutil.wait_procs(tree, timeout=15)
    for one in alive:
        one.kill()


def measure_figure(figure: str, rounds: int, without: str | None) -> dict[str, list[Measured]]:
    """Measures all sides but one in turn, `rounds` times; a round with a failed side is reported and left out."""
    names = ["ours", *(bar.other for bar in BARS[figure] if bar.other and bar.other != without)]
    measured_by_side: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(rounds):
        round_measured: dict[str, Measured] = {}
        for name in names:
            began = time.monotonic()
            round_measured[name] = measure(name, figure)
            took_s = time.monotonic() - began
            print(
                f"  {figure} {number + 1}/{rounds} {name} ({took_s:.0f} s): {json.dumps(round_measured[name])}",
                file=sys.stderr,
                flush=True,
            )
        if not any("error" in measured for measured in round_measured.values()):
            for name, measured in round_measured.items():
                measured_by_side[name].append(measured)
    return measured_by_side


def report(measured_by_figure: dict[str, dict[str, list[Measured]]]) -> None:
    """Prints the table."""
    print(
        f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}; medians"
        f" (range)"
    )
    header = ["figure", "ours", "other side", "", "ours / other", "bar", "stretch", ""]
    widths = [22, 24, 24, 10, 24, 7, 9, 12]
    print("".join(f"{text:<{width}}" for text, width in zip(header, widths, strict=True)))
    for figure, measured_by_side in measured_by_figure.items():
        if not measured_by_side["ours"]:
            print(f"{figure:<22}no round succeeded")
            continue
        for bar in BARS[figure]:
            if bar.other and bar.other not in measured_by_side:
                continue
            ours = [m[bar.value] for m in measured_by_side["ours"]]
            other = [m[bar.value] for m in measured_by_side[bar.other]] if bar.other else []
            ratios = [a / b for a, b in zip(ours, other, strict=True)] if other else ours
            if other:
                store_ratios(f"recovery: {figure}", bar.other, {"ours": ratios})
            unit = {"next_s": "s", "redone": "steps"}.get(bar.value, "")
            title = figure if bar.value in ("next_s", "goodput") else f"{figure}: steps redone"
            columns = [
                title,
                spread(ours, unit),
                spread(other, unit),
                bar.other,
                spread(ratios) if other else "",
                f"{bar.bar:g}",
            ]
            verdict = bar.verdict(max(ours) if bar.value == "redone" else median(ratios))
            columns += [f"{bar.stretch:g}", "MISSED" if any(m["stuck"] for m in measured_by_side["ours"]) else verdict]
            print("".join(f"{text:<{width}}" for text, width in zip(columns, widths, strict=True)))
        for name, measured in measured_by_side.items():
            keys = [key for key in ("next_s", "caught_up_s", "not_full_s") if key in measured[0]]
            parts = [f"{key} {spread([m[key] for m in measured])}" for key in keys]
            stuck = sum(m["stuck"] for m in measured)
            parts += [f"never went on {stuck}"] if stuck else []
            print(
                f"    {name}: {', '.join(parts)}, steps redone {[m['redone'] for m in measured]}, {len(measured)}"
                f" rounds"
            )


def spread(values: list[float], unit: str = "") -> str:
    """Formats median and range."""
    if not values:
        return ""
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g}) {unit}".rstrip()


def main() -> None:
    """Runs all measurements, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per figure")
    parser.add_argument(
        "--only", choices=list(SCENARIOS), action="append", help="only this figure; may be given several times"
    )
    parser.add_argument("--side", choices=["ours", "stock", "torchrun"], help=argparse.SUPPRESS)
    parser.add_argument("--without", choices=["torchrun"], help="leave a side out")
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.only[0])
        return
    # An exit by exception also ends the started processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    report({figure: measure_figure(figure, options.rounds, options.without) for figure in options.only or SCENARIOS})


if __name__ == "__main__":
    main()
