"""One task of an ingest: a piece of the source becomes shards, or runs to be mixed, and a record that says that they
are complete.

The record is written last, so a piece that has one is never done again, and one that has none is done from its
beginning: it gives the same bytes under the same names. Nothing that is shared by pieces is written.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ray_app.errors import ConfigError, DataError, remove_addresses
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.output_folder import RECORDS, RUNS, make_scratch, side_folder
from ray_app.ingest.readers import base
from ray_app.ingest.shards import Shards, TextColumns
from ray_app.ingest.shuffle import Runs
from ray_app.ingest.tokenize import Packed, Texts
from ray_app.storage.data_files import find_file
from ray_app.storage.files import Location, put_json, read_json

Record = dict[str, Any]
"""Of a piece: `rows` (of the source), what `TextColumns` counted, and by side of the split `refused` and what `Shards`
or `Runs` describe; plain JSON.
"""


@dataclass(frozen=True)
class InputSplitTask:
    """What a task is to do; pickled to it.

    Args:
        part: Name of the piece's part.
        number: Of the piece in its part.
        piece: What to read.
        sides: Data sets that its rows go to: the part alone, or `train` and `eval`.
        options: Of the ingest.
        folder: Where to write.
        keeps_order: Whether its rows stay as they come; otherwise they are mixed with those of the other pieces.
    """

    part: str
    number: int
    piece: base.InputSplit
    sides: tuple[str, ...]
    options: IngestOptions
    folder: Location
    keeps_order: bool

    def __str__(self) -> str:
        return f"input split {self.number} of {self.part or 'the source'}, {self.piece.tables}"

    @property
    def record(self) -> Location:
        """Its record."""
        return self.folder / RECORDS / f"{self.part}-{self.number:05d}.json"


class Refusals:
    """Rows that cannot be used.

    Args:
        options: Whether they may be left out, and how many.
    """

    def __init__(self, options: IngestOptions) -> None:
        self._options = options
        self.rows: list[tuple[str, str]] = []

    def __call__(self, row_id: str, reason: str) -> None:
        """Takes a row's id and why it is refused.

        Raises:
            DataError: No row may be left out, or no more.
        """
        reason = remove_addresses(reason)
        if self._options.on_bad_row == "fail":
            raise DataError(
                f"{self._options.input}: row {row_id}: {reason}. Correct or remove it, or leave such rows out with"
                f" on_bad_row=skip."
            )
        self.rows.append((row_id, reason))
        check_refused_count(len(self.rows), self._options, row_id, reason)


def check_refused_count(refused: int, options: IngestOptions, row_id: str, reason: str) -> None:
    """Refuses too many refused rows.

    Raises:
        DataError: With the last of them.
    """
    if refused > options.max_bad_rows:
        raise DataError(
            f"{options.input}: more than max_bad_rows={options.max_bad_rows} rows cannot be used; one more is {row_id}:"
            f" {reason}. Correct"
            " them, or raise max_bad_rows."
        )


def write_input_split(task: InputSplitTask) -> Record:
    """Does a task, unless it was done before.

    Raises:
        DataError: A row or a file is refused, or the source changed since it was looked at.
        ConfigError: The columns cannot be named as asked.
    """
    if (done := load_finished_record(task)) is not None:
        return done
    options, refusals = task.options, Refusals(task.options)
    texts = Texts(options) if options.tokenizer else None
    text_columns = TextColumns()
    with make_scratch(task.folder) as own:
        sinks = {side: _sink(task, side, Path(own) / f"side-{side}") for side in task.sides}
        for table in task.piece.tables(refusals):
            usable = _finished(table, options.rename, refusals)
            if texts:
                usable = texts.encoded(usable, refusals)
            text_columns.add(usable)
            for side, rows in _by_side(usable, task).items():
                sinks[side].write(rows)
        for made in sinks.values():
            made.close()
    rows = sum(made.rows for made in sinks.values()) + len(refusals.rows)
    if task.piece.rows is not None and rows != task.piece.rows:
        raise DataError(
            f"{options.input}: {task.piece.rows} rows expected, {rows} read. The files changed meanwhile: start again."
        )
    sides = {side: made.description() | {"refused": []} for side, made in sinks.items()}
    for row in refusals.rows:
        sides[_side_of(row[0], task)]["refused"].append(row)
    record = {"rows": rows, "text_columns": text_columns.description(), "sides": sides}
    put_json(task.record, record)
    return record


def _sink(task: InputSplitTask, side: str, own: Path) -> Shards | Runs | Packed:
    """What takes the rows of a side; `own` is a folder for files that are being written."""
    if task.keeps_order:
        return Shards(side_folder(task.folder, side), f"part-{task.number:05d}", own, *task.options.limits)
    runs = Runs(task.folder / RUNS, f"{side}-{task.number:05d}", own)
    return Packed(runs, task.options.pack) if task.options.pack else runs


def load_finished_record(task: InputSplitTask) -> Record | None:
    """The record of a piece, if it was written before and its files are there."""
    record: Record | None = read_json(task.record)
    if record is None:
        return None
    for side, made in record["sides"].items():
        folder = side_folder(task.folder, side) if task.keeps_order else task.folder / RUNS
        for file in made["shards" if task.keeps_order else "runs"]:
            found = find_file(folder / file["path"])
            if found is None or found.size != file["bytes"]:
                return None
    return record


def _finished(table: pa.Table, rename: dict[str, str], refuse: base.Refuse) -> pa.Table:
    """The table under its final names, with `label` as int64 without gaps.

    Raises:
        ConfigError: A name is unknown or used twice.
        DataError: A label is missing or not an integer.
    """
    before = table.column_names[1:]
    names = ["row_id", *(rename.get(name, name) for name in before)]
    if not rename.keys() <= set(before):
        raise ConfigError(f"rename names {sorted(rename.keys() - set(before))}; the columns are {before}. Name these.")
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two columns of one name in {names}; `row_id` is ours. Give one of them another name by rename."
        )
    table = pa.table(table.columns, pa.schema([f.with_name(n) for f, n in zip(table.schema, names, strict=True)]))
    if "label" not in names:
        return table
    table = _with_whole_label(table, refuse)
    kind = table.schema.field("label").type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"the column `label` is of type {kind}; allowed are integers. Name a column of strings with the option "
            "label (csv, jsonl), or rename a column of numbers to 'target' for regression."
        )
    if table["label"].null_count:
        missing = table["label"].is_null()
        for row_id in table["row_id"].filter(missing).to_pylist():
            refuse(row_id, "no label; every row needs an integer")
        table = table.filter(pc.invert(missing))
    if pa.types.is_uint64(kind):
        beyond = pc.greater(table["label"], pa.scalar(2**63 - 1, kind))
        for row_id, label in zip(*table.filter(beyond).select(["row_id", "label"]).to_pydict().values(), strict=True):
            refuse(row_id, f"label {label}; it is too large for an integer of 64 bits")
        table = table.filter(pc.invert(beyond))
    final = pa.field("label", pa.int64(), nullable=False)
    return table.set_column(names.index("label"), final, table["label"].cast(pa.int64()))


def _with_whole_label(table: pa.Table, refuse: base.Refuse) -> pa.Table:
    """A table whose label, if it is of floating type, holds whole numbers: these as int64, without the rows that have
    none.

    Raises:
        DataError: A label is not a whole number.
    """
    labels = table["label"]
    if not pa.types.is_floating(labels.type):
        return table
    missing = pc.or_kleene(pc.is_null(labels), pc.fill_null(pc.is_nan(labels), True))
    for row_id in table["row_id"].filter(missing).to_pylist():
        refuse(row_id, "no label; every row needs an integer")
    table = table.filter(pc.invert(missing))
    labels = table["label"].cast(pa.float64())
    # What is beyond 2**53 may have been another integer where the number was written.
    odd = pc.index(pc.and_(pc.equal(pc.trunc(labels), labels), pc.less_equal(pc.abs(labels), 2.0**53)), False).as_py()
    if odd >= 0:
        raise DataError(
            f"the column `label` is of type {table.schema.field('label').type}, and row {table['row_id'][odd].as_py()}"
            f" has"
            f" {labels[odd].as_py()!r}, which is not an integer; allowed are integers and strings. For regression leave"
            f" the option label"
            " out and rename the column to 'target'."
        )
    return table.set_column(table.column_names.index("label"), "label", labels.cast(pa.int64()))


def _by_side(table: pa.Table, task: InputSplitTask) -> dict[str, pa.Table]:
    """The rows of each side."""
    if len(task.sides) == 1:
        return {task.sides[0]: table}
    sides = [_side_of(row_id, task) for row_id in table["row_id"].to_pylist()]
    return {side: table.filter(pa.array([found == side for found in sides], pa.bool_())) for side in task.sides}


def _side_of(row_id: str, task: InputSplitTask) -> str:
    """The side that a row goes to: a function of the seed and the row's own id."""
    if len(task.sides) == 1:
        return task.sides[0]
    hashed = hashlib.blake2b(row_id.encode(), digest_size=8, key=str(task.options.seed).encode()).digest()
    in_eval = int.from_bytes(hashed, "big") < int((task.options.eval_fraction or 0) * 2**64)
    return "eval" if in_eval else "train"
