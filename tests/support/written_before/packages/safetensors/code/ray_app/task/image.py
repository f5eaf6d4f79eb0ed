"""Image classification with any torchvision classifier, or a small network for tiny images."""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app.encoded import decoded
from ray_app.errors import ConfigError, DataError
from ray_app.plan.facts import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Mistake, Rows, Task, class_names, count_classes, need_column, uniform
from ray_app.task.classification import (
    ClassWeights,
    class_predictions,
    classification_metrics,
    resolve_weights,
    weigh,
    weighted,
    wrong_classes,
)
from ray_app.task.mixing import mix, smooth_targets

_FLIP, _CROP_Y, _CROP_X = 1, 2, 3  # salts: what a row's random number is for


class ImageClassification(Task):
    """Classifies images.

    Args:
        model: `small_cnn`, or the name of a classifier in `torchvision.models` such as `resnet18`.
        model_args: More keyword arguments of the model (`small_cnn`: `channels`, `dropout`).
        num_classes: Number of classes; not given: read from the data.
        image: Column of images: arrays (height, width[, channels]) of uint8, or encoded files (JPEG, PNG, WebP, GIF).
        label: Column of class indices.
        size: Height and width of the decoded images in pixels; needed for encoded files, which are resized and centre-cropped to it.
        pixel_max: Value of a white pixel.
        mean: Mean to subtract after scaling to [0, 1], one per channel or one for all.
        std: Standard deviation to divide by, likewise.
        flip: Whether training images are flipped left-right at random.
        crop_padding: Pixels by which training images are shifted at random in both directions, the border repeated; 0: none.
        label_smoothing: Share of a training image's truth that is spread evenly over all classes, 0 to 1.
        mixup: Parameter of the Beta distribution by which training images are blended with another of their micro-batch, such as 0.2; 0:
            none.
        cutmix: The same for pasting a rectangle of the other image. With both, each image gets one of them, chosen at random.
        class_weights: How much the training loss of an image of each class counts: a number for each class, or `balanced`, by which all
            classes count the same in sum. Evaluation does not use it.
    """

    best_metric: ClassVar[str] = "accuracy"
    best_mode: ClassVar[str] = "max"

    def __init__(
        self,
        model: str = "small_cnn",
        model_args: dict[str, Any] | None = None,
        num_classes: int | None = None,
        image: str = "image",
        label: str = "label",
        size: int | None = None,
        pixel_max: float = 255.0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        flip: bool = False,
        crop_padding: int = 0,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        class_weights: ClassWeights = None,
    ) -> None:
        if model != "small_cnn" and model not in _classifiers():
            raise ConfigError(f"task.init_args.model is {model!r}; it must be one of small_cnn, {', '.join(_classifiers())}.")
        self.model, self.model_args, self.num_classes = model, dict(model_args or {}), num_classes
        self.image, self.label, self.size = image, label, size
        self.pixel_max, self.mean, self.std = pixel_max, mean or [0.0], std or [1.0]
        self.flip, self.crop_padding = flip, crop_padding
        if not 0 <= label_smoothing < 1 or mixup < 0 or cutmix < 0:
            raise ConfigError(
                f"task.init_args.label_smoothing is {label_smoothing}, mixup {mixup}, cutmix {cutmix}; label_smoothing must be at least 0"
                " and below 1, the others at least 0."
            )
        self.label_smoothing, self.mixup, self.cutmix, self.class_weights = label_smoothing, mixup, cutmix, class_weights
        self.weights: list[float] | None = None
        self.channels = 3

    def prepare(self, data: DataFacts) -> ImageClassification:
        """Counts the classes and channels; see `Task.prepare`."""
        made = copy.copy(self)
        made.num_classes = count_classes(data, self.label, self.num_classes)
        made.classes = class_names(data, made.num_classes)
        made.weights = resolve_weights(self.class_weights, data, self.label, made.num_classes)
        facts = need_column(data, self.image, ("array", "bytes"), "image")
        if facts.kind == "bytes" and self.size is None:
            raise DataError(f"Column {self.image!r} of {data.path} holds encoded images; set task.init_args.size to their size in pixels.")
        if facts.kind == "array":
            if len(facts.shape) not in (2, 3) or np.dtype(facts.dtype) != np.uint8:
                raise DataError(
                    f"Column {self.image!r} of {data.path} holds {facts.dtype} arrays of shape {facts.shape}; images are uint8 of shape"
                    " (height, width) or (height, width, channels)."
                )
            made.channels = facts.shape[2] if len(facts.shape) == 3 else 1
        return made

    def columns(self) -> list[str]:
        """See `Task.columns`."""
        return [self.image, self.label]

    def targets(self) -> list[str]:
        """See `Task.targets`."""
        return [self.label]

    def decode(self, rows: Rows) -> dict[str, npt.NDArray]:
        """Decodes to `image` (rows, channels, height, width) uint8 and `label` (rows,) int64."""
        images = rows[self.image]
        if isinstance(images, list):
            pixels = np.empty((len(images), 3, self.size or 0, self.size or 0), np.uint8)
            for row, data in zip(pixels, images, strict=True):  # one after the other, so that each reuses the memory of the last
                row[:] = self._decode_file(data)
        else:
            stacked = images if images.ndim == 4 else images[..., None]
            pixels = np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
        labels = np.asarray(rows[self.label]).astype(np.int64)
        if labels.size and not 0 <= labels.min() <= labels.max() < (self.num_classes or 0):
            raise ValueError(f"label outside 0 to {(self.num_classes or 0) - 1}: {labels.min()} to {labels.max()}")
        return {"image": pixels, "label": labels}

    def _decode_file(self, data: bytes) -> npt.NDArray:
        from torchvision.transforms.v2 import functional as transforms

        assert self.size is not None
        return transforms.center_crop(transforms.resize(decoded(data), [self.size], antialias=True), [self.size]).numpy()

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        assert self.num_classes is not None, "prepare() comes first"
        if self.model == "small_cnn":
            return small_cnn(self.channels, self.num_classes, **self.model_args)
        import torchvision

        return torchvision.models.get_model(self.model, num_classes=self.num_classes, **self.model_args)

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Flips, shifts, mixes and weighs; see `Task.augment`. Where the truth is no longer one class it is added as `target`,
        (rows, classes).
        """
        images = batch["image"]
        if self.flip:
            flipped = (uniform(keys, _FLIP) < 0.5).to(images.device)[:, None, None, None]
            images = torch.where(flipped, images.flip(-1), images)
        if self.crop_padding:
            images = _shift(images, keys, self.crop_padding)
        if not (self.label_smoothing or self.mixup or self.cutmix):
            return weigh({**batch, "image": images}, self.weights)
        assert self.num_classes is not None, "prepare() comes first"
        target = smooth_targets(batch["label"], self.num_classes, self.label_smoothing)
        if self.mixup or self.cutmix:
            images, target = mix(images, target, keys, self.mixup, self.cutmix)
        return weigh({**batch, "image": images, "target": target}, self.weights)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Class scores, shape (rows, classes)."""
        images = batch["image"].to(torch.float32) / self.pixel_max
        if self.mean != [0.0] or self.std != [1.0]:
            images = (images - images.new_tensor(self.mean)[:, None, None]) / images.new_tensor(self.std)[:, None, None]
        outputs = model(images)
        return outputs if isinstance(outputs, Tensor) else outputs.logits  # GoogLeNet and Inception return auxiliary scores in training

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of every row, shape (rows,)."""
        return weighted(functional.cross_entropy(outputs, batch.get("target", batch["label"]), reduction="none"), batch)

    def metrics(self) -> MetricCollection:
        """See `classification_metrics`."""
        assert self.num_classes is not None, "prepare() comes first"
        return classification_metrics(self.num_classes)

    def update(self, metrics: MetricCollection, outputs: Tensor, batch: Batch) -> None:
        """See `Task.update`."""
        metrics.update(outputs, batch["label"])

    def predictions(self, outputs: Tensor) -> dict[str, npt.NDArray]:
        """See `class_predictions`."""
        return class_predictions(outputs, self.classes)

    def mistakes(self, outputs: Tensor, batch: Batch, most: int) -> list[Mistake]:
        """See `Task.mistakes`."""
        return wrong_classes(outputs, batch["label"], self.classes, most)

    def picture(self, batch: Batch, row: int) -> bytes | None:
        """See `Task.picture`."""
        from PIL import Image

        image = batch["image"][row].cpu()
        if image.shape[0] not in (1, 3):
            return None
        pixels = (image.to(torch.float32) * (255 / self.pixel_max)).round().clamp(0, 255).to(torch.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()).save(file, "png")
        return file.getvalue()


def _classifiers() -> list[str]:
    import torchvision

    return torchvision.models.list_models(module=torchvision.models)


def _shift(images: Tensor, keys: Tensor, padding: int) -> Tensor:
    """Every image cropped at its own place from its padded version, shape unchanged."""
    rows, _, height, width = images.shape
    padded = functional.pad(images.to(torch.float32), [padding] * 4, mode="replicate").to(images.dtype)
    span = 2 * padding + 1
    top = (uniform(keys, _CROP_Y) * span).long()[:, None] + torch.arange(height)
    left = (uniform(keys, _CROP_X) * span).long()[:, None] + torch.arange(width)
    row, top, left = (t.to(images.device) for t in (torch.arange(rows), top, left))
    return padded[row[:, None, None], :, top[:, :, None], left[:, None, :]].permute(0, 3, 1, 2).contiguous()


class QuarterMeans(nn.Module):
    """Means over the four quarters of each channel: `AdaptiveAvgPool2d(2)`, whose backward has no deterministic kernel on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, channels, height, width) to (rows, channels, 2, 2); an odd last row or column does not count."""
        height, width = x.size(-2) // 2, x.size(-1) // 2
        quarters = x[..., : 2 * height, : 2 * width].unflatten(-2, (2, height)).unflatten(-1, (2, width))
        return quarters.mean((-3, -1))


def small_cnn(in_channels: int, num_classes: int, channels: int = 32, dropout: float = 0.1) -> nn.Module:
    """A convolutional network for images of about 8 to 32 pixels, with batch-norm and dropout.

    Args:
        in_channels: Channels of the images.
        num_classes: Class scores to return.
        channels: Channels of the first layer; the second has twice as many.
        dropout: Probability of a zeroed activation.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.Dropout(dropout),
        QuarterMeans(),
        nn.Flatten(),
        nn.Linear(8 * channels, num_classes),
    )
