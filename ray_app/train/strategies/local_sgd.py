"""The states of local SGD: what all hold at an average, and the replica that each logical worker trains on its own
until the next.

Local SGD: every logical worker goes some steps on its own, then all take the average.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. A replica moves by the mean over its own rows, or
over their weight where the task gives rows weights. The average is weighted by the same, summed over the round (McMahan
et al., AISTATS 2017), and takes in the optimizer's state (Yu et al., ICML 2019), so after it there is one state for
all: workers may come and go between two averages, and what one loses of a round is done again from its beginning, with
the same bits. The change of the parameters is applied by an outer optimizer; with Nesterov momentum that is DiLoCo
(Douillard et al., 2023).

A replica belongs to a logical worker, not to a worker, so the number of workers changes nothing; a worker holds one for
each that it plays.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.data.windows import MicroBatch
from ray_app.errors import PeerLostError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World, check_errors_on_all_ranks, gather, run_backward
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.task.base import DeviceSums, Task, read_sums, sum_on_device
from ray_app.task.user_code import user_code
from ray_app.train.job import Job
from ray_app.train.membership import Flags, Phase
from ray_app.train.state.parameters import load_optimizer, ordered_parameters, parameter_numbers
from ray_app.train.state.state import TrainingState, remove_compiler_hooks
from ray_app.train.step.micro_batch import module_modes, restore_modes
from ray_app.train.step.step import Step, gradient_norms, make_replica_stats, scale_and_clip, total_norm
from ray_app.train.step.step_stats import StepResult
from ray_app.train.step.timing import NO_TIME


class LocalState(TrainingState):
    """What all hold at an average, with the outer optimizer that moves it."""

    def _build_optimizers(self) -> None:
        super()._build_optimizers()
        train = self._config.train
        trained = [p for p in self.model.parameters() if p.requires_grad]
        remove_compiler_hooks(torch.optim.SGD)
        self.outer = torch.optim.SGD(trained, train.outer_lr, train.outer_momentum, nesterov=train.outer_momentum > 0)

    def take_round(self, change: list[Tensor], optimizer: dict[str, Any], replica: TrainingState, step: int) -> None:
        """Ends a round.

        Args:
            change: What the trained parameters lost in the round on average, one tensor each.
            optimizer: The averaged state of the optimizer.
            replica: One that went through the round, for its schedule.
            step: Finished steps.
        """
        for p, value in zip((p for p in self.model.parameters() if p.requires_grad), change, strict=True):
            p.grad = value
        self.outer.step()
        self.outer.zero_grad()
        load_optimizer(self.optimizer, optimizer)
        if self.schedule is not None and replica.schedule is not None:
            self.schedule.load_state_dict(copy.deepcopy(replica.schedule.state_dict()))
        if self.average is not None:
            self.average.update(self.step)
        self.step = step

    def _live(self) -> Snapshot:
        live = super()._live()
        live.more["outer"] = self.outer.state_dict()
        return live

    def load(self, snapshot: Snapshot) -> None:
        """See `TrainingState.load`."""
        super().load(snapshot)
        self.outer.load_state_dict(snapshot.more["outer"])


class LocalReplica(TrainingState):
    """What one logical worker trains on its own."""

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        super().__init__(config.replace(train__ema_decay=None), task, device, total_steps)
        self.trained: list[nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]
        self.modes = module_modes(self.model)

    def follow(self, state: TrainingState) -> None:
        """Starts a round from the common state."""
        self.model.load_state_dict(state.model.state_dict())
        load_optimizer(self.optimizer, copy.deepcopy(state.optimizer.state_dict()))
        if self.schedule is not None and state.schedule is not None:
            self.schedule.load_state_dict(copy.deepcopy(state.schedule.state_dict()))

    def forget(self) -> None:
        """Leaves no gradient."""
        for p in self.trained:
            p.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the trained parameters."""
        return [p.grad for p in self.trained if p.grad is not None]

    def move(self, has_rows: bool) -> None:
        """Makes a step of its own."""
        if has_rows:
            with user_code(lambda: "the update of the parameters"):
                self._task.apply_gradients(self.model, self.optimizer)
        self.advance_schedule()

    def averaged(self) -> list[str]:
        """What of the optimizer's state is averaged: the values that are one per value of every parameter that has
        them.
        """
        held = [(name, v, p) for p in self.trained for name, v in self.optimizer.state[p].items()]
        others = {name for name, v, p in held if not isinstance(v, Tensor) or v.shape != p.shape}
        return sorted({name for name, _, _ in held} - others)

    def values(self, name: str) -> list[Tensor]:
        """One of them for every parameter; zeros where the optimizer has none."""
        return [self.optimizer.state[p].get(name, torch.zeros_like(p)).detach() for p in self.trained]

    def lost(self, starts: list[Tensor]) -> list[Tensor]:
        """What the parameters lost since they were `starts`."""
        return [start - p.detach() for start, p in zip(starts, self.trained, strict=True)]

    def numbers(self) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """The rest of the optimizer's state, such as its number of steps, by the number of the parameter, and what its
        groups have found, as Prodigy's step size; on the CPU, since it is sent.
        """
        averaged, found = self.averaged(), dict[int, dict[str, Any]]()
        for i, p in enumerate(ordered_parameters(self.optimizer)):
            found[i] = _on_cpu(self.optimizer.state[p], averaged)
        return found, [_on_cpu(group, ["params"]) for group in self.optimizer.param_groups]


def _on_cpu(values: Mapping[str, Any], but: list[str]) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items() if name not in but
    }


def move_to_device_of(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Values that were sent, each where another of the same name is."""

    def moved(value: Any, other: Any) -> Any:
        return value.to(other.device) if isinstance(value, Tensor) and isinstance(other, Tensor) else value

    return {name: moved(value, others.get(name)) for name, value in values.items()}


class LocalStep(Step):
    """See the module. `state` stays that of the last average until the next; flags wait for it, too.

    Args:
        job: The run.
        state: What the average changes.
        reducer: Sums the values of the logical workers.
        world: The workers of now.
        device: Where it runs.
        enter: Told what the step is doing.
    """

    def __init__(
        self,
        job: Job,
        state: LocalState,
        reducer: BucketedReducer,
        world: World,
        device: torch.device,
        enter: Callable[[Phase], None],
    ) -> None:
        super().__init__(job.config, job.task, state, reducer, world, device, enter)
        self._job, self._common, self._sums = job, state, reducer
        self._replicas = {v: LocalReplica(job.config, job.task, device, job.total_steps) for v in world.assigned}
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
        found, norms = list[DeviceSums | None](), list[list[Tensor]]()
        for batch in batches:
            with self._error_context(batch):
                sums_there, norms_there = self._go(cursor, batch)
            found.append(sums_there)
            norms.append(norms_there)
        if self._timer is not None:
            self._timer.mark_computed()
        told, numbers = read_sums(self._task, found, [norm for each in norms for norm in each])
        mine, own, rest = [], list[float](), iter(numbers)
        spent = self._timer.breakdown(len(batches), self.data_wait_s) if self._timer is not None else NO_TIME
        for batch, sums, each in zip(batches, told, norms, strict=True):
            norm, share = total_norm(islice(rest, len(each))), sums.weight / global_rows
            own.append(norm)
            loss, square = (sums.loss / sums.weight * share, norm * norm * share) if share else (0.0, 0.0)
            mine.append(make_replica_stats(batch, sums, loss, flags, spent, square))
        self._enter("exchange")
        result = self._check_and_rescale(cursor, self._stats.gather(mine), global_rows)
        if self._timer is not None:
            self._timer.mark_reduced()
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._raise_non_finite(cursor, batches, global_rows, result)
        for batch, norm in zip(batches, own, strict=True):
            replica = self._replicas[batch.logical_worker]
            if has_rows := result.weights[batch.logical_worker] > 0:
                scale_and_clip(replica.gradients, 1.0, norm, self._config.train.grad_clip_norm)
            replica.move(has_rows)
        self._done += 1
        self._consumed = [before + now for before, now in zip(self._consumed, result.weights, strict=True)]
        self._flags |= result.flags
        flags = Flags(0)
        if self._done % self._job.steps_per_round == 0 or self._done == self._job.total_steps:
            flags = self._flags
            self._average()
        return result._replace(flags=flags)

    def _go(self, cursor: Cursor, batch: MicroBatch) -> tuple[DeviceSums | None, list[Tensor]]:
        """Forward and backward of one logical worker on its own replica, of its own mean; what comes of it and norms of
        the gradient.
        """
        replica = self._replicas[batch.logical_worker]
        replica.forget()
        if not batch.rows:
            return None, []
        restore_modes(replica.modes)
        losses = self._losses(cursor, batch, replica.model)
        sums = sum_on_device(losses)
        replica.forget()  # what the task has left
        run_backward(losses.values, self._shares(sums))
        for p in replica.trained:
            if p.grad is None:  # or the optimizer would hold a part of what it needs of it after the average
                p.grad = torch.zeros_like(p)
        return sums, gradient_norms(replica.gradients)

    def _shares(self, sums: DeviceSums) -> Tensor:
        """One over the weight of a micro-batch, which only the device knows where its task gives weights, or 0; shape
        (rows,).
        """
        if sums.metrics is None:
            return self._forward.weights(sums.rows, sums.rows, 1.0)
        weight = sums.values[1]
        return torch.where(weight > 0, 1 / weight, 0.0).float().expand(sums.rows)

    def _trained_model(self, batch: MicroBatch) -> nn.Module:
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
                state.advance_schedule()
            self._begin_round()
            return
        starts = [p.detach().clone() for p in self._parameters]
        held = copy.deepcopy(first.optimizer.state_dict())
        places = parameter_numbers(first.optimizer, first.trained)
        here = {name for replica in self._replicas.values() for name in replica.averaged()}
        for name in sorted(set().union(*gather(here, self._world))):  # a logical worker that had no rows yet knows none
            for i, value in enumerate(self._mean({v: replica.values(name) for v, replica in self._replicas.items()})):
                held["state"].setdefault(places[i], {})[name] = value
        most = self._consumed.index(max(self._consumed))  # logical worker 0, unless rows were skipped
        for found, groups in gather(
            self._replicas[most].numbers() if most in self._replicas else ({}, []), self._world
        ):
            for i, rest in found.items():
                held["state"].setdefault(i, {}).update(rest)
            for group, rest in zip(held["param_groups"], groups, strict=False):
                group.update(move_to_device_of(rest, group))
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
                    for mine, theirs in zip(
                        self._state.model.buffers(), self._replicas[0].model.buffers(), strict=True
                    ):
                        mine.copy_(theirs)
            self._buffers.launch()
            self._buffers.finish()
            check_errors_on_all_ranks(self._world)  # and so has all else of the round
        except PeerLostError:
            self._buffers.roll_back()
            raise
