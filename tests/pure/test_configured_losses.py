"""Losses of a configuration: their means are those of torch, with weights of classes and targets that are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.configured.losses import loss_of_rows
from ray_app.task.losses import Losses, summed

SCORES, PIXELS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.randn(2, 3, 4, 4)
LABELS, MASKS = torch.tensor([0, 1, 2, 1, -100, 2]), torch.randint(0, 3, (2, 4, 4), generator=torch.Generator().manual_seed(2))
NUMBERS, TAGS = torch.randn(6), torch.randint(0, 2, (6, 3))


@pytest.mark.parametrize(
    ("name", "init_args", "outputs", "target"),
    [
        ("CrossEntropyLoss", {}, SCORES[:4], LABELS[:4]),
        ("CrossEntropyLoss", {"ignore_index": -100}, SCORES, LABELS),
        ("CrossEntropyLoss", {"weight": [1, 2, 5]}, SCORES, LABELS),
        ("CrossEntropyLoss", {"weight": [1.0, 2.0, 5.0], "label_smoothing": 0.1}, SCORES[:4], LABELS[:4]),
        ("CrossEntropyLoss", {"weight": [1, 2, 0], "ignore_index": 1}, PIXELS, MASKS),
        ("NLLLoss", {"weight": [1, 2, 5]}, SCORES.log_softmax(1), LABELS),
        ("BCEWithLogitsLoss", {}, NUMBERS, TAGS[:, 0]),
        ("BCEWithLogitsLoss", {"pos_weight": [3]}, NUMBERS, TAGS[:, 0]),
        ("BCEWithLogitsLoss", {"pos_weight": [1, 2, 5]}, SCORES, TAGS),
        ("BCEWithLogitsLoss", {"weight": [1, 2, 5]}, SCORES, TAGS.bool()),
        ("MSELoss", {}, NUMBERS, TAGS[:, 0]),
    ],
)
def test_the_mean_is_the_one_of_torch(name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor) -> None:
    spec = {"class_path": f"torch.nn.{name}", "init_args": init_args}
    found = Losses.of(loss_of_rows(spec, outputs, target))
    assert found.values.shape == (len(outputs),)
    sums = summed(None, found)
    tensors = {key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value for key, value in init_args.items()}
    wanted = getattr(nn, name)(**tensors)(outputs, target if outputs.shape != target.shape else target.float())
    assert sums.loss / sums.weight == pytest.approx(wanted.item(), rel=1e-5)


def test_two_outputs_are_not_compared_with_one_number() -> None:
    with pytest.raises(ConfigError, match=r"outputs are of shape \(rows, 6\), the target of \(rows\); torch.nn.MSELoss compares each with"):
        loss_of_rows({"class_path": "torch.nn.MSELoss"}, torch.randn(6, 6), NUMBERS)
