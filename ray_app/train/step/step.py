"""One optimizer step over all logical workers; its arithmetic does not depend on the number of workers.

`Step.run` reads from top to bottom: forward and backward of the logical workers of this rank, reduction of the
gradients, synchronization with the device, checks, update. `TurnStep` has a step for each of several optimizers that
take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ray_app.data.windows import MicroBatch
from ray_app.plan.order import Cursor
from ray_app.reduction.reducer import GradientReducer, scale_and_clip, total_norm
from ray_app.reduction.world import World
from ray_app.task.base import Task, WeightUpdate, step_updates
from ray_app.task.losses import DeviceSums, LossSums, read_sums
from ray_app.train.membership import Flags, Phase
from ray_app.train.state.alternating_optimizers import Turns
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import Passes, ReplicaBuffers, raise_non_finite
from ray_app.train.step.sdc import SdcChecker
from ray_app.train.step.step_stats import StepResult, StepStats, StepTimer


@dataclass(eq=False)
class Step:
    """The step of every strategy that updates one state by the sum of the gradients of all logical workers.

    Args:
        task: The task that computes the losses.
        state: The training state that the step updates.
        passes: Runs forward and backward of a micro-batch.
        reducer: The gradient reducer.
        buffers: The buffers of the model.
        stats: Gathers the statistics of the step.
        world: The workers of the generation.
        enter: Called with each phase that the step begins.
        max_norm: The norm to clip gradients to; None for no clipping.
        timer: Measures the time of the step; None if nothing compares the times of workers.
        sdc: Recomputes shares of other ranks; None for no SDC checks.
        epoch_steps: The number of steps of an epoch, for metrics over its rows.
    """

    task: Task
    state: TrainingState
    passes: Passes
    reducer: GradientReducer
    buffers: ReplicaBuffers
    stats: StepStats
    world: World
    enter: Callable[[Phase], None]
    max_norm: float | None
    timer: StepTimer | None
    sdc: SdcChecker | None
    epoch_steps: int

    @property
    def lr(self) -> float:
        """Learning rate of the next step, that of the first parameter group."""
        return self.state.lr

    def close(self) -> None:
        """Closes the gradient reducer, see `GradientReducer.close`."""
        self.reducer.close()

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Runs one step; a collective.

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
            RayAppError: See `SdcChecker.check`.
        """
        self.state.backend.broadcast_parameters()
        self.buffers.begin()
        try:
            # Forward and backward. The reduction begins during the last backward.
            device_sums = self._run_passes(cursor, batches, global_rows)
            # Reduce and synchronize.
            self.enter("reduction")
            self.reducer.launch()
            self.buffers.launch()
            if self.sdc is not None:
                self.sdc.recompute()
            finish = self._finish_on_device if self.world.has_device_collectives else self._finish_on_host
            result, sums, norms = finish(batches, device_sums, global_rows, flags)
            # Check.
            if self.sdc is not None:
                result = self.sdc.check(result)
            result.check_rows(cursor, global_rows)
        except Exception:
            # The buffers are restored after any error, not only after `PeerLostError`: in a broken group any error may
            # be a consequence of the lost peer, and then the loop repeats the step, see `translate_peer_errors`.
            self.buffers.roll_back()
            raise
        result = result.rescale_to_weight(global_rows)
        # The factor makes the gradient the mean over the rows' weight, and removes the loss scale.
        weight, scale = result.weight, self.state.scale.value if self.state.scale is not None else 1.0
        factor = global_rows / weight / scale if weight else 0.0
        if factor:
            result = result._replace(grad_norm=total_norm(norms, factor))
        # Update. Without a row that has weight there is no gradient: the parameters stay as they are, the step counts.
        if not factor:
            self.state.advance_schedule()
        elif math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            if factor != 1 or self.max_norm is not None:
                scale_and_clip(self.reducer.gradients(), factor, result.grad_norm, self.max_norm)
            self.state.optimizer_step()
        else:
            self._skip_update(cursor, batches, sums, global_rows, result)
        if result.states:
            is_first, before = (self.state.step - 1) % self.epoch_steps == 0, self.state.metric_states
            self.state.metric_states, running = self.task.running_metrics(before, result.states, is_first)
            result = result._replace(running=running)
        self.state.backend.send_peer_replica()
        return result

    def _run_passes(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int) -> list[DeviceSums | None]:
        """Runs forward and backward of each logical worker of this rank; returns the sums of their losses."""
        self.passes.begin_step(batches)
        if self.sdc is not None:
            self.sdc.begin(self.state.step, cursor, batches, global_rows)
        # The sending of micro-batches for SDC checks does not count as computing.
        if self.timer is not None:
            self.timer.begin(len(batches))
        device_sums = list[DeviceSums | None]()
        for batch in batches:
            device_sums.append(self.passes.run(cursor, batch, global_rows, self.reducer))
            if self.sdc is not None:
                self.sdc.end_logical_worker(batch.logical_worker)
            self.buffers.end_logical_worker(batch.logical_worker)
        if self.timer is not None:
            self.timer.computed()
        return device_sums

    def _finish_on_device(
        self, batches: list[MicroBatch], device_sums: list[DeviceSums | None], global_rows: int, flags: Flags
    ) -> tuple[StepResult, list[LossSums], list[float]]:
        """Finishes the reduction where the device carries gradients and, after them, the statistics (NCCL).

        Without SDC checks the host waits only here in a step.

        Returns:
            The result, the sums of the losses of each micro-batch, and norms of the gradient.
        """
        self._finish_reduction()
        return self.stats.gather_on_device(self.task, batches, device_sums, self.reducer.norms(), global_rows, flags)

    def _finish_on_host(
        self, batches: list[MicroBatch], device_sums: list[DeviceSums | None], global_rows: int, flags: Flags
    ) -> tuple[StepResult, list[LossSums], list[float]]:
        """Finishes the reduction where the host carries the statistics (gloo), and returns as `_finish_on_device`.

        With several workers they travel concurrently with the gradients, and the host waits a second time, for norms.
        """
        if self.world.size > 1:
            sums, _ = read_sums(self.task, device_sums)
            result = self.stats.gather_batches(batches, sums, global_rows, flags)
            self._finish_reduction()
            _, norms = read_sums(self.task, [], self.reducer.norms())
        else:
            self._finish_reduction()
            sums, norms = read_sums(self.task, device_sums, self.reducer.norms())
            result = self.stats.gather_batches(batches, sums, global_rows, flags)
        return result, sums, norms

    def _finish_reduction(self) -> None:
        self.reducer.finish()
        self.buffers.finish()
        if self.timer is not None:
            self.timer.reduced()

    def _skip_update(
        self, cursor: Cursor, batches: list[MicroBatch], sums: list[LossSums], global_rows: int, result: StepResult
    ) -> None:
        """Finishes a step without an update if only the loss scale was too high; a collective if it raises.

        In float16 a gradient may overflow because of the loss scale. The scale then falls, and the step counts.

        Raises:
            NonFiniteError: The cause of a loss or gradient that is not finite is another one.
        """
        self.buffers.roll_back()
        scale = self.state.scale
        if scale is None or not scale.can_fall or not math.isfinite(result.loss):
            bad_rows = [
                (batch.logical_worker, self.passes.non_finite_rows(cursor, batch, batch_sums.loss, global_rows))
                for batch, batch_sums in zip(batches, sums, strict=True)
            ]
            raise_non_finite(cursor, result, bad_rows, self.world, self.passes.unknown_source)
        self.state.advance_schedule()
        scale.update(False)


class TurnStep:
    """A step for each of several optimizers that take turns; only the parameters of the one in turn get gradients.

    Each turn has a gradient reducer of its own, made while only that turn's parameters require gradients, and
    statistics of its own, because each optimizer's loss may have other metrics.

    Args:
        state: The training state.
        turns: The optimizers of the state.
        make_step: Makes the step of a turn, while only the parameters of that turn require gradients.
        buffers: The buffers of the model.

    Attributes:
        steps: The step of each turn, by the name of its optimizer.
    """

    def __init__(
        self, state: TrainingState, turns: Turns, make_step: Callable[[str], Step], buffers: ReplicaBuffers
    ) -> None:
        self._state, self._turns = state, turns
        self._buffers = buffers
        self.steps: dict[str, Step] = {}
        for turn in turns.optimizers:
            turns.enable_gradients(turn)
            self.steps[turn] = make_step(turn)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, that of the first parameter group."""
        return self._state.lr

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Runs the step of the optimizer in turn, or all phases of a step, see `Step.run`; returns the last result."""
        turns = self._turns
        if not turns.phases:
            return self.steps[turns.begin_step(self._state.step)].run(cursor, batches, global_rows, flags)
        snapshot, updates = self._state.copy_to_host(), list[WeightUpdate]()
        token = step_updates.set(updates)
        try:
            for phase in range(len(turns.phases)):
                turn = turns.begin_step(self._state.step)
                values = [p.detach().clone() for p in turns.parameters[turn]]
                result = self.steps[turn].run(cursor, batches, global_rows, flags)
                if phase < len(turns.phases) - 1:
                    parameters = zip(turns.parameters[turn], values, strict=True)
                    updates.append([(p, value, p.detach().clone()) for p, value in parameters])
                    # The last phase alone leaves its buffers: each computes the step from its start.
                    self._buffers.roll_back()
        except Exception:
            self._state.load(snapshot)
            raise
        finally:
            turns.phase = 0
            step_updates.reset(token)
        return result

    def close(self) -> None:
        """Closes the steps of all turns."""
        for step in self.steps.values():
            step.close()
