"""The space of a study: for each setting that varies, the values to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ray_app.config.rules import refuse

Kind = Literal["choice", "uniform", "log_uniform", "int_uniform"]
_COMMON = ("run", "scaling", "checkpoint", "failure", "evaluate", "tracking", "observers")
_COMMON_FIELDS = ("train.epochs", "train.max_steps", "train.steps_per_epoch", "data.path", "data.eval_path", "task")
"""What all trials have in common, so that they can be compared, and one rung is as long for all."""
_DIGITS = 6
"""Significant digits of a number that is drawn, so that it is the same on machines with another `exp`."""


@dataclass(frozen=True)
class Dimension:
    """A setting that varies.

    Args:
        name: Its dotted name.
        kind: How its values are distributed.
        values: The choices, or the lowest and the highest value.
    """

    name: str
    kind: Kind
    values: tuple[Any, ...]

    @property
    def count(self) -> int | None:
        """Number of values; None for a range of numbers."""
        if self.kind == "choice":
            return len(self.values)
        return self.values[1] - self.values[0] + 1 if self.kind == "int_uniform" else None

    def pick(self, index: int) -> Any:
        """Returns a value by its number, from 0 to `count` - 1."""
        return self.values[index] if self.kind == "choice" else self.values[0] + index

    def at(self, part: float) -> Any:
        """Returns the value at a part of the range, from 0 to below 1."""
        if self.count is not None:
            return self.pick(min(int(part * self.count), self.count - 1))
        low, high = self.values
        if self.kind == "log_uniform":
            value = math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
        else:
            value = low + part * (high - low)
        return min(max(float(f"{value:.{_DIGITS}g}"), float(low)), float(high))

    def probes(self) -> Sequence[Any]:
        """Returns the values that the parser has to accept: all choices, or both ends and the middle."""
        return self.values if self.kind == "choice" else [self.at(0.0), self.at(0.5), self.at(1.0)]


def parse_space(space: Mapping[str, Any], is_grid: bool = False) -> tuple[Dimension, ...]:
    """Returns the dimensions of a space as the user wrote it; raises ConfigError with all problems."""
    problems, dimensions = list[str](), list[Dimension]()
    if not space:
        problems.append(
            "tune.space is empty; name a setting and its values, as optimizer.init_args.lr: {choice: [...]}."
        )
    for name, spec in space.items():
        if problem := _find_problem(name, spec, is_grid):
            problems.append(f"tune.space has {name}{problem}")
        else:
            [(kind, values)] = spec.items()
            dimensions.append(Dimension(name, kind, tuple(values)))
    refuse(problems)
    return tuple(dimensions)


def _find_problem(name: str, spec: Any, is_grid: bool) -> str | None:
    """Returns what is wrong with a dimension, as the end of a sentence; None if nothing is."""
    if name.partition(".")[0] in _COMMON or name in _COMMON_FIELDS:
        return ", which all trials have in common. Vary what the model, its data or its training is."
    kinds = get_args(Kind)
    if not isinstance(spec, Mapping) or len(spec) != 1 or next(iter(spec)) not in kinds:
        return f" with {spec!r}; it must be one of {', '.join(kinds)} with a list, as {{choice: [a, b]}}."
    [(kind, values)] = spec.items()
    if not isinstance(values, list | tuple) or not values:
        return f" with {kind}: {values!r}; it must be a list."
    return None if kind == "choice" else _find_range_problem(kind, values, is_grid)


def _find_range_problem(kind: str, values: Sequence[Any], is_grid: bool) -> str | None:
    """Returns what is wrong with a range of numbers, as the end of a sentence; None if nothing is."""
    number, spec = int if kind == "int_uniform" else int | float, f" with {kind}: {values!r}"
    if len(values) != 2 or not all(isinstance(v, number) and not isinstance(v, bool) for v in values):
        hint = " YAML takes 1e-4 for a text; write 1.0e-4." if any(isinstance(v, str) for v in values) else ""
        return f"{spec}; it must be [LOW, HIGH], two {'integers' if number is int else 'numbers'}.{hint}"
    low, high = values
    if not low < high or not all(map(math.isfinite, values)):
        return f"{spec}; the first number must be below the second, and both finite."
    if kind == "log_uniform" and low <= 0:
        return f"{spec}; both numbers must be above 0."
    if is_grid and kind != "int_uniform":
        return f" with {kind}, of which a grid has no values; list them as {{choice: [...]}}, or use another sampler."
    return None
