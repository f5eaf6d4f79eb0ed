"""Workers, evaluator and parameter servers run on labelled nodes only: real clusters of several raylets, with a head
that has free CPUs and no label.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SCRIPT = """
import os, sys
from pathlib import Path
from types import SimpleNamespace

import ray
from ray.cluster_utils import Cluster
from ray.train import ScalingConfig

from ray_app import load_config, run_training
from ray_app.drill.faults import HookChain
from ray_app.errors import ConfigError
from ray_app.driver.run import Faults
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks
from ray_app.cluster.controller.scaling_policy import ElasticPolicy
from tests.support.injector import DelayUntilEvent
from tests.support.injector import RecordNode

data, out = sys.argv[1], Path(sys.argv[2])
cluster = Cluster()
cluster.add_node(num_cpus=6, num_gpus=2, env_vars={"CUDA_VISIBLE_DEVICES": "3,5"}, include_dashboard=False)
first = cluster.add_node(num_cpus=2, labels={"zone": "a"})
ray.init(address=cluster.address, log_to_driver=False)
config = load_config("conf/digits.yaml", data__path=data, data__eval_path=None).replace(
    run__storage_path=str(out), tracking__enabled=False, train__max_steps=120, scaling__min_workers=1, scaling__max_workers=2,
    scaling__logical_workers=4, scaling__resize_interval_s=0.2, scaling__label_selector={"zone": "a"})


def possible(config):
    policy = ElasticPolicy(ScalingConfig(num_workers=(1, 2), label_selector=config.scaling.label_selector), config, 1.0)
    policy.after_controller_start(SimpleNamespace(run_id="probe"))
    asked = ray.get(policy._autoscaling_coordinator.__ray_call__.remote(
        lambda self: [len(request.requested_resources) for request in self._ongoing_reqs.values()]))
    found = policy.possible_workers()
    policy._cancel_resource_request()
    return found, asked


assert possible(config) == (2, [2]), "the free CPUs of the head do not count"
assert possible(config.replace(scaling__label_selector=None)) == (2, [3]), "reading is asked for, too"

try:
    run_training(config.replace(scaling__label_selector={"zone": "c"}))
    raise AssertionError("no node is in zone c")
except ConfigError as error:
    assert "no node of the cluster has these labels; it has" in str(error) and "zone: a" in str(error), error
assert not out.exists(), "nothing was written"


@ray.remote(num_cpus=0, num_gpus=1)
class OnGpu:
    def visible(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]


actors = [OnGpu.remote(), OnGpu.remote()]
visible = sorted(ray.get([actor.visible.remote() for actor in actors]))
assert visible == ["3", "5"], "each gets one of the GPUs that the node was started with"
added = []


def add_another(job):
    if not added and any(event.details["step"] == 0 for event in read_events(job.paths, "formed")):
        added.append(cluster.add_node(num_cpus=1, labels={"zone": "a"}))


linger = DelayUntilEvent(str(out / "run"), "formed", {"workers": 2}, after=4)
hooks = Hooks(after_step=HookChain((RecordNode(str(out / "nodes")), linger)))
judged = config.replace(run__name="run", data__eval_path=data)
result = run_training(judged, faults=Faults(hooks, RecordNode(str(out / "evaluators"))), observe=add_another)
assert result.summary["status"] == "finished"
assert [workers for _, workers in result.summary["world_sizes"]] == [1, 2], result.summary["world_sizes"]
seen = {path.name for path in (out / "nodes").iterdir()}
assert seen == {first.node_id, added[0].node_id}, "workers run on labelled nodes, and on the one that came"
assert {path.name for path in (out / "evaluators").iterdir()} <= seen, "the evaluator runs on labelled nodes, too"
ray.shutdown()
cluster.shutdown()
print("all well")
"""  # noqa: E501

SERVERS = """
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from ray_app import load_config, run_training
from ray_app.errors import ConfigError

data, out = sys.argv[1], Path(sys.argv[2])
cluster = Cluster()
cluster.add_node(num_cpus=6, include_dashboard=False)
labelled = cluster.add_node(num_cpus=4, labels={"role": "train"})
ray.init(address=cluster.address, log_to_driver=False)
config = load_config("conf/digits.yaml", data__path=data, data__eval_path=None).replace(
    run__storage_path=str(out), run__name="run", tracking__enabled=False, train__max_steps=10, scaling__max_workers=2,
    scaling__logical_workers=4, train__strategy="parameter_server", train__servers=2,
    scaling__label_selector={"role": "train"})

try:
    run_training(config.replace(scaling__label_selector={"role": "none"}))
    raise AssertionError("no node has this role")
except ConfigError as error:
    assert "scaling.label_selector is {'role': 'none'}" in str(error) and "role: train" in str(error), error
assert not out.exists(), "nothing was written"
seen = {}


def note_nodes(job):
    for number in range(2):
        try:
            server = ray.get_actor(f"server-{job.paths.unique_name}-{job.fence}-{number}")
            node = server.__ray_call__.remote(lambda self: __import__("ray").get_runtime_context().get_node_id())
            seen[number] = ray.get(node)
        except (ValueError, ray.exceptions.RayActorError):
            continue  # not yet, or no longer


result = run_training(config, observe=note_nodes)
assert result.summary["status"] == "finished"
assert seen == {0: labelled.node_id, 1: labelled.node_id}, "parameter servers run on labelled nodes"
ray.shutdown()
cluster.shutdown()
print("all well")
"""


def test_workers_run_on_labelled_nodes_only(digits: Path, tmp_path: Path) -> None:
    run_script(SCRIPT, digits, tmp_path)


def test_parameter_servers_run_on_labelled_nodes_only(digits: Path, tmp_path: Path) -> None:
    run_script(SERVERS, digits, tmp_path)


def run_script(script: str, digits: Path, tmp_path: Path) -> None:
    settings = {"PYTHONPATH": str(ROOT), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | settings
    command = [sys.executable, "-c", script, str(digits / "train"), str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "all well" in done.stdout
