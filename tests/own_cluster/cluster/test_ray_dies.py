"""Ray itself dies during a run: the driver ends within minutes, and the same command resumes from the newest
checkpoint.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = """
import json, sys, time
import psutil, ray
from io import StringIO
from pathlib import Path
from rich.console import Console
from ray_app import load_config, run_training
from ray_app.drill.faults import WaitForEvidence
from ray_app.drill.faults import Evidence
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks

data, out, kills = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
config = load_config("conf/digits.yaml", data__path=data, data__eval_path=None).replace(
    run__storage_path=str(out), run__name="run", tracking__enabled=False, train__max_steps=60, scaling__max_workers=2,
    checkpoint__every_epochs=None, checkpoint__every_steps=20)
evidence = Evidence(str(out / "evidence"))
hooks = Hooks(after_step=WaitForEvidence(evidence, "held", "released", 30, 0)) if kills else Hooks()


def act(job):
    if kills and evidence.get("held") and not (out / "killed").exists():
        [process] = [p for p in psutil.Process().children(recursive=True) if p.name().startswith(kills)]
        process.kill()
        (out / "killed").write_text(kills)


result = run_training(config, Console(file=StringIO()), Faults(hooks), observe=act)
print(json.dumps({"digest": result.summary["params_digest"], "status": result.summary["status"]}), flush=True)
"""


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    done = run(digits, tmp_path_factory.mktemp("undisturbed") / "runs", "")
    assert done.returncode == 0, done.stderr[-3000:]
    return printed_result(done)


@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_the_same_command_resumes_after_ray_has_died(
    digits: Path, undisturbed: dict[str, str], tmp_path: Path, process: str
) -> None:
    died = run(digits, tmp_path / "runs", process)
    assert (tmp_path / "runs" / "killed").read_text() == process
    assert died.returncode != 0, "the run does not go on without Ray"
    again = run(digits, tmp_path / "runs", "")
    assert again.returncode == 0, again.stderr[-3000:]
    assert printed_result(again) == undisturbed


def run(digits: Path, out: Path, kills: str) -> subprocess.CompletedProcess[str]:
    """Trains in another process, which starts its own cluster."""
    out.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", SCRIPT, str(digits / "train"), str(out), kills]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def printed_result(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Returns the result that the process printed last."""
    result: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
