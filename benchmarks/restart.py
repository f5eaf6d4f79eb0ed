"""Time until a run continues after its driver was killed and started again at once, on a cluster that lives on.

python benchmarks/restart.py              # needs a quiet machine; 3 rounds, about 3 minutes

conf/digits.yaml on 2 workers, a checkpoint every 20 steps, no evaluator and no tracking. A first start on the cluster,
from the command to its first step, is compared to a second one, from the SIGKILL of the first driver to the next step.
The second start must take over the reservation of the dead driver, claim its run and restore its state.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT
from ray_app.runlog.history import read_steps
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths

BAR_S, LIMIT_S = 8.0, 120.0
AFTER = 50


def start(folder: Path, name: str, address: str) -> tuple[subprocess.Popen, float]:
    """Starts a driver; returns it and its start time."""
    command = [
        sys.executable,
        "-m",
        "ray_app",
        "train",
        "--config",
        "conf/digits.yaml",
        "--data.path",
        f"{folder}/digits/train",
    ]
    command += [
        f"--run.storage_path={folder}",
        f"--run.name={name}",
        "--data.eval_path=null",
        "--tracking.enabled=false",
    ]
    command += [
        "--train.epochs=10000",
        "--checkpoint.every_steps=20",
        "--checkpoint.every_epochs=null",
        "--scaling.min_workers=2",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address, "PYTHONDONTWRITEBYTECODE": ""}
    began = time.time()
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ), began


def first_step_s(paths: RunPaths, since: float, steps: int) -> float:
    """Returns the time of the first step after `since`, once `steps` such steps are recorded."""
    deadline = time.time() + LIMIT_S
    while time.time() < deadline:
        after = [record.time_s for record in read_steps(paths).records if record.time_s > since]
        if len(after) >= steps:
            return min(after)
        time.sleep(0.1)
    sys.exit(f"no {steps} steps within {LIMIT_S:g} s")


def phases(paths: RunPaths) -> str:
    """Formats the phases of the newest start."""
    ready_events = read_events(paths, "ready")
    return (
        ", ".join(f"{name} {value:.1f}" for name, value in ready_events[-1].details["phases"].items())
        if ready_events
        else ""
    )


def measure(folder: Path, number: int, address: str) -> tuple[float, float]:
    """Returns the seconds of a first start, and of one after a SIGKILL."""
    name = f"run-{number}"
    paths = RunPaths(folder / name)
    driver, began = start(folder, name, address)
    first = first_step_s(paths, began, AFTER) - began
    driver.kill()
    killed = time.time()
    driver.wait()
    again, _ = start(folder, name, address)
    restart_s = first_step_s(paths, killed, 1) - killed
    again.terminate()
    again.wait()
    return first, restart_s


def main() -> None:
    """Measures all rounds and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import ray

    from ray_app.ingest.ingest import IngestOptions, ingest

    address = ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False).address_info[
        "address"
    ]
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        ingest(IngestOptions(source="digits", out=str(folder / "digits")))
        measurements = []
        for number in range(options.rounds):
            measurements.append(measure(folder, number, address))
            print(*(f"{seconds:.2f} s" for seconds in measurements[-1]), flush=True)
    ray.shutdown()
    first, again = zip(*measurements, strict=True)
    ratios = [b / a for a, b in measurements]
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {options.rounds} rounds")
    print(f"first start: {median(first):.2f} s ({min(first):.2f}-{max(first):.2f})")
    print(f"after SIGKILL of the driver: {median(again):.2f} s ({min(again):.2f}-{max(again):.2f}), bar {BAR_S:g} s")
    print(f"ratio: {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}), bar 1.3")


if __name__ == "__main__":
    main()
