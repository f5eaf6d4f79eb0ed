"""The training state: what a step changes, what a checkpoint holds, what a newcomer receives.

The scale of the loss in half precision: found while training, the same on all workers, part of the checkpoint.

Small gradients vanish in float16, so the loss is multiplied by a scale and the gradient divided by it again, see
Micikevicius et al., "Mixed Precision Training", ICLR 2018. All scales are powers of two, so both change no bit of a
number that neither over- nor underflows. Whether a gradient overflowed is seen in the sum over all logical workers, so
every worker decides alike.

What torch's generators are seeded with: one number for making the model, and one for each logical worker's share of
each step.

An exponential moving average of the parameters, which is the model that a run returns where `train.ema_decay` is set.

Learning-rate schedules of the configuration.

Optimizers without PyTorch's compiler, and without marks for a profiler that does not listen (torch 2.15).

They import the compiler when they are made and at every step, only to be left out of what is compiled: two seconds of
every process that trains. Each step tells the profiler when it begins and ends, which takes 30 us of a small one. Both
are undone here for a run that compiles nothing. Where another version does it in another way, it is left as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ray_app.checkpoint.format import Snapshot, params_digest
from ray_app.config.config import Config
from ray_app.config.import_paths import TASK_OPTIMIZER, OptimizerSpec, load_class
from ray_app.config.sections import ClassSpec
from ray_app.errors import CheckpointError, ConfigError
from ray_app.plan.hashing import key
from ray_app.reduction.base import World, gather
from ray_app.task.base import Task
from ray_app.task.user_code import user_code
from ray_app.train.state.alternating_optimizers import Turns, TurnSchedules
from ray_app.train.state.parameters import (
    check_group_options,
    freeze_parameters,
    group_parameters,
    load_initial_parameters,
    load_optimizer,
    make_contiguous,
)
from ray_app.train.state.transfer import copy_to_host, divergent_ranks, ranks_without_state, transfer_snapshot

FIRST_SCALE, MAX_SCALE = 2.0**16, 2.0**24
_STEPS_TO_GROW = 2000


class LossScale:
    """Halves when a gradient overflows, and doubles after 2,000 steps in a row without."""

    def __init__(self) -> None:
        self.value = FIRST_SCALE
        self._good_steps = 0

    def update(self, is_finite: bool) -> None:
        """Moves on after a step whose gradient was finite, or not."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value = self.value / 2
        elif self._good_steps >= _STEPS_TO_GROW and self.value < MAX_SCALE:
            self.value, self._good_steps = self.value * 2, 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale may still mend an overflow."""
        return self.value > 1

    def state(self) -> list[float]:
        """What `load` reads."""
        return [self.value, float(self._good_steps)]

    def load(self, state: list[float]) -> None:
        """Takes over what `state` returned."""
        self.value, self._good_steps = state[0], int(state[1])


_INIT, _STEP = 21, 22  # salts: what the generators are seeded for


def _seed(value: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(value >> 1)
    if device.type == "cuda":
        torch.cuda.manual_seed(value >> 1)


def seed_init(seed: int, device: torch.device) -> None:
    """Seeds torch's generators for making the model."""
    _seed(key(_INIT, seed), device)


def seed_step(seed: int, epoch: int, step: int, logical_worker: int, device: torch.device) -> None:
    """Seeds torch's generators for one logical worker's share of one step."""
    _seed(key(step, logical_worker, after=_of_epoch(seed, epoch)), device)


@lru_cache(1)
def _of_epoch(seed: int, epoch: int) -> int:
    return key(_STEP, seed, epoch)


class ParameterAverage:
    """The average of a model's parameters over the steps, one more copy of them.

    The decay of step t is min(decay, (1 + t) / (10 + t)), so that the first steps do not weigh for ever, as in
    TensorFlow's `ExponentialMovingAverage` with `num_updates`.

    Args:
        model: Whose parameters.
        decay: Weight of the average so far, 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters, self._decay = list(model.parameters()), decay
        numbers = {id(p): i for i, p in enumerate(self._parameters)}
        self._names = {name: numbers[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._values = [p.detach().clone() if _has_average(p) else p.detach() for p in self._parameters]
        self._moving = [(v, p) for v, p in zip(self._values, self._parameters, strict=True) if _has_average(p)]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the parameters after `step` finished steps."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_([v for v, _ in self._moving], [p.detach() for _, p in self._moving], 1 - decay)

    def over(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's state with the average in place of the parameters."""
        return {
            name: self._values[self._names[name]] if name in self._names else value for name, value in state.items()
        }

    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return {name: self._parameters[number].detach() for name, number in self._names.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Takes over what `over` and `parameters` returned."""
        for name, number in self._names.items():  # either may leave out what is frozen
            if (found := parameters.get(name)) is not None:
                self._parameters[number].copy_(found)
            if (average := state.get(name, found)) is not None:
                self._values[number].copy_(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model have the average as its parameters."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, value in zip(self._parameters, self._values, strict=True):
            held = parameter.clone()
            parameter.copy_(value)
            value.copy_(held)


def _has_average(p: Tensor) -> bool:
    """Whole numbers (a quantized base) have none, and stay themselves."""
    return p.is_floating_point() or p.is_complex()


_LENGTHS = {"total_steps", "epochs", "steps_per_epoch"}
"""Arguments by which a schedule (`OneCycleLR`) is told how long it is; where one is given, nothing is added."""


def make_schedule(spec: ClassSpec, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Makes a schedule, and those that it is made of (`SequentialLR`, `ChainedScheduler`)."""
    made = load_class(spec)
    parameters = inspect.signature(made).parameters

    def given(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [given(name, part) for part in value]
        if isinstance(value, dict) and "class_path" in value:
            return make_schedule(ClassSpec(value["class_path"], value.get("init_args") or {}), optimizer, total_steps)
        if isinstance(value, str) and name in parameters and "Callable" in str(parameters[name].annotation):
            return load_class(value)
        return value

    args = {name: given(name, value) for name, value in spec.init_args.items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    if len(set(rates)) > 1 and isinstance(args.get("max_lr"), float | int):
        raise ConfigError(
            f"schedule {made.__name__} has max_lr {args['max_lr']} for all {len(rates)} groups of parameters, whose own"
            f" rates {rates} it"
            " would replace; give max_lr as a list, one for each of these."
        )
    if "total_steps" in parameters and not _LENGTHS & args.keys():
        args["total_steps"] = total_steps
    return made(optimizer=optimizer, **args)


def has_total_steps_argument(spec: ClassSpec) -> bool:
    """Whether a schedule, or one that it is made of, is told the steps of the whole run."""
    parts = [part for value in spec.init_args.values() for part in (value if isinstance(value, list) else [value])]
    inner = [
        ClassSpec(part["class_path"], part.get("init_args") or {})
        for part in parts
        if isinstance(part, dict) and "class_path" in part
    ]
    takes = "total_steps" in inspect.signature(load_class(spec)).parameters
    return (takes and not _LENGTHS & spec.init_args.keys()) or any(map(has_total_steps_argument, inner))


_of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
_is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def remove_compiler_hooks(optimizer: type[Optimizer]) -> None:
    """Changes the methods of a class of optimizers, before the first is made, so that they do not import the
    compiler.
    """
    if "torch._dynamo" in sys.modules:  # nothing to save
        return
    for method in filter(inspect.isfunction, vars(Optimizer).values()):
        plain: Any = getattr(method, "__wrapped__", method)
        plain.__dynamo_disable = plain  # what `torch._disable_dynamo` keeps of its first call
    step = optimizer.step
    if getattr(step, "__code__", _with_grad.__code__).co_name == "_use_grad":
        if (
            not torch.accelerator.is_available()
        ):  # it would be looked for at each step, to ask whether it captures a graph
            optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]
        optimizer.step = _hooked(_with_grad(vars(step)["__wrapped__"]))  # type: ignore[method-assign]


def _with_grad(step: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.optim.optimizer._use_grad_for_differentiable`, without its marks for the compiler."""

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return stepped


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.optim.Optimizer.profile_hook_step`, which is called only where there is a hook or a profiler."""
    told = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        is_told = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _of_all[0]
            or _of_all[1]
            or _is_profiled()
        )
        return (told if is_told else step)(self, *args, **kwargs)

    stepped.hooked = True  # type: ignore[attr-defined]  # or the first optimizer that is made would wrap it again
    return stepped


NO_STATE = -1
"""The step of a worker that has no state yet."""
_ALL_IN_DOUBT = (
    "After a failure the workers that are left have different states of the same step, and there is neither a"
    " checkpoint nor a snapshot to"
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

    is_partitioned: ClassVar[bool] = False
    """Whether no rank alone has all of it, so that a snapshot is a collective of all ranks."""

    def __init__(self, config: Config, task: Trainable, device: torch.device, total_steps: int) -> None:
        self._config, self._task, self._device, self._total_steps = config, task, device, total_steps
        self.step = NO_STATE
        self.model = self._made()
        self.model.to(device)
        self.master: nn.Module = self._master_of(self.model)
        self._equip()

    def _made(self) -> nn.Module:
        """The model as the task makes it."""
        seed_init(self._config.seed, self._device)
        model = make_contiguous(self._task.build_model())
        self._frozen = freeze_parameters(model, self._config.train.freeze or [])
        return model

    def _master_of(self, model: nn.Module) -> nn.Module:
        """The model that the optimizer moves; the one that computes, unless a strategy keeps them apart."""
        return model

    def _equip(self) -> None:
        """Makes all that goes with the model."""
        config, model = self._config, self.master
        self.train()
        self.average = ParameterAverage(model, config.train.ema_decay) if config.train.ema_decay is not None else None
        self.scale = LossScale() if config.train.precision == "fp16" else None
        named, self.turns = dict(model.named_parameters()), None
        self.optimizer: Optimizer
        self.schedule: LRScheduler | TurnSchedules | None = None
        if config.optimizers is not None:
            self.optimizer = self.turns = Turns(config.optimizers, named, self._optimizer)
            self.schedule = TurnSchedules(config.optimizers, self.turns, self._total_steps, make_schedule)
            return
        if config.optimizer.class_path == TASK_OPTIMIZER:
            assert isinstance(self._task, Task), "the strategies that train something else refuse it"
            self.optimizer, self.schedule = self._task.configure_optimizers(model)
        else:
            self.optimizer = self._optimizer(config.optimizer, named)
        if config.schedule is not None:
            if self.schedule is not None:
                raise ConfigError(
                    f"schedule is {config.schedule.class_path}, and the task brings a {type(self.schedule).__name__}"
                    f" with its optimizer; a"
                    " run has one. Leave schedule out, or let the task bring the optimizer alone."
                )
            self.schedule = make_schedule(config.schedule, self.optimizer, self._total_steps)

    def _optimizer(self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> Optimizer:
        made, args = load_class(spec), dict(spec.init_args)
        if not self._config.train.compile:
            remove_compiler_hooks(made)
        if self._can_fuse(made) and not {"fused", "foreach", "differentiable"} & args.keys():
            args["fused"] = True  # on CPU it must be asked for
        optimizer = made(self._groups(spec, named), **args)
        check_group_options(optimizer, spec.groups or [])
        return optimizer

    def _groups(self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> list[Any]:
        """What an optimizer is made with: the trained ones of these parameters, or groups of them."""
        return group_parameters(named, spec.groups) if spec.groups else [p for p in named.values() if p.requires_grad]

    def _can_fuse(self, optimizer: Any) -> bool:
        """Whether a class of optimizers moves all parameters in one kernel if it is told to."""
        trained = (p for p in self.master.parameters() if p.requires_grad)
        return "fused" in inspect.signature(optimizer).parameters and all(p.is_floating_point() for p in trained)

    def initialize(self, initial: dict[str, Tensor] | None) -> None:
        """Makes it the state of before the first step.

        Args:
            initial: The parameters to begin with; None: those that it has.

        Raises:
            ConfigError: They are not the model's.
        """
        if initial is not None:
            load_initial_parameters(self.master, initial, self._config.train.init_from)
            if self.average is not None:
                self.average.load(initial, initial)
        self.step = 0

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group: the one that is not asked for, unless every parameter is in
        another.
        """
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
    def eval_model(self) -> Iterator[nn.Module]:
        """The model that the run returns, in the place of the one that is trained."""
        try:
            with self.average.in_place() if self.average is not None else nullcontext():
                yield self.model
        finally:
            self.train()

    def optimizer_step(self) -> None:
        """Moves the optimizer and the schedule by the gradients that the parameters hold."""
        with user_code(lambda: "the update of the parameters"):
            self._task.apply_gradients(self.master, self._moving)
        if self.average is not None:
            self.average.update(self.step)
        self.advance_schedule()

    def advance_schedule(self) -> None:
        """Moves the schedule, and nothing else: the step is over."""
        if isinstance(self.schedule, TurnSchedules):
            self.schedule.step(self.step)
        elif self.schedule is not None:
            self.schedule.step()
        self.step += 1

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """Copies the state to memory of its own.

        Args:
            into: A snapshot that nobody needs any more. Its memory is used again: to touch new memory costs six times
                the copying.
        """
        return Snapshot(**copy_to_host(vars(self._live()), vars(into) if into is not None else None))

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
    def bind(self, world: World) -> Iterator[World]:
        """The time of a generation, from before the state is shared; yields its workers as they play in this
        strategy.
        """
        yield world

    def refresh(self) -> None:
        """Makes the model on this rank that of the present step, if it is not; a collective of all ranks."""

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """Gives the ranks that lack it the state of the highest step; a collective of all ranks, after which all states
        are equal.

        Args:
            world: The workers of now.
            restore: Gives rank 0 a state; called if nobody has one.
            was_broken: Whether the generation before broke for this rank; then those who claim the highest step compare
                what they have.

        Returns:
            The ranks whose state was not that of most others of their step, and has been replaced.

        Raises:
            CheckpointError: All states are in doubt, and there is nothing else to go on from.
            PeerLostError: A peer left meanwhile.
        """
        steps, odd = self._trusted(world, was_broken)
        if max(steps) == NO_STATE and world.rank == 0:
            restore()
            if odd and self.step == 0:
                raise CheckpointError(_ALL_IN_DOUBT)
        source = steps.index(max(steps))
        to = ranks_without_state(steps, source)
        received = transfer_snapshot(self._live() if world.rank == source and to else None, world.rank, source, to)
        if world.rank in to:
            assert received is not None
            self.load(received)
        return odd

    def _trusted(self, world: World, was_broken: bool) -> tuple[list[int], list[int]]:
        """Every rank's step, that of a state in doubt being NOTHING, and whose are; what is in doubt takes a digest of
        the parameters.
        """
        claims = gather((self.step, was_broken), world)
        steps, doubted = [step for step, _ in claims], list[int]()
        if any(broken for _, broken in claims) and steps.count(max(steps)) > 1 and max(steps) > NO_STATE:
            doubted = divergent_ranks(
                steps, gather(params_digest(self._claimed()) if self.step == max(steps) else "", world)
            )
        return [NO_STATE if rank in doubted else step for rank, step in enumerate(steps)], doubted

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
