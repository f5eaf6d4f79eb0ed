"""Playing a logical worker: its own micro-batch, and batch-norm as if it had a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.exchange.exchange import World, collective


class Buffers:
    """The model's buffers (batch-norm statistics) during a step: every logical worker starts from the same ones, and those of logical
    worker 0 are kept, which is what DDP does with one process per logical worker.

    Args:
        model: Whose buffers.
        world: The workers of now.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._buffers = list(model.buffers()) if world.logical_workers > 1 else []
        self._start: list[Tensor] = []
        self._kept: list[Tensor] | None = None
        self._flat: Tensor | None = None
        self._pending: dist.Work | None = None

    def begin(self) -> None:
        """Remembers the buffers at the start of a step."""
        self._kept = None
        self._start = [b.clone() for b in self._buffers]

    def roll_back(self) -> None:
        """Returns to the buffers of the start of the step, which failed."""
        self._pending = None
        self._copy(self._start)

    def end_logical_worker(self, logical_worker: int) -> None:
        """Keeps the buffers of logical worker 0 and returns to those of the start for the next."""
        if len(self._world.played) == 1:
            return
        if logical_worker == 0:
            self._kept = [b.clone() for b in self._buffers]
        self._copy(self._start)

    def launch(self) -> None:
        """Starts sending logical worker 0's buffers to all ranks."""
        if not self._buffers:
            return
        if self._kept is not None:
            self._copy(self._kept)
        if self._world.size > 1:
            self._flat = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in self._buffers])
            with collective():
                self._pending = dist.broadcast(self._flat, 0, async_op=True)

    def finish(self) -> None:
        """Waits until this rank has logical worker 0's buffers."""
        if self._pending is None or self._flat is None:
            return
        with collective():
            self._pending.wait()
        self._pending = None
        sizes = [b.numel() * b.element_size() for b in self._buffers]
        self._copy([part.clone().view(b.dtype).view_as(b) for part, b in zip(self._flat.split(sizes), self._buffers, strict=True)])

    def _copy(self, values: list[Tensor]) -> None:
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, values)


@contextmanager
def single_values(model: nn.Module) -> Iterator[None]:
    """Lets batch-norm layers that see one value per channel use their running statistics and leave them alone.

    In training such a layer raises, since one value has no variance. It can happen only in a micro-batch of one row.
    """

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if layer.training and x.numel() == x.size(1):
            layer.training = False
            switched.append(layer)

    switched: list[nn.Module] = []
    hooks = [layer.register_forward_pre_hook(before) for layer in model.modules() if isinstance(layer, _BatchNorm)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in switched:
            layer.training = True
