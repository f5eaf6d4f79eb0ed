"""Reader of files with one JSON object a line."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from ray_app.data.arrays import is_list
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits, IngestOptions
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.converter import (
    Form,
    Shape,
    first_shape,
    is_label_text,
    label_texts,
    make_form,
    ragged_shape,
)
from ray_app.ingest.readers.sources import list_text_files
from ray_app.storage.data_files import HEAD_BYTES, File, parser_errors
from ray_app.storage.text_files import MAX_LINE_BYTES, iterate_json, open_text

_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_LIST_SUFFIXES = (".json", ".json.gz")
"""Suffixes of files that may hold one list of objects instead of lines."""
_SAMPLED_LINES = 200
_PARSED_AHEAD = 2
"""Blocks that threads parse while the one before is used."""
_MAX_CELLS = 100_000_000
"""Maximum values of a block of lines as a table, with those that are missing."""
MAX_DEPTH = 32
"""Maximum depth of nested lists and objects, with the object of the line; thousands end pyarrow's process."""
_ONE_TYPE = (
    "Each key needs values of one type; correct them (null for a missing value), or leave the key out with --columns."
)
_MAKE_LINES = "Convert it with `jq -c '{}' {}`, or in Python with pandas' to_json(orient='records', lines=True)."
_WORDS = {str: "text", bool: "true or false", int: "a number", float: "a number", dict: "an object"}
_IN_ROW = re.compile(r"in row (\d+)")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class JsonLines(sources.SourceReader):
    """One file of JSON lines or a folder of them.

    With `on_bad_row: skip` lines without a JSON object, with lists of another shape or without a label are left out. A
    value of another type than in other lines is refused in any case, because nothing tells which one is wrong.
    """

    traits = FormatTraits(
        leaves_out_columns=True,
        options=frozenset({"label", "classes", "columns", "ragged", "targets", "flatten", "tokenizer"}),
    )

    def files(self) -> list[File]:
        """Returns the files of JSON lines, sorted by name; without any, the files that hold one JSON list each."""
        files = list_text_files(self.path, (*_SUFFIXES, *_LIST_SUFFIXES), "JSON lines")
        return [file for file in files if file.location.name.endswith(_SUFFIXES)] or files

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns one part; a first pass over the files finds the types, the shapes of lists, and the classes."""
        groups = sources.group_files(self.files(), self.options.split_bytes)
        blocks = partial(_blocks, self.options.flatten)
        facts = list(run(partial(learn_json, self.options, blocks), groups))
        form = make_json_form(self, facts, blocks)
        tables = partial(_tables, form, blocks)
        splits = [sources.InputSplit(f.rows, partial(tables, files)) for f, files in zip(facts, groups, strict=True)]
        return [sources.Part("", splits, form.classes, notes=form.notes)]


def make_json_form(reader: sources.SourceReader, facts: list[JsonFacts], blocks: Blocks) -> Form:
    """Returns the form that every row must have, from the facts of all files; the label has its classes."""
    options, label = reader.options, reader.options.label
    try:
        schema = pa.unify_schemas([f.schema for f in facts], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _mixed_types(reader.pattern, blocks([*reader.files()]), options, error) from error
    if options.flatten:
        # A key that is null where it is no object.
        absent = {f.name for f in schema if pa.types.is_null(f.type)}
        absent &= {".".join(keys[:i]) for keys in (n.split(".") for n in schema.names) for i in range(1, len(keys))}
        schema = pa.schema([column for column in schema if column.name not in absent])
    shapes = {name: shape for f in reversed(facts) for name, shape in f.shapes.items()}

    def find_shapes(names: list[str]) -> dict[str, Shape]:
        return {name: shapes[name] for name in names if name in shapes}

    form = make_form(reader, reader.pattern, schema, label, "key", find_shapes)
    if not form.has_text_label:
        return form
    labels = set[str]().union(*(f.labels for f in facts))
    return replace(form, classes=reader.order_classes(f"{reader.pattern}: label key {label!r}", labels))


@dataclass
class JsonFacts:
    """The facts of an input split from the first pass."""

    rows: int = 0
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    shapes: dict[str, Shape] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


def learn_json(options: IngestOptions, blocks: Blocks, files: list[File]) -> JsonFacts:
    """Returns the facts of the lines of some files."""
    label, ragged = options.label, options.ragged or []
    keep, facts = _kept_keys(options), JsonFacts()
    for block, (table, _) in _parse_ahead(blocks(files), None, keep):
        facts.rows += len(block.lines)
        sources.ROWS_READ.add(len(block.lines))
        schema = pa.schema([pa.field(f.name, _as_text(f.type)) for f in table.schema])
        try:
            facts.schema = pa.unify_schemas([facts.schema, schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _mixed_types(block.file, blocks(files), options, error) from error
        for name in table.column_names:
            shape_of = ragged_shape if name in ragged else first_shape
            if is_list(table.schema.field(name).type) and name not in facts.shapes and (shape := shape_of(table[name])):
                facts.shapes[name] = shape
        if label in table.column_names and is_label_text(schema.field(label).type):
            # Parsed again as text, so that each label is as it was written and not a time.
            if table.schema.field(label).type != schema.field(label).type:
                facts.labels |= label_texts(_parse_block(block, pa.schema([schema.field(label)]), None)[0][label])
            else:
                facts.labels |= label_texts(table[label])
    return facts


def _parse_ahead(
    blocks: Iterator[JsonBlock], schema: pa.Schema | None, keep: set[str] | None
) -> Iterator[tuple[JsonBlock, Parsed]]:
    """Yields each block with the result of `_parse_block`, while threads parse the next ones."""
    with ThreadPoolExecutor(_PARSED_AHEAD, "ingest-parse") as pool:
        waiting = deque[tuple[JsonBlock, Future[Parsed]]]()
        for block in blocks:
            if schema is None:
                _check_number_of_keys(block, keep)
            waiting.append((block, pool.submit(_parse_block, block, schema, keep)))
            if len(waiting) > _PARSED_AHEAD:
                done, parsed = waiting.popleft()
                yield done, parsed.result()
        yield from ((done, parsed.result()) for done, parsed in waiting)


def _kept_keys(options: IngestOptions) -> set[str] | None:
    """Returns the keys that are kept, with the label; None for all."""
    return None if options.kept_columns is None else {*options.kept_columns, *filter(None, [options.label])}


def _mixed_types(where: object, blocks: Iterable[JsonBlock], options: IngestOptions, error: Exception) -> DataError:
    """Returns the error for values of several types that blocks of lines have."""
    return DataError(f"{where}: {_several_types(blocks, _kept_keys(options)) or f'{error}. {_ONE_TYPE}'}")


def _check_number_of_keys(block: JsonBlock, keep: set[str] | None) -> None:
    """Refuses lines with so many different keys that a table of them would not fit into memory.

    Keys that are values, such as names of users, make one column a line. The number is estimated from some lines.
    """
    keys = list[set[str]]()
    for line in block.lines[:: max(1, len(block.lines) // _SAMPLED_LINES)]:
        with suppress(_LineError):
            names = set(_parse_object(line))
            keys.append(names if keep is None else names & keep)
    first = set[str]().union(*keys[::2])
    new = set[str]().union(*keys[1::2]) - first
    per_line = len(new) / max(1, len(keys) // 2)
    estimated = len(first | new) + per_line * (len(block.lines) - len(keys))
    if estimated * len(block.lines) > _MAX_CELLS:
        examples = sources.format_items(sorted(new)[:3])
        where = f"{block.file}: {len(block.lines):,} lines from {block.ids[0]} on"
        allowed = _MAX_CELLS // len(block.lines)
        raise DataError(
            f"{where} have about {estimated:,.0f} different keys, such as {examples}; allowed are {allowed:,} for so"
            " many lines. Store values as values instead of keys, or name the keys to keep with --columns."
        )


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Returns text for the type of a time, which pyarrow infers although JSON has none; other types unchanged."""
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    return pa.string() if pa.types.is_temporal(kind) else kind


def _tables(form: Form, blocks: Blocks, files: list[File], refuse: sources.Refuse) -> Iterator[pa.Table]:
    for block, parsed in _parse_ahead(blocks(files), form.schema, None):
        table, good = parse_json(block, form.schema, refuse, parsed)
        yield from form.convert(block.file, table, [block.ids[index] for index in good], refuse)


def parse_json(
    block: JsonBlock, schema: pa.Schema, refuse: sources.Refuse, parsed: Parsed | None = None
) -> tuple[pa.Table, list[int]]:
    """Returns the lines that fit a schema as a table, and their indices; refuses the others."""
    table, bad = parsed or _parse_block(block, schema, None)
    for index, reason in bad:
        refuse(block.ids[index], reason)
    wrong = {index for index, _ in bad}
    good = [index for index in range(len(block.lines)) if index not in wrong]
    _check_exact(block, table, good)
    return table, good


def _check_exact(block: JsonBlock, table: pa.Table, indices: list[int]) -> None:
    """Compares integers that became float64 with their lines, where they are so large that they may be rounded."""
    large = [name for name in table.column_names if _is_large(table[name].combine_chunks())]
    for index in indices if large else []:
        line = json.loads(block.lines[index].decode("utf-8-sig", "replace"), parse_int=Decimal)
        for name in large:
            if (rounded := _find_rounded(line.get(name))) is not None:
                raise DataError(
                    f"{block.file}: row {block.ids[index]}: key {name!r} holds {str(rounded)[:40]}, which float64 would"
                    " round (int64 is used only if all values of the key are integers). Write them as text, or leave"
                    f" {name!r} out."
                )


def _is_large(values: pa.Array) -> bool:
    """Returns whether these are (lists of) floats so large that not every integer has an exact float."""
    while is_list(values.type):
        values = pc.list_flatten(values)
    return pa.types.is_floating(values.type) and (pc.max(pc.abs(values)).as_py() or 0) >= 2**53


def _find_rounded(value: Any) -> Decimal | None:
    """Returns the first integer in a value, or in nested lists, that float64 would change; None if there is none."""
    if isinstance(value, list):
        return next((rounded for item in value if (rounded := _find_rounded(item)) is not None), None)
    return value if isinstance(value, Decimal) and Decimal(float(value)) != value else None


@dataclass(frozen=True)
class JsonBlock:
    """Successive rows of a file, each an object of JSON in one line, and the key of each, such as the line's number."""

    file: File
    lines: list[bytes]
    keys: Sequence[object]

    @cached_property
    def ids(self) -> list[str]:
        """The id of each row."""
        name = self.file.name
        return [f"{name}:{key}" for key in self.keys]


Blocks = Callable[[list[File]], Iterator[JsonBlock]]
"""Yields the rows of files."""
Parsed = tuple[pa.Table, list[tuple[int, str]]]
"""The rows of a block as a table, and the index and fault of each row that is not in it."""


def _blocks(is_flattened: bool, files: list[File]) -> Iterator[JsonBlock]:
    """Yields the lines of files without the empty ones; an id has the number of the line, 1 for the first of a file."""
    for file in files:
        is_list_file = file.location.name.endswith(_LIST_SUFFIXES) and _begins_list(file)
        for numbers, lines in _read_items(file) if is_list_file else _read_lines(file):
            yield JsonBlock(file, [_flatten(line) for line in lines] if is_flattened else lines, numbers)


def _flatten(line: bytes) -> bytes:
    """Returns a line with the keys of inner objects as `a.b`; one that is not a JSON object is unchanged."""
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_build_unique) if _is_safe(line) else None
    except (ValueError, RecursionError):
        return line
    if not isinstance(value, dict):
        return line
    # Equal names, of {"a": {"b": 1}, "a.b": 2}, both stay, and the line is refused.
    items = (f"{json.dumps(name)}: {json.dumps(item)}" for name, item in _inner_items(value, ""))
    return f"{{{', '.join(items)}}}\n".encode()


def _inner_items(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _inner_items(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _read_items(file: File) -> Iterator[tuple[Sequence[int], list[bytes]]]:
    """Yields the items of a file of one list as lines, and the number of each."""
    items = (json.dumps(item).encode() + b"\n" for _, item in iterate_json(file))
    for block in sources.batch_rows(enumerate(items, 1), lambda item: len(item[1])):
        yield [number for number, _ in block], [item for _, item in block]


def _read_lines(file: File) -> Iterator[tuple[Sequence[int], list[bytes]]]:
    """Yields the lines of a file that are not empty, about `BLOCK_BYTES` at a time, and the number of each."""
    with parser_errors(file, "The file is damaged; write it again."), open_text(file) as stream:
        buffered = io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)
        start, is_first = 1, True
        while data := buffered.read(sources.BLOCK_BYTES):
            lines = io.BytesIO(data + buffered.readline(MAX_LINE_BYTES + 1)).readlines()
            if (size := max(map(len, lines))) > MAX_LINE_BYTES:
                number = start + next(i for i, line in enumerate(lines) if len(line) == size)
                raise DataError(
                    f"{file}: line {number} has more than the allowed {MAX_LINE_BYTES} bytes. Is the file JSON lines?"
                )
            numbers: Sequence[int] = range(start, start + len(lines))
            start += len(lines)
            kept = [i for i, line in enumerate(lines) if line.removeprefix(codecs.BOM_UTF8).strip()]
            if len(kept) < len(lines):
                numbers, lines = [numbers[i] for i in kept], [lines[i] for i in kept]
            if is_first and lines and (form := _name_other_json(lines[0].removeprefix(codecs.BOM_UTF8).strip())):
                advice = _MAKE_LINES.format(".[]" if "list" in form else ".", file.name)
                raise DataError(f"{file} is {form}, but JSON lines have one object per line. {advice}")
            if lines:
                is_first = False
                yield numbers, lines


def _begins_list(file: File) -> bool:
    """Returns whether a file begins with a list."""
    with parser_errors(file, "The file is damaged; write it again."), open_text(file) as stream:
        return stream.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _name_other_json(first: bytes) -> str | None:
    """Returns the form of a file that begins with this line and is JSON, but not JSON lines; otherwise None."""
    if first == b"{":
        return "one object over several lines"
    if not first.startswith(b"["):
        return None
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        is_cut_off = not first.endswith(b"]")
        return "one list over several lines" if is_cut_off and not _is_deep(first) else None
    return "one list" if value and isinstance(value[0], dict) else None


def _parse_block(block: JsonBlock, schema: pa.Schema | None, keep: set[str] | None) -> Parsed:
    """Returns the lines as a table, and the index and fault of each line that is not in it.

    Without a schema the types are inferred, only lines without a JSON object are at fault, and `keep` has the keys.
    """
    try:
        return _read(block.lines, schema, keep), []
    except (pa.ArrowException, UnicodeDecodeError):
        bad = [(i, reason) for i, line in enumerate(block.lines) if (reason := _find_fault(line, schema, keep))]
    wrong = {i for i, _ in bad}
    good = [i for i in range(len(block.lines)) if i not in wrong]
    lines = [block.lines[i] for i in good]
    try:
        # Only the kept keys, because values of several types in other keys are no fault.
        return _read(lines if keep is None else [select_keys(line, keep) for line in lines], schema, keep), bad
    except (pa.ArrowException, UnicodeDecodeError) as error:
        message = _IN_ROW.sub(lambda row: f"in {block.ids[good[int(row[1])]]}", str(error))
        raise DataError(f"{block.file}: {_several_types([block], keep) or f'{message}. {_ONE_TYPE}'}") from error


def select_keys(line: bytes, keep: set[str]) -> bytes:
    """Returns a line with only the keys to keep."""
    value = json.loads(line.decode("utf-8-sig"))
    return json.dumps({name: item for name, item in value.items() if name in keep}).encode()


def _several_types(blocks: Iterable[JsonBlock], keep: set[str] | None) -> str | None:
    """Returns a sentence about a key with values of several types, how many and the first, or None."""
    examples: dict[str, dict[str, str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for block in blocks:
        for index, line in enumerate(block.lines):
            value: Any = None
            with suppress(ValueError, RecursionError):
                value = json.loads(line.decode("utf-8-sig"))
            for name, item in value.items() if isinstance(value, dict) else ():
                if (keep is None or name in keep) and (kind := _kind_of(item)) is not None:
                    counts[name, kind] += 1
                    example = f"{json.dumps(item)[:40]} in {block.ids[index]}"
                    examples.setdefault(name, {}).setdefault(kind, example)
        for name, kinds in examples.items():
            if len(kinds) > 1:
                listed = [f"{kind} {counts[name, kind]} times, first {example}" for kind, example in kinds.items()]
                return f"the values of {name!r} have several types: {'; '.join(listed)}. {_ONE_TYPE}"
    return None


def _kind_of(value: Any) -> str | None:
    """Returns the type of a JSON value for a message; None for null and for lists without values."""
    if isinstance(value, list):
        kinds = sorted({kind for item in value if (kind := _kind_of(item))})
        return f"lists of {' and '.join(kinds)}" if kinds else None
    return next((word for kind, word in _WORDS.items() if isinstance(value, kind)), None)


def _read(lines: list[bytes], schema: pa.Schema | None, keep: set[str] | None) -> pa.Table:
    if not lines:
        return (schema or pa.schema([])).empty_table()
    data = b"".join(lines)
    # One look at all lines is enough if each is an object and none has brackets enough to be nested too deeply.
    are_objects = data.startswith(b"{") and data.endswith(b"}\n") and data.count(b"}\n{") == len(lines) - 1
    if not are_objects or data.count(b"{") + data.count(b"[") >= len(lines) + MAX_DEPTH:
        if not all(map(_is_safe, lines)):
            raise pa.ArrowInvalid("a line is not a JSON object, or is nested too deeply")
        data = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    # pyarrow does not check that values are UTF-8.
    data.decode()
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore" if schema else "infer")
    table = pj.read_json(io.BytesIO(data), pj.ReadOptions(use_threads=False, block_size=len(data) + 1), options)
    # A key that is not UTF-8 raises here, inside the caller's `try`, which knows the lines.
    names = table.column_names
    if len(table) != len(lines):
        raise pa.ArrowInvalid("a line holds more than one value")
    table = table.select(schema.names if schema else [name for name in names if keep is None or name in keep])
    # Integers that are too large for float64 become infinite, too; `_check_exact` reports these.
    if (b"NaN" in data or b"Inf" in data) and not all(map(_is_finite, table.columns)):
        raise pa.ArrowInvalid("a line has NaN or Infinity, which are not JSON, although pyarrow reads them")
    return table


def _is_finite(values: pa.ChunkedArray) -> bool:
    """Returns whether no value, also in lists, is NaN or infinite."""
    while is_list(values.type):
        values = pc.list_flatten(values)
    return not pa.types.is_floating(values.type) or pc.all(pc.is_finite(values)).as_py() is not False


def _is_safe(line: bytes) -> bool:
    """Returns whether a line is one object, so that pyarrow may parse it: other lines can end the process."""
    bare = line.removeprefix(codecs.BOM_UTF8).strip()
    return bare.startswith(b"{") and bare.endswith(b"}") and not _is_deep(line)


def _is_deep(line: bytes) -> bool:
    """Returns whether a line is nested more than `MAX_DEPTH` deep."""
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return False
    steps = np.frombuffer(_TEXT.sub(b"", line).translate(_STEPS, _NO_BRACKETS), np.int8)
    return bool(steps.cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH)


def _find_fault(line: bytes, schema: pa.Schema | None, keep: set[str] | None) -> str | None:
    """Returns the fault of a line; None if it has none."""
    try:
        value = _parse_object(line)
        for name, item in value.items():
            if (schema is None or name in schema.names) and (keep is None or name in keep):
                if constant := _find_constant(item):
                    return f"not JSON: {name!r} holds {constant}; write null for a missing value"
                if " and " in (kind := _kind_of(item) or ""):
                    return f"{name!r} holds {kind}; the values of a list need one type"
        _read([line], schema, keep)
    except (_LineError, pa.ArrowException, UnicodeDecodeError) as error:
        return str(error).splitlines()[0].removesuffix(" in row 0")
    return None


def _parse_object(line: bytes) -> dict[str, Any]:
    """Returns the object in a line."""
    if _is_deep(line):
        raise _LineError(f"nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_build_unique, parse_constant=_Constant)
    except UnicodeDecodeError as error:
        raise _LineError(
            f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}; save the file as UTF-8"
        ) from error
    except _LineError:
        raise
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _LineError(f"a JSON {type(value).__name__} instead of an object")
    return value


class _LineError(ValueError):
    """A line does not hold a JSON object."""


def _build_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of key-value pairs."""
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise _LineError(f"the key {repeated!r} occurs twice; write each key once")
    return value


class _Constant(str):
    """NaN, Infinity or -Infinity, which Python writes and reads although JSON does not have them."""

    __slots__ = ()


def _find_constant(value: Any) -> str | None:
    """Returns the first NaN or infinity in a value or in nested lists; None where there is none."""
    if isinstance(value, list):
        return next((word for item in value if (word := _find_constant(item))), None)
    return str(value) if isinstance(value, _Constant) else None
