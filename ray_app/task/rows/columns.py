"""What a task asks of the columns of a data set before anything starts."""

from __future__ import annotations

from ray_app.errors import DataError
from ray_app.plan.facts import ColumnFacts, DataFacts


def need_column(data: DataFacts, name: str, kinds: tuple[str, ...], use: str) -> ColumnFacts:
    """The facts of a column that a task needs.

    Raises:
        DataError: There is no such column, it has another kind, or missing values.
    """
    facts = data.columns.get(name)
    if facts is None:
        raise DataError(
            f"{data.path} has no column {name!r} for the {use}; its columns are {', '.join(sorted(data.columns))}. Name another"
            " column in task.init_args or ingest the data again."
        )
    if facts.kind not in kinds:
        raise DataError(
            f"Column {name!r} of {data.path} holds {facts.kind} {facts.dtype}".rstrip()
            + f"; the {use} needs {' or '.join(kinds)}. Name another column in task.init_args or convert it."
        )
    if facts.nulls:
        raise DataError(f"Column {name!r} of {data.path} has {facts.nulls} missing values; fill or drop them before training.")
    return facts


MAX_COUNTED_CLASSES = 100_000
"""More classes than this are believed only if the configuration, or the names that an ingest recorded, say so."""


def count_classes(data: DataFacts, label: str, wanted: int | None) -> int:
    """The number of classes: as configured, as the ingest recorded it, or the greatest label plus one.

    Raises:
        DataError: A label lies outside the classes, nothing tells how many there are, or the labels are no class numbers but identifiers,
            of which there would be more than rows.
    """
    facts = need_column(data, label, ("integer",), "label")
    known = wanted or (len(data.classes) if data.classes else None)
    if known is None and facts.maximum is None:
        raise DataError(f"{data.path} does not say how many classes column {label!r} has; set task.init_args.num_classes.")
    count = known if known is not None else int(facts.maximum or 0) + 1
    low, high = facts.minimum, facts.maximum
    if (low is not None and low < 0) or (high is not None and high >= count):
        raise DataError(
            f"Column {label!r} of {data.path} has labels from {low:g} to {high:g}; {count} classes allow 0 to {count - 1}. Correct the"
            " labels or set task.init_args.num_classes."
        )
    if known is None and (reason := too_many_classes(data, count)):
        raise DataError(
            f"Column {label!r} of {data.path} has labels from {low:.0f} to {high:.0f}, which makes {count} classes: {reason}. If the labels"
            " are identifiers (numbers of articles, ZIP codes), number them from 0, or ingest them as text (ray-app ingest --label), whose"
            " values become classes; if there are so many classes, set task.init_args.num_classes."
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
