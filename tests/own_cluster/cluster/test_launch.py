"""`ray-app launch` on two hosts, which are network namespaces: one cluster, and one exit code on both."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_app.config.config import Config
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from tests.support.hosts import Namespaces, skip_unless_supported
from tests.support.paths import ROOT
from tests.support.waiting import wait_until


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    skip_unless_supported()
    hosts = Namespaces(2)
    yield hosts
    hosts.close()


def launch(hosts: Namespaces, config: Config, folder: Path, port: int) -> list[int]:
    """Launches a run on both hosts; returns the exit codes."""
    (folder / "config.yaml").write_text(config.to_yaml())
    command = [sys.executable, "-m", "ray_app", "launch", "--config", str(folder / "config.yaml")]
    addresses = [f"{hosts.address_of(host)}:{port}" for host in (1, 2)]
    processes = []
    for index in (0, 1):
        spec = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        variables = {"TF_CONFIG": json.dumps(spec), "RAY_AUTH_TOKEN": "f" * 64, "PYTHONPATH": str(ROOT)}
        processes.append(hosts.popen(index + 1, command, {**os.environ, **variables}))
    return [process.wait(400) for process in processes]


def test_a_launch_trains_on_all_hosts_and_ends_on_each_with_the_exit_code_of_the_run(
    namespaces: Namespaces, make_short_config: Callable[..., Config], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"scaling__max_workers": 2, "scaling__min_workers": 2, "scaling__label_selector": None}
    config = make_short_config(run__name="run", **fields)
    assert launch(namespaces, config, tmp_path, 23456) == [0, 0]
    paths = RunPaths(Path(config.run.storage_path) / "run")
    assert [e.details["workers"] for e in read_events(paths, "formed")] == [2]
    assert json.loads(paths.summary.read_text())["status"] == "finished"
    wait_until(lambda: [namespaces.process_count(host) for host in (1, 2)] == [0, 0])
    refused = make_short_config(run__name="refused", data__path=str(tmp_path / "nowhere"), **fields)
    assert launch(namespaces, refused, tmp_path, 23458) == [2, 2]
