"""Hardware that computes wrongly: one bit of a worker's gradients, activations or parameters is another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ray_app.config.checks import BALANCED
from ray_app.drill.faults import Proofs, Several
from ray_app.drill.ground import Disturbance, Ended, Ground
from ray_app.runs.faults import Faults
from ray_app.train.hooks import Hooks

What = Literal["gradient", "activation", "parameter"]
_BIT = 1 << 22
"""The highest of the 23 bits behind the point of a float32."""


@dataclass
class Flip:
    """One bit is flipped after a step, or in the next one; a hook for `Hooks.built` and `Hooks.after_step`.

    Args:
        proofs: Where it is recorded.
        name: Name of the proof.
        what: In what.
        rank: Of which rank.
        step: After how many finished steps.
    """

    proofs: Proofs
    name: str
    what: What
    rank: int
    step: int
    _model: nn.Module | None = None
    _is_armed: bool = False

    def built(self, model: nn.Module) -> None:
        """See `Hooks.built`."""
        self._model = model
        layer = next(part for part in model.modules() if not list(part.children()) and list(part.parameters()))
        if self.what == "activation":
            layer.register_forward_hook(lambda module, args, found: self._flipped(found))
        if self.what == "gradient":
            next(p for p in model.parameters() if p.requires_grad).register_hook(self._flipped)

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank != self.rank or step != self.step or not self.proofs.put(self.name, rank=rank, step=step, what=self.what):
            return
        self._is_armed = True
        if self.what == "parameter":
            assert self._model is not None
            with torch.no_grad():
                p = next(p for p in self._model.parameters() if p.requires_grad)
                p.copy_(self._flipped(p))

    def _flipped(self, values: Tensor) -> Tensor:
        """The values with another bit in the largest of them, once."""
        if not self._is_armed:
            return values
        self._is_armed = False
        bits = values.detach().float().clone().view(torch.int32).reshape(-1)
        bits[values.detach().abs().argmax()] ^= _BIT
        other: Any = bits.view(torch.float32).view(values.shape).to(values.dtype)
        return values + (other - values).detach() if values.requires_grad and not values.is_leaf else other


def flip(ground: Ground) -> Disturbance | str:
    """A bit of an activation of a worker is another one; all shares are computed twice."""
    train = ground.config.train
    if ground.workers < 2:
        return "there is no other worker to compute again what one has computed"
    if train.strategy not in BALANCED or train.reduction != "exact":
        return f"shares are computed again with {' or '.join(BALANCED)} and train.reduction exact only"
    step, rank = ground.step(), ground.rank()
    bit = Flip(ground.proofs, "flipped", "activation", rank, step)
    hooks = Hooks(after_step=Several((bit, ground.pace(step + 1))), built=bit.built)

    def confirm(run: Ended) -> list[str]:
        told = [e.details["rank"] for e in run.events("lied")]
        return [] if told == [rank] else [f"rank {rank} computed wrongly once, found guilty were: {told or 'none'}"]

    return Disturbance([step], ["flipped"], confirm, Faults(train=hooks), changes={"failure__replay_rate": 1.0})
