"""One optimizer step over all logical workers; its arithmetic does not depend on the number of workers.

`Step` runs forward and backward for the logical workers of this rank, reduces the gradients, and moves the optimizer.
`TurnStep` is the same for several optimizers that take turns: in each step only one optimizer's parameters get
gradients, a reduction and an update. The functions for norms compute a norm where the gradient lies; the host reads it
and decides by which factor the gradient is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.config.config import Config
from ray_app.data.windows import MicroBatch
from ray_app.errors import DataError, NonFiniteError, PeerLostError, TaskError, WrongResultError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import GradientReducer, World, gather, run_backward
from ray_app.task.base import Batch, DeviceSums, Losses, LossSums, Task, read_sums, sum_on_device
from ray_app.task.user_code import user_code
from ray_app.train.membership import Flags, Phase
from ray_app.train.state.alternating_optimizers import Turns
from ray_app.train.state.state import TrainingState
from ray_app.train.step.cuda_graphs import CapturedPasses, make_graph_backend
from ray_app.train.step.micro_batch import Forward, ReplicaBuffers, allow_single_values, module_modes, restore_modes
from ray_app.train.step.sdc import SdcChecker
from ray_app.train.step.step_stats import ReplicaStats, StepResult, StepStats
from ray_app.train.step.timing import NO_TIME, StepTimer, TimeBreakdown

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor, without a device synchronization."""
    # `torch.nn.utils.get_total_norm` takes 30 us more.
    return [*torch._foreach_norm(gradients)] if gradients else []


def total_norm(norms: Iterable[float], factor: float = 1.0) -> float:
    """Returns the norm of tensors with these norms, times a factor.

    It is infinite where float32, in which the gradients are, could not represent it.
    """
    norm = math.sqrt(math.fsum([n * n for n in norms])) * factor
    return math.inf if norm > _MAX_FLOAT32 else norm


def scale_and_clip(gradients: list[Tensor], factor: float, norm: float, max_norm: float | None) -> None:
    """Multiplies gradients by a factor, and then clips them to a norm.

    The clipping computes with the numbers of `torch.nn.utils.clip_grads_with_norm_`, which would send them from the
    host to the device and wait for that.

    Args:
        norm: The norm of all gradients after the multiplication.
        max_norm: The norm to clip to; None: no clipping.
    """
    if factor != 1:
        torch._foreach_mul_(gradients, factor)
    if max_norm is not None:
        clip_factor = np.float32(1) / (np.float32(norm) + np.float32(1e-6)) * np.float32(max_norm)
        if clip_factor < 1:
            torch._foreach_mul_(gradients, float(clip_factor))


class Step:
    """Runs the steps of one generation of workers.

    Args:
        config: The run's configuration: seed, precision, clipping.
        task: The task, which computes the losses.
        state: The training state that the step updates.
        reducer: The gradient reducer.
        world: The workers of the generation.
        device: Device to compute on.
        enter: Called with each phase that the step begins.

    Attributes:
        data_wait_s: Seconds that this rank waited for the data of the step; set by the caller.
    """

    non_finite_source: ClassVar[str] = "the sum of finite gradients"
    """Names the source of a NaN or infinity that no single logical worker's rows gave, in the error message."""

    def __init__(
        self,
        config: Config,
        task: Task,
        state: TrainingState,
        reducer: GradientReducer,
        world: World,
        device: torch.device,
        enter: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self._config, self._task, self._state, self._enter = config, task, state, enter
        self._reducer, self._world, self._device = reducer, world, device
        self._buffers = ReplicaBuffers(state.model, world)
        self._stats = StepStats(world)
        self._forward = Forward(config, task, device, self._loss_function())
        self._captured = (
            CapturedPasses(state.model, device, self._forward_backward, make_graph_backend(device))
            if config.train.capture
            else None
        )
        self._scale = state.scale
        # A worker that is alone has no stragglers to compare itself with.
        self._timer = StepTimer(device) if world.size > 1 else None
        self.data_wait_s = 0.0
        self._sdc_checker: SdcChecker | None = None
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        state.train()
        self._modes = module_modes(state.model)

    def close(self) -> None:
        """Closes the gradient reducer, see `GradientReducer.close`."""
        self._reducer.close()
        # The captured passes refer to this step: without this their device memory would stay allocated until the
        # garbage collector finds the cycle.
        self._captured = None

    def use_sdc_checker(self, sdc_checker: SdcChecker | None) -> None:
        """Lets the following steps compute some shares twice, as this checker decides; None: no shares."""
        self._sdc_checker = sdc_checker
        if sdc_checker is not None:
            sdc_checker.begin(self._world)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, that of the first parameter group."""
        return self._state.lr

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Does one step.

        Args:
            cursor: Position of the step in the data.
            batches: One micro-batch per logical worker of this rank, in their order.
            global_rows: Rows that the plan has for the step over all logical workers. Losses and gradients become means
                over the weight of those rows that can be decoded. That weight is known only after the reduction, so
                they are computed with this number and rescaled afterwards. A row's weight is 1 unless its task gives
                weights.
            flags: The flags that this rank brings into the step.

        Raises:
            NonFiniteError: The loss or the gradient is NaN or infinite; the optimizer did not move.
            PeerLostError: A peer left; the state is that before the step.
        """
        self._state.refresh()
        self._buffers.begin()
        try:
            result, factor = self._forward_backward_reduce(cursor, batches, global_rows, flags)
        except (PeerLostError, WrongResultError):
            self._buffers.roll_back()
            raise
        # All rows are bad or have no weight: the parameters stay as they are.
        if not factor:
            self._state.advance_schedule()
            return result
        norm = result.grad_norm
        if math.isfinite(result.loss) and math.isfinite(norm):
            max_norm = self._config.train.grad_clip_norm
            if factor != 1 or max_norm is not None:
                scale_and_clip(self._gradients(), factor, norm, max_norm)
            self._state.optimizer_step()
        else:
            self._buffers.roll_back()
            if self._scale is None or not self._scale.can_fall or not math.isfinite(result.loss):
                self._raise_non_finite(cursor, batches, global_rows, result)
            self._state.advance_schedule()
        if self._scale is not None:
            self._scale.update(math.isfinite(norm))
        return result

    def _forward_backward_reduce(
        self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags
    ) -> tuple[StepResult, float]:
        """Does everything of a step but the update: afterwards all ranks have the gradient, the buffers and the result.

        Returns:
            The result of the step, and the factor by which the gradient has to be multiplied; 0 if no row has weight.
        """
        recomputed = (
            self._sdc_checker.due(self._state.step, batches, self._reducer) if self._sdc_checker is not None else None
        )
        if self._timer is not None:
            self._timer.begin()
        device_sums: list[DeviceSums | None] = []
        for batch in batches:
            restore_modes(self._modes)
            with self._error_context(batch):
                device_sums.append(self._run_logical_worker(cursor, batch, global_rows))
            if recomputed is not None:
                recomputed.note_buffers(batch.logical_worker, self._buffers.checksum)
            self._buffers.end_logical_worker(batch.logical_worker)
        if self._timer is not None:
            self._timer.mark_computed()
        self._enter("exchange")
        self._reducer.launch()
        self._buffers.launch()
        if recomputed is not None:
            recomputed.compute(lambda batch: self._recompute(cursor, batch, global_rows))
        result = None
        # Where the host carries the gradients (gloo), the statistics travel concurrently with them.
        if self._world.check_device_errors is None and self._world.size > 1:
            sums, _ = self._sync_and_read(device_sums, [])
            result = self._stats.gather(self._replica_stats(batches, sums, global_rows, flags))
        self._reducer.finish()
        self._buffers.finish()
        if self._timer is not None:
            self._timer.mark_reduced()
        sums, norms = self._sync_and_read(device_sums if result is None else [], self._norms())
        # Where the device carries the gradients, the statistics come last: that they arrive shows every rank that all
        # ranks have the reduced gradient.
        if result is None:
            result = self._stats.gather(self._replica_stats(batches, sums, global_rows, flags))
        if recomputed is not None:
            recomputed.compare()
            result = result._replace(recomputed=len(recomputed.shares))
        result = self._check_and_rescale(cursor, result, global_rows)
        factor = self._gradient_factor(result.weight, global_rows)
        return (result._replace(grad_norm=total_norm(norms, factor)) if factor else result), factor

    def _recompute(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> int:
        """Computes the gradient of another rank's micro-batch and leaves it in `.grad`.

        Returns:
            The checksum of the buffers that the pass leaves behind.
        """
        fields = {name: values.to(self._device) for name, values in batch.fields.items()}
        with self._buffers.from_start(), self._error_context(batch):
            if not batch.rows:
                return self._buffers.checksum()
            losses = self._losses(cursor, batch._replace(fields=fields), self._state.model)
            run_backward(losses.values, self._loss_weights(batch, global_rows))
            return self._buffers.checksum()

    def _sync_and_read(
        self, device_sums: list[DeviceSums | None], norms: list[Tensor]
    ) -> tuple[list[LossSums], list[float]]:
        """Waits for the device and reads sums of losses and norms: the only device synchronization point of a step.

        Raises:
            PeerLostError: A collective of the device was broken.
        """
        if self._world.check_device_errors is not None:
            self._world.check_device_errors()
        return read_sums(self._task, device_sums, norms)

    def _check_and_rescale(self, cursor: Cursor, result: StepResult, global_rows: int) -> StepResult:
        """Checks that every planned row was consumed and rescales the means to the weight of the usable rows."""
        rows, skipped = sum(result.rows), sum(result.skipped)
        if rows + skipped != global_rows:
            raise DataError(
                f"Step {cursor} consumed {rows} rows and skipped {skipped}, {global_rows} were planned; please report"
                f" this."
            )
        return result.over_weight(global_rows)

    def _error_context(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Returns the context for forward and backward of a micro-batch; it adds logical worker and rows to errors."""
        context = user_code(lambda: f"logical worker {batch.logical_worker}", batch.positions.tolist)
        return self._single_row_context(batch, context) if batch.rows == 1 else context

    @contextmanager
    def _single_row_context(self, batch: MicroBatch, context: AbstractContextManager[None]) -> Iterator[None]:
        """Adds `allow_single_values` to the context of a micro-batch of one row.

        It covers backward, too, which may compute parts of the forward again (activation checkpointing).
        """
        with allow_single_values(self._trained_model(batch)), context:
            yield

    def _trained_model(self, batch: MicroBatch) -> nn.Module:
        """Returns the model that a micro-batch goes through."""
        return self._state.model

    def _replica_stats(
        self, batches: list[MicroBatch], sums: list[LossSums], global_rows: int, flags: Flags
    ) -> list[ReplicaStats]:
        """Returns the statistics of this rank's logical workers."""
        time_breakdown = self._timer.breakdown(len(batches), self.data_wait_s) if self._timer is not None else NO_TIME
        return [
            make_replica_stats(batch, batch_sums, batch_sums.loss / global_rows, flags, time_breakdown)
            for batch, batch_sums in zip(batches, sums, strict=True)
        ]

    def _run_logical_worker(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> DeviceSums | None:
        """Runs forward and backward of one logical worker, without a device synchronization.

        Returns:
            The sums of its losses, on the device; None without rows.
        """
        if not batch.rows:
            self._reducer.skip(batch.logical_worker)
            return None
        weights = self._loss_weights(batch, global_rows)
        if (captured := self._captured) is not None:
            fields = self._forward.fields(cursor, batch)
            return self._reducer.collect_from(lambda: captured.run(fields, weights), batch.logical_worker)
        losses = self._losses(cursor, batch, self._state.model)
        self._reducer.backward(losses.values, weights, batch.logical_worker)
        return sum_on_device(losses)

    def _loss_weights(self, batch: MicroBatch, global_rows: int) -> Tensor:
        """Returns the weight of each row's loss that backward begins with, shape (rows,)."""
        return self._forward.weights(batch.rows, global_rows, self._scale.value if self._scale is not None else 1.0)

    def _forward_backward(self, fields: Batch, weights: Tensor) -> DeviceSums:
        """Runs forward and backward of rows, see `cuda_graphs.Compute`."""
        losses = self._forward.losses(self._state.model, fields, len(weights))
        run_backward(losses.values, weights)
        return sum_on_device(losses)

    def _losses(self, cursor: Cursor, batch: MicroBatch, model: nn.Module) -> Losses:
        """Returns the losses of a micro-batch's rows."""
        return self._forward.losses(model, self._forward.fields(cursor, batch), batch.rows)

    def _loss_function(self) -> Callable[[nn.Module, Batch], Tensor | Losses]:
        """Returns the function that computes the losses of rows with a model."""
        return self._task.training_loss

    def _gradients(self) -> list[Tensor]:
        """Returns this rank's part of the gradient, as the optimizer will use it."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def _norms(self) -> list[Tensor]:
        """Returns norms of parts of the gradient that make up the whole, without a device synchronization."""
        return gradient_norms(self._gradients())

    def _gradient_factor(self, weight: float, global_rows: int) -> float:
        """Returns the factor that turns the gradient into the mean over the rows' weight, without the loss scale.

        It is 0 if no row has weight.
        """
        return global_rows / weight / (self._scale.value if self._scale is not None else 1.0) if weight else 0.0

    def _raise_non_finite(
        self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, result: StepResult
    ) -> None:
        """Determines which logical workers' rows gave a NaN or infinity, and raises the same error on every rank."""
        bad_rows = []
        for batch in batches:
            if not batch.rows:
                continue
            with self._error_context(batch):
                if not self._is_finite(cursor, batch, global_rows):
                    bad_rows.append((batch.logical_worker, self._non_finite_rows(cursor, batch)))
        all_bad_rows = gather(bad_rows, self._world)
        sources = "; ".join(
            f"logical worker {v}, rows at manifest positions {positions}"
            for of_rank in all_bad_rows
            for v, positions in of_rank
        )
        raise NonFiniteError(
            f"Epoch {cursor.epoch}, step {cursor.step} of the epoch: the loss ({result.loss}) or the gradient is not"
            f" finite, from {sources or self.non_finite_source}. The optimizer did not move. Look at these rows, lower"
            " the learning rate, or set train.grad_clip_norm."
        )

    def _non_finite_rows(self, cursor: Cursor, batch: MicroBatch) -> list[int]:
        """Returns the manifest positions of the rows with fields, losses or gradients that are not finite.

        If each row by itself is finite, all positions of the micro-batch are returned.
        """
        positions, bad = batch.positions.tolist(), _rows_with_non_finite_fields(batch.fields)
        if not bad:
            losses = self._losses(cursor, batch, self._trained_model(batch)).values
            bad = [i for i, is_finite in enumerate(losses.isfinite().tolist()) if not is_finite]
        if not bad:
            # Each row goes through by itself: in a backward of all rows, what is not finite spreads to the others.
            for i in range(batch.rows):
                row = batch._replace(rows=1, keys=batch.keys[i : i + 1], positions=batch.positions[i : i + 1])
                row = row._replace(fields={name: values[i : i + 1] for name, values in batch.fields.items()})
                # A task may not accept a single row, for example with a loss of pairs.
                with suppress(TaskError), self._error_context(row):
                    bad += [] if self._is_finite(cursor, row, 1) else [i]
        return [positions[i] for i in bad if i < len(positions)] or positions

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        loss = self._losses(cursor, batch, self._state.model).values.sum() / global_rows
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients if g is not None)


def _rows_with_non_finite_fields(fields: Batch) -> list[int]:
    """Returns the rows of which a field has a number that is not finite."""
    is_bad = [
        ~values.isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.isfinite()
        for values in fields.values()
        if values.ndim
    ]
    return torch.stack([rows.cpu() for rows in is_bad]).any(0).nonzero()[:, 0].tolist() if is_bad else []


def make_replica_stats(
    batch: MicroBatch,
    sums: LossSums,
    loss: float,
    flags: Flags,
    time_breakdown: TimeBreakdown,
    squared_norm: float = 0.0,
) -> ReplicaStats:
    """Returns the statistics of a micro-batch.

    Args:
        loss: Its share of the mean loss.
        squared_norm: Its share of the square of the gradient's norm, see `ReplicaStats.norm`.
    """
    rows = batch.logical_worker, batch.rows, batch.row_hash
    return ReplicaStats(*rows, loss, flags, squared_norm, batch.num_skipped, sums.weight, *time_breakdown, sums.metrics)


class TurnStep(Step):
    """A `Step` with several optimizers that take turns; only the parameters of the optimizer in turn get gradients.

    Each turn has a gradient reducer of its own, built while only that turn's parameters require gradients.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        state: TrainingState,
        turns: Turns,
        make_reducer: Callable[[], GradientReducer],
        world: World,
        device: torch.device,
        enter: Callable[[Phase], None],
    ) -> None:
        self._turns, self._turn = turns, ""
        self._reducers = dict[str, GradientReducer]()
        self._stats_by_turn = {turn: StepStats(world) for turn in turns.optimizers}
        for turn in turns.optimizers:
            turns.take(turn)
            self._reducers[turn] = make_reducer()
        super().__init__(config, task, state, self._reducers[turn], world, device, enter)

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Does the step of the optimizer in turn, see `Step.run`."""
        turn = self._turn = self._turns.begin(self._state.step)
        self._reducer = self._reducers[turn]
        self._stats = self._stats_by_turn[turn]
        self._parameters = self._turns.parameters[turn]
        return super().run(cursor, batches, global_rows, flags)

    def _loss_function(self) -> Callable[[nn.Module, Batch], Tensor | Losses]:
        return lambda model, fields: self._task.loss_for_optimizer(self._turn, model, fields)

    def close(self) -> None:
        """Closes the gradient reducers of all turns, see `GradientReducer.close`."""
        for reducer in self._reducers.values():
            reducer.close()
