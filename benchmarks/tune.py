"""A study, and the same trials by Ray Tune's ASHA, in two slots of one CPU each; and the decisions of a large study.

Ray Tune trains in a function with a plain PyTorch loop: the same network, settings, batches and rows, all in memory.
Both sides are commands that begin with the start of Python and of a Ray cluster. The score to reach is the lowest of
the best ones of a round. The studies, by halving and by ASHA, have `scaling.logical_workers: 1` and no augmentation, as
the loop.

A study of `conf/digits.yaml` as it is, but without tracking, shows how much of the time of its trials is in steps, and
how long a slot is between two trials. In a study of simulated trials only decisions and record are real.

python benchmarks/tune.py             # needs a quiet machine; about 8 minutes
python benchmarks/tune.py --quick     # 6 trials of up to 4 epochs, 50 simulated trials
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
sys.path.insert(0, os.environ["PYTHONPATH"])

import numpy as np
import psutil

from benchmarks.harness import NULL, ROOT, Sample, report

SLOTS, ETA = 2, 3
SPACE = {
    "schedule.init_args.max_lr": {"log_uniform": [1e-4, 0.1]},
    "optimizer.init_args.weight_decay": {"log_uniform": [1e-6, 1e-2]},
}
OURS, THEIRS = "ray_app", "Ray Tune"
OURS_ASHA = f"{OURS}, ASHA"


@dataclass(frozen=True)
class Size:
    """How large the study is."""

    trials: int
    epochs: int
    simulated: int


FULL, QUICK = Size(27, 27, 1000), Size(6, 4, 50)


def study_config(folder: Path, size: Size, is_plain: bool) -> Any:
    """Returns the configuration of a study; a plain one is that of the loop."""
    from ray_app import load_config

    config = load_config(ROOT / "conf" / "digits.yaml", data__path=str(folder.parent / "data" / "train")).replace(
        data__eval_path=str(folder.parent / "data" / "eval"),
        run__storage_path=str(folder / "runs"),
        train__epochs=size.epochs,
        tracking__enabled=False,
    )
    if not is_plain:
        return config
    return config.replace(
        task__init_args=config.task.init_args | {"crop_padding": 0},
        scaling__max_workers=1,
        scaling__logical_workers=1,
        checkpoint__every_epochs=1,
    )


def run_study_of(folder: Path, size: Size, is_plain: bool, kind: str = "halving") -> dict[str, Any]:
    """Runs a study, and returns its scores with their times, and where the time of its trials was."""
    from ray_app import run_study
    from ray_app.runlog.evaluations import read_evaluations
    from ray_app.runlog.journal import read_records
    from ray_app.tune.record import StudyPaths

    scheduler = {"kind": kind, "eta": ETA}
    tune = {"space": SPACE, "trials": size.trials, "slots": SLOTS, "scheduler": scheduler, "split_evaluation": False}
    study = run_study(study_config(folder, size, is_plain), tune)
    first_steps, scores = list[float](), list[tuple[float, float]]()
    steps_s = 0.0
    for number in study.record.trials:
        [paths] = StudyPaths(study.path).runs(number, None)
        records = list(read_records(paths)[0].values())
        ends = [0, *sorted(result.epochs for result in study.record.results if result.trial == number)]
        for low, high in pairwise(ends):
            steps = [record for record in records if low <= record.epoch < high]
            # The time of a first step includes what came before it.
            usual_ms = median(record.step_ms for record in steps)
            steps_s += sum(min(record.step_ms, 10 * usual_ms) for record in steps) / 1e3
            first_steps.append(steps[0].time_s - usual_ms / 1e3)
        scores += [(one.time_s, one.metrics["accuracy"]) for one in read_evaluations(paths)]
    return {
        "scores": scores,
        "steps_s": steps_s,
        "worker_s": study.record.worker_hours * 3600,
        "gaps_s": find_gaps(first_steps, [result.ended_s for result in study.record.results]),
    }


def find_gaps(first_steps: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Returns the seconds from the end of each trial in a rung to the next first step in its slot.

    A first step follows the earliest end that no other one follows; those of the first trial of a slot follow none.
    """
    return [first - end for first, end in zip(sorted(first_steps)[SLOTS:], sorted(ends), strict=False)]


def train_plainly(settings: dict[str, float], arrays: str, out: str, size: Size) -> None:
    """The trainable of Ray Tune: trains on all rows in memory and reports the accuracy after each epoch."""
    import torch
    from ray import tune
    from torch import nn

    from ray_app.task.image import small_cnn

    torch.set_num_threads(1)
    data = {name: torch.from_numpy(values) for name, values in np.load(arrays).items()}
    torch.manual_seed(0)
    [max_lr, decay] = [settings[name] for name in SPACE]
    model = small_cnn(1, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=decay)
    steps = -(-len(data["x"]) // 64) * size.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=max_lr, total_steps=steps)
    file = Path(out) / f"{time.time_ns()}-{os.getpid()}"
    for _ in range(size.epochs):
        model.train()
        for rows in torch.randperm(len(data["x"])).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data["x"][rows]), data["y"][rows]).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(data["x_eval"]).argmax(1) == data["y_eval"]).double().mean().item()
        with file.open("a") as stream:
            stream.write(json.dumps([time.time(), accuracy]) + "\n")
        tune.report({"accuracy": accuracy})


def run_ray_tune(folder: Path, size: Size) -> dict[str, Any]:
    """Runs the same trials by Ray Tune, and returns their scores with their times."""
    import pyarrow.parquet as pq
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    from ray_app.tune.samplers import sample
    from ray_app.tune.space import parse_space

    arrays = dict[str, Any]()
    for suffix, name in (("", "train"), ("_eval", "eval")):
        table = pq.read_table(folder.parent / "data" / name)
        pixels = np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8).reshape(-1, 1, 8, 8)
        arrays |= {f"x{suffix}": pixels.astype(np.float32) / 16, f"y{suffix}": table["label"].to_numpy()}
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "scores").mkdir()
    space = parse_space(SPACE, False)
    trials = [sample(space, "random", 0, number) for number in range(size.trials)]
    ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, log_to_driver=False)
    train = partial(train_plainly, arrays=str(folder / "arrays.npz"), out=str(folder / "scores"), size=size)
    scheduler = ASHAScheduler(max_t=size.epochs, grace_period=1, reduction_factor=ETA)
    results = tune.Tuner(
        tune.with_resources(lambda config: train(config["settings"]), {"cpu": 1}),
        param_space={"settings": tune.grid_search(trials)},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, max_concurrent_trials=SLOTS),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0),
    ).fit()
    if results.num_errors or len(results) != size.trials:
        raise SystemExit(f"Ray Tune ran {len(results)} trials, {results.num_errors} with errors: {results.errors}")
    lines = [line for file in (folder / "scores").iterdir() for line in file.read_text().splitlines()]
    return {"scores": list(map(json.loads, lines))}


class SimulatedSlots:
    """Slots in which every trial ends at once, with a score that grows with its epochs."""

    def __init__(self, count: int) -> None:
        self.count, self.jobs = count, list[Any]()
        self._random = np.random.default_rng(0)

    @property
    def free(self) -> int:
        """Number of slots without a trial."""
        return self.count - len(self.jobs)

    def start(self, job: Any) -> None:
        """Starts a trial."""
        self.jobs.append(job)

    def wait(self, timeout_s: float) -> list[Any]:
        """Returns one of the trials with its result."""
        from ray_app.tune.record import TrialResult

        job = self.jobs.pop(int(self._random.integers(len(self.jobs))))
        rate = job.config.schedule.init_args["max_lr"]
        value = 1 - abs(np.log10(rate) + 2) / 4 - 1 / (1 + job.epochs) + 0.01 * self._random.normal()
        result = TrialResult(job.trial, job.rung, float(value), 23 * job.epochs, job.epochs, "0" * 64, seconds=1.0)
        return [(job, result)]


def simulate(folder: Path, size: Size) -> dict[str, float]:
    """Runs the real driver of a study, its scheduler and its record on simulated slots."""
    from ray_app.retrain.options import RetrainSection
    from ray_app.runlog.lease import acquire_lease
    from ray_app.runlog.output import TextConsole
    from ray_app.runlog.paths import RunPaths
    from ray_app.tune.options import StudyScheduler, TuneSection
    from ray_app.tune.report import study_page
    from ray_app.tune.study import StudyDriver

    section = TuneSection("study", SPACE, size.simulated, scheduler=StudyScheduler("asha", ETA), slots=16)
    driver = StudyDriver(study_config(folder, size, True), section, RetrainSection(), TextConsole(quiet=True))
    process = psutil.Process()
    idle_mb = process.memory_info().rss / 1e6
    with acquire_lease(RunPaths(driver.paths.root)) as lease:
        driver._fence = lease.fence
        start_s = time.perf_counter()
        driver._train(SimulatedSlots(16))  # type: ignore[arg-type]
        train_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    page = study_page("study", driver.record, driver.scheduler.winner())
    if "</html>" not in page:
        raise SystemExit("The report is not a page.")
    return {
        "decisions": len(driver.record.results),
        "ms per decision (bar 10)": train_s / len(driver.record.results) * 1e3,
        "MB of the driver above idle (bar 300)": process.memory_info().rss / 1e6 - idle_mb,
        "kB of the record": len(driver.paths.record.read_bytes()) / 1e3,
        "s for the report": time.perf_counter() - start_s,
        "kB of the report": len(page) / 1e3,
    }


SIDES: dict[str, Callable[[Path, Size], dict[str, Any]]] = {
    OURS: partial(run_study_of, is_plain=True),
    OURS_ASHA: partial(run_study_of, is_plain=True, kind="asha"),
    THEIRS: run_ray_tune,
    "digits": partial(run_study_of, is_plain=False),
    "simulated": simulate,
}


def run_side(name: str, folder: Path, is_quick: bool) -> dict[str, Any]:
    """Runs a side in another process; returns what it measures, with its start and the CPU time of the machine."""
    folder.mkdir()
    quick = ["--quick"] if is_quick else []
    start_s, cpu_s = time.time(), _machine_cpu_s()
    command = [sys.executable, __file__, *quick, "--side", name, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    used_s = _machine_cpu_s() - cpu_s
    wall_s = time.time() - start_s
    print(f"  {name}: {wall_s:.1f} s, CPU {used_s:.1f} s", file=sys.stderr, flush=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "start_s": start_s, "wall_s": wall_s, "cpu_s": used_s}


def _machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system)


def time_to_score(sides: dict[str, dict[str, Any]]) -> dict[str, Sample]:
    """Returns for each side of a round the time until the score is reached, with the CPU time of the whole side."""
    target = min(max(value for _, value in side["scores"]) for side in sides.values())
    print(f"  accuracy to reach: {target:.4f}", file=sys.stderr)
    return {
        name: Sample(
            1e3 * (min(time_s for time_s, value in side["scores"] if value >= target) - side["start_s"]),
            1e3 * side["cpu_s"],
        )
        for name, side in sides.items()
    }


def describe_study(side: dict[str, Any]) -> str:
    """Returns where the time of the trials of a study was."""
    gaps, share = sorted(side["gaps_s"]), side["steps_s"] / side["worker_s"]
    return (
        f"{share:.3f} of {side['worker_s']:.1f} worker-seconds in steps (bar 0.9); next step in a slot after"
        f" {median(gaps):.3f} s (bar 1), at most {gaps[-1]:.3f} s, {len(gaps)} times"
    )


def main() -> None:
    """Runs all sides in turn, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small version")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.side:
        print("\n" + json.dumps(SIDES[options.side](options.folder, size)))
        return
    from ray_app.ingest.ingest import IngestOptions, ingest

    samples: dict[str, list[Sample]] = {name: [] for name in (THEIRS, OURS, OURS_ASHA, f"{THEIRS} {NULL}")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ingest(IngestOptions(source="digits", out=str(folder / "data")))
        for number in range(options.rounds):
            sides = {
                name: run_side(name.removesuffix(f" {NULL}"), folder / f"{number} {name}", options.quick)
                for name in samples
            }
            for side, sample in time_to_score(sides).items():
                samples[side].append(sample)
        digits = run_side("digits", folder / "digits", options.quick)
        simulated = run_side("simulated", folder / "simulated", options.quick)
    report(
        f"Time until a score is reached, {size.trials} trials of up to {size.epochs} epochs", samples, {OURS_ASHA: 0.8}
    )
    whole = (f"{name} {side['wall_s']:.1f} s" for name, side in sides.items())
    print(f"whole studies of the last round: {', '.join(whole)}")
    print(f"study of the last round: {describe_study(sides[OURS])}")
    print(f"study of conf/digits.yaml: {describe_study(digits)}")
    figures = (f"{value:.4g} {text}" for text, value in simulated.items() if text not in ("start_s", "wall_s", "cpu_s"))
    print(f"simulated trials: {', '.join(figures)}")


if __name__ == "__main__":
    main()
