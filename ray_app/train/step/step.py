"""One optimizer step over all logical workers; its arithmetic does not depend on the number of workers.

`Step` runs forward and backward for the logical workers of this rank, reduces the gradients, and moves the optimizer.
`TurnStep` is the same for several optimizers that take turns: in each step only one optimizer's parameters get
gradients, a reduction and an update. Norms of gradients are computed on the device; the host reads them and decides by
which factor the gradients are multiplied.
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
from ray_app.errors import DataError, NonFiniteError, TaskError
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
    """Returns the L2 norm of each tensor, each of shape (), without a device synchronization."""
    # `torch.nn.utils.get_total_norm` would return one norm, but it takes 30 us more.
    return [*torch._foreach_norm(gradients)] if gradients else []


def total_norm(norms: Iterable[float], factor: float = 1.0) -> float:
    """Returns the L2 norm of all values of tensors that have these norms, times a factor.

    It is infinite if float32, the dtype of the gradients, cannot represent it.
    """
    norm = math.sqrt(math.fsum([n * n for n in norms])) * factor
    return math.inf if norm > _MAX_FLOAT32 else norm


def scale_and_clip(gradients: list[Tensor], factor: float, norm: float, max_norm: float | None) -> None:
    """Multiplies gradients by a factor and then clips them to a norm, in place.

    The arithmetic is that of `torch.nn.utils.clip_grads_with_norm_`. That function is not called, because it would copy
    the norm from the host to the device and wait for the copy.

    Args:
        gradients: The gradients, or this rank's shards of them.
        factor: The factor.
        norm: The norm of the whole gradient after the multiplication.
        max_norm: The norm to clip to; None for no clipping.
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
        config: The run's configuration, for seed, precision, clipping and capture.
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
    """The source of a NaN or infinity that the error names if it cannot name the rows of a logical worker."""

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
        self._config = config
        self._task = task
        self._state = state
        self._enter = enter
        self._reducer = reducer
        self._world = world
        self._device = device
        self._buffers = ReplicaBuffers(state.model, world)
        self._stats = StepStats(world)
        self._forward = Forward(config, task, device, self._loss_function())
        self._captured = (
            CapturedPasses(state.model, device, self._forward_backward, make_graph_backend(device))
            if config.train.capture
            else None
        )
        self._scale = state.scale
        # The times are for straggler detection, which compares workers with each other.
        self._timer = StepTimer(device) if world.size > 1 else None
        self.data_wait_s = 0.0
        self._sdc_checker: SdcChecker | None = None
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        state.train()
        self._modes = module_modes(state.model)

    def close(self) -> None:
        """Closes the gradient reducer, see `GradientReducer.close`, and frees the captured passes."""
        self._reducer.close()
        # The captured passes and this step refer to each other: without this line the device memory of the captured
        # passes would stay allocated until the garbage collector finds the cycle.
        self._captured = None

    def use_sdc_checker(self, sdc_checker: SdcChecker | None) -> None:
        """Sets the checker that decides which shares of the following steps are recomputed; None for no SDC checks."""
        self._sdc_checker = sdc_checker
        if sdc_checker is not None:
            sdc_checker.begin(self._world)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, that of the first parameter group."""
        return self._state.lr

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Runs one step: forward, backward, gradient reduction and update.

        Args:
            cursor: Position of the step in the data.
            batches: One micro-batch per logical worker of this rank, in the order of the logical workers.
            global_rows: Number of rows that the plan has for the step over all logical workers. The results are means
                over the weight of those rows that can be decoded. That weight is known only after the reduction, so
                losses and gradients are computed as means over `global_rows` and rescaled afterwards. A row's weight is
                1 unless the task gives weights.
            flags: The flags that this rank brings into the step.

        Raises:
            DataError: The consumed rows are not those of the plan.
            NonFiniteError: The loss or the gradient is NaN or infinite; the optimizer did not move.
            PeerLostError: A peer left or computed a wrong result; the state is that before the step.
            WrongResultError: An SDC check has shown that this rank computed a wrong result.
            IrreproducibleError: An SDC check has found different results and does not show which rank is corrupt.
        """
        self._state.refresh()
        self._buffers.begin()
        try:
            result, factor = self._forward_backward_reduce(cursor, batches, global_rows, flags)
        except Exception:
            # The buffers are restored after any error, not only after `PeerLostError`: in a broken group any error may
            # be a consequence of the lost peer, and then the loop repeats the step, see `translate_peer_errors`.
            self._buffers.roll_back()
            raise
        # Without a row that has weight there is no gradient: the parameters stay as they are, and the step counts.
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
            # In float16 a gradient may overflow because of the loss scale. The scale then falls, and the step counts
            # without an update.
            if self._scale is None or not self._scale.can_fall or not math.isfinite(result.loss):
                self._raise_non_finite(cursor, batches, global_rows, result)
            self._state.advance_schedule()
        if self._scale is not None:
            self._scale.update(math.isfinite(norm))
        return result

    def _forward_backward_reduce(
        self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags
    ) -> tuple[StepResult, float]:
        """Runs a step up to its update; afterwards all ranks have the same gradient, buffers and result.

        Returns:
            The result of the step, and the factor by which the gradient has to be multiplied; 0 if no row has weight.
        """
        recomputed_shares = (
            self._sdc_checker.due(self._state.step, batches, self._reducer) if self._sdc_checker is not None else None
        )
        if self._timer is not None:
            self._timer.begin()
        device_sums: list[DeviceSums | None] = []
        for batch in batches:
            restore_modes(self._modes)
            with self._error_context(batch):
                device_sums.append(self._run_logical_worker(cursor, batch, global_rows))
            if recomputed_shares is not None:
                recomputed_shares.note_buffers(batch.logical_worker, self._buffers.checksum)
            self._buffers.end_logical_worker(batch.logical_worker)
        if self._timer is not None:
            self._timer.mark_computed()
        self._enter("reduction")
        self._reducer.launch()
        self._buffers.launch()
        # The recomputation overlaps with the gradient reduction.
        if recomputed_shares is not None:
            recomputed_shares.compute(lambda batch: self._recompute(cursor, batch, global_rows))
        result = None
        # Where the host carries the gradients (gloo), the statistics travel concurrently with them.
        if self._world.has_host_collectives and self._world.size > 1:
            sums, _ = self._sync_and_read(device_sums, [])
            result = self._stats.gather(self._replica_stats(batches, sums, global_rows, flags))
        self._reducer.finish()
        self._buffers.finish()
        if self._timer is not None:
            self._timer.mark_reduced()
        sums, norms = self._sync_and_read(device_sums if result is None else [], self._norms())
        # Where the device carries the gradients, the statistics are gathered last: once a rank has them, it knows that
        # all ranks have the reduced gradient.
        if result is None:
            result = self._stats.gather(self._replica_stats(batches, sums, global_rows, flags))
        if recomputed_shares is not None:
            recomputed_shares.compare()
            result = result._replace(recomputed=len(recomputed_shares.shares))
        result = self._check_and_rescale(cursor, result, global_rows)
        factor = self._gradient_factor(result.weight, global_rows)
        return (result._replace(grad_norm=total_norm(norms, factor)) if factor else result), factor

    def _recompute(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> int:
        """Recomputes the gradient of a micro-batch for an SDC check and leaves it in `.grad`.

        The micro-batch is that of a logical worker of another rank, or, after a mismatch, perhaps one of this rank. The
        buffers of this rank stay as they are.

        Returns:
            The checksum of the buffers at the end of the pass.
        """
        fields = {name: values.to(self._device) for name, values in batch.fields.items()}
        restore_modes(self._modes)
        with self._buffers.from_start(), self._error_context(batch):
            if not batch.rows:
                return self._buffers.checksum()
            losses = self._losses(cursor, batch._replace(fields=fields), self._state.model)
            run_backward(losses.values, self._loss_weights(batch, global_rows))
            return self._buffers.checksum()

    def _sync_and_read(
        self, device_sums: list[DeviceSums | None], norms: list[Tensor]
    ) -> tuple[list[LossSums], list[float]]:
        """Waits for the device and reads the sums of the losses and the norms.

        With NCCL or a single worker, and without SDC checks, this is the only device synchronization point of a step.
        With gloo and several workers it is called twice, once for the sums and once for the norms.

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
        """Returns the context for forward and backward of a micro-batch.

        It adds logical worker and rows to errors of user code, and lets batch-norm layers accept a single row.
        """
        context = user_code(lambda: f"logical worker {batch.logical_worker}", batch.positions.tolist)
        return self._single_row_context(batch, context) if batch.rows == 1 else context

    @contextmanager
    def _single_row_context(self, batch: MicroBatch, context: AbstractContextManager[None]) -> Iterator[None]:
        """Adds `allow_single_values` to the context of a micro-batch of one row.

        The context includes backward, which may run parts of the forward again (activation checkpointing).
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
        """Returns the weight of each row's loss in the loss of the step, times the loss scale, shape (rows,)."""
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
        """Returns the gradient tensors that this rank has: the whole gradient, or its shards with `fsdp`."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def _norms(self) -> list[Tensor]:
        """Returns the norms of tensors that together are the whole gradient, without a device synchronization."""
        return gradient_norms(self._gradients())

    def _gradient_factor(self, weight: float, global_rows: int) -> float:
        """Returns the factor that makes the reduced gradient the mean over the rows' weight and removes the loss scale.

        It is 0 if no row has weight.
        """
        return global_rows / weight / (self._scale.value if self._scale is not None else 1.0) if weight else 0.0

    def _raise_non_finite(
        self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, result: StepResult
    ) -> None:
        """Determines which rows of which logical workers gave a NaN or infinity, and raises an error; a collective.

        Raises:
            NonFiniteError: Always, with the same message on every rank.
        """
        bad_rows = []
        for batch in batches:
            if not batch.rows:
                continue
            with self._error_context(batch):
                if not self._is_finite(cursor, batch, global_rows):
                    bad_rows.append((batch.logical_worker, self._non_finite_rows(cursor, batch)))
        bad_rows_by_rank = gather(bad_rows, self._world)
        sources = "; ".join(
            f"logical worker {v}, rows at manifest positions {positions}"
            for bad_rows_of_rank in bad_rows_by_rank
            for v, positions in bad_rows_of_rank
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
            # Each row is computed separately, because in a backward of all rows a NaN of one row spreads to the others.
            for i in range(batch.rows):
                row = batch._replace(rows=1, keys=batch.keys[i : i + 1], positions=batch.positions[i : i + 1])
                row = row._replace(fields={name: values[i : i + 1] for name, values in batch.fields.items()})
                # A task may not accept a single row, for example with a loss of pairs.
                with suppress(TaskError), self._error_context(row):
                    bad += [] if self._is_finite(cursor, row, 1) else [i]
        return [positions[i] for i in bad if i < len(positions)] or positions

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        """Returns whether the loss and the gradient of a micro-batch are finite; computes them again."""
        restore_modes(self._modes)
        loss = self._losses(cursor, batch, self._state.model).values.sum() / global_rows
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients if g is not None)


def _rows_with_non_finite_fields(fields: Batch) -> list[int]:
    """Returns the indices of the rows that have a NaN or infinity in a field."""
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
    """Returns the statistics of the logical worker of a micro-batch.

    Args:
        batch: The micro-batch.
        sums: The sums over its rows.
        loss: Its share of the mean loss.
        flags: The flags of this rank.
        time_breakdown: The time of this rank.
        squared_norm: Its share of the square of the gradient's norm, see `ReplicaStats.squared_norm`.
    """
    return ReplicaStats(
        batch.logical_worker,
        batch.rows,
        batch.row_hash,
        loss,
        flags,
        squared_norm,
        batch.num_skipped,
        sums.weight,
        *time_breakdown,
        sums.metrics,
    )


class TurnStep(Step):
    """A `Step` with several optimizers that take turns; only the parameters of the optimizer in turn get gradients.

    Each turn has a gradient reducer of its own, built while only that turn's parameters require gradients, and
    statistics of its own, because each optimizer's loss may have other metrics.

    Args:
        turns: The optimizers.
        make_reducer: Builds a gradient reducer of the parameters that require gradients now.
        config, task, state, world, device, enter: See `Step`.
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
            turns.enable_gradients(turn)
            self._reducers[turn] = make_reducer()
        # `run` sets the reducer, the statistics and the parameters of each step; this reducer is replaced there.
        super().__init__(config, task, state, self._reducers[turn], world, device, enter)

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Runs the step of the optimizer in turn, see `Step.run`."""
        turn = self._turn = self._turns.begin_step(self._state.step)
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
