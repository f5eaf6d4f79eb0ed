"""Tasks that block their workers in the middle of a run, or of a prediction, until a test lets them continue."""

from __future__ import annotations

import time
from pathlib import Path

import numpy.typing as npt
import ray
from torch import Tensor

from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification

_SLOW_S, _LOOK_S = 0.003, 0.02
_losses = _predictions = 0


class GatedTask(ImageClassification):
    """Digits, blocked before the given gradient of each actor until `<gate>/open` exists; a blocked actor creates
    `<gate>/reached`. Checks in a driver see no counter that changes.

    Args:
        gate: Folder of the two files.
        wait_before: The gradient of an actor before which it waits; 0: the checks in a driver wait before their first.
        pixel_max: See `ImageClassification`.
    """

    def __init__(self, gate: str, wait_before: int = 20, pixel_max: float = 16.0) -> None:
        super().__init__(pixel_max=pixel_max)
        self.gate, self.wait_before = gate, wait_before

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy, slow enough that a request to stop arrives before the last step."""
        global _losses
        _losses += is_in_actor()
        time.sleep(_SLOW_S)
        if _losses == self.wait_before:
            Path(self.gate, "reached").touch()
            while not Path(self.gate, "open").exists():
                time.sleep(_LOOK_S)
        return super().loss(outputs, batch)


class GatedPrediction(GatedTask):
    """Digits, blocked before the given batch of predictions of each actor instead."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy."""
        return ImageClassification.loss(self, outputs, batch)

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, npt.NDArray]:
        """See `ImageClassification`."""
        global _predictions
        _predictions += is_in_actor()
        if _predictions == self.wait_before:
            Path(self.gate, "reached").touch()
            while not Path(self.gate, "open").exists():
                time.sleep(_LOOK_S)
        return super().predictions(outputs, batch)


def is_in_actor() -> bool:
    """Returns whether an actor calls: its module may count, which the checks of a driver refuse."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
