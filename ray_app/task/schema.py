"""Whether other data than a task was prepared with has the same columns and the same classes, by name and type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ray_app.errors import DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.base import Task

LABEL = "label"
"""The column that an ingest gives the numbers of its classes."""
_MAX_NAMED = 8

Schema = Mapping[str, Any]
"""As JSON keeps it: `columns`, name, kind and dtype of each column that is read; `classes`, their names, or None where
there are none.
"""


def prepare_task(task: Task, data: DataFacts) -> Task:
    """Prepares a task with the data that it trains on, and notes what that data is like; see `Task.prepare`."""
    prepared = task.prepare(data)
    vars(prepared)["data_schema"] = schema_of(data, prepared.columns())
    return prepared


def schema_of(data: DataFacts, columns: Iterable[str]) -> dict[str, Any]:
    """What of a data set other data must have in common with it.

    Args:
        data: The data set.
        columns: The columns that are read.
    """
    read = [name for name in columns if name in data.columns]
    kinds = [[name, data.columns[name].kind, data.columns[name].dtype] for name in read]
    return {"columns": kinds, "classes": list(data.classes) if data.classes and LABEL in read else None}


def refuse_other_schema(known: Schema, data: DataFacts, where: str, of: str) -> None:
    """Refuses data whose columns have another type, or whose class numbers have other names; what is not known is not
    compared.

    Args:
        known: Of the data that the task was prepared with; empty, if it was not noted.
        data: The other data.
        where: The other data, for messages.
        of: The data that the task was prepared with, for messages.

    Raises:
        DataError: It differs.
    """
    for name, kind, dtype in known.get("columns", []):
        facts = data.columns.get(name)
        if facts is not None and not _fits(kind, dtype, facts):
            raise DataError(
                f"Column {name!r} of {where} holds {_described(facts.kind, facts.dtype)}; of {of} it holds"
                f" {_described(kind, dtype)}. Both must be of one type: convert the one, or ingest both the same way."
            )
    refuse_other_names(known.get("classes"), data.classes, where, of)


def refuse_other_names(known: Sequence[str] | None, classes: Sequence[str] | None, where: str, of: str) -> None:
    """Refuses classes that have other names for the same numbers; fewer of them, in the same order, agree.

    Args:
        known: Names of the classes that were trained on; None, if they have none.
        classes: Names of those of other data.
        where: The other data, for messages.
        of: What was trained on, for messages.

    Raises:
        DataError: They have other names.
    """
    if not known or not classes:
        return
    numbers = enumerate(zip_longest(classes, known))
    number, (one, other) = next(
        ((i, pair) for i, pair in numbers if pair[0] is not None and pair[0] != pair[1]), (0, (None, None))
    )
    if one is None:
        return
    knows = f"{other!r} in {of}" if other is not None else f"none in {of}"
    raise DataError(
        f"Class {number} is {one!r} in {where} and {knows}: they have the classes {_some(classes)} and {_some(known)}."
        " Classes agree by name, never by number alone. Ingest both in one go (eval_fraction), or from sources with the"
        " same labels."
    )


def named_classes(classes: Sequence[str]) -> Sequence[str] | None:
    """The names of classes; None, if these are their numbers, by which classes without names are called."""
    return None if all(name == str(number) for number, name in enumerate(classes)) else classes


def _fits(kind: str, dtype: str, other: ColumnFacts) -> bool:
    """Whether a column can stand for one of a kind and dtype: the same, or integers where fractions were."""
    if kind != other.kind:
        return kind == "number" and other.kind == "integer"
    if kind not in ("array", "list"):
        return True
    one, two = _number_kind(dtype), _number_kind(other.dtype)
    return one == two or (one == "f" and two in "iu") or (one in "iub" and two in "iub" and "B" not in (one, two))


def _number_kind(dtype: str) -> str:
    """The kind of an array's numbers (`f`, `i`, `u`, `b`), `B` for bytes, which are pixels."""
    try:
        found = np.dtype(dtype)
    except TypeError:  # a list of Arrow's, such as list<item: int64>
        return "f" if "double" in dtype or "float" in dtype else "i" if "int" in dtype else "b"
    return "B" if found == np.uint8 else found.kind


def _described(kind: str, dtype: str) -> str:
    return f"{kind} {dtype}".rstrip()


def _some(names: Sequence[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
