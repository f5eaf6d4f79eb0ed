"""The training state: what a step changes, what a checkpoint holds, what a newcomer receives."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.checkpoint.format import Snapshot, params_digest
from ray_app.config.class_path import load_class
from ray_app.config.config import Config
from ray_app.config.optimizers import OWN_OPTIMIZER, OptimizerSpec
from ray_app.errors import CheckpointError, ConfigError
from ray_app.exchange.exchange import World, gather
from ray_app.task.base import Task
from ray_app.task.own_code import own_code
from ray_app.train.state.average import Average
from ray_app.train.state.copies import copied
from ray_app.train.state.eager import without_compiler
from ray_app.train.state.freeze import freeze
from ray_app.train.state.groups import grouped, load_optimizer, refuse_unknown_options
from ray_app.train.state.initial import begin_with, contiguous
from ray_app.train.state.scale import LossScale
from ray_app.train.state.schedules import make_schedule
from ray_app.train.state.seeds import seed_init
from ray_app.train.state.transfer import lacking, odd_ones, transfer
from ray_app.train.state.turns import Turns, TurnSchedules

NOTHING = -1
"""The step of a worker that has no state yet."""
_ALL_IN_DOUBT = (
    "After a failure the workers that are left have different states of the same step, and there is neither a checkpoint nor a snapshot to"
    " go on from. Start again, and set checkpoint.every_steps so that there is one."
)


class Trainable(Protocol):
    """What a state needs of a task."""

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """See `Task.apply_gradients`."""


class TrainingState:
    """Model, optimizer, schedule and the number of finished steps.

    Args:
        config: Names optimizer and schedule.
        task: Makes the model, and moves it by an optimizer.
        device: Where it lives.
        total_steps: Steps of the run, for schedules that want to know (an argument `total_steps` that is not given).
    """

    is_spread: ClassVar[bool] = False
    """Whether no rank alone has all of it, so that a snapshot is a collective of all ranks."""

    def __init__(self, config: Config, task: Trainable, device: torch.device, total_steps: int) -> None:
        self._config, self._task, self._device, self._total_steps = config, task, device, total_steps
        self.step = NOTHING
        self.model = self._made()
        self.model.to(device)
        self.master: nn.Module = self._master_of(self.model)
        self._equip()

    def _made(self) -> nn.Module:
        """The model as the task makes it."""
        seed_init(self._config.seed, self._device)
        model = contiguous(self._task.build_model())
        self._frozen = freeze(model, self._config.train.freeze or [])
        return model

    def _master_of(self, model: nn.Module) -> nn.Module:
        """The model that the optimizer moves; the one that computes, unless a strategy keeps them apart."""
        return model

    def _equip(self) -> None:
        """Makes all that goes with the model."""
        config, model = self._config, self.master
        self.train()
        self.average = Average(model, config.train.ema_decay) if config.train.ema_decay is not None else None
        self.scale = LossScale() if config.train.precision == "fp16" else None
        named, self.turns = dict(model.named_parameters()), None
        self.optimizer: Optimizer
        self.schedule: LRScheduler | TurnSchedules | None = None
        if config.optimizers is not None:
            self.optimizer = self.turns = Turns(config.optimizers, named, self._optimizer)
            self.schedule = TurnSchedules(config.optimizers, self.turns, self._total_steps, make_schedule)
            return
        if config.optimizer.class_path == OWN_OPTIMIZER:
            assert isinstance(self._task, Task), "the strategies that train something else refuse it"
            self.optimizer, self.schedule = self._task.own_optimizer(model)
        else:
            self.optimizer = self._optimizer(config.optimizer, named)
        if config.schedule is not None:
            if self.schedule is not None:
                raise ConfigError(
                    f"schedule is {config.schedule.class_path}, and the task brings a {type(self.schedule).__name__} with its optimizer; a"
                    " run has one. Leave schedule out, or let the task bring the optimizer alone."
                )
            self.schedule = make_schedule(config.schedule, self.optimizer, self._total_steps)

    def _optimizer(self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> Optimizer:
        made, args = load_class(spec), dict(spec.init_args)
        if not self._config.train.compile:
            without_compiler(made)
        if self._can_fuse(made) and not {"fused", "foreach", "differentiable"} & args.keys():
            args["fused"] = True  # on CPU it must be asked for
        optimizer = made(self._groups(spec, named), **args)
        refuse_unknown_options(optimizer, spec.groups or [])
        return optimizer

    def _groups(self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> list[Any]:
        """What an optimizer is made with: the trained ones of these parameters, or groups of them."""
        return grouped(named, spec.groups) if spec.groups else [p for p in named.values() if p.requires_grad]

    def _can_fuse(self, optimizer: Any) -> bool:
        """Whether a class of optimizers moves all parameters in one kernel if it is told to."""
        trained = (p for p in self.master.parameters() if p.requires_grad)
        return "fused" in inspect.signature(optimizer).parameters and all(p.is_floating_point() for p in trained)

    def begin(self, initial: dict[str, Tensor] | None) -> None:
        """Makes it the state of before the first step.

        Args:
            initial: The parameters to begin with; None: those that it has.

        Raises:
            ConfigError: They are not the model's.
        """
        if initial is not None:
            begin_with(self.master, initial, self._config.train.init_from)
            if self.average is not None:
                self.average.load(initial, initial)
        self.step = 0

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group: the one that is not asked for, unless every parameter is in another."""
        return float(self._moving.param_groups[0]["lr"])

    @property
    def _moving(self) -> Optimizer:
        """The optimizer of the next step."""
        return self.optimizer if self.turns is None else self.turns.at(self.step)

    def train(self) -> None:
        """Puts the model into training mode, but for what is frozen."""
        self.model.train()
        for layer in self._frozen:
            layer.eval()

    @contextmanager
    def returned(self) -> Iterator[nn.Module]:
        """The model that the run returns, in the place of the one that is trained."""
        try:
            with self.average.in_place() if self.average is not None else nullcontext():
                yield self.model
        finally:
            self.train()

    def advance(self) -> None:
        """Moves the optimizer and the schedule by the gradients that the parameters hold."""
        with own_code(lambda: "the update of the parameters"):
            self._task.apply_gradients(self.master, self._moving)
        if self.average is not None:
            self.average.update(self.step)
        self.pass_over()

    def pass_over(self) -> None:
        """Moves the schedule, and nothing else: the step is over."""
        if isinstance(self.schedule, TurnSchedules):
            self.schedule.step(self.step)
        elif self.schedule is not None:
            self.schedule.step()
        self.step += 1

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """Copies the state to memory of its own.

        Args:
            into: A snapshot that nobody needs any more. Its memory is used again: to touch new memory costs six times the copying.
        """
        return Snapshot(**copied(vars(self._live()), vars(into) if into is not None else None))

    def _live(self) -> Snapshot:
        """The state as it stands in a checkpoint, in the memory that training goes on with."""
        model, more = self.master.state_dict(), dict[str, Any]()
        if self.average is not None:
            model, more["parameters"] = self.average.over(model), self.average.parameters()
        if self.scale is not None:
            more["scale"] = self.scale.state()
        schedule = self.schedule.state_dict() if self.schedule is not None else None
        return Snapshot(self.step, model, self.optimizer.state_dict(), schedule, more)

    def load(self, snapshot: Snapshot) -> None:
        """Takes over a snapshot's state."""
        self.master.load_state_dict(snapshot.model)
        if self.average is not None:
            self.average.load(snapshot.model, snapshot.more["parameters"])
        if self.scale is not None:
            self.scale.load(snapshot.more["scale"])
        if self.turns is not None:
            self.turns.load_state_dict(snapshot.optimizer)
        else:
            load_optimizer(self.optimizer, snapshot.optimizer)
        if self.schedule is not None and snapshot.schedule is not None:
            self.schedule.load_state_dict(_with_counters(snapshot.schedule, self.schedule.state_dict()))
        self.step = snapshot.step

    @contextmanager
    def among(self, world: World) -> Iterator[World]:
        """The time of a generation, from before the state is shared; yields its workers as they play in this strategy."""
        yield world

    def refresh(self) -> None:
        """Makes the model on this rank that of the present step, if it is not; a collective of all ranks."""

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """Gives the ranks that lack it the state of the highest step; a collective of all ranks, after which all states are equal.

        Args:
            world: The workers of now.
            restore: Gives rank 0 a state; called if nobody has one.
            was_broken: Whether the generation before broke for this rank; then those who claim the highest step compare what they have.

        Returns:
            The ranks whose state was not that of most others of their step, and has been replaced.

        Raises:
            CheckpointError: All states are in doubt, and there is nothing else to go on from.
            PeerLostError: A peer left meanwhile.
        """
        steps, odd = self._trusted(world, was_broken)
        if max(steps) == NOTHING and world.rank == 0:
            restore()
            if odd and self.step == 0:
                raise CheckpointError(_ALL_IN_DOUBT)
        source = steps.index(max(steps))
        to = lacking(steps, source)
        received = transfer(self._live() if world.rank == source and to else None, world.rank, source, to)
        if world.rank in to:
            assert received is not None
            self.load(received)
        return odd

    def _trusted(self, world: World, was_broken: bool) -> tuple[list[int], list[int]]:
        """Every rank's step, that of a state in doubt being NOTHING, and whose are; what is in doubt takes a digest of the parameters."""
        claims = gather((self.step, was_broken), world)
        steps, doubted = [step for step, _ in claims], list[int]()
        if any(broken for _, broken in claims) and steps.count(max(steps)) > 1 and max(steps) > NOTHING:
            doubted = odd_ones(steps, gather(params_digest(self._claimed()) if self.step == max(steps) else "", world))
        return [NOTHING if rank in doubted else step for rank, step in enumerate(steps)], doubted

    def _claimed(self) -> dict[str, Tensor]:
        """The model of the step that this rank says to have."""
        return self.master.state_dict()


def _with_counters(value: Any, like: Any) -> Any:
    """A state with a `Counter` wherever `like` has one (`MultiStepLR`); a snapshot has plain dictionaries instead."""
    if isinstance(like, Counter):
        return Counter(value)
    if isinstance(like, dict) and isinstance(value, dict):
        return {k: _with_counters(v, like.get(k)) for k, v in value.items()}
    if isinstance(like, list) and isinstance(value, list) and len(like) == len(value):
        return [_with_counters(v, each) for v, each in zip(value, like, strict=True)]
    return value
