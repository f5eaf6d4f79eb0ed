"""Image classification with any torchvision classifier, or a small network for tiny images.

`TutorialCnn` has the network of TensorFlow's tutorial "Multi-worker training with Keras". It is also an example of a
task that replaces only the model.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app.config.import_paths import require
from ray_app.devices import to_device
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import DataFacts
from ray_app.task.base import Batch, Rows, need_column, uniform
from ray_app.task.classification import Classification, ClassWeights, add_row_weights, mix_images, smooth_targets
from ray_app.task.fields import decode_sample_weights, need_sample_weights, refuse_missing
from ray_app.task.images import decode_image, encode_picture, normalize_images

# Salts of `uniform`: the flip and the two offsets of the crop of a row are independent of each other.
_FLIP = 1
_CROP_Y = 2
_CROP_X = 3


class ImageClassification(Classification):
    """Classifies images.

    Args:
        model: `small_cnn`, or the name of a classifier in `torchvision.models` such as `resnet18`.
        model_args: More keyword arguments of the model (`small_cnn` has `channels` and `dropout`).
        num_classes: Number of classes; default: read from the data.
        image: Column of images: arrays (height, width[, channels]) of uint8, or encoded files (JPEG, PNG, WebP, GIF).
        label: Column of class indices.
        size: Height and width of the decoded images in pixels; needed for encoded files, which are resized and
            center-cropped to it.
        exif_orientation: Whether encoded images are rotated and mirrored by their EXIF orientation, as viewers show
            them; false: they are decoded as stored.
        jpeg_scaling: Whether JPEG files are decoded at a half, a quarter or an eighth of their size, the smallest of
            which both sides have `size` pixels, before they are resized. This is faster if files have at least twice
            `size`, and gives other pixels.
        pixel_max: The value of a white pixel, which becomes 1.
        mean: Mean that is subtracted after scaling to [0, 1]: one per channel, or one for all. Default: 0.
        std: Standard deviation by which the difference is divided: one per channel, or one for all. Default: 1.
        flip: Whether training images are flipped left-right at random.
        crop_padding: Maximum number of pixels by which training images are shifted at random, vertically and
            horizontally; pixels of the border are repeated. 0: images are not shifted.
        label_smoothing: Share of a training image's target that is spread evenly over all classes, at least 0 and below
            1.
        mixup: Both parameters of the Beta distribution from which the share is drawn with which another image of the
            micro-batch is blended into a training image, such as 0.2; 0: images are not blended.
        cutmix: Both parameters of the Beta distribution from which the size of the rectangle of another image is drawn
            that is pasted into a training image; 0: nothing is pasted. With mixup and cutmix each image gets one of
            them, chosen at random.
        class_weights: The weight of each class in the training loss: a number for each class, or `balanced`, which
            makes the sum of the weights of its rows the same for each class. Evaluation does not use it.
        train_accuracy: Whether the accuracy of each training step is recorded with its loss.
        sample_weight: Column with the weight of each row in the training loss, numbers of at least 0. With mixup and
            cutmix it is the weight of the image that is mixed into. Evaluation data has the column, too, although
            evaluation does not use it.
    """

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
        sample_weight: str | None = None,
        jpeg_scaling: bool = False,
    ) -> None:
        if model != "small_cnn" and model not in _list_classifiers():
            raise ConfigError(
                f"task.init_args.model is {model!r}; it must be one of small_cnn, {', '.join(_list_classifiers())}."
            )
        self.model = model
        self.model_args = dict(model_args or {})
        self.num_classes = num_classes
        self.image = image
        self.label = label
        self.size = size
        self.pixel_max = pixel_max
        self.mean = mean or [0.0]
        self.std = std or [1.0]
        self.flip, self.crop_padding = flip, crop_padding
        if not 0 <= label_smoothing < 1 or mixup < 0 or cutmix < 0:
            raise ConfigError(
                f"task.init_args.label_smoothing is {label_smoothing}, mixup {mixup}, cutmix {cutmix}; label_smoothing"
                " must be at least 0 and below 1, the others at least 0."
            )
        self.label_smoothing = label_smoothing
        self.mixup = mixup
        self.cutmix = cutmix
        self.class_weights, self.sample_weight = class_weights, sample_weight
        # `prepare` sets the weight of each class and the number of channels from the data.
        self.weights: list[float] | None = None
        self.train_accuracy, self.exif_orientation = train_accuracy, exif_orientation
        self.jpeg_scaling = jpeg_scaling
        self.channels = 3

    def prepare(self, data: DataFacts) -> ImageClassification:
        """Completes the task with classes, weights and channels; raises DataError for columns of other kinds."""
        prepared = copy.copy(self)
        refuse_missing(data, self.columns())
        prepared.set_classes(data)
        need_sample_weights(data, self.sample_weight, [self.image, self.label])
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
        """Returns the column of images, the column of labels, and that of the weights of rows."""
        return [self.image, *self.targets()]

    def decode(self, rows: Rows) -> dict[str, npt.NDArray]:
        """Decodes rows to `image`, (rows, channels, height, width) uint8, and `label`, (rows,) int64."""
        images = rows[self.image]
        # The column has encoded files, each as bytes.
        if isinstance(images, list):
            pixels = np.empty((len(images), 3, self.size or 0, self.size or 0), np.uint8)
            # Each file is copied at once, so that the next one reuses the memory of its pixels.
            for row, data in zip(pixels, images, strict=True):
                row[:] = self._decode_file(data)
        else:
            stacked = images if images.ndim == 4 else images[..., None]
            pixels = np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
        labels = self.decode_labels(rows[self.label])
        return {"image": pixels, "label": labels, **decode_sample_weights(self.sample_weight, rows)}

    def _decode_file(self, data: bytes) -> npt.NDArray:
        """Returns the image in a file, (3, size, size) uint8, by its shorter side and its center."""
        from torchvision.transforms.v2 import functional as transforms

        assert self.size is not None
        pixels = torch.from_numpy(decode_image(data, self.exif_orientation, self.size if self.jpeg_scaling else None))
        if pixels.ndim != 3:
            raise ValueError(f"the image has {len(pixels)} frames; a classifier needs still images")
        resized = transforms.resize_image(pixels, [self.size], antialias=True)
        return transforms.center_crop_image(resized, [self.size]).numpy()

    def build_model(self) -> nn.Module:
        """Builds `small_cnn` or the classifier of torchvision."""
        if self.model == "small_cnn":
            return small_cnn(self.channels, self.class_count, **self.model_args)
        import torchvision

        return torchvision.models.get_model(self.model, num_classes=self.class_count, **self.model_args)

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Flips, shifts and mixes images as configured, and adds the weights of rows.

        With label smoothing, mixup or cutmix the batch also gets `target`, (rows, classes): the share of each class in
        a row.
        """
        images = batch["image"]
        if self.flip:
            flipped = to_device(uniform(keys, _FLIP) < 0.5, images.device)[:, None, None, None]
            images = torch.where(flipped, images.flip(-1), images)
        if self.crop_padding:
            images = _shift_images(images, keys, self.crop_padding)
        if not (self.label_smoothing or self.mixup or self.cutmix):
            return add_row_weights({**batch, "image": images}, self.weights)
        target = smooth_targets(batch["label"], self.class_count, self.label_smoothing)
        if self.mixup or self.cutmix:
            images, target = mix_images(images, target, keys, self.mixup, self.cutmix)
        return add_row_weights({**batch, "image": images, "target": target}, self.weights)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes class scores, shape (rows, classes)."""
        outputs = model(normalize_images(batch["image"], self.pixel_max, self.mean, self.std))
        # In training GoogLeNet and Inception return a tuple of the logits and those of auxiliary classifiers.
        return outputs if isinstance(outputs, Tensor) else outputs.logits

    def picture(self, batch: Batch, row: int) -> bytes | None:
        """Returns the image of a row as a PNG file; None for an image that has neither one channel nor three."""
        image = batch["image"][row].cpu()
        if image.shape[0] not in (1, 3):
            return None
        pixels = (image.to(torch.float32) * (255 / self.pixel_max)).round().clamp(0, 255).to(torch.uint8)
        return encode_picture(pixels.permute(1, 2, 0).numpy())


def _list_classifiers() -> list[str]:
    """Returns the names of the classifiers in `torchvision.models`, without those for detection or video."""
    require("torchvision", "A task.init_args.model other than small_cnn")
    import torchvision

    return torchvision.models.list_models(module=torchvision.models)


def _shift_images(images: Tensor, keys: Tensor, padding: int) -> Tensor:
    """Returns images shifted by up to `padding` pixels in both directions; their border is repeated."""
    rows, _, height, width = images.shape
    # PyTorch has no kernel for bytes that repeats the border.
    padded = functional.pad(images.to(torch.float32), [padding] * 4, mode="replicate").to(images.dtype)
    span = 2 * padding + 1
    # The rows and columns of pixels of each image, shapes (rows, height) and (rows, width).
    y = (uniform(keys, _CROP_Y) * span).long()[:, None] + torch.arange(height)
    x = (uniform(keys, _CROP_X) * span).long()[:, None] + torch.arange(width)
    row, y, x = (to_device(index, images.device) for index in (torch.arange(rows), y, x))
    return padded[row[:, None, None], :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2).contiguous()


class QuarterMeans(nn.Module):
    """Computes the means over the four quarters of each channel.

    It replaces `AdaptiveAvgPool2d(2)`, which has no deterministic kernel for backward on GPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, channels, height, width) to (rows, channels, 2, 2), without an odd row or column."""
        height, width = x.size(-2) // 2, x.size(-1) // 2
        quarters = x[..., : 2 * height, : 2 * width].unflatten(-2, (2, height)).unflatten(-1, (2, width))
        return quarters.mean((-3, -1))


def small_cnn(in_channels: int, num_classes: int, channels: int = 32, dropout: float = 0.1) -> nn.Module:
    """Builds a network of two convolutions, the second with twice the channels, for 8 to 32 pixels."""
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
    """Classifies small images by one convolution of 32 channels (3x3, no padding) and a hidden layer of 128 units."""

    def __init__(self, num_classes: int | None = None, image: str = "image", label: str = "label") -> None:
        super().__init__(num_classes=num_classes, image=image, label=label, train_accuracy=True)
        self.pixels = 0

    def prepare(self, data: DataFacts) -> TutorialCnn:
        """Prepares as `ImageClassification` does, and computes how many outputs the convolution has per channel."""
        prepared = super().prepare(data)
        assert isinstance(prepared, TutorialCnn)
        height, width, *_ = data.columns[self.image].shape
        prepared.pixels = (height - 2) * (width - 2)
        return prepared

    def build_model(self) -> nn.Module:
        """Builds the network for the size and the channels of the images in the data."""
        return nn.Sequential(
            nn.Conv2d(self.channels, 32, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * self.pixels, 128),
            nn.ReLU(),
            nn.Linear(128, self.class_count),
        )
