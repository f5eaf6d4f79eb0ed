"""Computes the encoding of a table (`ray_app.task.table_encoding`) from the rows that are trained on.

One process reads the columns that need statistics, in the order of the data set, so the statistics do not depend on the
number of workers. Sums are exact (`ExactSum`), a median is the middle of all values, and categories are sorted.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.fields import describe_gaps
from ray_app.task.table_encoding import PARTS, category_text, input_matrix, plain_encoding, to_floats, to_seconds

Missing = dict[str, str | dict[str, float | str]]
"""What becomes of missing values, by column, and for all other columns as `default`.

It is `refuse`, `mean`, `median`, `indicator` (the mean, and a further input that says whether the value is missing),
`category` (a category of its own), or `{constant: VALUE}`.
"""
METHODS = ("refuse", "mean", "median", "indicator", "category", "constant")
ROW_ID = "row_id"
"""Column in which an ingest stores the name of each row."""
RESERVED = ("label", "target")
"""Columns that hold what is predicted, by their names: they are features only if a setting names them."""
MAX_AUTO_CATEGORIES = 256
"""Columns of text with more different values are categories only if `categories` names them."""
MAX_CATEGORIES = 100_000
logger = logging.getLogger(__name__)
_MANY_ROWS = 1_000_000
"""A line is logged for each pass over as many rows, which takes seconds."""
_BITS, _DIGITS = 16, 4


@dataclass(frozen=True)
class TableSettings:
    """What `task.init_args` say about the columns of a table; see `TabularClassification`."""

    targets: Sequence[str]
    features: Sequence[str] | None
    missing: Missing
    categories: Sequence[str] | Literal["auto"]
    dates: Mapping[str, Sequence[str]]
    log: Sequence[str]
    standardize: bool | Sequence[str]
    scale: float


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
    columns, gaps = list[dict[str, Any]](), dict[str, int | None]()
    for name in kinds:
        try:
            columns.append(_fit_column(settings, data, name, kinds[name], counted))
        except _MissingValuesError as error:
            gaps[name] = error.count
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
    if settings.standardize:
        encoding |= _standardization(settings, data, encoding)
    return encoding, left_out


def _named_columns(settings: TableSettings) -> dict[str, Collection[str]]:
    """Returns the columns that each setting of single columns names."""
    return {
        "missing": [name for name in settings.missing if name != "default"],
        "categories": settings.categories if settings.categories != "auto" else (),
        "dates": settings.dates,
        "log": settings.log,
        "standardize": () if isinstance(settings.standardize, bool) else settings.standardize,
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
                f"task.init_args.missing.{name} is {method!r}; allowed are refuse, mean, median, indicator, category,"
                " or {constant: VALUE}."
            )
    for name, parts in settings.dates.items():
        if not parts or not set(parts) <= set(PARTS) or len(set(parts)) < len(parts):
            raise ConfigError(f"task.init_args.dates.{name} is {parts!r}; allowed are some of {', '.join(PARTS)}.")
    if both := sorted(set(named["categories"]) & {*settings.dates, *settings.log, *named["standardize"]}):
        raise ConfigError(
            f"task.init_args.categories names {both[0]!r}, and so does dates, log or standardize; name it once."
        )


def _check_kinds(settings: TableSettings, kinds: dict[str, str]) -> None:
    """Refuses settings for numbers of columns that are not used as numbers, which would have no effect."""
    standardized = () if isinstance(settings.standardize, bool) else settings.standardize
    for setting, names, allowed in (
        ("log", settings.log, ("number",)),
        ("standardize", standardized, ("number", "date")),
    ):
        if wrong := [name for name in names if kinds.get(name) not in allowed]:
            use = kinds.get(wrong[0], "no feature")
            raise ConfigError(
                f"task.init_args.{setting} names {wrong[0]!r}, which is used as {use}; allowed are columns"
                f" that are used as {' or '.join(allowed)}. Leave it out."
            )
    for name, method in settings.missing.items():
        if method == "category" and kinds.get(name) in ("number", "date"):
            raise ConfigError(
                f"task.init_args.missing.{name} is 'category', but the column is used as {kinds[name]}; name it in"
                " task.init_args.categories, or use mean, median, indicator or {constant: VALUE}."
            )


def _choose_columns(settings: TableSettings, data: DataFacts) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the kind in the encoding by column, in the order of the features; and the reasons against others."""
    kinds, left_out = dict[str, str](), dict[str, str]()
    no_features = {*settings.targets, ROW_ID, *data.index_columns}
    if taken := [name for name in settings.features or () if name in settings.targets]:
        raise ConfigError(
            f"task.init_args.features names {taken[0]!r}, which is the label or the weight of a row; a prediction does"
            " not have it. Leave it out."
        )
    names = settings.features if settings.features is not None else sorted(set(data.columns) - no_features)
    if settings.features is None:
        named = set().union(*_named_columns(settings).values())
        for name in sorted(({*RESERVED} & {*names}) - named):
            left_out[name] = f"{data.columns[name].kind}, a {name} by its name; task.init_args.features can name it"
        names = [name for name in names if name not in left_out]
    for name in names:
        facts = data.columns.get(name)
        if facts is None:
            raise DataError(
                f"{data.path} has no column {name!r} for the features; its columns are"
                f" {', '.join(sorted(data.columns))}. Name another column in task.init_args or ingest the data again."
            )
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
            _need_kind(data, name, facts, not is_named, "an entry in task.init_args.dates, such as [year, month]")
            left_out[name] = f"{facts.dtype}; task.init_args.dates names the parts to use"
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
    """Returns how many rows have each category; drops columns of text that are unlike categories from `kinds`."""
    is_auto = settings.features is None and settings.categories == "auto"
    limit = MAX_AUTO_CATEGORIES if is_auto else MAX_CATEGORIES
    counted = count_values(data, [name for name, kind in kinds.items() if kind == "category"], limit)
    for name, counts in counted.items():
        values, present = len(counts) - (None in counts), counts.total() - counts[None]
        if values > limit and not is_auto:
            raise DataError(
                f"Column {name!r} of {data.path} has more than {MAX_CATEGORIES} different values; as many categories"
                " are allowed. Leave it out of task.init_args.features and categories."
            )
        if not is_auto:
            continue
        if values > limit:
            left_out[name] = f"text with more than {limit} different values; categories can name it"
        elif 2 * values > present:
            left_out[name] = f"text with {values:,} different values in {present:,} rows; categories can name it"
        elif counts[None] and _method(settings, name) == "refuse":
            left_out[name] = (
                f"text with {counts[None]:,} missing values; task.init_args.missing can say what they become"
            )
        else:
            continue
        del kinds[name]
    return counted


def count_values(data: DataFacts, names: Sequence[str], limit: int = MAX_CATEGORIES) -> dict[str, Counter[str | None]]:
    """Returns how many rows have each value of columns as a text, None for missing values.

    It stops reading a column after more than `limit` different values.
    """
    counted = {name: Counter[str | None]() for name in names}
    for name, counts in counted.items():
        for rows in _read(data, [name]):
            counts.update(map(category_text, np.asarray(rows[name], object).tolist()))
            if len(counts) - (None in counts) > limit:
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
    method = settings.missing.get(name, settings.missing.get("default", "refuse"))
    return "constant" if isinstance(method, dict) else method


def _fit_column(
    settings: TableSettings, data: DataFacts, name: str, kind: str, counted: dict[str, Counter[str | None]]
) -> dict[str, Any]:
    """Returns the encoding of one column."""
    method = _method(settings, name)
    stated = settings.missing.get(name, settings.missing.get("default"))
    constant = stated["constant"] if isinstance(stated, dict) else None
    if kind == "category":
        return _fit_category(name, method, constant, counted[name])
    facts = data.columns[name]
    column: dict[str, Any] = {"name": name, "kind": kind, "fill": None, "indicator": False}
    to_numbers: Callable[[Any], npt.NDArray[Any]] = to_seconds if kind == "date" else to_floats
    # An array never has a missing value: its row is a bad row then.
    if method == "constant":
        column["fill"] = _constant(name, kind, constant, to_numbers)
    elif method not in ("refuse", "category") and facts.kind != "array":
        column["fill"], missing = _fill_value(data, name, method, to_numbers)
        column["indicator"] = method == "indicator" and (missing > 0 or name in settings.missing)
    elif facts.nulls:
        raise _MissingValuesError(facts.nulls)
    if kind == "date":
        first, has_missing = math.inf, False
        for part in _numbers(data, name, to_seconds):
            first, has_missing = (
                min(first, float(np.nanmin(part, initial=math.inf))),
                has_missing or bool(np.isnan(part).any()),
            )
        if has_missing and column["fill"] is None:
            raise _MissingValuesError(None)
        # Without a date in any row all dates are the constant.
        first = column["fill"] if math.isinf(first) else first
        return column | {"parts": list(settings.dates[name]), "first": first}
    if name in settings.log and facts.minimum is not None and facts.minimum <= -1:
        raise DataError(
            f"Column {name!r} of {data.path} holds {facts.minimum:g}; ln(1 + value) needs values above -1. Leave it"
            " out of task.init_args.log."
        )
    return column | {"log": name in settings.log}


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
    """A column has missing values, `count` of them or a number that is not known, and the settings refuse them."""

    def __init__(self, count: int | None) -> None:
        super().__init__(count)
        self.count = count


def _advise(names: Collection[str], kinds: dict[str, str]) -> str:
    """Returns what to write for columns with missing values, as the rest of a sentence."""
    parts = []
    for is_category, allowed in ((False, "mean, median, indicator"), (True, "category")):
        if chosen := [f"missing.{name}" for name in names if (kinds[name] == "category") == is_category]:
            parts.append(f"task.init_args.{', '.join(chosen)} to {allowed} or {{constant: VALUE}}")
    return f"; fill or drop them before training, or set {', and '.join(parts)}."


def _fit_category(name: str, method: str, constant: Any, counts: Counter[str | None]) -> dict[str, Any]:
    values = sorted(value for value in counts if value is not None)
    if counts[None] and method in ("refuse", "mean", "median"):
        raise _MissingValuesError(counts[None])
    fill = category_text(constant) if method == "constant" else None
    if fill is not None and fill not in values:
        values = sorted([*values, fill])
    own_class = method in ("category", "indicator")
    return {"name": name, "kind": "category", "values": values, "fill": fill, "own_class": own_class}


def _numbers(
    data: DataFacts, name: str, to_numbers: Callable[[Any], npt.NDArray[Any]]
) -> Iterator[npt.NDArray[np.float64]]:
    """Yields the values of a column as float64, (rows,), NaN for a missing value; raises DataError for others."""
    for rows in _read(data, [name]):
        try:
            numbers = to_numbers(rows[name]).astype(np.float64)
        except ValueError as error:
            raise DataError(f"Column {name!r} of {data.path}: {error}. Correct it, or leave it out.") from error
        if np.isinf(numbers).any():
            raise DataError(
                f"Column {name!r} of {data.path} has infinite values, and so no statistics. Correct them, or leave it"
                " out of task.init_args.features."
            )
        yield numbers


class ExactSum:
    """A sum of float64 numbers with one rounding at its end, so that their order does not matter.

    Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997, by `math.fsum`. Of each block it keeps the rounded
    sum, and the rounded sums of what each rounding before has dropped, until nothing is left.
    """

    def __init__(self) -> None:
        self._parts: list[float] = []
        self._low, self._high = math.inf, -math.inf
        self.count = 0

    def add(self, numbers: npt.NDArray[np.float64]) -> None:
        """Adds a block of finite numbers, (n,); raises OverflowError if a float64 cannot represent their sum."""
        values = numbers.tolist()
        block: list[float] = []
        while rest := math.fsum(itertools.chain(values, (-part for part in block))):
            block.append(rest)
        self._parts += block
        self.count += len(values)
        self._low = float(np.min(numbers, initial=self._low))
        self._high = float(np.max(numbers, initial=self._high))

    @property
    def mean(self) -> float:
        """The mean of all numbers; raises OverflowError as `add` does.

        The roundings of the sum and of the division can give a mean outside of the numbers, so that equal numbers would
        deviate from it. It is then the nearest number.
        """
        return min(max(math.fsum(self._parts) / self.count, self._low), self._high)


def _fill_value(
    data: DataFacts, name: str, method: str, to_numbers: Callable[[Any], npt.NDArray[Any]]
) -> tuple[float, int]:
    """Returns the median, or for other methods the mean, of a column, and the number of its missing values.

    Raises DataError if all values are missing.
    """

    def present() -> Iterator[npt.NDArray[np.float64]]:
        return (part[~np.isnan(part)] for part in _numbers(data, name, to_numbers))

    count = sum(len(part) for part in present())
    if not count:
        raise DataError(
            f"Column {name!r} of {data.path} has missing values only, and so no {method}. Leave it out of"
            " task.init_args.features, or give {constant: VALUE}."
        )
    missing = data.num_rows - count
    if method != "median":
        try:
            return float(_column_means(part[:, None] for part in present())[0]), missing
        except OverflowError as error:
            raise DataError(
                f"Column {name!r} of {data.path} has values whose sum is too large for a float64. Correct them, or set"
                f" task.init_args.missing.{name} to median or {{constant: VALUE}}."
            ) from error
    low = select_rank(present, (count - 1) // 2)
    if count % 2:
        return low, missing
    return low / 2 + select_rank(present, count // 2) / 2, missing


def select_rank(parts: Callable[[], Iterator[npt.NDArray[np.float64]]], rank: int) -> float:
    """Returns the number of a rank, from 0, among the numbers of all parts, without holding them in memory.

    It is a radix selection: the numbers are read four times, and each pass finds 16 bits of the number.

    Args:
        parts: Yields the numbers, (n,) each, again at each call.
        rank: The number of numbers that are smaller, or come first among equal ones.
    """
    prefix = np.uint64(0)
    for digit in reversed(range(_DIGITS)):
        shift = np.uint64(digit * _BITS)
        counts = np.zeros(1 << _BITS, np.int64)
        for part in parts():
            keys = _ordered_keys(part)
            above = shift + np.uint64(_BITS)
            same = keys[(keys >> above) == (prefix >> above)] if digit < _DIGITS - 1 else keys
            counts += np.bincount(((same >> shift) & np.uint64(0xFFFF)).astype(np.int64), minlength=1 << _BITS)
        ends = np.cumsum(counts)
        bucket = int(np.searchsorted(ends, rank, side="right"))
        rank -= int(ends[bucket - 1]) if bucket else 0
        prefix |= np.uint64(bucket) << shift
    negative = not int(prefix) >> 63
    bits = ~prefix if negative else prefix & np.uint64((1 << 63) - 1)
    return float(np.array([bits], np.uint64).view(np.float64)[0])


def _ordered_keys(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    """Returns integers in the order of the numbers: of negative ones the inverted bits, of others with a first 1."""
    bits = np.ascontiguousarray(numbers).view(np.uint64)
    return np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))


def _standardization(settings: TableSettings, data: DataFacts, encoding: dict[str, Any]) -> dict[str, Any]:
    """Returns mean and standard deviation of the inputs, after missing values are filled; 0 and 1 for other inputs."""
    chosen = [column for column in encoding["columns"] if column["kind"] != "category"]
    if settings.standardize is not True:
        chosen = [column for column in chosen if column["name"] in set(settings.standardize or ())]
    if not chosen:
        raise ConfigError(
            "task.init_args.standardize has no column of numbers to standardize; leave it out, or name such columns."
        )
    names = [column["name"] for column in encoding["columns"] if column["kind"] != "category"]
    flags = {column["name"] for column in chosen}

    def blocks() -> Iterator[npt.NDArray[np.float64]]:
        for rows in _read(data, names):
            try:
                inputs = input_matrix(encoding, rows)
            except ValueError as error:
                raise DataError(f"{data.path}: {error}.") from error
            yield np.where(is_chosen, np.concatenate(inputs, axis=1).astype(np.float64), 0.0)

    widths = _input_widths(data, encoding)
    is_chosen = np.repeat([name in flags for name in widths], list(widths.values()))
    try:
        mean = _column_means(blocks())
        with np.errstate(over="raise"):
            variance = _column_means((block - mean) ** 2 for block in blocks())
    except (OverflowError, FloatingPointError) as error:
        raise DataError(
            f"{data.path} has values that are too large for a standard deviation in float64. Correct them, or name the"
            " other columns in task.init_args.standardize."
        ) from error
    std = np.where(variance > 0, np.sqrt(variance), 1.0)
    return {"mean": mean.tolist(), "std": std.tolist()}


def _column_means(blocks: Iterator[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    sums: list[ExactSum] = []
    for block in blocks:
        sums = sums or [ExactSum() for _ in range(block.shape[1])]
        for total, values in zip(sums, block.T, strict=True):
            total.add(values)
    return np.array([total.mean for total in sums])


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
