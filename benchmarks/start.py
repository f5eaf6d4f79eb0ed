"""Time from a command or a call to its first step: of runs, of the next runs of a program, of Keras' fit.

`command`: one step of conf/digits.yaml with two workers, without evaluator and tracking, against the least that Ray
needs, a script that imports Ray and torch and starts a cluster, in which two actors that import torch answer; `single`
is the same in the calling process. The least is measured twice for the null.

`session`: the same run three times in one program with `ray_app.session()`, from each call to its first step. The
program waits 6 s between two runs. The third run is the null of the second.

`keras`: `ray_app.keras.fit(workers=1)` in a program of its own against `ray-app train` with the configuration of that
run, both from the command on, and a second `fit` of the program, 6 s after the first, from the call on. The command is
measured twice for the null.

python benchmarks/start.py --rounds 5      # needs a quiet machine; about 8 minutes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Sample, report
from ray_app.runlog.history import read_steps
from ray_app.runlog.paths import RunPaths

PARTS = ("command", "session", "keras")
_FIRST, _END = "to the first step", "to the end"
_BASELINE_SCRIPT = """
import time, ray, torch
ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
@ray.remote(num_cpus=1)
class Actor:
    def ready(self):
        import torch
        return torch.ones(1).item()
ray.get([actor.ready.remote() for actor in [Actor.remote(), Actor.remote()]])
print(time.time(), flush=True)
ray.shutdown()
"""
_BEGIN = """
import sys, time
import ray_app
from ray_app.runlog.history import read_steps
from ray_app.runlog.paths import RunPaths
folder = sys.argv[1]
ray_app.session()

def first_step_s(result):
    return read_steps(RunPaths(result.path)).records[0].time_s
"""
_SESSION_SCRIPT = (
    _BEGIN
    + """
fields = dict(data__path=folder + "/digits/train", data__eval_path=None, train__max_steps=1, train__strategy="ddp")
seconds = []
for pause_s in (0, 6, 6):
    time.sleep(pause_s)
    called_s = time.time()
    run = dict(run__storage_path=folder, run__name=str(time.time_ns()), tracking__enabled=False)
    config = ray_app.load_config("conf/digits.yaml", **fields, **run)
    seconds.append(first_step_s(ray_app.run_training(config)) - called_s)
print(*seconds)
"""
)
_KERAS_SCRIPT = (
    _BEGIN
    + """
import keras, numpy
from ray_app.keras import fit
pixels, labels = numpy.random.default_rng(0).random((64, 64), "float32"), numpy.arange(64) % 10
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
fields = {"run.storage_path": folder, "tracking.enabled": False}
first = fit(model, pixels, labels, workers=1, verbose=0, fields=fields).result
time.sleep(6)
called_s = time.time()
second = fit(model, pixels, labels, workers=1, verbose=0, fields=fields).result
print(first_step_s(first), first_step_s(second) - called_s, first.path)
"""
)


def run_command(command: list[str]) -> tuple[list[str], float, float, float]:
    """Returns the words of a command's last line of output, when it began, and its wall and its CPU seconds."""
    began, before = time.time(), getrusage(RUSAGE_CHILDREN)
    # Modules are compiled before, like installed ones.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "", "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    wall_s, after = time.time() - began, getrusage(RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout.splitlines()[-1].split(), began, wall_s, cpu_s


def sample(seconds: float, cpu_s: float) -> Sample:
    """Returns a sample of seconds; the CPU time is that of the command and of the processes for which it waited."""
    return Sample(seconds * 1e3, cpu_s * 1e3)


def measure_baseline() -> dict[str, Sample]:
    """Runs the script that does the least."""
    words, began, wall_s, cpu_s = run_command([sys.executable, "-c", _BASELINE_SCRIPT])
    return {_FIRST: sample(float(words[-1]) - began, cpu_s), _END: sample(wall_s, cpu_s)}


def measure_command(folder: Path, *options: str, config: str = "conf/digits.yaml") -> dict[str, Sample]:
    """Runs `ray-app train` with a configuration and more options."""
    name = str(time.time_ns())
    command = [sys.executable, "-m", "ray_app", "train", "--config", config, f"--run.storage_path={folder}"]
    command += [f"--run.name={name}", "--tracking.enabled=false", *options]
    _, began, wall_s, cpu_s = run_command(command)
    first_s = read_steps(RunPaths(folder / name)).records[0].time_s - began
    return {_FIRST: sample(first_s, cpu_s), _END: sample(wall_s, cpu_s)}


def measure_session(folder: Path) -> list[Sample]:
    """Returns the samples of three runs of one session; the CPU time is that of all of them."""
    words, _, _, cpu_s = run_command([sys.executable, "-c", _SESSION_SCRIPT, str(folder)])
    return [sample(float(word), cpu_s) for word in words]


def measure_fits(folder: Path) -> tuple[list[Sample], str]:
    """Returns the samples of two calls of `fit` in one session, the first from the command on, and the first run."""
    words, began, _, cpu_s = run_command([sys.executable, "-c", _KERAS_SCRIPT, str(folder)])
    return [sample(float(words[0]) - began, cpu_s), sample(float(words[1]), cpu_s)], words[2]


class Tables:
    """The samples by table and side, in the order of the first round."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, list[Sample]]] = {}

    def add(self, table: str, side: str, value: Sample) -> None:
        """Adds a sample and prints it."""
        self.samples.setdefault(table, {}).setdefault(side, []).append(value)
        print(f"  {table}, {side}: {value.wall_ms / 1e3:.2f} s", file=sys.stderr, flush=True)


def measure_round(tables: Tables, folder: Path, parts: list[str]) -> None:
    """Measures all sides of some parts once."""
    one_step = f"--data.path={folder}/digits/train", "--data.eval_path=null", "--train.max_steps=1"
    commands: dict[str, Callable[[], dict[str, Sample]]] = {
        "the least of Ray": measure_baseline,
        "two workers": lambda: measure_command(folder, *one_step, "--train.strategy=ddp"),
        "single": lambda: measure_command(folder, *one_step, "--train.strategy=single"),
        "the least again": measure_baseline,
    }
    for side, measure in commands.items() if "command" in parts else ():
        for table, value in measure().items():
            tables.add(f"command {table}", side, value)
    if "session" in parts:
        for side, value in zip(("first run", "next run", "next again"), measure_session(folder), strict=True):
            tables.add("call in a session to the first step", side, value)
    if "keras" in parts:
        (first, second), run = measure_fits(folder)
        table, config = f"Keras {_FIRST}", f"{run}/config.yaml"
        tables.add(table, "ray-app train", measure_command(folder, config=config)[_FIRST])
        tables.add(table, "fit", first)
        tables.add(table, "second fit", second)
        tables.add(table, "ray-app train again", measure_command(folder, config=config)[_FIRST])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options, tables = parser.parse_args(), Tables()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_command([sys.executable, "-m", "ray_app", "ingest", "--source", "digits", "--out", f"{folder}/digits"])
        for _ in range(options.rounds):
            measure_round(tables, folder, options.parts)
    bars = {"two workers": 1.15, "next run": 0.25, "fit": 1.15}
    for table, samples_by_side in tables.samples.items():
        report(table, samples_by_side, bars)
    print("\nAbsolute bars: single 4 s to the first step, the next run of a session 2 s, a second fit 3 s.")


if __name__ == "__main__":
    main()
