"""Tables drawn from a grammar, written by pandas, pyarrow, Polars, DuckDB and Python, and compared as read back.

A table is a choice for each key of `GRAMMAR`, of which the first is the simplest.
"""

import csv
import datetime
import json
import math
import random
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from ray_app.data.arrays import ArraySpec, spec_of_field
from ray_app.ingest.in_memory import ingest_table
from ray_app.ingest.ingest import IngestOptions, ingest
from tests.support.ingest_inputs import source_order

Program = dict[str, Any]
WORDS = ["red", "green", "größe 1", "Ünïcode €", "b"]
TEXTS = ['say "x"', "a,b;c\td|e", "two\nlines", " blanks ", "# no comment", "'quoted'", "it's", "x", "🙂", "a\\b"]
_START = datetime.datetime(2026, 11, 27, 13, 30, 5, 250_000)
_ZONE = ZoneInfo("Europe/Berlin")


def _time(source: random.Random, zone: Any = None) -> datetime.datetime:
    return (_START - datetime.timedelta(seconds=source.randrange(10**9))).replace(tzinfo=zone)


KINDS: dict[str, tuple[pa.DataType, Callable[[random.Random], Any]]] = {
    "float": (pa.float64(), lambda r: r.gauss(0, 10)),
    "whole": (pa.int64(), lambda r: r.randint(-50, 50)),
    "byte": (pa.int8(), lambda r: r.randint(-128, 127)),
    "unsigned": (pa.uint64(), lambda r: r.randrange(2**63, 2**64)),
    "large": (pa.int64(), lambda r: r.choice([-1, 1]) * r.randrange(2**53, 2**63)),
    "digits": (pa.decimal128(25, 0), lambda r: Decimal(r.randrange(10**20, 10**24))),
    "half": (pa.float16(), lambda r: np.float16(r.gauss(0, 1))),
    "single": (pa.float32(), lambda r: np.float32(r.gauss(0, 1)).item()),
    "infinite": (pa.float64(), lambda r: r.choice([math.inf, -math.inf, 0.5, 2.0])),
    "whole float": (pa.float64(), lambda r: float(r.randint(-5, 5))),
    "extreme": (pa.float64(), lambda r: r.choice([1e-300, 5e-324, 1.7e308, 0.1, -0.0, 1e22])),
    "truth": (pa.bool_(), lambda r: r.random() < 0.5),
    "word": (pa.string(), lambda r: r.choice(WORDS)),
    "text": (pa.string(), lambda r: r.choice(TEXTS)),
    "codes": (pa.string(), lambda r: f"{r.randrange(40):03}"),
    "number texts": (pa.string(), lambda r: r.choice(["1", "2", "30", "-4"])),
    "null words": (pa.string(), lambda r: r.choice(["NA", "None", "nan", "null", "x"])),
    "truth words": (pa.string(), lambda r: r.choice(["yes", "no", "true", "False", "0"])),
    "large text": (pa.large_string(), lambda r: r.choice(WORDS)),
    "view": (pa.string_view(), lambda r: r.choice(WORDS)),
    "category": (pa.dictionary(pa.int8(), pa.string()), lambda r: r.choice(WORDS)),
    "number category": (pa.dictionary(pa.int32(), pa.int64()), lambda r: r.choice([1, 2, 2**60 + 1])),
    "day": (pa.date32(), lambda r: _time(r).date()),
    "time": (pa.timestamp("us"), _time),
    "second": (pa.timestamp("s"), lambda r: _time(r).replace(microsecond=0)),
    "zone": (pa.timestamp("ns", "Europe/Berlin"), lambda r: _time(r, _ZONE)),
    "clock": (pa.time64("us"), lambda r: _time(r).time()),
    "duration": (pa.duration("us"), lambda r: datetime.timedelta(seconds=r.randrange(10**6))),
    "decimal": (pa.decimal128(12, 2), lambda r: Decimal(r.randrange(-(10**9), 10**9)) / 100),
    "long decimal": (pa.decimal128(30, 10), lambda r: Decimal(r.randrange(10**6)) / 1000),
    "list": (pa.list_(pa.float64()), lambda r: [r.gauss(0, 1) for _ in range(3)]),
    "fixed list": (pa.list_(pa.int32(), 2), lambda r: [r.randrange(9), r.randrange(9)]),
    "matrix": (pa.list_(pa.list_(pa.float32())), lambda r: [[1.0, r.randrange(9)], [2.0, 3.0]]),
    "ragged": (pa.list_(pa.int64()), lambda r: [2**60 + 1] * r.randrange(4)),
    "object": (pa.struct({"u": pa.int64(), "v": pa.string()}), lambda r: {"u": r.randrange(9), "v": r.choice(WORDS)}),
    "bytes": (pa.binary(), lambda r: r.randbytes(3)),
}
"""Arrow's type of a column, and how its values are drawn."""
NESTED = ("list", "fixed list", "matrix", "ragged", "object", "bytes")
GRAMMAR: dict[str, list[Any]] = {
    "format": ["parquet", "arrow", "table", "csv", "json"],
    "tool": ["pyarrow", "pandas", "python", "polars", "duckdb"],
    "dtypes": ["numpy", "nullable", "arrow"],
    **{name: list(KINDS) for name in ("first", "second", "third")},
    "names": [["a", "b", "c"], ["größe (m²)", "a b", 'say "x"'], ["1990", "2000", "2010"], ["x;y", "u,v", "a\tb"]],
    "rows": [8, 1, 40, 3],
    "gaps": [False, True],
    "index": [False, True],
    "delimiter": [",", ";", "\t", "|", "^"],
    "quoting": [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC],
    "quote": ['"', "'"],
    "above": ["", "# made by hand\n", "# one\n# two, three\n", "A title\n"],
    "missing": ["", "NA", "NaN", "null"],
    "line_end": ["\n", "\r\n"],
    "mark": [False, True],
    "decimal": [".", ","],
    "dates": ["iso", "epoch"],
    "target": ["number", "class", "word"],
}


def draw(seed: int) -> Program:
    """Returns the table of a seed; some of the choices are the simplest, so that faults do not hide each other."""
    source = random.Random(seed)
    program = {name: source.choice(values[: 1 if source.random() < 0.4 else None]) for name, values in GRAMMAR.items()}
    return program | {"seed": seed}


def possible(program: Program) -> Program:
    """Returns the program without what its tool or its format cannot write."""
    program = dict(program)
    if program["format"] in ("parquet", "arrow", "table") and program["tool"] == "python":
        program["tool"] = "pyarrow"
    if program["format"] == "json" and program["tool"] == "pyarrow":
        program["tool"] = "pandas"
    if program["format"] == "arrow" and program["tool"] == "duckdb":
        program["format"] = "parquet"
    if program["format"] in ("csv", "json"):
        for name in ("first", "second", "third"):
            # pandas 3.1 crashes where it writes string views as JSON.
            no_json = program[name] in ("bytes", "object", "view")
            if program[name] in (*NESTED, "view") and (program["format"] == "csv" or no_json):
                program[name] = "float"
    for name in ("first", "second", "third"):
        kind = program[name]
        if program["tool"] == "duckdb" and kind == "half":
            # DuckDB reads none from Arrow.
            program[name] = "float"
        if program["tool"] == "polars" and program["format"] == "csv" and kind == "duration":
            program[name] = "float"
    if program["format"] == "csv" and program["decimal"] == program["delimiter"]:
        program["decimal"] = "."
    return program


def make_table(program: Program) -> pa.Table:
    """Returns the columns of a table, and the target `y`, as Arrow has them."""
    columns = {}
    for number, name in enumerate(("first", "second", "third")):
        source = random.Random(f"{program['seed']} {number}")
        kind, value = KINDS[program[name]]
        is_list = program[name] in NESTED
        gaps = program["gaps"] and not is_list
        values = [None if gaps and source.random() < 0.3 else value(source) for _ in range(program["rows"])]
        is_dictionary = pa.types.is_dictionary(kind)
        columns[program["names"][number]] = pa.array(values, kind.value_type if is_dictionary else kind)
        if is_dictionary:
            columns[program["names"][number]] = columns[program["names"][number]].dictionary_encode()
    source = random.Random(program["seed"])
    targets: dict[str, Callable[[], Any]] = {
        "number": lambda: source.gauss(5, 2),
        "class": lambda: source.randrange(3),
        "word": lambda: source.choice(["u", "v"]),
    }
    return pa.table(columns | {"y": [targets[program["target"]]() for _ in range(program["rows"])]})


def make_frame(program: Program, table: pa.Table) -> pd.DataFrame:
    """Returns a table as a frame of pandas with the types of the program."""
    if program["dtypes"] == "arrow":
        return table.to_pandas(types_mapper=pd.ArrowDtype)
    if program["dtypes"] == "nullable":
        nullable = {pa.int64(): pd.Int64Dtype(), pa.int8(): pd.Int8Dtype(), pa.uint64(): pd.UInt64Dtype()}
        nullable |= {pa.bool_(): pd.BooleanDtype(), pa.float64(): pd.Float64Dtype(), pa.string(): pd.StringDtype()}
        return table.to_pandas(types_mapper=nullable.get)
    return table.to_pandas()


def write(program: Program, folder: Path) -> tuple[Path | Any, dict[str, list[Any]]]:
    """Writes a table; returns the file, or the table itself, and the values of its columns as the tool has them."""
    program = possible(program)
    table = make_table(program)
    frame = make_frame(program, table)
    is_pandas = program["tool"] == "pandas"
    values = {name: frame[name].tolist() if is_pandas else table[name].to_pylist() for name in table.column_names}
    file = folder / f"table.{'jsonl' if program['format'] == 'json' else program['format']}"
    if program["format"] == "table":
        makers = {"pandas": lambda _: frame, "polars": pl.from_arrow, "duckdb": duckdb.from_arrow}
        return makers.get(program["tool"], lambda arrow: arrow)(table), values
    if program["format"] == "csv":
        _write_csv(program, file, table, frame)
    elif program["format"] == "json":
        if is_pandas:
            frame.to_json(file, orient="records", lines=True, date_format=program["dates"], index=False)
        elif program["tool"] in ("polars", "duckdb"):
            _write_by_engine(program, file, table)
        else:
            file.write_text("".join(json.dumps(row, default=str) + "\n" for row in table.to_pylist()))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        values = {name: [line[name] for line in lines] for name in lines[0]}
    elif program["tool"] in ("polars", "duckdb"):
        _write_by_engine(program, file, table)
    elif program["format"] == "parquet":
        frame.to_parquet(file, index=program["index"]) if is_pandas else pq.write_table(table, file)
    else:
        written = pa.Table.from_pandas(frame, preserve_index=program["index"]) if is_pandas else table
        with pa.ipc.new_file(file, written.schema) as stream:
            stream.write_table(written)
    return file, values


def _write_by_engine(program: Program, file: Path, table: pa.Table) -> None:
    """Writes Parquet, Arrow or JSON lines by Polars or DuckDB."""
    form = program["format"]
    if program["tool"] == "duckdb":
        relation = duckdb.from_arrow(table)
        relation.query("rows", f"copy rows to '{file}' (format {form})")
    else:
        frame: Any = pl.from_arrow(table)
        {"parquet": frame.write_parquet, "arrow": frame.write_ipc, "json": frame.write_ndjson}[form](file)


def _write_csv(program: Program, file: Path, table: pa.Table, frame: pd.DataFrame) -> None:
    mark, quote = program["delimiter"], program["quote"]
    with file.open("w", encoding="utf-8-sig" if program["mark"] else "utf-8", newline="") as stream:
        stream.write(program["above"])
        if program["tool"] == "pandas":
            names = {"sep": mark, "quotechar": quote, "quoting": program["quoting"], "decimal": program["decimal"]}
            ends = {"na_rep": program["missing"], "lineterminator": program["line_end"], "index": program["index"]}
            frame.to_csv(stream, **names, **ends)
        elif program["tool"] == "python":
            writer = csv.writer(
                stream, delimiter=mark, quotechar=quote, quoting=program["quoting"], lineterminator=program["line_end"]
            )
            writer.writerow(table.column_names)
            writer.writerows(zip(*(column.to_pylist() for column in table.columns), strict=True))
        elif program["tool"] == "polars":
            frame_of_polars: Any = pl.from_arrow(table)
            ends = {"null_value": program["missing"], "line_terminator": program["line_end"]}
            stream.write(frame_of_polars.write_csv(separator=mark, quote_char=quote, **ends))
        elif program["tool"] == "duckdb":
            relation, part = duckdb.from_arrow(table), file.with_name("duckdb.csv")
            options = f"format csv, header, delimiter '{mark}', quote '{quote * 2 if quote == chr(39) else quote}'"
            relation.query("rows", f"copy rows to '{part}' ({options}, nullstr '{program['missing']}')")
            stream.write(part.read_text(encoding="utf-8"))
            part.unlink()
    if program["tool"] == "pyarrow":
        plain = {
            name: column.cast(pa.string()) if column.type == pa.string_view() else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
        with file.open("ab") as stream:
            arrow_csv.write_csv(pa.table(plain), stream, arrow_csv.WriteOptions(delimiter=mark))


def ingest_program(program: Program, written: Any, folder: Path, label: str | None = None) -> None:
    """Ingests what was written."""
    program = possible(program)
    options: dict[str, Any] = {"label": label}
    if program["format"] == "csv":
        options["delimiter"] = "^" if program["delimiter"] == "^" else None
        options["decimal"] = program["decimal"] if program["tool"] == "pandas" else "."
    elif "ragged" in (ragged := [program[name] for name in ("first", "second", "third")]):
        options["ragged"] = [program["names"][i] for i, kind in enumerate(ragged) if kind == "ragged"]
    if program["format"] == "table":
        ingest_table(str(folder), written, **options)
    else:
        source: Any = {"csv": "csv", "json": "jsonl"}.get(program["format"], "hf")
        ingest(IngestOptions(source, str(folder), str(written), **options))


def read_back(folder: Path) -> dict[str, list[Any]]:
    """Returns the columns of a data set as `pandas.read_parquet` has them, in the order of the source."""
    stored = pq.read_schema(next(folder.glob("*.parquet")))
    rows = pd.read_parquet(folder, dtype_backend="pyarrow")
    rows = rows.iloc[sorted(range(len(rows)), key=[source_order(name) for name in rows["row_id"]].__getitem__)]
    columns = {name: rows[name].tolist() for name in rows}
    # Arrays are the bytes of each row.
    arrays = {name: spec for name in rows if (spec := spec_of_field(stored.field(name)))}
    return columns | {name: list(map(partial(_to_array, spec), columns[name])) for name, spec in arrays.items()}


def _to_array(spec: ArraySpec, row: bytes) -> Any:
    return np.frombuffer(row, spec.dtype).reshape(-1 if spec.padding else spec.shape).tolist()


def is_same(ours: Any, theirs: Any) -> bool:
    """Returns whether a value that was read back is the one that was written, maybe in a type of its format."""
    if is_gap(ours) or is_gap(theirs):
        return is_gap(theirs) and (is_gap(ours) or ours == "")
    if isinstance(theirs, np.ndarray | list | tuple):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    if isinstance(theirs, dict):
        return theirs.keys() == ours.keys() and all(is_same(ours[name], theirs[name]) for name in theirs)
    is_equal = ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool | np.bool_)
    if isinstance(theirs, str):
        # Of a file without types: True is written by Python, and true by Arrow.
        is_equal = str(ours) == theirs or (isinstance(ours, bool) and str(ours).lower() == theirs.lower())
    elif isinstance(theirs, Decimal):
        is_equal = Decimal(ours) == theirs if isinstance(ours, str) else ours == float(theirs)
    elif isinstance(theirs, datetime.time):
        is_equal = ours == theirs or pd.Timestamp(f"2000-01-01 {ours}").time() == theirs
    elif isinstance(theirs, datetime.timedelta):
        is_equal = str(ours) == str(theirs) or ours == theirs
    elif isinstance(theirs, datetime.date):
        is_equal = pd.Timestamp(ours) == pd.Timestamp(theirs)
    elif isinstance(theirs, float | np.floating) and isinstance(ours, int | float | np.floating):
        is_equal = type(theirs)(ours) == theirs
    return bool(is_equal)


def is_gap(value: Any) -> bool:
    """Returns whether a value is a missing one."""
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def find_difference(program: Program, rows: dict[str, list[Any]], values: dict[str, list[Any]]) -> str:
    """Returns the first column that is not read as it was written, with its type; empty if there is none."""
    program = possible(program)
    for name, theirs in values.items():
        ours = rows.get(name, [])
        if inner := [column for column in rows if column.startswith(f"{name}.")]:
            names = [column.removeprefix(f"{name}.") for column in inner]
            ours = [dict(zip(names, row, strict=True)) for row in zip(*(rows[column] for column in inner), strict=True)]
        if len(ours) != len(theirs):
            return f"{len(ours)} values of {name!r}, {len(theirs)} were written; the columns are {list(rows)}"
        kinds = dict(zip(program["names"], map(program.get, ("first", "second", "third")), strict=True))
        kind = kinds.get(name, "target")
        # Text has the digits that distinguish a number from others of its type.
        narrow = {"half": np.float16, "single": np.float32}.get(kind)
        for a, b in zip(ours, theirs, strict=True):
            if not is_same(a, b if narrow is None or is_gap(b) else narrow(b)):
                return f"{kind}: {b!r} ({type(b).__name__}) is read as {a!r}"
    return ""
