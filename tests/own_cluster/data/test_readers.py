"""Readers on a cluster do not depend on the node of a worker, and a cancelled read leaves a process that can still
decode.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SHARED_ACTORS = """
import ray
from ray.cluster_utils import Cluster
from ray.data._internal.stats import STATS_ACTOR_NAME, STATS_ACTOR_NAMESPACE
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_app.data.ray_tasks import start_shared_actors
from ray_app.cluster.ray_private import require_token

require_token()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
here = ray.get_runtime_context().get_node_id()
assert other.node_id != here
start_shared_actors()
there = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
ray.get(ray.remote(num_cpus=0)(start_shared_actors).options(scheduling_strategy=there).remote())  # as a worker that reads
for name, namespace in ((STATS_ACTOR_NAME, STATS_ACTOR_NAMESPACE), ("AutoscalingCoordinator", "AutoscalingCoordinator")):
    actor = ray.get_actor(name, namespace=namespace)
    assert ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())) == here, name
print("all here")
ray.shutdown()
cluster.shutdown()
"""  # noqa: E501

ONCE_PER_PROCESS = """
import os, sys, time
from pathlib import Path

if hasattr(sys, "registered"):
    raise AttributeError("registered twice")
sys.registered = True
Path("importing").write_text(str(os.getpid()))
deadline = time.monotonic() + 60
while not Path("go").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""
"""A module with a slow import that works once per process, like parts of torch."""

CANCELLED = """
import os, time
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, ray
from ray_app.data.bad_rows import REASON
from ray_app.data.arrays import ArraySpec
from ray_app.data.dataset import open_dataset
from ray_app.data.reader import Reader, plan_all_reads
from ray_app.data.ray_tasks import fetch_ray
from ray_app.errors import BadRowError
from ray_app.cluster.ray_private import require_token

require_token()
Path("data").mkdir()
pq.write_table(pa.table({"x": [0, 1]}), "data/rows.parquet", row_group_size=1)
dataset = open_dataset("data")

def decode(rows):
    deadline = time.monotonic() + 60
    while 0 in rows["x"] and not Path("importing").exists():  # the other task is in the middle of its import
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if 0 in rows["x"]:
        raise ValueError("ends the reading")
    import once_per_process
    return {"pid": np.full((len(rows["x"]), 1), os.getpid())}

def read(skips):
    reader = Reader(dataset.root, ["x"], decode, {"pid": ArraySpec("<i8", (1,))}, skips)
    return pa.concat_tables(fetch_ray(reader, plan_all_reads(dataset.manifest, 1)))

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
try:
    read(skips=False)
except BadRowError as error:
    print(error)
Path("go").touch()
interrupted = int(Path("importing").read_text())
deadline = time.monotonic() + 60
while True:
    table = read(skips=True)
    reasons = table.column(REASON).to_pylist()
    assert reasons[0].startswith("ValueError: ends the reading (") and reasons[1] is None, reasons
    if np.frombuffer(table.column("pid")[1].as_py(), "<i8")[0] == interrupted:
        break
    assert time.monotonic() < deadline, "the interrupted process has read nothing since"
print("all read")
ray.shutdown()
"""


def output_of(script: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": f"{ROOT}:{folder}"
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_shared_actors_live_with_the_driver(tmp_path: Path) -> None:
    assert "all here" in output_of(SHARED_ACTORS, tmp_path)


def test_a_read_cancelled_during_an_import_leaves_a_process_that_can_decode(tmp_path: Path) -> None:
    """Ray interrupts the process of a cancelled task and reuses it."""
    (tmp_path / "once_per_process.py").write_text(ONCE_PER_PROCESS)
    message, *_, last = output_of(CANCELLED, tmp_path).splitlines()
    assert message.startswith("rows.parquet, row group 0, row 0: ValueError: ends the reading (")
    assert last == "all read"
