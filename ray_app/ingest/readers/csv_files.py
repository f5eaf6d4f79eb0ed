"""Reader of CSV files. Their columns are named by a header line or by the option `column_names`.

`Csv` reads the files twice: the first pass finds the type of each column and the classes, the second one converts the
values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.converter import to_class_indices
from ray_app.ingest.readers.csv_columns import (
    ColumnScan,
    choose_type,
    convert_values,
    find_too_large,
)
from ray_app.ingest.readers.csv_layout import (
    DELIMITERS,
    CsvFormat,
    check_header,
    check_same_header,
    count_preface_lines,
    find_open_quote,
    recognize_decimal,
    recognize_delimiter,
    recognize_quote,
)
from ray_app.ingest.readers.sources import list_text_files
from ray_app.plan.manifest import Int64
from ray_app.storage.data_files import File, parser_errors

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
_MAX_VALUE_CHARS_SHOWN = 40
"""Characters of a value that a message repeats."""


class Csv(sources.SourceReader):
    """One CSV file or a folder of them."""

    traits = FormatTraits(
        leaves_out_columns=True,
        options=frozenset(
            {
                *("label", "delimiter", "column_names", "tokenizer", "columns", "classes", "targets"),
                *("encoding", "decimal", "null"),
            }
        ),
    )

    def files(self) -> list[File]:
        """Returns the files, sorted by name."""
        return list_text_files(self.path, SUFFIXES, "CSV")

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns the one data set; a first pass over the files finds the classes and the type of each column."""
        label = self.options.label
        groups = sources.group_files(self.files(), self.options.split_bytes)
        facts = list(run(partial(_scan_files, self._format, label, self.skips), groups))
        names, notes = self._check_headers(facts)
        if not any(f.rows for f in facts):
            raise DataError(
                f"{self.path}: no rows, only a header line with the names {sources.format_items(names)}. Add rows."
            )
        kinds, type_notes = self._choose_types(names, facts)
        notes += type_notes
        classes = None
        if label and not (pa.types.is_integer(kinds[label]) or pa.types.is_floating(kinds[label])):
            labels = {value or "" for f in facts for value in f.labels}
            first_missing = next((f.first_missing_label for f in facts if f.first_missing_label), None)
            classes = self.order_classes(f"{self.path}: label column {label!r}", labels, first_missing)
            kinds[label] = pa.string()
        tables = partial(_read_tables, self._format, label, self.skips, kinds, classes)
        splits = [sources.InputSplit(f.rows, partial(tables, files)) for f, files in zip(facts, groups, strict=True)]
        return [sources.Part("", splits, classes, notes=tuple(notes))]

    @cached_property
    def _format(self) -> CsvFormat:
        layout, first = CsvFormat.of(self.options), self.files()[0]
        if not layout.column_names:
            layout = replace(layout, preface_lines=count_preface_lines(first, layout))
        layout = replace(layout, quote=recognize_quote(first, layout))
        if not self.options.delimiter:
            layout = replace(layout, delimiter=recognize_delimiter(first, layout))
        return layout if self.options.decimal else replace(layout, decimal=recognize_decimal(first, layout))

    def _choose_types(self, names: list[str], facts: list[_CsvFacts]) -> tuple[dict[str, pa.DataType], list[str]]:
        """Returns the type of each column, and notes for the user on columns that are text for a reason."""
        kinds, notes = dict.fromkeys(names, pa.string()), []
        # Labels are names if `classes` states these, and values that are left out are not judged.
        named = [self.options.label] if self.options.classes else []
        for name in names:
            if name not in (*named, *(self.options.drop or ())):
                scans = [f.columns[name] for f in facts if name in f.columns]
                kinds[name], note = choose_type(self.path, name, scans)
                notes += [note] if note else []
        return kinds, notes

    def _check_headers(self, facts: list[_CsvFacts]) -> tuple[list[str], list[str]]:
        """Returns the names of the columns, and notes for the user on how the files were interpreted."""
        path, names = facts[0].headers[0]
        notes = []
        if self._format.delimiter != "," and not self.options.delimiter:
            notes.append(
                f"{DELIMITERS[self._format.delimiter]} was recognized as the delimiter of {path}. Set the option"
                " delimiter to use another one."
            )
        if self._format.decimal == "," and not self.options.decimal:
            notes.append(f"a decimal comma was recognized in {path}. Set the option decimal to . if it is none.")
        if self._format.quote != '"':
            notes.append(f"{self._format.quote} was recognized as the quote of values in {path}.")
        if lines := self._format.preface_lines:
            skipped = f"the first line of {path} was" if lines == 1 else f"the first {lines} lines of {path} were"
            notes.append(f"{skipped} skipped, since the header line follows.")
        if not self.options.column_names and (note := check_header(path, names)):
            notes.append(note)
        for f in facts:
            for header in f.headers:
                check_same_header((path, names), header)
        return self.kept_columns(path, names, self.options.label, "column", "Rename that column."), notes


@dataclass
class _CsvFacts:
    """What the first pass finds in the files of an input split, such as the types that all values fit."""

    rows: int = 0
    headers: list[tuple[str, list[str]]] = field(default_factory=list)
    columns: dict[str, ColumnScan] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)
    first_missing_label: str | None = None


def _scan_files(csv_format: CsvFormat, label: str | None, skip: bool, files: list[File]) -> _CsvFacts:
    """Returns the facts of an input split; this is the first pass."""
    facts = _CsvFacts()
    for file in files:
        bad_rows: list[Any] = []
        has_line_ends = False
        for numbers, block in _numbered_blocks(file, csv_format, bad_rows if skip else None):
            names = block.schema.names
            if not facts.headers or facts.headers[-1][0] != str(file):
                facts.headers.append((str(file), list(names)))
            facts.rows += block.num_rows
            sources.ROWS_READ.add(block.num_rows)
            # `_check_headers` refuses repeated names once all headers are known.
            if len(set(names)) < len(names):
                continue
            for name in names:
                scan = facts.columns.setdefault(name, ColumnScan())
                scan.add(block[name], file.name, numbers, csv_format.decimal)
                if pa.types.is_string(scan.types[0]):
                    _check_zero_bytes(file, name, block[name], numbers)
                    has_line_ends |= bool(pc.any(pc.match_substring(block[name], "\n")).as_py())
            if label in names:
                labels = set(pc.unique(block[label]).to_pylist())
                facts.labels |= labels
                if labels & {None, ""} and not facts.first_missing_label:
                    row = pc.index(pc.fill_null(pc.equal(block[label], ""), True), True).as_py()
                    facts.first_missing_label = f"{file.name}:{numbers[row]}"
        # The search for an open quote reads the file once more, so only a value with a line end, which an open quote
        # causes, makes it necessary.
        may_have_open_quote = has_line_ends or any("\n" in row.text for row in bad_rows)
        if may_have_open_quote and (fault := find_open_quote(file, csv_format)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.")
        facts.rows += len(bad_rows)
    return facts


def _check_zero_bytes(file: File, name: str, values: pa.Array, numbers: Int64) -> None:
    """Refuses zero bytes in the values of a text column, which are a sign of another encoding such as UTF-16."""
    if pc.any(has_zero := pc.match_substring(values, "\0")).as_py():
        row = numbers[pc.index(has_zero, True).as_py()]
        raise DataError(
            f"{file}: row {row} has a zero byte in the column {name!r}. Text has none: correct the row, or save the"
            " file as UTF-8."
        )


def _read_tables(
    csv_format: CsvFormat,
    label: str | None,
    skip: bool,
    kinds: dict[str, pa.DataType],
    classes: tuple[str, ...] | None,
    files: list[File],
    refuse: sources.Refuse,
) -> Iterator[pa.Table]:
    """Yields the tables of an input split; this is the second pass."""
    for file in files:
        bad_rows: list[Any] = []
        name = file.name
        for numbers, block in _numbered_blocks(file, csv_format, bad_rows if skip else None):
            try:
                columns = {n: convert_values(block[n], kind, csv_format.decimal) for n, kind in kinds.items()}
            except (pa.ArrowInvalid, KeyError) as error:
                raise DataError(f"{file}: {error}. The file changed while it was read: start again.") from error
            columns = {"label" if n == label else n: values for n, values in columns.items()}
            if classes is not None:
                columns["label"] = to_class_indices(columns["label"], classes)
            ids = pc.binary_join_element_wise(name, pa.array(numbers).cast(pa.string()), ":")
            yield _without_too_large(sources.make_table(ids, columns), block, label, refuse)
        for invalid in bad_rows:
            if isinstance(invalid, _TotalRow):
                refuse(f"{file.name}:{invalid.number}", _TOTAL_REASON)
            else:
                wrong = f"{invalid.actual_columns} values where {invalid.expected_columns} are expected"
                refuse(f"{file.name}:{invalid.number}", wrong)


def _without_too_large(table: pa.Table, block: pa.RecordBatch, label: str | None, refuse: sources.Refuse) -> pa.Table:
    """Refuses rows with a number that float64 does not represent, and returns the others; `block` has their texts."""
    is_good = np.ones(table.num_rows, np.bool_)
    for column in table.schema:
        if not pa.types.is_floating(column.type):
            continue
        source = label if label and column.name == "label" else column.name
        too_large = find_too_large(block[source], table[column.name].combine_chunks())
        for row in np.flatnonzero(too_large.to_numpy(zero_copy_only=False) & is_good):
            is_good[row] = False
            value = block[source][int(row)].as_py().strip()[:_MAX_VALUE_CHARS_SHOWN]
            refuse(
                table["row_id"][int(row)].as_py(),
                f"{source!r} holds {value}, which is too large for float64 (at most about 1.8e308)",
            )
    return table if is_good.all() else table.filter(pa.array(is_good))


def _numbered_blocks(
    file: File, csv_format: CsvFormat, bad_rows: list[Any] | None
) -> Iterator[tuple[Int64, pa.RecordBatch]]:
    """Yields the numbers of the rows of each block of `_string_blocks`, and the block.

    Numbers are those of pyarrow: the first line that is not empty has the number 1, also if it is a header line, and
    rows with a wrong number of values are counted.
    """
    row = 1 + csv_format.has_header(file)
    for block, is_last in _read_ahead(_string_blocks(file, csv_format, bad_rows)):
        bad_numbers = [invalid.number for invalid in bad_rows or ()]
        numbers = np.arange(row, row + block.num_rows + len(bad_numbers))
        if bad_numbers:
            numbers = numbers[~np.isin(numbers, bad_numbers)][: block.num_rows]
        row = int(numbers[-1]) + 1 if len(numbers) else row
        if is_last and _ends_in_total(block):
            if bad_rows is None:
                raise DataError(
                    f"{file}: row {numbers[-1]}, {_TOTAL_REASON}. Delete it, or leave it out by --on_bad_row skip."
                )
            bad_rows.append(_TotalRow(int(numbers[-1]), str(block[0][-1])))
            yield numbers[:-1], block.slice(0, len(block) - 1)
        else:
            yield numbers, block


_TOTAL = re.compile(r"\s*((grand|sub)[ -]?)?(total|sum|summe|gesamt|insgesamt)s?\s*:?\s*", re.IGNORECASE)
_TOTAL_REASON = "the last row of the file, seems to be a total, since some of its values are empty"


@dataclass(frozen=True)
class _TotalRow:
    """The last row of a file, a total, among the bad rows beside pyarrow's `InvalidRow`."""

    number: int
    text: str


def _read_ahead(blocks: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Yields each block, and whether it is the last one, while a thread parses the one after the next."""
    with ThreadPoolExecutor(1, "ingest-parse") as pool:
        block, following = pool.submit(next, blocks, None).result(), pool.submit(next, blocks, None)
        while block is not None:
            after, following = following.result(), pool.submit(next, blocks, None)
            yield block, after is None
            block = after


def _ends_in_total(block: pa.RecordBatch) -> bool:
    """Whether the last row begins with a word for a total, and one of its other values or more is empty."""
    if not len(block) or len(block.schema) < 3:
        return False
    first, *others = [str(column[-1].as_py() or "") for column in block.columns]
    return bool(_TOTAL.fullmatch(first)) and any(not value.strip() for value in others)


def _string_blocks(file: File, csv_format: CsvFormat, bad_rows: list[Any] | None) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file in blocks of about `BLOCK_BYTES`, with every column as strings.

    The first block has no rows: from it a caller learns the names of the columns of a file that has only a header line.
    Rows with a wrong number of values are appended to `bad_rows`, as pyarrow's `InvalidRow`, before the block that
    follows them is yielded; without `bad_rows` such a row is an error.
    """

    def record_bad_row(row: Any) -> str:
        assert bad_rows is not None
        bad_rows.append(row)
        return "skip"

    has_header = csv_format.has_header(file)
    read = arrow_csv.ReadOptions(
        # With several threads pyarrow does not know the numbers of rows, which errors and bad rows need.
        use_threads=False,
        block_size=sources.BLOCK_BYTES,
        column_names=None if has_header else csv_format.column_names,
    )
    convert = arrow_csv.ConvertOptions(default_column_type=pa.string())
    parse = arrow_csv.ParseOptions(
        delimiter=csv_format.delimiter,
        quote_char=csv_format.quote,
        newlines_in_values=True,
        invalid_row_handler=None if bad_rows is None else record_bad_row,
    )
    try:
        with parser_errors(file, csv_format.advice(has_header)), csv_format.open(file) as stream:
            reader = arrow_csv.open_csv(stream, read, parse, convert)
            # pyarrow decodes the names here, so that an error in them is turned into one that names the file.
            names = reader.schema.names
            yield pa.RecordBatch.from_arrays([pa.array([], pa.string()) for _ in names], schema=reader.schema)
            yield from (_without_nulls(block, csv_format.nulls) for block in reader)
    except DataError as error:
        # The error may be a consequence of an open quote far before the row that it names.
        if isinstance(error.__cause__, pa.ArrowInvalid) and (fault := find_open_quote(file, csv_format)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.") from error
        raise


def _without_nulls(block: pa.RecordBatch, nulls: tuple[str, ...]) -> pa.RecordBatch:
    """Returns a block of strings in which further spellings of a missing value are missing."""
    if not nulls:
        return block
    spellings = pa.array(nulls, pa.string())
    columns = [
        pc.if_else(pc.is_in(pc.utf8_trim_whitespace(values), spellings), pa.scalar(None, pa.string()), values)
        for values in block.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=block.schema)
