"""What tasks that predict one of several classes share: weights, metrics, predictions, and the rows that they got wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_app.errors import ConfigError
from ray_app.plan.facts import DataFacts
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.base import Batch, Mistake

ClassWeights = list[float] | Literal["balanced"] | None
"""How much a row of each class counts in the training loss: a number for each, or what makes all classes count the same in sum."""


def resolve_weights(weights: ClassWeights, data: DataFacts, label: str, classes: int) -> list[float] | None:
    """The weight of every class as a number, or None where all are 1.

    `balanced` is rows / (classes that have rows x rows of the class), whose mean over the rows is 1.

    Args:
        weights: As configured.
        data: The training data; `balanced` reads its label column.
        label: Its label column.
        classes: How many classes there are.

    Raises:
        ConfigError: There is not one weight of at least 0 for each class.
    """
    if weights == "balanced":
        assert data.count is not None, "a data set that was opened"
        rows = data.count(label)
        return [data.num_rows / (len(rows) * rows[c]) if c in rows else 0.0 for c in range(classes)]
    if weights is not None and (
        isinstance(weights, str) or len(weights) != classes or not any(weights) or not all(0 <= w < math.inf for w in weights)
    ):
        raise ConfigError(
            f"task.init_args.class_weights is {weights}; it must be balanced, or a list of {classes} numbers of at least 0, one for each"
            " class and not all 0."
        )
    return weights


def weigh(batch: Batch, weights: list[float] | None) -> Batch:
    """A training batch with the weight of each row's class as `class_weight`, shape (rows,); of a mixed target's classes the mean."""
    if weights is None:
        return batch
    of_class = torch.tensor(weights, device=batch["label"].device)
    return {**batch, "class_weight": batch["target"] @ of_class if "target" in batch else of_class[batch["label"]]}


def weighted(losses: Tensor, batch: Batch) -> Tensor:
    """Losses times what `weigh` added, shape (rows,)."""
    return losses * batch["class_weight"] if "class_weight" in batch else losses


def classification_metrics(classes: int) -> MetricCollection:
    """Accuracy, F1 averaged over the classes, calibration error (Guo et al. 2017, 15 bins), and per class precision, recall and F1, with
    the confusion matrix [true][predicted].
    """
    from torchmetrics import MetricCollection
    from torchmetrics import classification as known

    def per_class(kind: type[Metric]) -> Metric:
        return kind(num_classes=classes, average="none", validate_args=False)

    return MetricCollection(
        {
            "accuracy": known.MulticlassAccuracy(classes, average="micro", validate_args=False),
            "f1_macro": known.MulticlassF1Score(classes, average="macro", validate_args=False),
            "calibration_error": known.MulticlassCalibrationError(classes, n_bins=15, validate_args=False),
            "precision": per_class(known.MulticlassPrecision),
            "recall": per_class(known.MulticlassRecall),
            "f1": per_class(known.MulticlassF1Score),
            "confusion_matrix": known.MulticlassConfusionMatrix(classes, validate_args=False),
        }
    )


def wrong_classes(scores: Tensor, labels: Tensor, classes: Sequence[str], most: int) -> list[Mistake]:
    """The rows whose highest score is not their class, the surest first.

    Args:
        scores: Shape (rows, classes).
        labels: Shape (rows,).
        classes: Names of the classes.
        most: How many at most.
    """
    sure, predicted = scores.float().softmax(-1).max(-1)
    wrong = (predicted != labels).nonzero()[:, 0]
    order = wrong[sure[wrong].argsort(descending=True, stable=True)][:most]
    return [Mistake(i, classes[int(labels[i])], classes[int(predicted[i])], float(sure[i])) for i in order.tolist()]


def class_predictions(scores: Tensor, classes: Sequence[str]) -> dict[str, npt.NDArray]:
    """The class with the highest score of every row by name (`predicted`) and number (`predicted_index`), and its `confidence`, 0 to 1.

    Args:
        scores: Shape (rows, classes).
        classes: Names of the classes.
    """
    confidence, index = scores.float().softmax(-1).max(-1)
    return {"predicted": np.array(classes)[index.numpy()], "predicted_index": index.numpy(), "confidence": confidence.numpy()}
