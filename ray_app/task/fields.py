"""What a task asks of the columns of a data set before anything starts.

Columns as a task gets them that decodes nothing itself, or whose configuration says how.

Lists of a row that go along with each other: classes along tokens, and what a model says of each of these.

A row that a model predicted wrong, for people to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ray_app.errors import DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.ragged import LENGTHS, Field, Ragged


def need_column(data: DataFacts, name: str, kinds: tuple[str, ...], use: str) -> ColumnFacts:
    """The facts of a column that a task needs.

    Raises:
        DataError: There is no such column, it has another kind, or missing values.
    """
    facts = data.columns.get(name)
    if facts is None:
        raise DataError(
            f"{data.path} has no column {name!r} for the {use}; its columns are {', '.join(sorted(data.columns))}. Name"
            " another column in task.init_args or ingest the data again."
        )
    if facts.kind not in kinds:
        raise DataError(
            f"Column {name!r} of {data.path} holds {facts.kind} {facts.dtype}".rstrip()
            + f"; the {use} needs {' or '.join(kinds)}. Name another column in task.init_args or convert it."
        )
    if facts.nulls:
        raise DataError(
            f"Column {name!r} of {data.path} has {facts.nulls} missing values; fill or drop them before training."
        )
    return facts


MAX_COUNTED_CLASSES = 100_000
"""More classes than this are believed only if the configuration, or the names that an ingest recorded, say so."""


def count_classes(data: DataFacts, label: str, wanted: int | None) -> int:
    """The number of classes: as configured, as the ingest recorded it, or the greatest label plus one.

    Raises:
        DataError: A label lies outside the classes, nothing tells how many there are, or the labels are no class
            numbers but identifiers, of which there would be more than rows.
    """
    facts = need_column(data, label, ("integer",), "label")
    known = wanted or (len(data.classes) if data.classes else None)
    if known is None and facts.maximum is None:
        raise DataError(
            f"{data.path} does not say how many classes column {label!r} has; set task.init_args.num_classes."
        )
    count = known if known is not None else int(facts.maximum or 0) + 1
    low, high = facts.minimum, facts.maximum
    if (low is not None and low < 0) or (high is not None and high >= count):
        raise DataError(
            f"Column {label!r} of {data.path} has labels from {low:g} to {high:g}; {count} classes allow 0 to"
            f" {count - 1}. Correct the labels or set task.init_args.num_classes."
        )
    if known is None and (reason := too_many_classes(data, count)):
        raise DataError(
            f"Column {label!r} of {data.path} has labels from {low:.0f} to {high:.0f}, which makes {count} classes:"
            f" {reason}. If the labels are identifiers (numbers of articles, ZIP codes), number them from 0, or ingest"
            " them as text (ray-app ingest --label), whose values become classes; if there are so many classes, set"
            " task.init_args.num_classes."
        )
    return count


def too_many_classes(data: DataFacts, count: int) -> str | None:
    """Why so many classes cannot be meant where only the greatest label says so; None if they can."""
    if count > data.num_rows:
        return f"more than the {data.num_rows} rows"
    return f"more than {MAX_COUNTED_CLASSES}" if count > MAX_COUNTED_CLASSES else None


def class_names(data: DataFacts, count: int) -> list[str]:
    """The names of the classes as the ingest recorded them; a class without one is called by its number."""
    named = list(data.classes or ())
    return named + [str(number) for number in range(len(named), count)]


_LIST_DTYPES = {np.dtype(kind): np.int64 for kind in ("i1", "i2", "u1", "u2", "u4", "u8", "?")} | {
    np.dtype(kind): np.float32 for kind in ("f2", "f8")
}
"""What numbers in lists become that embeddings, or layers, do not take."""


def to_model_types(values: Any) -> Field:
    """A column of numbers, arrays or lists as read, in types that models are made of.

    Returns:
        Fractions as float32; integers and truth values as int64, (rows,) or ragged, and arrays of them as they are.

    Raises:
        ValueError: It holds something else, or an integer above 2^63 - 1.
    """
    array = values.values if isinstance(values, Ragged) else np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError("a column holds no numbers, or a missing value; write Task.decode")
    if array.dtype.kind == "f":
        array = np.asarray(array, np.float32)
    elif isinstance(values, Ragged) or array.ndim == 1:
        array = _as_int64(array)
    return replace(values, values=array) if isinstance(values, Ragged) else array


def convert_column(values: Any, kind: str) -> Field:
    """A column as read in types that layers take, and what stays as small as it was.

    Args:
        values: The column.
        kind: What it holds (`ColumnFacts.kind`): numbers become float32, integers int64, lists `Ragged` with integers
            of 32 or 64 bits or fractions of 32; of arrays only fractions of 64 bits become others.

    Raises:
        ValueError: Something in it is missing, or an integer is above 2^63 - 1.
    """
    if kind == "list":
        if isinstance(values, np.ndarray) and values.dtype == np.int64:  # stands in for a target that was not read
            values = Ragged.of(values, np.int64)
        if not isinstance(values, Ragged):
            raise ValueError("a list holds no numbers, or a missing value")
        wanted = _LIST_DTYPES.get(values.values.dtype)
        if wanted is None:
            return values
        return replace(values, values=_as_int64(values.values) if wanted is np.int64 else values.values.astype(wanted))
    found = np.asarray(values)
    if found.dtype == object:
        raise ValueError("an array has a missing value")
    of_one = {"number": np.float32, "integer": np.int64}.get(kind, np.float32 if found.dtype == np.float64 else None)
    if of_one is np.int64:
        return _as_int64(found)
    return found.astype(of_one, copy=False) if of_one else found


def need_finite(name: str, values: Any) -> None:
    """Refuses fractions that are NaN or infinite.

    Args:
        name: What they are called in a message.
        values: Numbers of any kind, (rows, ...) or ragged.

    Raises:
        ValueError: One is.
    """
    numbers = values.values if isinstance(values, Ragged) else values
    if numbers.dtype.kind == "f" and numbers.size and not np.isfinite(numbers).all():
        raise ValueError(f"{name} is NaN or infinite; correct the value or drop the row")


def _as_int64(values: npt.NDArray) -> npt.NDArray[np.int64]:
    if values.dtype == np.uint64 and values.size and (most := int(values.max())) > np.iinfo(np.int64).max:
        raise ValueError(
            f"{most} is above 2^63 - 1, the greatest integer that models take; keep such numbers as text, or as"
            " fractions"
        )
    return values.astype(np.int64, copy=False)


def need_as_long(rows: Mapping[str, Any], name: str, others: Sequence[str]) -> None:
    """Refuses rows with a list that is as long as none of some others of the same row.

    Args:
        rows: Columns as read.
        name: Which one; nothing is refused where it is no list, as what stands in for a target that was not read.
        others: Columns, of which the lists are compared.

    Raises:
        ValueError: There is such a row; it says what the first of them has.
    """
    one, lists = rows[name], {other: rows[other].lengths for other in others if isinstance(rows[other], Ragged)}
    if not isinstance(one, Ragged) or not lists:
        return
    fit = np.any([lengths == one.lengths for lengths in lists.values()], axis=0)
    if not fit.all():
        row = int(fit.argmin())
        said = " and ".join(f"{lengths[row]} in {other!r}" for other, lengths in lists.items())
        raise ValueError(f"{one.lengths[row]} numbers in {name!r}, {said}; there must be one for each of these")


def strip_padding(outputs: Tensor, batch: dict[str, Tensor], names: Sequence[str]) -> Ragged:
    """What a model says of padded lists, each row as long as its own list.

    Args:
        outputs: Shape (rows, length), (rows, length, 1), or (rows, values, length), on the CPU.
        batch: What they were made of.
        names: Fields that the model takes; the first list that is padded to that length is the one that the outputs go
            along with.

    Returns:
        Rows of shape (length,) or (length, values).

    Raises:
        DataError: There is no such list, or several in which rows have other lengths.
    """
    padded = {name: batch[name].shape[1] for name in names if name + LENGTHS in batch}
    if outputs.ndim == 3:
        is_one = outputs.shape[2] == 1 and outputs.shape[1] in padded.values()
        outputs = outputs.squeeze(2) if is_one else outputs.movedim(1, 2)
    fits = [name for name, length in padded.items() if outputs.ndim > 1 and outputs.shape[1] == length]
    lengths = [batch[name + LENGTHS].cpu().numpy() for name in fits]
    if not fits or any((other != lengths[0]).any() for other in lengths):
        said = ", ".join(f"{name!r} to {length}" for name, length in padded.items())
        raise DataError(
            f"The outputs are of shape {tuple(outputs.shape)}, of rows whose lists are padded: {said or 'none'}; which"
            " of these they go along with cannot be told, so what they say of padding cannot be left out. Write"
            " Task.predictions."
        )
    there = np.arange(outputs.shape[1]) < lengths[0][:, None]
    return Ragged(outputs.numpy()[there], np.cumsum([0, *lengths[0]], dtype=np.int64))


@dataclass(frozen=True)
class Mistake:
    """A row that a model predicted wrong.

    Args:
        row: Which one: its place in the batch, later in the data set.
        truth: What it is.
        predicted: What the model said.
        confidence: How sure it was, 0 to 1.
        image: The row's `Task.picture`.
    """

    row: int
    truth: str
    predicted: str
    confidence: float
    image: bytes | None = None
