"""An exponential moving average of the parameters, which is the model that a run returns where `train.ema_decay` is set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The average of a model's parameters over the steps, one more copy of them.

    The decay of step t is min(decay, (1 + t) / (10 + t)), so that the first steps do not weigh for ever, as in TensorFlow's
    `ExponentialMovingAverage` with `num_updates`.

    Args:
        model: Whose parameters.
        decay: Weight of the average so far, 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters, self._decay = list(model.parameters()), decay
        numbers = {id(p): i for i, p in enumerate(self._parameters)}
        self._names = {name: numbers[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._values = [p.detach().clone() if _has_average(p) else p.detach() for p in self._parameters]
        self._moving = [(v, p) for v, p in zip(self._values, self._parameters, strict=True) if _has_average(p)]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the parameters after `step` finished steps."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_([v for v, _ in self._moving], [p.detach() for _, p in self._moving], 1 - decay)

    def over(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's state with the average in place of the parameters."""
        return {name: self._values[self._names[name]] if name in self._names else value for name, value in state.items()}

    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return {name: self._parameters[number].detach() for name, number in self._names.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Takes over what `over` and `parameters` returned."""
        for name, number in self._names.items():  # either may leave out what is frozen
            if (found := parameters.get(name)) is not None:
                self._parameters[number].copy_(found)
            if (average := state.get(name, found)) is not None:
                self._values[number].copy_(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model have the average as its parameters."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, value in zip(self._parameters, self._values, strict=True):
            held = parameter.clone()
            parameter.copy_(value)
            value.copy_(held)


def _has_average(p: Tensor) -> bool:
    """Whole numbers (a quantized base) have none, and stay themselves."""
    return p.is_floating_point() or p.is_complex()
