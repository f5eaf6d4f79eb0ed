"""A worker of parameter servers: asks for a unit, fetches the parameters, computes, sends the gradient. It meets no
other worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ray_app.data.feed import Feed
from ray_app.data.windows import MicroBatch
from ray_app.errors import TaskError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World, run_backward
from ray_app.reduction.bucketed import build_reducer
from ray_app.task import device as environment
from ray_app.task.base import ZERO_SUMS, sum_losses
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.membership import Flags, Membership, Phase
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import restore_modes
from ray_app.train.step.step import Step, make_replica_stats
from ray_app.train.step.step_stats import ReplicaStats, StepResult
from ray_app.train.step.timing import NO_TIME
from ray_app.train.strategies.parameter_server.layout import Layout, to_bytes
from ray_app.train.strategies.parameter_server.protocol import CoordinatorReply, Pulled, Servers, Unit, UnitResult

Ask = Callable[[str, UnitResult | None, int | None, float | None], CoordinatorReply]
"""See `Coordinator.ask`."""
_ALONE = World(0, 1, 1)


@dataclass
class _DataStream:
    """The data of one logical worker, and the step that it is at."""

    feed: Feed
    step: int = -1


class ParameterWorker:
    """See the module.

    Args:
        job: What to train.
        name: Who this is.
        ask: Asks the coordinator.
        servers: Where the parameters are.
        membership: Is told what this worker does.
        open_windows: Where the data comes from.
        device: Where to compute.
        hooks: For fault tests.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        ask: Ask,
        servers: Servers,
        membership: Membership,
        open_windows: OpenWindows,
        device: torch.device,
        hooks: Hooks = Hooks(),
    ) -> None:
        environment.set_up_torch(job.config, device)
        self._job, self._name, self._ask, self._servers, self._membership = job, name, ask, servers, membership
        self._open, self._device, self._hooks, self._staleness = open_windows, device, hooks, job.config.train.staleness
        state = TrainingState(job.config.replace(train__ema_decay=None), job.task, device, job.total_steps)
        if job.config.train.freeze is not None:  # servers hold no more than what is trained
            state.initialize(job.read_initial())
        self._layout = Layout(state.model, state.optimizer, job.config.train)
        self._step = _UnitStep(
            job.config, job.task, state, build_reducer(job.config.train, state.model, _ALONE), _ALONE, device
        )
        self._streams: dict[int, _DataStream] = {}
        self._done: UnitResult | None = None
        self._broken: int | None = None
        self._rank = self._finished = 0
        self._pulled = (0, 0)

    def once(self, wait_s: float) -> bool:
        """Does one unit, if there is one within so many seconds; returns whether there may be more."""
        self._enter("exchange")
        answer = self._ask(self._name, self._done, self._broken, wait_s)
        self._done = self._broken = None
        self._rank, self._finished = answer.rank, answer.step
        self._membership.report(answer.step, answer.record if answer.rank == 0 else None, 0)
        if answer.waiting or answer.unit is not None:
            self._membership.moved()
        for logical_worker in self._streams.keys() - set(answer.held):
            self._streams.pop(logical_worker).feed.close()
        if answer.unit is not None:
            self._done = self._do(answer.unit)
            if self._done is None:
                self._broken = answer.unit.era
        return not answer.over

    def finish(self) -> None:
        """Says what it has done last, and that it leaves."""
        self._ask(self._name, self._done, self._broken, None)

    def close(self) -> None:
        """Frees what it holds."""
        self._enter("done")
        for stream in self._streams.values():
            stream.feed.close()

    def _do(self, unit: Unit) -> UnitResult | None:
        """Does a unit; None: a server is lost."""
        cursor = Cursor.at(unit.step, self._job.plan.steps_per_epoch)
        self._enter("data")
        batch, wait_s = self._batch(unit, cursor)
        if not self._is_fresh(unit):
            self._enter("exchange")
            if not self._take(unit, self._servers.call("pull", [(unit.era,)] * len(self._layout.parts))):
                return None
        self._enter("compute")
        try:
            row = self._step.play(cursor, batch, self._job.plan.global_rows(cursor.step))
        except TaskError as error:
            rows = self._job.plan.manifest.describe_rows(error.positions)
            raise error.with_context(f"rank {self._rank} after step {unit.step}", rows) from error.__cause__
        buffers = to_bytes(self._layout.buffers) if unit.logical_worker == 0 else None
        sent = enumerate(self._layout.gradients() if self._step.moves(row) else [None] * len(self._layout.parts))
        self._enter("exchange")
        pushed = self._servers.call(
            "push", [(unit.era, unit.step, unit.logical_worker, g, None if i else buffers) for i, g in sent]
        )
        if pushed is None or None in pushed:
            self._pulled = (0, 0)  # what is in the model is no longer what came
            return None
        if self._staleness:
            self._take(unit, [pulled for _, pulled in pushed])
        if self._hooks.after_step is not None:
            self._hooks.after_step(self._rank, unit.step + 1)
        return UnitResult(unit, row, pushed[0][0], wait_s)

    def _is_fresh(self, unit: Unit) -> bool:
        """Whether the parameters here, which came with the last answer of the servers, have all that a unit may not do
        without.
        """
        era, complete = self._pulled
        return self._staleness > 0 and era == unit.era and complete >= unit.step - self._staleness

    def _take(self, unit: Unit, pulled: list[Pulled | None] | None) -> bool:
        """Puts what the servers hold into the model; whether they are all in the era of a unit."""
        there = [each for each in pulled or () if each is not None]
        if len(there) < len(self._layout.parts):
            return False
        self._layout.put([parameters for _, parameters, _ in there], there[0][2])
        self._pulled = unit.era, min(complete for complete, _, _ in there)
        return True

    def _batch(self, unit: Unit, cursor: Cursor) -> tuple[MicroBatch, float]:
        """The rows of a unit, and the seconds that they took."""
        v = unit.logical_worker
        if v not in self._streams:
            feed = Feed(self._job.plan, lambda cursor, played: self._open(self._job, cursor, played), self._device)
            self._streams[v] = _DataStream(feed)
        stream = self._streams[v]
        if stream.step != unit.step:
            stream.feed.play(cursor, range(v, v + 1))
        waited = stream.feed.wait_s
        [batch] = stream.feed.next()
        stream.step = unit.step + 1
        return batch, stream.feed.wait_s - waited

    def _enter(self, phase: Phase) -> None:
        self._membership.enter(phase)
        if self._hooks.at is not None:
            self._hooks.at(phase, self._rank, self._finished)


class _UnitStep(Step):
    """Forward and backward of one logical worker; the parameters' `.grad` is its share of the step's gradient.

    With staleness a gradient is applied before anybody knows what the step's rows weigh: it is then that of the mean
    over the own weight, and counts by rows.
    """

    def moves(self, row: ReplicaStats) -> bool:
        """Whether a unit has a gradient for the servers."""
        return row.rows > 0 and (row.weight > 0 or not self._config.train.staleness)

    def play(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> ReplicaStats:
        """Computes a unit; its norm is weighted by rows.

        Raises:
            NonFiniteError: Loss or norm is not finite.
        """
        for p in self._parameters:
            p.grad = None
        restore_modes(self._modes)
        if not batch.rows:
            return make_replica_stats(batch, ZERO_SUMS, 0.0, Flags(0), NO_TIME)
        with self._error_context(batch):
            losses, share = self._losses(cursor, batch, self._state.model), batch.rows / global_rows
            sums = sum_losses(self._task, losses)
            own = (sums.weight / batch.rows or 1.0) if self._config.train.staleness else 1.0
            for p in self._parameters:  # of what the task has left
                p.grad = None
            run_backward(losses.values, self._forward.weights(batch.rows, global_rows * own, 1.0))
        loss = sums.loss / global_rows
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = math.sqrt(math.fsum(n * n for n in torch.stack(torch._foreach_norm(gradients)).tolist())) / share
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._raise_non_finite(cursor, [batch], global_rows, StepResult(loss, norm, [], [], Flags(0), [], []))
        most = self._config.train.grad_clip_norm
        if self._config.train.staleness and most is not None and norm > most:
            torch._foreach_mul_(gradients, most / norm)
        return make_replica_stats(batch, sums, loss, Flags(0), NO_TIME, norm * norm * share)
