"""TensorBoard's event files have the same points as MLflow, each once, after failures of the driver or the storage."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.event_file_writer import EventsWriter

from ray_app import run_training
from ray_app.config.config import Config
from ray_app.runlog.journal import MetricsWriter
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import list_tree
from ray_app.storage.object_stores import ObjectPath
from ray_app.track.mlflow_client import Backlog, SentState
from ray_app.track.tracker import EventFileWriter
from tests.support.paths import ROOT
from tests.support.recorded_run import RecordedRun
from tests.support.s3_server import S3Server
from tests.support.waiting import wait_until

_DRIVER_S = 300
KILLED = """
import os, signal, sys, time
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from ray_app import run_training
from ray_app.config.config import from_yaml
from ray_app.driver.run import Faults
from ray_app.runlog.journal import newest_record
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks

config = from_yaml(open(sys.argv[1]).read())
paths = RunPaths(Path(config.run.storage_path) / config.run.name)
folder = str(paths.tensorboard)

def shown():
    if not os.path.isdir(folder):
        return []
    events = EventAccumulator(folder)
    events.Reload()
    return [point.step for point in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []

def kill(rank, step):
    if step == 20:
        # Of more than the last checkpoint, so that steps are done again
        while 15 not in shown() or newest_record(paths).step <= 16:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

run_training(config, faults=Faults(train=Hooks(after_step=kill)))
"""


def full_files(paths: RunPaths) -> dict[str, bytes]:
    return {
        name: data
        for name, data in ((name, file.read_bytes()) for name, file in list_tree(paths.tensorboard).items())
        if data
    }


def points_in(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Returns step, time and value of every point by name, as TensorBoard reads them."""
    if not folder.is_dir():
        return {}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(p.step, p.wall_time, p.value) for p in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_event_files_hold_the_points_of_mlflow_and_no_secret(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs" / "run", "sqlite:///unused.db")
    run.record(1, 12)
    event_writer = EventFileWriter(run.paths, run.config)
    event_writer.start()
    wait_until(
        lambda: "loss" in points_in(run.paths.root / "tensorboard"),
        "the first block is not written while the run continues",
    )
    run.evaluate(10)
    run.evaluate(10, "august", f1=0.5)
    run.record(13, 27)
    assert event_writer.close("FINISHED", timeout_s=60)
    points_of, expected = points_in(run.paths.root / "tensorboard"), run.expected_points(27)
    assert points_of.keys() == expected.keys()
    for name, points in expected.items():
        assert [(step, round(1000 * at)) for step, at, _ in points_of[name]] == [(step, at) for step, at, _ in points]
        assert [value for *_, value in points_of[name]] == [float(np.float32(value)) for *_, value in points]
    [data] = full_files(run.paths).values()
    assert b"seed:" in data
    assert b"secret" not in data


@pytest.mark.rest
def test_each_step_appears_once_after_a_killed_driver(make_short_config: Callable[..., Config], tmp_path: Path) -> None:
    fields = {"train__strategy": "single", "scaling__min_workers": 1, "scaling__max_workers": 1}
    config = make_short_config(tracking__tensorboard=True, tracking__every_steps=5, **fields)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config.yaml")]
    driver = subprocess.run(command, cwd=ROOT, env=environment, timeout=_DRIVER_S, check=False)
    assert driver.returncode == -signal.SIGKILL
    paths = RunPaths(tmp_path / "runs" / "run")
    folder = paths.root / "tensorboard"
    stays_open = EventAccumulator(str(folder))
    stays_open.Reload()
    assert [point.step for point in stays_open.Scalars("loss")][:3] == [5, 10, 15]
    summary = run_training(config).summary
    assert summary["restarts"]["driver"] == 1
    assert summary["redone_steps"] > 0, "no step was redone"
    assert (
        summary["params_digest"]
        == run_training(make_short_config(run__name="undisturbed", **fields)).summary["params_digest"]
    )
    backlog = Backlog(paths, 5)
    backlog.read(SentState())
    # If Ray is running, the backlog also has node samples.
    blocks = list(backlog.points(SentState(), finished=True))
    expected = [(p.step, p.time_ms / 1e3, float(np.float32(p.metrics["loss"]))) for p in blocks]
    assert [step for step, *_ in expected] == [5, 10, 15, 20, 25, 30]
    assert points_in(folder)["loss"] == expected
    assert len(full_files(paths)) == 1
    stays_open.Reload()
    assert [(p.step, p.wall_time, p.value) for p in stays_open.Scalars("loss")] == expected, (
        "an open TensorBoard shows a point twice"
    )


def test_a_run_on_s3_gets_one_complete_event_file(s3_server: S3Server, s3_folder: ObjectPath, tmp_path: Path) -> None:
    paths = RunPaths(s3_folder / "run")
    local = RecordedRun(tmp_path / "run", "sqlite:///unused.db")
    local.record(1, 20)
    writer = MetricsWriter(paths, 1, 3600.0)
    for record in local.records.values():
        writer.add(record)
    writer.close()
    s3_server.fail("PUT .*tensorboard", status=403, times=1)
    for _ in range(2):
        event_writer = EventFileWriter(paths, local.config)
        event_writer.start()
        assert event_writer.close("FINISHED", timeout_s=60)
    [(name, data)] = full_files(paths).items()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / name).write_bytes(data)
    assert [step for step, *_ in points_in(copy)["loss"]] == [10, 20]


def test_a_storage_error_is_logged_once_and_all_points_arrive_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RecordedRun(tmp_path / "run", "sqlite:///unused.db")
    run.record(1, 20)
    (run.paths.root / "tensorboard").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="ray_app.track.tracker"):
        event_writer = EventFileWriter(run.paths, run.config)
        event_writer.start()
        wait_until(lambda: caplog.records, "no warning was logged")
        (run.paths.root / "tensorboard").unlink()
        assert event_writer.close("FINISHED", timeout_s=60)
    assert [record.message for record in caplog.records if "training continues" not in record.message] == []
    assert len(caplog.records) == 1
    assert [step for step, *_ in points_in(run.paths.root / "tensorboard")["lr"]] == [10, 20]


def test_event_files_are_written_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tensorboard", None)
        run = RecordedRun(tmp_path / "run", "sqlite:///unused.db")
        run.record(1, 20)
        event_writer = EventFileWriter(run.paths, run.config)
        event_writer.start()
        assert event_writer.close("FINISHED", timeout_s=60)
    assert [step for step, *_ in points_in(run.paths.root / "tensorboard")["loss"]] == [10, 20]


def test_a_full_disk_loses_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, failing = EventsWriter.write_event, iter([False] * 3 + [True])

    def fail_once(writer: Any, event: Any) -> None:
        if next(failing, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, event)

    monkeypatch.setattr(EventsWriter, "write_event", fail_once)
    run = RecordedRun(tmp_path / "run", "sqlite:///unused.db")
    run.record(1, 40)
    event_writer = EventFileWriter(run.paths, run.config)
    event_writer.start()
    assert event_writer.close("FINISHED", timeout_s=60)
    assert len(caplog.records) == 1
    assert [step for step, *_ in points_in(run.paths.root / "tensorboard")["loss"]] == [10, 20, 30, 40]
    assert len(full_files(run.paths)) == 1
