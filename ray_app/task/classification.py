"""What tasks that predict one of several classes share: weights, metrics, predictions, and the rows that they got
wrong.

Truths that are no longer one class: label smoothing, mixup and cutmix, with random numbers keyed by the row.

A row is mixed with the row before it in its micro-batch, which the plan has shuffled. So the result depends on the
micro-batch, which is that of a logical worker, and not on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from ray_app.errors import ConfigError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.base import Batch, Mistake, uniform
from ray_app.task.device import constant_tensor, to_device

ClassWeights = list[float] | Literal["balanced"] | None
"""How much a row of each class counts in the training loss: a number for each, or what makes all classes count the same
in sum.
"""
MAX_CONFUSED_CLASSES = 2048
"""A confusion matrix of as many classes takes 32 MiB, and as much of `evaluations/*.json`."""


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
        isinstance(weights, str)
        or len(weights) != classes
        or not any(weights)
        or not all(0 <= w < math.inf for w in weights)
    ):
        raise ConfigError(
            f"task.init_args.class_weights is {weights}; it must be balanced, or a list of {classes} numbers of at"
            " least 0, one for each class and not all 0."
        )
    return weights


def add_class_weights(batch: Batch, weights: list[float] | None) -> Batch:
    """A training batch with the weight of each row's class as `class_weight`, shape (rows,); of a mixed target's
    classes the mean.
    """
    if weights is None:
        return batch
    of_class = constant_tensor(weights, batch["label"].device)
    return {**batch, "class_weight": batch["target"] @ of_class if "target" in batch else of_class[batch["label"]]}


def apply_class_weights(losses: Tensor, batch: Batch) -> Tensor:
    """Losses times what `weigh` added, shape (rows,)."""
    return losses * batch["class_weight"] if "class_weight" in batch else losses


def classification_metrics(classes: int) -> MetricCollection:
    """Accuracy, F1 averaged over the classes, calibration error (Guo et al. 2017, 15 bins), and per class precision,
    recall and F1, with the confusion matrix [true][predicted].

    Of more than `MAX_CONFUSED_CLASSES` classes only accuracy and calibration error: torchmetrics counts all others,
    also per class, in a matrix of classes x classes.
    """
    from torchmetrics import MetricCollection
    from torchmetrics import classification as known

    def per_class(kind: type[Metric]) -> Metric:
        return kind(num_classes=classes, average="none", validate_args=False)

    metrics: dict[str, Metric | MetricCollection] = {
        "accuracy": known.MulticlassAccuracy(classes, average="micro", validate_args=False),
        "calibration_error": known.MulticlassCalibrationError(classes, n_bins=15, validate_args=False),
    }
    if classes <= MAX_CONFUSED_CLASSES:
        metrics |= {
            "f1_macro": known.MulticlassF1Score(classes, average="macro", validate_args=False),
            "precision": per_class(known.MulticlassPrecision),
            "recall": per_class(known.MulticlassRecall),
            "f1": per_class(known.MulticlassF1Score),
            "confusion_matrix": known.MulticlassConfusionMatrix(classes, validate_args=False),
        }
    return MetricCollection(metrics)


def find_mistakes(scores: Tensor, labels: Tensor, classes: Sequence[str], most: int) -> list[Mistake]:
    """The rows whose highest score is not their class, the surest first.

    Args:
        scores: Shape (rows, classes).
        labels: Shape (rows,).
        classes: Names of the classes.
        most: How many at most.
    """
    predicted = scores.argmax(-1)
    wrong = (predicted != labels).nonzero()[:, 0]
    sure, order = scores[wrong].float().softmax(-1).amax(-1).sort(descending=True, stable=True)
    found = zip(wrong[order[:most]].tolist(), sure[:most].tolist(), strict=True)
    return [Mistake(i, classes[int(labels[i])], classes[int(predicted[i])], confidence) for i, confidence in found]


def predict_classes(scores: Tensor, classes: Sequence[str]) -> dict[str, npt.NDArray]:
    """The class with the highest score of every row by name (`predicted`) and number (`predicted_index`), and its
    `confidence`, 0 to 1.

    Args:
        scores: Shape (rows, classes).
        classes: Names of the classes.
    """
    confidence, index = scores.float().softmax(-1).max(-1)
    return {
        "predicted": np.array(classes)[index.numpy()],
        "predicted_index": index.numpy(),
        "confidence": confidence.numpy(),
    }


_SHARE, _KIND, _ROW, _COLUMN = 21, 22, 23, 24  # salts: what a row's random number is for


def smooth_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One-hot truths with a share spread over all classes, see Szegedy et al., "Rethinking the Inception Architecture",
    CVPR 2016.

    Args:
        labels: Shape (rows,).
        classes: How many there are.
        smoothing: The share, 0 to 1.

    Returns:
        float32, shape (rows, classes), each row adding up to 1.
    """
    one_hot = functional.one_hot(labels, classes).to(torch.float32)
    return one_hot * (1 - smoothing) + smoothing / classes


def mix_images(images: Tensor, target: Tensor, keys: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Mixes every image with the one before it, and their truths in the same proportion.

    Mixup: Zhang et al., ICLR 2018. Cutmix: Yun et al., ICCV 2019.

    Args:
        images: Shape (rows, channels, height, width).
        target: Shape (rows, classes).
        keys: See `Task.augment`.
        mixup: Parameter of mixup's Beta distribution; 0: none.
        cutmix: Parameter of cutmix's; 0: none. With both, each row gets either with the same chance.

    Returns:
        The images, float32 with `mixup`, and the truths.
    """
    pastes = uniform(keys, _KIND) < (0.5 if mixup and cutmix else 1.0 if cutmix else 0.0)
    share = torch.where(pastes, _draw_beta(keys, cutmix), _draw_beta(keys, mixup))
    rectangle, pasted = _draw_rectangles(keys, share, images.shape[-2], images.shape[-1])
    kept = torch.where(pastes, 1 - pasted, share).to(torch.float32)
    kept, pastes, rectangle = (to_device(each, images.device) for each in (kept, pastes, rectangle))
    other = images.roll(1, 0)
    mixed = torch.where(rectangle[:, None], other, images)
    if mixup:
        own = kept[:, None, None, None]
        mixed = torch.where(pastes[:, None, None, None], mixed, images * own + other * (1 - own))
    return mixed, target * kept[:, None] + target.roll(1, 0) * (1 - kept[:, None])


def _draw_beta(keys: Tensor, alpha: float) -> Tensor:
    """One number of Beta(alpha, alpha) per key, float64, shape (rows,); ones with `alpha` 0."""
    if not alpha:
        return torch.ones(len(keys), dtype=torch.float64)
    from scipy.special import betaincinv

    return torch.from_numpy(np.asarray(betaincinv(alpha, alpha, uniform(keys, _SHARE).numpy())))


def _draw_rectangles(keys: Tensor, share: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """A rectangle per row that covers about 1 - share of an image, as far as it lies inside.

    Returns:
        Where it is, bool of shape (rows, height, width), and the share of the image that it covers, shape (rows,).
    """
    inside = torch.ones(len(keys), height, width, dtype=torch.bool)
    for salt, size, axis in ((_ROW, height, 1), (_COLUMN, width, 2)):
        centre, half = (uniform(keys, salt) * size).floor()[:, None], ((1 - share).sqrt() * size / 2).floor()[:, None]
        place = torch.arange(size)[None]
        line = (place >= centre - half) & (place < centre + half)
        inside &= line.unsqueeze(3 - axis)
    return inside, inside.to(torch.float64).mean((1, 2))
