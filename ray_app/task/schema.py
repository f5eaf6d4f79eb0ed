"""Comparison of data with the data that a task was prepared with: columns by name and type, classes by name."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ray_app.errors import DataError, join_names
from ray_app.plan.manifest import ColumnFacts, DataFacts, class_columns
from ray_app.task.base import Task

_MAX_WRITTEN = 100
"""A message has so many classes at most as an option to copy."""

Schema = Mapping[str, Any]
"""A schema as JSON, with the entries `columns` and `classes`.

`columns` has name, kind and dtype of each column that is read; `classes` has the class names, None if there are none.
Where columns have numbers of ids, `ids` has the digest of these by column.
A stored one may have `fitted`, see `Task.fitted`, and `class_names`, if the task found the names, not ingest.
"""


def prepare_task(task: Task, data: DataFacts, stored: Schema | None = None) -> Task:
    """Prepares a task with the data that it trains on, and stores the schema of that data in it; see `Task.prepare`.

    Args:
        task: The task.
        data: The data.
        stored: The stored schema of a run that exists, with what its first start has computed from the data.
    """
    if stored and stored.get("fitted"):
        task = copy.copy(task)
        task.fitted = stored["fitted"]
    if stored and stored.get("class_names"):
        task = copy.copy(task)
        task.classes = stored["class_names"]
    prepared = task.prepare(data)
    vars(prepared)["data_schema"] = schema_of(data, prepared.columns())
    return prepared


def stored_schema(task: Task) -> Schema:
    """Returns the schema of a prepared task as a run stores it, see `prepare_task`."""
    names = {} if task.data_schema["classes"] else {"class_names": task.classes}
    return {**task.data_schema, **{name: value for name, value in {"fitted": task.fitted, **names}.items() if value}}


def schema_of(data: DataFacts, columns: Iterable[str]) -> dict[str, Any]:
    """Returns the schema of a data set, which other data for the same model must match."""
    read = [name for name in columns if name in data.columns]
    kinds = [[name, data.columns[name].kind, data.columns[name].dtype] for name in read]
    ids = {name: data.columns[name].ids for name in read if data.columns[name].ids}
    reads_classes = data.classes and not set(class_columns(data.columns)).isdisjoint(read)
    classes = list(data.classes or ()) if reads_classes else None
    return {"columns": kinds, "classes": classes, **({"ids": ids} if ids else {})}


def refuse_other_data(task: Task, data: DataFacts, where: str, of: str) -> None:
    """Raises DataError for data that a prepared task cannot use; as `refuse_other_schema`, but see `takes_column`."""
    refuse_other_schema(task.data_schema, data, where, of, task.takes_column)


def refuse_other_schema(
    schema: Schema,
    data: DataFacts,
    where: str,
    of: str,
    takes_column: Callable[[str, ColumnFacts], bool] = lambda _name, _facts: False,
) -> None:
    """Raises DataError for columns of other types, or classes of other names, than the task's.

    Args:
        schema: The schema of the data that was trained on.
        data: The other data.
        where: The other data in words, for the message.
        of: The data that was trained on in words.
        takes_column: Whether a column may have another type; see `Task.takes_column`.
    """
    for name, kind, dtype in schema.get("columns", []):
        facts = data.columns.get(name)
        is_empty = facts is not None and (facts.nulls == data.num_rows or facts.dtype == "null")
        if facts is not None and not is_empty and not (_fits(kind, dtype, facts) or takes_column(name, facts)):
            raise DataError(
                f"Column {name!r} of {where} holds {_described(facts.kind, facts.dtype)}; in {of} it holds"
                f" {_described(kind, dtype)}. Both must have one type: convert one, or ingest both the same way."
            )
    for name, digest in schema.get("ids", {}).items():
        if name in data.columns and data.columns[name].ids not in ("", digest):
            raise DataError(
                f"The numbers in column {name!r} of {where} stand for other ids than the numbers in {of}. Ingest both"
                " together, or one with --ids_of and the folder of the other."
            )
    refuse_other_names(schema.get("classes"), data.classes, where, of)


def refuse_other_names(trained: Sequence[str] | None, classes: Sequence[str] | None, where: str, of: str) -> None:
    """Raises DataError for classes with other names for the same indices; a beginning of them agrees."""
    if not trained or not classes:
        return
    numbers = enumerate(zip_longest(classes, trained))
    number, (one, other) = next(
        ((i, pair) for i, pair in numbers if pair[0] is not None and pair[0] != pair[1]), (0, (None, None))
    )
    if one is None:
        return
    trained_name = f"{other!r} in {of}" if other is not None else f"none in {of}"
    raise DataError(
        f"Class {number} is {one!r} in {where} and {trained_name}: the classes are {join_names(classes)} and"
        f" {join_names(trained)}. Classes are matched by name, never only by number. Ingest both together"
        " (eval_fraction), or from sources with the same"
        f" labels{_describe_classes_option(trained, classes, where, of)}."
    )


def named_classes(classes: Sequence[str]) -> Sequence[str] | None:
    """Returns the names of classes, None if they are only the indices, which name classes without names."""
    return None if all(name == str(number) for number, name in enumerate(classes)) else classes


def _fits(kind: str, dtype: str, other: ColumnFacts) -> bool:
    """Whether a column can replace one of a kind and dtype: the types agree, or it has integers for fractions."""
    if kind != other.kind:
        return kind == "number" and other.kind == "integer"
    if kind not in ("array", "list"):
        return True
    one, two = _number_kind(dtype), _number_kind(other.dtype)
    return one == two or (one == "f" and two in "iu") or (one in "iub" and two in "iub" and "B" not in (one, two))


def _number_kind(dtype: str) -> str:
    """Returns the kind of an array's numbers (`f`, `i`, `u`, `b`), `B` for bytes, which are pixels."""
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        # Lists have a type of Arrow, such as list<item: int64>.
        return "f" if "double" in dtype or "float" in dtype else "i" if "int" in dtype else "b"
    return "B" if parsed == np.uint8 else parsed.kind


def _described(kind: str, dtype: str) -> str:
    return f"{kind} {dtype}".rstrip()


def _describe_classes_option(trained: Sequence[str], classes: Sequence[str], where: str, of: str) -> str:
    """Returns the ingest that numbers the classes as in the training; an empty text if there is no such one.

    Rows of a class that was not trained on cannot be ingested so, and a message has a limited number of names.
    """
    if len(trained) > _MAX_WRITTEN or not set(classes) <= set(trained):
        return ""
    option = shlex.quote(json.dumps(list(trained), ensure_ascii=False))
    return (
        f", or ingest {where} again with the classes of {of} in their order, which csv, jsonl, hf, tfrecord and"
        f" webdataset allow: --classes {option}"
    )
