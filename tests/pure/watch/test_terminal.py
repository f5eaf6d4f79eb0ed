"""What a person reads while a run trains, word for word, as the pages quote it."""

from __future__ import annotations

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
    return make_job(tmp_path / "run", data, logical_workers=4, batch=12, task=TinyImages(), train__epochs=2)


def shown(
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    *looks: tuple[StepRecord | None, str, bool],
    waiting: tuple[int, ...] = (),
) -> list[str]:
    """The lines that a console without a terminal shows at some looks, ten seconds from one to the next."""
    times = iter(range(10, 1000, 10))
    now = {"s": 0.0}
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW_S, monotonic=lambda: now["s"]))
    said = StringIO()
    with RunConsole(
        job, 4, SafeConsole(Console(file=said, width=300)), lambda: [commit(step) for step in waiting]
    ) as console:
        for look in looks:
            now["s"] = next(times)
            console.show(*look)
    return said.getvalue().splitlines()


def test_a_line_says_how_far_how_good_how_late_and_what_went_wrong(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_evaluation(job.paths, Evaluation(4, 0, "", {"accuracy": 0.75}, 20, 0.1, NOW_S))
    put_event(job.paths, "failed", 1, number=1, errors={}, step=5, left=1)
    put_event(job.paths, "preempted", 1, number=1, workers=1, step=6, left=1)
    [line] = shown(job, monkeypatch, (record(10), "", False), waiting=(4, 8, 12))
    assert line == (
        "epoch 2/2 step 2/8 loss 0.5000  - rows/s  2 of 4 workers  accuracy 0.7500 (step 4, 3 checkpoints, 40 s behind)"
        "  1 of 5 failures, 1 of unlimited preemptions"
    )


def test_what_is_waited_for_is_said_once_and_again_when_it_is_something_else(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, room = (
        (None, "waiting for the workers to start ...", False),
        (record(3), "1 of at least 2 workers; waiting for capacity", True),
    )
    lines = shown(job, monkeypatch, start, start, room, room, (record(3), "", False))
    assert lines[:2] == [start[1], room[1]]
    assert len(lines) == 3
    assert lines[2].startswith("epoch 1/2 step 3/8 ")
