"""A driver that was killed: whoever notices says in the record, in the summary and in MLflow what became of the run; once."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_app.checkpoint.format import pack
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config import Config, default_tracking_uri
from ray_app.errors import RunHeldError
from ray_app.pipeline import closing
from ray_app.pipeline.closing import close_orphan
from ray_app.record.files import read_json
from ray_app.record.journal import read_events
from ray_app.record.lease import acquire, newest_fence
from ray_app.record.paths import RunPaths
from tests.checkpoints import commit_of, snapshot_of
from tests.cluster import ROOT
from tests.mlflow_server import Server, mlflow_runs, until

DRIVER = """
import sys, time
from dataclasses import replace
from ray_app.checkpoint.format import pack
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config import from_yaml
from ray_app.pipeline.prepare import claim, prepare
from ray_app.record.journal import MetricsWriter, StepRecord, put_event
from ray_app.record.lease import acquire
from ray_app.track.runs import Tracker
from tests.checkpoints import commit_of, snapshot_of

config, last, end = from_yaml(open(sys.argv[1]).read()), int(sys.argv[2]), sys.argv[3]
prepared = prepare(config)
lease = acquire(prepared.job.paths)
job = claim(prepared, lease.fence).job
put_event(job.paths, "started", job.fence, max_workers=1)
tracker = Tracker(job.paths, config, {}, 1)
tracker.start()
writer = MetricsWriter(job.paths, job.fence)
for step in range(1, last + 1):
    writer.add(StepRecord(step, 0, time.time(), 1.0, 0.1, 1.0, 5.0, 0.1, 1, [16] * 4, [step] * 4, f"{job.fence}.1"))
    time.sleep(0.001)
writer.close()
CheckpointStore(job.paths).write(pack(snapshot_of(last)), replace(commit_of(last, job.fence), params_digest="abc"))
if end:
    put_event(job.paths, end, job.fence)
while tracker.run_id is None or job.paths.tracking.read_text().find(f'"sent_step": {last}') < 0:
    time.sleep(0.02)
print("ready", flush=True)
time.sleep(600)
"""


class Killed:
    """A run whose driver was killed after some steps.

    Args:
        config: The run.
        folder: For its file.
        last: Steps that it did.
        end: Event with which it said how it ended, before it was killed; empty: none.
    """

    def __init__(self, config: Config, folder: Path, last: int, end: str = "") -> None:
        self.config, self.paths = config, RunPaths(Path(config.run.storage_path) / str(config.run.name))
        (folder / "given.yaml").write_text(config.to_yaml())
        command = [sys.executable, "-c", DRIVER, str(folder / "given.yaml"), str(last), end]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def mlflow(self) -> Any:
        [run] = mlflow_runs(default_tracking_uri(self.config), self.paths.name)
        return run


@pytest.fixture
def killed(short_run: Callable[..., Config], tmp_path: Path) -> Iterator[Callable[..., Killed]]:
    made: list[Killed] = []

    def make(last: int = 20, end: str = "", **fields: Any) -> Killed:
        config = short_run(tracking__enabled=True, tracking__every_steps=1, **fields)
        made.append(Killed(config, tmp_path, last, end))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()


def test_a_killed_driver_is_noticed_once(killed: Callable[..., Killed], tmp_path: Path, digits: Path) -> None:
    run = killed()
    root = str(run.paths.root)
    assert not close_orphan(root), "its driver lives"
    assert run.mlflow().info.status == "RUNNING"
    run.kill()
    Path(run.config.data.path).rename(tmp_path / "out of reach")
    try:
        results: list[bool] = []
        both = [threading.Thread(target=lambda: results.append(close_orphan(root))) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join(60)
    finally:
        (tmp_path / "out of reach").rename(run.config.data.path)
    assert sorted(results) == [False, True]
    [event] = read_events(run.paths, "driver_lost")
    assert (event.fence, event.details["status"], event.details["step"]) == (1, "interrupted", 20)
    found, summary = run.mlflow(), read_json(run.paths.summary)
    assert found.info.status == "KILLED"
    assert (summary["status"], summary["steps"], summary["mlflow_run_id"]) == ("interrupted", 20, found.info.run_id)
    assert summary["restarts"]["driver"] == 0
    assert found.data.metrics["loss"] == 1.0
    assert not [tag for tag in found.data.tags if tag.startswith("ray_app.resumed_with")]
    assert not close_orphan(root)
    assert newest_fence(run.paths) == 2
    check_the_next_start(run)


def check_the_next_start(run: Killed) -> None:
    """It has the newest checkpoint, and a fence above that of who closed the run."""
    store = CheckpointStore(run.paths)
    [newest] = store.commits()
    assert (newest.step, newest.fence) == (20, 1)
    with acquire(run.paths) as lease:
        assert lease.fence == 3
        store.write(pack(snapshot_of(30)), commit_of(30, lease.fence))
        assert not close_orphan(str(run.paths.root))
    assert [(c.step, c.fence) for c in store.commits()] == [(20, 1), (30, 3)]


def test_a_run_that_had_done_everything_is_finished(killed: Callable[..., Killed]) -> None:
    run = killed(last=30)
    run.kill()
    assert close_orphan(str(run.paths.root))
    assert read_json(run.paths.summary)["status"] == "finished"
    assert run.mlflow().info.status == "FINISHED"


def test_a_driver_that_was_killed_while_it_told_mlflow(killed: Callable[..., Killed]) -> None:
    run = killed(end="gave_up")
    run.kill()
    assert close_orphan(str(run.paths.root))
    assert read_json(run.paths.summary)["status"] == "failed"
    assert run.mlflow().info.status == "FAILED"
    assert not read_events(run.paths, "driver_lost")
    assert not close_orphan(str(run.paths.root))


def test_without_mlflow_it_ends_in_time_and_a_start_waits_for_it(
    killed: Callable[..., Killed], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "_TRACKING_S", 2.0)
    caplog.set_level(logging.INFO)
    run = killed()
    run.kill()
    moved = run.config.replace(tracking__uri=Server(tmp_path).uri)
    run.paths.config.write_text(moved.to_yaml())
    run.paths.tracking.unlink()  # the run was never in the MLflow that is there
    results: list[bool] = []
    closer = threading.Thread(target=lambda: results.append(close_orphan(str(run.paths.root))))
    closer.start()
    until(lambda: newest_fence(run.paths) == 2)
    with pytest.raises(RunHeldError), acquire(run.paths, closing=True):
        pass
    with acquire(run.paths) as lease:
        assert lease.fence == 3, "a start waits until the run is closed, and is not refused"
    closer.join(30)
    assert results == [True]
    assert read_json(run.paths.summary)["status"] == "interrupted"
    assert "jobs/track.py --replay" in caplog.text
    assert not close_orphan(str(run.paths.root)), "once for each lost driver"


def test_what_is_no_run_or_never_started_is_left_alone(tmp_path: Path) -> None:
    assert not close_orphan(str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()
