"""What the arguments of a task by configuration must be, beyond their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from ray_app.errors import ConfigError, DataError
from ray_app.plan.facts import ColumnFacts, DataFacts
from ray_app.task.rows.transforms import Spec, made
from ray_app.task.score.deciding import Mode, mode_of

_AT = "task.init_args"
_EVERY_HAS = ("loss", "rows")
"""What an evaluation has besides its metrics."""


def need_specs(**given: Any) -> None:
    """Refuses what is no specification: `class_path` and `init_args`, or a list or mapping of such.

    Raises:
        ConfigError: Something is none.
    """
    for name, value in given.items():
        if name == "metrics":
            need_names(value)
        several = {f"{name}.{key}": one for key, one in value.items()} if name == "metrics" else None
        several = {f"{name}[{i}]": one for i, one in enumerate(value)} if isinstance(value, list) else several
        for place, one in ({name: value} if several is None else several).items():
            if not isinstance(one, dict) or not isinstance(one.get("class_path"), str):
                raise ConfigError(
                    f"{_AT}.{place} is {one!r}; it must have class_path, an import path such as torch.nn.CrossEntropyLoss, and may have"
                    " init_args."
                )


def need_names(metrics: Iterable[str]) -> None:
    """Refuses metrics by the name of something else."""
    for name in metrics:
        if name in _EVERY_HAS:
            raise ConfigError(f"{_AT}.metrics has {name!r}, which every evaluation has. Give the metric another name.")


def need_numbers(mean: Sequence[float], std: Sequence[float], pad_to: int, max_length: int | None) -> None:
    """Refuses numbers with which nothing can be computed.

    Raises:
        ConfigError: One is such.
    """
    if not all(value > 0 for value in std):
        raise ConfigError(f"{_AT}.std is {list(std)}; images are divided by it, so each must be greater than 0.")
    if not mean or not std:
        raise ConfigError(f"{_AT}.mean and std are {list(mean)} and {list(std)}; give a number for each channel, or one for all.")
    if pad_to < 1:
        raise ConfigError(f"{_AT}.pad_to is {pad_to}; padded lists are as long as a multiple of it, so it must be at least 1.")
    if max_length is not None and max_length < 1:
        raise ConfigError(f"{_AT}.max_length is {max_length}; it must be at least 1, or null for all.")


def mask_pairs(values: Any) -> list[list[int]]:
    """Value and class of masks in the order of the values, as `task.init_args.mask_values` has them; empty where that is not given.

    Raises:
        ConfigError: These are no integers.
    """
    given = values or {}
    if not isinstance(given, Mapping) or not all(type(n) is int for pair in given.items() for n in pair):
        raise ConfigError(
            f"{_AT}.mask_values is {values!r}; it must be classes by the values of a mask, integers both, as {{0: 0, 255: 1}}."
        )
    return [[value, given[value]] for value in sorted(given)]


def need_channels(name: str, column: ColumnFacts, **given: Sequence[float]) -> None:
    """Refuses a `mean` or `std` that an image column has not as many channels for."""
    channels = 3 if column.kind == "bytes" else column.shape[2] if len(column.shape) == 3 else 1
    for argument, values in given.items():
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{_AT}.{argument} is {list(values)}, {len(values)} numbers; images of {name!r} have {channels} channels. Give a number for"
                " each, or one for all."
            )


def need_lists(data: DataFacts, facts: Mapping[str, ColumnFacts], padded: Iterable[str]) -> None:
    """Refuses `COLUMN.mask` of columns that are never padded."""
    for name in padded:
        if facts[name].kind != "list":
            raise DataError(
                f"{_AT}.inputs names {name}.mask, which is 1 where a list has a number and 0 where it is padded; column {name!r} of"
                f" {data.path} holds {facts[name].kind}, no lists. Leave .mask out."
            )


def need_flat(data: DataFacts, name: str, column: ColumnFacts) -> None:
    """Refuses a target of lists of lists, of which nothing says which of their axes is padded in the outputs.

    Raises:
        DataError: It is one.
    """
    if column.kind == "list" and (column.shape or column.dtype.count("list<") > 1):
        raise DataError(
            f"{_AT}.target names {name!r}, and of {data.path} that holds lists of lists, {column.dtype}; a target is one number for each"
            " place of a list. Name another column, make lists of one size of it, or write a Task, whose `loss` gets the lists padded."
        )


def direction(metric: str, mode: Mode | None, metrics: Mapping[str, Spec]) -> Mode:
    """Whether less or more of the metric that decides is better.

    Args:
        metric: Its name.
        mode: As configured.
        metrics: The task's.

    Raises:
        ConfigError: Nothing says so.
    """
    if mode is not None and mode not in get_args(Mode):
        raise ConfigError(f"{_AT}.best_mode is {mode!r}; it must be min or max.")
    spec = metrics.get(metric) if mode is None else None
    found = mode or mode_of(metric, made(spec, f"{_AT}.metrics.{metric}") if spec else None)
    if found is None:
        named = f" The metrics are {', '.join(['loss', *metrics])}." if metrics and not spec else ""
        raise ConfigError(
            f"{_AT}.best_metric is {metric!r}, and nothing says whether less or more of it is better.{named} Set"
            f" {_AT}.best_mode to min or max."
        )
    return found
