"""The command `ray-app train`: help, a bad row in mid-run and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_app.checkpoint.store import CheckpointStore
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from tests.support.paths import ROOT
from tests.support.train_command import CommandResult, image_arguments, write_images

TRAIN = ROOT / "jobs" / "train.py"
_PROCESS_S = 240


def own_cluster() -> dict[str, str]:
    """Returns the environment of a process that starts its own Ray cluster."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}


def test_help_explains_the_fields_with_units_and_defaults() -> None:
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--help"], capture_output=True, text=True, timeout=_PROCESS_S, check=False
    )
    help_text = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert not done.stderr
    for expected in (
        "--data.global_batch_size GLOBAL_BATCH_SIZE Rows of one optimizer step over all workers; a multiple of the"
        " number of logical workers. (type: int, default: 32)",
        "--failure.heartbeat_timeout_s HEARTBEAT_TIMEOUT_S Seconds without a heartbeat after which the other workers"
        " continue without a worker. (type: float, default: 5.0)",
        "--data.read_task_mb READ_TASK_MB Largest size of the decoded rows of one read task in megabytes. (type: float,"
        " default: 64.0)",
        "--train.reduction {exact,overlapped}",
        "--task.help",
    ):
        assert expected in help_text


def test_a_bad_row_in_mid_run_fails_the_run_and_is_reported(
    make_arguments: Callable[..., list[str]],
    run_command: Callable[[Sequence[str]], CommandResult],
    tmp_path: Path,
    ray_cluster: None,
) -> None:
    del ray_cluster
    folder = write_images(tmp_path / "images", 192, 64, bad=2 * 64 + 17)
    ended = run_command(
        make_arguments(*image_arguments(folder), "--scaling.logical_workers=1", "--checkpoint.every_steps=1")
    )
    assert ended.code == 1
    assert "The run failed: BadRowError: images.parquet, row group 2, row 17: " in ended.err
    assert "Traceback" not in ended.err
    paths = RunPaths(tmp_path / "runs" / "run")
    summary = json.loads(paths.summary.read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] < 24
    assert summary["restarts"]["failures"] == 1
    assert [event.kind for event in read_events(paths, "failed", "run_failed", "finished")] == ["failed", "run_failed"]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "gate").mkdir()
    return tmp_path / "gate"


@dataclass
class Started:
    """The command in its own process and process group, as a shell starts it."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PROCESS_S
        while not happened():
            assert self.process.poll() is None, self.out.read_text() + self.err.read_text()
            assert time.monotonic() < deadline, self.out.read_text() + self.err.read_text()
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(_PROCESS_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Started]]:
    started: list[Started] = []

    def run(arguments: list[str]) -> Started:
        out, err = (tmp_path / f"{name}-{len(started)}.txt" for name in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(TRAIN), *arguments],
                stdout=stdout,
                stderr=stderr,
                text=True,
                cwd=tmp_path,
                env=own_cluster(),
                start_new_session=True,
            )
        started.append(Started(process, out, err))
        return started[-1]

    yield run
    for command in started:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_stops_with_a_checkpoint_and_the_same_command_resumes(
    number: signal.Signals,
    make_arguments: Callable[..., list[str]],
    run_command: Callable[[Sequence[str]], CommandResult],
    start: Callable[[list[str]], Started],
    gate: Path,
    tmp_path: Path,
    ray_cluster: None,
) -> None:
    del ray_cluster
    gated = [
        "--task.class_path=tests.support.gated_task.GatedTask",
        "--task.init_args",
        json.dumps({"gate": str(gate)}),
    ]
    arguments = make_arguments(*gated, "--data.eval_path=null", "--train.max_steps=150", "--scaling.max_workers=1")
    paths = RunPaths(tmp_path / "runs" / "run")

    first = start(arguments)
    first.wait_until((gate / "reached").exists)
    # A terminal sends Ctrl-C to the whole process group, PBS its signals to the whole session.
    os.killpg(first.process.pid, number)
    first.wait_until(lambda: "Stopping after this step" in first.out.read_text())
    (gate / "open").touch()
    assert first.end() == 75, first.err.read_text()
    interrupted = json.loads(paths.summary.read_text())
    [stopped] = CheckpointStore(paths).commits()
    assert interrupted["status"] == "interrupted"
    assert (stopped.why, stopped.step) == ("extra", interrupted["steps"])
    assert 0 < interrupted["steps"] < 150
    assert "Traceback" not in first.err.read_text()

    second = run_command(arguments)
    assert second.code == 0, second.err
    summary = json.loads(paths.summary.read_text())
    assert "Continuing run run" in second.out
    assert summary["status"] == "finished"
    assert summary["restarts"]["driver"] == 1
    assert summary["redone_steps"] == 0
    assert summary["steps"] == 150

    assert run_command([*arguments, "--run.name=undisturbed"]).code == 0
    expected = json.loads((tmp_path / "runs" / "undisturbed" / "summary.json").read_text())
    assert summary["params_digest"] == expected["params_digest"]
    assert summary["rows"] == expected["rows"]


def test_sigterm_before_the_first_step_interrupts_the_run_cleanly(
    make_arguments: Callable[..., list[str]], start: Callable[[list[str]], Started], gate: Path, tmp_path: Path
) -> None:
    gated = [
        "--task.class_path=tests.support.gated_task.GatedTask",
        "--task.init_args",
        json.dumps({"gate": str(gate), "wait_before": 0}),
    ]
    in_dry_run = start(make_arguments(*gated))
    started = start(make_arguments("--run.name=started", "--scaling.max_workers=1", "--data.eval_path=null"))

    in_dry_run.wait_until((gate / "reached").exists)
    in_dry_run.process.send_signal(signal.SIGTERM)
    assert in_dry_run.end() == 75
    assert "Interrupted; start the run again" in in_dry_run.err.read_text()
    assert not RunPaths(tmp_path / "runs" / "run").root.exists()

    paths = RunPaths(tmp_path / "runs" / "started")
    started.wait_until(lambda: bool(read_events(paths, "started")))
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 75, started.err.read_text()
    assert "Traceback" not in started.err.read_text()
    assert json.loads(paths.summary.read_text())["status"] == "interrupted"
    assert [event.kind for event in read_events(paths, "interrupted", "failed", "finished")] == ["interrupted"]
