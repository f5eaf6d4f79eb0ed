"""Playing a logical worker: its own micro-batch, and batch-norm as if it had a process of its own.

A micro-batch's rows through the model to their losses, as the configuration has them computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.config.config import Config
from ray_app.data.windows import MicroBatch
from ray_app.errors import ConfigError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World, checksum
from ray_app.task import device as environment
from ray_app.task.base import Batch, Losses, Task, check_losses
from ray_app.task.roi_align import use_eager_roi_align
from ray_app.train.state.state import seed_step

_ALIGNED_BYTES = 16


class ReplicaBuffers:
    """The model's buffers (batch-norm statistics) during a step: every logical worker starts from the same ones, and
    those of logical worker 0 are kept, which is what DDP does with one process per logical worker.

    Args:
        model: Whose buffers.
        world: The workers of now.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        shared = world.logical_workers > 1
        self._buffers = TensorGroup(list(model.buffers()) if shared else [])
        self._owners = [
            (m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items() if shared and b is not None
        ]
        self._start, self._kept, self._sent = (self._buffers.like() for _ in range(3))
        self._is_kept, self._sends = False, world.size > 1 and self._sent.memory.numel() > 0
        self._pending: dist.Work | None = None

    def begin(self) -> None:
        """Remembers the buffers at the start of a step."""
        self._is_kept = False
        self._start.copy(self._buffers)

    def bits(self) -> int:
        """Those of what they are now, see `reduction.base.checksum`; waits for the device."""
        return self._buffers.bits()

    @contextmanager
    def from_start(self) -> Iterator[None]:
        """Those of the start of the step inside the block, what they are now after it."""
        now = self._buffers.like()
        now.copy(self._buffers)
        self._buffers.copy(self._start)
        try:
            yield
        finally:
            self._buffers.copy(now)

    def roll_back(self) -> None:
        """Returns to the buffers of the start of the step, which failed."""
        self._pending = None
        self._buffers.copy(self._start)

    def end_logical_worker(self, logical_worker: int) -> None:
        """Keeps the buffers of logical worker 0 and returns to those of the start for the next.

        Raises:
            ConfigError: The model has another tensor for a buffer, which would not return.
        """
        for owner, name, buffer in self._owners:
            if owner[name] is not buffer:
                raise replaced_tensor_error(name)
        if len(self._world.assigned) == 1:
            return
        if logical_worker == 0:
            self._is_kept = True
            self._kept.copy(self._buffers)
        self._buffers.copy(self._start)

    def launch(self) -> None:
        """Starts sending logical worker 0's buffers to all ranks."""
        if self._is_kept:
            self._buffers.copy(self._kept)
        if self._sends:
            self._sent.copy(self._buffers)
            with self._world.launch_guard():
                self._pending = dist.broadcast(self._sent.memory, 0, async_op=True)

    def finish(self) -> None:
        """Waits until this rank has logical worker 0's buffers."""
        if self._pending is None:
            return
        with self._world.launch_guard():
            self._pending.wait()
        self._pending = None
        self._buffers.copy(self._sent)


ModuleModes = list[tuple[nn.Module, bool]]
"""The parts of a model, and whether each is in training mode."""


def module_modes(model: nn.Module) -> ModuleModes:
    """Those that they are in now."""
    return [(part, part.training) for part in model.modules()]


def restore_modes(modes: ModuleModes) -> None:
    """Puts all parts into the mode that they had: what a task has switched is no other for the next logical worker."""
    for part, trains in modes:
        if part.training != trains:
            part.training = trains


def replaced_tensor_error(name: str) -> ConfigError:
    """The refusal of a model that has another tensor for a parameter or a buffer after a forward."""
    return ConfigError(
        f"Training gives the model another tensor for {name} (self.{name.rpartition('.')[2]} = ...), which the other"
        f" workers, the optimizer"
        f" and a step that is undone do not see. Write into the one that it has:"
        f" self.{name.rpartition('.')[2]}.copy_(...)."
    )


class TensorGroup:
    """Tensors in lists of one dtype each, of which a device copies each in one call.

    Attributes:
        memory: That of all, if it was made by `like`.
    """

    def __init__(self, tensors: list[Tensor], memory: Tensor | None = None) -> None:
        self._tensors, self.memory = tensors, memory if memory is not None else torch.empty(0)
        self._lists: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            self._lists.setdefault(tensor.dtype, []).append(tensor)

    def like(self) -> TensorGroup:
        """As many of the same shapes and dtypes, in one piece of memory."""
        ends = list(accumulate(-(-t.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for t in self._tensors))
        memory = torch.zeros(
            ends[-1] if ends else 0, dtype=torch.uint8, device=self._tensors[0].device if ends else None
        )
        parts = [
            memory[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for at, t in zip([0, *ends], self._tensors, strict=False)
        ]
        return TensorGroup(parts, memory)

    def bits(self) -> int:
        """See `reduction.base.checksum`."""
        found = [checksum(tensor.detach(), place) for place, tensor in enumerate(self._tensors)]
        return int(torch.stack(found).sum()) if found else 0

    def copy(self, others: TensorGroup) -> None:
        """Takes over their values."""
        for dtype in self._lists:
            torch._foreach_copy_(self._lists[dtype], others._lists[dtype])


@contextmanager
def allow_single_values(model: nn.Module) -> Iterator[None]:
    """Lets batch-norm layers that see one value per channel use their running statistics and leave them alone.

    In training such a layer raises, since one value has no variance. It can happen only in a micro-batch of one row,
    forward or backward.
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


_MOST_CONSTANTS = 16


class Forward:
    """See the module.

    Args:
        config: Seed, precision, layout, compilation.
        task: Whose rows.
        device: Where it runs.
        loss: A model and rows to what the task says of them.
    """

    def __init__(
        self, config: Config, task: Task, device: torch.device, loss: Callable[[nn.Module, Batch], Tensor | Losses]
    ) -> None:
        self._task, self._device, self._loss, self._seed, train = task, device, loss, config.seed, config.train
        self._autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(train.precision)
        self._compiles, self._channels_last = train.compile, train.channels_last
        if train.compile:
            environment.need_compiler(device)
        if device.type == "cuda":
            use_eager_roi_align()
        self._compiled_models: dict[nn.Module, Any] = {}
        self._constants: dict[tuple[int, float], Tensor] = {}

    def fields(self, cursor: Cursor, batch: MicroBatch) -> Batch:
        """The rows as the model takes them; the generators are then where its forward begins."""
        seed_step(self._seed, cursor.epoch, cursor.step, batch.logical_worker, self._device)
        fields = self._task.augment(batch.fields, batch.keys)
        if (
            self._channels_last
        ):  # not the parameters: fused optimizers take a gradient's values for ones in their layout
            fields = {
                name: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v
                for name, v in fields.items()
            }
        return fields

    def losses(self, model: nn.Module, fields: Batch, rows: int) -> Losses:
        """The losses of so many rows."""
        called = self._compiled(model) if self._compiles and rows > 1 else model
        with torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext():
            found = self._loss(called, fields)
        return check_losses(self._task, found, rows).float()

    def weights(self, rows: int, over: float, scale: float) -> Tensor:
        """One over what the mean is over, scaled, for every row of a micro-batch, shape (rows,); made once for those
        that are alike.
        """
        value = scale / over
        held = self._constants.get((rows, value))
        if held is None or held._version:  # a task's backward may have written into it
            if len(self._constants) == _MOST_CONSTANTS:
                self._constants.clear()
            held = self._constants[rows, value] = torch.full((rows,), value, device=self._device)
        return held

    def _compiled(self, model: nn.Module) -> Any:
        """A model compiled for every shape that comes, each on its own: what a shape gives must not depend on those
        before it.
        """
        if model not in self._compiled_models:
            self._compiled_models[model] = torch.compile(model, dynamic=False)
        return self._compiled_models[model]
