"""What a task uses of its data, and what it leaves out, as the start says it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.dataset import Dataset
from ray_app.errors import DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts, find_similar_names
from ray_app.preflight.metric_checks import MAX_ROWS
from ray_app.storage.data_files import locate_data, open_parquet
from ray_app.task.base import Task

_ROW_ID = "row_id"
"""The text by which an ingest calls each row."""
_MAX_NAMED, _MAX_READ, _READ_ROWS = 20, 8, 1000


def describe_training_columns(task: Task, dataset: Dataset) -> list[str]:
    """Which columns a task reads, how many classes there are, and which columns it does not use and why, in one or two
    lines.

    Args:
        task: The prepared task.
        dataset: The data that it was prepared with.
    """
    columns, targets = task.columns(), task.targets()
    inputs = [name for name in columns if name not in targets]
    used = (
        f"Columns used: {_join_names(inputs)}"
        + (f"; to predict {_join_names(targets)}" if targets else "")
        + _describe_classes(task)
    )
    return [used, *_describe_unused_columns(dataset, columns)]


def describe_prediction_columns(columns: Sequence[str], dataset: Dataset, carried: Sequence[str]) -> list[str]:
    """Which columns a prediction reads and carries through, and which columns it does not use and why, in one or two
    lines.

    Args:
        columns: The columns that are read.
        dataset: The data that is predicted.
        carried: The columns that are beside the predictions.
    """
    used = f"Columns used: {_join_names(columns)}" + (
        f"; beside the predictions {_join_names(carried)}" if carried else ""
    )
    return [used, *_describe_unused_columns(dataset, [*columns, *carried])]


def _describe_unused_columns(dataset: Dataset, used: Sequence[str]) -> list[str]:
    unused = {name: facts for name, facts in dataset.facts.columns.items() if name not in used}
    if not unused:
        return []
    odd = _find_odd_values(
        dataset, [name for name, facts in unused.items() if facts.kind == "text" and name != _ROW_ID]
    )
    reasons = [
        f"{name!r} ({_explain_unused(name, facts, dataset.facts)}{odd.get(name, '')})" for name, facts in unused.items()
    ]
    return [f"Columns not used: {_join_names(reasons)}"]


def similar_class_warnings(facts: DataFacts) -> list[str]:
    """What to say of classes whose names differ in upper and lower case, blanks or the form of a character alone."""
    return [
        f"The classes {', '.join(map(repr, names))} of {facts.path} differ in upper and lower case, blanks or the form"
        f" of a character"
        " alone, and are trained on as different classes. If they are meant to be one, correct the labels and ingest"
        " the data again."
        for names in find_similar_names(facts.classes or ())
    ]


def constant_target_warnings(task: Task, evaluated: DataFacts, num_rows: int) -> list[str]:
    """What to say of data to evaluate on whose target has one value in all rows, as the statistics of its files show
    it.

    Args:
        task: The prepared task.
        evaluated: The data to evaluate on.
        num_rows: How many rows it has; of few, the metrics themselves are tried.
    """
    facts = {name: evaluated.columns.get(name) for name in task.targets()} if num_rows > MAX_ROWS else {}
    return [
        f"All {num_rows:,} rows of {evaluated.path} have {column.minimum + 0.0:g} in {name!r}: metrics that compare"
        f" classes (AUROC) or need"
        " different numbers (R2) say nothing of them. Evaluate on rows with different values."
        for name, column in facts.items()
        if column is not None
        and column.kind in ("integer", "number")
        and column.minimum is not None
        and column.minimum == column.maximum
    ]


def _describe_classes(task: Task) -> str:
    if not task.classes:
        return ""
    shown = (
        "" if task.classes == [str(number) for number in range(len(task.classes))] else f": {_join_names(task.classes)}"
    )
    return f", {len(task.classes)} classes{shown}"


def _explain_unused(name: str, facts: ColumnFacts, data: DataFacts) -> str:
    """Type of a column and the reason why it is not used."""
    kind = f"{facts.kind} {facts.dtype}".rstrip() if facts.kind == "other" else facts.kind
    if name in data.index_columns:
        return f"{kind}, which numbers the rows; name it to use it"
    return f"{kind}, not named" if facts.kind in ("number", "integer", "array") else kind


def _find_odd_values(dataset: Dataset, names: list[str]) -> dict[str, str]:
    """Of columns of text whose first rows are mostly numbers, the first value that is none: it may be what makes the
    column text.
    """
    if not names or not dataset.manifest.num_rows:
        return {}
    path, _, _ = dataset.manifest.locate(0)
    with (
        suppress(DataError, OSError, pa.ArrowException),
        open_parquet(locate_data(dataset.root) / path) as file,
    ):
        rows = next(file.iter_batches(_READ_ROWS, columns=names[:_MAX_READ], use_threads=False), None)
        found = {name: _find_odd_value(rows.column(name)) for name in rows.schema.names} if rows is not None else {}
        return {name: said for name, said in found.items() if said is not None}
    return {}


def _find_odd_value(values: pa.Array) -> str | None:
    texts = pc.utf8_trim_whitespace(values.cast(pa.string())).to_pylist()
    odd = [(row, text) for row, text in enumerate(texts) if text is not None and not _is_number(text)]
    if not odd or 2 * len(odd) > len(texts):
        return None
    return (
        f": {len(texts) - len(odd)} of the first {len(texts)} values are numbers or missing, {odd[0][1]!r} in row"
        f" {odd[0][0]} is not"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (f", ... ({len(names)})" if len(names) > _MAX_NAMED else "")
