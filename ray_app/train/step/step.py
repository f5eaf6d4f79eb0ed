"""One optimizer step over all logical workers; its arithmetic does not depend on the number of workers.

`Step.run` reads from top to bottom: forward and backward of the logical workers of this rank, reduction of the
gradients, synchronization with the device, checks, update. What else happens in a step wraps it from outside: CUDA
graphs run the passes (`cuda_graphs.py`), and `StepHook` objects measure its time (`StepTimer`) and recompute shares of
other ranks (`SdcChecker`). `TurnStep` has a step for each of several optimizers that take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_app.data.windows import MicroBatch
from ray_app.plan.order import Cursor
from ray_app.reduction.base import GradientReducer, World, scale_and_clip, total_norm
from ray_app.task.base import Task
from ray_app.task.losses import DeviceSums, LossSums, read_sums
from ray_app.train.membership import Flags, Phase
from ray_app.train.state.alternating_optimizers import Turns
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import Passes, ReplicaBuffers, RunPass, raise_non_finite
from ray_app.train.step.step_stats import StepResult, StepStats


class StepHook:
    """Is called at the named points of `Step.run`, in the order of the methods here; each does nothing by default."""

    def begin(self, step: int, cursor: Cursor, batches: Sequence[MicroBatch], global_rows: int) -> None:
        """Begins a step; no logical worker has run yet.

        Args:
            step: Number of the step, from 0 over the run.
            cursor, batches, global_rows: See `Step.run`.
        """

    def end_logical_worker(self, logical_worker: int) -> None:
        """Follows forward and backward of a logical worker; the model has the buffers that it has left."""

    def computed(self) -> None:
        """Follows the last backward of this rank, which a device may still be running."""

    def reducing(self) -> None:
        """Overlaps with the gradient reduction, all parts of which have started."""

    def reduced(self) -> None:
        """Follows the gradient reduction."""

    def check(self, result: StepResult) -> StepResult:
        """Checks a step before the update, when all ranks have its result; returns the result.

        If it raises, it raises on all ranks, and the step counts nowhere.
        """
        return result


def combine_hooks(hooks: Sequence[StepHook]) -> StepHook:
    """Returns one hook for several, which calls them in their order."""
    return hooks[0] if len(hooks) == 1 else _StepHooks(hooks) if hooks else StepHook()


class _StepHooks(StepHook):
    """Several hooks as one, see `combine_hooks`."""

    def __init__(self, hooks: Sequence[StepHook]) -> None:
        self._hooks = hooks

    def begin(self, step: int, cursor: Cursor, batches: Sequence[MicroBatch], global_rows: int) -> None:
        """See `StepHook.begin`."""
        for hook in self._hooks:
            hook.begin(step, cursor, batches, global_rows)

    def end_logical_worker(self, logical_worker: int) -> None:
        """See `StepHook.end_logical_worker`."""
        for hook in self._hooks:
            hook.end_logical_worker(logical_worker)

    def computed(self) -> None:
        """See `StepHook.computed`."""
        for hook in self._hooks:
            hook.computed()

    def reducing(self) -> None:
        """See `StepHook.reducing`."""
        for hook in self._hooks:
            hook.reducing()

    def reduced(self) -> None:
        """See `StepHook.reduced`."""
        for hook in self._hooks:
            hook.reduced()

    def check(self, result: StepResult) -> StepResult:
        """See `StepHook.check`."""
        for hook in self._hooks:
            result = hook.check(result)
        return result


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
        hooks: What wraps the step, see `StepHook`.
        max_norm: The norm to clip gradients to; None for no clipping.
        run_pass: `passes.run`, or a wrapper of it.
    """

    task: Task
    state: TrainingState
    passes: Passes
    reducer: GradientReducer
    buffers: ReplicaBuffers
    stats: StepStats
    world: World
    enter: Callable[[Phase], None]
    hooks: StepHook
    max_norm: float | None
    run_pass: RunPass

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
            RayAppError: A hook has raised it, see `StepHook.check`.
        """
        self.state.sync.broadcast_parameters()
        self.buffers.begin()
        try:
            self.hooks.begin(self.state.step, cursor, batches, global_rows)
            # Forward and backward. The reduction begins during the last backward.
            device_sums = list[DeviceSums | None]()
            for batch in batches:
                device_sums.append(self.run_pass(cursor, batch, global_rows, self.reducer))
                self.hooks.end_logical_worker(batch.logical_worker)
                self.buffers.end_logical_worker(batch.logical_worker)
            self.hooks.computed()
            # Reduce. Where the host carries the gradients (gloo), the statistics travel concurrently with them.
            self.enter("reduction")
            self.reducer.launch()
            self.buffers.launch()
            self.hooks.reducing()
            sums, result = list[LossSums](), None
            if self.world.size > 1 and not self.world.has_device_collectives:
                sums, _ = read_sums(self.task, device_sums)
                result = self.stats.gather_batches(batches, sums, global_rows, flags)
            self.reducer.finish()
            self.buffers.finish()
            self.hooks.reduced()
            # Synchronize. Where the device carries the gradients, it carries the statistics after them. With gloo the
            # host waits a second time, for the norms; otherwise this is the only wait of a step without SDC checks.
            device_norms = self.reducer.norms()
            if self.world.has_device_collectives:
                result, sums, norms = self.stats.gather_on_device(
                    self.task, batches, device_sums, device_norms, global_rows, flags
                )
            elif result is not None:
                _, norms = read_sums(self.task, [], device_norms)
            else:
                sums, norms = read_sums(self.task, device_sums, device_norms)
                result = self.stats.gather_batches(batches, sums, global_rows, flags)
            # Check.
            result = self.hooks.check(result)
            result.check_rows(cursor, global_rows)
        except Exception:
            # The buffers are restored after any error, not only after `PeerLostError`: in a broken group any error may
            # be a consequence of the lost peer, and then the loop repeats the step, see `translate_peer_errors`.
            self.buffers.roll_back()
            raise
        result = result.over_weight(global_rows)
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
        self.state.sync.send_replicas()
        return result

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
    """

    def __init__(self, state: TrainingState, turns: Turns, make_step: Callable[[str], Step]) -> None:
        self._state, self._turns = state, turns
        self._steps: dict[str, Step] = {}
        for turn in turns.optimizers:
            turns.enable_gradients(turn)
            self._steps[turn] = make_step(turn)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, that of the first parameter group."""
        return self._state.lr

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Runs the step of the optimizer in turn, see `Step.run`."""
        return self._steps[self._turns.begin_step(self._state.step)].run(cursor, batches, global_rows, flags)

    def close(self) -> None:
        """Closes the steps of all turns."""
        for step in self._steps.values():
            step.close()
