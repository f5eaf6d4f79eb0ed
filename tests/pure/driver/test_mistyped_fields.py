"""The error for a configuration value of the wrong type, or out of range, is one line that names the field."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from ray_app.config.checks import check_optimizers
from ray_app.config.config import Config
from ray_app.config.import_paths import OptimizerSpec
from ray_app.config.sections import ClassSpec
from ray_app.driver.parsing import load_config
from ray_app.errors import ConfigError

BASE = {"task": "{class_path: ray_app.task.tabular.TabularRegression}", "data": "{path: x}"}
QUOTES = "YAML reads unquoted text such as 007, 1e3, 12:30 and on as a number, a time or true; write it in quotes"


def error_of(folder: Path, **sections: str) -> str:
    file = folder / "train.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in (BASE | sections).items()))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value)


@pytest.mark.parametrize(("text", "message"), [
    ("007", "run.name is 7; it must be text or null. " + QUOTES + ": name: '...'."),
    ("on", "run.name is True; it must be text or null. " + QUOTES),
    ("1e3", "run.name is 1000.0; it must be text or null. " + QUOTES),
    ("12:30:45", "run.name is 45045; it must be text or null. " + QUOTES),
    ("[a]", "run.name is ['a']; it must be text or null."),
])  # fmt: skip
def test_a_run_name_that_yaml_does_not_read_as_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in error_of(tmp_path, run=f"{{name: {text}}}")


@pytest.mark.parametrize(("section", "text", "message"), [
    ("data", "{path: x, global_batch_size: true}", "data.global_batch_size is True; it must be an integer."),
    ("data", "{path: x, read_task_mb: [1]}", "data.read_task_mb is [1]; it must be a number."),
    ("train", "{grad_clip_norm: yes}", "train.grad_clip_norm is True; it must be a number or null."),
    ("train", "{epochs: 1.5}", "train.epochs is 1.5; it must be an integer."),
    ("train", "{strategy: 1}", "train.strategy is 1; it must be one of ddp, single, "),
    ("train", "{freeze: a}", "train.freeze is a; it must be a list or null."),
    ("tracking", "{enabled: 1}", "tracking.enabled is 1; it must be true or false."),
    ("seed", "true", "seed is True; it must be an integer."),
])  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(tmp_path: Path, section: str, text: str, message: str) -> None:
    assert message in error_of(tmp_path, **{section: text})


@pytest.mark.parametrize(("text", "value"), [("true", "True"), ("[0.1]", "[0.1]"), ("fast", "fast")])
def test_a_learning_rate_that_is_not_a_number_is_refused(tmp_path: Path, text: str, value: str) -> None:
    spec = f"{{class_path: torch.optim.SGD, init_args: {{lr: {text}}}"
    assert f"torch.optim.SGD got lr = {value}; it must be a number." in error_of(tmp_path, optimizer=spec + "}")
    turn = f"{{a: {spec}, parameters: ['*']}}}}"
    assert f"of optimizers.a: torch.optim.SGD got lr = {value}; it must be a number." in error_of(
        tmp_path, optimizers=turn
    )
    groups = f"{{class_path: torch.optim.SGD, init_args: {{lr: 0.1}}, groups: [{{names: ['*'], lr: {text}}}]}}"
    assert "optimizer.groups has lr = " in error_of(tmp_path, optimizer=groups)


@pytest.mark.parametrize(("text", "message"), [
    ("categories: cat", "got categories = cat; it must be a list or one of auto."),
    ("missing: mean", "got missing = mean; it must be a mapping or null."),
    ("features: age", "got features = age; it must be a list or null."),
    ("embedding: wide", "got embedding = wide; it must be an integer or null."),
])  # fmt: skip
def test_an_argument_of_a_task_is_refused_with_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    task = f"{{class_path: ray_app.task.tabular.TabularRegression, init_args: {{{text}}}}}"
    assert message in error_of(tmp_path, task=task)


@pytest.mark.parametrize(("text", "message"), [
    (".nan", "optimizer.init_args.lr is nan; it must be finite."),
    (".inf", "optimizer.init_args.lr is inf; it must be finite."),
    ("-1", "optimizer.init_args.lr is -1.0; it must be at least 0."),
    ("1, weight_decay: -1.0e-4", "optimizer.init_args.weight_decay is -0.0001; it must be at least 0."),
    ("1, betas: [.nan, 0.9]", "optimizer.init_args.betas is [nan, 0.9]; it must be finite."),
])  # fmt: skip
def test_an_optimizer_argument_out_of_range_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert error_of(tmp_path, optimizer=f"{{class_path: torch.optim.AdamW, init_args: {{lr: {text}}}}}").endswith(
        message
    )


def test_a_learning_rate_of_a_group_that_is_nan_is_refused(tmp_path: Path) -> None:
    spec = "{class_path: torch.optim.SGD, init_args: {lr: 1, groups: [{norms_and_biases: true, lr: .nan}]}}"
    assert error_of(tmp_path, optimizer=spec).endswith("optimizer.groups[0].lr is nan; it must be finite.")


def test_a_schedule_argument_that_is_nan_is_refused(tmp_path: Path) -> None:
    spec = "{class_path: torch.optim.lr_scheduler.ExponentialLR, init_args: {gamma: .nan}}"
    assert error_of(tmp_path, schedule=spec).endswith("schedule.init_args.gamma is nan; it must be finite.")


def test_an_argument_of_a_user_defined_optimizer_may_be_infinite() -> None:
    optimizer = OptimizerSpec("tests.support.odd_optimizers.AdaptiveStepSize", {"limit": math.inf})
    assert not check_optimizers(Config(task=ClassSpec("a.B")).replace(optimizer=asdict(optimizer)))
