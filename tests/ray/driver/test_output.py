"""What a task prints on a real cluster is in the run's directory and on the console."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ray_app import run_training
from ray_app.config.config import Config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_what_workers_and_evaluator_print_is_kept_and_shown(
    short_run: Callable[..., Config], digits: Path, tmp_path: Path
) -> None:
    task = {"class_path": "tests.support.talking_task.Talking", "init_args": {"pixel_max": 16.0}}
    config = short_run(task=task, data__eval_path=str(digits / "eval"), scaling__max_workers=2, scaling__min_workers=2)
    said = StringIO()
    assert run_training(config, Console(file=said, width=200)).status == "finished"
    files = {file.name: file.read_text().splitlines() for file in (tmp_path / "runs" / "run" / "output").glob("*.out")}
    workers = [lines for name, lines in files.items() if name.startswith("0001-worker-")]
    assert sorted(len([line for line in lines if "rows to train on:" in line]) for lines in workers) == [60, 60], (
        "two logical workers each"
    )
    places = [
        re.match(r"\[rank ([01]), step (\d+)\] rows to train on: 16$", line) for lines in workers for line in lines[:50]
    ]
    assert {match[1] for match in places if match} == {"0", "1"}
    [evaluator] = [lines for name, lines in files.items() if name.startswith("0001-evaluator-")]
    assert "[evaluator] rows to evaluate: 256" in evaluator
    assert "] rows to train on: 16" in said.getvalue()
    assert re.search(r"\.\.\. [\d,]+ more lines in .*/output", said.getvalue())
