"""Local SGD: every logical worker trains on its own for some steps, then all take the average.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. A replica belongs to a logical worker, not to a
worker, so the number of workers changes nothing; a worker has one replica for each logical worker that it runs. A
replica moves by the mean over its own rows, or over their weight if the task gives rows weights. The average is
weighted by the same, summed over the round (McMahan et al., AISTATS 2017), and includes the optimizer's state (Yu et
al., ICML 2019), so after it there is one state for all: workers may join and leave between two averages, and a round
that a lost worker interrupts is repeated from its beginning, with bit-identical results. An outer optimizer applies the
change of the parameters; with Nesterov momentum that is DiLoCo (Douillard et al., 2023).

`LocalState` is the common state at an average, `LocalReplica` the state of one logical worker until the next one, and
`LocalStep` runs the steps.
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
    """The common state of all logical workers at an average, with the outer optimizer that updates it."""

    def _build_optimizers(self) -> None:
        super()._build_optimizers()
        train = self._config.train
        trained = [p for p in self.model.parameters() if p.requires_grad]
        remove_compiler_hooks(torch.optim.SGD)
        self.outer = torch.optim.SGD(trained, train.outer_lr, train.outer_momentum, nesterov=train.outer_momentum > 0)

    def take_round(self, change: list[Tensor], optimizer: dict[str, Any], replica: TrainingState, step: int) -> None:
        """Makes this the state at the end of a round.

        Args:
            change: Average decrease of each trained parameter in the round, as one tensor each.
            optimizer: The averaged state of the optimizer.
            replica: A replica of the round, for the state of its schedule.
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
        """Loads the state of a snapshot, see `TrainingState.load`."""
        super().load(snapshot)
        self.outer.load_state_dict(snapshot.more["outer"])


class LocalReplica(TrainingState):
    """The state that one logical worker trains on its own during a round."""

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
        """Drops the gradients."""
        for p in self.trained:
            p.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of the trained parameters."""
        return [p.grad for p in self.trained if p.grad is not None]

    def move(self, has_rows: bool) -> None:
        """Updates the parameters if the step had rows with weight, and advances the schedule."""
        if has_rows:
            with user_code(lambda: "the update of the parameters"):
                self._task.apply_gradients(self.model, self.optimizer)
        self.advance_schedule()

    def averaged(self) -> list[str]:
        """Returns the names of the optimizer's values that are averaged: those with the shape of their parameter."""
        values = [(name, v, p) for p in self.trained for name, v in self.optimizer.state[p].items()]
        others = {name for name, v, p in values if not isinstance(v, Tensor) or v.shape != p.shape}
        return sorted({name for name, _, _ in values} - others)

    def values(self, name: str) -> list[Tensor]:
        """Returns an averaged value of the optimizer for every parameter; zeros where the optimizer has none."""
        return [self.optimizer.state[p].get(name, torch.zeros_like(p)).detach() for p in self.trained]

    def lost(self, starts: list[Tensor]) -> list[Tensor]:
        """Returns the decrease of the parameters since they were `starts`."""
        return [start - p.detach() for start, p in zip(starts, self.trained, strict=True)]

    def numbers(self) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """Returns the rest of the optimizer's state, which is not averaged, on the CPU.

        This is the state by the number of the parameter, such as the number of steps, and the state that the parameter
        groups have, such as Prodigy's step size.
        """
        averaged, state = self.averaged(), dict[int, dict[str, Any]]()
        for i, p in enumerate(ordered_parameters(self.optimizer)):
            state[i] = _on_cpu(self.optimizer.state[p], averaged)
        return state, [_on_cpu(group, ["params"]) for group in self.optimizer.param_groups]


def _on_cpu(values: Mapping[str, Any], excluded: list[str]) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if name not in excluded
    }


def move_to_device_of(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with each tensor on the device of the other tensor of its name."""

    def move(value: Any, other: Any) -> Any:
        return value.to(other.device) if isinstance(value, Tensor) and isinstance(other, Tensor) else value

    return {name: move(value, others.get(name)) for name, value in values.items()}


class LocalStep(Step):
    """Runs the steps of local SGD in one generation of workers.

    `state` stays that of the last average until the next one, and flags take effect only then.

    Args:
        job: The run.
        state: The common state.
        reducer: Sums the values of the logical workers.
        world: The workers of the generation.
        device: Device to compute on.
        enter: Called with each phase that the step begins.
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
        """Learning rate of the next step, see `Step.lr`."""
        return next(iter(self._replicas.values())).lr

    def _begin_round(self) -> None:
        for replica in self._replicas.values():
            replica.follow(self._state)
        self._finished_steps = self._state.step
        self._round_weights = [0.0] * self._world.logical_workers
        self._flags = Flags(0)

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Does one step of every logical worker, see `Step.run`.

        A lost worker takes all logical workers back to the last average.
        """
        if self._timer is not None:
            self._timer.begin()
        device_sums, device_norms = list[DeviceSums | None](), list[list[Tensor]]()
        for batch in batches:
            with self._error_context(batch):
                batch_sums, batch_norms = self._run_replica(cursor, batch)
            device_sums.append(batch_sums)
            device_norms.append(batch_norms)
        if self._timer is not None:
            self._timer.mark_computed()
        all_sums, numbers = read_sums(self._task, device_sums, [norm for norms in device_norms for norm in norms])
        stats, norms, remaining = [], list[float](), iter(numbers)
        time_breakdown = self._timer.breakdown(len(batches), self.data_wait_s) if self._timer is not None else NO_TIME
        for batch, sums, batch_norms in zip(batches, all_sums, device_norms, strict=True):
            norm, share = total_norm(islice(remaining, len(batch_norms))), sums.weight / global_rows
            norms.append(norm)
            loss, square = (sums.loss / sums.weight * share, norm * norm * share) if share else (0.0, 0.0)
            stats.append(make_replica_stats(batch, sums, loss, flags, time_breakdown, square))
        self._enter("exchange")
        result = self._check_and_rescale(cursor, self._stats.gather(stats), global_rows)
        if self._timer is not None:
            self._timer.mark_reduced()
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._raise_non_finite(cursor, batches, global_rows, result)
        for batch, norm in zip(batches, norms, strict=True):
            replica = self._replicas[batch.logical_worker]
            if has_rows := result.weights[batch.logical_worker] > 0:
                scale_and_clip(replica.gradients, 1.0, norm, self._config.train.grad_clip_norm)
            replica.move(has_rows)
        self._finished_steps += 1
        weights = zip(self._round_weights, result.weights, strict=True)
        self._round_weights = [round_weight + step_weight for round_weight, step_weight in weights]
        self._flags |= result.flags
        flags = Flags(0)
        is_run_complete = self._finished_steps == self._job.total_steps
        if self._finished_steps % self._job.steps_per_round == 0 or is_run_complete:
            flags = self._flags
            self._average()
        return result._replace(flags=flags)

    def _run_replica(self, cursor: Cursor, batch: MicroBatch) -> tuple[DeviceSums | None, list[Tensor]]:
        """Runs forward and backward of one logical worker on its own replica, for the mean over its own rows.

        Returns:
            The sums of its losses and norms of parts of its gradient, on the device.
        """
        replica = self._replicas[batch.logical_worker]
        replica.forget()
        if not batch.rows:
            return None, []
        restore_modes(replica.modes)
        losses = self._losses(cursor, batch, replica.model)
        sums = sum_on_device(losses)
        # The task may have left gradients of its own.
        replica.forget()
        run_backward(losses.values, self._row_weights(sums))
        # Without a gradient the optimizer would have only the averaged part of its state for a parameter.
        for p in replica.trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return sums, gradient_norms(replica.gradients)

    def _row_weights(self, sums: DeviceSums) -> Tensor:
        """Returns for each row one over the weight of its micro-batch, or 0 without weight, shape (rows,).

        If the task gives weights, only the device has their sum.
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
        """Makes the common state the average of the round; a collective of all ranks.

        Raises:
            PeerLostError: A peer left meanwhile; the state is that of the beginning of the round.
        """
        state, first = self._common, next(iter(self._replicas.values()))
        # Every row of the round is bad or has no weight: the parameters stay as they are.
        if not any(self._round_weights):
            while state.step < self._finished_steps:
                state.advance_schedule()
            self._begin_round()
            return
        starts = [p.detach().clone() for p in self._parameters]
        optimizer_state = copy.deepcopy(first.optimizer.state_dict())
        numbers = parameter_numbers(first.optimizer, first.trained)
        # The names are gathered, because the optimizer of a logical worker without rows so far has no state.
        local_names = {name for replica in self._replicas.values() for name in replica.averaged()}
        for name in sorted(set().union(*gather(local_names, self._world))):
            for i, value in enumerate(self._mean({v: replica.values(name) for v, replica in self._replicas.items()})):
                optimizer_state["state"].setdefault(numbers[i], {})[name] = value
        # The rest comes from the logical worker with the highest weight: logical worker 0, unless rows were skipped.
        source = self._round_weights.index(max(self._round_weights))
        local_rest = self._replicas[source].numbers() if source in self._replicas else ({}, [])
        for state_by_number, groups in gather(local_rest, self._world):
            for i, rest in state_by_number.items():
                optimizer_state["state"].setdefault(i, {}).update(rest)
            for group, rest in zip(optimizer_state["param_groups"], groups, strict=False):
                group.update(move_to_device_of(rest, group))
        change = self._mean({v: replica.lost(starts) for v, replica in self._replicas.items()})
        self._share_buffers()
        state.take_round(change, optimizer_state, first, self._finished_steps)
        self._begin_round()

    def _mean(self, values: dict[int, list[Tensor]]) -> list[Tensor]:
        """Returns the mean over all logical workers, weighted by their rows' weight in this round; a collective.

        Args:
            values: For each logical worker of this rank one value per trained parameter.
        """
        total = math.fsum(self._round_weights)
        fractions = {v: self._round_weights[v] / total for v in values}
        return self._sums.sum({v: [value * fractions[v] for value in of_worker] for v, of_worker in values.items()})

    def _share_buffers(self) -> None:
        """Gives all ranks the buffers of logical worker 0, or restores the old ones if that fails; a collective."""
        self._buffers.begin()
        try:
            if 0 in self._replicas:
                with torch.no_grad():
                    replica_buffers = self._replicas[0].model.buffers()
                    for target, source in zip(self._state.model.buffers(), replica_buffers, strict=True):
                        target.copy_(source)
            self._buffers.launch()
            self._buffers.finish()
            # It checks all collectives of the round, of which this is the last.
            check_errors_on_all_ranks(self._world)
        except PeerLostError:
            self._buffers.roll_back()
            raise
