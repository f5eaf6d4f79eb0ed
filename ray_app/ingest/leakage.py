"""Leakage between the data sets of an ingest: equal rows, and windows that overlap.

Each row has two hashes, of its content without id and label, and of its label. Where there are many rows, those with
the smallest hashes are compared: of equal rows either both are, or none. The hashes are computed in the pass that
writes the rows.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import fixed_array, is_bytes, is_number, is_ragged_list, is_text, spec_of_field
from ray_app.plan.hashing import UInt64, hash_array, mix_array
from ray_app.storage.files import Location, list_files, put_atomic

MAX_COMPARED = 1 << 20
"""Rows of a data set that are compared."""
_MAX_UNMERGED = 3 << 19
"""Rows of which an input split holds the hashes at most."""
KNOWN_ROWS = "_known_rows-"
"""Beginning of the names of the files in a data set that have the hashes of its rows, one for each delivery."""
_LABELS = ("label", "target")
_WORD_BYTES = 4 << 20
Leaks = dict[str, Any]
"""Counts of the `rows` of a data set, plain JSON.

Of those that were `compared`, `equal` counts those equal to a training row but for id and label, `other_label` those of
them that have another label. `windows` has for each column with windows the number of rows that overlap training rows,
the axis and the shift. `is_divided` says whether the ingest has divided the rows.
"""
_TRIED_PAIRS = 64
"""Pairs of successive rows in which the shift of windows is looked for."""


def hash_rows(table: pa.Table, ignored: Collection[str]) -> tuple[UInt64, UInt64]:
    """Returns the hash of the content of each row, and that of its label, (rows,); equal content has equal hashes.

    `ignored` has the columns that do not count, such as the id of the row.
    """
    content, labels = np.zeros(table.num_rows, np.uint64), np.zeros(table.num_rows, np.uint64)
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name in ignored:
            continue
        base = int.from_bytes(hashlib.blake2b(field.name.encode(), digest_size=8).digest(), "big")
        values = mix_array(_hash_values(field, column.combine_chunks()) ^ np.uint64(base))
        total = labels if field.name in _LABELS else content
        total += values
    return mix_array(content), labels


def _hash_values(field: pa.Field, column: pa.Array) -> UInt64:
    """Returns a hash of each value of a column, (rows,)."""
    kind, spec = field.type, spec_of_field(field)
    if spec is not None and spec.padding is None:
        return _hash_words(fixed_array(column, spec))
    if is_number(kind) or pa.types.is_temporal(kind):
        column = column.cast(pa.uint8()) if pa.types.is_boolean(kind) else column
        hashes = _hash_words(_read_items(column))
    elif is_ragged_list(kind) and is_number(kind.value_type) and not pa.types.is_boolean(kind.value_type):
        ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy()) * (kind.value_type.bit_width // 8)
        hashes = _hash_each(np.split(_read_items(pc.list_flatten(column)).reshape(-1), ends[:-1]))
    elif is_bytes(kind):
        # Without copies: these are files, which may have any size.
        present = column.fill_null(b"") if column.null_count else column
        hashes = _hash_each(value.as_buffer() for value in present)
    elif is_text(kind):
        # Each different value is hashed once.
        encoded = column if pa.types.is_dictionary(kind) else column.cast(pa.large_binary()).dictionary_encode()
        different = _hash_each(encoded.dictionary.cast(pa.large_binary()).to_pylist())
        hashes = np.append(different, np.uint64(1))[pc.fill_null(encoded.indices, len(different)).to_numpy()]
    else:
        hashes = _hash_each(repr(value).encode() for value in column.to_pylist())
    if column.null_count:
        hashes[column.is_null().to_numpy(zero_copy_only=False)] = 1
    return hashes


def _read_items(column: pa.Array) -> npt.NDArray[np.uint8]:
    """Returns the bytes of values of one width, (values, width)."""
    width = column.type.bit_width // 8
    data = np.frombuffer(column.buffers()[1] or b"", np.uint8, len(column) * width, column.offset * width)
    return data.reshape(len(column), width)


def _hash_each(values: Iterable[Any]) -> UInt64:
    """Returns the digest of each value, an object with bytes."""
    digests = (hashlib.blake2b(value, digest_size=8).digest() for value in values)
    return np.frombuffer(b"".join(digests), np.uint64).copy()


def _hash_words(values: npt.NDArray) -> UInt64:
    """Returns the sums of the words of 32 bits of each row times random weights of 64 bits (multilinear hashing)."""
    hashes = np.zeros(len(values), np.uint64)
    if not values.size:
        return hashes
    raw = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    step = max(1, _WORD_BYTES // max(1, raw.shape[1]))
    for low in range(0, len(raw), step):
        rows = raw[low : low + step]
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))) if rows.shape[1] % 4 else np.ascontiguousarray(rows)
        words = padded.view(np.uint32).astype(np.uint64)
        hashes[low : low + step] = words @ _weights(words.shape[1])
    return hashes


@lru_cache(16)
def _weights(count: int) -> UInt64:
    return hash_array(count, np.arange(count)) | np.uint64(1)


@dataclass
class RowHashes:
    """The hashes of the rows of a data set, at most `MAX_COMPARED` of them, the smallest ones.

    Args:
        rows: Number of all rows.
        content: Sum of the hashes of all rows modulo 2^64, which does not depend on their order.
        hashes: Of each kept row the hash of its content and that of its label, (kept rows, 2).
        limit: The hashes of all rows below it are kept.
    """

    rows: int
    content: int
    hashes: UInt64
    limit: int

    @classmethod
    def merge(cls, parts: Iterable[RowHashes]) -> RowHashes:
        """Returns the hashes of the rows of all parts."""
        every = [cls(0, 0, np.empty((0, 2), np.uint64), 1 << 64), *parts]
        rows, content = sum(part.rows for part in every), sum(part.content for part in every) % (1 << 64)
        limit = min(part.limit for part in every)
        return cls(rows, content, np.concatenate([part.hashes for part in every]), limit).with_limit(limit)

    def with_limit(self, limit: int) -> RowHashes:
        """Returns the hashes below a limit, or below a lower one where there are too many of them."""
        hashes = self.hashes if limit > (1 << 64) - 1 else self.hashes[self.hashes[:, 0] < np.uint64(limit)]
        while len(hashes) > MAX_COMPARED:
            limit //= 2
            hashes = hashes[hashes[:, 0] < np.uint64(limit)]
        return RowHashes(self.rows, self.content, hashes, limit)

    @classmethod
    def of(cls, content: UInt64, labels: UInt64) -> RowHashes:
        """Returns the hashes of the rows of a table, see `hash_rows`."""
        total = int(mix_array(content + labels).sum())
        return cls(len(content), total, np.stack([content, labels], axis=1), 1 << 64)

    def put(self, file: Location) -> None:
        """Writes the hashes."""
        buffer = io.BytesIO()
        np.savez(buffer, hashes=self.hashes, facts=np.array([self.rows, self.content, self.limit - 1], np.uint64))
        put_atomic(file, buffer.getvalue())

    @classmethod
    def load(cls, file: Location) -> RowHashes:
        """Reads what `put` has written."""
        stored = np.load(io.BytesIO(file.read_bytes()))
        rows, content, limit = map(int, stored["facts"])
        return cls(rows, content, stored["hashes"], limit + 1)


def add_hashes(parts: list[RowHashes], table: pa.Table, ignored: Collection[str]) -> None:
    """Appends the hashes of the rows of a table; `RowHashes.merge` of all, which copies them, is made now and then."""
    parts.append(RowHashes.of(*hash_rows(table, ignored)))
    if sum(len(part.hashes) for part in parts) > _MAX_UNMERGED:
        parts[:] = [RowHashes.merge(parts)]


def keep_hashes(folder: Location, hashes: RowHashes, number: int) -> RowHashes:
    """Writes the hashes of a delivery to a data set; returns those of all its rows, of this and earlier deliveries."""
    file = folder / f"{KNOWN_ROWS}{number:05d}.npz"
    earlier = [name for name in list_files(folder) if name.startswith(KNOWN_ROWS) and name < file.name]
    hashes.put(file)
    return RowHashes.merge([*(RowHashes.load(folder / name) for name in sorted(earlier)), hashes])


def content_digest(hashes: Iterable[RowHashes]) -> str:
    """Returns a text that equal rows have in common, in any order and however they are divided."""
    parts = list(hashes)
    return f"{sum(part.rows for part in parts)}:{sum(part.content for part in parts) % (1 << 64):016x}"


def find_equal_rows(train: RowHashes, other: RowHashes) -> dict[str, int]:
    """Returns the numbers of rows of another data set: `compared`, `equal` to a training row, and `other_label`.

    Rows that are equal but for the label count as `equal`, too.
    """
    limit = min(train.limit, other.limit)
    train_rows, rows = train.with_limit(limit).hashes, other.with_limit(limit).hashes
    is_equal = np.isin(rows[:, 0], train_rows[:, 0])
    is_same = np.isin(mix_array(rows[:, 0] + rows[:, 1]), mix_array(train_rows[:, 0] + train_rows[:, 1]))
    return {
        "compared": len(rows),
        "equal": int(is_equal.sum()),
        "other_label": int((is_equal & ~is_same).sum()),
    }


class Overlaps:
    """Counts rows of `eval` with an array that is that of a neighbour in `train`, shifted along an axis."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}

    def add(self, table: pa.Table, in_eval: npt.NDArray[np.bool_]) -> None:
        """Adds successive rows of the source, and whether each goes to `eval`."""
        for field, column in zip(table.schema, table.columns, strict=True):
            spec = spec_of_field(field)
            if spec is None or spec.padding is not None or max(spec.shape, default=0) < 2 or table.num_rows < 2:
                continue
            values = fixed_array(column, spec)
            if (shift := _find_shift(values)) is not None:
                pairs = np.flatnonzero(in_eval[1:] != in_eval[:-1])
                pairs = pairs[[_is_shifted(values[row], values[row + 1], *shift) for row in pairs.tolist()]]
                rows = np.where(in_eval[pairs], pairs, pairs + 1)
                total = self.counts.setdefault(field.name, [0, *shift])
                total[0] += len(np.unique(rows))


def _find_shift(values: npt.NDArray) -> tuple[int, int] | None:
    """Returns the axis of a row and the shift by which most of some successive rows are the same array, or None."""
    tried = np.unique(np.linspace(0, len(values) - 2, _TRIED_PAIRS).astype(int)).tolist()
    for axis in range(values.ndim - 1):
        counts = np.zeros(values.shape[axis + 1], int)
        for row in tried:
            one, first = np.moveaxis(values[row], axis, 0), np.moveaxis(values[row + 1], axis, 0)[:1]
            matches = (one == first).reshape(len(one), -1).all(axis=1)
            matches[0] = False
            for shift in np.flatnonzero(matches)[:4].tolist():
                counts[shift] += _is_shifted(values[row], values[row + 1], axis, shift)
        if 2 * counts.max(initial=0) > len(tried):
            return axis, int(counts.argmax())
    return None


def _is_shifted(one: npt.NDArray, two: npt.NDArray, axis: int, shift: int) -> bool:
    """Returns whether a row continues the row before it, in more than one different value."""
    end, begin = np.moveaxis(one, axis, 0)[shift:], np.moveaxis(two, axis, 0)[: one.shape[axis] - shift]
    return bool(np.array_equal(end, begin) and (end != end.flat[0]).any())


def find_leaks(
    hashes: Mapping[str, RowHashes],
    overlaps: Iterable[Mapping[str, Sequence[int]]],
    is_divided: bool,
    described: Mapping[str, Mapping[str, Any]],
) -> dict[str, Leaks]:
    """Returns the counts of the rows of each data set that are equal to training rows, or overlap them.

    Args:
        hashes: The hashes of all rows by data set.
        overlaps: The counts of `Overlaps` of each input split.
        is_divided: Whether the ingest has divided the rows.
        described: The descriptions before a delivery, of which the counts of windows are kept.
    """
    if "train" not in hashes:
        return {}
    leaks: dict[str, Leaks] = {}
    for side, rows in hashes.items():
        if side != "train":
            counts = {"rows": rows.rows, **find_equal_rows(hashes["train"], rows)}
            leaks[side] = {**counts, "windows": {}, "is_divided": is_divided and side == "eval"}
    if "eval" in leaks:
        windows = leaks["eval"]["windows"]
        before = described.get("eval", {}).get("leaks") or {}
        for more in [before.get("windows", {}), *overlaps]:
            for name, (count, axis, shift) in more.items():
                windows[name] = [count + windows.get(name, [0])[0], axis, shift]
    return leaks


def make_leak_notes(side: str, leaks: Leaks | None) -> list[str]:
    """Returns notes on the rows of a data set that are equal to training rows, or overlap them."""
    if leaks is None:
        return []
    notes = []
    remedy = f"An evaluation on them says little about new rows. {_DIVISION if leaks['is_divided'] else _SELECTION}."
    if leaks["equal"]:
        others = f", {leaks['other_label']:,} of them with another label" if leaks["other_label"] else ""
        is_sample = " compared" * (leaks["compared"] != leaks["rows"])
        notes.append(
            f"{leaks['equal']:,} of {leaks['compared']:,}{is_sample} rows of {side!r} are equal to rows of 'train' in"
            f" all columns but id and label{others}. {remedy}"
        )
    for name, (count, axis, shift) in leaks["windows"].items():
        if count:
            notes.append(
                f"{count:,} of {leaks['rows']:,} rows of {side!r} overlap with rows of 'train': in the column {name!r}"
                f" a row repeats the row before it, shifted by {shift} along axis {axis}. {remedy}"
            )
    return notes


_SELECTION = "Leave these rows out of one of the two sources"
_DIVISION = (
    "Divide with --group COLUMN, which keeps all rows of one value (a person, a recording) in one data set, or with"
    " --split_by COLUMN, which evaluates on the latest rows"
)
