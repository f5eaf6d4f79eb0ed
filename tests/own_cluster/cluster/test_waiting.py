"""A run with fewer workers than `scaling.min_workers` waits, reports it, and continues when a node joins: on real
raylets.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = """
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from ray_app import load_config, run_training
from ray_app.drill.cluster import open_drill_cluster
from ray_app.drill.faults import WaitForEvidence
from ray_app.drill.faults import Evidence
from ray_app.runlog.journal import read_events
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks

data, out, strategy, steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
config = load_config("conf/digits.yaml", data__path=data, data__eval_path=None).replace(
    run__storage_path=str(out), tracking__enabled=False, train__strategy=strategy, train__epochs=1000, train__max_steps=steps,
    train__peer_replica=strategy == "fsdp",
    scaling__min_workers=2, scaling__max_workers=2, scaling__logical_workers=4, scaling__resize_interval_s=0.5,
    checkpoint__every_epochs=None, checkpoint__every_steps=1000)
said = StringIO()
with open_drill_cluster(2, evaluates=False) as nodes:
    undisturbed = run_training(config.replace(run__name="undisturbed"), Console(file=StringIO()))
    evidence, lost, added = Evidence(str(out / "evidence")), [], []

    def act(job):
        held = evidence.get("held")
        if held and not lost:
            lost.append(held["node"])
            nodes.kill_node(held["node"])
            evidence.put("released", step=held["step"])
        if lost and not added and "waiting for capacity" in said.getvalue():
            formed = [event.details["workers"] for event in read_events(job.paths, "formed")]
            assert formed == ([2] if strategy == "fsdp" else [2, 1]), formed
            added.extend(nodes.add_nodes(1))

    faults = Faults(Hooks(after_step=WaitForEvidence(evidence, "held", "released", 15, 1)))
    result = run_training(config.replace(run__name="waits"), Console(file=said, width=200), faults=faults, observe=act)
assert lost and added, said.getvalue()
assert "1 of at least 2 workers; waiting" in said.getvalue(), said.getvalue()
assert result.summary["status"] == "finished"
assert result.summary["world_sizes"][-1][1] == 2, "it did not end before others came"
assert result.summary["redone_steps"] == 0
assert result.summary["params_digest"] == undisturbed.summary["params_digest"]
print("all well")
"""  # noqa: E501


@pytest.mark.parametrize(("strategy", "steps"), [("ddp", 1500), ("fsdp", 40)])
def test_a_run_below_min_workers_waits_and_continues(digits: Path, tmp_path: Path, strategy: str, steps: int) -> None:
    """With `ddp` the remaining worker trains some hundred steps until the controller knows that no worker can join.
    With `fsdp` it lacks the memory.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", SCRIPT, str(digits / "train"), str(tmp_path / "runs"), strategy, str(steps)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "all well" in done.stdout
