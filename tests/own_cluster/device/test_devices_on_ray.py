"""A cluster of Ray with simulated devices (`tests/device`) in its processes: workers, evaluator, prediction use them.

Ray counts GPUs and TPU chips that do not exist; a process takes the simulated device with the index that Ray assigns.
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

data, out, resource = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
num_gpus, others = (3, {}) if resource == "GPU" else (0, {resource: 2})
ray.init("local", num_cpus=8, num_gpus=num_gpus, resources=others, include_dashboard=False, log_to_driver=False)
field = "scaling__gpus_per_worker" if resource == "GPU" else "scaling__tpus_per_worker"
config = load_config("conf/digits.yaml", data__path=f"{data}/train", data__eval_path=f"{data}/eval").replace(
    run__storage_path=str(out), tracking__enabled=False, train__max_steps=40, checkpoint__every_steps=20,
    checkpoint__every_epochs=None, scaling__min_workers=1, scaling__max_workers=2, scaling__logical_workers=4,
    evaluate__num_gpus=1 if resource == "GPU" else 0, **{field: 1})
kill = Kill(str(out.parent / "killed"), step=9, rank=1)
runs = [
    run_training(config.replace(run__name="two"), faults=Faults(train=Hooks(after_step=kill))),
    run_training(config.replace(run__name="one", scaling__max_workers=1)),
]
commits = [json.loads(path.read_text()) for path in out.glob("two/**/COMMIT.json")]
devices = sorted({commit["environment"]["device"] for commit in commits})
if resource == "GPU":
    predictions = str(out.parent / "predictions")
    arguments = {"run": f"{out}/two", "data": f"{data}/eval", "out": predictions, "num_gpus": 1}
    assert main(["--config=conf/digits.yaml"] + [f"--predict.{name}={value}" for name, value in arguments.items()]) == 0
print(json.dumps([kill.num_fired, [run.summary for run in runs], devices]))
"""


@pytest.mark.rest
@pytest.mark.parametrize(("resource", "device"), [("GPU", "sim"), ("TPU", "tpu")])
def test_a_run_on_devices_is_bit_identical_after_a_kill_and_evaluated(
    digits: Path, tmp_path: Path, resource: str, device: str
) -> None:
    path = os.pathsep.join((str(autoload_folder(tmp_path / "autoload")), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "SIMULATED_DEVICE": device}
    command = [sys.executable, "-c", SCRIPT, str(digits), str(tmp_path / "runs"), resource]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    kills, (two, one), devices = json.loads(done.stdout.splitlines()[-1])
    assert kills == 1
    assert two["world_sizes"][:2] == [[0, 2], [9, 1]]
    assert two["params_digest"] == one["params_digest"]
    assert devices == [f"{device} simulated"]
    assert (two["best"]["step"], two["best"]["value"]) == (one["best"]["step"], one["best"]["value"])
