"""Losses of a configuration: their means are those of torch, with weights of classes and targets that are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.base import Losses, sum_losses
from ray_app.task.configured_arguments import compute_row_losses

SCORES, PIXELS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.randn(2, 3, 4, 4)
LABELS, MASKS = (
    torch.tensor([0, 1, 2, 1, -100, 2]),
    torch.randint(0, 3, (2, 4, 4), generator=torch.Generator().manual_seed(2)),
)
NUMBERS, TAGS = torch.randn(6), torch.randint(0, 2, (6, 3))


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
    ],
)
def test_the_mean_is_the_one_of_torch(name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor) -> None:
    spec = {"class_path": f"torch.nn.{name}", "init_args": init_args}
    found = Losses.of(compute_row_losses(spec, outputs, target))
    assert found.values.shape == (len(outputs),)
    sums = sum_losses(None, found)
    tensors = {
        key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
        for key, value in init_args.items()
    }
    wanted = getattr(nn, name)(**tensors)(outputs, target if outputs.shape != target.shape else target.float())
    assert sums.loss / sums.weight == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "init_args", "outputs", "target"),
    [
        ("cross_entropy", {}, SCORES, LABELS),
        ("cross_entropy", {"weight": [1, 2, 0], "ignore_index": 1}, PIXELS, MASKS),
        ("nll_loss", {"weight": [1, 2, 5]}, SCORES.log_softmax(1), LABELS),
    ],
)
def test_the_mean_of_a_function_is_the_one_of_torch(
    name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor
) -> None:
    spec = {"class_path": f"torch.nn.functional.{name}", "init_args": init_args}
    sums = sum_losses(None, Losses.of(compute_row_losses(spec, outputs, target)))
    tensors = {
        key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
        for key, value in init_args.items()
    }
    assert sums.loss / sums.weight == pytest.approx(
        getattr(nn.functional, name)(outputs, target, **tensors).item(), rel=1e-5
    )


def test_two_outputs_are_not_compared_with_one_number() -> None:
    with pytest.raises(
        ConfigError,
        match=r"outputs are of shape \(rows, 6\), the target of \(rows\); torch.nn.MSELoss compares each with",
    ):
        compute_row_losses({"class_path": "torch.nn.MSELoss"}, torch.randn(6, 6), NUMBERS)


WEIGHTED = torch.tensor([1.0, 2.0, 5.0])


@pytest.mark.parametrize(
    ("name", "init_args", "outputs", "target", "right", "weights"),
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
def test_the_accuracy_of_training_counts_as_the_loss_does(
    name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor, right: Tensor, weights: Tensor
) -> None:
    spec = {"class_path": f"torch.nn.{name}", "init_args": init_args}
    sums = sum_losses(None, Losses.of(compute_row_losses(spec, outputs, target, accuracy=True)))
    assert sums.metrics["accuracy"] / sums.weight == pytest.approx(((right * weights).sum() / weights.sum()).item())
    plain = sum_losses(None, Losses.of(compute_row_losses(spec, outputs, target)))
    assert (plain.loss, plain.weight) == (sums.loss, sums.weight)


class OfRow(nn.CrossEntropyLoss):
    """Makes one value of all pixels of a row."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The mean."""
        return super().forward(input, target).flatten(1).mean(1)


def test_the_accuracy_of_a_loss_with_one_value_for_all_pixels_of_a_row() -> None:
    spec = {"class_path": f"{__name__}.OfRow"}
    found = Losses.of(compute_row_losses(spec, PIXELS, MASKS, accuracy=True))
    assert found.metrics["accuracy"].tolist() == pytest.approx(
        (PIXELS.argmax(1) == MASKS).float().flatten(1).mean(1).tolist()
    )


@pytest.mark.parametrize(
    ("outputs", "target"),
    [(NUMBERS, TAGS[:, 0].float()), (NUMBERS, TAGS[:, 0]), (SCORES, TAGS[:, :2]), ({"logits": SCORES}, LABELS)],
)
def test_the_accuracy_of_what_are_no_classes_is_refused(outputs: Any, target: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"train_accuracy is true, and the target, .* is not the index of a class"):
        compute_row_losses({"class_path": "torch.nn.MSELoss"}, outputs, target, accuracy=True)


LISTS, THERE = torch.tensor([[0, 1, 2, 7], [2, 7, 7, 7]]), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
OF_LISTS = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "init_args", "outputs", "target"),
    [
        ("CrossEntropyLoss", {}, OF_LISTS, LISTS),
        ("CrossEntropyLoss", {"weight": [1, 2, 5]}, OF_LISTS, LISTS),
        ("CrossEntropyLoss", {"ignore_index": 1}, OF_LISTS, LISTS),
        ("MSELoss", {}, OF_LISTS[:, 0], LISTS.float()),
    ],
)
def test_what_lists_are_padded_with_does_not_count(
    name: str, init_args: dict[str, Any], outputs: Tensor, target: Tensor
) -> None:
    spec = {"class_path": f"torch.nn.{name}", "init_args": init_args}
    sums = sum_losses(
        None, Losses.of(compute_row_losses(spec, outputs, target, is_value=THERE, accuracy=name != "MSELoss"))
    )
    tensors = {
        key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
        for key, value in init_args.items()
    }
    of_values = outputs.movedim(1, -1)[THERE] if outputs.ndim == 3 else outputs[THERE]
    assert sums.loss / sums.weight == pytest.approx(
        getattr(nn, name)(**tensors)(of_values, target[THERE]).item(), rel=1e-5
    )
    if not init_args and sums.metrics:
        assert sums.metrics["accuracy"] / sums.weight == pytest.approx(
            (of_values.argmax(1) == target[THERE]).float().mean().item()
        )


def test_one_value_of_a_padded_list_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"gave values of shape \(rows\) for a target of lists, \(rows, 4\), which are padded"
    ):
        compute_row_losses({"class_path": f"{__name__}.OfRow"}, OF_LISTS, LISTS, is_value=THERE)


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
        ("NLLLoss", torch.ones(2, 3, 1001), LONG),
    ):
        found = Losses.of(compute_row_losses({"class_path": f"torch.nn.{name}"}, outputs.bfloat16(), target))
        assert found.weights is not None
        assert (found.values.abs().tolist(), found.weights.tolist()) == ([1001, 1001], [1001, 1001])


LONG = torch.zeros(2, 1001, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "init_args", "target"), [("CrossEntropyLoss", {"weight": [1, 2, 5]}, 0), ("BCEWithLogitsLoss", {}, 1)]
)
def test_a_loss_that_an_evaluation_asks_for_first_can_be_trained_with(
    name: str, init_args: dict[str, Any], target: int
) -> None:
    spec = {
        "class_path": f"torch.nn.{name}",
        "init_args": {**init_args, **({"pos_weight": [3.25, 2, 1]} if target else {})},
    }
    targets = torch.ones(4, 3) if target else torch.tensor([0, 1, 2, 1])
    if not target:
        spec["init_args"]["label_smoothing"] = 0.125  # no other test has made this one in this process
    with torch.inference_mode():
        compute_row_losses(spec, torch.randn(4, 3), targets)
    scores = torch.randn(4, 3, requires_grad=True)
    sum_losses(None, Losses.of(compute_row_losses(spec, scores, targets)))
    Losses.of(compute_row_losses(spec, scores, targets)).values.sum().backward()
    assert scores.grad is not None
