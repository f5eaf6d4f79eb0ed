"""Groups of parameters that an optimizer treats differently, by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.errors import ConfigError
from ray_app.train.state.names import matching

NAMES, NORMS_AND_BIASES = "names", "norms_and_biases"


def grouped(named: Mapping[str, nn.Parameter], groups: Sequence[dict[str, Any]], field: str = "optimizer.groups") -> list[dict[str, Any]]:
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
            raise ConfigError(f"{field} has {group}; say whose options these are by {NAMES}, a list, or by {NORMS_AND_BIASES}: true.")
        wanted = {name for pattern in patterns for name in matching(named, pattern, field)}
        if group.get(NORMS_AND_BIASES):
            wanted |= {name for name, p in named.items() if p.ndim <= 1}
        taken = [left.pop(name) for name in list(left) if name in wanted]
        made.append({**{key: value for key, value in group.items() if key not in (NAMES, NORMS_AND_BIASES)}, "params": taken})
    found = [{"params": list(left.values())}, *made]
    trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in found]
    return [group for group in trained if group["params"]]


def refuse_unknown_options(optimizer: Optimizer, groups: Sequence[dict[str, Any]], field: str = "optimizer.groups") -> None:
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


def in_order(optimizer: Optimizer) -> list[Tensor]:
    """The parameters as the optimizer numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def numbers(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[int]:
    """The optimizer's numbers of parameters."""
    known = {id(p): number for number, p in enumerate(in_order(optimizer))}
    return [known[id(p)] for p in parameters]


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Takes over a state with the dtypes that it has; PyTorch alone makes them those of the parameters (NAdam, own optimizers in bf16)."""
    optimizer.load_state_dict(saved)
    for p, number in zip(in_order(optimizer), (n for group in saved["param_groups"] for n in group["params"]), strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and (loaded := optimizer.state[p][name]).dtype != value.dtype:
                optimizer.state[p][name] = value.to(loaded.device, copy=True)
