"""Stragglers and silent data corruption on real Ray: the accuracy, delay and cost of their detection.

Where only relative times count, workers sleep instead of computing, so that four of them on two cores behave like four
machines.

python benchmarks/health.py                # about 12 minutes; the last part, costs, needs a quiet machine
python benchmarks/health.py --only balance
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Sample, Stopwatch, alternate, ingest_rows, report
from ray_app.drill.faults import Evidence
from ray_app.drill.memory_faults import Flip, FlipTarget
from ray_app.driver.run import Faults
from ray_app.runlog.history import read_steps
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification
from ray_app.train.job import Hooks

UNIT_S, SLOW = 0.04, 2
ROWS, RATE = 2048, 0.2
COST_STEPS, WARM_UP = 125, 5


class Sleeping(ImageClassification):
    """A small network with a loss that takes `UNIT_S`, on one rank `times` as long.

    Args:
        times: Slowdown of that rank.
    """

    def __init__(self, times: float) -> None:
        super().__init__(model="resnet18", num_classes=10)
        self.times = times

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 10))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """See `Task.loss`."""
        world = dist.group.WORLD
        is_slow = world is not None and world.rank() == SLOW
        time.sleep(UNIT_S * self.times if is_slow else UNIT_S)
        return super().loss(outputs, batch)


class Bench:
    """Runs on one local Ray cluster.

    Args:
        folder: Folder for data and runs.
    """

    def __init__(self, folder: Path) -> None:
        generator = np.random.default_rng(0)
        for name, pixels in (("small", 8), ("large", 32)):
            (folder / name).mkdir()
            images = generator.integers(0, 256, (ROWS, pixels, pixels, 3), dtype=np.uint8)
            ingest_rows(folder / name, images, generator.integers(0, 10, ROWS))
        self._folder, self._number = folder, 0

    def run(self, task: dict[str, Any], faults: Faults = Faults(), data: str = "small", **fields: Any) -> RunPaths:
        """Runs a configuration with faults; returns its paths."""
        from rich.console import Console

        from ray_app import load_config, run_training

        self._number += 1
        settings: dict[str, Any] = {
            "run__storage_path": str(self._folder / "runs"),
            "run__name": f"run-{self._number}",
            "data__path": str(self._folder / data / "rows"),
            "data__cache": "memory",
            "train__epochs": 500,
            "tracking__enabled": False,
        }
        config = load_config(**{f"task__{name}": value for name, value in task.items()}, **settings | fields)
        run_training(config, Console(quiet=True), faults)
        return RunPaths(self._folder / "runs" / f"run-{self._number}")

    def sleeping(self, times: float, steps: int, logical_workers: int, load_balancing: str = "none") -> RunPaths:
        """Trains with four workers, one of them `times` as slow; returns the run's paths."""
        task = {"class_path": "benchmarks.health.Sleeping", "init_args__times": times}
        scaling: dict[str, Any] = {
            "scaling__min_workers": 4,
            "scaling__max_workers": 4,
            "scaling__cpus_per_worker": 0.25,
        }
        more: dict[str, Any] = {
            "scaling__logical_workers": logical_workers,
            "scaling__load_balancing": load_balancing,
            "train__max_steps": steps,
        }
        return self.run(task, data__global_batch_size=32, **scaling, **more)

    def resnet(self, rate: float) -> Sample:
        """Returns the time per step of ResNet-18 on two workers at a rate of recomputed shares."""
        watch = Stopwatch(str(self._folder / f"watch-{self._number}"), WARM_UP, COST_STEPS)
        task: dict[str, Any] = {"class_path": "ray_app.task.image.ImageClassification", "init_args__model": "resnet18"}
        two: dict[str, Any] = {"scaling__min_workers": 2, "scaling__max_workers": 2, "data__global_batch_size": 64}
        faults = Faults(train=Hooks(after_step=watch))
        paths = self.run(task, faults, "large", train__max_steps=COST_STEPS, failure__sdc_check_rate=rate, **two)
        if rate:
            print(
                f"  {read_steps(paths).recomputed / 2 / COST_STEPS:.3f} of all shares were computed twice",
                file=sys.stderr,
            )
        return watch.sample(2)


def attribution(bench: Bench) -> None:
    """Prints which worker is reported as a straggler, after how many steps, and reports without a straggler."""
    for times in (1.5, 2.0, 3.0):
        paths = bench.sleeping(times, 60, 4)
        detections = read_events(paths, "straggler_detected")
        right = [event for event in detections if event.details["rank"] == SLOW]
        description = (
            f"after {right[0].details['step']} steps, as {right[0].details['times']:.2f} times as long"
            if right
            else "never"
        )
        print(
            f"one of 4 workers, {times} times as long: the right one named {description}; others named:"
            f" {len(detections) - len(right)}"
        )
    paths = bench.sleeping(1.0, 1000, 4)
    reported = [
        (event.kind, event.details["rank"])
        for kind in ("straggler_detected", "stalled")
        for event in read_events(paths, kind)
    ]
    print(f"none slow, 1,000 steps: named {reported or 'nobody'}")


def balance(bench: Bench) -> None:
    """Prints the throughput with one of four workers half as fast, against the ideal: the throughput of four workers at
    full speed times 3.5 / 4.
    """

    def step_s(paths: RunPaths) -> float:
        return median(record.step_ms for record in read_steps(paths).records[60:]) / 1e3

    ideal_s = step_s(bench.sleeping(1.0, 100, 16)) * 4 / 3.5
    for load_balancing in ("none", "speed"):
        paths = bench.sleeping(2.0, 120, 16, load_balancing)
        moves = [event.details["after"] for event in read_events(paths, "rebalanced")]
        measured_s = step_s(paths)
        print(
            f"balance {load_balancing}: {1e3 * measured_s:.0f} ms a step, {ideal_s / measured_s:.2f} of the ideal;"
            f" logical workers {moves or 'stay'}"
        )


def flips(bench: Bench) -> None:
    """Flips bits while all shares are recomputed; prints how many are detected, and false alarms in 10,000 shares."""
    task: dict[str, Any] = {"class_path": "ray_app.task.image.ImageClassification", "init_args__model": "resnet18"}
    three: dict[str, Any] = {
        "scaling__min_workers": 2,
        "scaling__max_workers": 3,
        "scaling__cpus_per_worker": 0.5,
        "scaling__logical_workers": 6,
    }
    few = three | {"data__global_batch_size": 24, "failure__sdc_check_rate": 1.0}
    kinds: tuple[FlipTarget, ...] = ("gradient", "activation", "parameter")
    num_detected = 0
    for number, target in enumerate(kinds):
        with tempfile.TemporaryDirectory() as evidence:
            flip = Flip(Evidence(evidence), "flip", target, number, 4)
            paths = bench.run(task, Faults(train=Hooks(after_step=flip, built=flip.built)), train__max_steps=12, **few)
            num_detected += [event.details["rank"] for event in read_events(paths, "sdc_detected")] == [
                number
            ] and flip.evidence.has("flip")
    print(f"flipped bits in {', '.join(kinds)}: {num_detected} of {len(kinds)} found")
    shares = 0
    for size in (2, 3):
        paths = bench.run(
            task, train__max_steps=850, **few | {"scaling__max_workers": size, "scaling__min_workers": size}
        )
        shares += read_steps(paths).recomputed
        assert not read_events(paths, "sdc_detected")
    print(f"{shares:,} shares computed twice without a false alarm")


def cost(bench: Bench) -> None:
    """Prints the cost of recomputing shares."""
    samples = alternate({"nothing twice": lambda: bench.resnet(0.0), f"rate {RATE}": lambda: bench.resnet(RATE)}, 3)
    report("ResNet-18, 2 workers", samples, {f"rate {RATE}": 1 + 1.2 * RATE})


PARTS = {part.__name__: part for part in (attribution, balance, flips, cost)}


def main() -> None:
    """Measures all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name, part in PARTS.items():
            if options.only in (None, name):
                part(bench)


if __name__ == "__main__":
    main()
