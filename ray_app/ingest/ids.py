"""The numbers of ids of users, products and the like: from 0, in the sorted order of all values of a source.

All data sets of an ingest have the same numbers. `dataset.json` lists the values by their numbers, and the column of
each shard has their count and digest in its metadata, so that data with other numbers is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import IDS, is_text
from ray_app.data.dataset import read_description
from ray_app.errors import DataError
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.readers import sources
from ray_app.storage.files import to_location

Ids = dict[str, pa.Array]
"""The values of each column of ids in the order of their numbers."""


def distinct_ids(table: pa.Table, options: IngestOptions) -> Ids:
    """Returns the different values of each column of ids, int64 or text; raises DataError for a column of others."""
    ids = {}
    for name in options.ids or ():
        if name not in table.column_names[1:]:
            raise DataError(f"ids names {name!r}; the columns are {table.column_names[1:]}. Name some of these.")
        ids[name] = pc.unique(_values(name, table[name])).drop_null()
    return ids


def merge_ids(options: IngestOptions, parts: list[Ids]) -> Ids:
    """Returns the sorted values of each column; raises DataError for a column of text and of integers."""
    merged = {}
    for name in options.ids or ():
        arrays = [part[name] for part in parts if name in part]
        if len(kinds := {str(array.type) for array in arrays}) > 1:
            raise DataError(f"ids names {name!r}, which holds {' and '.join(sorted(kinds))}. Write values of one type.")
        merged[name] = pc.unique(pa.chunked_array(arrays)).sort() if arrays else pa.array([], pa.int64())
    return merged


def load_ids(options: IngestOptions) -> Ids:
    """Returns the values of the data set that the option `ids_of` names; raises DataError if it lacks them."""
    root = to_location(str(options.ids_of))
    described = read_description(root) or read_description(root / "train") or {}
    stored = described.get("ids") or {}
    final_names = {name: options.rename.get(name, name) for name in options.ids or ()}
    if missing := [name for name in final_names.values() if name not in stored]:
        raise DataError(
            f"ids_of {options.ids_of!r} has no numbers for {missing[0]!r}, only for {sorted(stored)}. Name a data set"
            " that was ingested with these ids."
        )
    return {name: pa.array(stored[final_name]) for name, final_name in final_names.items()}


def digest_ids(values: pa.Array) -> str:
    """Returns a digest of the values of a column in the order of their numbers."""
    return hashlib.blake2b(json.dumps(values.to_pylist()).encode(), digest_size=16).hexdigest()


class IdNumbers:
    """Replaces the ids in the columns of tables by their numbers."""

    def __init__(self, ids: Mapping[str, pa.Array], options: IngestOptions) -> None:
        self._ids, self._of = ids, options.ids_of
        self._metadata = {
            name: {IDS: json.dumps({"count": len(values), "digest": digest_ids(values)})}
            for name, values in ids.items()
        }

    def number(self, table: pa.Table, refuse: sources.Refuse) -> pa.Table:
        """Returns the table with numbers; refuses rows without an id, or with one that has no number."""
        for name, values in self._ids.items():
            column = _values(name, table[name])
            if column.type != values.type:
                raise DataError(
                    f"ids names {name!r}, a column of {column.type}, but the ids are {values.type}. Convert the column."
                )
            numbers = pc.index_in(column, values)
            if numbers.null_count:
                expected = f"one of the {len(values):,} ids of {self._of}" if self._of else "an id"
                bad = table.filter(numbers.is_null()).select(["row_id", name]).to_pydict()
                for row_id, value in zip(*bad.values(), strict=True):
                    refuse(row_id, f"{name} is {value!r}; expected {expected}")
                table, numbers = table.filter(numbers.is_valid()), numbers.drop_null()
            field = pa.field(name, pa.int64(), nullable=False, metadata=self._metadata[name])
            table = table.set_column(table.column_names.index(name), field, numbers.cast(pa.int64()))
        return table


def describe_ids(ids: Mapping[str, pa.Array], options: IngestOptions) -> dict[str, Any]:
    """Returns the entry `ids` of `dataset.json`, by the names of the columns after `rename`."""
    return {options.rename.get(name, name): values.to_pylist() for name, values in ids.items()}


def make_id_notes(ids: Mapping[str, list[Any]]) -> list[str]:
    """Returns a sentence for each column of ids with the number of rows that an embedding of them needs."""
    return [
        f"the {len(values):,} ids in {name!r} are numbered from 0 to {len(values) - 1}: an embedding of them has"
        f" num_embeddings={len(values)}."
        for name, values in ids.items()
    ]


def _values(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column as int64 or text, without empty texts."""
    if is_text(column.type):
        texts = column.cast(pa.string())
        return pc.if_else(pc.equal(texts, ""), None, texts)
    if pa.types.is_integer(column.type) and not pa.types.is_uint64(column.type):
        return column.cast(pa.int64())
    raise DataError(f"ids names {name!r}, a column of {column.type}; allowed are text and integers. Convert it.")
