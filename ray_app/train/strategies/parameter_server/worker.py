"""A worker with parameter servers: it asks for a unit, fetches the parameters, computes, and sends the gradient.

It takes part in no collective with other workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ray_app.config.config import Config
from ray_app.data.feed import Feed
from ray_app.data.windows import MicroBatch
from ray_app.errors import TaskError
from ray_app.plan.order import Cursor
from ray_app.reduction.reducer import gradient_norms, total_norm
from ray_app.reduction.world import World
from ray_app.task import environment
from ray_app.task.base import Task
from ray_app.task.losses import ZERO_SUMS, sum_losses
from ray_app.torch_private import foreach_mul_, run_backward
from ray_app.train.context import WorkerContext
from ray_app.train.membership import Flags, Phase
from ray_app.train.state.parameters import check_parameter_layout
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import Passes, raise_non_finite
from ray_app.train.step.step_stats import NO_TIME, ReplicaStats, StepResult, make_replica_stats
from ray_app.train.strategies.parameter_server.layout import Layout, to_bytes
from ray_app.train.strategies.parameter_server.protocol import CoordinatorReply, Pulled, Servers, Unit, UnitResult

Ask = Callable[[str, UnitResult | None, int | None, float | None], CoordinatorReply]
"""The signature of `Coordinator.ask`."""
_SINGLE_WORLD = World(0, 1, 1)


@dataclass
class _DataStream:
    """The data feed of one logical worker, and the step of its next micro-batch."""

    feed: Feed
    step: int = -1


class ParameterWorker:
    """Computes units of a run with parameter servers.

    Args:
        context: The run and the surroundings of this worker.
        name: Name of this worker.
        ask: Asks the coordinator for the next unit.
        servers: The parameter servers.
    """

    def __init__(self, context: WorkerContext, name: str, ask: Ask, servers: Servers) -> None:
        job, device = context.job, context.device
        environment.set_up_torch(job.config, device)
        self._context, self._job = context, job
        self._name = name
        self._ask = ask
        self._servers = servers
        self._membership = context.membership
        self._staleness = job.config.train.staleness
        state = TrainingState(job.config.replace(train__ema_decay=None), job.task, device, job.total_steps)
        check_parameter_layout(state.model, job.parameters)
        # Servers have only trained parameters, so the frozen ones are loaded here.
        if job.config.train.freeze is not None:
            state.initialize(job.read_initial())
        self._layout = Layout(state.model, state.optimizer, job.config.train.servers)
        state.train()
        self._step = _UnitStep(job.config, job.task, Passes(job.config, job.task, device, state.model))
        self._streams: dict[int, _DataStream] = {}
        self._result: UnitResult | None = None
        self._broken_era: int | None = None
        self._rank = self._finished_steps = 0
        self._pulled = (0, 0)
        """Era of the parameters in the model, and the steps of which they have every gradient."""

    def once(self, wait_s: float) -> bool:
        """Computes one unit, if there is one within `wait_s` seconds; returns whether there may be more."""
        self._enter("reduction")
        reply = self._ask(self._name, self._result, self._broken_era, wait_s)
        self._result = self._broken_era = None
        self._rank, self._finished_steps = reply.rank, reply.step
        self._membership.report(reply.step, reply.record if reply.rank == 0 else None, 0)
        if reply.waiting or reply.unit is not None:
            self._membership.report_progress()
        for logical_worker in self._streams.keys() - set(reply.assigned):
            self._streams.pop(logical_worker).feed.close()
        if reply.unit is not None:
            self._result = self._compute_unit(reply.unit)
            if self._result is None:
                self._broken_era = reply.unit.era
        return not reply.over

    def finish(self) -> None:
        """Reports the last result, and that this worker leaves."""
        self._ask(self._name, self._result, self._broken_era, None)

    def close(self) -> None:
        """Closes the data feeds."""
        self._enter("done")
        for stream in self._streams.values():
            stream.feed.close()

    def _compute_unit(self, unit: Unit) -> UnitResult | None:
        """Computes a unit and sends its gradient; returns None if a server is lost."""
        cursor = Cursor.at(unit.step, self._job.plan.steps_per_epoch)
        self._enter("data")
        batch, wait_s = self._batch(unit, cursor)
        if not self._is_fresh(unit):
            self._enter("reduction")
            if not self._load_parameters(unit, self._servers.call("pull", [(unit.era,)] * len(self._layout.parts))):
                return None
        self._enter("compute")
        try:
            stats = self._step.compute(cursor, batch, self._job.plan.global_rows(cursor.step))
        except TaskError as error:
            rows = self._job.plan.manifest.describe_rows(error.positions)
            raise error.with_context(f"rank {self._rank} after step {unit.step}", rows) from error.__cause__
        buffers = to_bytes(self._layout.buffers) if unit.logical_worker == 0 else None
        has_gradient = self._step.has_gradient(stats)
        gradients = enumerate(self._layout.gradients() if has_gradient else [None] * len(self._layout.parts))
        self._enter("reduction")
        pushed = self._servers.call(
            "push", [(unit.era, unit.step, unit.logical_worker, g, None if i else buffers) for i, g in gradients]
        )
        if pushed is None or None in pushed:
            # The forward may have changed the model's buffers since they were pulled.
            self._pulled = (0, 0)
            return None
        if self._staleness:
            self._load_parameters(unit, [pulled for _, pulled in pushed])
        if self._context.hooks.after_step is not None:
            self._context.hooks.after_step(self._rank, unit.step + 1)
        return UnitResult(unit, stats, pushed[0][0], wait_s)

    def _is_fresh(self, unit: Unit) -> bool:
        """Returns whether the parameters in the model, from the servers' last reply, are recent enough for a unit."""
        era, complete = self._pulled
        return self._staleness > 0 and era == unit.era and complete >= unit.step - self._staleness

    def _load_parameters(self, unit: Unit, pulled: list[Pulled | None] | None) -> bool:
        """Loads the servers' parameters into the model; returns whether all servers are in the era of the unit."""
        replies = [reply for reply in pulled or () if reply is not None]
        if len(replies) < len(self._layout.parts):
            return False
        self._layout.put([parameters for _, parameters, _ in replies], replies[0][2])
        self._pulled = unit.era, min(complete for complete, _, _ in replies)
        return True

    def _batch(self, unit: Unit, cursor: Cursor) -> tuple[MicroBatch, float]:
        """Returns the rows of a unit, and the seconds that the worker waited for them."""
        v = unit.logical_worker
        if v not in self._streams:
            open_windows = partial(self._context.open_windows, self._job)
            self._streams[v] = _DataStream(Feed(self._job.plan, open_windows, self._context.device))
        stream = self._streams[v]
        if stream.step != unit.step:
            stream.feed.seek(cursor, range(v, v + 1))
        wait_before_s = stream.feed.wait_s
        [batch] = stream.feed.next()
        stream.step = unit.step + 1
        return batch, stream.feed.wait_s - wait_before_s

    def _enter(self, phase: Phase) -> None:
        self._membership.enter(phase)
        if self._context.hooks.at is not None:
            self._context.hooks.at(phase, self._rank, self._finished_steps)


class _UnitStep:
    """Runs forward and backward of one logical worker and leaves its share of the step's gradient in `.grad`.

    With staleness a gradient is applied before the total weight of the step's rows is known: it is then that of the
    mean over the logical worker's own weight, and is weighted by the number of its rows.

    Args:
        config: The run's configuration.
        task: The task.
        passes: Runs forward and backward.
    """

    def __init__(self, config: Config, task: Task, passes: Passes) -> None:
        self._task = task
        self._passes = passes
        self._staleness = config.train.staleness
        self._max_norm = config.train.grad_clip_norm

    def has_gradient(self, stats: ReplicaStats) -> bool:
        """Returns whether a unit has a gradient for the servers."""
        return stats.rows > 0 and (stats.weight > 0 or not self._staleness)

    def compute(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> ReplicaStats:
        """Computes a unit; its norm is weighted by the number of rows.

        Raises:
            NonFiniteError: Loss or norm is not finite.
        """
        self._clear_gradients()
        with self._passes.prepared(batch):
            if not batch.rows:
                return make_replica_stats(batch, ZERO_SUMS, 0.0, 0.0, Flags(0), NO_TIME)
            losses, share = self._passes.losses(cursor, batch), batch.rows / global_rows
            sums = sum_losses(self._task, losses)
            mean_weight = (sums.weight / batch.rows or 1.0) if self._staleness else 1.0
            # The task may have left gradients of its own.
            self._clear_gradients()
            run_backward(losses.values, self._passes.weights(batch.rows, global_rows * mean_weight))
        loss = sums.loss / global_rows
        gradients = [p.grad for p in self._passes.parameters if p.grad is not None]
        norm = total_norm(torch.stack(gradient_norms(gradients)).tolist()) / share
        if not (math.isfinite(loss) and math.isfinite(norm)):
            bad_rows = self._passes.non_finite_rows(cursor, batch, sums.loss, global_rows)
            result = StepResult(loss, norm, [], [], Flags(0), [], [])
            raise_non_finite(cursor, result, [(batch.logical_worker, bad_rows)], _SINGLE_WORLD)
        if self._staleness and self._max_norm is not None and norm > self._max_norm:
            foreach_mul_(gradients, self._max_norm / norm)
        return make_replica_stats(batch, sums, loss, norm * norm * share, Flags(0), NO_TIME)

    def _clear_gradients(self) -> None:
        """Drops the gradients of all parameters."""
        for p in self._passes.parameters:
            p.grad = None
