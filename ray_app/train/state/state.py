"""The training state: model, optimizer, schedule, loss scale, parameter average and the number of finished steps.

`TrainingState` is what a step changes, what a checkpoint contains and what a joining worker receives. It is made of
parts, of which a strategy chooses two:

- `Placement` says where this rank has the parameters that its optimizer updates. All its methods are local.
- `StateSync` moves the state between the ranks of a generation. Its methods are the only collectives of a state.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.config.import_paths import TASK_OPTIMIZER, OptimizerSpec, explain_constructor, load_class
from ray_app.config.sections import ClassSpec, TrainSection
from ray_app.devices import KINDS
from ray_app.errors import CheckpointError, ConfigError
from ray_app.plan.hashing import key
from ray_app.reduction.messages import gather
from ray_app.reduction.reducer import state_checksum
from ray_app.reduction.world import World
from ray_app.task.base import Task
from ray_app.task.interventions import Intervention
from ray_app.task.precision import LossScale
from ray_app.task.user_code import user_code
from ray_app.torch_private import remove_compiler_hooks
from ray_app.train.state.alternating_optimizers import Turns, TurnSchedules
from ray_app.train.state.parameters import (
    ParameterAverage,
    check_group_options,
    freeze_parameters,
    group_parameters,
    load_initial_parameters,
    load_optimizer,
    make_contiguous,
    with_counters,
)
from ray_app.train.state.transfer import (
    copy_to_host,
    divergent_ranks,
    ranks_without_state,
    snapshot_checksum,
    transfer_snapshot,
)

NO_STATE = -1
"""The value of `TrainingState.step` while a worker has no state yet."""
_NO_TRUSTED_STATE = (
    "After a failure, the remaining workers have different states of the same step, and there is no checkpoint or"
    " snapshot to continue from. Start again with a lower checkpoint.every_steps."
)


class Trainable(Protocol):
    """The part of a task that a training state needs."""

    def build_model(self) -> nn.Module:
        """Returns the model, see `Task.build_model`."""

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Updates the parameters, see `Task.apply_gradients`."""


class Placement:
    """Where a rank has the parameters that its optimizer updates: here all of them, in the model that computes.

    Every method is local. With `fsdp` an optimizer that looks at whole parameters communicates by itself.
    """

    builds_anew = False
    """Whether each generation builds the model anew, so that the model of a new state needs no values."""

    def build_model(self, build: Callable[[], nn.Module], needs_values: bool) -> nn.Module:
        """Returns the model that `build` builds; it may be without values, unless it `needs_values`."""
        del needs_values
        return build()

    def make_sync(self, state: TrainingState) -> StateSync:
        """Returns the `StateSync` of a state with this placement; called once, when the state is complete."""
        return StateSync(state)

    def make_master(self, model: nn.Module, build_model: Callable[[], nn.Module]) -> nn.Module:
        """Returns the model that the optimizer updates; `build_model` builds the model once more."""
        del build_model
        return model

    def build_optimizer(
        self,
        build: Callable[[list[Any], bool], Optimizer],
        make_groups: Callable[[Mapping[str, nn.Parameter]], list[Any]],
        named: Mapping[str, nn.Parameter],
        optimizer_class: type[Optimizer],
    ) -> Optimizer:
        """Returns the optimizer of a class for parameters by name.

        Args:
            build: Builds it from parameters or groups of them, and from whether one kernel may update all of them.
            make_groups: Returns the trained ones of parameters by name, in groups if the configuration has groups.
            named: The parameters of the master model.
            optimizer_class: The class.
        """
        del optimizer_class
        return build(make_groups(named), True)

    def update(self, apply: Callable[[], None]) -> None:
        """Calls `apply`, which updates the parameters of the master model, if this rank updates them."""
        apply()


class StateSync:
    """Moves a training state between the ranks of a generation; here a state of which every rank has the whole.

    Every method is a collective of all ranks, unless it is called local. Most have nothing to do here.

    Args:
        state: The state.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """Binds the state to the workers of a generation; the block lasts from before `share` to the generation's end.

        Yields the workers, with the assignment of logical workers that this strategy needs.
        """
        yield world

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """Gives all ranks the state of the highest step, after which all states are equal.

        Args:
            world: The workers of the generation.
            restore: Gives this rank the state of a snapshot or checkpoint, or the initial one. If no rank has a state,
                it is called on rank 0, or on all ranks if the state is sharded.
            was_broken: Whether the last generation broke for this rank. If it did for any rank, the ranks at the
                highest step compare their parameters.

        Returns:
            The divergent ranks: ranks at the highest step with other parameters than the majority, or all ranks at that
            step if there is no majority. Their states have been replaced.

        Raises:
            CheckpointError: No rank has a state that a majority agrees on, nor is there one to restore.
            PeerLostError: A peer left meanwhile.
        """
        state = self._state
        steps, divergent = self._agreed_steps(world, was_broken)
        if max(steps) == NO_STATE:
            if world.rank == 0:
                restore()
                # At step 0 there was nothing to restore, so the state is the initial one. To continue with it would
                # repeat the whole run.
                if divergent and state.step == 0:
                    raise CheckpointError(_NO_TRUSTED_STATE)
            steps = self._begin_alike(world) if world.size > 1 else [state.step]
        source = steps.index(max(steps))
        to = ranks_without_state(steps, source)
        live = state.live() if world.rank == source and to else None
        received = transfer_snapshot(live, world, source, to, state.device)
        if world.rank in to:
            assert received is not None
            state.load(received)
        return divergent

    def _begin_alike(self, world: World) -> list[int]:
        """Begins at step 0 if this rank has built the state with which rank 0 does; returns the step of every rank.

        All ranks build the same state from the seed, unless the task draws from a generator of its own.
        """
        state = self._state
        checksums = gather((state.step, snapshot_checksum(state.live()) if state.step <= 0 else None), world)
        first_step, first = checksums[0]
        steps = [first_step if (first_step, checksum) == (0, first) else NO_STATE for _, checksum in checksums]
        steps[0] = first_step
        state.step = max(state.step, steps[world.rank])
        return steps

    def _agreed_steps(self, world: World, was_broken: bool) -> tuple[list[int], list[int]]:
        """Returns the step of every rank, with `NO_STATE` for divergent ranks, and the divergent ranks.

        Checksums of the parameters take time, so they are compared only after a broken generation.
        """
        state = self._state
        reports = gather((state.step, was_broken), world)
        steps, divergent = [step for step, _ in reports], list[int]()
        if any(broken for _, broken in reports) and steps.count(max(steps)) > 1 and max(steps) > NO_STATE:
            is_newest = state.step == max(steps)
            checksum = state_checksum(state.master.state_dict().values()) if is_newest else None
            divergent = divergent_ranks(steps, gather(checksum, world))
        return [NO_STATE if rank in divergent else step for rank, step in enumerate(steps)], divergent

    def broadcast_parameters(self, averaged: bool = False) -> None:
        """Gives the model of every rank the present parameters, if only some ranks have them.

        Args:
            averaged: Whether they are the averaged ones, see `TrainingState.eval_model`.

        Raises:
            PeerLostError: A peer left meanwhile; the state is unchanged.
        """

    def send_replicas(self) -> None:
        """Gives other ranks copies of this rank's part of the state after a step; a lost peer is only logged."""

    def collect(self) -> None:
        """Collects a whole copy on every rank if only some ranks have the state, so that each can make a `snapshot`.

        Raises:
            PeerLostError: A peer left meanwhile.
        """

    def end_generation(self, leaves: bool) -> None:
        """Ends a generation as planned, with this rank if it `leaves`; raises `PeerLostError` if a peer left before."""

    def snapshot(self, into: Snapshot | None) -> Snapshot:
        """Returns a copy of the state, see `TrainingState.snapshot`; local."""
        return self._state.copy_to_host(into)

    def adopt(self, snapshot: Snapshot) -> None:
        """Makes a snapshot the state of this rank, which `share` then gives to the others; local."""
        self._state.load(snapshot)


class TrainingState:
    """The state of a training run in one worker. Only the methods of `sync` communicate with other ranks.

    Args:
        config: The run's configuration, which names optimizer and schedule.
        task: Builds the model and applies gradients to it.
        device: Device of the model.
        total_steps: Steps of the run. A schedule with an argument `total_steps` gets this number if the configuration
            does not set the argument.
        placement: Where this rank has the parameters; None for all parameters in the model.

    Attributes:
        device: Device of the model.
        step: Finished steps; `NO_STATE` before a state is loaded or initialized.
        model: The model that computes.
        master: The model that the optimizer updates: `model` itself, unless the placement has a second model for it.
        optimizer: The optimizer; with `optimizers` in the configuration the same object as `turns`.
        turns: The optimizers that take turns; None if there is only one optimizer.
        schedule: The schedule of the learning rate, or the schedules of the optimizers that take turns; may be None.
        average: The moving average of the parameters; None without `train.ema_decay`.
        scale: The loss scale; None unless `train.precision` is `fp16`, or the task has one.
        outer: The outer optimizer of `local_sgd`, which updates the parameters at the end of a round; else None.
        metric_states: The states of metrics over the rows of the epoch so far, see `Task.running_metrics`.
        sync: Moves the state between ranks.
        placement: Says where a rank has the parameters that its optimizer updates.
    """

    def __init__(
        self,
        config: Config,
        task: Trainable,
        device: torch.device,
        total_steps: int,
        placement: Placement | None = None,
    ) -> None:
        self._config = config
        self._task = task
        self.device = device
        self._total_steps = total_steps
        self.placement = placement or Placement()
        self._has_own_update = isinstance(task, Task) and type(task).apply_gradients is not Task.apply_gradients
        self.step = NO_STATE
        self.metric_states: list[float] = []
        self.model, self._frozen_layers = self._build_model(not self.placement.builds_anew)
        if not self.placement.builds_anew:
            self.model.to(device)
        self.master = self.placement.make_master(self.model, lambda: self._build_model()[0])
        self._build_optimizers()
        self.sync = self.placement.make_sync(self)

    def rebuild(self, prepare: Callable[[nn.Module], None], needs_values: bool) -> None:
        """Frees model and optimizers and builds them anew; `prepare` changes the new model in place before that.

        The new model may be without values, unless it `needs_values`.

        The old ones, reference cycles that the loop may have frozen, are freed first: memory may not suffice for both.
        """
        self.model = self.master = nn.Module()
        for name in ("optimizer", "schedule", "turns", "average", "_frozen_layers"):
            vars(self).pop(name, None)
        is_frozen = gc.get_freeze_count() > 0
        gc.unfreeze()
        gc.collect()
        if is_frozen:
            gc.freeze()
        self.model, self._frozen_layers = self._build_model(needs_values)
        prepare(self.model)
        self.master = self.model
        self._build_optimizers()

    def _build_model(self, needs_values: bool = True) -> tuple[nn.Module, list[nn.Module]]:
        """Returns the model that the task builds with generators seeded by the run's seed, and its frozen layers."""

        def build() -> nn.Module:
            seed_init(self._config.seed, self.device)
            return make_contiguous(self._task.build_model())

        model = self.placement.build_model(build, needs_values)
        frozen = freeze_parameters(model, self._config.train.freeze or [])
        keeps_modes = isinstance(self._task, Task) and self._task.keeps_modes
        return model, [*frozen, *(layer for layer in model.modules() if keeps_modes and not layer.training)]

    def _build_optimizers(self) -> None:
        """Builds the parts that belong to the master model: optimizers, schedule, parameter average, loss scale."""
        config, model = self._config, self.master
        self.train()
        self.average = ParameterAverage(model, config.train.ema_decay) if config.train.ema_decay is not None else None
        state = self._task.initial_loss_scale() if isinstance(self._task, Task) else None
        self.scale = LossScale(state) if config.train.precision == "fp16" or state else None
        has_outer = config.train.strategy_traits.has_outer_optimizer
        self.outer = _make_outer_optimizer(model, config.train) if has_outer else None
        named, self.turns = dict(model.named_parameters()), None
        self.optimizer: Optimizer
        self.schedule: LRScheduler | TurnSchedules | None = None
        if config.optimizers is not None:
            assert isinstance(self._task, Task), "only a Task has losses for several optimizers"
            self.optimizer = self.turns = Turns(config.optimizers, named, self._build_optimizer, self._task.phases())
            self.schedule = TurnSchedules(config.optimizers, self.turns, self._total_steps, make_schedule)
            return
        if config.optimizer.class_path == TASK_OPTIMIZER:
            assert isinstance(self._task, Task), "config checks refuse it for strategies without a Task"
            self.optimizer, self.schedule = self._task.configure_optimizers(model)
            # What the optimizer does not have gets no gradient, so that it counts neither in the norm nor in clipping.
            if type(self._task).apply_gradients is Task.apply_gradients:
                optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
                for p, computing in zip(model.parameters(), self.model.parameters(), strict=True):
                    if id(p) not in optimized:
                        p.requires_grad_(False)
                        computing.requires_grad_(False)
        else:
            self.optimizer = self._build_optimizer(config.optimizer, named)
        if config.schedule is not None:
            if self.schedule is not None:
                raise ConfigError(
                    f"schedule is {config.schedule.class_path}, but the task returns a {type(self.schedule).__name__}"
                    " with its optimizer; a run has one schedule. Leave schedule out, or return only the optimizer."
                )
            self.schedule = make_schedule(config.schedule, self.optimizer, self._total_steps)

    def _build_optimizer(
        self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter], field: str = "optimizer"
    ) -> Optimizer:
        """Returns the optimizer of a specification for parameters by name; `field` names its section in errors."""
        optimizer_class, args = load_class(spec), dict(spec.init_args)
        if not self._config.train.compile:
            remove_compiler_hooks(optimizer_class)

        def make_groups(parameters: Mapping[str, nn.Parameter]) -> list[Any]:
            if spec.groups:
                return group_parameters(parameters, spec.groups, f"{field}.groups")
            return [p for p in parameters.values() if p.requires_grad]

        def build(groups: list[Any], may_fuse: bool) -> Optimizer:
            # PyTorch itself fuses an optimizer on a CPU only if it is asked to.
            can_fuse = may_fuse and "fused" in inspect.signature(optimizer_class).parameters
            can_fuse &= all(p.is_floating_point() for p in self.master.parameters() if p.requires_grad)
            if can_fuse and not {"fused", "foreach", "differentiable"} & args.keys():
                args["fused"] = True
            with explain_constructor(f"{field}.class_path", spec.class_path, args):
                return optimizer_class(groups, **args)

        optimizer = self.placement.build_optimizer(build, make_groups, named, optimizer_class)
        check_group_options(optimizer, spec.groups or [], f"{field}.groups")
        return optimizer

    def initialize(self, initial: dict[str, Tensor] | None) -> None:
        """Makes this the state before the first step.

        Args:
            initial: The initial parameters and persistent buffers by name; None keeps the values with which the task
                has built the model.

        Raises:
            ConfigError: The parameters do not fit the model.
        """
        if initial is not None:
            load_initial_parameters(self.master, initial, self._config.train.init_from)
            if self.average is not None:
                self.average.load(initial, initial)
        self.step = 0

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group of the next step's optimizer.

        This group has the parameters that belong to no group of the configuration, if there are such parameters.
        """
        return float(self._next_optimizer.param_groups[0]["lr"])

    @property
    def _next_optimizer(self) -> Optimizer:
        """The optimizer that the next step uses."""
        return self.optimizer if self.turns is None else self.turns.optimizer_at(self.step)

    def train(self) -> None:
        """Puts the model into training mode, except for the layers that stay in evaluation mode."""
        self.model.train()
        for layer in self._frozen_layers:
            layer.training = False

    @contextmanager
    def eval_model(self) -> Iterator[nn.Module]:
        """Yields the model that is evaluated: with averaged parameters inside the block, if the run averages them.

        The block has to call `sync.broadcast_parameters` before it uses the model. Afterwards the model is in training
        mode, and the next step has its trained parameters again.
        """
        try:
            average: Any = self.average.in_place() if self.average is not None else nullcontext()
            if hasattr(self.optimizer, "average_in_place"):
                average = self.optimizer.average_in_place()
            with average:
                yield self.model
        finally:
            self.train()

    def optimizer_step(self) -> None:
        """Finishes a step: updates the parameters by their gradients, then the average, and advances the schedule."""
        self.placement.update(self._apply_gradients)
        self.advance_schedule()
        if self.scale is not None:
            self.scale.update(True)

    def _apply_gradients(self) -> None:
        """Updates the parameters of the master model and their average."""
        optimizer = self._next_optimizer
        if self._has_own_update or not type(optimizer).__module__.startswith("torch."):
            # It may draw, the generators of the ranks differ after their logical workers, and the parameters must not.
            seed_step(self._config.seed, 0, self.step, _UPDATE, self.device)
        with user_code(lambda: "the update of the parameters"):
            self._task.apply_gradients(self.master, optimizer)
        if self.average is not None:
            self.average.update(self.step)

    def advance_schedule(self) -> None:
        """Finishes a step without an update of the parameters: advances the schedule and counts the step."""
        if isinstance(self.schedule, TurnSchedules):
            self.schedule.step(self.step)
        elif self.schedule is not None:
            self.schedule.step()
        self.step += 1 if self.turns is None else self.turns.end_phase()

    def apply(self, change: Intervention) -> None:
        """Applies a change between two epochs."""
        if change.parameters is not None:
            self.master.load_state_dict(dict(change.parameters))
        if change.lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = change.lr

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """Returns a copy of the state in host memory, of a sharded state that of this rank's part.

        Args:
            into: A snapshot that is no longer needed. Its memory may be reused, because new memory is slower to write.
        """
        return self.sync.snapshot(into)

    def copy_to_host(self, into: Snapshot | None = None) -> Snapshot:
        """Returns a copy of what this rank has of the state, see `snapshot`."""
        return Snapshot(**copy_to_host(vars(self.live()), vars(into) if into is not None else None))

    def live(self) -> Snapshot:
        """Returns the state in the form of a checkpoint; its tensors are not copies, so training changes them."""
        model, extra_state = self.master.state_dict(), dict[str, Any]()
        if self.average is not None:
            model, extra_state["parameters"] = self.average.averaged_state(model), self.average.parameters()
        if self.scale is not None:
            extra_state["scale"] = self.scale.state()
        if self.outer is not None:
            extra_state["outer"] = self.outer.state_dict()
        if self.metric_states:
            extra_state["metrics"] = torch.tensor(self.metric_states, dtype=torch.float64)
        schedule = self.schedule.state_dict() if self.schedule is not None else None
        return Snapshot(self.step, model, self.optimizer.state_dict(), schedule, extra_state)

    def load(self, snapshot: Snapshot) -> None:
        """Loads a snapshot into what this rank has of the state."""
        self.master.load_state_dict(snapshot.model)
        if self.average is not None:
            self.average.load(snapshot.model, snapshot.extra_state["parameters"])
        if self.scale is not None:
            self.scale.load(snapshot.extra_state["scale"])
        if self.outer is not None:
            self.outer.load_state_dict(snapshot.extra_state["outer"])
        self.metric_states = snapshot.extra_state["metrics"].tolist() if "metrics" in snapshot.extra_state else []
        if self.turns is not None:
            self.turns.load_state_dict(snapshot.optimizer)
        else:
            load_optimizer(self.optimizer, snapshot.optimizer)
        if self.schedule is not None and snapshot.schedule is not None:
            self.schedule.load_state_dict(with_counters(snapshot.schedule, self.schedule.state_dict()))
        self.step = snapshot.step


def _make_outer_optimizer(model: nn.Module, train: TrainSection) -> torch.optim.SGD:
    """Returns the optimizer that takes the average change of the replicas in a round as a gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    remove_compiler_hooks(torch.optim.SGD)
    return torch.optim.SGD(trained, train.outer_lr, train.outer_momentum, nesterov=train.outer_momentum > 0)


# The salts of the keys are different, so that building the model and the steps draw different random numbers.
_INIT_SALT, _STEP_SALT = 21, 22
_UPDATE = 1 << 32
"""The number in place of a logical worker's for what an update of the parameters draws."""


def seed_init(seed: int, device: torch.device) -> None:
    """Seeds torch's generators for building the model."""
    KINDS[device.type].seed(key(_INIT_SALT, seed) >> 1)


def seed_step(seed: int, epoch: int, step: int, logical_worker: int, device: torch.device) -> None:
    """Seeds torch's generators for one logical worker's share of one step."""
    # torch takes 63 bits of a key.
    KINDS[device.type].seed(key(step, logical_worker, after=_epoch_key(seed, epoch)) >> 1)


@lru_cache(1)
def _epoch_key(seed: int, epoch: int) -> int:
    """Returns the key of an epoch, from which `seed_step` derives those of its steps."""
    return key(_STEP_SALT, seed, epoch)


_LENGTHS = {"total_steps", "epochs", "steps_per_epoch"}
"""Arguments that set the length of a schedule (`OneCycleLR`); if one is configured, `total_steps` is not added."""


def make_schedule(spec: ClassSpec, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Returns the schedule of a specification; it may contain schedules (`SequentialLR`, `ChainedScheduler`).

    Args:
        spec: Class and arguments. An argument may be a specification of a schedule, or a list of them.
        optimizer: The optimizer; the schedule sets its learning rates.
        total_steps: Steps of the optimizer in the run.

    Raises:
        ConfigError: The schedule has one `max_lr` for groups of parameters with different learning rates.
    """
    schedule_class = load_class(spec)
    parameters = inspect.signature(schedule_class).parameters

    def build_argument(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [build_argument(name, part) for part in value]
        if isinstance(value, dict) and "class_path" in value:
            return make_schedule(ClassSpec(value["class_path"], value.get("init_args") or {}), optimizer, total_steps)
        if isinstance(value, str) and name in parameters and "Callable" in str(parameters[name].annotation):
            return load_class(value)
        return value

    args = {name: build_argument(name, value) for name, value in spec.init_args.items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    if len(set(rates)) > 1 and isinstance(args.get("max_lr"), float | int):
        raise ConfigError(
            f"schedule {schedule_class.__name__} has max_lr {args['max_lr']} for all {len(rates)} parameter groups, and"
            f" would replace their rates {rates}; set max_lr to a list with one value for each of these."
        )
    if "total_steps" in parameters and not _LENGTHS & args.keys():
        args["total_steps"] = total_steps
    with explain_constructor("schedule.class_path", spec.class_path, args):
        return schedule_class(optimizer=optimizer, **args)


def has_total_steps_argument(spec: ClassSpec) -> bool:
    """Returns whether `make_schedule` passes the number of steps of the run to the schedule, or to a schedule in it."""
    parts = [part for value in spec.init_args.values() for part in (value if isinstance(value, list) else [value])]
    inner = [
        ClassSpec(part["class_path"], part.get("init_args") or {})
        for part in parts
        if isinstance(part, dict) and "class_path" in part
    ]
    has_argument = "total_steps" in inspect.signature(load_class(spec)).parameters
    return (has_argument and not _LENGTHS & spec.init_args.keys()) or any(map(has_total_steps_argument, inner))
