"""A node of a cluster is drained: its worker leaves, the other continues, and the parameters stay bit-identical."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_app.config.config import Config
from ray_app.driver.finalize import newest_commit
from ray_app.driver.single import train_in_process
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import read_json
from ray_app.train.job import Hooks
from ray_app.train.membership import SingleProcessMembership
from tests.support.cluster import record_of
from tests.support.paths import ROOT

SCRIPT = """
import ray, sys
from pathlib import Path
from ray_app import run_training
from ray_app.cluster.rendezvous.actor import RendezvousHandle
from ray_app.config.config import from_yaml
from ray_app.drill.cluster import open_drill_cluster
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks
from tests.support.injector import DelayUntilEvent

config = from_yaml(Path(sys.argv[1]).read_text())
run = str(Path(config.run.storage_path) / config.run.name)

class Drain:
    node = None

    def __call__(self, job):
        beats = RendezvousHandle(ray.get_actor(job.rendezvous)).workers() if self.node is None else []
        if len(beats) == 2:
            self.node = beats[1].node
            nodes.drain_node(self.node, 60)

with open_drill_cluster(2, evaluates=False) as nodes:
    drain = Drain()
    run_training(config, faults=Faults(train=Hooks(after_step=DelayUntilEvent(run, "preempted", {}, after=3, each_s=3))), observe=drain)
    assert drain.node is not None
"""  # noqa: E501


@pytest.mark.rest
def test_workers_leave_a_drained_node_without_losing_steps(
    make_short_config: Callable[..., Config], tmp_path: Path
) -> None:
    alone = claim(prepare(make_short_config(run__name="undisturbed", scaling__max_workers=2)), 1).job
    train_in_process(alone, SingleProcessMembership(alone.config.logical_workers, lambda: False), Hooks())
    config = make_short_config(scaling__min_workers=1, scaling__max_workers=2)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "config.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    paths = RunPaths(tmp_path / "runs" / "run")
    summary, undisturbed = read_json(paths.summary), newest_commit(alone)
    assert [event.details["workers"] for event in read_events(paths, "formed")] == [2, 1]
    assert (summary["restarts"]["preemptions"], summary["restarts"]["failures"]) == (1, 0), (
        "a preemption with notice counts as no failure"
    )
    assert summary["redone_steps"] == 0
    assert undisturbed is not None
    assert summary["params_digest"] == undisturbed.params_digest
    assert record_of(paths.root) == record_of(tmp_path / "runs" / "undisturbed")
