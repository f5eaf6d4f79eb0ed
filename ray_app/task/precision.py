"""The precision and the memory layout in which a model computes, and the scale of the loss in float16."""

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


FIRST_SCALE, MAX_SCALE = 2.0**16, 2.0**24
_STEPS_TO_GROW = 2000


class LossScale:
    """The factor by which the loss is multiplied in float16; it is adjusted while training and part of the checkpoint.

    Small gradients vanish in float16, so the loss is multiplied by a scale and the gradient is divided by it again, see
    Micikevicius et al., "Mixed Precision Training", ICLR 2018. The scale halves when a gradient overflows, and doubles
    after 2,000 steps in a row without an overflow. It is always a power of two, so it changes no bit of the significand
    of a number that neither overflows nor underflows. An overflow is detected in the sum over all logical workers, so
    every worker changes its scale in the same way.
    """

    def __init__(self, state: list[float] | None = None) -> None:
        self.value = FIRST_SCALE
        self._good_steps = 0
        if state is not None:
            self.load(state)

    def update(self, is_finite: bool) -> None:
        """Adjusts the scale after a step; `is_finite` says whether the gradient was finite."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value = self.value / 2
        elif self._good_steps >= _STEPS_TO_GROW and self.value < MAX_SCALE:
            self.value, self._good_steps = self.value * 2, 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale may still avoid an overflow."""
        return self.value > 1

    def state(self) -> list[float]:
        """Returns the state for `load`."""
        return [self.value, float(self._good_steps)]

    def load(self, state: list[float]) -> None:
        """Loads what `state` returned."""
        self.value, self._good_steps = state[0], int(state[1])
