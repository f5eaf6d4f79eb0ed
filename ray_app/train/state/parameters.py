"""A model's parameters: matching names, optimizer groups, freezing, memory layout, initial values, moving average.

A pattern is a name of a parameter in which `*` stands for any text (`fnmatch`).
"""

from __future__ import annotations

import difflib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.optim import Optimizer

from ray_app.checkpoint.format import StoredTensor, params_digest
from ray_app.devices import HOST
from ray_app.errors import ConfigError, join_names
from ray_app.storage.data_files import HEAD_BYTES, name_foreign_file
from ray_app.storage.files import to_location
from ray_app.task.configured_arguments import TASK_LOSS
from ray_app.torch_private import BatchNorm, foreach_lerp_

_MAX_SUGGESTIONS = 3
_MAX_DIFFERENCES = 5
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02")
"""How files of `torch.save` begin: the zip format, and the one before it."""
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
"""Names under which checkpoints of Lightning and of usual scripts have the state dict of the model."""


def match_names(names: Iterable[str], pattern: str, field: str) -> list[str]:
    """Returns the names that a pattern matches.

    Args:
        names: The names of a model's parameters.
        pattern: The pattern of the configuration.
        field: Field of the configuration that has the pattern, for the error.

    Raises:
        ConfigError: The pattern matches no name.
    """
    all_names = list(names)
    matches = [name for name in all_names if fnmatchcase(name, pattern)]
    if not matches:
        near = difflib.get_close_matches(pattern, all_names, _MAX_SUGGESTIONS, cutoff=0.4)
        hint = f" The nearest: {', '.join(near)}." if near else ""
        raise ConfigError(
            f"{field} names {pattern!r}, which matches no parameter; the model has {join_names(all_names)}.{hint}"
        )
    return matches


NAMES, NORMS_AND_BIASES = "names", "norms_and_biases"
"""The keys of a group in the configuration that select its parameters; all other keys are options of the optimizer."""


def group_parameters(
    named: Mapping[str, nn.Parameter], groups: Sequence[dict[str, Any]], field: str
) -> list[dict[str, Any]]:
    """Returns the trained parameters in groups for an optimizer: first the parameters without a group, then the groups.

    Args:
        named: The parameters by name.
        groups: The groups of the configuration; a parameter belongs to the first group that selects it.
        field: Field of the configuration that has the groups, for errors.

    Returns:
        The parameter groups as the optimizer takes them: the options of each group, and its parameters as `params`.
        Groups without a trained parameter are left out.

    Raises:
        ConfigError: A group does not say which parameters it has, or one of its patterns matches no parameter.
    """
    remaining = dict(named)
    configured = []
    for group in groups:
        patterns = group.get(NAMES) or []
        if not isinstance(patterns, list) or not (patterns or group.get(NORMS_AND_BIASES)):
            raise ConfigError(
                f"{field} has {group}; name the parameters with these options by {NAMES}, a list, or by"
                f" {NORMS_AND_BIASES}: true."
            )
        names = {name for pattern in patterns for name in match_names(named, pattern, field)}
        # The parameters of norms, and biases, have at most one dimension.
        if group.get(NORMS_AND_BIASES):
            names |= {name for name, p in named.items() if p.ndim <= 1}
        members = [remaining.pop(name) for name in list(remaining) if name in names]
        options = {key: value for key, value in group.items() if key not in (NAMES, NORMS_AND_BIASES)}
        configured.append({**options, "params": members})
    all_groups = [{"params": list(remaining.values())}, *configured]
    trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in all_groups]
    return [group for group in trained if group["params"]]


def check_group_options(optimizer: Optimizer, groups: Sequence[dict[str, Any]], field: str) -> None:
    """Checks that each option of the groups is one of the optimizer, and a number if its default is a number.

    Args:
        optimizer: The optimizer.
        groups: The groups of the configuration.
        field: Field of the configuration that has the groups, for errors.

    Raises:
        ConfigError: An option is unknown or not a number.
    """
    for group in groups:
        for name, value in group.items():
            if name in (NAMES, NORMS_AND_BIASES):
                continue
            if name not in optimizer.defaults:
                near = difflib.get_close_matches(name, optimizer.defaults, 1)
                raise ConfigError(
                    f"{field} sets {name!r}, which is not an option of {type(optimizer).__name__};"
                    + (f" the nearest is {near[0]}, and" if near else "")
                    + f" the options are {', '.join(optimizer.defaults)}."
                )
            if isinstance(optimizer.defaults[name], float | int) and not isinstance(value, float | int):
                raise ConfigError(f"{field} sets {name} to {value!r}; it must be a number.")


def ordered_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters in the order in which the optimizer numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameter_numbers(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[int]:
    """Returns for each parameter its number in the optimizer, which is its key in the optimizer's `state_dict`."""
    numbers = {id(p): number for number, p in enumerate(ordered_parameters(optimizer))}
    return [numbers[id(p)] for p in parameters]


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Loads a state into an optimizer and keeps the dtypes with which the state was saved.

    PyTorch's `load_state_dict` alone would convert tensors of the state to the dtype of their parameter, which changes
    the state of NAdam and of user optimizers in bf16.
    """
    optimizer.load_state_dict(saved)
    for p, number in zip(
        ordered_parameters(optimizer), (n for group in saved["param_groups"] for n in group["params"]), strict=True
    ):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and (loaded := optimizer.state[p][name]).dtype != value.dtype:
                optimizer.state[p][name] = value.to(loaded.device, copy=True)


def parameter_layout(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Returns name, type and shape of the parameters in their order, such as `("layer.weight", "float32 (2, 5)")`."""
    shapes = ((name, p, None if is_lazy(p) else tuple(p.shape)) for name, p in model.named_parameters())
    return tuple((name, f"{str(p.dtype).removeprefix('torch.')} {shape}") for name, p, shape in shapes)


def check_parameter_layout(model: nn.Module, layout: Sequence[tuple[str, str]]) -> None:
    """Raises ConfigError if the parameters differ from those that the driver has built; an empty layout: any.

    Initial values are drawn, and gradients are sent, in the order of the parameters.
    """
    for (name, kind), (other, other_kind) in zip(layout, parameter_layout(model), strict=False):
        if other != name:
            raise ConfigError(
                f"The model has the parameter {other} in this process where it has {name} in the driver. Code that"
                " iterates over a set of texts sees another order in each process, so that the initial values would be"
                " others in each run: sort the set (for name in sorted(names))."
            )
        if other_kind != kind:
            raise ConfigError(
                f"The parameter {name} is {other_kind} in this process, and {kind} in the driver. A worker imports the"
                " code by itself: what the program has changed (a variable of a module, torch.set_default_dtype)"
                " does not reach it. Give the model arguments (init_args) instead."
            )


def freeze_parameters(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """Excludes parameters from training.

    Args:
        model: The model.
        patterns: Value of `train.freeze`.

    Returns:
        The batch-norm layers in which every parameter is frozen. The caller keeps them in evaluation mode, so that
        their running statistics do not change, as in Keras.

    Raises:
        ConfigError: A pattern matches no parameter, or nothing is left to train.
    """
    # A tied parameter has several names, and a pattern may match any of them.
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        for name in match_names(named, pattern, "train.freeze"):
            named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise ConfigError(f"train.freeze {patterns} leaves nothing to train; the model has {join_names(list(named))}.")
    layers = (
        [(m, [p.requires_grad for p in m.parameters()]) for m in model.modules() if isinstance(m, BatchNorm)]
        if patterns
        else []
    )
    return [layer for layer, trained in layers if trained and not any(trained)]


def make_contiguous(model: nn.Module) -> nn.Module:
    """Gives each parameter of a model the contiguous memory layout of its shape, in place, and returns the model.

    Fused optimizers pair the values of a parameter, its gradient and its state by their positions in memory, and
    reduction, checkpoints and transfers use contiguous tensors.

    Raises:
        ConfigError: Values of a parameter share their memory; a copy would end the sharing and train other values.
    """
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            continue
        if any(size > 1 and not step for size, step in zip(p.shape, p.stride(), strict=True)):
            raise ConfigError(
                f"Values of the parameter {name}, of shape {tuple(p.shape)}, share their memory (expand): an optimizer"
                " would update one value several times in a step. Create the parameter with .clone(), or make it small"
                " and expand it in forward."
            )
        if p.stride() != torch.empty(p.shape, device="meta").stride():
            # `contiguous()` would not copy where a size is 1: PyTorch calls such a tensor contiguous with any stride.
            p.data = p.data.clone(memory_format=torch.contiguous_format)
    return model


def read_parameters(path: str, digest: str | None) -> dict[str, Tensor]:
    """Returns the parameters in a file, by name.

    Args:
        path: Path or URI of a file of safetensors, or of tensors alone as `torch.save` writes them: a state dict, or a
            mapping that has one as `state_dict`, such as a checkpoint of Lightning.
        digest: The `params_digest` that the parameters must have; None accepts any parameters.

    Raises:
        ConfigError: The file is missing, holds something else, or has parameters with another digest.
        OSError: The storage does not answer.
    """
    try:
        data = to_location(path).read_bytes()
    except FileNotFoundError as error:
        raise unreadable_parameters_error(path, error) from error
    try:
        is_torch = data.startswith(_TORCH_MAGIC)
        parameters = _parse_state_dict(data) if is_torch else safetensors.torch.load(data)
    # Neither library says which exceptions it raises, so every exception counts.
    except Exception as error:
        foreign = name_foreign_file(data[:HEAD_BYTES])
        reason = f"the file is {foreign}" if foreign else next(iter(str(error).splitlines()), "").rstrip(".")
        raise ConfigError(
            f"train.init_from {path!r} is neither a safetensors file nor one of torch.save with only tensors, and none"
            f" of its code was run: {reason}. Save the parameters with safetensors.torch.save_file, or with"
            " torch.save(model.state_dict(), FILE)."
        ) from error
    check_parameters_digest(parameters, path, digest)
    return parameters


def _parse_state_dict(data: bytes) -> dict[str, Tensor]:
    """Returns the tensors of a file of `torch.save`, without the prefixes of `DataParallel` and `torch.compile`."""
    content = torch.load(io.BytesIO(data), map_location=HOST, weights_only=True)
    state = next((content[key] for key in _STATE_DICT_KEYS if isinstance(content.get(key), dict)), content)
    for prefix in ("module.", "_orig_mod."):
        consume_prefix_in_state_dict_if_present(state, prefix)
    if wrong := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{join_names(list(map(str, wrong)), _MAX_DIFFERENCES)} in it are not tensors")
    # Tied parameters are copied, since safetensors, in which the run keeps them, has no shared memory.
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in state.items()}


def unreadable_parameters_error(path: str, error: OSError) -> ConfigError:
    """Returns the error for a file of parameters that cannot be read."""
    return ConfigError(
        f"train.init_from {path!r} cannot be read: {error}. Name the directory of a run, the folder of a checkpoint or"
        " an export, a file of parameters (safetensors, or a state dict), or models:/NAME@ALIAS."
    )


def check_parameters_digest(parameters: Mapping[str, Tensor | StoredTensor], path: str, digest: str | None) -> None:
    """Checks that initial parameters are those with which the run began.

    Args:
        parameters: The parameters by name.
        path: Value of `train.init_from`, for the error.
        digest: The `params_digest` of the parameters with which the run began; None accepts any parameters.

    Raises:
        ConfigError: The parameters have another digest.
    """
    if digest is not None and params_digest(parameters) != digest:
        raise ConfigError(
            f"train.init_from {path!r} holds parameters with the digest {params_digest(parameters)}, but the run began"
            f" with {digest}. Name the parameters with which the run began, or start a new run."
        )


def load_initial_parameters(model: nn.Module, initial: Mapping[str, Tensor], init_from: str | None) -> None:
    """Loads initial parameters into a model, see `match_initial_parameters`."""
    model.load_state_dict(match_initial_parameters(model, initial, init_from))


def match_initial_parameters(model: nn.Module, initial: Mapping[str, Any], init_from: str | None) -> dict[str, Any]:
    """Returns initial parameters for each parameter and persistent buffer of a model, by name.

    Args:
        model: The model as its task built it.
        initial: Parameters and persistent buffers by name. A loss of the task (`task_loss`) may be missing, which then
            keeps its values, or be there although this model has none.
        init_from: Value of `train.init_from`, for the error.

    Raises:
        ConfigError: The parameters do not fit the model.
    """
    expected = model.state_dict()
    of_loss: dict[str, Any] = {name: value for name, value in expected.items() if name.startswith(f"{TASK_LOSS}.")}
    matched = of_loss | {
        name: value for name, value in initial.items() if name in expected or not name.startswith(f"{TASK_LOSS}.")
    }
    problems = _differences(expected, matched)
    if problems:
        raise ConfigError(
            f"train.init_from {init_from!r} does not fit the model: {'; '.join(problems)}. Name parameters of the same"
            " model, or set task.init_args as in their training."
        )
    return matched


def _differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Returns one text for each kind of difference between the parameters of a model and those of a file."""
    kinds = {
        "missing": sorted(expected.keys() - actual.keys()),
        "unexpected": sorted(actual.keys() - expected.keys()),
        "of another shape or type": [
            f"{name} {actual[name].dtype} {tuple(actual[name].shape)}, wanted {expected[name].dtype}"
            f" {tuple(expected[name].shape)}"
            for name in sorted(expected.keys() & actual.keys())
            if (expected[name].dtype, expected[name].shape) != (actual[name].dtype, actual[name].shape)
        ],
    }
    return [f"{kind}: {join_names(names, _MAX_DIFFERENCES)}" for kind, names in kinds.items() if names]


class ParameterAverage:
    """The exponential moving average of a model's parameters, which the run returns with `train.ema_decay`.

    It is one more copy of the parameters. In step t, counted from 0, the decay is min(decay, (1 + t) / (10 + t)), so
    that the initial parameters lose their weight quickly, as in TensorFlow's `ExponentialMovingAverage` with
    `num_updates`.

    Args:
        model: The model.
        decay: Maximum weight of the old average in an update, 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters, self._decay = list(model.parameters()), decay
        numbers = {id(p): i for i, p in enumerate(self._parameters)}
        self._names = {name: numbers[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._values = [p.detach().clone() if _has_average(p) else p.detach() for p in self._parameters]
        self._moving = [(v, p) for v, p in zip(self._values, self._parameters, strict=True) if _has_average(p)]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the present parameters.

        Args:
            step: Number of finished steps before the update of the parameters, which decides the decay.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        foreach_lerp_([v for v, _ in self._moving], [p.detach() for _, p in self._moving], 1 - decay)

    def averaged_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a model's state with the average in place of the parameters."""
        return {
            name: self._values[self._names[name]] if name in self._names else value for name, value in state.items()
        }

    def parameters(self) -> dict[str, Tensor]:
        """Returns the trained parameters by name."""
        return {name: self._parameters[number].detach() for name, number in self._names.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Loads an average and the trained parameters.

        Args:
            state: The result of `averaged_state`; it may lack frozen parameters.
            parameters: The result of `parameters`; it may lack frozen parameters.
        """
        for name, number in self._names.items():
            if (parameter := parameters.get(name)) is not None:
                self._parameters[number].copy_(parameter)
            if (average := state.get(name, parameter)) is not None:
                self._values[number].copy_(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchanges the values of the model's parameters with the average inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, value in zip(self._parameters, self._values, strict=True):
            trained_value = parameter.clone()
            parameter.copy_(value)
            value.copy_(trained_value)


def _has_average(p: Tensor) -> bool:
    """Returns whether a parameter is averaged; one of integers (a quantized base model) keeps its values."""
    return p.is_floating_point() or p.is_complex()


def with_counters(value: Any, like: Any) -> Any:
    """Returns the state of a schedule with a `Counter` wherever `like` has one (`MultiStepLR`).

    A snapshot has plain dictionaries instead.
    """
    if isinstance(like, Counter):
        return Counter(value)
    if isinstance(like, dict) and isinstance(value, dict):
        return {k: with_counters(v, like.get(k)) for k, v in value.items()}
    if isinstance(like, list) and isinstance(value, list) and len(like) == len(value):
        return [with_counters(v, other) for v, other in zip(value, like, strict=True)]
    return value
