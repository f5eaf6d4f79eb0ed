"""Optimizers and learning-rate schedules of Keras with the interfaces of PyTorch.

`KerasOptimizer` calls Keras' own update on the tensors of PyTorch's parameters, so its arithmetic is that of Keras. The
state is in `state[p]` of each parameter, as PyTorch's optimizers have it: every strategy, checkpoint and resume works.
Numbers that Keras keeps once for all parameters, such as the number of steps, are in the state of each.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.devices import HOST
from ray_app.errors import ConfigError
from ray_app.task.keras import copies, library
from ray_app.task.keras.steps import StepPhase
from ray_app.task.transforms import instantiate
from ray_app.torch_private import foreach_copy_

_MODULE = "ray_app.task.keras.optimizer"
OPTIMIZER, SCHEDULE = f"{_MODULE}.KerasOptimizer", f"{_MODULE}.KerasSchedule"
"""Import paths for the configuration."""
_ELEMENTWISE = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",
)
"""Optimizers of Keras that update each value of a parameter independently."""
_AVERAGE = "average"
"""The name of the average of a parameter in its state, with `use_ema`."""
_PARAMETER = re.compile(r".*parameter(\d+)(?:_(\w+))?$")
"""The end of the name of a variable that Keras keeps for a parameter, which begins with the name of the latter."""


def weights_by_optimizer(program: Any, phases: Sequence[StepPhase]) -> dict[str, list[Any]]:
    """Returns the variables that each optimizer of a model trains, by its attribute, in the order of the parameters."""
    if not phases:
        return {"optimizer": library.trained_weights(program)}
    weights = [variable for variable, _ in library.weights_of(program)]
    return {name: [weights[number] for number in sorted(numbers)] for name, numbers in dict(phases).items()}


def describe_optimizers(program: Any, named: dict[str, Any], phases: Sequence[StepPhase]) -> dict[str, Any]:
    """Returns the fields for the optimizers of all phases of a `train_step`, see `describe_optimizer`."""
    fields, described = dict[str, Any](), dict[str, Any]()
    for name, weights in weights_by_optimizer(program, phases).items():
        ids = {id(variable) for variable in weights}
        part = {path: variable for path, variable in named.items() if id(variable) in ids}
        described = describe_optimizer(library.inner_optimizer(getattr(program, name)), part)
        for spec in described.values() if name != "optimizer" else ():
            if "program" in spec["init_args"]:
                spec["init_args"]["attribute"] = name
        fields[name] = described["optimizer"] | {"parameters": list(part), "schedule": described.get("schedule")}
    return {"optimizers": fields} if len(fields) > 1 else described


def describe_optimizer(optimizer: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields `optimizer` and `schedule` of a configuration for an optimizer of Keras.

    Optimizers and schedules of Keras are written out. One of the user has `program` in its arguments, in which the task
    puts its program.

    Args:
        optimizer: The optimizer that a model was compiled with.
        named: The variables of the model by the names of the parameters.

    Raises:
        ConfigError: The optimizer does what has another place here.
    """
    keras = library.import_keras()
    _refuse_features(optimizer)
    schedule = library.rate_source(optimizer)
    fields: dict[str, Any] = {
        "optimizer": {
            "class_path": OPTIMIZER,
            "init_args": {"lr": float(optimizer.learning_rate), **_write_out(optimizer)},
            "groups": _make_groups(optimizer, named) or None,
        }
    }
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        fields["schedule"] = {"class_path": SCHEDULE, "init_args": _write_out(schedule)}
    if optimizer.built and (steps := int(library.step_counter(optimizer))):
        fields["optimizer"]["init_args"] |= {"program": None, "continues": True}
        if "schedule" in fields:
            fields["schedule"]["init_args"]["first_step"] = steps
    return fields


def _write_out(part: Any) -> dict[str, Any]:
    """Returns an optimizer or a schedule in Keras' form if it is of Keras alone, else the place of a program."""
    keras = library.import_keras()
    by_program = {"program": None}
    is_of_keras = type(part).__module__.startswith("keras.")
    if not isinstance(part, keras.optimizers.Optimizer):
        serialized = keras.saving.serialize_keras_object(part) if is_of_keras else {}
        is_complete = is_of_keras and _is_of_keras(serialized)
        return {"serialized": json.loads(json.dumps(serialized))} if is_complete else by_program
    try:
        config = part.get_config() | {"learning_rate": None, "loss_scale_factor": None}
    except NotImplementedError:
        # The schedule has no `get_config`.
        return by_program
    # The class that PyTorch's backend has in its place is private.
    name = {"module": "keras.optimizers", "class_name": type(part).__name__, "registered_name": None}
    return {"serialized": name | {"config": json.loads(json.dumps(config))}} if is_of_keras else by_program


def _is_of_keras(serialized: Any) -> bool:
    """Returns whether all that is named in a serialized object is of Keras."""
    if isinstance(serialized, dict):
        module = serialized.get("module", "keras") or ""
        return str(module).split(".")[0] == "keras" and all(map(_is_of_keras, serialized.values()))
    return all(map(_is_of_keras, serialized)) if isinstance(serialized, list | tuple) else True


def _refuse_features(optimizer: Any) -> None:
    """Raises ConfigError for what an optimizer of Keras does, and another part of a run does here."""
    keras = library.import_keras()
    name = type(optimizer).__name__
    source = library.rate_source(optimizer)
    if not isinstance(source, keras.Variable | keras.optimizers.schedules.LearningRateSchedule) and (
        (inputs := library.rate_inputs(source)) or len({float(optimizer.learning_rate) for _ in range(2)}) > 1
    ):
        raise ConfigError(
            f"The learning rate of {name} is a function of {', '.join(inputs) or 'its calls'}, and workers do not"
            " notice its changes. Let it use only numbers, or write a keras.optimizers.schedules.LearningRateSchedule,"
            " which receives the number of the step."
        )
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ConfigError(
            "The model is compiled with a MultiOptimizer, whose optimizers a run cannot keep apart. Compile it with one"
            " optimizer, or set learning rates of parameter groups with optimizer.groups in the configuration."
        )


def _make_groups(optimizer: Any, named: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a group for each parameter if the optimizer treats one by its name or its constraint, else no group.

    All have one, since parameters without a group come first, and a norm of all gradients is a sum in the order of the
    parameters.
    """
    groups = []
    excludes = hasattr(optimizer, "exclude_layers") or library.excludes_weights(optimizer)
    for name, variable in named.items():
        group: dict[str, Any] = {}
        if excludes:
            group |= {"path": variable.path, "decays": library.is_decayed(optimizer, variable)}
        if variable.constraint is not None:
            keras = library.import_keras()
            group["constraint"] = json.dumps(keras.constraints.serialize(variable.constraint))
        groups.append({"names": [name], **group})
    return groups if any(len(group) > 1 for group in groups) else []


def refuse_sharding(fields: dict[str, Any]) -> str | None:
    """Returns why an optimizer cannot update parts of parameters, None if it can."""
    if "optimizers" in fields:
        return "several optimizers each update their own weights in a step"
    optimizer = fields["optimizer"]
    serialized = optimizer["init_args"].get("serialized", {"class_name": "a custom optimizer", "config": {}})
    name, config = serialized["class_name"], serialized["config"]
    reasons = {
        f"{name} computes with whole weights": name not in _ELEMENTWISE,
        "clipnorm is the norm of a whole weight": bool(config.get("clipnorm")),
        "global_clipnorm is the norm of all weights; train.grad_clip_norm does the same": bool(
            config.get("global_clipnorm")
        ),
        "a constraint needs a whole weight": any("constraint" in group for group in optimizer["groups"] or []),
        "the optimizer continues with a state of whole weights": "continues" in optimizer["init_args"],
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class KerasOptimizer(Optimizer):
    """An optimizer of Keras, which updates PyTorch's parameters by its own arithmetic.

    Args:
        params: The parameters, or groups of them. All groups have the same learning rate. A group may say that weight
            decay leaves its parameters alone (`decays`), and may have the `path` of its variable in the model and its
            `constraint` as JSON.
        lr: The learning rate, which a schedule may change.
        serialized: The optimizer as Keras writes it; None for the one of a program.
        program: The specification, as JSON, of the program that is compiled with the optimizer; None if it is written
            out.
        continues: Whether the first step begins with the state that the optimizer of the program has.
        evaluates_average: Whether evaluations use the average of the weights that the optimizer keeps (`use_ema`).
        attribute: The attribute of the program that has the optimizer.

    Raises:
        ConfigError: The groups have several learning rates.
    """

    is_elementwise: ClassVar[bool] = True
    """Whether it can update a part of a parameter; `refuse_sharding` refuses optimizers that cannot."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        serialized: dict[str, Any] | None = None,
        program: str | None = None,
        continues: bool = False,
        evaluates_average: bool = False,
        attribute: str = "optimizer",
    ) -> None:
        super().__init__(params, {"lr": lr, "decays": True, "path": "", "constraint": ""})
        self._serialized, self._program = serialized, program
        self._continues, self._evaluates_average = continues, evaluates_average
        self._attribute = attribute
        # The first step creates Keras' optimizer. `_slots` maps each of its variables to a parameter and to a name in
        # that parameter's state; the parameter is None for a variable that all parameters share.
        self._keras: Any = None
        self._rate = 0.0
        self._variables: dict[Tensor, Any] = {}
        self._slots: list[tuple[Any, Tensor | None, str]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient."""
        assert closure is None, "a step here has gradients and no closure"
        parameters = [p for group in self.param_groups for p in group["params"]]
        moved = [p for p in parameters if p.grad is not None]
        if not moved:
            return
        rates = {group["lr"] for group in self.param_groups}
        if len(rates) > 1:
            raise ConfigError(
                f"The groups have the learning rates {sorted(rates)}, but a Keras optimizer has one. Leave lr out of"
                " optimizer.groups, or name an optimizer of torch.optim."
            )
        with library.device_scope(moved[0].device):
            if self._keras is None or [*map(id, self._variables)] != [*map(id, parameters)]:
                self._build(parameters)
            self._bind(parameters)
            if (rate := rates.pop()) != self._rate:
                self._keras.learning_rate = self._rate = rate
            self._keras.apply([p.grad for p in moved], [self._variables[p] for p in moved])
        self._store_shared(parameters)

    @contextmanager
    def average_in_place(self) -> Iterator[None]:
        """Gives the parameters their averages in a block, if evaluations use these."""
        averages = [(p, s[_AVERAGE]) for p, s in self.state.items() if self._evaluates_average and _AVERAGE in s]
        with torch.no_grad():
            trained = [p.clone() for p, _ in averages]
            for p, average in averages:
                p.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for (p, _), value in zip(averages, trained, strict=True):
                    p.copy_(value)

    @property
    def caches(self) -> list[Any]:
        """What Keras' optimizer keeps in itself and computes again if it is missing."""
        return [] if self._keras is None else [library.decay_cache(self._keras)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; parts that it lacks are those before the first step again."""
        super().load_state_dict(state_dict)
        self._keras = None

    def _build(self, parameters: list[Tensor]) -> None:
        """Makes Keras' optimizer for parameters."""
        self._rate = 0.0
        if self._serialized is None:
            optimizer = copies.take_optimizer(getattr(_make_program(self._program), self._attribute))
        else:
            serialized = copy.deepcopy(self._serialized)
            serialized["config"]["learning_rate"] = self._rate
            optimizer = library.import_keras().saving.deserialize_keras_object(serialized)
        groups = [group for group in self.param_groups for _ in group["params"]]
        self._variables = {}
        for number, (p, group) in enumerate(zip(parameters, groups, strict=True)):
            self._variables[p] = make_variable(p, number, group)
        fixed = [self._variables[p] for group in self.param_groups if not group["decays"] for p in group["params"]]
        if fixed:
            optimizer.exclude_from_weight_decay(var_list=fixed)
        optimizer.build(list(self._variables.values()))
        self._keras = optimizer
        slots = _find_slots(optimizer)
        if self._continues:
            _continue_state(slots, _make_program(self._program), self._attribute)
        self._slots = [(v, None if number is None else parameters[number], name) for v, number, name in slots]

    def _bind(self, parameters: list[Tensor]) -> None:
        """Gives Keras' variables the tensors of the state, and makes the state of parameters without one."""
        for p in parameters:
            if library.tensor_of(self._variables[p]) is not p:
                library.bind_tensor(self._variables[p], p)
        first = parameters[0]
        for variable, parameter, name in self._slots:
            state = self.state[first if parameter is None else parameter]
            if name not in state:
                state[name] = library.tensor_of(variable).detach().clone()
            if library.tensor_of(variable) is not state[name]:
                library.bind_tensor(variable, state[name])

    def _store_shared(self, parameters: list[Tensor]) -> None:
        """Copies what Keras keeps once for all parameters into the state of each."""
        for variable, parameter, name in self._slots:
            if parameter is not None:
                continue
            value = library.tensor_of(variable)
            others = [p for p in parameters[1:] if name in self.state[p]]
            if others:
                foreach_copy_([self.state[p][name] for p in others], [value] * len(others))
            for p in parameters[1:]:
                if name not in self.state[p]:
                    self.state[p][name] = value.clone()


def _make_program(program: str | None) -> Any:
    """Returns the compiled model of a program, without effects on the random numbers of this process."""
    assert program is not None, "an optimizer is written out or of a program"
    with library.program_session(None), torch.random.fork_rng(devices=[]):
        return instantiate(json.loads(program), "optimizer.init_args.program")


def make_variable(parameter: Tensor, number: int, group: dict[str, Any]) -> Any:
    """Returns a variable of Keras for a parameter, with the path of the model's variable before its own name."""
    keras = library.import_keras()
    *scopes, path_end = group["path"].split("/")
    name = f"{path_end}_parameter{number}" if path_end else f"parameter{number}"
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        variable = keras.Variable(parameter, name=name, trainable=True)
    library.bind_tensor(variable, parameter)
    if group["constraint"]:
        variable.constraint = keras.constraints.deserialize(json.loads(group["constraint"]))
    return variable


Slot = tuple[Any, int | None, str]
"""A variable of an optimizer, the number of the parameter that it belongs to, and its name in the state of that; no
number for one that all parameters share."""


def _find_slots(optimizer: Any) -> list[Slot]:
    """Returns the variables of an optimizer that is built with variables of `make_variable`."""
    slots: list[Slot] = []
    counts: Counter[tuple[int | None, str]] = Counter()
    for variable in library.variables_of(optimizer):
        if variable is library.rate_source(optimizer):
            continue
        match = _PARAMETER.match(variable.name)
        number = int(match[1]) if match else None
        is_counter = variable is library.step_counter(optimizer)
        base = (match[2] or "slot") if match else "step" if is_counter else "shared"
        if number is None and len(variable.shape):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {variable.name} of shape {tuple(variable.shape)} for all weights"
                " together, but a run stores state per weight. Create the variable with add_variable_from_reference for"
                " each weight."
            )
        count = counts[number, base]
        counts[number, base] += 1
        slots.append((variable, number, f"{base}_{count}" if count else base))
    return slots


def _slots_of_weights(optimizer: Any, weights: list[Any]) -> list[Slot]:
    """Returns the variables of a built optimizer of a model, numbered as some weights; those of others are left out.

    Their names may be ambiguous, so that a copy of the optimizer is built, with variables in the same order. What a
    `LossScaleOptimizer` builds has no variables that stand for missing ones, as Adafactor otherwise has.
    """
    outer, optimizer = optimizer, library.inner_optimizer(optimizer)
    variables, copied = library.optimized_variables(optimizer), copies.unbuilt_optimizer(optimizer)
    builder = copied if outer is optimizer else type(outer)(copied)
    builder.build([make_variable(v.value, n, {"path": v.path, "constraint": ""}) for n, v in enumerate(variables)])
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    ordered = [v for v in library.variables_of(optimizer) if v is not library.rate_source(optimizer)]
    return [
        (variable, None if number is None else numbers[id(variables[number])], name)
        for variable, (_, number, name) in zip(ordered, _find_slots(copied), strict=True)
        if number is None or id(variables[number]) in numbers
    ]


def _continue_state(slots: list[Slot], program: Any, attribute: str) -> None:
    """Gives the variables of a new optimizer the state that an optimizer of a program has."""
    optimizer = getattr(program, attribute)
    kept = {id(variable) for variable in library.optimized_variables(library.inner_optimizer(optimizer))}
    weights = [variable for variable in library.trained_weights(program) if id(variable) in kept]
    states = {(number, name): variable for variable, number, name in _slots_of_weights(optimizer, weights)}
    for variable, number, name in slots:
        source = states.get((number, name))
        # The preflight tries an optimizer with a weight of its own.
        if source is not None and source.shape == variable.shape:
            variable.assign(library.tensor_of(source))


def restore_optimizer(
    program: Any, state: dict[str, Any], phases: Sequence[StepPhase] = (), scale: list[float] | None = None
) -> None:
    """Gives the optimizers of a model the state that they have in a checkpoint, as `Model.fit` would leave them.

    The state of an optimizer that the configuration names in their place is left out.

    Args:
        program: The compiled model with all weights.
        state: The state of its `KerasOptimizer`, as `Snapshot.optimizer` has it.
        phases: The phases of its `train_step`.
        scale: The state of the run's `LossScale`.
    """
    numbered = [(number, group["lr"]) for group in state["param_groups"] for number in group["params"]]
    by_optimizer = weights_by_optimizer(program, phases)
    if len(numbered) != sum(map(len, by_optimizer.values())):
        return
    for attribute, weights in by_optimizer.items():
        optimizer = getattr(program, attribute)
        part, numbered = numbered[: len(weights)], numbered[len(weights) :]
        if not optimizer.built:
            optimizer.build(program.trainable_variables if attribute == "optimizer" else weights)
        if library.inner_optimizer(optimizer) is not optimizer and scale is not None:
            optimizer.dynamic_scale.assign(scale[0])
            optimizer.step_counter.assign(int(scale[1]))
        for variable, number, name in _slots_of_weights(optimizer, weights):
            values = state["state"].get(part[number or 0][0], {}).get(name)
            if values is not None and values.shape == variable.shape:
                variable.assign(values)
        if library.is_rate_set(optimizer):
            optimizer.learning_rate = part[0][1]


def copy_optimizers(program: Any, other: Any) -> None:
    """Gives the optimizers of a model the state of those of another one of the same structure."""
    for attribute, source in library.optimizers_of(other).items():
        if source.built:
            numbers = {id(variable): number for number, (variable, _) in enumerate(library.weights_of(other))}
            weights, optimizer = [variable for variable, _ in library.weights_of(program)], getattr(program, attribute)
            if not optimizer.built:
                optimizer.build([weights[numbers[id(v)]] for v in library.optimized_variables(source)])
            for variable, value in zip(library.variables_of(optimizer), library.variables_of(source), strict=True):
                variable.assign(value)


class KerasSchedule(LRScheduler):
    """A learning-rate schedule of Keras, which is a function of the number of finished steps.

    Args:
        optimizer: The optimizer.
        serialized: The schedule as Keras writes it; None for the one of a program.
        last_epoch: The number of finished steps minus one, see `LRScheduler`.
        program: The specification, as JSON, of the program that has the schedule; None if it is written out.
        first_step: Steps that the optimizer had done before the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        serialized: dict[str, Any] | None = None,
        last_epoch: int = -1,
        program: str | None = None,
        first_step: int = 0,
    ) -> None:
        keras = library.import_keras()
        self._first_step = first_step
        self._schedule = (
            library.rate_source(_make_program(program).optimizer)
            if serialized is None
            else keras.saving.deserialize_keras_object(copy.deepcopy(serialized))
        )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Returns the learning rate of the next step for each group."""
        with library.device_scope(HOST), torch.no_grad():
            rate = float(self._schedule(self.last_epoch + self._first_step))
        return [rate for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the schedule without the schedule of Keras, which has none."""
        configured = ("_schedule", "_first_step")
        return {name: value for name, value in super().state_dict().items() if name not in configured}
