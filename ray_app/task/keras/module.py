"""A compiled Keras model as an `nn.Module`: the model's variables are its parameters and buffers.

Keras on PyTorch keeps every variable as a frozen or trained `nn.Parameter`, also moving statistics and the states of
random generators. `KerasModule` registers variables that an optimizer may train as parameters, and all others as
buffers: every logical worker then starts a step with the same moving statistics, and at its end all workers take the
statistics of logical worker 0, as with batch normalization of PyTorch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ray_app.devices import HOST, to_device
from ray_app.errors import ConfigError
from ray_app.task.base import WeightUpdate
from ray_app.task.keras import copies, library
from ray_app.task.keras.library import BatchFacts
from ray_app.task.keras.steps import HandOver, OwnSteps, run_train_step
from ray_app.task.whole_batches import Evaluated
from ray_app.torch_private import registered_buffers

_MAX_SEED = 2**31
_LOSS = "loss"
"""The name under which a step returns its loss."""
_PLACEHOLDER = "no_weight"
"""The name of the parameter of a model without weights to train."""
_KERAS_STEPS = OwnSteps()
NO_FACTS = BatchFacts([], [], [], [], is_by_batch=False, kept=[])
"""The facts of a model that computes its loss in a step of its own."""


class KerasPass(NamedTuple):
    """The result of a batch that went through a model.

    Args:
        loss: Its mean loss, shape ().
        outputs: What the model gave.
        targets: The targets as losses and metrics got them.
        weight: What the loss divides by, shape (), if it is a mean over weights or a mask; else None.
    """

    loss: Tensor
    outputs: Any
    targets: Any
    weight: Tensor | None


class _Slot:
    """A place in a model for a tensor that is registered under a name.

    Args:
        name: The name.
        tensor: The tensor of the model at this place.
        set_tensor: Gives the model another one.
    """

    def __init__(self, name: str, tensor: Tensor, set_tensor: Callable[[Tensor], None]) -> None:
        self.name = name
        self._tensor = tensor
        self._set_tensor = set_tensor
        set_tensor(tensor)

    def bind(self, tensor: Tensor | None) -> None:
        """Gives the model a tensor unless it has it."""
        if tensor is not self._tensor and tensor is not None:
            self._set_tensor(tensor)
            self._tensor = tensor


class KerasModule(nn.Module):
    """A compiled Keras model with its variables as parameters and buffers, named by their paths (`dense/kernel`).

    The model is no submodule, since its layers would register every variable again.

    Args:
        program: The compiled model, built.
        settings: The settings of Keras that the program expects.
        expands_targets: Whether the program needs targets in the shapes of its outputs, see `fit_targets`.
        steps: The steps that the program writes itself.
        facts: The facts of its losses and metrics.

    Attributes:
        program: The model.
    """

    program: Any

    def __init__(
        self,
        program: Any,
        settings: library.Settings,
        expands_targets: bool = False,
        facts: BatchFacts = NO_FACTS,
        steps: OwnSteps = _KERAS_STEPS,
    ) -> None:
        super().__init__()
        self.facts, self.steps = facts, steps
        self._settings, self._expands_targets = settings, expands_targets
        # `nn.Module` would make it a submodule.
        vars(self)["program"] = program
        self._variables: dict[str, Any] = {}
        self._slots: list[_Slot] = []
        optimized = {number for phase in steps.phases for number in phase.weights}
        for number, (variable, is_parameter) in enumerate(library.weights_of(program)):
            self._register(variable, is_parameter, not steps.phases or number in optimized)
        for path, module in library.wrapped_modules(program):
            for part_path, part in module.named_modules():
                buffers = registered_buffers(part)
                for key, tensor in buffers.items():
                    name = "/".join(filter(None, (path, part_path, key)))
                    if tensor is not None:
                        self._add_slot(name, tensor, partial(operator.setitem, buffers, key), is_parameter=False)
        if not any(p.requires_grad for p in self._parameters.values() if p is not None):
            # Keras trains a model without weights, too; an optimizer of torch and a reduction need one.
            self.register_parameter(_PLACEHOLDER, nn.Parameter(torch.zeros(1)))
        self._generators = library.seed_generators(program)
        # The metrics by their names, once a batch has gone through this object: Keras makes them then.
        self._metrics: dict[str, Any] | None = None

    def _register(self, variable: Any, is_parameter: bool, is_optimized: bool) -> None:
        """Registers a variable; one that no optimizer trains gets a plain tensor of the same memory."""
        tensor = library.tensor_of(variable)
        if is_parameter and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor.detach(), requires_grad=variable.trainable)
        elif not is_parameter:
            tensor = tensor.detach()
        name = self._add_slot(variable.path, tensor, partial(library.bind_tensor, variable), is_parameter)
        if is_parameter:
            self._variables[name] = variable
            self.get_parameter(name).requires_grad_(variable.trainable and is_optimized)

    def _add_slot(self, path: str, tensor: Tensor, set_tensor: Callable[[Tensor], None], is_parameter: bool) -> str:
        """Registers a tensor under its path, with a number if an earlier tensor has that path; returns the name."""
        base = path.replace(".", "_")
        name, number = base, 0
        while name in self._parameters or name in registered_buffers(self):
            number += 1
            name = f"{base}_{number}"
        if is_parameter:
            assert isinstance(tensor, nn.Parameter)
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)
        self._slots.append(_Slot(name, tensor, set_tensor))
        return name

    def _bind(self) -> None:
        """Gives the model the tensors that are registered now: a move to a device, or a strategy, replaces them."""
        tensors = {**self._parameters, **registered_buffers(self)}
        for slot in self._slots:
            slot.bind(tensors[slot.name])

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModule:
        """Returns a copy, of which the tensors are copied by PyTorch."""
        with library.program_session(self._settings), torch.random.fork_rng(devices=[]):
            program = copies.load_program(copies.dump_program(self.program))
            copied = KerasModule(program, self._settings, self._expands_targets, self.facts, self.steps)
        memo[id(self)] = copied
        copied.load_state_dict(self.state_dict())
        for name, p in self.named_parameters():
            copied.get_parameter(name).requires_grad_(p.requires_grad)
        return copied.to(self.device).train(self.training)

    @property
    def device(self) -> torch.device:
        """The device of the model's tensors; the CPU for a model without any."""
        # `parameters()` would search for submodules in every step, and this module has none.
        tensors = (*self._parameters.values(), *registered_buffers(self).values())
        return next((tensor.device for tensor in tensors if tensor is not None), HOST)

    def train(self, mode: bool = True) -> KerasModule:
        """Sets the mode of the model, and freezes layers of which `train.freeze` has left no weight to train.

        Keras lets a frozen layer of batch normalization use its moving statistics and keep them as they are.
        """
        super().train(mode)
        for _, module in library.wrapped_modules(self.program):
            module.train(mode)
        frozen = [
            v for name, v in self._variables.items() if v.trainable and not self.get_parameter(name).requires_grad
        ]
        # Phases train some of the weights each.
        if frozen and not self.steps.phases:
            library.freeze_layers(self.program, frozen)
        return self

    def forward(self, x: Any, y: Any = None, weights: Any = None, with_loss: bool = False, factor: float = 1) -> Any:
        """Runs a batch through the model.

        Args:
            x: The inputs: a tensor, or tensors as the model takes them.
            y: The targets; None if the model has its losses from `add_loss` alone.
            weights: The weight of each row, shape (rows,); None for equal weights.
            with_loss: Whether to compute the loss, too.
            factor: What losses that are sums are multiplied by.

        Returns:
            What the model gives; with the loss a `KerasPass`.
        """
        self._bind()
        program = self.program
        with library.device_scope(self.device):
            self.seed_generators()
            x = fit_inputs(program, x)
            if not with_loss and "predict_step" in library.overridden_steps(program):
                return program.predict_step(pack(program, x, None, None))
            if with_loss:
                # Layers may update metrics, too.
                if self._metrics is None:
                    program.reset_metrics()
                else:
                    for metric in self._metrics.values():
                        metric.reset_state()
            outputs = program(x, training=self.training) if library.has_training_argument(program) else program(x)
            if not with_loss:
                return outputs
            y = fit_targets(y, outputs) if self._expands_targets else y
            with library.noted_losses(factor, self.facts.reductions) as notes:
                loss = library.compute_loss(program, x, y, outputs, weights, self.training)
            if _PLACEHOLDER in self._parameters:
                loss = loss + self.get_parameter(_PLACEHOLDER).sum() * 0.0
            return KerasPass(loss, outputs, y, notes[0][1] if len(notes) == 1 else None)

    def train_step(
        self, x: Any, y: Any, weights: Any, phase: int, updates: Sequence[WeightUpdate]
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Runs a phase of the program's own `train_step`; returns its loss, the means over rows, and states.

        The loss is 0 before the last phase, and where the program returns none. The states are those of
        `OwnSteps.carried` after the last phase.
        """
        self._bind()
        program = self.program
        parameters = [(self.get_parameter(name), variable) for name, variable in self._variables.items()]
        before = [(p, p.requires_grad, p.grad) for p, _ in parameters]
        try:
            for p, variable in parameters:
                p.requires_grad_(variable.trainable).grad = None
            with library.device_scope(self.device):
                self.seed_generators()
                program.reset_metrics()
                data = pack(program, x, y, weights)
                logs, gradients = run_train_step(program, data, self.steps.phases, phase, updates)
        finally:
            for p, requires_grad, gradient in before:
                p.requires_grad_(requires_grad).grad = gradient
        logs = {name: torch.as_tensor(value).detach().float() for name, value in logs.items()}
        parameter_of = {id(variable): p for p, variable in parameters}
        trained = [parameter_of[id(variable)] for variable, _ in gradients]
        loss = HandOver.apply(logs.pop(_LOSS, torch.zeros((), device=self.device)), [g for _, g in gradients], *trained)
        metrics = dict(library.compiled_metrics(program))
        means = {k: v for k, v in logs.items() if k not in metrics or library.is_mean(metrics[k])}
        is_last = self.steps.carried and phase == len(self.steps.phases) - 1
        states = torch.cat([library.flat_states(metrics[k]) for k in self.steps.carried]) if is_last else None
        return loss, means, states

    def test_step(self, x: Any, y: Any, weights: Any) -> Evaluated:
        """Runs the program's own `test_step`; returns its loss, its other means, and the states of its metrics."""
        self._bind()
        with library.device_scope(self.device):
            self.seed_generators()
            self.program.reset_metrics()
            data = pack(self.program, x, y, weights)
            logs = dict(self.program.test_step(data))
            rows = len(library.import_keras().tree.flatten(data)[0])
            metrics = dict(library.compiled_metrics(self.program))
            loss = torch.as_tensor(logs.pop(_LOSS, torch.zeros(())))
            states = {name: library.row_states(metrics[name], rows) for name in logs if name in metrics}
            logged = {name: torch.as_tensor(value) for name, value in logs.items() if name not in states}
            return Evaluated(loss, logged, states)

    def seed_generators(self) -> None:
        """Sets the states of all generators of random numbers.

        In training they are drawn from torch's generator, which is seeded by seed, epoch, step and logical worker. An
        evaluation has the same in every batch, so that it does not depend on the process that evaluates.
        """
        generators = [*self._generators, library.global_seed_generator()]
        if self.training:
            seeds = torch.randint(_MAX_SEED, (len(generators), 2), dtype=torch.int64)
        else:
            seeds = torch.tensor([[number, 0] for number in range(len(generators))])
        # One copy for all generators, for which a device does not wait.
        for generator, seed in zip(generators, to_device(seeds, self.device), strict=True):
            library.tensor_of(generator.state).copy_(seed)

    def metric_states(self, x: Any, y: Any, weights: Any, outputs: Any) -> dict[str, Tensor]:
        """Returns the states of the model's metrics after a batch that has just gone through it, by their names."""
        with library.device_scope(self.device):
            metrics = self._update_metrics(x, y, weights, outputs)
            return {name: library.flat_states(metric) for name, metric in metrics.items()}

    def step_metrics(self, x: Any, y: Any, weights: Any, outputs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        """Returns the metrics of a training batch that are means over rows, and the states of `facts.carried`, if any.

        The means have the shape (), the states stand one after the other.
        """
        with library.device_scope(self.device), torch.no_grad():
            metrics = self._update_metrics(x, y, weights, outputs)
            states = [library.flat_states(metrics[name]) for name in self.facts.carried]
            means = {name: metrics[name].result().detach() for name in self.facts.means}
        return means, torch.cat(states) if states else None

    def _update_metrics(self, x: Any, y: Any, weights: Any, outputs: Any) -> dict[str, Any]:
        """Updates the model's metrics with a batch, and returns them by their names."""
        library.update_metrics(self.program, x, y, outputs, weights)
        if self._metrics is None:
            self._metrics = dict(library.compiled_metrics(self.program))
        return self._metrics

    def saved_program(self) -> Any:
        """Returns the model with the tensors that are registered now, as its own methods take it."""
        self._bind()
        return self.program

    def lend(self, program: Any) -> Callable[[], None]:
        """Gives a model of the same layers the tensors that are registered now, so that it has every change of them.

        Returns:
            A function that gives the model its own tensors again, with the values of these.
        """
        tensors = {**self._parameters, **registered_buffers(self)}
        variables = [variable for variable, _ in library.weights_of(program)]
        before = [library.tensor_of(variable) for variable in variables]
        for variable, slot in zip(variables, self._slots, strict=False):
            tensor = tensors[slot.name]
            assert tensor is not None
            library.bind_tensor(variable, tensor)

        def take_back() -> None:
            with torch.no_grad():
                for variable, tensor in zip(variables, before, strict=True):
                    tensor.copy_(library.tensor_of(variable))
                    library.bind_tensor(variable, tensor)

        return take_back

    def moving_parameters(self) -> list[Tensor]:
        """Returns the parameters that a call of training writes, see `Task.moving_parameters`."""
        kernels = {id(variable) for variable in library.normalized_kernels(self.program)}
        return [self.get_parameter(name) for name, variable in self._variables.items() if id(variable) in kernels]

    def trained_variables(self) -> dict[str, Any]:
        """Returns the variables that an optimizer trains, by the names of their parameters."""
        return {name: variable for name, variable in self._variables.items() if self.get_parameter(name).requires_grad}


def fit_inputs(program: Any, x: Any) -> Any:
    """Returns inputs in the shapes that a model declares, where only the division into axes differs.

    An image of 28 by 28 pixels becomes 784 numbers or gets an axis of channels, channels move to the first axis if the
    model has them there, and several columns become one input side by side if the model has one.
    """
    declared = getattr(program, "inputs", None)
    if not declared:
        return x
    if isinstance(x, list) and len(declared) == 1:
        x = torch.cat([v[:, None] if v.ndim == 1 else v.flatten(1) for v in x], 1) if len(x) > 1 else x[0]
    if isinstance(x, Tensor):
        return _fit_shape(x, declared[0].shape)
    if isinstance(x, dict):
        shapes = {tensor.name: tensor.shape for tensor in declared}
        return {name: _fit_shape(v, shapes[name]) if name in shapes else v for name, v in x.items()}
    return [_fit_shape(values, tensor.shape) for values, tensor in zip(x, declared, strict=False)]


def fit_targets(y: Any, outputs: Any) -> Any:
    """Returns targets with a last axis of one number where the outputs have it: columns of numbers and masks lack it.

    Losses of Keras add it by themselves; some metrics refuse targets without it.
    """
    if isinstance(y, Tensor) and isinstance(outputs, Tensor):
        return y[..., None] if tuple(outputs.shape[1:]) == (*y.shape[1:], 1) else y
    if isinstance(y, dict) and isinstance(outputs, dict):
        return {name: fit_targets(one, outputs.get(name)) for name, one in y.items()}
    if isinstance(y, list) and isinstance(outputs, list | tuple):
        return [fit_targets(one, output) for one, output in zip(y, outputs, strict=False)]
    return y


def _fit_shape(values: Tensor, declared: tuple[int | None, ...]) -> Tensor:
    """Returns values of shape (rows, ...) in a declared shape, if a row has as many values."""
    shape = [size for size in declared[1:] if size is not None]
    is_known = len(shape) == len(declared) - 1
    sizes = list(values.shape[1:])
    if sizes == shape or not is_known or math.prod(shape) != math.prod(sizes):
        return values
    if len(sizes) > 2 and shape == [sizes[-1], *sizes[:-1]]:
        return values.movedim(-1, 1)
    # `len` would fix the number of rows in an exported program.
    return values.reshape(-1, *shape)


def pack(program: Any, x: Any, y: Any, weights: Any) -> Any:
    """Returns a batch in the form in which `fit` of Keras gives it to `train_step`."""
    return library.import_keras().utils.pack_x_y_sample_weight(fit_inputs(program, x), y, weights)


def refuse_steps(program: Any) -> None:
    """Raises ConfigError for a model that is not compiled, or writes parts of Keras' loop itself."""
    if not program.compiled:
        raise ConfigError(
            f"The model {program.name!r} is not compiled, so it has no loss and no optimizer. Call"
            " model.compile(optimizer=..., loss=...) in the function that task.init_args.model names."
        )
    if names := [name for name in library.overridden_steps(program) if name in library.LOOP]:
        raise ConfigError(
            f"{type(program).__name__} overrides {', '.join(names)}, but a run has its own loop. Write train_step,"
            " test_step, compute_loss or compute_metrics, which are called for each micro-batch; for another loop write"
            " a Task (docs/own-task.md)."
        )
