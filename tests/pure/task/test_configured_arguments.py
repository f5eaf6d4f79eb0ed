"""Arguments of a configured loss are honoured or refused, and the loss decides the activation for metrics."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import sigmoid_focal_loss

from ray_app.errors import ConfigError
from ray_app.task.base import Batch
from ray_app.task.configured_arguments import compute_row_losses
from ray_app.task.losses import Losses
from ray_app.task.metrics import combine, score
from ray_app.task.module import ModuleTask
from ray_app.train.state.parameters import make_contiguous

ROWS = 30
KL = "torch.nn.KLDivLoss"


def task_of(loss: dict[str, Any], **init_args: Any) -> ModuleTask:
    task = ModuleTask({"class_path": "torch.nn.Identity"}, ["x"], "y", loss, **init_args)
    task.kinds = {"x": "array", "y": "array"}
    return task


@pytest.mark.parametrize(
    ("reduction", "expected_weight"),
    [({}, ROWS * 4), ({"reduction": "mean"}, ROWS * 4), ({"reduction": "batchmean"}, ROWS)],
)
def test_the_kl_divergence_has_the_reduction_of_torch(reduction: dict[str, Any], expected_weight: int) -> None:
    outputs, target = torch.randn(ROWS, 4).log_softmax(1), torch.rand(ROWS, 4).softmax(1)
    losses = Losses.of(compute_row_losses({"class_path": KL, "init_args": reduction}, outputs, target))
    weight = losses.weights.sum() if losses.weights is not None else torch.tensor(float(ROWS))
    assert float(losses.values.sum() / weight) == pytest.approx(
        float(nn.KLDivLoss(**reduction)(outputs, target)), rel=1e-5
    )
    assert float(weight) == expected_weight


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"class_path": "torch.nn.MSELoss", "init_args": {"reduction": "sum"}}, "reduction 'sum'; it must be one"),
        ({"class_path": KL, "init_args": {"reduction": "sum"}}, "reduction 'sum'; it must be one of mean, none"),
        (
            {"class_path": "torch.nn.MSELoss", "init_args": {"reduction": "batchmean"}},
            "reduction 'batchmean'; it must be one of mean, none.",
        ),
        ({"class_path": "torch.nn.MSELoss", "init_args": {"size_average": False}}, "has size_average, which torch"),
    ],
)
def test_an_unsupported_reduction_is_refused(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(loss)
    assert message in str(caught.value)


def test_a_loss_function_is_called_with_outputs_and_target() -> None:
    outputs, target = torch.randn(ROWS), torch.randint(0, 2, (ROWS,)).float()
    spec = {"class_path": "torchvision.ops.sigmoid_focal_loss", "init_args": {"alpha": 0.5, "gamma": 1.0}}
    losses = compute_row_losses(spec, outputs, target)
    torch.testing.assert_close(losses, sigmoid_focal_loss(outputs, target, 0.5, 1.0))


class Margin(nn.Module):
    """A user-defined loss that takes logits without declaring it."""

    def __init__(self, reduction: str) -> None:
        super().__init__()

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (1 - outputs * (2 * target - 1)).relu()


BINARY = "torchmetrics.classification.Binary"
MULTICLASS = {"num_classes": 3}


@pytest.mark.parametrize(
    ("loss", "shape", "kind", "init_args"),
    [
        ("torch.nn.BCEWithLogitsLoss", (ROWS,), "Binary", {}),
        ("torch.nn.BCEWithLogitsLoss", (ROWS, 1), "Binary", {}),
        ("torch.nn.BCEWithLogitsLoss", (ROWS, 1, 3, 2), "Binary", {}),
        ("torch.nn.SoftMarginLoss", (ROWS,), "Binary", {}),
        ("torchvision.ops.sigmoid_focal_loss", (ROWS,), "Binary", {}),
        ("torch.nn.functional.binary_cross_entropy_with_logits", (ROWS,), "Binary", {}),
        ("tests.pure.task.test_configured_arguments.Margin", (ROWS,), "Binary", {"activation": "sigmoid"}),
        ("torch.nn.MultiLabelSoftMarginLoss", (ROWS, 3), "Multilabel", {}),
        ("torch.nn.BCEWithLogitsLoss", (ROWS, 3), "Multilabel", {}),
        ("torch.nn.CrossEntropyLoss", (ROWS, 3), "Multiclass", {}),
        ("torch.nn.CrossEntropyLoss", (ROWS, 3, 2, 2), "Multiclass", {}),
        ("torch.nn.NLLLoss", (ROWS, 3), "Multiclass", {}),
        ("torch.nn.MultiMarginLoss", (ROWS, 3), "Multiclass", {}),
    ],
)
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_classification_metrics_get_probabilities_for_every_batch_size(
    loss: str, shape: tuple[int, ...], kind: str, init_args: dict[str, Any], scale: float
) -> None:
    """All small scores and some large ones are between 0 and 1, which torchmetrics takes for probabilities."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(shape, generator=generator) * scale + 0.45
    if loss.endswith("NLLLoss"):
        scores = scores.log_softmax(1)
    count = {"Binary": {}, "Multilabel": {"num_labels": 3}, "Multiclass": MULTICLASS}[kind]
    metrics = {
        name: {"class_path": f"torchmetrics.classification.{kind}{name}", "init_args": count}
        for name in ("Accuracy", "AUROC")
    }
    task = task_of({"class_path": loss}, metrics=metrics, best_metric="Accuracy", **init_args)
    if kind == "Multiclass":
        target, probabilities = torch.randint(0, 3, (ROWS, *shape[2:]), generator=generator), scores.softmax(1)
    else:
        target = torch.randint(0, 2, (ROWS, *shape[2:]) if shape[1:2] == (1,) else shape, generator=generator)
        probabilities = scores.sigmoid().reshape(target.shape)
    expected = {name: float(metric(probabilities, target)) for name, metric in task.metrics().items()}
    arrays = {"x": scores.numpy(), "y": target.numpy()}
    for size in (ROWS, 7, 1):
        values = combine(task, score(task, nn.Identity(), arrays, size, torch.device("cpu"))).values
        assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_other_metrics_get_the_outputs_unchanged() -> None:
    metrics = {"mse": {"class_path": "torchmetrics.MeanSquaredError"}}
    task = task_of({"class_path": "torch.nn.BCEWithLogitsLoss"}, metrics=metrics)
    batch: Batch = {"x": torch.tensor([5.0, -5.0]), "y": torch.tensor([5.0, -5.0])}
    collection = task.metrics()
    task.update(collection, batch["x"], batch)
    assert float(collection["mse"].compute()) == 0


def test_a_parameter_made_by_expand_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(torch.zeros(1).expand(2))
    with pytest.raises(ConfigError, match=r"Values of the parameter bias, of shape \(2,\), share their memory"):
        make_contiguous(model)
