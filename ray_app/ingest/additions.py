"""Rows that are added to a data set: a delivery (`IngestOptions.append`).

Its shards are written beside those that are there. `_ingest.json` in each data set marks them as unfinished, and has
the new descriptions in the end: from then on the addition is finished by any later one, before it is undone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import describe_other_columns, is_number, is_text, meaning_of
from ray_app.data.classes import map_classes, renumber
from ray_app.data.dataset import ADDED_PREFIX, DESCRIPTION, UNFINISHED_MARKER, read_description
from ray_app.data.parquet_files import load_footers, read_footers
from ray_app.errors import DataError, join_names
from ray_app.ingest.leakage import KNOWN_ROWS
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.output_folder import remove_work, side_folder
from ray_app.ingest.readers.sources import Part
from ray_app.storage.data_files import files_below
from ray_app.storage.files import Location, list_files, put_json, read_json

Descriptions = Mapping[str, dict[str, Any]]
"""The content of each `_dataset.json` by data set."""


@dataclass(frozen=True)
class Addition:
    """The data set to which rows are added; pickled to the tasks.

    Args:
        number: Number of the delivery; the first ingest is 1.
        schema: The columns of the data set.
        class_numbers: By the number of a class in the source its number in the data set.
        first_eval_time: See `InputSplitTask`.
    """

    number: int
    schema: pa.Schema
    class_numbers: tuple[int, ...]
    first_eval_time: int | float | None

    def fit(self, table: pa.Table, options: IngestOptions) -> pa.Table:
        """Returns rows with the columns, the types and the classes of the data set, and with ids of their own.

        Raises DataError for a column that is missing, new, or of a type that cannot be converted without loss.
        """
        prefix = pa.scalar(f"{self.number}:")
        ids = pc.binary_join_element_wise(prefix, table["row_id"].cast(pa.string()), "")
        table = table.set_column(0, table.schema.field(0), ids)
        if self.class_numbers:
            table = map_classes(table, self.class_numbers, table.column_names)
        if options.pack:
            return table
        if set(table.column_names) == set(self.schema.names):
            table = table.select(self.schema.names)
            for index, field in enumerate(self.schema):
                if (converted := _convert(table.column(index), table.schema.field(index), field)) is not None:
                    table = table.set_column(index, field, converted)
        if others := describe_other_columns(table.schema, self.schema):
            raise DataError(
                f"{options.input} has other columns than the data set {options.out}: {others}. Correct the input, or"
                " ingest it into another folder."
            )
        return table


def _convert(column: pa.ChunkedArray, field: pa.Field, target: pa.Field) -> pa.ChunkedArray | None:
    """Returns a column with the type of another one, if all values keep their meaning; otherwise None."""
    if meaning_of(field) or meaning_of(target) or (column.null_count and not target.nullable):
        return None
    one, two = field.type, target.type
    is_empty = column.null_count == len(column)
    # A reader makes a column with leading zeros text, so the digits of an integer are its text.
    is_text_of = is_text(two) and (is_text(one) or pa.types.is_integer(one))
    are_numbers = is_number(one) and is_number(two) and not {pa.bool_()} & {one, two}
    # Arrow refuses to round fractions to integers, and large integers to fractions, but not these.
    is_rounded = pa.types.is_floating(one) and pa.types.is_floating(two) and two.bit_width < one.bit_width
    try:
        return column.cast(two) if is_empty or is_text_of or (are_numbers and not is_rounded) else None
    except pa.ArrowException:
        return None


def stem_of(addition: Addition | None) -> str:
    """Returns the beginning of the names of shards: those of an addition come after all others."""
    return "part-" if addition is None else f"{ADDED_PREFIX}{addition.number:05d}-"


def make_addition(
    parts: Sequence[Part], described: Descriptions, options: IngestOptions, out: Location
) -> tuple[Addition, tuple[str, ...] | None]:
    """Returns the addition of a source to the data sets in a folder, and the names of their classes with it.

    Raises:
        DataError: The source has classes that the data sets lack, and `new_classes` is false, or no names of classes.
    """
    side, base = next(iter(described.items()))
    classes, names = (tuple(value) if value else None for value in (base["classes"], parts[0].classes))
    new = [name for name in names or () if name not in (classes or ())]
    if (classes is None) != (names is None) or (new and not options.new_classes):
        remedy = f"set new_classes=true to number {join_names(new)} next, or correct the labels"
        raise DataError(
            f"{options.input} has the classes {join_names(names or ())}, and the data set {options.out}"
            f" {join_names(classes or ())}. Classes are matched by name:"
            f" {remedy if classes and names else 'write the label in the same form'}."
        )
    if options.split_by and "first_eval_time" not in base:
        raise DataError(
            f"{out} was written by an earlier version of ray_app, without support of split_by. Ingest all data again."
        )
    folder = side_folder(out, side)
    footers = load_footers(folder) or read_footers(folder, files_below(folder, ".parquet"))
    all_classes = (*(classes or ()), *new)
    numbers = renumber(names or (), all_classes, footers.schema.names)
    if numbers is None:
        raise DataError(
            f"{options.input} has the classes {join_names(names or ())}, and the data set {join_names(all_classes)};"
            " masksand targets with one entry per class need the same numbers. Name the classes in this order."
        )
    number = 2 + max(len(facts.get("added", ())) for facts in described.values())
    schema = footers.schema.remove_metadata()
    return Addition(number, schema, numbers, base.get("first_eval_time")), all_classes or None


def is_added(described: Descriptions, field: str, value: Any) -> bool:
    """Returns whether a delivery with a value of a field is in all data sets, be it the first one."""
    return all(
        value in [one.get(field) for one in (facts["made_from"], facts, *facts.get("added", ()))]
        for facts in described.values()
    )


def begin_addition(out: Location, described: Descriptions, number: int, made_from: dict[str, Any]) -> None:
    """Marks the shards of an addition as unfinished, before there are any."""
    for side in described:
        put_json(side_folder(out, side) / UNFINISHED_MARKER, {"number": number, "made_from": made_from})


def describe_addition(
    before: Mapping[str, Any], facts: Mapping[str, Any], made_from: Mapping[str, Any], delivery: dict[str, Any]
) -> dict[str, Any]:
    """Returns what a description keeps of the one before, and the list of the deliveries that were added."""
    added = {**delivery, "source_digest": made_from["source_digest"], "rows": facts["rows"] - before["rows"]}
    kept = {key: before[key] for key in ("made_from", "content") if key in before}
    return {**kept, "added": [*before.get("added", ()), added]}


def finish_addition(out: Location, descriptions: Descriptions, number: int, made_from: dict[str, Any]) -> None:
    """Replaces the descriptions of all data sets; after an interruption `recover_addition` does what is left."""
    for side, description in descriptions.items():
        marker = {"number": number, "made_from": made_from, "description": description}
        put_json(side_folder(out, side) / UNFINISHED_MARKER, marker)
    _replace_descriptions(out, descriptions)


def recover_addition(out: Location, described: Descriptions, made_from: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Finishes an interrupted addition that was complete, and undoes another one unless it is of `made_from`.

    Returns the descriptions after that.
    """
    markers = {side: read_json(side_folder(out, side) / UNFINISHED_MARKER) for side in described}
    begun = {side: marker for side, marker in markers.items() if marker is not None}
    if begun and all("description" in marker for marker in begun.values()):
        _replace_descriptions(out, {side: marker["description"] for side, marker in begun.items()})
    elif begun and any(marker["made_from"] != json.loads(json.dumps(made_from)) for marker in begun.values()):
        undo_addition(out, described, next(iter(begun.values()))["number"])
    return {side: read_description(side_folder(out, side)) or {} for side in described}


def undo_addition(out: Location, described: Descriptions, number: int) -> None:
    """Removes what an addition has written."""
    for side in described:
        folder = side_folder(out, side)
        for name in list_files(folder):
            if name.startswith(tuple(f"{start}{number:05d}" for start in (ADDED_PREFIX, "_refused-", KNOWN_ROWS))):
                (folder / name).unlink()
    _remove_markers(out, described)


def _replace_descriptions(out: Location, descriptions: Descriptions) -> None:
    for side, description in descriptions.items():
        put_json(side_folder(out, side) / DESCRIPTION, description)
    _remove_markers(out, descriptions)


def _remove_markers(out: Location, described: Descriptions) -> None:
    remove_work(out)
    for side in described:
        if UNFINISHED_MARKER in list_files(side_folder(out, side)):
            (side_folder(out, side) / UNFINISHED_MARKER).unlink()
