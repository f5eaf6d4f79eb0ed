"""Local SGD: every logical worker goes some steps on its own, then all take the average.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. A replica moves by the mean over its own rows, or over their weight
where the task gives rows weights. The average is weighted by the same, summed over the round (McMahan et al., AISTATS 2017), and takes in
the optimizer's state (Yu et al., ICML 2019), so after it there is one state for all: workers may come and go between two averages, and what
one loses of a round is done again from its beginning, with the same bits. The change of the parameters is applied by an outer optimizer;
with Nesterov momentum that is DiLoCo (Douillard et al., 2023).

A replica belongs to a logical worker, not to a worker, so the number of workers changes nothing; a worker holds one for each that it plays.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor, nn

from ray_app.data.feed.windows import MicroBatch
from ray_app.errors import PeerLostError
from ray_app.exchange.ddp import DataParallel
from ray_app.exchange.exchange import World, backward_of, gather, settled
from ray_app.plan.cursor import Cursor
from ray_app.task.losses import Unread, read, sums_of
from ray_app.train.group.messages import Flags, Phase
from ray_app.train.job import Job
from ray_app.train.state.groups import numbers
from ray_app.train.step.logical import restore
from ray_app.train.step.norm import correct, norm_of, norms_of
from ray_app.train.step.step import Step, line
from ray_app.train.step.table import StepResult
from ray_app.train.step.timer import UNTOLD
from ray_app.train.strategies.local import LocalState, Replica, beside


class LocalStep(Step):
    """See the module. `state` stays that of the last average until the next; flags wait for it, too.

    Args:
        job: The run.
        state: What the average changes.
        exchange: How values meet.
        world: The workers of now.
        device: Where it runs.
        enter: Told what the step is doing.
    """

    def __init__(
        self, job: Job, state: LocalState, exchange: DataParallel, world: World, device: torch.device, enter: Callable[[Phase], None]
    ) -> None:
        super().__init__(job.config, job.task, state, exchange, world, device, enter)
        self._job, self._common, self._sums = job, state, exchange
        self._replicas = {v: Replica(job.config, job.task, device, job.total_steps) for v in world.played}
        self._begin_round()

    @property
    def lr(self) -> float:
        """See `Step.lr`."""
        return next(iter(self._replicas.values())).lr

    def _begin_round(self) -> None:
        for replica in self._replicas.values():
            replica.follow(self._state)
        self._done, self._consumed, self._flags = self._state.step, [0.0] * self._world.logical_workers, Flags(0)

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """See `Step.run`; a worker that is lost takes all back to the last average."""
        if self._timer is not None:
            self._timer.begin()
        found, norms = list[Unread | None](), list[list[Tensor]]()
        for batch in batches:
            with self._blaming(batch):
                sums_there, norms_there = self._go(cursor, batch)
            found.append(sums_there)
            norms.append(norms_there)
        if self._timer is not None:
            self._timer.computed()
        told, numbers = read(self._task, found, [norm for each in norms for norm in each])
        mine, own, rest = [], list[float](), iter(numbers)
        spent = self._timer.spent(len(batches), self.waited_s) if self._timer is not None else UNTOLD
        for batch, sums, each in zip(batches, told, norms, strict=True):
            norm, share = norm_of(islice(rest, len(each))), sums.weight / global_rows
            own.append(norm)
            loss, square = (sums.loss / sums.weight * share, norm * norm * share) if share else (0.0, 0.0)
            mine.append(line(batch, sums, loss, flags, spent, square))
        self._enter("exchange")
        result = self._settled(cursor, self._table.exchange(mine), global_rows)
        if self._timer is not None:
            self._timer.met()
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._refuse(cursor, batches, global_rows, result)
        for batch, norm in zip(batches, own, strict=True):
            replica = self._replicas[batch.logical_worker]
            if has_rows := result.weights[batch.logical_worker] > 0:
                correct(replica.gradients, 1.0, norm, self._config.train.grad_clip_norm)
            replica.move(has_rows)
        self._done += 1
        self._consumed = [before + now for before, now in zip(self._consumed, result.weights, strict=True)]
        self._flags |= result.flags
        flags = Flags(0)
        if self._done % self._job.steps_per_round == 0 or self._done == self._job.total_steps:
            flags = self._flags
            self._average()
        return result._replace(flags=flags)

    def _go(self, cursor: Cursor, batch: MicroBatch) -> tuple[Unread | None, list[Tensor]]:
        """Forward and backward of one logical worker on its own replica, of its own mean; what comes of it and norms of the gradient."""
        replica = self._replicas[batch.logical_worker]
        replica.forget()
        if not batch.rows:
            return None, []
        restore(replica.modes)
        losses = self._losses(cursor, batch, replica.model)
        sums = sums_of(losses)
        replica.forget()  # what the task has left
        backward_of(losses.values, self._shares(sums))
        for p in replica.trained:
            if p.grad is None:  # or the optimizer would hold a part of what it needs of it after the average
                p.grad = torch.zeros_like(p)
        return sums, norms_of(replica.gradients)

    def _shares(self, sums: Unread) -> Tensor:
        """One over the weight of a micro-batch, which only the device knows where its task gives weights, or 0; shape (rows,)."""
        if sums.metrics is None:
            return self._forward.weights(sums.rows, sums.rows, 1.0)
        weight = sums.values[1]
        return torch.where(weight > 0, 1 / weight, 0.0).float().expand(sums.rows)

    def _trained_by(self, batch: MicroBatch) -> nn.Module:
        return self._replicas[batch.logical_worker].model

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        replica = self._replicas[batch.logical_worker]
        loss = self._losses(cursor, batch, replica.model).values.sum() / batch.rows
        gradients = torch.autograd.grad(loss, replica.trained, allow_unused=True)
        return bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients if g is not None)

    def _average(self) -> None:
        """Makes the state that of the end of the round; a collective of all ranks.

        Raises:
            PeerLostError: A peer left meanwhile; the state is that of the beginning of the round.
        """
        state, first = self._common, next(iter(self._replicas.values()))
        if not any(self._consumed):  # every row of the round is bad, or counts for nothing: nothing moves
            while state.step < self._done:
                state.pass_over()
            self._begin_round()
            return
        starts = [p.detach().clone() for p in self._parameters]
        held = copy.deepcopy(first.optimizer.state_dict())
        places = numbers(first.optimizer, first.trained)
        here = {name for replica in self._replicas.values() for name in replica.averaged()}
        for name in sorted(set().union(*gather(here, self._world))):  # a logical worker that had no rows yet knows none
            for i, value in enumerate(self._mean({v: replica.values(name) for v, replica in self._replicas.items()})):
                held["state"].setdefault(places[i], {})[name] = value
        most = self._consumed.index(max(self._consumed))  # logical worker 0, unless rows were skipped
        for found, groups in gather(self._replicas[most].numbers() if most in self._replicas else ({}, []), self._world):
            for i, rest in found.items():
                held["state"].setdefault(i, {}).update(rest)
            for group, rest in zip(held["param_groups"], groups, strict=False):
                group.update(beside(rest, group))
        change = self._mean({v: replica.lost(starts) for v, replica in self._replicas.items()})
        self._share_buffers()
        state.take_round(change, held, first, self._done)
        self._begin_round()

    def _mean(self, values: dict[int, list[Tensor]]) -> list[Tensor]:
        """The mean over all logical workers, weighted by what their rows counted in this round.

        Args:
            values: Those of the replicas here, one per trained parameter.
        """
        total = math.fsum(self._consumed)
        return self._sums.sum({v: [value * (self._consumed[v] / total) for value in own] for v, own in values.items()})

    def _share_buffers(self) -> None:
        """Gives all ranks the buffers of logical worker 0, or none."""
        self._buffers.begin()
        try:
            if 0 in self._replicas:
                with torch.no_grad():
                    for mine, theirs in zip(self._state.model.buffers(), self._replicas[0].model.buffers(), strict=True):
                        mine.copy_(theirs)
            self._buffers.launch()
            self._buffers.finish()
            settled(self._world)  # and so has all else of the round
        except PeerLostError:
            self._buffers.roll_back()
            raise
