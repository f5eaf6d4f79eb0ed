"""A training state in the parts that parameter servers hold, and back.

Which server holds which part of which variable: a pure function of shapes, so that everyone computes it alike.

As TensorFlow's `MinSizePartitioner`: a variable is split along its first dimension into at most one part per server,
none of them smaller than a given size. The parts then go to servers, the largest first, each to the one that holds
least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.checkpoint.format import Snapshot
from ray_app.config.sections import TrainSection
from ray_app.errors import ConfigError
from ray_app.train.state.parameters import ordered_parameters

_ALIGNED = 64
"""Parts are multiples of so many values, so that vector instructions treat each value as they would in the whole
variable.
"""


@dataclass(frozen=True, order=True)
class Strip:
    """Rows [low, high) along the first dimension of a variable; one without dimensions is one row."""

    variable: int
    low: int
    high: int

    def of(self, value: Tensor) -> Tensor:
        """This part of a tensor that has the variable's shape, sharing its memory."""
        return value[self.low : self.high] if value.ndim else value


def split_variable(variable: int, shape: Sequence[int], item_bytes: int, most: int, min_bytes: int) -> list[Strip]:
    """Splits a variable.

    Args:
        variable: Its number.
        shape: Its shape.
        item_bytes: Bytes of one value.
        most: Most parts.
        min_bytes: Fewest bytes of a part, unless the whole has fewer.
    """
    rows, row = (shape[0], prod(shape[1:])) if shape else (1, 1)
    aligned = _ALIGNED // gcd(_ALIGNED, max(1, row))
    count = max(1, min(most, rows * row * item_bytes // min_bytes, rows // aligned))
    ends = [rows * i // count // aligned * aligned for i in range(count)] + [rows]
    return [Strip(variable, low, high) for low, high in pairwise(ends)]


def partition_variables(
    shapes: Sequence[Sequence[int]], item_bytes: int, servers: int, min_bytes: int
) -> list[list[Strip]]:
    """Deals the parts of all variables to servers.

    Args:
        shapes: Of the variables.
        item_bytes: Bytes of one value.
        servers: How many.
        min_bytes: See `split_variable`.

    Returns:
        What each server holds, in the order of variables and rows; nothing for servers that are too many.
    """
    weight = {
        p: strip_bytes(p, shapes, item_bytes)
        for i, s in enumerate(shapes)
        for p in split_variable(i, s, item_bytes, servers, min_bytes)
    }
    held: list[list[Strip]] = [[] for _ in range(servers)]
    load = [0] * servers
    for strip in sorted(weight, key=lambda p: (-weight[p], p)):
        least = load.index(min(load))
        held[least].append(strip)
        load[least] += weight[strip]
    return [sorted(strips) for strips in held]


def strip_bytes(strip: Strip, shapes: Sequence[Sequence[int]], item_bytes: int) -> int:
    """Bytes of a part."""
    return (strip.high - strip.low) * prod(shapes[strip.variable][1:]) * item_bytes


Bytes = npt.NDArray[np.uint8]
"""Tensors as they travel: one after the other."""


def to_bytes(tensors: list[Tensor]) -> Bytes:
    """Tensors of any types and devices as one array."""
    parts = [t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return torch.cat(parts).numpy() if parts else np.empty(0, np.uint8)


def from_bytes(data: Bytes, like: list[Tensor]) -> list[Tensor]:
    """What `to_bytes` was given, sharing the array's memory; `like` tells types and shapes."""
    parts = torch.from_numpy(data).split([t.numel() * t.element_size() for t in like])
    return [_aligned(part).view(t.dtype).view(t.shape) for part, t in zip(parts, like, strict=True)]


def _aligned(part: Tensor) -> Tensor:
    """Bytes that may be looked at as any type."""
    return part if part.storage_offset() % 8 == 0 else part.clone()


class Layout:
    """Where the trained parameters of a model lie; they are numbered as the optimizer numbers them.

    Args:
        model: Whose parameters.
        optimizer: What moves them.
        train: Number of servers and size of the smallest part.

    Raises:
        ConfigError: There are more servers than parts, or parameters of several types.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, train: TrainSection) -> None:
        self.trained = ordered_parameters(optimizer)
        self.buffers = list(model.buffers())
        numbers = {id(p): i for i, p in enumerate(self.trained)}
        self._names: list[list[str]] = [[] for _ in self.trained]
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) in numbers:
                self._names[numbers[id(p)]].append(name)
        types = {p.dtype for p in self.trained}
        if len(types) != 1:
            raise ConfigError(
                f"train.strategy parameter_server needs trained parameters of one type; the model has"
                f" {sorted(map(str, types))}."
            )
        shapes, each = [tuple(p.shape) for p in self.trained], self.trained[0].element_size()
        self.parts = partition_variables(shapes, each, train.servers, train.min_shard_kb << 10)
        if not all(self.parts):
            filled = sum(bool(part) for part in self.parts)
            raise ConfigError(
                f"train.servers is {train.servers}, but the model has no more than {filled} parts of at least"
                f" train.min_shard_kb ="
                f" {train.min_shard_kb}. Set train.servers to at most {filled}, or lower train.min_shard_kb."
            )

    def held(self) -> list[dict[str, Any]]:
        """What each server holds, for the record: bytes of parameters, and of each variable by name the rows `[low,
        high)` of its parts.
        """
        found = []
        for part in self.parts:
            rows: dict[str, list[list[int]]] = {}
            for strip in part:
                rows.setdefault(self._names[strip.variable][0], []).append([strip.low, strip.high])
            found.append({"bytes": sum(value.nbytes for value in self.strips(part)), "variables": rows})
        return found

    def incomplete(self) -> list[list[int]]:
        """For each server the numbers of those of its parts that are not a whole variable."""
        rows = [p.shape[0] if p.ndim else 1 for p in self.trained]
        return [
            [i for i, strip in enumerate(part) if strip.high - strip.low < rows[strip.variable]] for part in self.parts
        ]

    def norms_of_joined(self, gradients: list[Bytes]) -> list[float]:
        """The norm of the gradient of every variable that is split.

        Args:
            gradients: What `incomplete` says of each server.
        """
        whole: dict[int, Tensor] = {}
        for part, chosen, data in zip(self.parts, self.incomplete(), gradients, strict=True):
            strips = [part[i] for i in chosen]
            for strip, value in zip(strips, from_bytes(data, self.strips(strips)), strict=True):
                p = self.trained[strip.variable]
                strip.of(whole.setdefault(strip.variable, torch.empty(p.shape, dtype=p.dtype))).copy_(value)
        return torch.stack(torch._foreach_norm(list(whole.values()))).tolist() if whole else []

    def strips(self, part: list[Strip]) -> list[Tensor]:
        """Views of a server's parts of the parameters."""
        return [strip.of(self.trained[strip.variable].detach()) for strip in part]

    @torch.no_grad()
    def put(self, parameters: list[Bytes], buffers: Bytes) -> None:
        """Writes what the servers sent into the model."""
        for part, data in zip(self.parts, parameters, strict=True):
            views = self.strips(part)
            for view, value in zip(views, from_bytes(data, views), strict=True):
                view.copy_(value)
        for buffer, value in zip(self.buffers, from_bytes(buffers, self.buffers), strict=True):
            buffer.copy_(value)

    def gradients(self) -> list[Bytes]:
        """The parameters' gradients for each server; zeros where there is none."""
        values = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.trained]
        return [to_bytes([strip.of(values[strip.variable]) for strip in part]) for part in self.parts]

    def split(self, whole: Snapshot) -> list[Snapshot]:
        """What each server gets of a state, in memory of its own; its parameters are called by their numbers there."""
        return [self._part(whole, part) for part in self.parts]

    def _part(self, whole: Snapshot, part: list[Strip]) -> Snapshot:
        def cut(state: dict[str, Tensor]) -> dict[str, Tensor]:
            return {str(i): strip.of(state[self._names[strip.variable][0]]).clone() for i, strip in enumerate(part)}

        held, more = whole.optimizer["state"], {name: cut(value) for name, value in whole.more.items()}
        state = {i: self._cut(held[strip.variable], strip) for i, strip in enumerate(part) if strip.variable in held}
        groups = [
            {**group, "params": [i for i, strip in enumerate(part) if strip.variable in group["params"]]}
            for group in whole.optimizer["param_groups"]
        ]
        return Snapshot(whole.step, cut(whole.model), {"state": state, "param_groups": groups}, whole.schedule, more)

    def _cut(self, values: dict[str, Any], strip: Strip) -> dict[str, Any]:
        shape = self.trained[strip.variable].shape
        return {
            name: strip.of(v).clone() if isinstance(v, Tensor) and v.shape == shape else v for name, v in values.items()
        }

    def merge(self, parts: list[Snapshot], whole: Snapshot) -> Snapshot:
        """The state that the servers hold together.

        Args:
            parts: What each of them holds.
            whole: A state of the whole model, from which all else is taken; it is written to.
        """
        found: dict[int, list[dict[str, Any]]] = {}
        for variable, _, place, i in sorted(
            (p.variable, p.low, at, i) for at, part in enumerate(self.parts) for i, p in enumerate(part)
        ):
            strip, held = self.parts[place][i], parts[place]
            for name in self._names[variable]:
                strip.of(whole.model[name]).copy_(held.model[str(i)])
                for kind, values in held.more.items():
                    strip.of(whole.more[kind][name]).copy_(values[str(i)])
            found.setdefault(variable, []).append(held.optimizer["state"].get(i, {}))
        state = {variable: self._joined(values, variable) for variable, values in found.items() if values[0]}
        members = [group["params"] for group in whole.optimizer["param_groups"]]
        groups = [
            {**group, "params": params}
            for group, params in zip(parts[0].optimizer["param_groups"], members, strict=True)
        ]
        optimizer = {"state": state, "param_groups": groups}
        return Snapshot(parts[0].step, whole.model, optimizer, parts[0].schedule, whole.more)

    def _joined(self, values: list[dict[str, Any]], variable: int) -> dict[str, Any]:
        if len(values) == 1:
            return values[0]
        dims = self.trained[variable].ndim
        return {
            name: torch.cat([v[name] for v in values]) if isinstance(first, Tensor) and first.ndim == dims else first
            for name, first in values[0].items()
        }
