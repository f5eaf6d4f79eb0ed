"""Warnings at the start: parameters without gradient, losses that are not means over rows, and settings without
effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

from ray_app.config.config import Config
from ray_app.config.import_paths import OptimizerSpec
from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError
from ray_app.preflight.gradient_checks import parameters_without_gradient
from ray_app.preflight.prepare import prepare
from ray_app.train.state.state import make_schedule

HERE = "tests.pure.preflight.test_gradient_checks."
MODULE, LIGHTNING = "ray_app.task.module.ModuleTask", "ray_app.task.lightning.LightningTask"
DECAYED: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


class Parts(nn.Module):
    """Has parts that no row uses, or that only rows with a number above 0 use."""

    def __init__(self, unused: int = 0, some: bool = False) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(unused))
        self.some = nn.Linear(1, 1) if some else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.used(x[:, None])
        if self.some is not None and bool((x > 0).any()):
            y = y + self.some(x[:, None])
        return y[:, 0]


class Tokens(nn.Module):
    """The methods of a Lightning module over padded tokens; `how` selects the mean."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.words = how, nn.Embedding(16, 4)
        self.body = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
        self.accuracy, self.f1 = BinaryAccuracy(), BinaryF1Score()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.body(self.words(tokens))[..., 0] * mask

    def training_step(self, batch: Any, batch_idx: Any) -> Tensor:
        tokens, mask, labels = batch
        values, target = self(tokens, mask), labels.float()
        scores = values.sum(1) / mask.sum(1)
        losses = functional.binary_cross_entropy_with_logits(scores, target, reduction="none")
        match self.how:
            case "tokens":
                return (values - target[:, None]).square().mul(mask).sum() / mask.sum()
            case "dropout that is always there":
                return functional.dropout(losses, 0.5).mean()
            case "a loss between rows":
                return (scores[:, None] - scores).square().mean()
            case "accuracy":
                self.log("train/score", self.accuracy(scores.sigmoid(), labels))
            case "f1":
                self.log("train/score", self.f1(scores.sigmoid(), labels))
            case "a number of tokens":
                self.log("train/tokens", mask.sum().float())
            case "batch_size":
                self.log("train/loss", losses.mean(), batch_size=len(labels))
            case "another batch_size":
                self.log("train/loss", losses.mean(), batch_size=int(mask.sum()) + 1)
            case "another batch_size without names":
                self.log_dict({"loss": losses.mean()}, False, True, True, True, "mean", False, False, None, True, 1000)
            case "a sum without names":
                self.log("train/loss", losses.sum(), False, True, True, True, "sum")
        return losses.mean()


def write(folder: Path, **columns: Any) -> Path:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "part-0.parquet")
    return folder


def config_of(data: Path, task: str, init_args: dict[str, Any], optimizer: dict[str, Any], **fields: Any) -> Config:
    settings = {
        "data__path": str(data),
        "data__global_batch_size": 8,
        "train__strategy": "single",
        "tracking__enabled": False,
    }
    settings |= {"run__name": "run", "run__storage_path": str(data.parent / "runs"), "scaling__logical_workers": 2}
    return Config(task=ClassSpec(task, init_args), optimizer=OptimizerSpec("torch.optim.SGD", optimizer)).replace(
        **(settings | fields)
    )


def regression_warnings(
    folder: Path, x: list[float], optimizer: dict[str, Any], model: dict[str, Any], **fields: Any
) -> tuple[str, ...]:
    data = write(folder / "data", x=x, y=[float(i % 3) for i in range(len(x))])
    init_args = {"model": {"class_path": HERE + "Parts", "init_args": model}, "inputs": ["x"], "target": "y"}
    return prepare(
        config_of(data, MODULE, init_args | {"loss": {"class_path": "torch.nn.MSELoss"}}, optimizer, **fields)
    ).warnings


UNUSED_INPUTS = [0.0] * 16


def test_weight_decay_of_parameters_without_gradient_is_warned_of(tmp_path: Path) -> None:
    [warning] = regression_warnings(tmp_path, UNUSED_INPUTS, DECAYED, {"unused": 7})
    assert warning.startswith(
        "7 trained parameters get no gradient from the rows of the dry run: unused.0, unused.1, unused.2, unused.3"
    )
    assert "unused.4" in warning
    assert "unused.5" not in warning
    assert warning.endswith(
        "Freeze them with train.freeze, or give them a group with weight_decay 0 in optimizer.groups."
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"scaling__logical_workers": 1},
        {"train__freeze": ["unused.*"]},
        {"optimizer__groups": [{"names": ["unused.*"], "weight_decay": 0.0}]},
        {"optimizer__init_args": {"lr": 0.1}},
    ],
)
def test_parameters_without_gradient_that_do_not_move_cause_no_warning(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert regression_warnings(tmp_path, UNUSED_INPUTS, DECAYED, {"unused": 2}, **fields) == ()


@pytest.mark.parametrize(("x", "names"), [(UNUSED_INPUTS, "some.weight, some.bias"), ([*UNUSED_INPUTS[1:], 1.0], None)])
def test_a_part_counts_as_unused_only_if_none_of_the_tried_rows_uses_it(
    tmp_path: Path, x: list[float], names: str | None
) -> None:
    warnings = regression_warnings(tmp_path, x, DECAYED, {"some": True})
    assert [f"dry run: {names}. A" in warning for warning in warnings] == [True] * (names is not None)


def test_activation_checkpointing_makes_no_parameter_count_as_unused() -> None:
    model, x = Parts(), torch.ones(3, requires_grad=True)
    for reentrant in (False, True):
        losses = checkpoint(model, x, use_reentrant=reentrant)
        assert parameters_without_gradient(losses, dict(model.named_parameters())) == []
    assert parameters_without_gradient(x, dict(model.named_parameters())) == ["used.weight", "used.bias"]


def lightning_warnings(folder: Path, how: str) -> tuple[str, ...]:
    tokens = [[(i * 5 + j) % 16 for j in range(2 + i * 7 % 11)] for i in range(24)]
    data = write(folder / "data", tokens=tokens, label=[int(i % 3 == 0) for i in range(24)])
    init_args = {
        "module": {"class_path": HERE + "Tokens", "init_args": {"how": how}},
        "batch": ["tokens", "tokens.mask", "label"],
    }
    return prepare(config_of(data, LIGHTNING, init_args | {"target": "label"}, {"lr": 0.1})).warnings


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("tokens", "The loss that training_step of Tokens returns is not a mean over rows"),
        ("a loss between rows", "so the gradient depends on scaling.logical_workers"),
        ("f1", "'train.score', which training_step of Tokens logs, is not a mean over rows"),
        ("a number of tokens", "'train.tokens', which training_step of Tokens logs, is not a mean over rows"),
    ],
)
def test_a_training_step_with_a_mean_over_other_than_rows_is_warned_of(tmp_path: Path, how: str, message: str) -> None:
    [warning] = lightning_warnings(tmp_path, how)
    assert message in warning


@pytest.mark.parametrize("how", ["rows", "dropout that is always there", "accuracy", "batch_size"])
def test_means_over_rows_and_dropout_cause_no_warning(tmp_path: Path, how: str) -> None:
    assert lightning_warnings(tmp_path, how) == ()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("another batch_size", r"'train/loss' is logged with batch_size \d+, but the batch has 2 rows"),
        ("another batch_size without names", r"'loss' is logged with batch_size 1000, but the batch has 2 rows"),
        ("a sum without names", "'train/loss' is logged with reduce_fx"),
    ],
)
def test_options_of_log_that_would_be_ignored_are_refused(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lightning_warnings(tmp_path, how)


def sized(weights: str | None = None, kappa: str = "") -> nn.Module:
    del weights, kappa
    return Parts()


@pytest.mark.parametrize(
    ("model", "num_warnings"), [({"weights": "DEFAULT"}, 1), ({"weights": None}, 0), ({"kappa": "linear"}, 0)]
)
def test_pretrained_parameters_that_init_from_replaces_are_warned_of(
    tmp_path: Path, model: dict[str, Any], num_warnings: int
) -> None:
    data = write(tmp_path / "data", x=[float(i) for i in range(16)], y=[float(i) for i in range(16)])
    safetensors.torch.save_file(Parts().state_dict(), tmp_path / "model.safetensors")
    init_args = {"model": {"class_path": HERE + "sized", "init_args": model}, "inputs": ["x"], "target": "y"}
    init_args |= {"loss": {"class_path": "torch.nn.MSELoss"}}
    fields = {"train__init_from": str(tmp_path / "model.safetensors")}
    warnings = prepare(config_of(data, MODULE, init_args, {"lr": 0.1}, **fields)).warnings
    assert len(warnings) == num_warnings
    assert all("task.init_args.model.init_args.weights has no effect" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("init_args", "steps"),
    [({}, 20), ({"total_steps": 40}, 40), ({"epochs": 3, "steps_per_epoch": 7}, 21), ({"steps_per_epoch": 7}, None)],
)
def test_a_configured_length_of_a_schedule_is_not_replaced(init_args: dict[str, Any], steps: int | None) -> None:
    spec = ClassSpec("torch.optim.lr_scheduler.OneCycleLR", {"max_lr": 0.1, **init_args})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    if steps is None:
        with pytest.raises(ConfigError, match=r"OneCycleLR cannot be created .*You must define either total_steps OR"):
            make_schedule(spec, optimizer, 20)
        return
    assert vars(make_schedule(spec, optimizer, 20))["total_steps"] == steps
