"""A run that continues with changed task code reports it, or does not start; its record includes default values."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from ray_app import compare_runs, run_training
from ray_app.errors import RunExistsError
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from tests.support.jobs import digits_config

TASK = """
from ray_app.task.image import ImageClassification

SMOOTHING = 0.0

class Changing(ImageClassification):
    pass
"""


@pytest.mark.rest
def test_a_changed_task_is_reported_or_refused(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "changing_task.py"
    task.write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    common = {"task__class_path": "changing_task.Changing", "data__eval_path": None, "schedule": None}
    make = partial(digits_config, digits, tmp_path / "runs", **common, train__strategy="single", train__max_steps=1)
    output = StringIO()
    config = make(run__name="one")
    run_training(config, Console(file=output, width=200))
    assert "other code" not in output.getvalue()

    task.write_text(TASK.replace("0.0", "0.1"))
    with pytest.raises(RunExistsError, match="- the content of changing_task changed"):
        run_training(config.replace(run__changed="refuse"), Console(file=output))
    result = run_training(config, Console(file=output, width=200))
    assert "Warning: one continues with different code or defaults: the content of changing_task" in output.getvalue()
    [event] = read_events(RunPaths(tmp_path / "runs" / "one"), "code_changed")
    assert event.details == {"changed": ["the content of changing_task changed"]}
    assert "resumed with changed code: the content of" in (tmp_path / "runs" / "one" / "report.html").read_text()
    # The code is the same as at the last start.
    run_training(config.replace(run__changed="refuse"), Console(file=output))

    values = yaml.safe_load((tmp_path / "runs" / "one" / "config.yaml").read_text())
    assert values["optimizer"]["init_args"]["betas"] == [0.9, 0.999]
    assert values["task"]["init_args"]["label_smoothing"] == 0.0
    other = make(run__name="two", optimizer__init_args__lr=0.001)
    compared = compare_runs([result.path, run_training(other, Console(file=output)).path]).rows
    assert [row["optimizer.init_args.lr"] for row in compared] == ["0.003", "0.001"]
    assert other.optimizer.init_args == {"weight_decay": 0.0001}, (
        "comparing must not add default values to the configuration"
    )
    sys.modules.pop("changing_task")
