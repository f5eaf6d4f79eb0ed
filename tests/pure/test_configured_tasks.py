"""Tasks that a configuration describes alone: what works without a word, and what is refused before the start with words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ray_app import load_config
from ray_app.errors import ConfigError
from ray_app.runs.preparing.prepare import prepare
from tests.support.pictures import table_data

TASKS, UNTYPED = "ray_app.task.", "tests.support.untyped_models."
MSE = {"class_path": "torch.nn.MSELoss"}
NET = {"class_path": UNTYPED + "Numbers", "init_args": {"width": 3}}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return table_data(tmp_path_factory.mktemp("configured") / "numbers", {"x": random.random(64), "y": random.random(64)})


def module(**init_args: Any) -> dict[str, Any]:
    given = {"model": NET, "inputs": ["x"], "target": "y", "loss": MSE} | init_args
    return {"class_path": TASKS + "module.ModuleTask", "init_args": given}


def lightning(**init_args: Any) -> dict[str, Any]:
    given = {"module": {**NET, "class_path": UNTYPED + "Stepping"}, "batch": ["x", "y"], "target": "y"} | init_args
    return {"class_path": TASKS + "lightning.LightningTask", "init_args": given}


@pytest.mark.parametrize(
    "task",
    [
        module(),
        module(model={**NET, "class_path": UNTYPED + "numbers"}),
        module(loss={"class_path": UNTYPED + "Scaled", "init_args": {"scale": 2.0}}),
        lightning(),
        {"class_path": UNTYPED + "Untyped", "init_args": {"width": 3}},
    ],
    ids=["class", "function", "loss", "lightning", "task"],
)
def test_arguments_need_no_type_hints(task: dict[str, Any], numbers: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({"task": task, "data": numbers, "run": {"storage_path": str(tmp_path / "runs")}}))
    prepare(load_config(file))


def test_an_argument_without_a_hint_is_needed_all_the_same_and_may_be_null() -> None:
    with pytest.raises(ConfigError) as found:
        load_config(task={"class_path": UNTYPED + "Untyped"}, data__path="data")
    assert str(found.value) == (
        f"The configuration is refused: {UNTYPED}Untyped needs width, which is not given; write it below task.init_args."
    )
    null = load_config(task=module(model={**NET, "init_args": {"width": None}}), data__path="data")
    assert null.task.init_args["model"]["init_args"] == {"width": None}
