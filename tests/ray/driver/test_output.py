"""The output of a task on a real cluster is in the run directory and on the console."""

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ray_app import run_training
from ray_app.config.config import Config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_output_of_workers_and_evaluator_is_stored_and_shown(
    make_short_config: Callable[..., Config], digits: Path, tmp_path: Path
) -> None:
    task = {"class_path": "tests.support.talking_task.PrintingTask", "init_args": {"pixel_max": 16.0}}
    config = make_short_config(
        task=task, data__eval_path=str(digits / "eval"), scaling__max_workers=2, scaling__min_workers=2
    )
    console_output = StringIO()
    assert run_training(config, Console(file=console_output, width=200)).status == "finished"
    files = {file.name: file.read_text().splitlines() for file in (tmp_path / "runs" / "run" / "output").glob("*.out")}
    workers = [lines for name, lines in files.items() if name.startswith("0001-worker-")]
    assert sorted(len([line for line in lines if "rows to train on:" in line]) for lines in workers) == [60, 60], (
        "each worker must print for two logical workers"
    )
    matches = [
        re.match(r"\[rank ([01]), step (\d+)\] rows to train on: 16$", line) for lines in workers for line in lines[:50]
    ]
    assert {match[1] for match in matches if match} == {"0", "1"}
    [evaluator] = [lines for name, lines in files.items() if name.startswith("0001-evaluator-")]
    assert "[evaluator] rows to evaluate: 256" in evaluator
    assert "] rows to train on: 16" in console_output.getvalue()
    assert re.search(r"\.\.\. [\d,]+ more lines in .*/output", console_output.getvalue())
