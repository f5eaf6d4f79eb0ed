"""Keras' optimizers as PyTorch's: the weights of Keras' own `apply` after every step, also across a checkpoint."""

from __future__ import annotations

import copy
import inspect
import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.keras.library import import_keras
from ray_app.task.keras.optimizer import (
    KerasOptimizer,
    KerasSchedule,
    describe_optimizer,
    make_variable,
    refuse_sharding,
)
from ray_app.train.state.parameters import group_parameters, load_optimizer

keras = import_keras()
schedules = keras.optimizers.schedules
STEPS = 100
RATES = [0.1]
ABSTRACT = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
CLASSES = sorted(
    name for name, kind in vars(keras.optimizers).items() if inspect.isclass(kind) and name not in ABSTRACT
)
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"amsgrad": True, "clipnorm": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "global_clipnorm": 0.1}),
    (
        "AdamW",
        {"clipvalue": 0.01, "learning_rate": schedules.CosineDecay(0.01, 50, warmup_target=0.02, warmup_steps=9)},
    ),
    ("SGD", {"learning_rate": schedules.PiecewiseConstantDecay([30, 60], [0.1, 0.01, 0.001])}),
    ("Adam", {"gradient_accumulation_steps": 4}),
    ("Muon", {"exclude_layers": ["head"]}),
    ("Adam", {"use_ema": True, "ema_overwrite_frequency": 7}),
]


def make_model(optimizer: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "relu", kernel_constraint=keras.constraints.MaxNorm(1.0)),
            keras.layers.Dense(3, name="head"),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def make_torch(fields: dict[str, Any], named: dict[str, nn.Parameter]) -> tuple[KerasOptimizer, KerasSchedule | None]:
    spec = fields["optimizer"]
    groups = group_parameters(named, spec["groups"] or [], "optimizer.groups")
    optimizer = KerasOptimizer(groups, **spec["init_args"])
    return optimizer, KerasSchedule(optimizer, **fields["schedule"]["init_args"]) if "schedule" in fields else None


def gradients_of(model: Any) -> list[Tensor]:
    loss = ((model(torch.randn(16, 6)) - torch.randn(16, 3)) ** 2).mean()
    return list(torch.autograd.grad(loss, [v.value for v in model.trainable_variables]))


REST_OPTIONS = [pytest.param(*case, marks=pytest.mark.rest) for case in OPTIONS]


@pytest.mark.rest
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in CLASSES), *REST_OPTIONS])
def test_a_hundred_steps_give_the_weights_of_keras_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    keras_optimizer = getattr(keras.optimizers, name)(**options)
    model = make_model(keras_optimizer)
    fields = describe_optimizer(keras_optimizer, {v.path: v for v in model.trainable_variables})
    named = {v.path: nn.Parameter(v.value.detach().clone()) for v in model.trainable_variables}
    optimizer, schedule = make_torch(fields, named)
    start = {path: p.detach().clone() for path, p in named.items()}
    for step in range(STEPS):
        if step == STEPS // 2:
            # As a checkpoint does: another optimizer gets the state.
            state, position = copy.deepcopy(optimizer.state_dict()), schedule and schedule.state_dict()
            optimizer, schedule = make_torch(fields, named)
            load_optimizer(optimizer, state)
            if schedule is not None:
                schedule.load_state_dict(position)
        gradients = gradients_of(model)
        for p, gradient in zip(named.values(), gradients, strict=True):
            p.grad = gradient.clone()
        with torch.no_grad():
            keras_optimizer.apply(gradients, model.trainable_variables)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        for variable in model.trainable_variables:
            assert torch.equal(named[variable.path].detach(), variable.value.detach()), (step, variable.path)
    assert all(not torch.equal(start[path], p.detach()) for path, p in named.items()), "every weight must have moved"
    assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS}


def test_the_state_of_a_parameter_holds_tensors_alone() -> None:
    optimizer = keras.optimizers.Nadam()
    model = make_model(optimizer)
    named = {v.path: nn.Parameter(v.value.detach().clone()) for v in model.trainable_variables}
    ours, _ = make_torch(describe_optimizer(optimizer, {}), named)
    for p in named.values():
        p.grad = torch.ones_like(p)
    ours.step()
    for p in named.values():
        assert {name: tuple(v.shape) for name, v in ours.state[p].items()} == {
            "step": (),
            "shared": (),
            "momentum": tuple(p.shape),
            "velocity": tuple(p.shape),
        }


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    ours = KerasOptimizer(
        [first := nn.Parameter(torch.ones(2)), second := nn.Parameter(torch.ones(3))],
        **describe_optimizer(keras.optimizers.AdamW(), {})["optimizer"]["init_args"],
    )
    first.grad = torch.ones(2)
    ours.step()
    assert (first.detach() != 1).all()
    assert (second.detach() == 1).all()


def test_weights_that_decay_leaves_alone_are_groups() -> None:
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = make_model(optimizer)
    fields = describe_optimizer(optimizer, {v.path: v for v in model.trainable_variables})
    assert [group["decays"] for group in fields["optimizer"]["groups"]] == [True, False, True, False]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras.optimizers.Adam(lambda: float(RATES[0])), "function of RATES"),
        (lambda: keras.optimizers.Adam(lambda: 0.1 * random.random()), "function of its calls"),
    ],
)
def test_what_has_another_place_is_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe_optimizer(optimizer(), {})


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (keras.optimizers.Lamb, "whole weights"),
        (lambda: keras.optimizers.Adam(clipnorm=1.0), "clipnorm"),
        (lambda: keras.optimizers.Adam(global_clipnorm=1.0), "grad_clip_norm"),
        (keras.optimizers.Adam, None),
    ],
)
def test_parts_of_weights_need_an_optimizer_of_values(optimizer: Any, reason: str | None) -> None:
    refused = refuse_sharding(describe_optimizer(optimizer(), {}))
    assert refused is None if reason is None else reason in str(refused)


def test_groups_with_other_learning_rates_are_refused() -> None:
    init_args = describe_optimizer(keras.optimizers.SGD(), {})["optimizer"]["init_args"]
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    ours = KerasOptimizer([{"params": [p]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.5}], **init_args)
    with pytest.raises(ConfigError, match=r"learning rates \[0.0"):
        ours.step()


@pytest.mark.parametrize(
    "serialized",
    [
        {"module": "evil_of_a_checkpoint", "class_name": "Kind", "config": {}, "registered_name": None},
        {"module": "evil_of_a_checkpoint", "class_name": "function", "config": "f", "registered_name": "f"},
        {"module": "os", "class_name": "mkdir", "config": {"path": "it-ran"}, "registered_name": None},
        {"class_name": "__lambda__", "config": {"value": "4wA="}},
    ],
)
def test_constraints_and_schedules_of_files_import_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serialized: dict[str, Any]
) -> None:
    """A checkpoint has the constraints of parameters; Keras makes its own classes of them alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil_of_a_checkpoint.py").write_text("open('it-ran', 'w').close()\n")
    with suppress(Exception):
        make_variable(torch.ones(1), 0, {"path": "dense/kernel", "constraint": json.dumps(serialized)})
    with suppress(Exception):
        KerasSchedule(torch.optim.SGD([torch.ones(1)]), serialized)
    assert "evil_of_a_checkpoint" not in sys.modules
    assert not (tmp_path / "it-ran").exists()
