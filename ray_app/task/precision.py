"""The precision and the memory layout in which a model computes, the same in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ray_app.config.sections import TrainSection
from ray_app.task.base import Batch
from ray_app.torch_private import tree_map


class Precision(NamedTuple):
    """How a model computes.

    Args:
        dtype: The type of autocast, see `train.precision`; None: none.
        channels_last: See `train.channels_last`.
    """

    dtype: torch.dtype | None = None
    channels_last: bool = False

    @classmethod
    def of(cls, train: TrainSection) -> Precision:
        """Returns the precision of a run."""
        return cls({"bf16": torch.bfloat16, "fp16": torch.float16}.get(train.precision), train.channels_last)

    def arrange(self, batch: Batch) -> Batch:
        """Returns rows with images in the layout of `channels_last`, if that is set.

        Only the rows get this layout, not the parameters: fused optimizers pair the values of a parameter and its
        gradient by their position in memory, whatever the layouts.
        """
        if not self.channels_last:
            return batch
        return {
            name: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for name, v in batch.items()
        }

    def outputs(self, forward: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch) -> Any:
        """Returns the outputs of a model for rows, in float32 where autocast has made them shorter."""
        batch = self.arrange(batch)
        if self.dtype is None:
            return forward(model, batch)
        with torch.autocast(next(iter(batch.values())).device.type, self.dtype):
            outputs = forward(model, batch)
        return tree_map(lambda v: v.float() if isinstance(v, Tensor) and v.dtype is self.dtype else v, outputs)
