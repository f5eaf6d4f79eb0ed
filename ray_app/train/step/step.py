"""One optimizer step over all logical workers: the arithmetic that does not know how many workers there are.

The norm of a gradient: taken where the gradient is, read by the host, which then says what the gradient is multiplied
by.

A step in which one of several optimizers has its turn: only its parameters get gradients, an exchange and an update.
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

_MOST = float(np.finfo(np.float32).max)


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor; does not wait for the device."""
    return [*torch._foreach_norm(gradients)] if gradients else []  # get_total_norm costs 30 us more


def total_norm(norms: Iterable[float], factor: float = 1.0) -> float:
    """The norm of tensors that have these norms, times a number; infinite where a value of theirs might be."""
    norm = math.sqrt(math.fsum([n * n for n in norms])) * factor
    return math.inf if norm > _MOST else norm


def scale_and_clip(gradients: list[Tensor], factor: float, norm: float, most: float | None) -> None:
    """Multiplies gradients by a number, and where their norm then is more than `most` by what makes it that.

    By the numbers of `torch.nn.utils.clip_grads_with_norm_`, which sends them from the host to the device and waits for
    that.
    """
    if factor != 1:
        torch._foreach_mul_(gradients, factor)
    if most is not None:
        share = np.float32(1) / (np.float32(norm) + np.float32(1e-6)) * np.float32(most)
        if share < 1:
            torch._foreach_mul_(gradients, float(share))


class Step:
    """Runs steps for one generation of workers.

    Args:
        config: Seed, precision, clipping.
        task: Forward and loss.
        state: What the step changes.
        reducer: Reduces the gradients of the logical workers.
        world: The workers of now.
        device: Where it runs.
        enter: Told what the step is doing.

    Attributes:
        waited_s: Seconds that this rank has waited for the data of the step.
    """

    unknown_culprit: ClassVar[str] = "the sum of finite gradients"
    """Where a NaN comes from that no logical worker's rows gave."""

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
        self._buffers, self._table = ReplicaBuffers(state.model, world), StepStats(world)
        self._forward = Forward(config, task, device, self._loss())
        self._captured = (
            CapturedPasses(state.model, device, self._computed, make_graph_backend(device))
            if config.train.capture
            else None
        )
        self._scale = state.scale
        self._timer, self.waited_s = StepTimer(device) if world.size > 1 else None, 0.0
        self._replays: SdcChecker | None = None
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        state.train()
        self._modes = module_modes(state.model)

    def close(self) -> None:
        """Ends it; see `GradientReducer.close`."""
        self._reducer.close()
        self._captured = None  # it holds this one: its memory of the device would wait for the garbage collector

    def replay(self, replays: SdcChecker | None) -> None:
        """From now on some shares are computed twice; None: not one."""
        self._replays = replays
        if replays is not None:
            replays.begin(self._world)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, that of the first parameter group."""
        return self._state.lr

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Does one step.

        Args:
            cursor: Which.
            batches: One micro-batch per logical worker of this rank, in their order.
            global_rows: Rows that the plan has for the step over all logical workers. Losses and gradients are means
                over the weight of those of them that can be decoded, which is known only after the exchange: they are
                made with this number and then corrected. A row's weight is 1 unless its task says otherwise.
            flags: What this rank has to say to all.

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
        if not factor:  # all of them are bad, or count for nothing: nothing moves
            self._state.advance_schedule()
            return result
        norm = result.grad_norm
        if math.isfinite(result.loss) and math.isfinite(norm):
            most = self._config.train.grad_clip_norm
            if factor != 1 or most is not None:
                scale_and_clip(self._gradients(), factor, norm, most)
            self._state.optimizer_step()
        else:
            self._buffers.roll_back()
            if self._scale is None or not self._scale.can_fall or not math.isfinite(result.loss):
                self._refuse(cursor, batches, global_rows, result)
            self._state.advance_schedule()
        if self._scale is not None:
            self._scale.update(math.isfinite(norm))
        return result

    def _forward_backward_reduce(
        self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags
    ) -> tuple[StepResult, float]:
        """Everything of a step but the optimizer: afterwards all ranks hold the gradient, the buffers and the table of
        the step.

        Returns:
            What all know then, and what the gradient has to be multiplied by; 0: nothing counts.
        """
        twice = self._replays.due(self._state.step, batches, self._reducer) if self._replays is not None else None
        if self._timer is not None:
            self._timer.begin()
        found: list[DeviceSums | None] = []
        for batch in batches:
            restore_modes(self._modes)
            with self._error_context(batch):
                found.append(self._run_logical_worker(cursor, batch, global_rows))
            if twice is not None:
                twice.played(batch.logical_worker, self._buffers.bits)
            self._buffers.end_logical_worker(batch.logical_worker)
        if self._timer is not None:
            self._timer.computed()
        self._enter("exchange")
        self._reducer.launch()
        self._buffers.launch()
        if twice is not None:
            twice.compute(lambda batch: self._again(cursor, batch, global_rows))
        result = None
        if (
            self._world.check_device_errors is None and self._world.size > 1
        ):  # the host carries the gradients, and beside them the table
            told, _ = self._sync_and_read(found, [])
            result = self._table.exchange(self._lines(batches, told, global_rows, flags))
        self._reducer.finish()
        self._buffers.finish()
        if self._timer is not None:
            self._timer.met()
        told, norms = self._sync_and_read(found if result is None else [], self._norms())
        if result is None:  # the table tells all that all have what they need
            result = self._table.exchange(self._lines(batches, told, global_rows, flags))
        if twice is not None:
            twice.compare()
            result = result._replace(replayed=len(twice.shares))
        result = self._check_and_rescale(cursor, result, global_rows)
        factor = self._factor(result.weight, global_rows)
        return (result._replace(grad_norm=total_norm(norms, factor)) if factor else result), factor

    def _again(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> int:
        """Computes the gradient of a micro-batch, which is in `.grad` then; returns the bits of the buffers that come
        of it.
        """
        fields = {name: values.to(self._device) for name, values in batch.fields.items()}
        with self._buffers.from_start(), self._error_context(batch):
            if not batch.rows:
                return self._buffers.bits()
            losses = self._losses(cursor, batch._replace(fields=fields), self._state.model)
            run_backward(losses.values, self._weights(batch, global_rows))
            return self._buffers.bits()

    def _sync_and_read(self, found: list[DeviceSums | None], norms: list[Tensor]) -> tuple[list[LossSums], list[float]]:
        """Here the host meets the device, nowhere else in a step: it waits for what the device was given, and reads
        what it found.
        """
        if self._world.check_device_errors is not None:
            self._world.check_device_errors()
        return read_sums(self._task, found, norms)

    def _check_and_rescale(self, cursor: Cursor, result: StepResult, global_rows: int) -> StepResult:
        """Holds the rows against the plan, and makes of means over the planned rows means over what counts."""
        rows, skipped = sum(result.rows), sum(result.skipped)
        if rows + skipped != global_rows:
            raise DataError(
                f"Step {cursor} consumed {rows} rows and skipped {skipped}, {global_rows} were planned; please report"
                f" this."
            )
        return result.over_weight(global_rows)

    def _error_context(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """The context of forward and backward of a micro-batch: what is raised is told with the logical worker and the
        rows.
        """
        blamed = user_code(lambda: f"logical worker {batch.logical_worker}", batch.positions.tolist)
        return self._alone(batch, blamed) if batch.rows == 1 else blamed

    @contextmanager
    def _alone(self, batch: MicroBatch, blamed: AbstractContextManager[None]) -> Iterator[None]:
        """That of a micro-batch of one row; backward is in it, which may compute parts of the forward again (activation
        checkpointing).
        """
        with allow_single_values(self._trained_by(batch)), blamed:
            yield

    def _trained_by(self, batch: MicroBatch) -> nn.Module:
        """The model that a micro-batch goes through."""
        return self._state.model

    def _lines(
        self, batches: list[MicroBatch], told: list[LossSums], global_rows: int, flags: Flags
    ) -> list[ReplicaStats]:
        """What this rank's logical workers have to say."""
        spent = self._timer.spent(len(batches), self.waited_s) if self._timer is not None else NO_TIME
        return [
            make_replica_stats(batch, sums, sums.loss / global_rows, flags, spent)
            for batch, sums in zip(batches, told, strict=True)
        ]

    def _run_logical_worker(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> DeviceSums | None:
        """Forward and backward of one logical worker, of which nothing is waited for."""
        if not batch.rows:
            self._reducer.skip(batch.logical_worker)
            return None
        weights = self._weights(batch, global_rows)
        if (captured := self._captured) is not None:
            fields = self._forward.fields(cursor, batch)
            return self._reducer.collect_from(lambda: captured.run(fields, weights), batch.logical_worker)
        losses = self._losses(cursor, batch, self._state.model)
        self._reducer.backward(losses.values, weights, batch.logical_worker)
        return sum_on_device(losses)

    def _weights(self, batch: MicroBatch, global_rows: int) -> Tensor:
        """What backward begins with."""
        return self._forward.weights(batch.rows, global_rows, self._scale.value if self._scale is not None else 1.0)

    def _computed(self, fields: Batch, weights: Tensor) -> DeviceSums:
        """Forward and backward of rows, see `Compute`."""
        losses = self._forward.losses(self._state.model, fields, len(weights))
        run_backward(losses.values, weights)
        return sum_on_device(losses)

    def _losses(self, cursor: Cursor, batch: MicroBatch, model: nn.Module) -> Losses:
        """The losses of a micro-batch's rows."""
        return self._forward.losses(model, self._forward.fields(cursor, batch), batch.rows)

    def _loss(self) -> Callable[[nn.Module, Batch], Tensor | Losses]:
        """What a model and rows are given to for their losses."""
        return self._task.training_loss

    def _gradients(self) -> list[Tensor]:
        """What this rank has of the gradient, as the optimizer will find it."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def _norms(self) -> list[Tensor]:
        """Norms of parts of the gradient; all together they are the whole. Does not wait for the device."""
        return gradient_norms(self._gradients())

    def _factor(self, weight: float, global_rows: int) -> float:
        """What a gradient is multiplied by to be the mean over what counts, without the scale of the loss; 0: nothing
        counts.
        """
        return global_rows / weight / (self._scale.value if self._scale is not None else 1.0) if weight else 0.0

    def _refuse(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, result: StepResult) -> None:
        """Finds out which logical workers' rows gave the NaN or infinity, and raises on every rank alike."""
        found = []
        for batch in batches:
            if not batch.rows:
                continue
            with self._error_context(batch):
                if not self._is_finite(cursor, batch, global_rows):
                    found.append((batch.logical_worker, self._rows_to_blame(cursor, batch)))
        everyone = gather(found, self._world)
        culprits = "; ".join(
            f"logical worker {v}, rows at manifest positions {p}" for part in everyone for v, p in part
        )
        raise NonFiniteError(
            f"Epoch {cursor.epoch}, step {cursor.step} of the epoch: the loss ({result.loss}) or the gradient is not"
            f" finite, from"
            f" {culprits or self.unknown_culprit}. The optimizer did not move. Look at these rows, lower the learning"
            f" rate, or set"
            " train.grad_clip_norm."
        )

    def _rows_to_blame(self, cursor: Cursor, batch: MicroBatch) -> list[int]:
        """The manifest positions of the rows whose fields, losses or gradients are not finite; of all rows if none is
        so by itself.
        """
        positions, bad = batch.positions.tolist(), _rows_with_nan(batch.fields)
        if not bad:
            losses = self._losses(cursor, batch, self._trained_by(batch)).values
            bad = [i for i, is_finite in enumerate(losses.isfinite().tolist()) if not is_finite]
        if not bad:  # each by itself: in a backward of all, what is not finite spreads to the others
            for i in range(batch.rows):
                one = batch._replace(rows=1, keys=batch.keys[i : i + 1], positions=batch.positions[i : i + 1])
                one = one._replace(fields={name: values[i : i + 1] for name, values in batch.fields.items()})
                with (
                    suppress(TaskError),
                    self._error_context(one),
                ):  # a task may not take one row, such as a loss of pairs
                    bad += [] if self._is_finite(cursor, one, 1) else [i]
        return [positions[i] for i in bad if i < len(positions)] or positions

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        loss = self._losses(cursor, batch, self._state.model).values.sum() / global_rows
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients if g is not None)


def _rows_with_nan(fields: Batch) -> list[int]:
    """The rows of which a field has a number that is not finite."""
    bad = [
        ~values.isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.isfinite()
        for values in fields.values()
        if values.ndim
    ]
    return torch.stack([each.cpu() for each in bad]).any(0).nonzero()[:, 0].tolist() if bad else []


def make_replica_stats(
    batch: MicroBatch, sums: LossSums, loss: float, flags: Flags, spent: TimeBreakdown, norm: float = 0.0
) -> ReplicaStats:
    """The line of a micro-batch in the table of a step, with its share of the mean loss."""
    rows = batch.logical_worker, batch.rows, batch.row_hash
    return ReplicaStats(*rows, loss, flags, norm, batch.num_skipped, sums.weight, *spent, sums.metrics)


class TurnStep(Step):
    """See the module and `Step`; there is a reducer for each turn, made while only its parameters may have
    gradients.
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
        self._reducers, self._tables = (
            dict[str, GradientReducer](),
            {turn: StepStats(world) for turn in turns.optimizers},
        )
        for turn in turns.optimizers:
            turns.take(turn)
            self._reducers[turn] = make_reducer()
        super().__init__(config, task, state, self._reducers[turn], world, device, enter)

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """See `Step.run`."""
        turn = self._turn = self._turns.begin(self._state.step)
        self._reducer, self._table, self._parameters = (
            self._reducers[turn],
            self._tables[turn],
            self._turns.parameters[turn],
        )
        return super().run(cursor, batches, global_rows, flags)

    def _loss(self) -> Callable[[nn.Module, Batch], Tensor | Losses]:
        return lambda model, fields: self._task.loss_for_optimizer(self._turn, model, fields)

    def close(self) -> None:
        """See `GradientReducer.close`."""
        for reducer in self._reducers.values():
            reducer.close()
