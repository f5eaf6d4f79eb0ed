"""Image classification with any torchvision classifier, or a small network for tiny images.

`TutorialCnn` has the network of TensorFlow's tutorial on Keras with several workers; it is also an example of a task
that replaces only the model.
"""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Losses, Mistake, Rows, Task, class_names, count_classes, need_column, uniform
from ray_app.task.classification import (
    ClassWeights,
    add_class_weights,
    apply_class_weights,
    classification_metrics,
    find_mistakes,
    mix_images,
    predict_classes,
    resolve_weights,
    smooth_targets,
)
from ray_app.task.device import constant_tensor, to_device
from ray_app.task.images import decode_image

_FLIP, _CROP_Y, _CROP_X = 1, 2, 3
"""Salts that make the random numbers of a row independent."""


class ImageClassification(Task):
    """Classifies images.

    Args:
        model: `small_cnn`, or the name of a classifier in `torchvision.models` such as `resnet18`.
        model_args: More keyword arguments of the model (`small_cnn`: `channels`, `dropout`).
        num_classes: Number of classes; not given: read from the data.
        image: Column of images: arrays (height, width[, channels]) of uint8, or encoded files (JPEG, PNG, WebP, GIF).
        label: Column of class indices.
        size: Height and width of the decoded images in pixels; needed for encoded files, which are resized and
            centre-cropped to it.
        exif_orientation: Whether encoded images are rotated and mirrored by their EXIF orientation, as viewers show
            them; false: they are decoded as stored.
        pixel_max: The value of a white pixel.
        mean: Mean to subtract after scaling to [0, 1], one per channel or one for all.
        std: Standard deviation to divide by, one per channel or one for all.
        flip: Whether training images are flipped left-right at random.
        crop_padding: Pixels by which training images are shifted at random in both directions, the border repeated; 0:
            none.
        label_smoothing: Share of a training image's target that is spread evenly over all classes, 0 to 1.
        mixup: Parameter of the Beta distribution by which training images are blended with another of their
            micro-batch, such as 0.2; 0: none.
        cutmix: Parameter of the Beta distribution by which a rectangle of the other image is pasted; 0: none. With
            both, each image gets one of them, chosen at random.
        class_weights: The weight of each class in the training loss: a number for each class, or `balanced`, by which
            all classes have the same weight in sum. Evaluation does not use it.
        train_accuracy: Whether the accuracy of each training step is recorded beside its loss.
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
        train_accuracy: bool = False,
        exif_orientation: bool = True,
    ) -> None:
        if model != "small_cnn" and model not in _list_classifiers():
            raise ConfigError(
                f"task.init_args.model is {model!r}; it must be one of small_cnn, {', '.join(_list_classifiers())}."
            )
        self.model, self.model_args, self.num_classes = model, dict(model_args or {}), num_classes
        self.image, self.label, self.size = image, label, size
        self.pixel_max, self.mean, self.std = pixel_max, mean or [0.0], std or [1.0]
        self.flip, self.crop_padding = flip, crop_padding
        if not 0 <= label_smoothing < 1 or mixup < 0 or cutmix < 0:
            raise ConfigError(
                f"task.init_args.label_smoothing is {label_smoothing}, mixup {mixup}, cutmix {cutmix}; label_smoothing"
                " must be at least 0 and below 1, the others at least 0."
            )
        self.label_smoothing, self.mixup, self.cutmix, self.class_weights = (
            label_smoothing,
            mixup,
            cutmix,
            class_weights,
        )
        self.weights: list[float] | None = None
        self.train_accuracy, self.exif_orientation = train_accuracy, exif_orientation
        self.channels = 3

    def prepare(self, data: DataFacts) -> ImageClassification:
        """Counts the classes and channels; see `Task.prepare`."""
        prepared = copy.copy(self)
        prepared.num_classes = count_classes(data, self.label, self.num_classes)
        prepared.classes = class_names(data, prepared.num_classes)
        prepared.weights = resolve_weights(self.class_weights, data, self.label, prepared.num_classes)
        facts = need_column(data, self.image, ("array", "bytes"), "image")
        if facts.kind == "bytes" and self.size is None:
            raise DataError(
                f"Column {self.image!r} of {data.path} holds encoded images; set task.init_args.size to their size in"
                " pixels."
            )
        if facts.kind == "bytes":
            require("torchvision", f"Resizing the images of column {self.image!r}")
        if facts.kind == "array":
            if len(facts.shape) not in (2, 3) or np.dtype(facts.dtype) != np.uint8:
                raise DataError(
                    f"Column {self.image!r} of {data.path} holds {facts.dtype} arrays of shape {facts.shape}; images"
                    " are uint8 of shape (height, width) or (height, width, channels)."
                )
            prepared.channels = facts.shape[2] if len(facts.shape) == 3 else 1
        return prepared

    def columns(self) -> list[str]:
        """Returns the columns to read, see `Task.columns`."""
        return [self.image, self.label]

    def targets(self) -> list[str]:
        """Returns the target columns, see `Task.targets`."""
        return [self.label]

    def decode(self, rows: Rows) -> dict[str, npt.NDArray]:
        """Decodes to `image` (rows, channels, height, width) uint8 and `label` (rows,) int64."""
        images = rows[self.image]
        if isinstance(images, list):
            pixels = np.empty((len(images), 3, self.size or 0, self.size or 0), np.uint8)
            # Decoding one after the other lets each file reuse the memory of the last.
            for row, data in zip(pixels, images, strict=True):
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
        pixels = decode_image(data, self.exif_orientation)
        if pixels.ndim != 3:
            raise ValueError(f"the image has {len(pixels)} frames; a classifier takes still images")
        return transforms.center_crop(transforms.resize(pixels, [self.size], antialias=True), [self.size]).numpy()

    def build_model(self) -> nn.Module:
        """Builds the model, see `Task.build_model`."""
        assert self.num_classes is not None, "prepare() comes first"
        if self.model == "small_cnn":
            return small_cnn(self.channels, self.num_classes, **self.model_args)
        import torchvision

        return torchvision.models.get_model(self.model, num_classes=self.num_classes, **self.model_args)

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Flips, shifts and mixes images and adds class weights; see `Task.augment`.

        With label smoothing, mixup or cutmix the batch gets the shares of the classes as `target`, (rows, classes).
        """
        images = batch["image"]
        if self.flip:
            flipped = to_device(uniform(keys, _FLIP) < 0.5, images.device)[:, None, None, None]
            images = torch.where(flipped, images.flip(-1), images)
        if self.crop_padding:
            images = _shift_images(images, keys, self.crop_padding)
        if not (self.label_smoothing or self.mixup or self.cutmix):
            return add_class_weights({**batch, "image": images}, self.weights)
        assert self.num_classes is not None, "prepare() comes first"
        target = smooth_targets(batch["label"], self.num_classes, self.label_smoothing)
        if self.mixup or self.cutmix:
            images, target = mix_images(images, target, keys, self.mixup, self.cutmix)
        return add_class_weights({**batch, "image": images, "target": target}, self.weights)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes class scores, shape (rows, classes)."""
        images = batch["image"].to(torch.float32) / self.pixel_max
        if self.mean != [0.0] or self.std != [1.0]:
            mean, std = (constant_tensor(values, images.device)[:, None, None] for values in (self.mean, self.std))
            images = (images - mean) / std
        outputs = model(images)
        # GoogLeNet and Inception return auxiliary scores beside the logits in training.
        return outputs if isinstance(outputs, Tensor) else outputs.logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Computes the cross-entropy of every row, shape (rows,)."""
        return apply_class_weights(
            functional.cross_entropy(outputs, batch.get("target", batch["label"]), reduction="none"), batch
        )

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Returns the loss of every row, with the accuracy if it is recorded, see `Task.training_loss`."""
        outputs = self.forward(model, batch)
        losses = self.loss(outputs, batch)
        return (
            Losses(losses, metrics={"accuracy": outputs.argmax(1) == batch["label"]}) if self.train_accuracy else losses
        )

    def metrics(self) -> MetricCollection:
        """Makes the metrics of a classification, see `classification_metrics`."""
        assert self.num_classes is not None, "prepare() comes first"
        return classification_metrics(self.num_classes)

    def update(self, metrics: MetricCollection, outputs: Tensor, batch: Batch) -> None:
        """Updates the metrics with a batch, see `Task.update`."""
        metrics.update(outputs.float().softmax(-1), batch["label"])

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, npt.NDArray]:
        """Returns the predicted class of every row, see `predict_classes`."""
        del batch
        return predict_classes(outputs, self.classes)

    def mistakes(self, outputs: Tensor, batch: Batch, max_rows: int) -> list[Mistake]:
        """Returns the wrong predictions with the highest confidence, see `Task.mistakes`."""
        return find_mistakes(outputs, batch["label"], self.classes, max_rows)

    def picture(self, batch: Batch, row: int) -> bytes | None:
        """Returns the image of a row as PNG, see `Task.picture`."""
        from PIL import Image

        image = batch["image"][row].cpu()
        if image.shape[0] not in (1, 3):
            return None
        pixels = (image.to(torch.float32) * (255 / self.pixel_max)).round().clamp(0, 255).to(torch.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()).save(file, "png")
        return file.getvalue()


def _list_classifiers() -> list[str]:
    require("torchvision", "A task.init_args.model other than small_cnn")
    import torchvision

    return torchvision.models.list_models(module=torchvision.models)


def _shift_images(images: Tensor, keys: Tensor, padding: int) -> Tensor:
    """Crops every image at a random position from its padded version; the shape stays."""
    rows, _, height, width = images.shape
    padded = functional.pad(images.to(torch.float32), [padding] * 4, mode="replicate").to(images.dtype)
    span = 2 * padding + 1
    top = (uniform(keys, _CROP_Y) * span).long()[:, None] + torch.arange(height)
    left = (uniform(keys, _CROP_X) * span).long()[:, None] + torch.arange(width)
    row, top, left = (to_device(t, images.device) for t in (torch.arange(rows), top, left))
    return padded[row[:, None, None], :, top[:, :, None], left[:, None, :]].permute(0, 3, 1, 2).contiguous()


class QuarterMeans(nn.Module):
    """Computes the means over the four quarters of each channel.

    It replaces `AdaptiveAvgPool2d(2)`, which has no deterministic kernel for backward on GPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, channels, height, width) to (rows, channels, 2, 2), without an odd last row or column."""
        height, width = x.size(-2) // 2, x.size(-1) // 2
        quarters = x[..., : 2 * height, : 2 * width].unflatten(-2, (2, height)).unflatten(-1, (2, width))
        return quarters.mean((-3, -1))


def small_cnn(in_channels: int, num_classes: int, channels: int = 32, dropout: float = 0.1) -> nn.Module:
    """Builds a convolutional network for images of about 8 to 32 pixels, with batch-norm and dropout.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of class scores.
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


class TutorialCnn(ImageClassification):
    """Classifies small images by one convolution of 32 channels (3x3, no padding) and a hidden layer of 128 units.

    Args:
        num_classes: Number of classes; not given: read from the data.
        image: Column of images: arrays (height, width[, channels]) of uint8.
        label: Column of class indices.
    """

    def __init__(self, num_classes: int | None = None, image: str = "image", label: str = "label") -> None:
        super().__init__(num_classes=num_classes, image=image, label=label, train_accuracy=True)
        self.pixels = 0

    def prepare(self, data: DataFacts) -> TutorialCnn:
        """Prepares as `ImageClassification` does, and counts the outputs of the convolution per channel."""
        prepared = super().prepare(data)
        assert isinstance(prepared, TutorialCnn)
        height, width, *_ = data.columns[self.image].shape
        prepared.pixels = (height - 2) * (width - 2)
        return prepared

    def build_model(self) -> nn.Module:
        """Builds the model, see `Task.build_model`."""
        assert self.num_classes is not None, "prepare() comes first"
        return nn.Sequential(
            nn.Conv2d(self.channels, 32, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * self.pixels, 128),
            nn.ReLU(),
            nn.Linear(128, self.num_classes),
        )
