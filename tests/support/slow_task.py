"""A task that is slow enough for faults to hit it, until a test lets it run at full speed."""

import time
from pathlib import Path

from torch import Tensor

from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification

_SLOW_S = 0.05


class SlowTask(ImageClassification):
    """Digits, with a pause at each loss as long as `<folder>/fast` does not exist.

    Args:
        folder: The folder of that file.
        pixel_max: See `ImageClassification`.
    """

    def __init__(self, folder: str, pixel_max: float = 16.0) -> None:
        super().__init__(pixel_max=pixel_max)
        self.folder = folder

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy."""
        if not Path(self.folder, "fast").exists():
            time.sleep(_SLOW_S)
        return super().loss(outputs, batch)
