"""The tasks of `benchmarks/gpu.py`, and their sizes on a GPU and in a dry run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from benchmarks.harness import ingest_rows
from ray_app.task.image import ImageClassification

CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """Sizes of data, models and measurements.

    Args:
        small_rows: Number of images of 32 x 32.
        large_rows: Number of images of `large_pixels` x `large_pixels`.
        large_pixels: Height and width of the large images.
        large_batch: Rows of a step over the large images.
        warm_up: Steps before the first that counts: allocations, autotuning, compilation, comparisons of graphs.
        steps: Steps that are measured.
        rounds: Repetitions of a measurement.
        digest_batch: Rows of a step in checks of digests.
        recipe_batch: Rows of a step of the recipe.
        width: Width of the layers in the measurement of checkpoints.
        patch_width: Width of the transformer.
    """

    small_rows: int
    large_rows: int
    large_pixels: int
    large_batch: int
    warm_up: int
    steps: int
    rounds: int
    digest_batch: int
    recipe_batch: int
    width: int
    patch_width: int


ON_GPU = Sizes(50_000, 16_384, 224, 256, 20, 20, 2, 64, 512, 4600, 256)
DRY = Sizes(128, 32, 64, 8, 3, 10, 1, 8, 32, 256, 32)


class Transformer(ImageClassification):
    """Attention over the 4 x 4 patches of an image, with dropout.

    Args:
        width: Width of its layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        return _Patches(self.width)


class _Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(2))
        )
        self.scores = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Maps (rows, 3, height, width) to (rows, classes)."""
        return self.scores(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


class Dense(ImageClassification):
    """Five dense layers, the inner ones of one width.

    Args:
        width: Width of the inner layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        return nn.Sequential(*self._layers())

    def _layers(self) -> Iterator[nn.Module]:
        yield nn.Flatten()
        for inputs, outputs in zip([3072, *[self.width] * 3], [self.width] * 4, strict=True):
            yield from (nn.Linear(inputs, outputs), nn.ReLU())
        yield nn.Linear(self.width, CLASSES)


def resnet(sizes: Sizes, name: str = "resnet18") -> ImageClassification:
    """Returns a ResNet of torchvision; in a dry run a small network with convolutions and batch-norm."""
    # Equal and not the same: the sizes may have been sent to another process.
    small = {"model_args": {"channels": 4}} if sizes == DRY else {"model": name}
    return ImageClassification(num_classes=CLASSES, **small)


def write_rows(folder: Path, rows: int, pixels: int) -> Path:
    """Writes a data set of learnable random images; returns its folder."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, rows)
    labels[:CLASSES] = np.arange(CLASSES)
    images = random.integers(0, 200, (rows, pixels, pixels, 3), dtype=np.uint8)
    images[np.arange(rows), labels] += 50
    ingest_rows(folder, images, labels)
    return folder / "rows"
