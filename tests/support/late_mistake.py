"""A task with a mistake that the preflight, which runs in the driver, does not find."""

from typing import Any

import ray
from torch import Tensor

from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification


class LateMistake(ImageClassification):
    """Digits; raises KeyError when it is evaluated in an actor."""

    def update(self, metrics: Any, outputs: Tensor, batch: Batch) -> None:
        """See `Task.update`."""
        if ray.get_runtime_context().get_actor_id() is not None:
            batch["labels"]
        super().update(metrics, outputs, batch)
