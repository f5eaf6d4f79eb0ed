"""The exact progress lines of a running run, as the documentation quotes them."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ray_app.checkpoint.store import Commit
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.journal import StepRecord, put_event
from ray_app.watch import terminal as module
from ray_app.watch.terminal import RunConsole, SafeConsole
from tests.support.local_world import TinyImages, make_job, write_images

NOW_S = 1040.0


def record(step: int) -> StepRecord:
    return StepRecord(step, 0, 1.0, 0.5, 0.1, 1.0, 5.0, 0.0, 2, [3] * 4, [1] * 4, "1.1")


def commit(step: int) -> Commit:
    return Commit(step, 1, 0, step, "cadence", "", "", 4, "", {}, NOW_S - 40 + step - 4)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    data = write_images(tmp_path / "data", [[50, 1], [45]])
    return make_job(tmp_path / "run", data, task=TinyImages(), train__epochs=2)


def show_lines(
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    *updates: tuple[StepRecord | None, str, bool],
    pending_steps: tuple[int, ...] = (),
) -> list[str]:
    """Returns the lines that a console without a terminal prints for these updates, which are ten seconds apart."""
    times = iter(range(10, 1000, 10))
    clock = {"s": 0.0}
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW_S, monotonic=lambda: clock["s"]))
    output = StringIO()
    with RunConsole(
        job, 4, SafeConsole(Console(file=output, width=300)), lambda: [commit(step) for step in pending_steps]
    ) as console:
        for update in updates:
            clock["s"] = next(times)
            console.show(*update)
    return output.getvalue().splitlines()


def test_a_progress_line_has_position_metric_evaluation_lag_and_failures(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_evaluation(job.paths, Evaluation(4, 0, "", {"accuracy": 0.75}, 20, 0.1, NOW_S))
    put_event(job.paths, "failed", 1, number=1, errors={}, step=5, left=1)
    put_event(job.paths, "preempted", 1, number=1, workers=1, step=6, left=1)
    [line] = show_lines(job, monkeypatch, (record(10), "", False), pending_steps=(4, 8, 12))
    assert line == (
        "epoch 2/2 step 2/8 loss 0.5000  - rows/s  2 of 4 workers  accuracy 0.7500 (step 4, 3 checkpoints, 40 s behind)"
        "  1 of 5 failures, 1 preemption"
    )


def test_a_reason_to_wait_is_printed_once_until_it_changes(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_for_start, waiting_for_capacity = (
        (None, "waiting for the workers to start ...", False),
        (record(3), "1 of at least 2 workers; waiting for capacity", True),
    )
    lines = show_lines(
        job,
        monkeypatch,
        waiting_for_start,
        waiting_for_start,
        waiting_for_capacity,
        waiting_for_capacity,
        (record(3), "", False),
    )
    assert lines[:2] == [waiting_for_start[1], waiting_for_capacity[1]]
    assert len(lines) == 3
    assert lines[2].startswith("epoch 1/2 step 3/8 ")
