"""Configured losses: their means equal those of torch, with class weights and ignored targets."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.configured_arguments import compute_row_losses
from ray_app.task.losses import Losses, MetricKey, sum_losses

RANDOM = torch.Generator().manual_seed(1)
SCORES, PIXELS = torch.randn(6, 3, generator=RANDOM), torch.randn(2, 3, 4, 4, generator=RANDOM)
LABELS, MASKS = torch.tensor([0, 1, 2, 1, -100, 2]), torch.randint(0, 3, (2, 4, 4), generator=RANDOM)
NUMBERS, TAGS = torch.randn(6, generator=RANDOM), torch.randint(0, 2, (6, 3), generator=RANDOM)


@pytest.mark.parametrize(
    ("name", "init_args", "outputs", "target"),
    [
        ("CrossEntropyLoss", {}, SCORES[:4], LABELS[:4]),
        ("CrossEntropyLoss", {}, SCORES, LABELS),
        ("CrossEntropyLoss", {"ignore_index": -100}, SCORES, LABELS),
        ("NLLLoss", {}, SCORES.log_softmax(1), LABELS),
        ("CrossEntropyLoss", {"weight": [1, 2, 5]}, SCORES, LABELS),
        ("CrossEntropyLoss", {"weight": [1.0, 2.0, 5.0], "label_smoothing": 0.1}, SCORES[:4], LABELS[:4]),
        ("CrossEntropyLoss", {"weight": [1, 2, 0], "ignore_index": 1}, PIXELS, MASKS),
        ("NLLLoss", {"weight": [1, 2, 5]}, SCORES.log_softmax(1), LABELS),
        ("BCEWithLogitsLoss", {}, NUMBERS, TAGS[:, 0]),
        ("BCEWithLogitsLoss", {"pos_weight": [3]}, NUMBERS, TAGS[:, 0]),
        ("BCEWithLogitsLoss", {"pos_weight": [1, 2, 5]}, SCORES, TAGS),
        ("BCEWithLogitsLoss", {"weight": [1, 2, 5]}, SCORES, TAGS.bool()),
        ("MSELoss", {}, NUMBERS, TAGS[:, 0]),
        ("functional.cross_entropy", {}, SCORES, LABELS),
        ("functional.cross_entropy", {"weight": [1, 2, 0], "ignore_index": 1}, PIXELS, MASKS),
        ("functional.nll_loss", {"weight": [1, 2, 5]}, SCORES.log_softmax(1), LABELS),
    ],
)
def test_the_mean_of_a_loss_equals_torch(name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor) -> None:
    spec = {"class_path": f"torch.nn.{name}", "init_args": init_args}
    losses = Losses.of(compute_row_losses(spec, outputs, target))
    assert losses.values.shape == (len(outputs),)
    sums = sum_losses(None, losses)
    tensors = {
        key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
        for key, value in init_args.items()
    }
    loss = attrgetter(name)(nn)
    compute = partial(loss, **tensors) if name.startswith("functional") else loss(**tensors)
    expected = compute(outputs, target if outputs.shape != target.shape else target.float())
    assert sums.loss / sums.weight == pytest.approx(expected.item(), rel=1e-5)


def test_two_outputs_are_not_compared_with_one_number() -> None:
    with pytest.raises(ConfigError, match=r"outputs have the shape \(rows, 6\), but the target has \(rows\)"):
        compute_row_losses({"class_path": "torch.nn.MSELoss"}, torch.zeros(6, 6), NUMBERS)


WEIGHTED = torch.tensor([1.0, 2.0, 5.0])


@pytest.mark.parametrize(
    ("name", "init_args", "outputs", "target", "correct", "weights"),
    [
        ("CrossEntropyLoss", {}, SCORES[:4], LABELS[:4], SCORES[:4].argmax(1) == LABELS[:4], torch.ones(4)),
        ("CrossEntropyLoss", {"ignore_index": -100}, SCORES, LABELS, SCORES.argmax(1) == LABELS, LABELS.ge(0)),
        ("CrossEntropyLoss", {}, SCORES, LABELS, SCORES.argmax(1) == LABELS, LABELS.ge(0)),
        (
            "CrossEntropyLoss",
            {"weight": [1, 2, 5]},
            SCORES[:4],
            LABELS[:4],
            SCORES[:4].argmax(1) == LABELS[:4],
            WEIGHTED[LABELS[:4]],
        ),
        ("CrossEntropyLoss", {"ignore_index": 1}, PIXELS, MASKS, PIXELS.argmax(1) == MASKS, MASKS != 1),
        ("BCEWithLogitsLoss", {"pos_weight": [1, 2, 5]}, SCORES, TAGS, SCORES.gt(0) == TAGS.bool(), torch.ones(6, 3)),
        ("BCEWithLogitsLoss", {}, NUMBERS, TAGS[:, 0].bool(), NUMBERS.gt(0) == TAGS[:, 0].bool(), torch.ones(6)),
        ("BCEWithLogitsLoss", {}, SCORES, TAGS.float(), SCORES.gt(0) == TAGS.bool(), torch.ones(6, 3)),
        ("BCELoss", {}, NUMBERS.sigmoid(), TAGS[:, 0], NUMBERS.gt(0) == TAGS[:, 0].bool(), torch.ones(6)),
        ("MultiLabelSoftMarginLoss", {}, SCORES, TAGS, SCORES.gt(0) == TAGS.bool(), torch.ones(6, 3)),
        ("SoftMarginLoss", {}, NUMBERS, TAGS[:, 0] * 2 - 1, NUMBERS.gt(0) == TAGS[:, 0].bool(), torch.ones(6)),
    ],
)
def test_training_accuracy_has_the_weights_of_the_loss(
    name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor, correct: Tensor, weights: Tensor
) -> None:
    spec = {"class_path": f"torch.nn.{name}", "init_args": init_args}
    sums = sum_losses(None, Losses.of(compute_row_losses(spec, outputs, target, accuracy=True)))
    assert sums.metrics[MetricKey("accuracy")] / sums.weight == pytest.approx(
        ((correct * weights).sum() / weights.sum()).item()
    )
    without_accuracy = sum_losses(None, Losses.of(compute_row_losses(spec, outputs, target)))
    assert (without_accuracy.loss, without_accuracy.weight) == (sums.loss, sums.weight)


class OfRow(nn.CrossEntropyLoss):
    """Computes one value for all pixels of a row."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the mean of each row."""
        return super().forward(input, target).flatten(1).mean(1)


def test_training_accuracy_is_per_row_where_the_loss_has_one_value_per_row() -> None:
    spec = {"class_path": f"{__name__}.OfRow"}
    losses = Losses.of(compute_row_losses(spec, PIXELS, MASKS, accuracy=True))
    assert losses.metrics["accuracy"].tolist() == pytest.approx(
        (PIXELS.argmax(1) == MASKS).float().flatten(1).mean(1).tolist()
    )


@pytest.mark.parametrize(
    ("outputs", "target"),
    [(NUMBERS, TAGS[:, 0].float()), (NUMBERS, TAGS[:, 0]), (SCORES, TAGS[:, :2]), ({"logits": SCORES}, LABELS)],
)
def test_training_accuracy_without_class_targets_is_refused(outputs: Any, target: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"train_accuracy is true, but the target, .* is neither the index of a"):
        compute_row_losses({"class_path": "torch.nn.MSELoss"}, outputs, target, accuracy=True)


TOKEN_LABELS, IS_TOKEN = torch.tensor([[0, 1, 2, 7], [2, 7, 7, 7]]), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
TOKEN_SCORES = torch.randn(2, 3, 4, generator=RANDOM)


@pytest.mark.parametrize(
    ("name", "init_args", "outputs", "target"),
    [
        ("CrossEntropyLoss", {}, TOKEN_SCORES, TOKEN_LABELS),
        ("CrossEntropyLoss", {"weight": [1, 2, 5]}, TOKEN_SCORES, TOKEN_LABELS),
        ("CrossEntropyLoss", {"ignore_index": 1}, TOKEN_SCORES, TOKEN_LABELS),
        ("MSELoss", {}, TOKEN_SCORES[:, 0], TOKEN_LABELS.float()),
    ],
)
def test_the_padding_of_lists_has_no_weight(
    name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor
) -> None:
    spec = {"class_path": f"torch.nn.{name}", "init_args": init_args}
    sums = sum_losses(
        None, Losses.of(compute_row_losses(spec, outputs, target, is_value=IS_TOKEN, accuracy=name != "MSELoss"))
    )
    tensors = {
        key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
        for key, value in init_args.items()
    }
    of_values = outputs.movedim(1, -1)[IS_TOKEN] if outputs.ndim == 3 else outputs[IS_TOKEN]
    assert sums.loss / sums.weight == pytest.approx(
        getattr(nn, name)(**tensors)(of_values, target[IS_TOKEN]).item(), rel=1e-5
    )
    if not init_args and sums.metrics:
        assert sums.metrics[MetricKey("accuracy")] / sums.weight == pytest.approx(
            (of_values.argmax(1) == target[IS_TOKEN]).float().mean().item()
        )


def test_one_loss_value_for_a_padded_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned values of shape \(rows\) for a target of padded lists"):
        compute_row_losses({"class_path": f"{__name__}.OfRow"}, TOKEN_SCORES, TOKEN_LABELS, is_value=IS_TOKEN)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_targets_are_not_rounded_to_the_precision_of_the_outputs(half: torch.dtype) -> None:
    target = torch.tensor([345678.0, 0.123456])
    outputs = torch.tensor([345670.0, 0.0]).clamp(max=torch.finfo(half).max).to(half).requires_grad_()
    losses = compute_row_losses({"class_path": "torch.nn.L1Loss"}, outputs, target)
    assert isinstance(losses, Tensor)
    assert torch.equal(losses, (outputs.float() - target).abs())
    losses.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.dtype == half


def test_sums_and_weights_of_a_row_are_not_rounded_to_half_precision() -> None:
    for name, outputs, target in (
        ("MSELoss", torch.zeros(2, 1001), torch.ones(2, 1001)),
        ("NLLLoss", torch.ones(2, 3, 1001), LONG_LABELS),
    ):
        losses = Losses.of(compute_row_losses({"class_path": f"torch.nn.{name}"}, outputs.bfloat16(), target))
        assert losses.weights is not None
        assert (losses.values.abs().tolist(), losses.weights.tolist()) == ([1001, 1001], [1001, 1001])


LONG_LABELS = torch.zeros(2, 1001, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "init_args", "target"), [("CrossEntropyLoss", {"weight": [1, 2, 5]}, 0), ("BCEWithLogitsLoss", {}, 1)]
)
def test_a_loss_that_an_evaluation_uses_first_can_be_trained_with(
    name: str, init_args: dict[str, Any], target: int
) -> None:
    spec = {
        "class_path": f"torch.nn.{name}",
        "init_args": {**init_args, **({"pos_weight": [3.25, 2, 1]} if target else {})},
    }
    targets = torch.ones(4, 3) if target else torch.tensor([0, 1, 2, 1])
    if not target:
        # No other test of this process builds a loss with this value, so it is not in the cache yet.
        spec["init_args"]["label_smoothing"] = 0.125
    with torch.inference_mode():
        compute_row_losses(spec, SCORES[:4], targets)
    scores = SCORES[:4].clone().requires_grad_()
    sum_losses(None, Losses.of(compute_row_losses(spec, scores, targets)))
    Losses.of(compute_row_losses(spec, scores, targets)).values.sum().backward()
    assert scores.grad is not None
