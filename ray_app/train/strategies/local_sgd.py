"""Local SGD: every logical worker trains a replica of its own for some steps (a round), then the replicas are averaged.

The method is that of Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. A replica belongs to a
logical worker, and a worker has one replica for each logical worker that it runs, so the number of workers does not
influence the result. In each step a replica is updated by the mean gradient of its own rows, weighted if the task gives
rows weights. At the end of a round the replicas are averaged, each weighted by the weight of its rows in the round
(McMahan et al., AISTATS 2017). The average includes the optimizer's state (Yu et al., ICML 2019), so afterwards there
is one common state. Workers may join and leave between two rounds, and a round that a lost worker interrupts is
repeated from its beginning, with bit-identical results. An outer optimizer applies the average change of the parameters
to the common parameters; with Nesterov momentum that is DiLoCo (Douillard et al., 2023).

`TrainingState` is the common state at the end of a round, with the outer optimizer (`TrainingState.outer`).
`LocalReplica` has the state of one logical worker during a round, and `LocalStep` runs the steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ray_app.data.windows import MicroBatch
from ray_app.errors import PeerLostError
from ray_app.plan.order import Cursor
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.messages import check_errors_on_all_ranks, gather
from ray_app.reduction.reducer import gradient_norms, scale_and_clip, total_norm
from ray_app.reduction.world import World
from ray_app.task.losses import DeviceSums, LossSums, read_sums, sum_on_device
from ray_app.torch_private import run_backward
from ray_app.train.job import Job
from ray_app.train.membership import Flags, Phase
from ray_app.train.state.parameters import load_optimizer, ordered_parameters, parameter_numbers
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import Passes, ReplicaBuffers, raise_non_finite
from ray_app.train.step.step_stats import StepResult, StepStats, StepTimer


def apply_round(
    state: TrainingState, change: list[Tensor], optimizer: dict[str, Any], replica: TrainingState, step: int
) -> None:
    """Advances the common state to the end of a round.

    Args:
        state: The common state.
        change: For each trained parameter the average of what the replicas have subtracted from it in the round; the
            outer optimizer takes it as the gradient.
        optimizer: The averaged state of the optimizer.
        replica: The state of any replica of the round; its schedule is copied.
        step: Finished steps at the end of the round.
    """
    assert state.outer is not None, "train.strategy is local_sgd"
    for p, value in zip((p for p in state.model.parameters() if p.requires_grad), change, strict=True):
        p.grad = value
    state.outer.step()
    state.outer.zero_grad()
    load_optimizer(state.optimizer, optimizer)
    _copy_schedule(state, replica)
    if state.average is not None:
        state.average.update(state.step)
    state.step = step


def _copy_schedule(state: TrainingState, source: TrainingState) -> None:
    """Gives the schedule of a state the state of another one's schedule."""
    if state.schedule is not None and source.schedule is not None:
        state.schedule.load_state_dict(copy.deepcopy(source.schedule.state_dict()))


class LocalReplica:
    """The state that one logical worker trains on its own during a round.

    Args:
        job: The run.
        device: Device to compute on.

    Attributes:
        state: The state. It trains like that of a run with one worker, without a moving average and an outer optimizer,
            which only the common state has.
        passes: Runs forward and backward on its model.
        trained: The trained parameters.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        config = job.config.replace(train__strategy="single", train__ema_decay=None)
        self.state = TrainingState(config, job.task, device, job.total_steps)
        self.passes = Passes(config, job.task, device, self.state.model)
        self.trained = self.passes.parameters

    def load_common_state(self, state: TrainingState) -> None:
        """Loads the common state, from which a round starts."""
        self.state.model.load_state_dict(state.model.state_dict())
        load_optimizer(self.state.optimizer, copy.deepcopy(state.optimizer.state_dict()))
        _copy_schedule(self.state, state)

    def clear_gradients(self) -> None:
        """Drops the gradients."""
        for p in self.trained:
            p.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of the trained parameters that have one."""
        return [p.grad for p in self.trained if p.grad is not None]

    def averaged_names(self) -> list[str]:
        """Returns the names in the optimizer's state that are averaged.

        These are the names under which every value is a tensor of the shape of its parameter, such as a momentum.
        """
        values = [(name, v, p) for p in self.trained for name, v in self.state.optimizer.state[p].items()]
        not_averaged = {name for name, v, p in values if not isinstance(v, Tensor) or v.shape != p.shape}
        return sorted({name for name, _, _ in values} - not_averaged)

    def unaveraged_state(self) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """Returns the part of the optimizer's state that is not averaged, with tensors on the CPU.

        Returns:
            For each parameter, by its number in the optimizer, the values that are not averaged, such as the number of
            steps; and for each parameter group its options and values, such as Prodigy's step size.
        """
        averaged_names, state = self.averaged_names(), dict[int, dict[str, Any]]()
        for i, p in enumerate(ordered_parameters(self.state.optimizer)):
            state[i] = _on_cpu(self.state.optimizer.state[p], averaged_names)
        return state, [_on_cpu(group, ["params"]) for group in self.state.optimizer.param_groups]


def _on_cpu(values: Mapping[str, Any], excluded: list[str]) -> dict[str, Any]:
    """Returns values by name without the excluded names, with each tensor on the CPU."""
    return {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if name not in excluded
    }


def move_to_device_of(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by name, with each tensor moved to the device of the tensor that `others` has under its name."""

    def move(value: Any, other: Any) -> Any:
        return value.to(other.device) if isinstance(value, Tensor) and isinstance(other, Tensor) else value

    return {name: move(value, others.get(name)) for name, value in values.items()}


class LocalStep:
    """Runs the steps of local SGD in one generation of workers.

    During a round `state` does not change, and flags take effect only at its end.

    Args:
        job: The run.
        state: The common state.
        reducer: Sums tensors of the replicas over all logical workers.
        stats: Gathers the statistics of the step.
        world: The workers of the generation.
        device: Device to compute on.
        enter: Called with each phase that the step begins.
        timer: Measures the time of the step; None if nothing compares the times of workers.

    Attributes:
        replicas: The replica of each logical worker of this rank.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        reducer: BucketedReducer,
        stats: StepStats,
        world: World,
        device: torch.device,
        enter: Callable[[Phase], None],
        timer: StepTimer | None,
    ) -> None:
        self._job = job
        self._state = state
        self.reducer = reducer
        self._buffers = ReplicaBuffers(state.model, world)
        self._stats = stats
        self._world = world
        self._enter = enter
        self._timer = timer
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.replicas = {v: LocalReplica(job, device) for v in world.assigned}
        self._begin_round()

    @property
    def lr(self) -> float:
        """Learning rate of the next step, see `Step.lr`."""
        return next(iter(self.replicas.values())).state.lr

    def close(self) -> None:
        """Closes the reducer, see `Step.close`."""
        self.reducer.close()

    def _begin_round(self) -> None:
        """Starts a round from the common state: drops what the replicas have done since its beginning."""
        for replica in self.replicas.values():
            replica.load_common_state(self._state)
        self._finished_steps = self._state.step
        # The weight of the rows of each logical worker in the round, and the flags of all its steps.
        self._round_weights = [0.0] * self._world.logical_workers
        self._round_flags = Flags(0)

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Does one step of every logical worker, see `Step.run`; a collective.

        After the last step of a round the replicas are averaged, and the result has the flags of all steps of the
        round. The results of the other steps have no flags.

        Raises:
            PeerLostError: A peer left meanwhile; all logical workers return to the beginning of the round.
        """
        if self._timer is not None:
            self._timer.begin(len(batches))
        # Forward and backward of each replica.
        device_sums, device_norms = list[DeviceSums | None](), list[list[Tensor]]()
        for batch in batches:
            batch_sums, batch_norms = self._run_replica(cursor, batch)
            device_sums.append(batch_sums)
            device_norms.append(batch_norms)
        if self._timer is not None:
            self._timer.computed()
        # Synchronize, and gather the statistics.
        all_sums, numbers = read_sums(self._job.task, device_sums, [norm for norms in device_norms for norm in norms])
        remaining_norms = iter(numbers)
        norms = [total_norm(islice(remaining_norms, len(batch_norms))) for batch_norms in device_norms]
        shares = []
        for sums, norm in zip(all_sums, norms, strict=True):
            share = sums.weight / global_rows
            shares.append((sums.loss / sums.weight * share, norm * norm * share) if share else (0.0, 0.0))
        self._enter("reduction")
        result = self._stats.gather_batches(batches, all_sums, global_rows, flags, shares)
        if self._timer is not None:
            self._timer.reduced()
        # Check.
        result.check_rows(cursor, global_rows)
        result = result.rescale_to_weight(global_rows)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._raise_non_finite(cursor, batches, all_sums, result)
        # Update each replica, and the common state at the end of a round.
        for batch, norm in zip(batches, norms, strict=True):
            replica = self.replicas[batch.logical_worker]
            if result.weights[batch.logical_worker] > 0:
                scale_and_clip(replica.gradients, 1.0, norm, self._job.config.train.grad_clip_norm)
                replica.state.optimizer_step()
            else:
                replica.state.advance_schedule()
        self._finished_steps += 1
        weights = zip(self._round_weights, result.weights, strict=True)
        self._round_weights = [round_weight + step_weight for round_weight, step_weight in weights]
        self._round_flags |= result.flags
        flags = Flags(0)
        is_run_complete = self._finished_steps == self._job.total_steps
        if self._finished_steps % self._job.steps_per_round == 0 or is_run_complete:
            flags = self._round_flags
            self._average()
        return result._replace(flags=flags)

    def _run_replica(self, cursor: Cursor, batch: MicroBatch) -> tuple[DeviceSums | None, list[Tensor]]:
        """Runs forward and backward of one logical worker on its replica, for the mean loss of its rows.

        Returns:
            The sums of the losses, None without rows; and the norm of each trained parameter's gradient. Both are on
            the device.
        """
        replica = self.replicas[batch.logical_worker]
        replica.clear_gradients()
        if not batch.rows:
            return None, []
        with replica.passes.prepared(batch):
            losses = replica.passes.losses(cursor, batch)
            sums = sum_on_device(losses)
            # The task may have left gradients of its own in `.grad`.
            replica.clear_gradients()
            run_backward(losses.values, _row_weights(replica.passes, sums))
            # An optimizer makes its state for a parameter when the parameter first has a gradient. Without a gradient
            # here, the optimizer would have only the averaged part of its state for the parameter after the round.
            for p in replica.trained:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            return sums, gradient_norms(replica.gradients)

    def _raise_non_finite(
        self, cursor: Cursor, batches: list[MicroBatch], sums: list[LossSums], result: StepResult
    ) -> None:
        """Raises the error that names the rows with a NaN or infinity, see `raise_non_finite`; a collective."""
        bad_rows = []
        for batch, batch_sums in zip(batches, sums, strict=True):
            passes = self.replicas[batch.logical_worker].passes
            bad_rows.append((batch.logical_worker, passes.non_finite_rows(cursor, batch, batch_sums.loss, batch.rows)))
        raise_non_finite(cursor, result, bad_rows, self._world)

    def _average(self) -> None:
        """Advances the common state by the average of the replicas and begins the next round; a collective.

        Raises:
            PeerLostError: A peer left meanwhile; the common state is still that of the beginning of the round.
        """
        state, first = self._state, next(iter(self.replicas.values()))
        # If every row of the round is bad or has no weight, the parameters stay as they are.
        if not any(self._round_weights):
            while state.step < self._finished_steps:
                state.advance_schedule()
            self._begin_round()
            return
        starts = [p.detach().clone() for p in self._parameters]
        optimizer_state = copy.deepcopy(first.state.optimizer.state_dict())
        numbers = parameter_numbers(first.state.optimizer, first.trained)
        # The names are gathered from all ranks, because an optimizer has no state yet if its logical worker has had no
        # rows.
        local_names = {name for replica in self.replicas.values() for name in replica.averaged_names()}
        for name in sorted(set().union(*gather(local_names, self._world))):
            # A parameter without a value counts as zeros.
            values = {
                v: [replica.state.optimizer.state[p].get(name, torch.zeros_like(p)).detach() for p in replica.trained]
                for v, replica in self.replicas.items()
            }
            for i, value in enumerate(self._mean(values)):
                optimizer_state["state"].setdefault(numbers[i], {})[name] = value
        # The values that are not averaged are taken from the logical worker with the highest weight, which is logical
        # worker 0 unless rows were skipped.
        source = self._round_weights.index(max(self._round_weights))
        local_rest = self.replicas[source].unaveraged_state() if source in self.replicas else ({}, [])
        # All ranks except the one with this logical worker send nothing: no groups, which `zip` then skips.
        for state_by_number, groups in gather(local_rest, self._world):
            for i, rest in state_by_number.items():
                optimizer_state["state"].setdefault(i, {}).update(rest)
            for group, rest in zip(optimizer_state["param_groups"], groups, strict=False):
                group.update(move_to_device_of(rest, group))
        decreases = {
            v: [start - p.detach() for start, p in zip(starts, replica.trained, strict=True)]
            for v, replica in self.replicas.items()
        }
        change = self._mean(decreases)
        self._share_buffers()
        apply_round(state, change, optimizer_state, first.state, self._finished_steps)
        self._begin_round()

    def _mean(self, values: dict[int, list[Tensor]]) -> list[Tensor]:
        """Returns the mean over all logical workers, weighted by the weight of their rows in the round; a collective.

        Args:
            values: For each logical worker of this rank a tensor per trained parameter, of its shape.

        Returns:
            A tensor per trained parameter, of its shape.
        """
        total = math.fsum(self._round_weights)
        fractions = {v: self._round_weights[v] / total for v in values}
        return self.reducer.sum({v: [tensor * fractions[v] for tensor in tensors] for v, tensors in values.items()})

    def _share_buffers(self) -> None:
        """Gives the common model of all ranks the buffers of logical worker 0's replica; a collective of all ranks.

        Raises:
            PeerLostError: A peer left meanwhile; the buffers are as before.
        """
        self._buffers.begin()
        try:
            if 0 in self.replicas:
                with torch.no_grad():
                    replica_buffers = self.replicas[0].state.model.buffers()
                    for target, source in zip(self._state.model.buffers(), replica_buffers, strict=True):
                        target.copy_(source)
            self._buffers.launch()
            self._buffers.finish()
            # This checks all collectives of the average, of which the buffers' collective is the last.
            check_errors_on_all_ranks(self._world)
        except PeerLostError:
            self._buffers.roll_back()
            raise


def _row_weights(passes: Passes, sums: DeviceSums) -> Tensor:
    """Returns for each row one over the weight of its micro-batch, or 0 if that has no weight, shape (rows,)."""
    # If the task gives rows weights, their sum is on the device, and the host does not wait for it.
    if sums.metrics is None:
        return passes.weights(sums.rows, sums.rows)
    weight = sums.values[1]
    return torch.where(weight > 0, 1 / weight, 0.0).float().expand(sums.rows)
