"""One task of an ingest: it writes an input split as shards, or as runs for the shuffle, and then a record of it.

The record is written last. So an input split with a record is never done again, and one without is done from its
beginning, which gives the same bytes under the same names. Input splits share no file that they write.

`Texts` encodes a column of texts by the user's tokenizer, and `Packed` cuts the tokens of successive texts into blocks
of one length.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.config.import_paths import require
from ray_app.data.arrays import fixed_array, is_text, spec_of_field, to_column
from ray_app.data.split_times import ALLOWED_TIMES, find_first_eval_time, find_no_times, merge_counts, to_times
from ray_app.errors import ConfigError, DataError, remove_addresses
from ray_app.ingest.additions import Addition, stem_of
from ray_app.ingest.ids import IdNumbers, Ids, distinct_ids, load_ids, merge_ids
from ray_app.ingest.leakage import Overlaps, RowHashes, add_hashes
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.output_folder import HASHES, RECORDS, RUNS, has_files, make_scratch, side_folder
from ray_app.ingest.readers import sources
from ray_app.ingest.shards import Shards
from ray_app.ingest.shuffle import Runs
from ray_app.ingest.summary import TextColumns
from ray_app.storage.data_files import HEAD_BYTES, name_foreign_file
from ray_app.storage.files import Location, put_json, read_json, to_location
from ray_app.task.texts import TOKENS, TextEncoder

_MAX_VALUE_CHARS = 40
"""Characters of a value that a message repeats."""
_NO_LABEL = "no label, or none of the classes; every row needs an integer or a class"


Record = dict[str, Any]
"""Record of an input split, plain JSON.

It has the `rows` (of the source), the counts of `TextColumns` and `Overlaps`, and for each side of the train/eval split
`refused` and the description of `Shards` or `Runs`.
"""


@dataclass(frozen=True)
class InputSplitTask:
    """The task of one input split; pickled to the process that runs it.

    Args:
        sides: Data sets that its rows go to: the part alone, or `train` and `eval`.
        keeps_order: Whether its rows keep their order; otherwise they are shuffled with those of the other input
            splits.
        first_eval_time: With `split_by`, the least value of the rows that go to `eval`.
        classes: The names of the classes.
        ignored: Columns that number the rows, which do not count where rows are compared.
        addition: The data set to which the rows are added, if there is one.
        ids: The values of the columns of ids, in the order of their numbers.
    """

    part: str
    number: int
    input_split: sources.InputSplit
    sides: tuple[str, ...]
    options: IngestOptions
    folder: Location
    keeps_order: bool
    classes: tuple[str, ...] | None
    ignored: tuple[str, ...]
    addition: Addition | None = None
    first_eval_time: int | float | None = None
    ids: Ids = field(default_factory=dict)

    def __str__(self) -> str:
        return f"input split {self.number} of {self.part or 'the source'}, {self.input_split.tables}"

    @property
    def record(self) -> Location:
        """The file of the record."""
        return self.folder / RECORDS / f"{self.part}-{self.number:05d}.json"

    def hashes(self, side: str) -> Location:
        """The file of the hashes of the rows of a side, see `RowHashes`."""
        return self.folder / HASHES / f"{self.part}-{side}-{self.number:05d}.npz"


def choose_sides(parts: list[sources.Part], options: IngestOptions, are_divided: bool) -> dict[str, tuple[str, ...]]:
    """Returns the names of the data sets that the rows of each part go to."""
    names = [part.name for part in parts]
    if are_divided or not options.eval_fraction:
        if rule := next((name for name in ("group", "split_by", "stratify") if getattr(options, name)), None):
            raise ConfigError(
                f"{rule} is {getattr(options, rule)!r}, but source {options.source!r} is not divided; set"
                " --eval_fraction, unless the source has an evaluation set."
            )
        return {name: (name,) for name in names}
    if not set(names) <= {"", "train", "test"}:
        raise ConfigError(f"eval_fraction is {options.eval_fraction}, but the source has {names}. Leave it out.")
    return {name: (name,) if name == "test" else ("train", "eval") for name in names}


def make_tasks(
    parts: Sequence[sources.Part],
    sides: dict[str, tuple[str, ...]],
    options: IngestOptions,
    folder: Location,
    run: sources.Run,
    addition: Addition | None = None,
) -> list[InputSplitTask]:
    """Returns the tasks of all input splits; with `ids` and `split_by` this reads the columns once.

    Rows that are added take ids and the split from the data set.
    """
    tasks = [
        InputSplitTask(
            part.name,
            number,
            input_split,
            sides[part.name],
            options,
            folder,
            part.keeps_order,
            part.classes,
            ("row_id", *(options.rename.get(name, name) for name in part.index_columns)),
            addition,
        )
        for part in parts
        for number, input_split in enumerate(part.input_splits)
    ]
    if options.ids:
        # The rows that are added have the numbers of the data set.
        source = options.out if addition is not None else options.ids_of
        if source:
            ids = load_ids(replace(options, ids_of=source))
        else:
            with closing(run(find_ids, tasks)) as parts_of_ids:
                ids = merge_ids(options, list(parts_of_ids))
        tasks = [replace(task, ids=ids) for task in tasks]
    if not options.split_by:
        return tasks
    if addition is not None:
        return [replace(task, first_eval_time=addition.first_eval_time) for task in tasks]
    with closing(run(count_times, [task for task in tasks if len(task.sides) > 1])) as results:
        first_eval_time = find_first_eval_time(list(results), options.split_by, options.eval_fraction or 0.0)
    return [replace(task, first_eval_time=first_eval_time) for task in tasks]


def find_ids(task: InputSplitTask) -> Ids:
    """Returns the different values of the columns of ids in an input split."""
    refusals = Refusals(task.options)
    tables = task.input_split.tables(refusals)
    return merge_ids(task.options, [distinct_ids(table, task.options) for table in tables])


class Refusals:
    """Collects the rows of an input split that cannot be used."""

    def __init__(self, options: IngestOptions) -> None:
        self._options = options
        self.rows: list[tuple[str, str]] = []

    def __call__(self, row_id: str, reason: str) -> None:
        """Adds a row by its id and the reason; raises DataError if no row, or no further one, may be left out."""
        reason = remove_addresses(reason)
        if self._options.on_bad_row == "fail":
            raise DataError(
                f"{self._options.input}: row {row_id}: {reason}. Correct or remove it, or skip such rows with"
                " --on_bad_row skip."
            )
        self.rows.append((row_id, reason))
        check_refused_count(len(self.rows), self._options, row_id, reason)


def check_refused_count(refused: int, options: IngestOptions, row_id: str, reason: str) -> None:
    """Raises DataError if more rows are refused than the options allow; the message names the last of them."""
    if refused > options.max_bad_rows:
        raise DataError(
            f"{options.input}: more than --max_bad_rows {options.max_bad_rows} rows cannot be used; the next is"
            f" {row_id}: {reason}. Correct them, or raise --max_bad_rows."
        )


def write_input_split(task: InputSplitTask) -> Record:
    """Writes an input split and returns its record; only returns the record where it was written before.

    Raises:
        DataError: A row or a file is refused, or the source has changed since the ingest began.
        ConfigError: The columns cannot be renamed as the options say.
    """
    if (done := load_finished_record(task)) is not None:
        sources.ROWS_READ.add(0, stored=done["rows"])
        return done
    options, refusals = task.options, Refusals(task.options)
    text_columns = TextColumns(options.decimal or ".")
    divider = Divider(task)
    with make_scratch(task.folder) as scratch:
        sinks = {side: _open_sink(task, side, Path(scratch) / f"side-{side}") for side in task.sides}
        hashes: dict[str, list[RowHashes]] = {side: [] for side in task.sides}

        def write(divided: dict[str, pa.Table]) -> None:
            for side, rows in divided.items():
                add_hashes(hashes[side], rows, task.ignored)
                sinks[side].write(rows)

        # A table is written while the next one is read, so that one large file is ingested on two CPUs.
        with ThreadPoolExecutor(1, "ingest-write") as pool:
            written = pool.submit(write, {})
            for table in read_input_split(task, refusals):
                text_columns.add(table)
                divided = divider.divide(table, refusals)
                written.result()
                written = pool.submit(write, divided)
            written.result()
        for side, sink in sinks.items():
            sink.close()
            RowHashes.merge(hashes[side]).put(task.hashes(side))
    rows = sum(sink.rows for sink in sinks.values()) + len(refusals.rows)
    expected = task.input_split.rows
    if expected is not None and rows != expected:
        raise DataError(
            f"{options.input}: {expected} rows expected, but {rows} read: the files changed meanwhile. Start again."
        )
    sides = {side: sink.description() | {"refused": []} for side, sink in sinks.items()}
    for row in refusals.rows:
        sides[divider.side_of_refused(row[0])]["refused"].append(row)
    record = {"rows": rows, "text_columns": text_columns.counts, "sides": sides}
    record["overlaps"] = divider.overlaps.counts
    put_json(task.record, record)
    return record


def read_input_split(task: InputSplitTask, refuse: sources.Refuse) -> Iterator[pa.Table]:
    """Yields the rows of an input split as they are stored; see `write_input_split` for the errors."""
    texts = Texts(task.options) if task.options.tokenizer else None
    ids = IdNumbers(task.ids, task.options)
    for table in task.input_split.tables(refuse):
        kept, drop = ids.number(table, refuse), task.options.drop or []
        sources.check_dropped("", drop, kept.column_names[1:], may_be_all=False)
        kept = kept.drop_columns(drop) if drop else kept
        stacked = _stack_targets(kept, task.options.targets, refuse) if task.options.targets else kept
        sources.ROWS_READ.add(table.num_rows)
        usable = _rename_and_check(stacked, task.options.rename, refuse)
        encoded = texts.encode(usable, refuse) if texts else usable
        yield task.addition.fit(encoded, task.options) if task.addition else encoded


def _open_sink(task: InputSplitTask, side: str, scratch: Path) -> Shards | Runs | Packed:
    """Returns the writer for the rows of a side; `scratch` is a folder for files that are being written."""
    if task.keeps_order:
        stem = f"{stem_of(task.addition)}{task.number:05d}"
        return Shards(side_folder(task.folder, side), stem, scratch, task.options.limits, task.classes)
    runs = Runs(task.folder / RUNS, f"{side}-{task.number:05d}", scratch)
    return Packed(runs, task.options.pack) if task.options.pack else runs


def load_finished_record(task: InputSplitTask) -> Record | None:
    """Returns the record of an input split, if it was written before and its files are complete; otherwise None."""
    record: Record | None = read_json(task.record)
    if record is None:
        return None
    for side, description in record["sides"].items():
        folder = side_folder(task.folder, side) if task.keeps_order else task.folder / RUNS
        if not has_files(folder, description["shards" if task.keeps_order else "runs"]):
            return None
    return record


def _stack_targets(table: pa.Table, names: list[str], refuse: sources.Refuse) -> pa.Table:
    """Returns the table with columns of numbers as one array column `target`, float32 of shape (rows, columns).

    Rows without a value in one of them, or with one that float32 cannot hold, are refused. Raises DataError for a
    column of another type.
    """
    for name in names:
        kind = table.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise DataError(f"targets names {name!r}, a column of {kind}; allowed are numbers, and true and false.")
        is_finite = pc.fill_null(pc.is_finite(table[name].cast(pa.float32(), safe=False)), False)
        table = without_rows(table, pc.invert(is_finite), refuse, f"no number in {name}, one of the targets")
    values = [table[name].cast(pa.float32(), safe=False).to_numpy() for name in names]
    column, array = to_column("target", np.stack(values, axis=1))
    return table.drop_columns(names).append_column(column, array)


def _rename_and_check(table: pa.Table, rename: dict[str, str], refuse: sources.Refuse) -> pa.Table:
    """Returns the table with its final names, and with `label` as int64 without missing values."""
    before = table.column_names[1:]
    names = ["row_id", *(rename.get(name, name) for name in before)]
    if not rename.keys() <= set(before):
        raise ConfigError(f"rename names {sorted(rename.keys() - set(before))}; the columns are {before}. Name these.")
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two columns with the same name in {names} (`row_id` is reserved). Rename one with --rename."
        )
    table = pa.table(table.columns, pa.schema([f.with_name(n) for f, n in zip(table.schema, names, strict=True)]))
    if "label" not in names:
        return table
    table = _to_integer_label(_to_single_label(table), refuse)
    kind = table.schema.field("label").type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        spec = spec_of_field(table.schema.field("label"))
        content = f"has arrays of shape {spec.shape}" if spec is not None else f"is of type {kind}"
        raise DataError(
            f"the column `label` {content}; allowed are integers. Name a column of strings with the option label,"
            " or rename a column of numbers to 'target' for regression."
        )
    table = without_rows(table, table["label"].is_null(), refuse, _NO_LABEL)
    if pa.types.is_uint64(kind):
        too_large = pc.greater(table["label"], pa.scalar(2**63 - 1, kind))
        refused = table.filter(too_large).select(["row_id", "label"]).to_pydict()
        for row_id, label in zip(*refused.values(), strict=True):
            refuse(row_id, f"label {label} is too large for an integer of 64 bits")
        table = table.filter(pc.invert(too_large))
    final = pa.field("label", pa.int64(), nullable=False)
    return table.set_column(names.index("label"), final, table["label"].cast(pa.int64()))


def _to_single_label(table: pa.Table) -> pa.Table:
    """Returns the table with the numbers of a label of arrays with one number each."""
    spec = spec_of_field(table.schema.field("label"))
    if spec is None or spec.shape != (1,):
        return table
    return table.set_column(
        table.column_names.index("label"), "label", pa.array(fixed_array(table["label"], spec)[:, 0])
    )


def _to_integer_label(table: pa.Table, refuse: sources.Refuse) -> pa.Table:
    """Returns the table with a label of floating type converted to int64, without the rows that have no label."""
    labels = table["label"]
    if not pa.types.is_floating(labels.type):
        return table
    missing = pc.or_kleene(pc.is_null(labels), pc.fill_null(pc.is_nan(labels), True))
    table = without_rows(table, missing, refuse, _NO_LABEL)
    labels = table["label"].cast(pa.float64())
    # Above 2**53 a float may stand for another integer than the one that was written.
    is_integer = pc.and_(pc.equal(pc.trunc(labels), labels), pc.less_equal(pc.abs(labels), 2.0**53))
    row = pc.index(is_integer, False).as_py()
    if row >= 0:
        raise DataError(
            f"the column `label` is of type {table.schema.field('label').type}, and row {table['row_id'][row].as_py()}"
            f" has {labels[row].as_py()!r}, which is not an integer; allowed are integers and strings. For regression"
            " leave the option label out and rename the column to 'target'."
        )
    return table.set_column(table.column_names.index("label"), "label", labels.cast(pa.int64()))


class Divider:
    """Divides the rows of an input split between its data sets, see `IngestOptions.eval_fraction`."""

    def __init__(self, task: InputSplitTask) -> None:
        self._task = task
        options = task.options
        self._fraction = Fraction(str(options.eval_fraction or 0))
        self._is_divided = len(task.sides) > 1
        name = options.group or options.split_by
        self._column = "label" if options.stratify else name and options.rename.get(name, name)
        self._class_rows: Counter[int] = Counter()
        self._blocks: dict[int, tuple[int, int]] = {}
        self.overlaps = Overlaps()

    def divide(self, table: pa.Table, refuse: sources.Refuse) -> dict[str, pa.Table]:
        """Returns the rows of each data set; refuses rows without a value in the column that decides."""
        if not self._is_divided:
            return {self._task.sides[0]: table}
        if self._column is not None:
            table = _with_values(table, self._column, self._task.options, refuse)
        chosen = self._choose(table)
        self.overlaps.add(table, chosen)
        in_eval = pa.array(chosen, pa.bool_())
        return {"train": table.filter(pc.invert(in_eval)), "eval": table.filter(in_eval)}

    def _choose(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """Returns whether each row goes to `eval`."""
        options = self._task.options
        if options.split_by:
            assert self._task.first_eval_time is not None, "the ingest has found it"
            return to_times(table[self._column], f"split_by {options.split_by!r}") >= self._task.first_eval_time
        if options.stratify:
            return np.array([self._is_chosen(label) for label in table[self._column].to_pylist()], np.bool_)
        column = table[self._column or "row_id"]
        if not (is_text(column.type) or pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            raise DataError(f"group {options.group!r} is a column of {column.type}; allowed are text and integers.")
        return np.array([self._is_below(key) for key in column.cast(pa.string()).to_pylist()], np.bool_)

    def side_of_refused(self, row_id: str) -> str:
        """Returns the data set that counts a refused row."""
        return "eval" if self._is_divided and self._is_below(row_id) else self._task.sides[0]

    def _is_below(self, key: str) -> bool:
        return self._hash(key) < int(self._fraction * 2**64)

    def _is_chosen(self, label: int) -> bool:
        """Returns whether the next row of a class is chosen: one, at random, of each `1 / fraction` successive rows."""
        number = self._class_rows[label]
        self._class_rows[label] += 1
        end, chosen = self._blocks.get(label, (0, 0))
        if number == end:
            block = int(number * self._fraction)
            end = -int(-(block + 1) // self._fraction)
            hashed = self._hash(f"{self._task.part}\0{self._task.number}\0{label}\0{block}")
            chosen = number + hashed % (end - number)
            self._blocks[label] = end, chosen
        return number == chosen

    def _hash(self, key: str) -> int:
        """Returns a number from 0 to below 2**64, a function of the seed and the key."""
        seed = str(self._task.options.seed).encode()
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8, key=seed).digest(), "big")


def _with_values(table: pa.Table, column: str, options: IngestOptions, refuse: sources.Refuse) -> pa.Table:
    """Returns the rows that have a value in the column by which rows are divided, and refuses the others."""
    if column not in table.column_names:
        if options.stratify and "target" in table.column_names:
            raise ConfigError(
                "stratify is true, and the label has several classes per row, as the array 'target', but stratification"
                " needs one class per row. Leave stratify out."
            )
        option = "group" if options.group else "split_by" if options.split_by else "stratify"
        raise ConfigError(f"{option} needs the column {column!r}; the columns are {table.column_names[1:]}. Name one.")
    missing = pc.is_null(table[column], nan_is_null=True)
    if is_text(table[column].type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(table[column], ""), True))
    table = without_rows(table, missing, refuse, f"no {column}, which divides the rows")
    if not options.split_by or not is_text(table[column].type):
        return table
    is_time = np.ones(table.num_rows, np.bool_)
    for row, value in find_no_times(table[column]):
        is_time[row] = False
        hint = " (a number with leading zeros is text)" if re.fullmatch(r"0\d+", value) else ""
        refuse(
            table["row_id"][row].as_py(),
            f"{column} is {value[:_MAX_VALUE_CHARS]!r}, but rows are divided by it; allowed are {ALLOWED_TIMES}{hint}",
        )
    return table.filter(pa.array(is_time))


def count_times(task: InputSplitTask) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Returns the different values of the column `split_by` in an input split, and the number of rows of each."""
    refusals, column = Refusals(task.options), str(task.options.split_by)
    different, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    name = task.options.rename.get(column, column)
    for table in read_input_split(task, refusals):
        kept = _with_values(table, name, task.options, refusals)
        times = to_times(kept[name], f"split_by {column!r}")
        different, counts = merge_counts([(different, counts), np.unique(times, return_counts=True)])
    return different, counts


def without_rows(table: pa.Table, bad: pa.Array | pa.ChunkedArray, refuse: sources.Refuse, reason: str) -> pa.Table:
    """Refuses the rows of a mask, (rows,), and returns the others."""
    for row_id in table["row_id"].filter(bad).to_pylist():
        refuse(row_id, reason)
    return table.filter(pc.invert(bad))


class Texts:
    """Encodes the column of texts of an ingest.

    Raises:
        ConfigError: The library is not installed, the file is not a tokenizer, or it lacks the token `end_of_text`.
    """

    def __init__(self, options: IngestOptions) -> None:
        require("tokenizers", f"--tokenizer {options.tokenizer}")
        self._options = options
        try:
            content = to_location(str(options.tokenizer)).read_bytes()
            if foreign := name_foreign_file(content[:HEAD_BYTES]):
                raise ValueError(f"the file is {foreign}")
            self.encoder = TextEncoder(content.decode(), options.end_of_text, options.text)
        except LookupError as error:
            raise ConfigError(
                f"end_of_text {options.end_of_text!r} is not a token of {options.tokenizer}; name one of its tokens."
            ) from error
        except Exception as error:
            # The library raises `Exception` itself.
            raise ConfigError(
                f"tokenizer {options.tokenizer!r} cannot be read: {error}. Name a JSON file saved by the library"
                " tokenizers (tokenizer.json)."
            ) from error
        self.digest = hashlib.sha256(content).hexdigest()

    def encode(self, table: pa.Table, refuse: sources.Refuse) -> pa.Table:
        """Returns the table with the column `tokens` (lists of int32) instead of texts; refuses rows without a text.

        Raises DataError without a column of texts, and ConfigError if another column has the name of the tokens.
        """
        name = self._options.text
        if name not in table.column_names:
            raise DataError(
                f"{self._options.input}: no column {name!r} of texts; the columns are {table.column_names[1:]}. Name"
                " one with --text."
            )
        if not pa.types.is_string(table[name].type):
            raise DataError(
                f"{self._options.input}: column {name!r} holds {table[name].type}, not text. Name another with --text."
            )
        if TOKENS in table.column_names and name != TOKENS:
            raise ConfigError(
                f"the column {name!r} becomes {TOKENS!r}, but the data has another column of this name. Rename it with"
                " --rename."
            )
        table = without_rows(table, pc.is_null(table[name]), refuse, f"no {name}; every row needs a text")
        token_ids = self.encoder.encode(table[name].to_pylist())
        lengths = np.array([len(ids) for ids in token_ids], np.int64)
        if not self._options.pack:
            table = without_rows(table, pa.array(lengths == 0), refuse, f"the tokenizer makes no token from its {name}")
            token_ids = [ids for ids in token_ids if len(ids)]
        tokens = _to_lists(
            np.concatenate([*token_ids, np.empty(0, np.int32)]), np.array([len(ids) for ids in token_ids], np.int64)
        )
        return table.drop_columns([name]).append_column(TOKENS, tokens)


def _to_lists(values: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> pa.ListArray:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))


class Packed:
    """Concatenates the tokens of texts and writes them as blocks of one length, each token once.

    The last block may be shorter. The id of a block names the text and the token in it at which the block begins:
    `a.jsonl:17@384`.
    """

    def __init__(self, sink: Runs, length: int) -> None:
        self._sink, self._length = sink, length
        self._rest, self._rest_id = np.empty(0, np.int32), ""
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        """Adds texts as `Texts.encode` returns them; their other columns are dropped."""
        if not table.num_rows:
            return
        self.rows += table.num_rows
        lists = table[TOKENS].combine_chunks()
        text_lengths = pc.list_value_length(lists).to_numpy()
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(text_lengths)[:-1]]) + len(self._rest)
        values = np.concatenate([self._rest, pc.list_flatten(lists).to_numpy()])
        begins = np.arange(0, len(values), self._length)
        text_of = np.searchsorted(starts, begins, side="right") - 1
        ids = table["row_id"].to_pylist()
        block_ids = [
            f"{ids[text]}@{begin - starts[text]}" if text >= 0 else self._rest_id
            for text, begin in zip(text_of, begins, strict=True)
        ]
        full = len(values) // self._length
        self._write_blocks(values[: full * self._length], block_ids[:full])
        self._rest, self._rest_id = values[full * self._length :], block_ids[full] if full < len(block_ids) else ""

    def close(self) -> None:
        """Writes the remaining tokens as one shorter block, and closes the sink."""
        if len(self._rest):
            self._write_blocks(self._rest, [self._rest_id])
        self._sink.close()

    def description(self) -> dict[str, Any]:
        """Returns the description of the sink, with the number of `texts`."""
        return self._sink.description() | {"texts": self.rows}

    def _write_blocks(self, values: npt.NDArray[np.int32], block_ids: list[str]) -> None:
        if block_ids:
            lengths = np.minimum(self._length, len(values) - np.arange(len(block_ids)) * self._length)
            self._sink.write(sources.make_table(block_ids, {TOKENS: _to_lists(values, lengths)}))
