"""A study on a cluster that shrinks and grows in the middle, on real raylets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from ray_app import load_config, run_study
from ray_app.drill.cluster import open_drill_cluster
from ray_app.tune import study
from ray_app.tune.record import StudyPaths, read_record
from tests.support.waiting import wait_until

digits, out = Path(sys.argv[1]), Path(sys.argv[2])
out.mkdir()
config = load_config("conf/digits.yaml", data__path=str(digits / "train"), data__eval_path=str(digits / "eval")).replace(
    task={"class_path": "tests.support.slow_task.SlowTask", "init_args": {"folder": str(out)}},
    run__storage_path=str(out), tracking__enabled=False, train__epochs=4, checkpoint__every_epochs=1,
    scaling__min_workers=1, scaling__max_workers=2, scaling__logical_workers=4, scaling__resize_interval_s=0.5)
tune = {"space": {"schedule.init_args.max_lr": {"log_uniform": [1.0e-4, 1.0e-1]}}, "trials": 4,
    "scheduler": {"kind": "halving", "eta": 2, "min_epochs": 1}}
# The trials that are left get two workers at once, although they are short.
study._GROW_S = 0.0
paths, fast = StudyPaths(out / "disturbed"), out / "fast"

def nodes_of(name):
    actors = [a for a in ray._private.state.actors().values() if a["State"] == "ALIVE" and name in a["ActorClassName"]]
    return [actor["Address"]["NodeID"] for actor in actors]

def slots():
    record = read_record(paths)
    return record.slots if record is not None and record.results else None

with open_drill_cluster(3, evaluates=False) as nodes, ThreadPoolExecutor() as pool:
    fast.touch()
    undisturbed = run_study(config, {**tune, "name": "undisturbed"}).record
    fast.unlink()
    future = pool.submit(run_study, config, {**tune, "name": "disturbed"})
    wait_until(lambda: slots() == 4 or future.done(), 200)
    nodes.kill_node(nodes_of("_TrialSlot")[0])
    wait_until(lambda: slots() == 3 or future.done(), 100)
    # A trial with two workers loses the node of one of them.
    wait_until(lambda: len(nodes_of("RayTrainWorker")) == 2 or future.done(), 200)
    nodes.kill_node(nodes_of("RayTrainWorker")[0])
    nodes.add_nodes(2)
    assert not future.done()
    fast.touch()
    disturbed = future.result().record
assert {result.workers for result in disturbed.results} == {1, 2}
assert disturbed.decisions == undisturbed.decisions
print("all well")
"""  # noqa: E501


def test_a_study_on_a_changing_cluster_decides_as_on_one_that_stays(digits: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", SCRIPT, str(digits), str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "all well" in done.stdout
