"""Parameter servers on several nodes: a node with a worker is drained, and a node with a server is lost."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
from ray_app.drill.faults import HookChain
from ray_app.driver.run import Faults
from ray_app.runlog.journal import read_events
from ray_app.train.job import Hooks
from tests.support.injector import DelayUntilEvent

config = from_yaml(Path(sys.argv[1]).read_text())
run = str(Path(config.run.storage_path) / config.run.name)

class Nodes:
    drained = lost = False

    def __call__(self, job):
        rendezvous = RendezvousHandle(ray.get_actor(job.rendezvous))
        if not self.drained and read_events(job.paths, "checkpointed"):
            beats = rendezvous.workers()
            if len(beats) == 2:
                nodes.drain_node(beats[1].node, 60)
                self.drained = True
        if self.drained and not self.lost and read_events(job.paths, "preempted"):
            server = ray.get_actor(f"server-{job.paths.unique_name}-{job.fence}-0")
            nodes.kill_node(ray.get(server.__ray_call__.remote(lambda self: __import__("ray").get_runtime_context().get_node_id())))
            self.lost = True

with open_drill_cluster(5, evaluates=False) as nodes:
    slow = (DelayUntilEvent(run, "preempted", {}, after=9, each_s=10), DelayUntilEvent(run, "server_lost", {}, after=18, each_s=10))
    acts = Nodes()
    run_training(config, faults=Faults(train=Hooks(after_step=HookChain(slow))), observe=acts)
    assert acts.drained and acts.lost
"""  # noqa: E501


def test_draining_a_worker_node_and_losing_a_server_node_keep_parameters(
    make_short_config: Callable[..., Config], tmp_path: Path
) -> None:
    alone = claim(prepare(make_short_config(run__name="undisturbed", scaling__max_workers=2)), 1).job
    train_in_process(alone, SingleProcessMembership(4, lambda: False), Hooks())
    undisturbed = newest_commit(alone)
    config = make_short_config(train__strategy="parameter_server", train__servers=2, scaling__max_workers=2)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "config.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    paths = RunPaths(tmp_path / "runs" / "run")
    summary = read_json(paths.summary)
    assert (summary["status"], summary["restarts"]["preemptions"]) == ("finished", 1)
    assert summary["restarts"]["failures"] == 0, "a preemption with notice counts as no failure"
    [lost] = read_events(paths, "server_lost")
    assert lost.details["back_to"] in (8, 16, 24)
    before = [e.details for e in read_events(paths, "formed") if e.time_s < lost.time_s]
    assert [details["workers"] for details in before][-2:] == [2, 1]
    assert not any("lost_s" in details for details in before), "a worker that left with notice was declared lost"
    assert undisturbed is not None
    assert summary["params_digest"] == undisturbed.params_digest
    assert record_of(paths.root) == record_of(tmp_path / "runs" / "undisturbed")
