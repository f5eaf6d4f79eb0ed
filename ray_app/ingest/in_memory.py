"""Data sets of what a program holds: arrays, tables, and results of databases."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.arrays import is_exact_decimal, read_as_float
from ray_app.errors import DataError
from ray_app.ingest.ingest import ingest, ingest_files
from ray_app.ingest.options import IngestOptions, python_spelling
from ray_app.ingest.summary import DatasetSummary


def ingest_arrays(
    folder: str,
    *,
    eval_fraction: float | None = None,
    seed: int = 0,
    group: str | None = None,
    split_by: str | None = None,
    append: bool = False,
    **arrays: npt.ArrayLike,
) -> DatasetSummary:
    """Makes a data set of arrays, as `ray-app ingest --source numpy` makes one of files.

    An example is `ingest_arrays("datasets/mine", x=x, y=y)`.

    The same call with the same arrays reuses the data set. While it runs, the arrays are also in files of the temporary
    folder.

    Args:
        folder: Folder to create, on a disk or in a bucket; it holds the data set, or the data sets `train` and `eval`
            and possibly `test`.
        eval_fraction: See `IngestOptions.eval_fraction`.
        seed: See `IngestOptions.seed`.
        group: The name of an array, see `IngestOptions.group`.
        split_by: The name of an array, see `IngestOptions.split_by`.
        append: Add the rows to the data set in the folder, see `IngestOptions.append`.
        **arrays: Arrays of shape (rows, ...): `x` becomes the column `features` (up to two axes) or `image`; with three
            axes it stays `x`, as windows of series do, unless it holds bytes or is square. `y` becomes the column
            `label` (integers) or `target`, others keep their names. With `x_train`, `y_train`, `x_test`,
            `y_test` the data sets are `train`, `eval` and `test`.

    Raises:
        ConfigError: The folder holds something else.
        DataError: The arrays differ in rows, or do not hold numbers.
    """
    division = {"eval_fraction": eval_fraction, "group": group, "split_by": split_by}
    return ingest_named_arrays(folder, arrays, {**division, "seed": seed, "append": append})


def ingest_named_arrays(
    folder: str, arrays: Mapping[str, npt.ArrayLike], options: Mapping[str, Any] = MappingProxyType({})
) -> DatasetSummary:
    """Makes a data set of arrays by their names, see `ingest_arrays`."""
    with tempfile.TemporaryDirectory(prefix="ray_app-arrays-") as temporary:
        for name, values in arrays.items():
            file = Path(temporary) / f"{name}.npy"
            np.save(file, to_numbers(name, values), allow_pickle=False)
            _set_content_time(file)
        with python_spelling():
            return ingest(IngestOptions("numpy", folder, temporary, **options))


def ingest_table(folder: str, table: Any, **options: Any) -> DatasetSummary:
    """Makes a data set of a table in memory, as `ray-app ingest --source hf` makes one of Parquet files.

    An example is `ingest_table("datasets/mine", data_frame, label="species")`.

    The same call with an equal table reuses the data set. While it runs, the table is also in a file of the temporary
    folder.

    Args:
        folder: Folder to create, on a disk or in a bucket.
        table: A table of pandas, Polars or Arrow (or of another library with `__arrow_c_stream__`), of Delta Lake or
            Iceberg, a `pyarrow.RecordBatchReader`, a cursor of a database after its query, or a `ray.data.Dataset`. It
            is read once, in its order, block by block.
        **options: Fields of `IngestOptions` but `source`, `out` and `input`, such as `label`, `columns`, `targets`,
            `rename` or `eval_fraction`; None is the default.

    Raises:
        TypeError: `IngestOptions` has no such field.
        ConfigError: The folder holds something else, or the options are refused.
        DataError: The object is no table, or a column cannot be stored.
    """
    with tempfile.TemporaryDirectory(prefix="ray_app-table-") as temporary:
        file = Path(temporary) / "table.arrow"
        schema, batches = _open_table(table)
        try:
            with pa.ipc.new_stream(file, schema) as stream:
                for batch in batches:
                    stream.write(batch.cast(schema) if batch.schema != schema else batch)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"the table cannot be read: {error}. All of its parts need the same columns.") from error
        _set_content_time(file)
        return ingest_files(folder, "hf", str(file), **options)


_Rows = Iterator[pa.RecordBatch | pa.Table]
_CURSOR_ROWS = 10_000
"""Rows that are fetched at a time from a cursor of a database."""
_MAX_UNTYPED_BLOCKS = 100
"""Blocks of rows that are kept in memory while a column has no value that tells its type."""
_ONE_TYPE = "Convert all values of the column to one type with CAST in the query."
_ALLOWED = (
    "tables of pandas, Polars, Arrow, Delta Lake and Iceberg, a pyarrow.RecordBatchReader, a cursor of a database after"
    " its query, and a ray.data.Dataset. For arrays use ingest_arrays"
)


def _open_table(table: Any) -> tuple[pa.Schema, _Rows]:
    """Returns the schema of a table and its rows in parts; raises DataError for any other object."""
    try:
        if type(table).__module__.partition(".")[0] == "pandas" and hasattr(table, "columns"):
            # The stream of pandas lacks its index; one with a name is a column.
            has_name = any(name is not None for name in table.index.names)
            table = pa.Table.from_pandas(table, preserve_index=has_name)
        reader = _open_reader(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"the table cannot be converted to Arrow: {error}. Give each column one type.") from error
    if reader is not None:
        return reader.schema, iter(reader)
    if hasattr(table, "fetchmany") and hasattr(table, "description"):
        return _open_cursor(table)
    if hasattr(table, "iter_batches") and hasattr(table, "context"):
        # Without this Ray Data gives blocks in the order in which they are ready.
        table.context.execution_options.preserve_order = True
        parts = iter(table.iter_batches(batch_format="pyarrow", batch_size=None))
        if (first := next(parts, None)) is None:
            raise DataError("the ray.data.Dataset has no rows. Pass a data set with rows.")
        return first.schema, chain([first], parts)
    raise DataError(f"table is of type {type(table).__name__}; allowed are {_ALLOWED}.")


def _open_reader(table: Any) -> pa.RecordBatchReader | None:
    """Returns the reader of a table that its library reads as Arrow; None for other objects."""
    if fetch := getattr(table, "to_arrow_reader", getattr(table, "fetch_record_batch", None)):
        # A cursor of DuckDB or ADBC.
        return fetch()
    if hasattr(table, "to_pyarrow_dataset"):
        # A table of deltalake.
        return table.to_pyarrow_dataset().scanner().to_reader()
    if hasattr(table, "scan") and hasattr(table, "metadata"):
        # A table of pyiceberg.
        table = table.scan()
    if hasattr(table, "to_arrow_batch_reader"):
        return table.to_arrow_batch_reader()
    return pa.RecordBatchReader.from_stream(table) if hasattr(table, "__arrow_c_stream__") else None


def _open_cursor(cursor: Any) -> tuple[pa.Schema, _Rows]:
    """Returns the schema and the rows of a cursor of Python's DB-API (PEP 249).

    The type of a column is that of its values in the first block of rows, or in the first block with a value.
    """
    if cursor.description is None:
        raise DataError("the cursor has no result; execute a SELECT with it first.")
    names = [column[0] for column in cursor.description]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"the result has several columns {repeated[0]!r}; rename them with AS in the query.")

    def blocks() -> Iterator[dict[str, pa.Array]]:
        while rows := cursor.fetchmany(_CURSOR_ROWS):
            # Some libraries give each row as a dictionary.
            values = [[row[name] for name in names] if isinstance(row, Mapping) else row for row in rows]
            yield {name: _to_array(name, column) for name, column in zip(names, zip(*values, strict=True), strict=True)}

    waiting, first = blocks(), list[dict[str, pa.Array]]()
    types = dict.fromkeys(names, pa.null())
    while pa.null() in types.values() and len(first) < _MAX_UNTYPED_BLOCKS and (block := next(waiting, None)):
        first.append(block)
        types = {name: block[name].type if pa.types.is_null(kind) else kind for name, kind in types.items()}
    if not first:
        raise DataError("the result of the cursor has no rows. Run a query that returns rows.")
    schema = pa.schema(types)
    return schema, (pa.table(_cast_block(block, types), schema) for block in chain(first, waiting))


def _to_array(name: str, values: Sequence[Any]) -> pa.Array:
    """Returns the values of a column of a result; decimals of at most 15 digits are float64."""
    try:
        array = pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"column {name!r} of the result: {error}. {_ONE_TYPE}") from error
    return read_as_float(array) if is_exact_decimal(array.type) else array


def _cast_block(block: dict[str, pa.Array], types: dict[str, pa.DataType]) -> list[pa.Array]:
    """Returns the columns of a block with the types of the first ones; raises DataError for values of another type."""
    columns = []
    for name, array in block.items():
        kind = types[name]
        is_integer = pa.types.is_integer(array.type)
        if array.type != kind and not pa.types.is_null(array.type) and not (is_integer and pa.types.is_floating(kind)):
            raise DataError(
                f"column {name!r} of the result is {kind} in its first rows, and {array.type} later. {_ONE_TYPE}"
            )
        try:
            columns.append(array.cast(kind))
        except pa.ArrowInvalid as error:
            raise DataError(f"column {name!r} of the result: {error}. {_ONE_TYPE}") from error
    return columns


def _set_content_time(file: Path) -> None:
    """Sets the time of a file to a function of its content, since an ingest recognizes a file by its time."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=7)).digest()
    content_ns = int.from_bytes(digest, "big")
    os.utime(file, ns=(content_ns, content_ns))


def to_numbers(name: str, values: npt.ArrayLike) -> npt.NDArray:
    """Returns the values as an array of numbers, rows first; raises DataError for missing values and other types."""
    try:
        array = np.ma.asarray(values) if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    except ValueError as error:
        # The rows have different lengths.
        raise DataError(f"{name}: {error}. Pass one entry for each row, all of one shape.") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise DataError(
            f"{name}: {int(np.ma.count_masked(array))} values are masked. Fill them or leave their rows out."
        )
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: an array of {array.dtype}; allowed are bool, integers and floats without missing values. Convert"
            " the array to numbers, labels with numpy.unique(y, return_inverse=True)[1]."
        )
    return np.ascontiguousarray(array)
