"""The layout of a training state on parameter servers: it splits a state into the servers' parts and merges them.

Which server has which part of which variable is a pure function of shapes, which every process computes alike. As in
TensorFlow's `MinSizePartitioner` a variable is split along its first dimension into at most one part per server, none
of them smaller than 256 KiB. The parts then go to servers, the largest first, each to the server with the
fewest bytes.
"""

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
from ray_app.errors import ConfigError
from ray_app.reduction.reducer import gradient_norms
from ray_app.train.state.parameters import ordered_parameters

_ALIGNED = 64
"""The number of values in a part is a multiple of this number.

Vector instructions then treat each value as they would in the whole variable.
"""


@dataclass(frozen=True, order=True)
class Strip:
    """Rows [low, high) along the first dimension of a variable; one without dimensions is one row."""

    variable: int
    low: int
    high: int

    def of(self, value: Tensor) -> Tensor:
        """Returns this part of a tensor that has the variable's shape, sharing its memory."""
        return value[self.low : self.high] if value.ndim else value


def split_variable(variable: int, shape: Sequence[int], item_bytes: int, max_parts: int, min_bytes: int) -> list[Strip]:
    """Returns the parts of a variable.

    Args:
        variable: Number of the variable.
        shape: Shape of the variable.
        item_bytes: Bytes of one value.
        max_parts: Maximum number of parts.
        min_bytes: Minimum bytes of a part, unless the whole variable has fewer.
    """
    rows, row = (shape[0], prod(shape[1:])) if shape else (1, 1)
    aligned = _ALIGNED // gcd(_ALIGNED, max(1, row))
    count = max(1, min(max_parts, rows * row * item_bytes // min_bytes, rows // aligned))
    ends = [rows * i // count // aligned * aligned for i in range(count)] + [rows]
    return [Strip(variable, low, high) for low, high in pairwise(ends)]


def partition_variables(
    shapes: Sequence[Sequence[int]], item_bytes: int, servers: int, min_bytes: int
) -> list[list[Strip]]:
    """Distributes the parts of all variables over servers.

    Args:
        shapes: Shapes of the variables.
        item_bytes: Bytes of one value.
        servers: Number of servers.
        min_bytes: See `split_variable`.

    Returns:
        The parts of each server, in the order of variables and rows; none for superfluous servers.
    """
    weight = {
        p: strip_bytes(p, shapes, item_bytes)
        for i, s in enumerate(shapes)
        for p in split_variable(i, s, item_bytes, servers, min_bytes)
    }
    strips_of_server: list[list[Strip]] = [[] for _ in range(servers)]
    load = [0] * servers
    for strip in sorted(weight, key=lambda p: (-weight[p], p)):
        server = load.index(min(load))
        strips_of_server[server].append(strip)
        load[server] += weight[strip]
    return [sorted(strips) for strips in strips_of_server]


def strip_bytes(strip: Strip, shapes: Sequence[Sequence[int]], item_bytes: int) -> int:
    """Returns the bytes of a part."""
    return (strip.high - strip.low) * prod(shapes[strip.variable][1:]) * item_bytes


Bytes = npt.NDArray[np.uint8]
"""The bytes of tensors, one after the other, as they are sent."""


def to_bytes(tensors: list[Tensor]) -> Bytes:
    """Returns tensors of any types and devices as one array."""
    parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return torch.cat(parts).numpy() if parts else np.empty(0, np.uint8)


def from_bytes(data: Bytes, like: list[Tensor]) -> list[Tensor]:
    """Returns the tensors in an array of `to_bytes`, sharing its memory; `like` has their types and shapes."""
    parts = torch.from_numpy(data).split([t.numel() * t.element_size() for t in like])
    # Bytes can be viewed as any type only if their address is a multiple of 8.
    aligned = (part if part.storage_offset() % 8 == 0 else part.clone() for part in parts)
    return [part.view(t.dtype).view(t.shape) for part, t in zip(aligned, like, strict=True)]


_MIN_PART_BYTES = 256 << 10
"""Smallest part into which a parameter is split, the default of TensorFlow's `MinSizePartitioner`.

Smaller parts cost a message each and relieve no server.
"""


class Layout:
    """The distribution of a model's trained parameters over servers; the optimizer numbers the parameters.

    Args:
        model: The model.
        optimizer: The optimizer of its trained parameters.
        servers: Number of servers.

    Raises:
        ConfigError: There are more servers than parts, or parameters of several types.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, servers: int) -> None:
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
        shapes, item_bytes = [tuple(p.shape) for p in self.trained], self.trained[0].element_size()
        self.parts = partition_variables(shapes, item_bytes, servers, _MIN_PART_BYTES)
        if not all(self.parts):
            filled = sum(bool(part) for part in self.parts)
            raise ConfigError(
                f"train.servers is {servers}, but the model has no more than {filled} parts, since a parameter is split"
                f" only into parts of at least {_MIN_PART_BYTES >> 10} KiB. Set train.servers to at most {filled}."
            )

    def describe(self) -> list[dict[str, Any]]:
        """Returns a description of each server's parts, for the record.

        It has the bytes of the parameters, and for each variable by name the rows `[low, high)` of its parts.
        """
        descriptions = []
        for part in self.parts:
            rows: dict[str, list[list[int]]] = {}
            for strip in part:
                rows.setdefault(self._names[strip.variable][0], []).append([strip.low, strip.high])
            descriptions.append({"bytes": sum(value.nbytes for value in self.strips(part)), "variables": rows})
        return descriptions

    def incomplete(self) -> list[list[int]]:
        """Returns for each server the numbers of its parts that are not a whole variable."""
        rows = [p.shape[0] if p.ndim else 1 for p in self.trained]
        return [
            [i for i, strip in enumerate(part) if strip.high - strip.low < rows[strip.variable]] for part in self.parts
        ]

    def norms_of_joined(self, gradients: list[Bytes]) -> list[float]:
        """Returns the norm of the gradient of every variable that is split.

        Args:
            gradients: The gradients of each server's `incomplete` parts.
        """
        whole: dict[int, Tensor] = {}
        for part, chosen, data in zip(self.parts, self.incomplete(), gradients, strict=True):
            strips = [part[i] for i in chosen]
            for strip, value in zip(strips, from_bytes(data, self.strips(strips)), strict=True):
                p = self.trained[strip.variable]
                strip.of(whole.setdefault(strip.variable, torch.empty(p.shape, dtype=p.dtype))).copy_(value)
        return torch.stack(gradient_norms(list(whole.values()))).tolist() if whole else []

    def strips(self, part: list[Strip]) -> list[Tensor]:
        """Returns views of a server's parts of the parameters."""
        return [strip.of(self.trained[strip.variable].detach()) for strip in part]

    @torch.no_grad()
    def put(self, parameters: list[Bytes], buffers: Bytes) -> None:
        """Copies the parameters and buffers that the servers sent into the model."""
        for part, data in zip(self.parts, parameters, strict=True):
            views = self.strips(part)
            for view, value in zip(views, from_bytes(data, views), strict=True):
                view.copy_(value)
        for buffer, value in zip(self.buffers, from_bytes(buffers, self.buffers), strict=True):
            buffer.copy_(value)

    def gradients(self) -> list[Bytes]:
        """Returns the gradients of each server's parameters; zeros for parameters without one."""
        values = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.trained]
        return [to_bytes([strip.of(values[strip.variable]) for strip in part]) for part in self.parts]

    def split(self, whole: Snapshot) -> list[Snapshot]:
        """Returns each server's part of a state, in memory of its own; parameters have their number there as name."""
        return [self._part(whole, part) for part in self.parts]

    def _part(self, whole: Snapshot, part: list[Strip]) -> Snapshot:
        def cut(state: dict[str, Tensor]) -> dict[str, Tensor]:
            return {str(i): strip.of(state[self._names[strip.variable][0]]).clone() for i, strip in enumerate(part)}

        whole_state, extra_state = (
            whole.optimizer["state"],
            {name: cut(value) for name, value in whole.extra_state.items()},
        )
        state = {
            i: self._cut(whole_state[strip.variable], strip)
            for i, strip in enumerate(part)
            if strip.variable in whole_state
        }
        groups = [
            {**group, "params": [i for i, strip in enumerate(part) if strip.variable in group["params"]]}
            for group in whole.optimizer["param_groups"]
        ]
        return Snapshot(
            whole.step, cut(whole.model), {"state": state, "param_groups": groups}, whole.schedule, extra_state
        )

    def _cut(self, values: dict[str, Any], strip: Strip) -> dict[str, Any]:
        shape = self.trained[strip.variable].shape
        return {
            name: strip.of(v).clone() if isinstance(v, Tensor) and v.shape == shape else v for name, v in values.items()
        }

    def merge(self, parts: list[Snapshot], whole: Snapshot) -> Snapshot:
        """Returns the whole state made of the servers' parts.

        Args:
            parts: The state of each server.
            whole: A state of the whole model with everything that servers do not have; its tensors are overwritten.
        """
        values_of: dict[int, list[dict[str, Any]]] = {}
        for variable, _, server, i in sorted(
            (p.variable, p.low, number, i) for number, part in enumerate(self.parts) for i, p in enumerate(part)
        ):
            strip, part = self.parts[server][i], parts[server]
            for name in self._names[variable]:
                strip.of(whole.model[name]).copy_(part.model[str(i)])
                for kind, values in part.extra_state.items():
                    strip.of(whole.extra_state[kind][name]).copy_(values[str(i)])
            values_of.setdefault(variable, []).append(part.optimizer["state"].get(i, {}))
        state = {variable: self._join(values, variable) for variable, values in values_of.items() if values[0]}
        members = [group["params"] for group in whole.optimizer["param_groups"]]
        groups = [
            {**group, "params": params}
            for group, params in zip(parts[0].optimizer["param_groups"], members, strict=True)
        ]
        optimizer = {"state": state, "param_groups": groups}
        return Snapshot(parts[0].step, whole.model, optimizer, parts[0].schedule, whole.extra_state)

    def _join(self, values: list[dict[str, Any]], variable: int) -> dict[str, Any]:
        if len(values) == 1:
            return values[0]
        dims = self.trained[variable].ndim
        return {
            name: torch.cat([v[name] for v in values]) if isinstance(first, Tensor) and first.ndim == dims else first
            for name, first in values[0].items()
        }
