"""A run waits for nodes, which Ray's autoscaler starts from zero as local processes, and trains on them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.support.paths import ROOT
from tests.support.waiting import wait_until

NODE = {"resources": {"CPU": 1, "object_store_memory": 10**8}, "node_config": {}, "min_workers": 0, "max_workers": 4}
LISTS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
CONFIG: dict[str, Any] = {
    "cluster_name": "from-zero",
    "max_workers": 4,
    "upscaling_speed": 100,
    "idle_timeout_minutes": 5,
    "docker": {},
    "auth": {},
    "available_node_types": {"head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}, "cpu": NODE},
    "head_node_type": "head",
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    **{f"{name}_commands": [] for name in LISTS},
}

SCRIPT = """
import sys, ray
from ray_app import load_config, run_training
from ray_app.cluster.ray_private import require_token

require_token()
address, data, out = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
assert sum(node["Resources"].get("CPU", 0) for node in ray.nodes()) == 0
config = load_config("conf/digits.yaml", data__path=data, data__eval_path=None).replace(
    run__storage_path=out, run__name="run", tracking__enabled=False, train__max_steps=40, scaling__max_workers=2, scaling__min_workers=2)
summary = run_training(config).summary
assert summary["status"] == "finished", summary
assert summary["world_sizes"] == [[0, 2]] or summary["world_sizes"] == [(0, 2)], summary["world_sizes"]
print("all well", sum(node["Resources"].get("CPU", 0) for node in ray.nodes()))
"""  # noqa: E501


@pytest.fixture
def from_zero(tmp_path: Path) -> Iterator[str]:
    """Address of a head without CPUs; its autoscaler may start four nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    file = tmp_path / "cluster.yaml"
    file.write_text(
        json.dumps(CONFIG | {"provider": {"type": "fake_multinode", "gcs_address": address, "launch_multiple": True}})
    )
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=0",
    ]
    command += [
        "--object-store-memory=200000000",
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--autoscaling-config={file}",
    ]
    environment = os.environ | {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    with open(tmp_path / "head.log", "wb") as log:
        head = subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)
    try:
        wait_until(
            lambda: "will now block" in (tmp_path / "head.log").read_text() or head.poll() is not None,
            "the head does not start",
        )
        assert head.poll() is None, (tmp_path / "head.log").read_text()
        yield address
    finally:
        ended = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in ended:
            process.kill()
        psutil.wait_procs(ended, 10)
        head.wait()


def test_a_run_waits_for_the_nodes_that_an_autoscaler_starts(from_zero: str, digits: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", SCRIPT, from_zero, str(digits / "train"), str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "nodes for 0 of at least 2 workers; waiting for capacity" in done.stdout
    assert "all well 3" in done.stdout, "two workers and one CPU for reading"
