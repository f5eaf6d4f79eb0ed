"""Checks of the columns of a data set, conversions of columns to types that models take, and mistakes of a model.

Tasks use the checks in `prepare`, before anything starts, and the conversions in `decode`. Some lists of a row are
parallel, such as tokens and the class of each: `need_as_long` checks their lengths, and `strip_padding` cuts the
outputs of a model to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.ragged import LENGTHS, Field, Ragged, to_array

if TYPE_CHECKING:
    from torch import Tensor


class OptionalColumn(str):
    """The name of a column for `Task.columns` in which a value may be missing, so that a row without it is not bad.

    `Task.decode` gets NaN for a missing number, NaT for a missing time, and None for other missing values. Integers
    with missing values come as float64, or, if float64 would round one, as an array of objects with None.
    """

    __slots__ = ()


def need_column(
    data: DataFacts, name: str, kinds: tuple[str, ...] | None, use: str, may_lack: bool = False
) -> ColumnFacts:
    """Returns the facts of a column; raises DataError without it, for another kind, or with missing values.

    With `may_lack` values may be missing, and without `kinds` the column may be of any.
    """
    facts = data.columns.get(name)
    if facts is None:
        raise DataError(
            f"{data.path} has no column {name!r} for the {use}; its columns are {', '.join(sorted(data.columns))}. Name"
            " another column in task.init_args or ingest the data again."
        )
    if kinds is not None and facts.kind not in kinds:
        raise DataError(
            f"Column {name!r} of {data.path} holds {facts.kind} {facts.dtype}".rstrip()
            + f"; the {use} needs {' or '.join(kinds)}. Name another column in task.init_args or convert it."
        )
    if not may_lack:
        refuse_missing(data, [name])
    return facts


def refuse_missing(data: DataFacts, names: Iterable[str]) -> None:
    """Raises DataError if columns have missing values, with all of these columns; an `OptionalColumn` may have some."""
    needed = (name for name in names if name in data.columns and not isinstance(name, OptionalColumn))
    if gaps := {str(name): nulls for name in needed if (nulls := data.columns[name].nulls)}:
        raise DataError(describe_gaps(data, gaps, "; fill or drop them before training."))


def describe_gaps(data: DataFacts, gaps: Mapping[str, int | None], advice: str) -> str:
    """Returns a sentence on the columns with missing values, by their numbers (None: unknown), and an advice."""
    counts = {name: "missing values" if count is None else f"{count} missing values" for name, count in gaps.items()}
    if len(counts) == 1:
        [(name, count)] = counts.items()
        return f"Column {name!r} of {data.path} has {count}{advice}"
    listed = ", ".join(f"{name!r} ({count})" for name, count in counts.items())
    return f"{len(counts)} columns of {data.path} have missing values: {listed}{advice}"


SAMPLE_WEIGHT = "sample_weight"
"""The decoded field with the weight of each row."""
MAX_COUNTED_CLASSES = 100_000
"""More classes need `num_classes` in the configuration, or class names that an ingest recorded."""


def count_classes(data: DataFacts, label: str, num_classes: int | None) -> int:
    """Returns the number of classes: as configured, as the ingest recorded it, or the greatest label plus one.

    Raises DataError if a label lies outside the classes, their number is unknown, or labels seem to be identifiers.
    """
    facts = need_column(data, label, ("integer",), "label")
    stated = num_classes or (len(data.classes) if data.classes else None)
    if stated is None and facts.maximum is None:
        raise DataError(
            f"{data.path} does not store the number of classes of column {label!r}; set task.init_args.num_classes."
        )
    count = stated if stated is not None else int(facts.maximum or 0) + 1
    low, high = facts.minimum, facts.maximum
    if (low is not None and low < 0) or (high is not None and high >= count):
        raise DataError(
            f"Column {label!r} of {data.path} has labels from {low:g} to {high:g}; {count} classes allow 0 to"
            f" {count - 1}. Correct the labels or set task.init_args.num_classes."
        )
    if stated is None and (reason := too_many_classes(data, count)):
        raise DataError(
            f"Column {label!r} of {data.path} has labels from {low:.0f} to {high:.0f}, which makes {count} classes:"
            f" {reason}. If the labels are identifiers (numbers of articles, ZIP codes), number them from 0, or ingest"
            " them as text (ray-app ingest --label), whose values become classes. If there are really so many classes,"
            " set task.init_args.num_classes."
        )
    return count


def too_many_classes(data: DataFacts, count: int) -> str | None:
    """Returns why a number of classes that only the greatest label implies is implausible, None if it is plausible."""
    if count > data.num_rows:
        return f"more than the {data.num_rows} rows"
    return f"more than {MAX_COUNTED_CLASSES}" if count > MAX_COUNTED_CLASSES else None


def class_names(data: DataFacts, count: int) -> list[str]:
    """Returns the names of the classes as the ingest recorded them; a class without a name has its index as name."""
    recorded = list(data.classes or ())
    return recorded + [str(number) for number in range(len(recorded), count)]


_LIST_DTYPES = {np.dtype(kind): np.int64 for kind in ("i1", "i2", "u1", "u2", "u4", "u8", "?")} | {
    np.dtype(kind): np.float32 for kind in ("f2", "f8")
}
"""The type to convert lists to, by their type, where embeddings and layers do not take the type as stored."""


def to_model_types(values: Any) -> Field:
    """Converts a column of numbers, arrays or lists to types that models take; raises ValueError for others.

    Fractions become float32; integers and booleans int64, (rows,) or ragged; arrays of integers stay unchanged.
    """
    array = values.values if isinstance(values, Ragged) else np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError("a column does not hold numbers, or has a missing value; write Task.decode")
    if array.dtype.kind == "f":
        array = np.asarray(array, np.float32)
    elif isinstance(values, Ragged) or array.ndim == 1:
        array = _as_int64(array)
    return replace(values, values=array) if isinstance(values, Ragged) else array


def convert_column(values: Any, kind: str) -> Field:
    """Converts a column as read to types that layers take, without making arrays larger.

    By its `ColumnFacts.kind` numbers become float32, integers int64, lists `Ragged` with integers of 32 or 64 bits or
    float32; of arrays only float64 is converted. Raises ValueError for a missing value, or an integer above 2^63 - 1.
    """
    if kind == "list":
        # Zeros stand in for a target that was not read, see `WithoutTargets`.
        if isinstance(values, np.ndarray) and values.dtype == np.int64:
            values = Ragged.of(values, np.int64)
        if not isinstance(values, Ragged):
            raise ValueError("a list does not hold numbers, or has a missing value")
        list_dtype = _LIST_DTYPES.get(values.values.dtype)
        if list_dtype is None:
            return values
        is_integer = list_dtype is np.int64
        return replace(values, values=_as_int64(values.values) if is_integer else values.values.astype(list_dtype))
    array = np.asarray(values)
    if array.dtype == object:
        raise ValueError("an array has a missing value")
    dtype = {"number": np.float32, "integer": np.int64}.get(kind, np.float32 if array.dtype == np.float64 else None)
    if dtype is np.int64:
        return _as_int64(array)
    return array.astype(dtype, copy=False) if dtype else array


def need_finite(name: str, values: Any, may_be_infinite: bool = False) -> None:
    """Raises ValueError for values, (rows, ...) or ragged, that are NaN or infinite; `name` is for the message."""
    numbers = values.values if isinstance(values, Ragged) else values
    if numbers.dtype.kind == "f" and numbers.size and not np.isfinite(numbers).all():
        if may_be_infinite and not np.isnan(numbers).any():
            return
        raise ValueError(f"{name} is NaN or infinite; correct the value or drop the row")


def need_sample_weights(data: DataFacts, column: str | None, others: Sequence[str]) -> None:
    """Checks the column of the weights of rows, if one is named.

    Raises:
        ConfigError: It is one of `others`, the columns with another use.
        DataError: It does not have a number in each row.
    """
    if column in others:
        raise ConfigError(
            f"task.init_args.sample_weight is {column!r}, which is also the label or an input. Name another column."
        )
    if column is not None:
        need_column(data, column, ("number", "integer"), "weight of a row (task.init_args.sample_weight)")


def decode_sample_weights(column: str | None, rows: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the weights of rows as the field `sample_weight`, float32 (rows,); no field without a column of weights.

    Raises:
        ValueError: A weight is negative, missing or not finite.
    """
    if column is None:
        return {}
    stored = np.asarray(rows[column])
    if stored.ndim != 1 or stored.dtype.kind not in "fiub":
        raise ValueError(f"column {column!r} of sample weights does not have a number for each row")
    with np.errstate(over="ignore"):
        weights = stored.astype(np.float32)
    need_finite(f"column {column!r} of sample weights", weights)
    if weights.size and weights.min() < 0:
        raise ValueError(f"column {column!r} of sample weights has {weights.min():g}; a weight must be at least 0")
    return {SAMPLE_WEIGHT: weights}


def _as_int64(values: npt.NDArray) -> npt.NDArray[np.int64]:
    if values.dtype == np.uint64 and values.size and (greatest := int(values.max())) > np.iinfo(np.int64).max:
        raise ValueError(
            f"{greatest} is above 2^63 - 1, the largest integer that models accept; store such numbers as text, or as"
            " fractions"
        )
    return values.astype(np.int64, copy=False)


def need_as_long(rows: Mapping[str, Any], name: str, others: Sequence[str]) -> None:
    """Raises ValueError for a row with a list that has the length of none of its other lists, with the lengths.

    No row is refused where the column is not ragged, as the zeros that stand in for a target that was not read.
    """
    one, lists = rows[name], {other: rows[other].lengths for other in others if isinstance(rows[other], Ragged)}
    if not isinstance(one, Ragged) or not lists:
        return
    fit = np.any([lengths == one.lengths for lengths in lists.values()], axis=0)
    if not fit.all():
        row = int(fit.argmin())
        counts = " and ".join(f"{lengths[row]} in {other!r}" for other, lengths in lists.items())
        raise ValueError(f"{one.lengths[row]} numbers in {name!r}, {counts}; there must be one for each of these")


def strip_padding(outputs: Tensor, batch: dict[str, Tensor], names: Sequence[str]) -> Ragged:
    """Cuts a model's outputs for padded lists, each row to the length of its list: (length,) or (length, values).

    The outputs, on the CPU, have the shape (rows, length), (rows, length, 1), or (rows, values, length). They are cut
    like the first list of `names`, the fields that the model takes, that is padded to their length. Raises DataError if
    there is no such list, or there are several with different lengths of a row.
    """
    padded = {name: batch[name].shape[1] for name in names if name + LENGTHS in batch}
    if outputs.ndim == 3:
        is_one = outputs.shape[2] == 1 and outputs.shape[1] in padded.values()
        outputs = outputs.squeeze(2) if is_one else outputs.movedim(1, 2)
    fits = [name for name, length in padded.items() if outputs.ndim > 1 and outputs.shape[1] == length]
    lengths = [batch[name + LENGTHS].cpu().numpy() for name in fits]
    if not fits or any((other != lengths[0]).any() for other in lengths):
        lists = ", ".join(f"{name!r} to {length}" for name, length in padded.items())
        raise DataError(
            f"The outputs have the shape {tuple(outputs.shape)}, but the padded lists of the rows are"
            f" {lists or 'none'}; it is unclear which list the outputs belong to, so outputs for padding cannot be"
            " removed. Write Task.predictions."
        )
    is_value = np.arange(outputs.shape[1]) < lengths[0][:, None]
    return Ragged(to_array(outputs)[is_value], np.cumsum([0, *lengths[0]], dtype=np.int64))


@dataclass(frozen=True)
class Mistake:
    """A row that a model predicted wrong.

    Args:
        row: Its position in the batch, later in the data set.
        truth: The name of its class.
        predicted: The name of the class that the model predicted.
        confidence: The model's probability for the predicted class, 0 to 1.
        image: The row's `Task.picture`.
    """

    row: int
    truth: str
    predicted: str
    confidence: float
    image: bytes | None = None
