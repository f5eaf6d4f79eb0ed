"""A run with a killed driver is closed once: in its record, in its summary and in MLflow."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_app import run_training
from ray_app.checkpoint.format import pack
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config, default_tracking_uri
from ray_app.driver import finalize
from ray_app.driver.finalize import close_orphan
from ray_app.errors import RunHeldError
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.lease import acquire_lease, newest_fence
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json, read_json
from tests.support.checkpoints import commit_of, snapshot_of
from tests.support.mlflow_server import MlflowServer, mlflow_runs
from tests.support.orphans import make_orphan
from tests.support.paths import ROOT, SUPPORT
from tests.support.waiting import wait_until


@pytest.fixture
def config(make_short_config: Callable[..., Config]) -> Config:
    return make_short_config(tracking__enabled=True, tracking__every_steps=1)


@pytest.fixture
def paths(config: Config) -> RunPaths:
    return RunPaths(Path(config.run.storage_path) / str(config.run.name))


@pytest.fixture
def driver(config: Config, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver in mid-run, after 20 steps."""
    (tmp_path / "given.yaml").write_text(config.to_yaml())
    command = [sys.executable, str(SUPPORT / "orphans.py"), str(tmp_path / "given.yaml"), "20"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def mlflow_run(config: Config) -> Any:
    [run] = mlflow_runs(default_tracking_uri(config), str(config.run.name))
    return run


@pytest.mark.rest
def test_the_run_of_a_killed_driver_is_closed_once(
    driver: subprocess.Popen[str], config: Config, paths: RunPaths, tmp_path: Path
) -> None:
    root = str(paths.root)
    # The driver still lives.
    with pytest.raises(RunHeldError):
        close_orphan(root)
    assert mlflow_run(config).info.status == "RUNNING"
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    Path(config.data.path).rename(tmp_path / "out of reach")
    try:
        results: list[bool] = []

        def close() -> None:
            try:
                results.append(close_orphan(root))
            except RunHeldError:
                # The other thread holds the lease.
                results.append(False)

        both = [threading.Thread(target=close) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join(60)
    finally:
        (tmp_path / "out of reach").rename(config.data.path)
    assert sorted(results) == [False, True]
    [event] = read_events(paths, "driver_lost")
    assert (event.fence, event.details["status"], event.details["step"]) == (1, "interrupted", 20)
    tracked_run, summary = mlflow_run(config), read_json(paths.summary)
    assert tracked_run.info.status == "KILLED"
    assert (summary["status"], summary["steps"], summary["mlflow_run_id"]) == (
        "interrupted",
        20,
        tracked_run.info.run_id,
    )
    assert summary["restarts"]["driver"] == 0
    assert tracked_run.data.metrics["loss"] == 1.0
    assert not [tag for tag in tracked_run.data.tags if tag.startswith("ray_app.resumed_with")]
    assert not close_orphan(root)
    assert newest_fence(paths) == 2
    assert_next_start(paths)


def assert_next_start(paths: RunPaths) -> None:
    """Asserts that the next start has the newest checkpoint, and a fence above the one used to close the run."""
    store = CheckpointStore(paths)
    [newest] = store.commits()
    assert (newest.step, newest.fence) == (20, 1)
    with acquire_lease(paths) as lease:
        assert lease.fence == 3
        store.write(pack(snapshot_of(30)), commit_of(30, lease.fence))
        with pytest.raises(RunHeldError):
            close_orphan(str(paths.root))
    assert [(c.step, c.fence) for c in store.commits()] == [(20, 1), (30, 3)]


@pytest.mark.rest
def test_an_orphan_at_its_last_step_is_closed_as_finished(config: Config, paths: RunPaths) -> None:
    make_orphan(config, last=30)
    assert close_orphan(str(paths.root))
    assert read_json(paths.summary)["status"] == "finished"
    assert mlflow_run(config).info.status == "FINISHED"


def test_a_run_that_failed_before_its_driver_died_is_closed_as_failed(config: Config, paths: RunPaths) -> None:
    make_orphan(config, last=20, end="run_failed")
    assert close_orphan(str(paths.root))
    assert read_json(paths.summary)["status"] == "failed"
    assert mlflow_run(config).info.status == "FAILED"
    assert not read_events(paths, "driver_lost")
    assert not close_orphan(str(paths.root))


def test_evaluations_after_the_closing_are_added_to_the_summary(config: Config, paths: RunPaths) -> None:
    make_orphan(config, last=30)
    assert close_orphan(str(paths.root))
    assert not close_orphan(str(paths.root))
    put_evaluation(paths, Evaluation(30, 0, "abc", {"accuracy": 0.75}, 10, 0.5, time.time()))
    assert close_orphan(str(paths.root))
    summary = read_json(paths.summary)
    assert (summary["status"], summary["evaluation"]["done"], summary["metrics"]) == ("finished", 1, {"accuracy": 0.75})
    assert mlflow_run(config).data.metrics["eval_accuracy"] == 0.75
    assert not close_orphan(str(paths.root)), "the run was closed again without new evaluations"
    assert len(read_events(paths, "driver_lost")) == 1


@pytest.mark.rest
def test_closing_without_mlflow_times_out_and_a_start_waits_for_it(
    config: Config, paths: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize, "_TRACKING_TIMEOUT_S", 2.0)
    caplog.set_level(logging.INFO)
    make_orphan(config, last=20)
    moved = config.replace(tracking__uri=MlflowServer(tmp_path).uri)
    paths.config.write_text(moved.to_yaml())
    # The configured MLflow has never had this run.
    paths.tracking.unlink()
    results: list[bool] = []
    closer = threading.Thread(target=lambda: results.append(close_orphan(str(paths.root))))
    closer.start()
    wait_until(lambda: newest_fence(paths) == 2)
    with pytest.raises(RunHeldError), acquire_lease(paths, closing=True, waits=False):
        pass
    with acquire_lease(paths) as lease:
        assert lease.fence == 3, "a start must wait until the run is closed"
    closer.join(30)
    assert results == [True]
    assert read_json(paths.summary)["status"] == "interrupted"
    assert "ray-app track --replay" in caplog.text
    assert not close_orphan(str(paths.root)), "the run was closed twice for one lost driver"


def test_a_folder_without_a_started_run_is_not_closed(tmp_path: Path) -> None:
    assert not close_orphan(str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


@pytest.mark.rest
def test_a_transient_storage_error_at_the_end_does_not_fail_a_run(
    make_short_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def fail_once(real: Callable[..., Any], fail: Callable[[], Any]) -> Callable[..., Any]:
        def once(*arguments: Any, **fields: Any) -> Any:
            name = str(arguments[1] if isinstance(arguments[0], RunPaths) else arguments[0])
            if name in refused or not name.endswith(("finished", "summary.json")):
                return real(*arguments, **fields)
            refused.append(name)
            return fail()

        return once

    def raise_error() -> None:
        raise OSError("away")

    monkeypatch.setattr("ray_app.driver.run.put_event", fail_once(put_event, lambda: False))
    monkeypatch.setattr("ray_app.driver.run.put_json", fail_once(put_json, raise_error))
    result = run_training(
        make_short_config(train__strategy="single", scaling__max_workers=1, scaling__logical_workers=1)
    )
    assert [name.rpartition("/")[2] for name in refused] == ["finished", "summary.json"]
    assert result.summary["status"] == "finished"
    assert len(read_events(RunPaths(result.path), "finished")) == 1
    assert read_json(RunPaths(result.path).summary) == result.summary
