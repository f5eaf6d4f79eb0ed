"""The cost of evaluation: one evaluator for all checkpoints against a fresh one per checkpoint, and the slowdown of the
concurrent training.

python benchmarks/evaluator.py --rounds 3      # needs a quiet machine; about 8 minutes

fresh      The time from the commit of a checkpoint to its evaluation. The actor that stays keeps its process, the model
           and the decoded data; the other side starts such an actor for every checkpoint, as a job per checkpoint
           would. Digits, 359 rows to evaluate.
beside     Throughput of one training worker of one thread, digits, a checkpoint every 40 steps and the evaluator on
           another core, against the same run without evaluation data. Steps are timed by the worker in mid-run, between
           two of them.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Sample, Stopwatch, alternate, report, scaled, store_ratios

OFF, ON = "evaluation off", "evaluation on"
CHECKPOINTS, EVERY = 6, 40
WARM_UP = 240
STEPS = WARM_UP + scaled(2400)


def make_config(folder: Path, name: str, **fields: Any) -> Any:
    """Returns the configuration of a run on the digits without tracking."""
    from ray_app import load_config

    return load_config(
        ROOT / "conf" / "digits.yaml",
        run__storage_path=str(folder / "runs"),
        run__name=name,
        data__path=str(folder / "digits" / "train"),
        train__epochs=1000,
        tracking__enabled=False,
        scaling__max_workers=1,
        checkpoint__every_epochs=None,
        **fields,
    )


def measure_step(folder: Path, number: int, evaluated: bool) -> Sample:
    """Returns the time of a step with or without an evaluator."""
    from rich.console import Console

    from ray_app import run_training
    from ray_app.driver.run import Faults
    from ray_app.train.job import Hooks

    watch = Stopwatch(str(folder / f"watch-{number}"), WARM_UP, STEPS)
    config = make_config(
        folder,
        f"beside-{number}",
        data__eval_path=str(folder / "digits" / "eval") if evaluated else None,
        train__max_steps=STEPS,
        checkpoint__every_steps=EVERY,
    )
    run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=watch)))
    return watch.sample()


def train_without_evaluation(folder: Path) -> Any:
    """Trains with some checkpoints and no evaluation; returns the job of its evaluator."""
    from rich.console import Console

    from ray_app import run_training
    from ray_app.preflight.prepare import prepare

    fields = {"train__max_steps": CHECKPOINTS * 10, "checkpoint__every_steps": 10, "checkpoint__keep_last": CHECKPOINTS}
    run_training(make_config(folder, "trained", data__eval_path=None, **fields), Console(quiet=True))
    return prepare(
        make_config(folder, "trained", data__eval_path=str(folder / "digits" / "eval"), **fields)
    ).evaluation_job


class Commits:
    """Commits checkpoints one by one, and waits for the evaluation of each.

    Args:
        job: Job of the evaluator.
    """

    def __init__(self, job: Any) -> None:
        from ray_app.checkpoint.store import CheckpointStore

        self._job, self._store = job, CheckpointStore(job.paths)
        self._hidden = {c.step: (job.paths.checkpoint(c.step, c.fence) / "COMMIT.json") for c in self._store.commits()}
        self._contents = {step: path.read_bytes() for step, path in self._hidden.items()}

    def hide(self) -> None:
        """Removes all commits and evaluations."""
        for path in [*self._hidden.values(), *self._job.paths.evaluations.glob("*.json")]:
            path.unlink(missing_ok=True)

    def evaluated_s(self, step: int) -> float:
        """Commits a step; returns the seconds until it is evaluated."""
        from ray_app.runlog.evaluations import evaluated_steps
        from ray_app.storage.files import put_atomic

        began = time.perf_counter()
        put_atomic(self._hidden[step], self._contents[step])
        while step not in evaluated_steps(self._job.paths):
            if time.perf_counter() - began > 120:
                sys.exit(f"step {step} was not evaluated")
            time.sleep(0.01)
        return time.perf_counter() - began

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints."""
        return sorted(self._hidden)


def evaluate_with_one_actor(job: Any) -> list[float]:
    """Returns the seconds per checkpoint of one actor for all checkpoints, its start included."""
    from ray_app.evaluate.evaluator import start_evaluator

    commits = Commits(job)
    commits.hide()
    evaluator = start_evaluator(job)
    seconds = [commits.evaluated_s(step) for step in commits.steps]
    evaluator.end()
    return seconds


def evaluate_with_fresh_actors(job: Any) -> list[float]:
    """Returns the seconds per checkpoint with a new actor for each."""
    from ray_app.evaluate.evaluator import start_evaluator

    commits, seconds = Commits(job), []
    commits.hide()
    for step in commits.steps:
        began = time.perf_counter()
        evaluator = start_evaluator(job)
        commits.evaluated_s(step)
        seconds.append(time.perf_counter() - began)
        evaluator.end()
    return seconds


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["fresh", "beside"])
    options = parser.parse_args()
    import ray

    from ray_app.ingest.ingest import IngestOptions, ingest

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        ingest(IngestOptions(source="digits", out=str(folder / "digits")))
        print(f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {options.rounds} rounds")
        if options.only != "beside":
            job = train_without_evaluation(folder)
            stayed, started = zip(
                *((evaluate_with_one_actor(job), evaluate_with_fresh_actors(job)) for _ in range(options.rounds)),
                strict=True,
            )
            ratios = [sum(a) / sum(b) for a, b in zip(stayed, started, strict=True)]
            store_ratios("an evaluation", "fresh", {"staying": ratios})
            warm = [median(a[1:]) for a in stayed]
            print(
                f"seconds per evaluation: {sum(map(sum, stayed)) / options.rounds / CHECKPOINTS:.2f} staying (its start"
                f" included; then"
            )
            print(f"{median(warm):.2f}), {sum(map(sum, started)) / options.rounds / CHECKPOINTS:.2f} fresh")
            print(
                f"staying / fresh: {median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}), bar 0.5:"
                f" {verdict(median(ratios) <= 0.5)}"
            )
        if options.only != "fresh":
            numbers = iter(range(1000))
            # The first run starts processes that stay alive.
            measure_step(folder, next(numbers), evaluated=True)
            sides = {
                OFF: lambda: measure_step(folder, next(numbers), False),
                ON: lambda: measure_step(folder, next(numbers), True),
            }
            samples = alternate(sides, options.rounds)
            report("Time per step, digits on one worker, a checkpoint every 40 steps", samples, {})
            through = [off.wall_ms / on.wall_ms for off, on in zip(samples[OFF], samples[ON], strict=True)]
            middle = median(through)
            low, high = min(through), max(through)
            print(f"throughput, on / off: {middle:.3f} ({low:.3f}-{high:.3f}), bar 0.95: {verdict(middle >= 0.95)}")
    ray.shutdown()


def verdict(is_met: bool) -> str:
    """Returns the verdict as a word."""
    return "held" if is_met else "MISSED"


if __name__ == "__main__":
    main()
