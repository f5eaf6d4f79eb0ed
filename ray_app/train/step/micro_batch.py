"""Passes: forward and backward of micro-batches, each as if its logical worker had a process of its own.

`Passes` runs them. `ReplicaBuffers` gives every logical worker the same buffers to start from. `module_modes`,
`restore_modes` and `allow_single_values` keep the training modes of a model's modules the same for every logical
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import accumulate
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.config.config import Config
from ray_app.data.windows import MicroBatch
from ray_app.devices import HOST, kind_of
from ray_app.errors import ConfigError, NonFiniteError, TaskError
from ray_app.plan.order import Cursor
from ray_app.reduction.messages import gather
from ray_app.reduction.peer_errors import launch_guard
from ray_app.reduction.reducer import GradientReducer, state_checksum
from ray_app.reduction.world import World
from ray_app.task import environment
from ray_app.task.base import Batch, Task
from ray_app.task.losses import DeviceSums, Losses, MetricKey, check_losses, reduced_values, step_rows, sum_on_device
from ray_app.task.precision import LossScale, Precision
from ray_app.task.user_code import user_code
from ray_app.torch_private import (
    BatchNorm,
    foreach_copy_,
    registered_buffers,
    run_backward,
    tensor_version,
    use_eager_roi_align,
)
from ray_app.train.state.state import seed_step
from ray_app.train.step.step_stats import StepResult

_ALIGNED_BYTES = 16
"""Alignment of each tensor in the memory of a `TensorGroup`; a view as complex128, the largest dtype, needs it."""

_MAX_WEIGHT_TENSORS = 16
"""Maximum number of tensors of weights that a `Passes` keeps for later calls."""


class ReplicaBuffers:
    """The model's buffers (batch-norm statistics) during a step.

    Every logical worker starts the step with the same buffers, and after it all ranks have those of logical worker 0:
    DDP does the same with one process per logical worker.

    Args:
        model: The model.
        world: The workers of the generation.
        has_phases: Whether several passes of a step start from the same buffers.
        moving: Parameters that are treated like buffers, see `Task.moving_parameters`.
    """

    def __init__(self, model: nn.Module, world: World, has_phases: bool = False, moving: Sequence[Tensor] = ()) -> None:
        self._world = world
        self._launch_guard = launch_guard(world)
        shared = world.logical_workers > 1 or has_phases
        self._buffers = TensorGroup([*model.buffers(), *(p.detach() for p in moving)] if shared else [])
        # Each buffer with the dictionary of its module and its name there, to notice that it was replaced.
        self._registered_buffers = [
            (module_buffers, name, buffer)
            for module_buffers in map(registered_buffers, model.modules())
            for name, buffer in module_buffers.items()
            if shared and buffer is not None
        ]
        # The buffers at the start of the step, and those after logical worker 0, which rank 0 broadcasts.
        self._start, self._first_buffers = (self._buffers.like() for _ in range(2))
        self._has_first_buffers = False
        memory = self._first_buffers.memory
        self._has_broadcast = world.size > 1 and memory.numel() > 0
        is_on_host = kind_of(memory.device).is_host
        # Where the host carries the broadcast of a device, the buffers pass through this memory.
        self._host_memory = (
            torch.empty_like(memory, device=HOST, pin_memory=True)
            if self._has_broadcast and not is_on_host and not world.has_device_collectives
            else None
        )
        self._pending: dist.Work | None = None

    def begin(self) -> None:
        """Copies the buffers at the start of a step."""
        self._has_first_buffers = False
        self._start.copy(self._buffers)

    def checksum(self) -> int:
        """Returns the checksum of the present buffers, see `state_checksum`; waits for the device."""
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
            self._has_first_buffers = True
            self._first_buffers.copy(self._buffers)
        self._buffers.copy(self._start)

    def launch(self) -> None:
        """Starts the broadcast of logical worker 0's buffers to all ranks; rank 0 runs logical worker 0."""
        if not self._has_broadcast:
            if self._has_first_buffers:
                self._buffers.copy(self._first_buffers)
            return
        if not self._has_first_buffers and self._world.rank == 0:
            self._first_buffers.copy(self._buffers)
        memory = self._first_buffers.memory
        if self._host_memory is not None:
            memory = self._host_memory.copy_(memory) if self._world.rank == 0 else self._host_memory
        with self._launch_guard():
            self._pending = dist.broadcast(memory, 0, async_op=True)

    def finish(self) -> None:
        """Waits until this rank has logical worker 0's buffers."""
        if self._pending is None:
            return
        with self._launch_guard():
            self._pending.wait()
        self._pending = None
        if self._host_memory is not None:
            self._first_buffers.memory.copy_(self._host_memory, non_blocking=True)
        self._buffers.copy(self._first_buffers)


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
        " the optimizer and the rollback of a failed step still use the first one. Write into the first one instead:"
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

    def like(self, is_on_host: bool = False) -> TensorGroup:
        """Returns a group of zeros of the same shapes and dtypes, in one allocation, on the same device or the host."""
        ends = list(accumulate(-(-t.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for t in self._tensors))
        device = HOST if is_on_host or not ends else self._tensors[0].device
        memory = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8, device=device)
        parts = [
            memory[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for at, t in zip([0, *ends], self._tensors, strict=False)
        ]
        return TensorGroup(parts, memory)

    def checksum(self) -> int:
        """Returns the checksum of all tensors, see `state_checksum`; waits for the device."""
        return state_checksum(self._tensors)

    def copy(self, others: TensorGroup) -> None:
        """Copies the values of a group of the same shapes and dtypes into this one."""
        for dtype, tensors in self._by_dtype.items():
            foreach_copy_(tensors, others._by_dtype[dtype])


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
        layer.register_forward_pre_hook(before_forward) for layer in model.modules() if isinstance(layer, BatchNorm)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in switched:
            layer.training = True


class Passes:
    """Runs micro-batches through a model as the configuration demands, see the module.

    Args:
        config: The run's configuration, for seed, precision, memory layout and compilation.
        task: The task, which augments the rows.
        device: Device to compute on.
        model: The model. Each pass begins with the modes that its modules have now, and computes gradients of the
            parameters that require them now.
        scale: The loss scale; None for a scale of 1.
        loss: Computes the losses of rows with a model; None for `Task.training_loss`.

    Attributes:
        model: The model.
        parameters: Its parameters that get gradients.
    """

    unknown_source: ClassVar[str] = "the sum of finite gradients"
    """The source of a NaN or infinity that the error names if `non_finite_rows` returns no rows on any rank."""

    def __init__(
        self,
        config: Config,
        task: Task,
        device: torch.device,
        model: nn.Module,
        scale: LossScale | None = None,
        loss: Callable[[nn.Module, Batch], Tensor | Losses] | None = None,
    ) -> None:
        self._task = task
        self._device = device
        self._loss = loss or task.training_loss
        self._scale = scale
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._modes = module_modes(model)
        self._seed = config.seed
        train = config.train
        self._precision = Precision.of(train)
        if train.compile:
            environment.check_compiler(device)
        if not kind_of(device).is_host:
            use_eager_roi_align()
        # A kernel for several shapes (`dynamic`) would depend on the shapes that came first, which differ between
        # workers, and so would its results.
        self._compiled_model: Any = torch.compile(model, dynamic=False) if train.compile else None
        self._weights: dict[tuple[int, float], Tensor] = {}

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Prepares for a step with these micro-batches of this rank; here it does nothing."""

    def run(self, cursor: Cursor, batch: MicroBatch, global_rows: int, reducer: GradientReducer) -> DeviceSums | None:
        """Runs forward and backward of one logical worker, without a device synchronization.

        Args:
            cursor: Position of the step in the data.
            batch: The rows of the logical worker.
            global_rows: Divisor of the mean over all rows of the step.
            reducer: Adds the gradients.

        Returns:
            The sums of the losses, on the device; None without rows.
        """
        with self.prepared(batch):
            if not batch.rows:
                reducer.skip(batch.logical_worker)
                return None
            step_rows.set(global_rows)
            losses = self.losses(cursor, batch)
            reducer.backward(losses.values, self.weights(batch.rows, global_rows), batch.logical_worker)
            return sum_on_device(losses)

    def recompute(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> None:
        """Computes the gradient of a micro-batch of any rank and leaves it in `.grad`, which is None before."""
        with self.prepared(batch):
            if batch.rows:
                fields = {name: values.to(self._device) for name, values in batch.fields.items()}
                step_rows.set(global_rows)
                losses = self.losses(cursor, batch._replace(fields=fields))
                run_backward(losses.values, self.weights(batch.rows, global_rows))

    def prepared(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Restores the modes of the modules and returns the context for forward and backward of a micro-batch.

        The context adds logical worker and rows to errors of user code, and lets batch-norm layers accept a single row.
        """
        restore_modes(self._modes)
        context = user_code(lambda: f"logical worker {batch.logical_worker}", batch.positions.tolist)
        return self._single_row_context(context) if batch.rows == 1 else context

    @contextmanager
    def _single_row_context(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Adds `allow_single_values` to the context of a micro-batch of one row.

        The context includes backward, which may run parts of the forward again (activation checkpointing).
        """
        with allow_single_values(self.model), context:
            yield

    def losses(self, cursor: Cursor, batch: MicroBatch) -> Losses:
        """Returns the losses of a micro-batch's rows in float32."""
        return self.losses_of(self.fields(cursor, batch), batch.rows)

    def fields(self, cursor: Cursor, batch: MicroBatch) -> Batch:
        """Returns the augmented rows of a micro-batch.

        Seeds torch's generators first, so that augmentation and the forward that follows draw the same numbers on
        whichever worker the logical worker runs.
        """
        seed_step(self._seed, cursor.epoch, cursor.step, batch.logical_worker, self._device)
        fields = self._task.augment(batch.fields, batch.keys)
        return self._precision.arrange(fields) if self._precision.channels_last else fields

    def losses_of(self, fields: Batch, rows: int) -> Losses:
        """Returns the losses of augmented rows in float32; `rows` is their number."""
        # A single row is not compiled, because `allow_single_values` switches layers while the forward runs.
        model = self._compiled_model if self._compiled_model is not None and rows > 1 else self.model
        dtype = self._precision.dtype
        reduced: dict[MetricKey, Tensor] = {}
        token = reduced_values.set(reduced)
        try:
            if dtype is None:
                losses = self._loss(model, fields)
            else:
                with torch.autocast(self._device.type, dtype):
                    losses = self._loss(model, fields)
        finally:
            reduced_values.reset(token)
        return check_losses(self._task, losses, rows, reduced).float()

    def weights(self, rows: int, over: float) -> Tensor:
        """Returns the weight of each row's loss, the loss scale over `over`, shape (rows,).

        Equal calls return the same tensor.
        """
        value = (self._scale.value if self._scale is not None else 1.0) / over
        weights = self._weights.get((rows, value))
        # A version above 0 shows that a task's backward has written into the tensor.
        if weights is None or tensor_version(weights):
            if len(self._weights) == _MAX_WEIGHT_TENSORS:
                self._weights.clear()
            weights = self._weights[rows, value] = torch.full((rows,), value, device=self._device)
        return weights

    def non_finite_rows(self, cursor: Cursor, batch: MicroBatch, loss: float, over: float) -> list[int]:
        """Returns the manifest positions of the rows that gave a NaN or infinity; computes the micro-batch again.

        Args:
            cursor: Position of the step in the data.
            batch: The rows.
            loss: The sum of their losses in the step.
            over: Divisor of the loss in the step.

        Returns:
            The rows with fields, losses or gradients that are not finite. If each row by itself is finite, all rows of
            the micro-batch; no row if its loss and gradient are finite.
        """
        del loss
        if not batch.rows:
            return []
        with self.prepared(batch):
            if self._is_finite(cursor, batch, over):
                return []
            bad = _rows_with_non_finite_fields(batch.fields)
            if not bad:
                is_finite = self.losses(cursor, batch).values.isfinite().tolist()
                bad = [i for i in range(batch.rows) if not is_finite[i]]
        if not bad:
            # Each row is computed separately, because in a backward of all rows a NaN of one row spreads to the others.
            for i in range(batch.rows):
                row = batch._replace(rows=1, keys=batch.keys[i : i + 1], positions=batch.positions[i : i + 1])
                row = row._replace(fields={name: values[i : i + 1] for name, values in batch.fields.items()})
                # A task may not accept a single row, for example with a loss of pairs.
                with suppress(TaskError), self.prepared(row):
                    bad += [] if self._is_finite(cursor, row, 1) else [i]
        positions = batch.positions.tolist()
        return [positions[i] for i in bad if i < len(positions)] or positions

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, over: float) -> bool:
        """Returns whether the loss and the gradient of a micro-batch are finite; computes them again."""
        loss = self.losses(cursor, batch).values.sum() / over
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients if g is not None)


def _rows_with_non_finite_fields(fields: Batch) -> list[int]:
    """Returns the indices of the rows that have a NaN or infinity in a field."""
    is_bad = [
        ~values.isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.isfinite()
        for values in fields.values()
        if values.ndim
    ]
    return torch.stack([rows.cpu() for rows in is_bad]).any(0).nonzero()[:, 0].tolist() if is_bad else []


def raise_non_finite(
    cursor: Cursor,
    result: StepResult,
    bad_rows: list[tuple[int, list[int]]],
    world: World,
    unknown_source: str = Passes.unknown_source,
) -> NoReturn:
    """Gathers the rows that gave a NaN or infinity and raises the error that names them; a collective.

    Args:
        cursor: Position of the step in the data.
        result: The result of the step.
        bad_rows: Each logical worker of this rank with `Passes.non_finite_rows`, which may be empty.
        world: The workers of the generation.
        unknown_source: The source that the error names if no rank has bad rows.

    Raises:
        NonFiniteError: Always, with the same message on every rank.
    """
    sources = "; ".join(
        f"logical worker {v}, rows at manifest positions {positions}"
        for bad_rows_of_rank in gather(bad_rows, world)
        for v, positions in bad_rows_of_rank
        if positions
    )
    raise NonFiniteError(
        f"Epoch {cursor.epoch}, step {cursor.step} of the epoch: the loss ({result.loss}) or the gradient is not"
        f" finite, from {sources or unknown_source}. The optimizer made no update. Check these rows, lower the learning"
        " rate, or set train.grad_clip_norm."
    )
