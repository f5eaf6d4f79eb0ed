"""Encodes the rows of a table as numbers: missing values, categories, dates, logarithms, standardization.

An encoding is plain JSON, which `ray_app.task.table_statistics` computes from the rows that are trained on. It has the
`scale` by which inputs are divided, their `mean` and `std` (None: they are not standardized), the `limit` that these
approach, if any, and the `columns`. A column has a `name`, a `kind`, and

- of kind `number`: `fill`, the value that replaces a missing one (None: a missing value is refused), `indicator`
  (a further input says whether the value is missing), and `log` (the input is ln(1 + value));
- of kind `date`: `fill` and `indicator`, in seconds since 1970 in UTC, the named `parts`, and the `first` date of the
  rows that are trained on, in the same seconds;
- of kind `category`: its `values` as texts, `fill` (one of them), `own_class` (a missing value is a category), and
  `has_rare` (the training data has further values, which are seldom).

The module stands alone: it needs NumPy and nothing of ray_app, since every model package of such a task has a copy.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

Encoding = Mapping[str, Any]

PARTS = ("year", "month", "day", "weekday", "hour", "minute", "seconds")
"""The parts of a date: of the calendar in UTC (weekday 0 is Monday), and the seconds since the first date."""

_TRUTH_TEXTS = {
    "true": ("true", "True", "TRUE", "1", "1.0"),
    "false": ("false", "False", "FALSE", "0", "0.0"),
}
"""The texts of a boolean as libraries write it: pandas as text, CSV files, and columns of numbers with gaps."""
_MAX_NAMED = 3
"""Maximum number of values in a note."""


def encode_rows(encoding: Encoding, rows: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Encodes the columns of rows as `features`, float32 (rows, inputs), and `categories`, int64 (rows, columns).

    A field without columns is left out. A column is a sequence with one value for each row; None and NaN are missing
    values, and so is an empty text of a category or a date.

    Raises:
        ValueError: A column is missing, or a value is missing, infinite, or of another kind than its column.
    """
    fields: dict[str, npt.NDArray[Any]] = {}
    if inputs := input_matrix(encoding, rows):
        matrix = np.concatenate(inputs, axis=1)
        matrix = standardize(encoding, matrix)
        # Values that overflow become infinite, which is refused below.
        with np.errstate(over="ignore"):
            features = matrix.astype(np.float32) / np.float32(encoding["scale"])
        if not (finite := np.isfinite(features).all(0)).all():
            name = _input_names(encoding, rows)[int(finite.argmin())]
            raise ValueError(
                f"column {name!r}, as float32 and divided by task.init_args.scale, is NaN or infinite; correct the"
                " value or drop the row"
            )
        fields["features"] = features
    categories = [column for column in encoding["columns"] if column["kind"] == "category"]
    if categories:
        fields["categories"] = np.stack([_category_codes(column, _values(rows, column)) for column in categories], 1)
    return fields


def standardize(encoding: Encoding, inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns inputs, (rows, inputs), divided by their spread after their center is subtracted.

    With a `limit` they approach it smoothly (Holzmueller et al., "Better by Default", NeurIPS 2024).
    """
    if encoding["mean"] is None:
        return inputs
    if inputs.shape[1] != len(encoding["mean"]):
        raise ValueError(
            f"the rows have {inputs.shape[1]} inputs, but {len(encoding['mean'])} are expected; pass a row with an"
            " array as a list of one dictionary"
        )
    inputs = (inputs - np.array(encoding["mean"])) / np.array(encoding["std"])
    limit = encoding.get("limit")
    return inputs / np.hypot(1.0, inputs / limit) if limit else inputs


def encode_raw_rows(encoding: Encoding, rows: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Encodes the rows of a caller, see `encode_rows`, and warns once of values that the training data lacks.

    Raises:
        ValueError: As `encode_rows`, with the index of the first such row; or the columns differ in their rows.
    """
    columns = {column["name"]: _values(rows, column) for column in encoding["columns"]}
    counts = {name: len(values) for name, values in columns.items()}
    count = next(iter(counts.values()), 0)
    if other := [name for name in counts if counts[name] != count]:
        raise ValueError(
            f"the columns have different numbers of rows: {next(iter(counts))!r} {count}, {other[0]!r}"
            f" {counts[other[0]]}; each column needs one value per row, and pass a row with an array as a list of one"
            " dictionary"
        )
    try:
        fields = encode_rows(encoding, columns)
    except ValueError as error:
        raise ValueError(_explain_bad_row(encoding, columns, count) or str(error)) from error
    notes = []
    categories = [column for column in encoding["columns"] if column["kind"] == "category"]
    for i, column in enumerate(categories):
        others = np.flatnonzero(fields["categories"][:, i] == len(column["values"]))
        values = np.asarray(columns[column["name"]], object)[others].tolist()
        notes.append(describe_other_values(column, Counter(map(category_text, values)), f"{count:,} rows"))
    if texts := [note for note in notes if note is not None]:
        # The line in the warning is the caller's of `predict`.
        warnings.warn(" ".join(texts), stacklevel=5)
    return fields


def _explain_bad_row(encoding: Encoding, columns: Mapping[str, Any], count: int) -> str | None:
    """Returns the index of the first row that cannot be encoded and the reason; None if each row alone can be."""

    def error_of(first: int, end: int) -> str | None:
        parts = {
            name: values.iloc[first:end] if hasattr(values, "iloc") else values[first:end]
            for name, values in columns.items()
        }
        try:
            encode_rows(encoding, parts)
        except ValueError as error:
            return str(error)
        return None

    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if error_of(low, middle + 1) is None:
            low = middle + 1
        else:
            high = middle
    reason = error_of(low, low + 1) if low < count else None
    return None if reason is None else f"row {low}, counted from 0: {reason}"


def describe_other_values(column: Mapping[str, Any], counts: Mapping[str | None, int], rows: str) -> str | None:
    """Returns a note on values of a category column that the training data lacks; None if there are none.

    Args:
        counts: The number of rows of each value as a text, None for missing values.
        rows: All rows in words, such as `5 rows`.
    """
    codes = value_codes(column)
    others = [value for value in counts if value is not None and value not in codes]
    if not others:
        return None
    named = ", ".join(repr(value) for value in sorted(others)[:_MAX_NAMED])
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    lacks = "lacks or rarely has" if column.get("has_rare") else "lacks"
    return (
        f"{sum(counts[value] for value in others):,} of {rows} have values of {column['name']!r} that the training data"
        f" {lacks} ({named}{more}): they are treated as one category, other."
    )


def plain_encoding(names: Sequence[str], scale: float) -> dict[str, Any]:
    """Returns the encoding of columns of numbers or arrays as they are, without missing values."""
    column = {"kind": "number", "fill": None, "indicator": False, "log": False}
    return {"scale": scale, "mean": None, "std": None, "columns": [{"name": name, **column} for name in names]}


def input_matrix(encoding: Encoding, rows: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    """Returns the inputs of each column of numbers or dates before standardization, each of shape (rows, inputs)."""
    inputs = list[npt.NDArray[Any]]()
    for column in encoding["columns"]:
        if column["kind"] == "number":
            inputs += _number_inputs(column, _values(rows, column))
        elif column["kind"] == "date":
            inputs += _date_inputs(column, _values(rows, column))
    return inputs


def _input_names(encoding: Encoding, rows: Mapping[str, Any]) -> list[str]:
    """Returns the column of each input."""
    names = list[str]()
    for column in encoding["columns"]:
        names += [column["name"]] * sum(part.shape[1] for part in input_matrix({"columns": [column]}, rows))
    return names


def category_count(column: Mapping[str, Any]) -> int:
    """Returns the number of codes of a category column: its values, `other`, and missing if that is a category."""
    return len(column["values"]) + 1 + bool(column["own_class"])


def is_missing(value: Any) -> bool:
    """Returns whether a value is None, NaN, NaT, pandas.NA or an empty text."""
    return _is_none(value) or value == "" or bool(value != value)  # noqa: PLR0124 - only NaN and NaT are unlike themselves


def _is_none(value: Any) -> bool:
    # A comparison with pandas.NA has no truth value, and this module does not import pandas.
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def category_text(value: Any) -> str | None:
    """Returns the text by which a value is a category; None for a missing value.

    A whole number has one text whatever its type is, because a column of integers with a gap is often read as floats.
    """
    if is_missing(value):
        return None
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def value_codes(column: Mapping[str, Any]) -> dict[str, int]:
    """Returns the code of each text that is a value of a category column; all other texts are the category other.

    Where the values are booleans, with or without the constant that replaces a missing one, each usual text of a
    boolean is that value. Where they are integers, `3.0` is 3: pandas writes it so beside a missing value.
    """
    codes = {value: code for code, value in enumerate(column["values"])}
    booleans = {value: value.lower() for value in codes if value.lower() in _TRUTH_TEXTS}
    if codes.keys() - booleans.keys() <= {column["fill"]} and len(set(booleans.values())) == len(booleans):
        for value, truth in booleans.items():
            for text in _TRUTH_TEXTS[truth]:
                codes.setdefault(text, codes[value])
    integers = [value for value in column["values"] if value != column["fill"]]
    if all(re.fullmatch(r"-?\d+", value) for value in integers):
        codes = {f"{value}.0": codes[value] for value in integers} | codes
    return codes


def to_floats(values: Any) -> npt.NDArray[Any]:
    """Returns numbers as an array, NaN for None, of durations and times the seconds; or raises ValueError."""
    array = np.asarray(values)
    if array.dtype == object:
        array = np.array(list(map(_to_number, array.tolist())))
    if array.dtype.kind == "m":
        array = array / np.timedelta64(1, "s")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"the column holds {array.dtype} instead of numbers")
    return array


def _to_number(value: Any) -> Any:
    """Returns a value as NumPy's arrays of numbers have it, as a file with such values is read."""
    if _is_none(value):
        return np.nan
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, time):
        value = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
    return value.total_seconds() if isinstance(value, timedelta) else value


def to_seconds(values: Any) -> npt.NDArray[np.float64]:
    """Returns dates, times or ISO 8601 texts as seconds since 1970 in UTC, (rows,), NaN for a missing value.

    A time without a time zone counts as UTC. Raises ValueError for other values.
    """
    array = np.asarray(values)
    if array.dtype.kind != "M":
        # As an array of texts, a NaN beside a text would be the text nan.
        array = np.array([_parse_date(value) for value in np.asarray(values, object).tolist()], "datetime64[us]")
    seconds = array.astype("datetime64[us]").astype(np.int64) / 1e6
    return np.where(np.isnat(array), np.nan, seconds)


_NO_DATE = re.compile(r"\s*(#?N/?A|NaN|NaT|null|none)\s*", re.IGNORECASE)
"""Words that other tools write in place of a missing date; among other texts they may be words."""


def _parse_date(value: Any) -> datetime | None:
    if is_missing(value):
        return None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, str):
        if _NO_DATE.fullmatch(value):
            return None
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError as error:
            raise ValueError(f"{value!r} is not a date of ISO 8601, such as 2026-11-27 or 2026-11-27T13:30") from error
    if not isinstance(value, datetime):
        raise ValueError(f"{value!r} is not a date")
    return value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)


def _values(rows: Mapping[str, Any], column: Mapping[str, Any]) -> Any:
    if column["name"] not in rows:
        raise ValueError(f"the column {column['name']!r} is missing; the columns are {', '.join(map(repr, rows))}")
    return rows[column["name"]]


def _number_inputs(column: Mapping[str, Any], values: Any) -> list[npt.NDArray[Any]]:
    name = column["name"]
    try:
        numbers = to_floats(values)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from error
    numbers = numbers.reshape(len(numbers), -1)
    missing = np.isnan(numbers) if numbers.dtype.kind == "f" else np.zeros(numbers.shape, np.bool_)
    if column["fill"] is not None:
        # In a narrower type, the value would be rounded before the numbers are standardized.
        numbers = np.where(missing, column["fill"], numbers.astype(np.float64))
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise ValueError(f"column {name!r} is NaN or infinite; correct the value or drop the row")
    if column["log"]:
        if numbers.size and numbers.min() <= -1:
            raise ValueError(f"column {name!r} holds {numbers.min()}; ln(1 + value) needs values above -1")
        numbers = np.log1p(numbers.astype(np.float64))
    return [numbers, *([missing.astype(np.float64)] if column["indicator"] else [])]


def _date_inputs(column: Mapping[str, Any], values: Any) -> list[npt.NDArray[Any]]:
    try:
        seconds = to_seconds(values)
    except ValueError as error:
        raise ValueError(f"column {column['name']!r}: {error}") from error
    missing = np.isnan(seconds)
    if missing.any():
        if column["fill"] is None:
            raise ValueError(f"column {column['name']!r} has no value; fill it or drop the row")
        seconds = np.where(missing, column["fill"], seconds)
    parts = [_date_part(part, seconds, column["first"])[:, None] for part in column["parts"]]
    return [*parts, *([missing[:, None].astype(np.float64)] if column["indicator"] else [])]


def _date_part(part: str, seconds: npt.NDArray[np.float64], first: float) -> npt.NDArray[np.float64]:
    if part == "seconds":
        return seconds - first
    times = np.floor(seconds).astype("datetime64[s]")
    days, months, years = (times.astype(f"datetime64[{unit}]") for unit in "DMY")
    numbers = {
        "year": years.astype(np.int64) + 1970,
        "month": months.astype(np.int64) % 12 + 1,
        "day": (days - months.astype("datetime64[D]")).astype(np.int64) + 1,
        # 1970-01-01 was a Thursday.
        "weekday": (days.astype(np.int64) + 3) % 7,
        "hour": (times - days).astype(np.int64) // 3600,
        "minute": (times - days).astype(np.int64) // 60 % 60,
    }
    return numbers[part].astype(np.float64)


def _category_codes(column: Mapping[str, Any], values: Any) -> npt.NDArray[np.int64]:
    code_of = value_codes(column)
    other = len(column["values"])
    missing = other + 1 if column["own_class"] else code_of.get(column["fill"])
    texts = list(map(category_text, np.asarray(values, object).tolist()))
    if missing is None and None in texts:
        raise ValueError(f"column {column['name']!r} has no value; fill it or drop the row")
    return np.array([missing if text is None else code_of.get(text, other) for text in texts], np.int64)
