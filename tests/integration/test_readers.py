"""Ray Data's shared actors live on the driver's node, so that losing a worker's node holds no reader up."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.cluster import ROOT

SCRIPT = """
import ray
from ray.cluster_utils import Cluster
from ray.data._internal.stats import STATS_ACTOR_NAME, STATS_ACTOR_NAMESPACE
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_app.data.source import anchor_here
from ray_app.train.ray_token import require_token

require_token()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
here = ray.get_runtime_context().get_node_id()
assert other.node_id != here
anchor_here()
there = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
ray.get(ray.remote(num_cpus=0)(anchor_here).options(scheduling_strategy=there).remote())  # as a worker that reads
for name, namespace in ((STATS_ACTOR_NAME, STATS_ACTOR_NAMESPACE), ("AutoscalingCoordinator", "AutoscalingCoordinator")):
    actor = ray.get_actor(name, namespace=namespace)
    assert ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())) == here, name
print("all here")
ray.shutdown()
cluster.shutdown()
"""


def test_shared_actors_live_with_the_driver() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "all here" in done.stdout
