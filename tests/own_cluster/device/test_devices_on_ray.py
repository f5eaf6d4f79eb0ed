"""A cluster of Ray with simulated devices (`tests/device`) in its processes: workers, evaluator, prediction use them.

Ray counts GPUs that do not exist; a process takes the simulated device with the index that Ray assigns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.simulated import autoload_folder
from tests.support.paths import ROOT

SCRIPT = """
import json, sys
from pathlib import Path

import ray

from ray_app import load_config, run_training
from ray_app.cli.predict import main
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks
from tests.support.injector import Kill

data, out = sys.argv[1], Path(sys.argv[2])
ray.init("local", num_cpus=8, num_gpus=3, include_dashboard=False, log_to_driver=False)
config = load_config("conf/digits.yaml", data__path=f"{data}/train", data__eval_path=f"{data}/eval").replace(
    run__storage_path=str(out), tracking__enabled=False, train__max_steps=40, checkpoint__every_steps=20,
    checkpoint__every_epochs=None, scaling__min_workers=1, scaling__max_workers=2, scaling__logical_workers=4,
    evaluate__num_gpus=1, scaling__gpus_per_worker=1)
kill = Kill(str(out.parent / "killed"), step=9, rank=1)
runs = [
    run_training(config.replace(run__name="two"), faults=Faults(train=Hooks(after_step=kill))),
    run_training(config.replace(run__name="one", scaling__max_workers=1)),
]
commits = [json.loads(path.read_text()) for path in out.glob("two/**/COMMIT.json")]
devices = sorted({commit["environment"]["device"] for commit in commits})
predictions = str(out.parent / "predictions")
arguments = {"run": f"{out}/two", "data": f"{data}/eval", "out": predictions, "num_gpus": 1}
assert main(["--config=conf/digits.yaml"] + [f"--predict.{name}={value}" for name, value in arguments.items()]) == 0
print(json.dumps([kill.num_fired, [run.summary for run in runs], devices]))
"""

DRILL = """
import sys

import ray

from ray_app.cli.drill import main

ray.init("local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
sys.exit(main(sys.argv[1:]))
"""


def run_with_devices(
    script: str, folder: Path, *arguments: str, limit_s: float = 500
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program with simulated devices in all its processes and in those of Ray that it starts."""
    path = os.pathsep.join((str(autoload_folder(folder / "autoload")), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


@pytest.mark.rest
def test_a_run_on_devices_is_bit_identical_after_a_kill_and_evaluated(digits: Path, tmp_path: Path) -> None:
    done = run_with_devices(SCRIPT, tmp_path, str(digits), str(tmp_path / "runs"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    kills, (two, one), devices = json.loads(done.stdout.splitlines()[-1])
    assert kills == 1
    assert two["world_sizes"][:2] == [[0, 2], [9, 1]]
    assert two["params_digest"] == one["params_digest"]
    assert devices == ["sim simulated"]
    assert (two["best"]["step"], two["best"]["value"]) == (one["best"]["step"], one["best"]["value"])


@pytest.mark.timeout(1800)
def test_every_scenario_of_a_drill_that_is_possible_with_devices_ends_with_equal_parameters(
    digits: Path, tmp_path: Path
) -> None:
    fields = {
        "config": "conf/digits.yaml",
        "data.path": digits / "train",
        "data.eval_path": digits / "eval",
        "scaling.gpus_per_worker": 1,
        "scaling.max_workers": 3,
        "evaluate.num_gpus": 1,
        "drill.out": tmp_path / "out",
    }
    done = run_with_devices(DRILL, tmp_path, *(f"--{name}={value}" for name, value in fields.items()), limit_s=1780)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["complete"]
    left_out = {s["scenario"]: s["reason"] for s in certificate["scenarios"] if s["outcome"] == "left out"}
    print(left_out)
    assert len(certificate["scenarios"]) - len(left_out) >= 20
    assert {s["outcome"] for s in certificate["scenarios"]} == {"equal", "left out"}
    assert set(certificate["host"]["gpus"]) == {"simulated"}
