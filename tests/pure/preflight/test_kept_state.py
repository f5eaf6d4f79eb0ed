"""What objects of the user keep outside the model is refused; what the loss leaves out of the outputs is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_app.errors import ConfigError
from ray_app.preflight.context import RowProbe
from ray_app.preflight.kept_state import check_decoding_state, check_kept_state, name_unused_outputs
from ray_app.task.base import Task
from ray_app.task.images import IMAGE
from ray_app.task.lightning import LightningTask
from ray_app.task.module import ModuleTask
from ray_app.task.transforms import instantiate_once
from ray_app.task.user_loop import LoopTask
from tests.support.user_objects import OddModel, OddTask

OBJECTS = "tests.support.user_objects."
ROWS = {"x": np.ones((2, 4), np.float32), "y": np.zeros(2, np.float32)}
MEAN_SQUARES = {"class_path": "torch.nn.MSELoss"}


def context_of(task: Task, model: nn.Module | None = None) -> Any:
    """Returns what the checks use of a context."""
    model = task.build_model() if model is None else model
    state: Any = SimpleNamespace(model=model, turns=None, train=model.train)
    rows = {"undecoded_row": ROWS, "accepted_rows": ROWS}
    return SimpleNamespace(task=task, model=model, row_probe=RowProbe(task, state), **rows)


def odd(kind: str, how: str) -> dict[str, Any]:
    return {"class_path": OBJECTS + kind, "init_args": {"how": how}}


def task_of(where: str, how: str) -> Task:
    """Returns a task with an object of the user at a place."""
    task: Task
    if where in ("augment", "loss"):
        return OddTask(how, where)
    if where == "loop":
        task = LoopTask(OBJECTS + "odd_script", odd("OddModel", ""), ["x", "y"], {"how": how}, target="y")
    elif where == "Lightning":
        task = LightningTask(odd("OddModel", how), ["x", "y"], target="y")
    else:
        loss = odd("OddLoss", how) if where == "configured loss" else MEAN_SQUARES
        task = ModuleTask(odd("OddModel", how if where == "model" else ""), ["x"], "y", loss)
    task.kinds = {"x": "array", "y": "number"}
    return task


OUTSIDE = {
    "global counter": f"{OBJECTS[:-1]}['COUNTS']",
    "global number": f"{OBJECTS[:-1]}['num_calls']",
    "global numpy": f"{OBJECTS[:-1]}['SHARED']",
    "class counter": f"{OBJECTS}Odd['calls_of_class']",
    "default argument": f"{OBJECTS}Odd['disturb']",
}
"""What the objects of a kind share, by its path in a message."""
CHANGING = ("counter", "count", "list", "tensor", "numpy", "python", "torch", *OUTSIDE)
WHERE = {
    "augment": "OddTask.odd",
    "loss": "OddTask.odd",
    "configured loss": "task.init_args.loss",
    "model": "model.odd",
    "Lightning": "model.odd",
}


@pytest.mark.parametrize("where", [*WHERE, "loop"])
@pytest.mark.parametrize("how", [*CHANGING, "parameter", "cache", ""])
def test_state_outside_the_model_is_refused_at_every_place_of_user_code(where: str, how: str) -> None:
    context = context_of(task_of(where, how))
    if how in ("cache", "") or (where == "loop" and how != "parameter" and how not in OUTSIDE):
        # A loop makes its objects anew in each of the calls.
        assert check_kept_state(context) == []
        return
    part = OUTSIDE.get(how) or WHERE.get(where, "")
    message = (
        "(the parameter (weight|bias) of Linear|a parameter of shape .*), which is not part"
        if how == "parameter"
        else "changes with every"
    )
    with pytest.raises(ConfigError, match=message) as refused:
        check_kept_state(context)
    assert how == "parameter" or part in str(refused.value)


@pytest.mark.parametrize("where", ["model", "Lightning"])
def test_a_model_that_keeps_something_of_its_first_rows_is_refused(where: str) -> None:
    context = context_of(task_of(where, "first rows"))
    context.accepted_rows = {"x": np.float32([[1, 2, 3, 4], [4, 4, 5, 5]]), "y": np.zeros(2, np.float32)}
    with pytest.raises(ConfigError, match=r"The model keeps model\.odd\.first from its first call"):
        check_kept_state(context)


def test_a_model_that_refuses_shifted_rows_is_accepted() -> None:
    context = context_of(task_of("model", "range of first rows"))
    with torch.no_grad():
        context.model.layer.weight.fill_(2.4)
        context.model.layer.bias.zero_()
    context.accepted_rows = {"x": np.ones((2, 4), np.float32), "y": np.zeros(2, np.float32)}
    assert check_kept_state(context) == []


@pytest.mark.parametrize("how", [*CHANGING, "cache"])
def test_transforms_that_keep_something_are_refused(how: str) -> None:
    task = ModuleTask(odd("OddModel", ""), ["x"], "y", MEAN_SQUARES, transforms=[odd("OddTransform", how)])
    task.kinds = {"x": IMAGE, "y": "number"}
    context = context_of(task)
    context.undecoded_row = {"x": np.ones((1, 4, 4, 3), np.uint8), "y": np.zeros(1, np.float32)}
    if how == "cache":
        assert check_decoding_state(context) == []
        return
    with pytest.raises(ConfigError, match="changes with every call: decode_training of a row"):
        check_decoding_state(context)


def test_objects_of_the_user_are_made_alike_in_every_process() -> None:
    layer = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 3, "out_features": 2}}
    torch.manual_seed(7)
    one, state = instantiate_once(layer, "first"), torch.get_rng_state()
    torch.manual_seed(8)
    other = instantiate_once(layer, "second")
    assert other is not one
    assert torch.equal(one.weight, other.weight)
    torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("inputs", "named"),
    [(["x"], "output['hidden'][1], experts.balance, and"), ({"x": "x", "y": "y"}, "Column 'y' is the target and also")],
)
def test_what_the_loss_does_not_depend_on_is_named(inputs: Any, named: str) -> None:
    model = {"class_path": OBJECTS + "ManyOutputs"}
    task = ModuleTask(model, inputs, "y", MEAN_SQUARES, output="values")
    task.kinds = {"x": "array", "y": "number"}
    messages = name_unused_outputs(context_of(task))
    assert any(named in message for message in messages), messages
    assert "'loss'" not in str(messages), "the model's own loss is that of the task"
    task = ModuleTask(odd("OddModel", ""), ["x"], "y", MEAN_SQUARES)
    task.kinds = {"x": "array", "y": "number"}
    assert name_unused_outputs(context_of(task, OddModel())) == []
