"""The parts of running one logical worker as if it had its own process: forward, model buffers, module modes.

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
"""Alignment of each tensor in the memory of a `TensorGroup`; a view as complex128, the largest dtype, needs it."""
_MAX_WEIGHT_TENSORS = 16
"""Maximum number of tensors of weights that a `Forward` keeps for later calls."""


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
        # Each buffer with the dictionary of its module and its name there, to notice that it was replaced.
        self._registered_buffers = [
            (m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items() if shared and b is not None
        ]
        # The buffers at the start of the step, those after logical worker 0, and the memory of the broadcast.
        self._start, self._first_worker, self._broadcast = (self._buffers.like() for _ in range(3))
        self._has_first_worker = False
        self._has_broadcast = world.size > 1 and self._broadcast.memory.numel() > 0
        self._pending: dist.Work | None = None

    def begin(self) -> None:
        """Copies the buffers at the start of a step."""
        self._has_first_worker = False
        self._start.copy(self._buffers)

    def checksum(self) -> int:
        """Returns the checksum of the present buffers, see `reduction.base.checksum`; waits for the device."""
        return self._buffers.checksum()

    @contextmanager
    def from_start(self) -> Iterator[None]:
        """Gives the model the buffers of the start of the step inside the block; afterwards it has the present ones."""
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
        """Restores the buffers of the start of the step for the next logical worker, after one has run.

        The buffers that logical worker 0 leaves are copied before that, because all ranks get them at the end of the
        step.

        Raises:
            ConfigError: The forward replaced the tensor of a buffer, which could then not be restored.
        """
        for module_buffers, name, buffer in self._registered_buffers:
            if module_buffers[name] is not buffer:
                raise replaced_tensor_error(name)
        # A rank with one logical worker has no next one: it broadcasts its buffers, or receives others over them.
        if len(self._world.assigned) == 1:
            return
        if logical_worker == 0:
            self._has_first_worker = True
            self._first_worker.copy(self._buffers)
        self._buffers.copy(self._start)

    def launch(self) -> None:
        """Starts the broadcast of logical worker 0's buffers to all ranks; rank 0 runs logical worker 0."""
        if self._has_first_worker:
            self._buffers.copy(self._first_worker)
        if self._has_broadcast:
            self._broadcast.copy(self._buffers)
            with self._world.launch_guard():
                self._pending = dist.broadcast(self._broadcast.memory, 0, async_op=True)

    def finish(self) -> None:
        """Waits until this rank has logical worker 0's buffers."""
        if self._pending is None:
            return
        with self._world.launch_guard():
            self._pending.wait()
        self._pending = None
        self._buffers.copy(self._broadcast)


ModuleModes = list[tuple[nn.Module, bool]]
"""The modules of a model, and whether each is in training mode."""


def module_modes(model: nn.Module) -> ModuleModes:
    """Returns the modes that the modules of a model are in now."""
    return [(module, module.training) for module in model.modules()]


def restore_modes(modes: ModuleModes) -> None:
    """Puts all modules back into their modes, so that a mode that a task switched does not last into the next pass."""
    for module, is_training in modes:
        # To assign an attribute of a module is slow, so only a mode that differs is assigned.
        if module.training != is_training:
            module.training = is_training


def replaced_tensor_error(name: str) -> ConfigError:
    """Returns the error for a forward that replaced the tensor of a parameter or a buffer."""
    return ConfigError(
        f"Training gives the model another tensor for {name} (self.{name.rpartition('.')[2]} = ...). The other workers,"
        " the optimizer and the rollback of a failed step still use the first one. Write into that one instead:"
        f" self.{name.rpartition('.')[2]}.copy_(...)."
    )


class TensorGroup:
    """Several tensors that are copied with one call for each dtype.

    Args:
        tensors: The tensors.
        memory: The memory of all tensors as bytes, if it is one allocation.

    Attributes:
        memory: That memory for a group that `like` has made; otherwise empty.
    """

    def __init__(self, tensors: list[Tensor], memory: Tensor | None = None) -> None:
        self._tensors, self.memory = tensors, memory if memory is not None else torch.empty(0)
        # `_foreach_copy_` is one call only for tensors of one dtype.
        self._by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            self._by_dtype.setdefault(tensor.dtype, []).append(tensor)

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
        for dtype, tensors in self._by_dtype.items():
            torch._foreach_copy_(tensors, others._by_dtype[dtype])


@contextmanager
def allow_single_values(model: nn.Module) -> Iterator[None]:
    """Puts batch-norm layers that get one value per channel into evaluation mode inside the block.

    Such a layer then uses its running statistics and does not change them. In training mode it would raise, since one
    value has no variance. Only a micro-batch of one row can contain one value per channel.
    """
    switched: list[nn.Module] = []

    def before_forward(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if layer.training and x.numel() == x.size(1):
            layer.training = False
            switched.append(layer)

    hooks = [
        layer.register_forward_pre_hook(before_forward) for layer in model.modules() if isinstance(layer, _BatchNorm)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in switched:
            layer.training = True


class Forward:
    """Takes a micro-batch's rows through a model to their losses.

    Args:
        config: The run's configuration, for seed, precision, memory layout and compilation.
        task: The task, which augments the rows.
        device: Device to compute on.
        loss: Computes the losses of rows with a model, `Task.training_loss` or one with its interface.
    """

    def __init__(
        self, config: Config, task: Task, device: torch.device, loss: Callable[[nn.Module, Batch], Tensor | Losses]
    ) -> None:
        self._task = task
        self._device = device
        self._loss = loss
        self._seed = config.seed
        train = config.train
        self._autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(train.precision)
        self._compiles, self._channels_last = train.compile, train.channels_last
        if train.compile:
            environment.check_compiler(device)
        if device.type == "cuda":
            use_eager_roi_align()
        self._compiled_models: dict[nn.Module, Any] = {}
        self._weights: dict[tuple[int, float], Tensor] = {}

    def fields(self, cursor: Cursor, batch: MicroBatch) -> Batch:
        """Returns the augmented rows of a micro-batch.

        Seeds torch's generators first, so that augmentation and the forward that follows draw the same numbers on
        whichever worker the logical worker runs.
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
        # A single row is not compiled, because `allow_single_values` switches layers while the forward runs.
        callable_model = self._compiled(model) if self._compiles and rows > 1 else model
        with torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext():
            losses = self._loss(callable_model, fields)
        return check_losses(self._task, losses, rows).float()

    def weights(self, rows: int, over: float, scale: float) -> Tensor:
        """Returns the weight of each row's loss, `scale / over`, shape (rows,); equal calls return the same tensor.

        Args:
            rows: Number of rows.
            over: Divisor of the mean.
            scale: Loss scale.
        """
        value = scale / over
        weights = self._weights.get((rows, value))
        # A version above 0 shows that a task's backward has written into the tensor.
        if weights is None or weights._version:
            if len(self._weights) == _MAX_WEIGHT_TENSORS:
                self._weights.clear()
            weights = self._weights[rows, value] = torch.full((rows,), value, device=self._device)
        return weights

    def _compiled(self, model: nn.Module) -> Any:
        """Returns the compiled model, which torch compiles for each shape separately.

        A kernel for several shapes (`dynamic`) would depend on the shapes that came first, which differ between
        workers, and so would its results.
        """
        if model not in self._compiled_models:
            self._compiled_models[model] = torch.compile(model, dynamic=False)
        return self._compiled_models[model]
