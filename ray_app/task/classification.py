"""What tasks that predict one of several classes share: their metrics, their predictions, and the rows that they got wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ray_app.task.base import Mistake

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


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
