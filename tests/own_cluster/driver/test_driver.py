"""The driver is killed, and with it the head of its cluster; the same command continues the run on a new one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.variables import DEFAULT_EXPERIMENT
from ray_app.driver.finalize import close_orphan
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from tests.support.cluster import record_of
from tests.support.paths import ROOT

DRIVER = """
import sys
from ray_app import run_training
from ray_app.config.config import from_yaml
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks
from tests.support.injector import DelayUntilFile
faults = Faults(train=Hooks(after_step=DelayUntilFile(sys.argv[2], step=20)))
run_training(from_yaml(open(sys.argv[1]).read()), faults=faults)
"""


def start(folder: Path, config: Config, go_on: Path) -> subprocess.Popen[bytes]:
    path = folder / f"{config.run.name}.yaml"
    path.write_text(config.to_yaml())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(path), str(go_on)], cwd=ROOT, env=environment)


def test_the_same_command_resumes_after_driver_and_head_were_killed(
    make_short_config: Callable[..., Config], tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    fields: dict[str, Any] = {
        "scaling__min_workers": 2,
        "scaling__max_workers": 2,
        "tracking__enabled": True,
        "tracking__every_steps": 1,
    }
    go_on = tmp_path / "go-on"
    config = make_short_config(**fields)
    paths = RunPaths(tmp_path / "runs" / "run")
    driver = start(tmp_path, config, go_on)
    deadline_s = time.monotonic() + 120
    while not any(e.details["step"] == 16 for e in read_events(paths, "checkpointed")):
        assert driver.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    family = psutil.Process(driver.pid).children(recursive=True)
    os.kill(driver.pid, signal.SIGKILL)
    # A lost machine takes the head and all its processes along.
    for process in family:
        if process.is_running():
            process.kill()
    assert driver.wait(20) == -signal.SIGKILL
    assert not paths.summary.exists()
    assert close_orphan(str(paths.root))
    assert not close_orphan(str(paths.root))
    closed = json.loads(paths.summary.read_text())
    assert (closed["status"], closed["steps"], closed["restarts"]["driver"]) == ("interrupted", 16, 0)
    assert MlflowClient(default_tracking_uri(config)).get_run(closed["mlflow_run_id"]).info.status == "KILLED"
    go_on.touch()
    assert start(tmp_path, config, go_on).wait(200) == 0
    assert start(tmp_path, make_short_config(run__name="alone", **fields), go_on).wait(200) == 0
    summary, alone = (json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("run", "alone"))
    assert summary["params_digest"] == alone["params_digest"]
    assert record_of(paths.root) == record_of(tmp_path / "runs" / "alone")
    assert summary["restarts"] == {"failures": 0, "preemptions": 0, "storage": 0, "resizes": 0, "driver": 1}
    assert summary["redone_steps"] <= 20 - 16
    client = MlflowClient(default_tracking_uri(config))
    [experiment] = [e for e in client.search_experiments() if e.name == DEFAULT_EXPERIMENT]
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(r.info.run_id for r in runs) == sorted([summary["mlflow_run_id"], alone["mlflow_run_id"]])
    assert {r.info.status for r in runs} == {"FINISHED"}
    points = client.get_metric_history(summary["mlflow_run_id"], "loss")
    assert sorted(point.step for point in points) == list(range(1, 31))
