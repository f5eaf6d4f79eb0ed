"""A `train_step` that a model writes itself: the run takes its gradients in the place of the model's optimizers.

A phase of a step ends with a call of `apply`. The run adds the gradients of all workers, updates the weights, and calls
`train_step` again for the next phase: with the same rows and random numbers, from the weights of the start, and with
those that earlier phases have left where these end. So each phase computes what it computes in Keras.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ray_app.errors import ConfigError
from ray_app.task.base import WeightUpdate
from ray_app.task.keras import library
from ray_app.torch_private import tensor_version

Gradients = list[tuple[Any, Tensor]]
"""Variables with their gradients."""


class StepPhase(NamedTuple):
    """A call of `apply` in a step.

    Args:
        optimizer: The attribute of the model that has the optimizer.
        weights: The numbers of the weights in the order of `library.weights_of`.
    """

    optimizer: str
    weights: tuple[int, ...]


class OwnSteps(NamedTuple):
    """The steps that a model writes itself.

    Args:
        phases: The phases of `train_step`; empty for that of Keras.
        train_logs: The names of the values that `train_step` returns; None for that of Keras.
        test_logs: The names of the values that `test_step` returns; None for that of Keras.
        carried: The metrics that `train_step` returns of which states can be added, see `library.BatchFacts`.
        left_out: The others that are no means.
    """

    phases: Sequence[StepPhase] = ()
    train_logs: list[str] | None = None
    test_logs: list[str] | None = None
    carried: Sequence[str] = ()
    left_out: Sequence[str] = ()


class _PhaseEnd(BaseException):
    """Leaves `train_step`, also through its handlers of errors."""


class _RemovedWeight(Tensor):
    """A weight that raises where it is used."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(f"{func} uses a weight")


class HandOver(torch.autograd.Function):
    """A loss with a backward that gives parameters the gradients which a `train_step` has computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        """Returns the loss."""
        del parameters
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        """Returns the gradients, multiplied by that of the loss."""
        return None, None, *(gradient * factor for gradient in ctx.gradients)


def examine_steps(program: Any, data: Any) -> OwnSteps:
    """Returns the steps of a model, by calls with a batch that change no weight.

    Raises:
        ConfigError: A step does what cannot be done alike on several workers; the message names its line.
    """
    tensors = [library.tensor_of(variable) for variable in program.variables]
    values, plain = [tensor.detach().clone() for tensor in tensors], _plain_attributes(program)
    calls: list[tuple[str, Gradients]] = []
    names = library.overridden_steps(program)
    test_logs = None
    if "test_step" in names:
        with torch.no_grad():
            test_logs = list(program.test_step(data))
    if "train_step" not in names:
        program.reset_metrics()
        return OwnSteps(test_logs=test_logs)
    trained = library.trained_weights(program)
    # Spectral normalization writes weights alike in all workers.
    moving = set(map(id, library.normalized_kernels(program)))
    fixed = [variable for variable in trained if id(variable) not in moving]
    versions = {id(variable): tensor_version(library.tensor_of(variable)) for variable in fixed}
    for variable in fixed:
        vars(variable)["assign"] = lambda *_: _refuse(program, "assigns weights without its optimizers")
    try:
        with _intercept(program, lambda *call: calls.append(call)):
            train_logs = list(program.train_step(data))
        trained = library.trained_weights(program)
        numbers = {id(variable): i for i, (variable, _) in enumerate(library.weights_of(program))}
        phases = [StepPhase(name, tuple(numbers[id(v)] for v, _ in gradients)) for name, gradients in calls]
        weights = dict(phases)
        if not phases or any(weights[phase.optimizer] != phase.weights for phase in phases):
            _refuse(program, "calls apply of no optimizer of the model, or with other weights each time")
        moved = [v.path for v in trained if (now := tensor_version(library.tensor_of(v))) != versions.get(id(v), now)]
        if moved or _plain_attributes(program) != plain:
            _refuse(program, f"changes {moved or 'numbers in attributes'}, which no checkpoint contains")
        carried, left_out = _carried_metrics(program, data, train_logs)
        remaining = list(phases)

        def remove_weights(*call: Any) -> None:
            if len(remaining) == 1:
                for variable, tensor in bound:
                    library.bind_tensor(variable, tensor.detach().as_subclass(_RemovedWeight))
            remaining.pop()

        bound = [(variable, library.tensor_of(variable)) for variable in trained]
        try:
            with _intercept(program, remove_weights):
                program.train_step(data)
        except Exception as error:
            _refuse(program, "uses the weights after the last update", error)
        finally:
            for variable, tensor in bound:
                library.bind_tensor(variable, tensor)
    finally:
        for variable in trained:
            vars(variable).pop("assign", None)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
                tensor.grad = None
        program.reset_metrics()
    return OwnSteps(phases, train_logs, test_logs, carried, left_out)


def _carried_metrics(program: Any, data: Any, logs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns `carried` and `left_out` of `OwnSteps`, by two steps with the same random numbers."""
    named = [(name, metric) for name, metric in library.compiled_metrics(program) if name in logs and metric.variables]
    if not (metrics := {name: metric for name, metric in named if not library.is_mean(metric)}):
        return [], []
    program.reset_metrics()
    states = {id(variable) for metric in program.metrics for variable in metric.variables}
    variables = [*program.variables, library.global_seed_generator().state]
    others = [library.tensor_of(variable) for variable in variables if id(variable) not in states]
    values, once = [tensor.detach().clone() for tensor in others], dict[str, Tensor]()
    for _ in range(2):
        torch.manual_seed(0)
        with _intercept(program, lambda *_: None):
            program.train_step(data)
        with torch.no_grad():
            for tensor, value in zip(others, values, strict=True):
                tensor.copy_(value)
        once = once or {name: library.flat_states(metric) for name, metric in metrics.items()}
    carried = library.added_metrics(metrics, once)[1]
    return carried, [name for name in metrics if name not in carried]


def run_train_step(
    program: Any, data: Any, phases: Sequence[StepPhase], phase: int, updates: Sequence[WeightUpdate]
) -> tuple[dict[str, Any], Gradients]:
    """Calls `train_step` up to the end of a phase, and of the last phase up to its own end.

    Returns:
        What `train_step` returns, {} before the last phase; and the gradients of the phase.

    Raises:
        ConfigError: The optimizers are not called as in the phases.
    """
    names: list[str] = []
    taken: Gradients = []

    def take(name: str, gradients: Gradients) -> None:
        number = len(names)
        names.append(name)
        if number == phase:
            taken.extend(gradients)
            if number < len(phases) - 1:
                raise _PhaseEnd
        for p, _, value in updates[number] if number < len(updates) else []:
            p.copy_(value)

    with torch.no_grad():
        for p, value, _ in [one for update in reversed(updates) for one in update]:
            p.copy_(value)
    logs: dict[str, Any] = {}
    try:
        with _intercept(program, take):
            logs = program.train_step(data)
    except _PhaseEnd:
        pass
    else:
        if names != [one.optimizer for one in phases]:
            _refuse(program, f"calls apply of {names}, but before of {[one.optimizer for one in phases]}")
    return logs, taken


@contextmanager
def _intercept(program: Any, take: Callable[[str, Gradients], None]) -> Iterator[None]:
    """Calls a function in the place of `apply` of the optimizers of a model; losses are not scaled."""
    optimizers = library.optimizers_of(program)

    def apply(name: str, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = trainable_variables or library.optimized_variables(optimizer)
        with torch.no_grad():
            take(name, [(v, gradient) for v, gradient in zip(variables, grads, strict=True) if gradient is not None])

    for name, optimizer in optimizers.items():
        vars(optimizer).update(apply=partial(apply, name, optimizer), scale_loss=lambda loss: loss)
    try:
        with torch.enable_grad():
            yield
    finally:
        for optimizer in optimizers.values():
            del vars(optimizer)["apply"], vars(optimizer)["scale_loss"]


def _plain_attributes(program: Any) -> dict[str, Any]:
    """Returns the numbers that a model has as public attributes."""
    return {
        name: v
        for name, v in vars(program).items()
        if name[0] != "_" and name != "built" and isinstance(v, int | float)
    }


def _refuse(program: Any, reason: str, error: Exception | None = None) -> NoReturn:
    """Raises ConfigError that names the line of `train_step`."""
    code = inspect.unwrap(type(program).train_step).__code__
    calls = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    # A class that has travelled by value does not know its file.
    file = getattr(sys.modules.get(type(program).__module__), "__file__", code.co_filename)
    lines = [call.lineno for call in calls if (call.filename, call.name) == (code.co_filename, code.co_name)]
    raise ConfigError(
        f"train_step of {type(program).__name__} ({file}:{lines[-1] if lines else code.co_firstlineno}) {reason}. A"
        " step must compute a loss and its gradients, and call apply of optimizers that are attributes of the model,"
        " the same in each step: weights change when the gradients of all workers are added. For other steps, write a"
        " Task (docs/own-task.md)."
    ) from error
