"""The network of TensorFlow's tutorial on several workers with Keras; also how small a task is that changes the model alone."""

from __future__ import annotations

from torch import nn

from ray_app.plan.facts import DataFacts
from ray_app.task.image import ImageClassification


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
        """Counts the outputs of the convolution per channel, too; see `Task.prepare`."""
        made = super().prepare(data)
        assert isinstance(made, TutorialCnn)
        height, width, *_ = data.columns[self.image].shape
        made.pixels = (height - 2) * (width - 2)
        return made

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        assert self.num_classes is not None, "prepare() comes first"
        return nn.Sequential(
            nn.Conv2d(self.channels, 32, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * self.pixels, 128),
            nn.ReLU(),
            nn.Linear(128, self.num_classes),
        )
