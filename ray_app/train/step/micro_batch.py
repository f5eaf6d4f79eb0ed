"""The parts of running one logical worker: forward of its micro-batch, and model buffers as if it had its own process.

`Forward` takes a micro-batch's rows through the model to their losses, as the configuration demands. `ReplicaBuffers`
gives every logical worker the same buffers to start from. `module_modes`, `restore_modes` and `allow_single_values`
keep the training modes of a model's modules the same for every logical worker.
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
    """The model's buffers (batch-norm statistics) during a step.

    Every logical worker starts the step with the same buffers, and after it all ranks have those of logical worker 0:
    DDP does the same with one process per logical worker.

    Args:
        model: The model.
        world: The workers of the generation.
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

    def checksum(self) -> int:
        """Returns the checksum of the present buffers, see `reduction.base.checksum`; waits for the device."""
        return self._buffers.checksum()

    @contextmanager
    def from_start(self) -> Iterator[None]:
        """Gives the model the buffers of the start of the step inside the block, and the present ones back after it."""
        present = self._buffers.like()
        present.copy(self._buffers)
        self._buffers.copy(self._start)
        try:
            yield
        finally:
            self._buffers.copy(present)

    def roll_back(self) -> None:
        """Restores the buffers of the start of the step, after the step failed."""
        self._pending = None
        self._buffers.copy(self._start)

    def end_logical_worker(self, logical_worker: int) -> None:
        """Keeps the buffers of logical worker 0 and restores those of the start of the step for the next one.

        Raises:
            ConfigError: The forward replaced the tensor of a buffer, which could then not be restored.
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
        """Starts the broadcast of logical worker 0's buffers to all ranks."""
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
"""The modules of a model, and whether each is in training mode."""


def module_modes(model: nn.Module) -> ModuleModes:
    """Returns the modes that the modules of a model are in now."""
    return [(module, module.training) for module in model.modules()]


def restore_modes(modes: ModuleModes) -> None:
    """Puts all modules back into their modes, so that a mode that a task switched does not last into the next pass."""
    for module, trains in modes:
        # Assigning an attribute of a module is slow, so only what differs is assigned.
        if module.training != trains:
            module.training = trains


def replaced_tensor_error(name: str) -> ConfigError:
    """Returns the error for a forward that replaced the tensor of a parameter or a buffer."""
    return ConfigError(
        f"Training gives the model another tensor for {name} (self.{name.rpartition('.')[2]} = ...), which the other"
        " workers, the optimizer and a step that is undone do not see. Write into the one that it has:"
        f" self.{name.rpartition('.')[2]}.copy_(...)."
    )


class TensorGroup:
    """Several tensors that are copied with one call for each dtype.

    Attributes:
        memory: The memory of all tensors as bytes, if `like` made them; otherwise empty.
    """

    def __init__(self, tensors: list[Tensor], memory: Tensor | None = None) -> None:
        self._tensors, self.memory = tensors, memory if memory is not None else torch.empty(0)
        self._lists: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            self._lists.setdefault(tensor.dtype, []).append(tensor)

    def like(self) -> TensorGroup:
        """Returns a group of zeros of the same shapes and dtypes, in one allocation."""
        ends = list(accumulate(-(-t.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for t in self._tensors))
        memory = torch.zeros(
            ends[-1] if ends else 0, dtype=torch.uint8, device=self._tensors[0].device if ends else None
        )
        parts = [
            memory[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for at, t in zip([0, *ends], self._tensors, strict=False)
        ]
        return TensorGroup(parts, memory)

    def checksum(self) -> int:
        """Returns the checksum of all tensors, see `reduction.base.checksum`; waits for the device."""
        checksums = [checksum(tensor.detach(), index) for index, tensor in enumerate(self._tensors)]
        return int(torch.stack(checksums).sum()) if checksums else 0

    def copy(self, others: TensorGroup) -> None:
        """Copies the values of a group of the same shapes and dtypes into this one."""
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


_MAX_WEIGHT_TENSORS = 16


class Forward:
    """Takes a micro-batch's rows through a model to their losses.

    Args:
        config: The run's configuration: seed, precision, memory layout, compilation.
        task: The task, which augments the rows.
        device: Device to compute on.
        loss: Computes the losses of rows with a model.
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
        self._weights: dict[tuple[int, float], Tensor] = {}

    def fields(self, cursor: Cursor, batch: MicroBatch) -> Batch:
        """Returns the augmented rows of a micro-batch.

        Seeds torch's generators first, so that augmentation and forward draw the same numbers on every worker.
        """
        seed_step(self._seed, cursor.epoch, cursor.step, batch.logical_worker, self._device)
        fields = self._task.augment(batch.fields, batch.keys)
        # Only the rows get this layout, not the parameters: fused optimizers pair the values of a parameter and its
        # gradient by their position in memory, whatever the layouts.
        if self._channels_last:
            fields = {
                name: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v
                for name, v in fields.items()
            }
        return fields

    def losses(self, model: nn.Module, fields: Batch, rows: int) -> Losses:
        """Returns the losses of rows in float32; `rows` is their number."""
        callable_model = self._compiled(model) if self._compiles and rows > 1 else model
        with torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext():
            losses = self._loss(callable_model, fields)
        return check_losses(self._task, losses, rows).float()

    def weights(self, rows: int, over: float, scale: float) -> Tensor:
        """Returns the weight of each row's loss, `scale / over`, shape (rows,); equal tensors are made once.

        Args:
            rows: Number of rows.
            over: Divisor of the mean.
            scale: Loss scale.
        """
        value = scale / over
        weights = self._weights.get((rows, value))
        # The version counter shows whether a task's backward has written into the tensor.
        if weights is None or weights._version:
            if len(self._weights) == _MAX_WEIGHT_TENSORS:
                self._weights.clear()
            weights = self._weights[rows, value] = torch.full((rows,), value, device=self._device)
        return weights

    def _compiled(self, model: nn.Module) -> Any:
        """Returns the compiled model; it compiles each shape separately.

        The result for a shape must not depend on the shapes that came before, which differ between workers.
        """
        if model not in self._compiled_models:
            self._compiled_models[model] = torch.compile(model, dynamic=False)
        return self._compiled_models[model]
