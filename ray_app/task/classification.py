"""Base of classification tasks (`Classification`), with class weights, label smoothing, mixup and cutmix.

Mixup and cutmix draw random numbers keyed by the row, and mix a row with the row before it in its micro-batch. That
belongs to one logical worker, so the result does not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app.devices import HOST, constant_tensor, to_device
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.answers import class_answers
from ray_app.task.base import Batch, Mistake, Task, class_names, count_classes, uniform
from ray_app.task.fields import MAX_COUNTED_CLASSES, SAMPLE_WEIGHT
from ray_app.task.losses import Losses

ClassWeights = list[float] | Literal["balanced"] | None
"""The weight of a row of each class in the training loss.

It is a number for each class, or `balanced`, which gives all classes the same weight in sum.
"""
MAX_CONFUSED_CLASSES = 2048
"""A confusion matrix of so many classes takes 32 MiB, and as much of `evaluations/*.json`."""
_VECTOR_SIZE = 16
"""The float32 numbers that a CPU with AVX-512 takes at a time."""
# Salts that make the random numbers of a row independent: the two of the share of a mixture, mixup or cutmix, and the
# position of a rectangle.
_SHARE = 21
_KIND = 22
_ROW = 23
_COLUMN = 24
_ANGLE = 25


def text_classes(data: DataFacts, label: str) -> list[str]:
    """Returns the distinct values of a column of text, sorted; raises DataError for missing or too many values."""
    assert data.count is not None, "a data set that was opened"
    names = sorted(map(str, data.count(label)))
    if len(names) > MAX_COUNTED_CLASSES:
        raise DataError(
            f"Column {label!r} of {data.path} has {len(names)} different values; {MAX_COUNTED_CLASSES} classes are"
            " allowed. Name another column in task.init_args.label."
        )
    return names


def resolve_weights(weights: ClassWeights, data: DataFacts, label: str, names: Sequence[str]) -> list[float] | None:
    """Returns the weight of every class as a number, None where all are 1; `balanced` reads the label column.

    A weight of `balanced` is rows / (classes that have rows x rows of the class); their mean over the rows is 1. Raises
    ConfigError unless there is one weight of at least 0 for each class.
    """
    classes = len(names)
    if weights == "balanced":
        assert data.count is not None, "a data set that was opened"
        index_of: dict[Any, int] = {name: index for index, name in enumerate(names)}
        rows = {index_of.get(value, value): count for value, count in data.count(label).items()}
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


def add_row_weights(batch: Batch, class_weights: list[float] | None) -> Batch:
    """Adds `row_weight`, (rows,): the `sample_weight` of each row, times the weight of its class.

    The class weight of a mixed target is the mean of its classes. Without weights the batch stays as it is.
    """
    weight = batch.get(SAMPLE_WEIGHT)
    if class_weights is not None:
        by_class = constant_tensor(class_weights, batch["label"].device)
        of_class = batch["target"] @ by_class if "target" in batch else by_class[batch["label"]]
        weight = of_class if weight is None else weight * of_class
    return batch if weight is None else {**batch, "row_weight": weight}


def classification_metrics(classes: int) -> MetricCollection:
    """Makes accuracy, calibration error (Guo et al. 2017, 15 bins), macro F1, precision, recall and F1 of each class.

    The confusion matrix [true][predicted] is added. With more than `MAX_CONFUSED_CLASSES` classes there are only
    accuracy and calibration error: torchmetrics counts all others, also per class, in a matrix of classes x classes.
    """
    from torchmetrics import MetricCollection
    from torchmetrics import classification as multiclass

    def per_class(kind: type[Metric]) -> Metric:
        return kind(num_classes=classes, average="none", validate_args=False)

    metrics: dict[str, Metric | MetricCollection] = {
        "accuracy": multiclass.MulticlassAccuracy(classes, average="micro", validate_args=False),
        "calibration_error": multiclass.MulticlassCalibrationError(classes, n_bins=15, validate_args=False),
    }
    if classes <= MAX_CONFUSED_CLASSES:
        metrics |= {
            "f1_macro": multiclass.MulticlassF1Score(classes, average="macro", validate_args=False),
            "precision": per_class(multiclass.MulticlassPrecision),
            "recall": per_class(multiclass.MulticlassRecall),
            "f1": per_class(multiclass.MulticlassF1Score),
            "confusion_matrix": multiclass.MulticlassConfusionMatrix(classes, validate_args=False),
        }
    return MetricCollection(metrics)


def _is_narrow(scores: Tensor) -> bool:
    """Returns whether scores (rows, classes) are transposed for a softmax over their classes.

    The kernels of a CPU take several classes of a row at a time, and with fewer than that one after the other. Rows
    they take several at a time, in a sixth of the time and with other last bits.
    """
    return scores.device == HOST and scores.ndim == 2 and scores.shape[1] < _VECTOR_SIZE


def probabilities(scores: Tensor) -> Tensor:
    """Returns the softmax of scores over their last dimension, the classes, in float32, for an evaluation.

    Its last bits depend on the number of rows, which is that of a chunk. A prediction may have any number of rows.
    """
    scores = scores.float()
    return scores.t().contiguous().softmax(0).t().contiguous() if _is_narrow(scores) else scores.softmax(-1)


def find_mistakes(scores: Tensor, labels: Tensor, classes: Sequence[str], max_rows: int) -> list[Mistake]:
    """Returns the mistakes of scores (rows, classes) for labels (rows,), by descending confidence."""
    predicted = scores.argmax(-1)
    wrong = (predicted != labels).nonzero()[:, 0]
    confidences, order = probabilities(scores[wrong]).amax(-1).sort(descending=True, stable=True)
    worst = zip(wrong[order[:max_rows]].tolist(), confidences[:max_rows].tolist(), strict=True)
    return [Mistake(i, classes[int(labels[i])], classes[int(predicted[i])], confidence) for i, confidence in worst]


def predict_classes(scores: Tensor, classes: Sequence[str]) -> dict[str, npt.NDArray]:
    """Returns the class with the highest of the scores (rows, classes) of every row, and its probability.

    `predicted` is the name of the class, `predicted_index` its index, and `confidence` the probability, 0 to 1.
    """
    confidence, index = scores.float().softmax(-1).max(-1)
    return {
        "predicted": np.array(classes)[index.numpy()],
        "predicted_index": index.numpy(),
        "confidence": confidence.numpy(),
    }


class Classification(Task):
    """Base of tasks that predict a class index: labels, loss, metrics, predictions and mistakes.

    A derived class sets `label`, `num_classes`, `class_weights`, `sample_weight` and `train_accuracy`, calls
    `set_classes` in `prepare` and implements `forward`, which returns class scores, shape (rows, classes).
    """

    best_metric: ClassVar[str] = "accuracy"
    best_mode: ClassVar[str] = "max"
    label: str
    num_classes: int | None
    class_weights: ClassWeights
    train_accuracy: bool

    def set_classes(self, data: DataFacts) -> None:
        """Completes a task in `prepare` with the number and names of the classes and their weights."""
        facts = data.columns.get(self.label)
        if facts is not None and facts.kind == "text":
            # The classes of evaluation data are those of the training data.
            self.classes = self.classes or text_classes(data, self.label)
            if self.num_classes not in (None, len(self.classes)):
                raise ConfigError(
                    f"task.init_args.num_classes is {self.num_classes}, but the column {self.label!r} of text has"
                    f" {len(self.classes)} different values as classes. Leave num_classes out."
                )
            self.num_classes = len(self.classes)
        else:
            self.num_classes = count_classes(data, self.label, self.num_classes)
            self.classes = class_names(data, self.num_classes)
        self.weights = resolve_weights(self.class_weights, data, self.label, self.classes)

    @property
    def class_count(self) -> int:
        """The number of classes, known after `prepare`."""
        assert self.num_classes is not None, "prepare() comes first"
        return self.num_classes

    def targets(self) -> list[str]:
        """Returns the column of labels, and that of the weights of rows."""
        return [self.label, *self.weight_columns()]

    def decode_labels(self, values: Any) -> npt.NDArray[np.int64]:
        """Returns the classes of rows from their indices or names, as int64, (rows,); raises ValueError for others."""
        if isinstance(values, list) and any(isinstance(value, str) for value in values):
            index_of = {name: index for index, name in enumerate(self.classes)}
            if others := sorted({str(value) for value in values if value not in index_of}):
                raise ValueError(f"label {others[0]!r} is not one of the {len(index_of)} classes of the training")
            return np.array([index_of[value] for value in values], np.int64)
        labels = np.asarray(values).astype(np.int64)
        if labels.size and not 0 <= labels.min() <= labels.max() < self.class_count:
            raise ValueError(f"label outside 0 to {self.class_count - 1}: {labels.min()} to {labels.max()}")
        return labels

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Computes the cross-entropy of every row, shape (rows,), times its weight if the batch has weights."""
        if _is_narrow(outputs) and not outputs.requires_grad and "target" not in batch:
            by_class = outputs.t().contiguous()[None]
            losses = functional.cross_entropy(by_class, batch["label"][None], reduction="none")[0]
        else:
            losses = functional.cross_entropy(outputs, batch.get("target", batch["label"]), reduction="none")
        return losses * batch["row_weight"] if "row_weight" in batch else losses

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Returns the loss of every row, and whether its prediction is right if `train_accuracy` is on."""
        outputs = self.forward(model, batch)
        losses = self.loss(outputs, batch)
        if not self.train_accuracy:
            return losses
        # A network of several members gives the scores of each.
        scores = outputs.mean(0) if outputs.ndim == 3 else outputs
        return Losses(losses, metrics={"accuracy": scores.argmax(1) == batch["label"]})

    def metrics(self) -> MetricCollection:
        """Makes the metrics of `classification_metrics`."""
        return classification_metrics(self.class_count)

    def update(self, metrics: MetricCollection, outputs: Tensor, batch: Batch) -> None:
        """Updates the metrics with the class probabilities and the labels of a batch."""
        metrics.update(probabilities(outputs), batch["label"])

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, npt.NDArray]:
        """Returns the predicted class of every row, see `predict_classes`."""
        del batch
        return predict_classes(outputs, self.classes)

    def answers(self, outputs: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """Returns the name of the most probable class of each row, and the probabilities of all."""
        del batch
        return class_answers(outputs.float().softmax(-1), self.classes)

    def mistakes(self, outputs: Tensor, batch: Batch, max_rows: int) -> list[Mistake]:
        """Returns the wrong predictions with the highest confidence, see `Task.mistakes`."""
        return find_mistakes(outputs, batch["label"], self.classes, max_rows)


def smooth_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Returns one-hot targets, float32 (rows, classes), with a share, 0 to 1, spread evenly over all classes.

    Label smoothing: Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016. `labels` has the shape (rows,).
    """
    one_hot = functional.one_hot(labels, classes).to(torch.float32)
    return one_hot * (1 - smoothing) + smoothing / classes


def mix_images(images: Tensor, target: Tensor, keys: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Mixes every image with the one before it, and their targets in the same proportion.

    Mixup: Zhang et al., ICLR 2018. Cutmix: Yun et al., ICCV 2019.

    Args:
        images: Shape (rows, channels, height, width).
        target: Shape (rows, classes).
        keys: See `Task.augment`.
        mixup: Parameter of the Beta distribution of mixup; 0: no mixup.
        cutmix: Parameter of the Beta distribution of cutmix; 0: no cutmix. With both, each row gets one of them with
            equal probability.

    Returns:
        The images, float32 with `mixup`, and the targets.
    """
    pastes = uniform(keys, _KIND) < (0.5 if mixup and cutmix else 1.0 if cutmix else 0.0)
    share = torch.where(pastes, draw_beta(keys, cutmix), draw_beta(keys, mixup))
    lines, columns, pasted = _draw_rectangles(keys, share, images.shape[-2], images.shape[-1])
    kept = torch.where(pastes, 1 - pasted, share).to(torch.float32)
    kept, pastes, lines, columns = (to_device(values, images.device) for values in (kept, pastes, lines, columns))
    other = images.roll(1, 0)
    mixed = torch.where(lines[:, None, :, None] & columns[:, None, None], other, images)
    if mixup:
        ratio = kept[:, None, None, None]
        mixed = torch.where(pastes[:, None, None, None], mixed, images * ratio + other * (1 - ratio))
    return mixed, target * kept[:, None] + target.roll(1, 0) * (1 - kept[:, None])


def draw_beta(keys: Tensor, alpha: float) -> Tensor:
    """Draws one number of Beta(alpha, alpha) per key, float64, shape (rows,); ones if `alpha` is 0.

    Method: Devroye, "Random Variate Generation in One Line of Code", Winter Simulation Conference 1996.
    """
    if not alpha:
        return torch.ones(len(keys), dtype=torch.float64)
    # The vector loops of NumPy give a number the same bits at every position of an array; those of torch do not.
    power, cosine = uniform(keys, _SHARE).numpy() ** (1 / alpha), np.cos(2 * np.pi * uniform(keys, _ANGLE).numpy())
    return torch.from_numpy(0.5 + 0.5 * cosine * np.sqrt((1 - power) / (power + (1 - power) * cosine**2)))


def _draw_rectangles(keys: Tensor, share: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a rectangle per row with 1 - share of the image's area, cut at the borders of the image.

    Returns its lines of pixels, bool (rows, height), its columns, bool (rows, width), and the share of the image that
    it covers, float64 (rows,).
    """
    inside = []
    for salt, size in ((_ROW, height), (_COLUMN, width)):
        center, half = (uniform(keys, salt) * size).floor()[:, None], ((1 - share).sqrt() * size / 2).floor()[:, None]
        position = torch.arange(size)[None]
        inside.append((position >= center - half) & (position < center + half))
    lines, columns = inside
    return lines, columns, (lines.sum(1) * columns.sum(1)).to(torch.float64) / (height * width)
