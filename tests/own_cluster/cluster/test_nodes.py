"""System metrics of a real cluster of several raylets: one node joins and one dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SCRIPT = """
import sys, time, ray
from pathlib import Path
from ray_app.drill.cluster import open_drill_cluster
from ray_app.watch.metrics import NodeSampler
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.node_metrics import read_samples

paths = RunPaths(Path(sys.argv[1]))

def newest():
    return (list(read_samples(paths, "").values()) or [None])[-1]

def until(count):
    deadline = time.monotonic() + 40
    while (newest() is None or len(newest().nodes) != count):
        assert time.monotonic() < deadline, (count, newest())
        time.sleep(0.05)
    return sorted(newest().nodes)

with open_drill_cluster(1, evaluates=False) as nodes:
    with NodeSampler(paths, 1, 0.2) as sampler:
        sampler.step = 7
        names = until(3)
        for name, values in newest().nodes.items():
            assert {"cpu_percent", "memory_percent", "memory_gb"} <= values.keys(), values
            assert 0 < values["memory_percent"] <= 100 and 0 <= values["cpu_percent"] <= 100, values
        loaded = lambda self: [m for m in ("torch", "mlflow") if m in __import__("sys").modules]
        probes = [node.probe for node in sampler._nodes.values()]
        found = ray.get([probe.__ray_call__.remote(loaded) for probe in probes])
        assert found == [[], []], found
        [added] = nodes.add_nodes(1)
        assert set(until(4)) > set(names)
        nodes.kill_node(added)
        assert until(3) == names
    assert newest().step == 7
    with NodeSampler(paths, 2, 0.2):
        before = len(read_samples(paths, ""))
        while len(read_samples(paths, "")) < before + 3:
            time.sleep(0.05)
        assert until(3) == names, "names are the same after a restart"
    assert list(read_samples(paths, "000001-999999999.json"))[0] == "000002-000000000.json"
    for probe in probes:
        try:
            ray.get(probe.measure.remote(), timeout=10)
            raise AssertionError("the actor outlives the run")
        except ray.exceptions.RayActorError:
            pass
print("all well", names)
"""


def test_metrics_follow_nodes_that_join_and_die(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "all well" in done.stdout
