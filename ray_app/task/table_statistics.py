"""Computes the encoding of a table (`ray_app.task.table_encoding`) from the rows that are trained on.

One process reads each column that needs statistics as a whole, in the order of the data set, so the statistics do not
depend on the number of workers.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.fields import describe_gaps, need_column
from ray_app.task.table_encoding import (
    PARTS,
    category_text,
    input_matrix,
    plain_encoding,
    standardize,
    to_floats,
    to_seconds,
)

Missing = dict[str, str | dict[str, float | str]]
"""What becomes of missing values, by column, and for all other columns as `default`.

It is `auto` (numbers and dates: the median, and a further input that says whether the value is missing if the rows to
train on have gaps; categories: a category of its own), `refuse`, `mean`, `median`, `indicator` (the mean, and such an
input), `category` (a category of its own), or `{constant: VALUE}`.
"""
METHODS = ("auto", "refuse", "mean", "median", "indicator", "category", "constant")
ROW_ID = "row_id"
"""Column in which an ingest stores the name of each row."""
RESERVED = ("label", "target")
"""Columns that hold what is predicted, by their names: they are features only if a setting names them."""
MAX_AUTO_CATEGORIES = 256
"""Of a column of text with more different values the most frequent ones are kept, unless `categories` names it."""
MAX_CATEGORIES = 100_000
logger = logging.getLogger(__name__)
_MANY_ROWS = 1_000_000
"""A line is logged for each pass over as many rows, which takes seconds."""
AUTO_PARTS = ("seconds", "month", "day", "weekday", "hour")
"""Parts of a date that is not in `dates`."""
LIMIT = 3.0
"""Bound that standardized numbers approach by default, so that heavy tails do not decide the result."""
_NORMAL_QUARTILES = 1.349
"""Interquartile range of a normal distribution with standard deviation 1."""
_MAX_KNOTS, _MAX_ALL_KNOTS = 16, 512
"""Intervals of a column of numbers, and of all columns together."""
_ROWS_PER_KNOT = 30
"""Rows of each interval, at least."""
_ISO_DATE = re.compile(r"\s*\d{4}-\d{2}-\d{2}([T ].*)?$")
_ID_NAME = re.compile(r"(.*[a-z_ .-])?(Id|ID|Index)|(.*[_ .-])?(id|index|no|nr|rownames)|No|Nr|#")
_MIN_ID_ROWS = 20


@dataclass(frozen=True)
class TableSettings:
    """What `task.init_args` say about the columns of a table; see `TabularClassification`."""

    targets: Sequence[str]
    features: Sequence[str] | None
    missing: Missing
    categories: Sequence[str] | Literal["auto"]
    dates: Mapping[str, Sequence[str]]
    log: Sequence[str]
    standardize: bool | Sequence[str] | None
    scale: float
    target: str | None = None
    has_knots: bool = False

    def standardizes(self, name: str) -> bool:
        """Whether a column of numbers or dates is standardized; by default, unless `scale` is set."""
        if self.standardize is None:
            return self.scale == 1
        return self.standardize if isinstance(self.standardize, bool) else name in self.standardize


def fit_encoding(settings: TableSettings, data: DataFacts) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the encoding of the columns of a data set, and the reasons why text columns are left out.

    Raises:
        ConfigError: The settings contradict each other, or name columns that the data set lacks.
        DataError: No column can be used, or a column has missing values that the settings refuse.
    """
    _check_settings(settings, data)
    kinds, left_out = _choose_columns(settings, data)
    counted = _count_categories(settings, data, kinds, left_out)
    _check_kinds(settings, kinds)
    columns, statistics = list[dict[str, Any]](), list[_InputStatistics]()
    num_numbers = sum(kind != "category" for kind in kinds.values())
    gaps = dict[str, int]()
    for name, kind in kinds.items():
        try:
            if kind == "category":
                columns.append(_fit_category(settings, data, name, counted[name]))
                continue
            fitted = _fit_numbers(settings, data, name, kind)
        except _MissingValuesError as error:
            gaps[name] = error.count
            continue
        if settings.features is None and (reason := _id_reason(settings, data, fitted)):
            left_out[name] = reason
            continue
        columns.append(fitted.column)
        statistics.append(_input_statistics(settings, data, fitted, num_numbers))
    if gaps:
        raise DataError(describe_gaps(data, gaps, _advise(gaps, kinds)))
    if not columns:
        texts = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        raise DataError(
            f"{data.path} has no column of numbers besides {settings.targets[0]!r} to predict it from; its columns are"
            f" {', '.join(sorted(data.columns))}{' (' + texts + ')' if texts else ''}. Name the features in"
            " task.init_args.features, or columns of text in task.init_args.categories."
        )
    encoding = plain_encoding([], settings.scale) | {"columns": columns}
    if any(settings.standardizes(column["name"]) for column in columns if column["kind"] != "category"):
        encoding |= {name: [value for one in statistics for value in getattr(one, name)] for name in ("mean", "std")}
        encoding |= {"limit": LIMIT} if settings.standardize is None else {}
    elif settings.standardize:
        raise ConfigError("task.init_args.standardize names no column of numbers; leave it out, or name such columns.")
    if settings.has_knots:
        encoding["knots"] = [ends for one in statistics for ends in one.knots]
    if settings.target is not None and settings.standardize is not False:
        encoding["target"] = _target_moments(data, settings.target)
    return encoding, left_out


def _id_reason(settings: TableSettings, data: DataFacts, fitted: _FittedColumn) -> str | None:
    """Returns why a column numbers the rows and is no feature; None for another column, or one that a setting names."""
    name, values = fitted.column["name"], fitted.values
    if values is None or data.columns[name].kind != "integer" or len(values) < _MIN_ID_ROWS:
        return None
    if any(name in names for names in _named_columns(settings).values()) or np.isnan(values).any():
        return None
    counts_up = values.min() in range(11) and values.max() < 2 * len(values) + values.min()
    if not (counts_up or _ID_NAME.fullmatch(name)) or len(np.unique(values)) < len(values):
        return None
    return "integer, different in each row, which identifies it; task.init_args.features can name it"


def _named_columns(settings: TableSettings) -> dict[str, Collection[str]]:
    """Returns the columns that each setting of single columns names."""
    return {
        "missing": [name for name in settings.missing if name != "default"],
        "categories": settings.categories if settings.categories != "auto" else (),
        "dates": settings.dates,
        "log": settings.log,
        "standardize": () if isinstance(settings.standardize, bool) else settings.standardize or (),
    }


def _check_settings(settings: TableSettings, data: DataFacts) -> None:
    named = _named_columns(settings)
    for setting, names in named.items():
        usable = [name for name in settings.features or data.columns if name not in settings.targets]
        if absent := [name for name in names if name not in usable]:
            raise ConfigError(
                f"task.init_args.{setting} names {absent[0]!r}, which is not a feature; these are {', '.join(usable)}."
            )
    for name, method in settings.missing.items():
        kind = next(iter(method), None) if isinstance(method, dict) and len(method) == 1 else method
        if kind not in METHODS or (kind == "constant") != isinstance(method, dict):
            raise ConfigError(
                f"task.init_args.missing.{name} is {method!r}; allowed are auto, refuse, mean, median, indicator,"
                " category, or {constant: VALUE}."
            )
    for name, parts in settings.dates.items():
        if not parts or not set(parts) <= set(PARTS) or len(set(parts)) < len(parts):
            raise ConfigError(f"task.init_args.dates.{name} is {parts!r}; allowed are some of {', '.join(PARTS)}.")
    if both := sorted(set(named["categories"]) & {*settings.dates, *settings.log, *named["standardize"]}):
        raise ConfigError(
            f"task.init_args.categories names {both[0]!r}, but so does dates, log or standardize; name the column once."
        )


def _check_kinds(settings: TableSettings, kinds: dict[str, str]) -> None:
    """Refuses settings for numbers of columns that are not used as numbers, which would have no effect."""
    standardized = _named_columns(settings)["standardize"]
    for setting, names, allowed in (
        ("log", settings.log, ("number",)),
        ("standardize", standardized, ("number", "date")),
    ):
        if wrong := [name for name in names if kinds.get(name) not in allowed]:
            use = kinds.get(wrong[0], "no feature")
            raise ConfigError(
                f"task.init_args.{setting} names {wrong[0]!r}, which is used as {use}; allowed are columns that are"
                f" used as {' or '.join(allowed)}. Remove it."
            )
    for name, method in settings.missing.items():
        if method == "category" and kinds.get(name) in ("number", "date"):
            raise ConfigError(
                f"task.init_args.missing.{name} is 'category', but the column is used as {kinds[name]}; name the column"
                " in task.init_args.categories, or use mean, median, indicator or {constant: VALUE}."
            )


def _choose_columns(settings: TableSettings, data: DataFacts) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the kind in the encoding by column, in the order of the features; and the reasons against others."""
    kinds, left_out = dict[str, str](), dict[str, str]()
    no_features = {*settings.targets, ROW_ID, *data.index_columns}
    if taken := [name for name in settings.features or () if name in settings.targets]:
        raise ConfigError(
            f"task.init_args.features names {taken[0]!r}, which is the label or the weight of a row; it is missing in a"
            " prediction. Remove it."
        )
    names = settings.features if settings.features is not None else sorted(set(data.columns) - no_features)
    if settings.features is None:
        named = set().union(*_named_columns(settings).values())
        for name in sorted(({*RESERVED} & {*names}) - named):
            left_out[name] = f"{data.columns[name].kind}, a {name} by its name; task.init_args.features can name it"
        names = [name for name in names if name not in left_out]
    for name in names:
        facts = need_column(data, name, None, "features", may_lack=True)
        is_named = settings.features is not None
        if name in settings.dates:
            _need_kind(data, name, facts, facts.kind == "text" or facts.is_date, "a date, a time, or text")
            kinds[name] = "date"
        elif settings.categories != "auto" and name in settings.categories:
            _need_kind(data, name, facts, facts.kind in ("text", "integer"), "text or integers, as a category")
            kinds[name] = "category"
        elif facts.kind in ("number", "integer", "array"):
            kinds[name] = "number"
        elif facts.kind == "text" and (settings.categories == "auto" or is_named):
            kinds[name] = "category"
        elif facts.kind == "text":
            left_out[name] = "text, and task.init_args.categories does not name it"
        elif facts.is_date:
            kinds[name] = "date"
        else:
            _need_kind(data, name, facts, not is_named, "numbers, text or dates")
    return kinds, left_out


def _need_kind(data: DataFacts, name: str, facts: ColumnFacts, is_right: bool, needed: str) -> None:
    if not is_right:
        raise DataError(
            f"Column {name!r} of {data.path} holds {facts.kind} {facts.dtype}".rstrip()
            + f"; as a feature it needs {needed}. Name another column in task.init_args or convert it."
        )


def _count_categories(
    settings: TableSettings, data: DataFacts, kinds: dict[str, str], left_out: dict[str, str]
) -> dict[str, Counter[str | None]]:
    """Returns how many rows have each category; drops columns of text that are unlike categories from `kinds`.

    Texts that are dates become columns of dates. Of many values only the frequent ones stay; the others become `other`.
    """
    is_auto = settings.features is None and settings.categories == "auto"
    counted = count_values(data, [name for name, kind in kinds.items() if kind == "category"])
    for name, counts in counted.items():
        values, present = len(counts) - (None in counts), counts.total() - counts[None]
        if values > MAX_CATEGORIES and not is_auto:
            raise DataError(
                f"Column {name!r} of {data.path} has more than {MAX_CATEGORIES} different values, the maximum of"
                " categories. Remove it from task.init_args.features and categories."
            )
        if not is_auto:
            continue
        frequent = {value: rows for value, rows in counts.most_common() if value is not None and rows > 1}
        kept = sorted(frequent, key=lambda value: (-frequent[value], value))[:MAX_AUTO_CATEGORIES]
        if values <= MAX_CATEGORIES and _are_dates(counts):
            kinds[name] = "date"
        elif values > MAX_CATEGORIES:
            left_out[name] = f"text with more than {MAX_CATEGORIES} different values; categories can name it"
            del kinds[name]
        elif 2 * sum(frequent[value] for value in kept) < present or not kept:
            left_out[name] = f"text with {values:,} different values in {present:,} rows; categories can name it"
            del kinds[name]
        elif values > MAX_AUTO_CATEGORIES or 2 * values > present:
            counted[name] = Counter({value: counts[value] for value in (*kept, None) if counts[value]})
    return counted


def _are_dates(texts: Collection[str | None]) -> bool:
    """Whether all texts are dates of ISO 8601, or words that stand for a missing one."""
    present = [text for text in texts if text is not None]
    try:
        seconds = to_seconds(present)
    except ValueError:
        return False
    dates = [text for text, value in zip(present, seconds, strict=True) if not math.isnan(value)]
    return bool(dates) and all(map(_ISO_DATE.match, dates))


def count_values(data: DataFacts, names: Sequence[str]) -> dict[str, Counter[str | None]]:
    """Returns how many rows have each value of columns as a text, None for missing values.

    It stops reading a column after more than `MAX_CATEGORIES` different values.
    """
    counted = {name: Counter[str | None]() for name in names}
    for name, counts in counted.items():
        for rows in _read(data, [name]):
            counts.update(map(category_text, np.asarray(rows[name], object).tolist()))
            if len(counts) - (None in counts) > MAX_CATEGORIES:
                break
    return counted


def _read(data: DataFacts, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    if not names:
        return iter(())
    assert data.read is not None, "a data set that was opened"
    if data.num_rows >= _MANY_ROWS:
        logger.info("Reading %s of %s rows for the statistics of the table.", ", ".join(names), f"{data.num_rows:,}")
    return data.read(list(names))


def _method(settings: TableSettings, name: str) -> str:
    method = settings.missing.get(name, settings.missing.get("default", "auto"))
    return "constant" if isinstance(method, dict) else method


@dataclass
class _FittedColumn:
    """A column of numbers or dates in the encoding, and its values, (rows,), if statistics need them."""

    column: dict[str, Any]
    values: npt.NDArray[np.float64] | None = None


def _fit_numbers(settings: TableSettings, data: DataFacts, name: str, kind: str) -> _FittedColumn:
    """Returns the encoding of a column of numbers, arrays or dates."""
    method = _method(settings, name)
    facts = data.columns[name]
    column: dict[str, Any] = {"name": name, "kind": kind, "fill": None, "indicator": False}
    to_numbers: Callable[[Any], npt.NDArray[Any]] = to_seconds if kind == "date" else to_floats
    if kind == "number":
        if name in settings.log and facts.minimum is not None and facts.minimum <= -1:
            raise DataError(
                f"Column {name!r} of {data.path} holds {facts.minimum:g}; ln(1 + value) needs values above -1. Remove"
                " it from task.init_args.log."
            )
        column["log"] = name in settings.log
    # An array never has a missing value: its row is a bad row then.
    if facts.kind == "array":
        return _FittedColumn(column)
    if method == "constant":
        stated = settings.missing.get(name, settings.missing.get("default"))
        assert isinstance(stated, dict)
        column["fill"] = _constant(name, kind, stated["constant"], to_numbers)
    if method in ("refuse", "category", "constant") and kind == "number" and not settings.standardizes(name):
        if facts.nulls and method != "constant":
            raise _MissingValuesError(facts.nulls)
        return _FittedColumn(column)
    values = np.concatenate([np.empty(0), *_numbers(data, name, to_numbers)])
    present = values[~np.isnan(values)]
    missing = len(values) - len(present)
    if method in ("refuse", "category") and missing:
        raise _MissingValuesError(missing)
    if method in ("auto", "mean", "median", "indicator"):
        column["fill"] = _fill_value(data, name, "median" if method == "auto" else method, present)
        column["indicator"] = method in ("auto", "indicator") and (missing > 0 or name in settings.missing)
    if kind == "date":
        # Without a date in any row all dates are the constant.
        first = float(present.min()) if len(present) else column["fill"]
        column |= {"parts": list(settings.dates.get(name, AUTO_PARTS)), "first": first}
    return _FittedColumn(column, values=values)


def _fill_value(data: DataFacts, name: str, method: str, present: npt.NDArray[np.float64]) -> float:
    """Returns the median, or for other methods the mean, of values; raises DataError if there are none."""
    if not len(present):
        raise DataError(
            f"Column {name!r} of {data.path} has only missing values, and so no {method}. Remove it from"
            " task.init_args.features, or set {constant: VALUE}."
        )
    if method == "median":
        # The mean of the two middle numbers must not overflow.
        middle = np.quantile(present, [0.5], method="lower"), np.quantile(present, [0.5], method="higher")
        return float(middle[0][0] / 2 + middle[1][0] / 2) if middle[0] != middle[1] else float(middle[0][0])
    with np.errstate(over="ignore"):
        mean = float(np.mean(present))
    if not math.isfinite(mean):
        raise DataError(
            f"Column {name!r} of {data.path} has values with a sum that is too large for a float64. Correct them, or"
            f" set task.init_args.missing.{name} to median or {{constant: VALUE}}."
        )
    return mean


def _constant(name: str, kind: str, value: Any, to_numbers: Callable[[Any], npt.NDArray[Any]]) -> float:
    """Returns the value of `{constant: VALUE}` as a number or in seconds; raises ConfigError for another kind."""
    try:
        number = float(to_numbers([value])[0])
    except ValueError as error:
        raise ConfigError(
            f"The constant of task.init_args.missing for the {kind} column {name!r} is {value!r}: {error}. Set"
            f" task.init_args.missing.{name}."
        ) from error
    if not math.isfinite(number):
        raise ConfigError(f"The constant of task.init_args.missing for the column {name!r} is {value!r}, not a number.")
    return number


class _MissingValuesError(Exception):
    """A column has `count` missing values, and the settings refuse them."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def _advise(names: Collection[str], kinds: dict[str, str]) -> str:
    """Returns what to write for columns with missing values, as the rest of a sentence."""
    parts = []
    for is_category, allowed in ((False, "auto, mean, median, indicator"), (True, "auto, category")):
        if chosen := [f"missing.{name}" for name in names if (kinds[name] == "category") == is_category]:
            parts.append(f"task.init_args.{', '.join(chosen)} to {allowed} or {{constant: VALUE}}")
    return f"; fill or drop them before training, or set {', and '.join(parts)}."


def _fit_category(settings: TableSettings, data: DataFacts, name: str, counts: Counter[str | None]) -> dict[str, Any]:
    """Returns the encoding of a column of categories."""
    method = _method(settings, name)
    values = sorted(value for value in counts if value is not None)
    if counts[None] and method in ("refuse", "mean", "median"):
        raise _MissingValuesError(counts[None])
    stated = settings.missing.get(name, settings.missing.get("default"))
    fill = category_text(stated["constant"]) if isinstance(stated, dict) else None
    if fill is not None and fill not in values:
        values = sorted([*values, fill])
    own_class = method in ("auto", "category", "indicator")
    column = {"name": name, "kind": "category", "values": values, "fill": fill, "own_class": own_class}
    return column | ({"has_rare": True} if counts.total() < data.num_rows else {})


def _numbers(
    data: DataFacts, name: str, to_numbers: Callable[[Any], npt.NDArray[Any]]
) -> Iterator[npt.NDArray[np.float64]]:
    """Yields the values of a column as float64, (rows,), NaN for a missing value; raises DataError for others."""
    for rows in _read(data, [name]):
        try:
            numbers = to_numbers(rows[name]).astype(np.float64)
        except ValueError as error:
            raise DataError(f"Column {name!r} of {data.path}: {error}. Correct or remove it.") from error
        if np.isinf(numbers).any():
            raise DataError(
                f"Column {name!r} of {data.path} has infinite values, and so no statistics. Correct them, or remove it"
                " from task.init_args.features."
            )
        yield numbers


@dataclass
class _InputStatistics:
    """The center, the spread and the ends of intervals of each input of a column of numbers or dates."""

    mean: list[float]
    std: list[float]
    knots: list[list[float]]


def _input_statistics(
    settings: TableSettings, data: DataFacts, fitted: _FittedColumn, num_numbers: int
) -> _InputStatistics:
    """Returns the statistics of the inputs of a column, after missing values are filled.

    Center and spread are 0 and 1 without standardization. An input with two values, and each element of an array, has
    no intervals; those of other inputs have about equally many rows.
    """
    name = fitted.column["name"]
    width = _input_widths(data, {"columns": [fitted.column]})[name]
    center, spread = np.zeros(width), np.ones(width)
    if settings.standardizes(name):
        try:
            with np.errstate(over="raise", invalid="raise"):
                center, spread = _center_and_spread(settings, data, fitted)
        except FloatingPointError as error:
            raise DataError(
                f"{data.path} has values of {name!r} that are too large for a standard deviation in float64. Correct"
                " them, or name the other columns in task.init_args.standardize."
            ) from error
    statistics = _InputStatistics(center.tolist(), spread.tolist(), [[] for _ in range(width)])
    count = int(min(_MAX_KNOTS, data.num_rows / _ROWS_PER_KNOT, _MAX_ALL_KNOTS / max(1, num_numbers)))
    if settings.has_knots and fitted.values is not None and count > 1:
        limit = {"limit": LIMIT} if settings.standardize is None else {}
        encoding = {"mean": statistics.mean, "std": statistics.std, **limit}
        inputs = standardize(encoding, _inputs_of(data, fitted)).astype(np.float32)
        ends = [np.unique(column) for column in np.quantile(inputs, np.linspace(0, 1, count + 1), axis=0).T]
        statistics.knots = [distinct.astype(np.float32).tolist() if len(distinct) > 2 else [] for distinct in ends]
    return statistics


def _center_and_spread(
    settings: TableSettings, data: DataFacts, fitted: _FittedColumn
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns mean and standard deviation of the inputs of a column, or by default median and interquartile range.

    The latter is divided by that of a normal distribution with deviation 1, so outliers do not change the scale.
    """
    if fitted.values is None:
        return _array_moments(data, fitted.column)
    inputs = _inputs_of(data, fitted)
    center, spread = np.clip(inputs.mean(0), inputs.min(0), inputs.max(0)), np.zeros(inputs.shape[1])
    if settings.standardize is None:
        low, center, high = np.quantile(inputs, [0.25, 0.5, 0.75], axis=0)
        spread = (high - low) / _NORMAL_QUARTILES
    if not spread.all():
        spread = np.where(spread > 0, spread, np.sqrt(np.mean((inputs - center) ** 2, axis=0)))
    return center, np.where(spread > 0, spread, 1.0)


def _inputs_of(data: DataFacts, fitted: _FittedColumn) -> npt.NDArray[np.float64]:
    """Returns the inputs of a column of numbers or dates before standardization, (rows, inputs)."""
    values: Any = fitted.values
    if fitted.column["kind"] == "date":
        values = np.where(np.isnan(values), np.datetime64("NaT", "us"), (values * 1e6).astype("datetime64[us]"))
    try:
        inputs = input_matrix({"columns": [fitted.column]}, {fitted.column["name"]: values})
    except ValueError as error:
        raise DataError(f"{data.path}: {error}.") from error
    return np.concatenate(inputs, axis=1).astype(np.float64)


def _target_moments(data: DataFacts, name: str) -> dict[str, float]:
    """Returns mean and standard deviation of the target; the latter is 1 for equal numbers."""
    values = np.concatenate([np.empty(0), *_numbers(data, name, to_floats)])
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        moments = {"mean": float(np.mean(values)), "std": float(np.std(values)) or 1.0} if len(values) else {}
    if not all(math.isfinite(np.float32(number)) for number in moments.values()):
        raise DataError(
            f"Column {name!r} of {data.path} has values that are too large for a mean and a deviation in float32."
            " Correct them, or predict another unit."
        )
    return moments or {"mean": 0.0, "std": 1.0}


def _array_moments(data: DataFacts, column: dict[str, Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns mean and standard deviation of each element of a column of arrays, reading it twice."""

    def mean_of(transform: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        total, rows = np.zeros(1), 0
        for part in _read(data, [column["name"]]):
            block = np.concatenate(input_matrix({"columns": [column]}, part), axis=1).astype(np.float64)
            total, rows = total + transform(block).sum(0), rows + len(block)
        return total / max(rows, 1)

    mean = mean_of(lambda block: block)
    variance = mean_of(lambda block: (block - mean) ** 2)
    # The rounding of a mean of equal numbers gives a variance about this small.
    return mean, np.where(variance > (1e-14 * mean) ** 2, np.sqrt(variance), 1.0)


def _input_widths(data: DataFacts, encoding: dict[str, Any]) -> dict[str, int]:
    """Returns the number of inputs of each column that is not a category."""
    widths = {}
    for column in encoding["columns"]:
        if column["kind"] != "category":
            values = len(column["parts"]) if column["kind"] == "date" else math.prod(data.columns[column["name"]].shape)
            widths[column["name"]] = values + column["indicator"]
    return widths


def count_inputs(data: DataFacts, encoding: dict[str, Any]) -> int:
    """Returns the number of inputs that are not categories."""
    return sum(_input_widths(data, encoding).values())
