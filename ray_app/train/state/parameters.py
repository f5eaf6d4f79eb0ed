"""Parameters by patterns of their names, `*` for any text.

Groups of parameters that an optimizer treats differently, by their names.

Parameters that are not trained.

The parameters that a run begins with where they do not come from the seed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from ray_app.checkpoint.format import params_digest
from ray_app.errors import ConfigError
from ray_app.storage.data_files import HEAD_BYTES, name_foreign_file
from ray_app.storage.files import to_location

_MOST_NAMED, _MOST_NEAR = 12, 3


def match_names(names: Iterable[str], pattern: str, field: str) -> list[str]:
    """The names that a pattern matches.

    Args:
        names: Of a model's parameters.
        pattern: What a configuration says.
        field: Where it says so.

    Raises:
        ConfigError: It matches none.
    """
    known = list(names)
    found = [name for name in known if fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, known, _MOST_NEAR, cutoff=0.4)
        hint = f" The nearest: {', '.join(near)}." if near else ""
        raise ConfigError(
            f"{field} names {pattern!r}, which matches no parameter; the model has {format_names(known)}.{hint}"
        )
    return found


def format_names(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )


NAMES, NORMS_AND_BIASES = "names", "norms_and_biases"


def group_parameters(
    named: Mapping[str, nn.Parameter], groups: Sequence[dict[str, Any]], field: str = "optimizer.groups"
) -> list[dict[str, Any]]:
    """The trained parameters in the groups that an optimizer is made with: the rest, then those that are asked for.

    Args:
        named: The parameters by name.
        groups: What the configuration asks for; a parameter is in the first group that names it.
        field: Where it says so.

    Returns:
        Options of the optimizer and `params` of each group that has a trained parameter.

    Raises:
        ConfigError: A group names nothing, or what it names matches no parameter.
    """
    left = dict(named)
    made = []
    for group in groups:
        patterns = group.get(NAMES) or []
        if not isinstance(patterns, list) or not (patterns or group.get(NORMS_AND_BIASES)):
            raise ConfigError(
                f"{field} has {group}; say whose options these are by {NAMES}, a list, or by {NORMS_AND_BIASES}: true."
            )
        wanted = {name for pattern in patterns for name in match_names(named, pattern, field)}
        if group.get(NORMS_AND_BIASES):
            wanted |= {name for name, p in named.items() if p.ndim <= 1}
        taken = [left.pop(name) for name in list(left) if name in wanted]
        made.append(
            {**{key: value for key, value in group.items() if key not in (NAMES, NORMS_AND_BIASES)}, "params": taken}
        )
    found = [{"params": list(left.values())}, *made]
    trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in found]
    return [group for group in trained if group["params"]]


def check_group_options(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], field: str = "optimizer.groups"
) -> None:
    """Refuses options of groups that the optimizer does not have, or that are no number where it has one.

    Raises:
        ConfigError: There are such.
    """
    for group in groups:
        for name, value in group.items():
            if name in (NAMES, NORMS_AND_BIASES):
                continue
            if name not in optimizer.defaults:
                near = difflib.get_close_matches(name, optimizer.defaults, 1)
                raise ConfigError(
                    f"{field} sets {name!r}, which is no option of {type(optimizer).__name__};"
                    + (f" the nearest is {near[0]}, and" if near else "")
                    + f" there are {', '.join(optimizer.defaults)}."
                )
            if isinstance(optimizer.defaults[name], float | int) and not isinstance(value, float | int):
                raise ConfigError(f"{field} sets {name} to {value!r}; it must be a number.")


def ordered_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters as the optimizer numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameter_numbers(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[int]:
    """The optimizer's numbers of parameters."""
    known = {id(p): number for number, p in enumerate(ordered_parameters(optimizer))}
    return [known[id(p)] for p in parameters]


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Takes over a state with the dtypes that it has; PyTorch alone makes them those of the parameters (NAdam, own
    optimizers in bf16).
    """
    optimizer.load_state_dict(saved)
    for p, number in zip(
        ordered_parameters(optimizer), (n for group in saved["param_groups"] for n in group["params"]), strict=True
    ):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and (loaded := optimizer.state[p][name]).dtype != value.dtype:
                optimizer.state[p][name] = value.to(loaded.device, copy=True)


def freeze_parameters(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """Takes parameters out of training.

    Args:
        model: Whose parameters.
        patterns: Names, with `*` for any text.

    Returns:
        The batch-norm layers that have parameters, all of them frozen: they are to keep their statistics, as in Keras.

    Raises:
        ConfigError: A pattern matches no parameter, or nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied one has several names
    for pattern in patterns:
        for name in match_names(named, pattern, "train.freeze"):
            named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise ConfigError(
            f"train.freeze {patterns} leaves nothing to train; the model has {format_names(list(named))}."
        )
    layers = (
        [(m, [p.requires_grad for p in m.parameters()]) for m in model.modules() if isinstance(m, _BatchNorm)]
        if patterns
        else []
    )
    return [layer for layer, trained in layers if trained and not any(trained)]


_MAX_SHARED_NAMED = 5


def make_contiguous(model: nn.Module) -> nn.Module:
    """A model whose parameters lie in memory as their shapes say: fused optimizers pair a parameter's values with those
    of gradient and state by their places in memory, and what is exchanged, saved or sent lies as the shape says.

    Raises:
        ConfigError: Values of a parameter share their memory, which its copy would not do.
    """
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            continue
        if any(size > 1 and not step for size, step in zip(p.shape, p.stride(), strict=True)):
            raise ConfigError(
                f"Values of the parameter {name}, of shape {tuple(p.shape)}, share their memory (expand): an optimizer"
                f" would move one value"
                " several times in a step. Make it with .clone(), so that each has its own, or make the parameter small"
                " and expand it in"
                " forward."
            )
        if p.stride() != torch.empty(p.shape, device="meta").stride():
            p.data = p.data.clone(
                memory_format=torch.contiguous_format
            )  # also where a size is 1, and PyTorch calls it contiguous
    return model


def read_parameters(place: str, digest: str | None) -> dict[str, Tensor]:
    """Reads a file of parameters.

    Args:
        place: A safetensors file, a path or an s3:// URI.
        digest: `params_digest` that they must have; None: any.

    Raises:
        ConfigError: It is not there, is no safetensors file, or holds other parameters than these.
        OSError: The storage does not answer.
    """
    try:
        data = to_location(place).read_bytes()
    except FileNotFoundError as error:
        raise unreadable_parameters_error(place, error) from error
    try:
        found = safetensors.torch.load(data)
    except Exception as error:  # an exception of the library's own
        foreign = name_foreign_file(data[:HEAD_BYTES])
        reason = f"it is {foreign}" if foreign else str(error)
        raise ConfigError(
            f"train.init_from {place!r} is no safetensors file: {reason}. Save parameters with safetensors.torch."
        ) from error
    check_parameters_digest(found, place, digest)
    return found


def unreadable_parameters_error(place: str, error: OSError) -> ConfigError:
    """How a file of parameters that cannot be read is refused."""
    return ConfigError(
        f"train.init_from {place!r} cannot be read: {error}. Name a safetensors file, the folder of an export, or"
        f" models:/NAME@ALIAS."
    )


def check_parameters_digest(found: dict[str, Tensor], place: str, digest: str | None) -> None:
    """Refuses parameters that do not have the digest that they must have.

    Raises:
        ConfigError: They do not.
    """
    if digest is not None and params_digest(found) != digest:
        raise ConfigError(
            f"train.init_from {place!r} holds parameters with the digest {params_digest(found)}, but the run begins"
            f" with {digest}. Give"
            " those of before, or start a new run."
        )


def load_initial_parameters(model: nn.Module, found: dict[str, Tensor], called: str | None) -> None:
    """Gives a model parameters.

    Args:
        model: The model as its task built it.
        found: Its parameters and persistent buffers by name.
        called: What the configuration calls them.

    Raises:
        ConfigError: They are not the model's.
    """
    problems = _differences(model.state_dict(), found)
    if problems:
        raise ConfigError(
            f"train.init_from {called!r} does not fit the model: {'; '.join(problems)}. Give parameters of the same"
            f" model, or set"
            " task.init_args to what they were trained with."
        )
    model.load_state_dict(found)


def _differences(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Why parameters are not those of a model."""
    kinds = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape or type": [
            f"{name} {found[name].dtype} {tuple(found[name].shape)}, wanted {wanted[name].dtype}"
            f" {tuple(wanted[name].shape)}"
            for name in sorted(wanted.keys() & found.keys())
            if (wanted[name].dtype, wanted[name].shape) != (found[name].dtype, found[name].shape)
        ],
    }
    return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHARED_NAMED} more" if len(names) > _MAX_SHARED_NAMED else ""
    return ", ".join(names[:_MAX_SHARED_NAMED]) + more
