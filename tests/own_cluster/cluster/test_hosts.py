"""A host is partitioned from the others and comes back, on real network namespaces."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from tests.support.cluster import record_of
from tests.support.hosts import Hosts, skip_unless_supported
from tests.support.paths import ROOT

STEPS = 60
DRIVER = """
import json, os, sys
from ray_app import run_training
from ray_app.config.config import from_yaml
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks
from tests.support.injector import DelayUntilEvent
config = from_yaml(open(sys.argv[1]).read())
linger = DelayUntilEvent(sys.argv[2], "failed", {}, after=20, each_s=float(sys.argv[3]))
run_training(config, faults=Faults(train=Hooks(after_step=linger)))
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    skip_unless_supported()
    namespaces = Hosts([2, 2])
    yield namespaces
    namespaces.close()


def drive(hosts: Hosts, folder: Path, config: Any, each_s: float) -> subprocess.Popen[bytes]:
    (folder / "config.yaml").write_text(config.to_yaml())
    run = Path(config.run.storage_path) / str(config.run.name)
    command = [sys.executable, "-c", DRIVER, str(folder / "config.yaml"), str(run), str(each_s)]
    environment = {**hosts.environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def test_a_partitioned_host_rejoins_and_the_run_stays_bit_identical(
    hosts: Hosts, make_short_config: Any, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {
        "train__max_steps": STEPS,
        "train__epochs": 3,
        "scaling__max_workers": 3,
        "failure__heartbeat_timeout_s": 3.0,
    }
    alone = drive(hosts, tmp_path, make_short_config(run__name="alone", **fields), each_s=0.0)
    assert alone.wait(200) == 0
    paths = RunPaths(tmp_path / "runs" / "run")
    driver = drive(hosts, tmp_path, make_short_config(run__name="run", **fields), each_s=3.0)
    try:
        wait_until(lambda: any(p.name.startswith("0") for p in (paths.metrics.glob("*.json"))), 120, driver)
        cut = 2
        hosts.disconnect(cut)
        assert not hosts.is_reachable(cut)
        wait_until(
            lambda: any("no heartbeat for" in str(e.details["errors"]) for e in read_events(paths, "failed")),
            60,
            driver,
        )
        hosts.reconnect(cut)
        wait_until(lambda: hosts.is_reachable(cut), 20, driver)
        assert driver.wait(200) == 0
    finally:
        driver.kill()
    summary, undisturbed = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("run", "alone")
    )
    assert summary["params_digest"] == undisturbed["params_digest"]
    assert record_of(paths.root) == record_of(tmp_path / "runs" / "alone")
    assert summary["redone_steps"] == 0
    sizes = [e.details["workers"] for e in read_events(paths, "formed")]
    assert sizes[0] == 3
    assert min(sizes) < 3


def wait_until(condition: Any, timeout_s: float, driver: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert driver.poll() is None, "the driver ended"
        assert time.monotonic() < deadline_s, f"the condition did not hold within {timeout_s} s"
        time.sleep(0.1)
