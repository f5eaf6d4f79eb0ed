"""Inputs of a prediction in the forms in which people have them, decoded as the task of the model decodes its data.

An image is the path of a file, its bytes, an image of Pillow, or an array; several are a list of these or a folder. A
row of a table is a dictionary; several are a table of pandas, Polars or Arrow, a dictionary of sequences, or a list of
dictionaries. A text is a text where the data set had a tokenizer. The path of a Parquet data set stands for its rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_app.config.config import Config
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.folds import open_evaluation_data
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, RowSource, fetch_in_process, load_all, rows_per_task
from ray_app.errors import DataError
from ray_app.models import loader
from ray_app.storage.data_files import HEAD_BYTES, files_below, has_image_signature, is_convertible_image, is_folder
from ray_app.storage.files import to_location
from ray_app.task.base import Rows, Task
from ray_app.task.images import convert_image, decode_image, encode_picture
from ray_app.task.ragged import Arrays, Ragged
from ray_app.task.schema import refuse_other_data
from ray_app.task.table_encoding import encode_raw_rows
from ray_app.task.texts import TOKENS, TextEncoder

Decode = Callable[[Rows], Arrays]
_READ_MB = 64.0
_REMOTE = re.compile(r"(s3|gs|az)://\S+")
_MAX_PATH_CHARS = 4096
_SINGLE_AXES = 3
"""An array of so many axes at most is one image."""


@dataclass(frozen=True)
class WithoutTargets:
    """Decodes rows without their targets: `decode` of the prepared task gets zeros for these."""

    task: Task

    @property
    def columns(self) -> list[str]:
        """The columns to read: those of the task without its targets."""
        return [name for name in self.task.columns() if name not in self.task.targets()]

    def __call__(self, rows: Rows) -> Arrays:
        """Decodes rows as `Task.decode` does."""
        count = len(next(iter(rows.values())))
        targets = [name for name in self.task.columns() if name in self.task.targets()]
        return self.task.decode(rows | {name: np.zeros(count, np.int64) for name in targets})


@dataclass(frozen=True)
class DecodedInputs:
    """Decoded rows.

    Args:
        fields: As `Task.decode` returns them.
        is_single: Whether the caller gave one row, and not a sequence.
    """

    fields: Arrays
    is_single: bool = False


@dataclass(frozen=True)
class _Column:
    """The values of a column as the caller gave them, with a name of each for errors."""

    values: Any
    names: list[str]
    is_single: bool = False


def decode_inputs(task: Task, data: Any, texts: TextEncoder | None = None, targets: bool = False) -> DecodedInputs:
    """Decodes the inputs of a caller.

    Args:
        task: A prepared task.
        texts: Encodes texts, where the data trained on had a tokenizer.
        targets: Whether the caller gives the targets, too; otherwise these are zeros.

    Raises:
        DataError: A column is missing, there are no rows, the columns differ in rows, or a row cannot be decoded; the
            message names the file.
        ValueError: A value of a table cannot be encoded.
    """
    names, decode = _columns_of(task, targets)
    if _is_dataset(data, task, texts):
        return DecodedInputs(read_decoded(task, os.fspath(data), targets))
    encoded = {TOKENS: texts.column} if texts is not None else {}
    stored = loader.to_columns(data, [*names, *encoded.values()], True)
    if not loader.is_by_name(stored) and len(names) == 1:
        stored = {names[0]: data}
    sources = {
        name: name if loader.is_by_name(stored) and name in stored else encoded.get(name, name) for name in names
    }
    needed = list(sources.values())
    if missing := [name for name in needed if not loader.is_by_name(stored) or name not in stored]:
        raise DataError(
            f"No column {', '.join(map(repr, missing))} is given; the task reads {needed}. Pass all by name: a table"
            " of pandas, Polars or Arrow, a dictionary, or a list of dictionaries."
        )
    if task.encoding is not None and not targets:
        return DecodedInputs(encode_raw_rows(task.encoding, {name: stored[name] for name in names}), is_one_row(data))
    empty = [name for name, source in sources.items() if getattr(stored[source], "__len__", lambda: 1)() == 0]
    if empty:
        raise DataError(f"Column {empty[0]!r} has 0 rows; pass at least 1.")
    columns = {name: _read_column(task, name, stored[source], texts) for name, source in sources.items()}
    numbers = {name: len(column.values) for name, column in columns.items()}
    if len(set(numbers.values())) != 1 or not all(numbers.values()):
        raise DataError(f"The columns have {numbers} rows; all must have the same number, at least 1.")
    is_single = is_one_row(data) or any(column.is_single for column in columns.values())
    return DecodedInputs(_decode(decode, columns), is_single)


def is_one_row(data: Any) -> bool:
    """Returns whether data is one row by name: a dictionary, or a row of pandas, with single values."""
    return (
        loader.is_by_name(data)
        and not hasattr(data, "columns")
        and any(map(loader.is_single_value, dict(data).values()))
    )


def _is_dataset(data: Any, task: Task, texts: TextEncoder | None) -> bool:
    """Returns whether data is the path of a Parquet data set, and not that of images, or a text."""
    if not isinstance(data, str | os.PathLike):
        return False
    path = os.fspath(data)
    if not (_has_images(task) or texts is not None):
        return True
    if _REMOTE.fullmatch(path):
        return True
    if len(path) > _MAX_PATH_CHARS or "\n" in path or not os.path.exists(os.path.expanduser(path)):
        return False
    location = to_location(path)
    return bool(files_below(location, ".parquet")) if is_folder(location) else path.endswith(".parquet")


def _kind(task: Task, name: str) -> tuple[str, str]:
    """Returns kind and dtype of a column of the data trained on; empty texts if they are unknown."""
    return next(((kind, dtype) for one, kind, dtype in task.data_schema.get("columns", ()) if one == name), ("", ""))


def _has_images(task: Task) -> bool:
    """Returns whether the only column that the task reads besides its targets may hold images."""
    columns = WithoutTargets(task).columns
    return len(columns) == 1 and _kind(task, columns[0]) in (("bytes", ""), ("array", "|u1"))


def _read_column(task: Task, name: str, values: Any, texts: TextEncoder | None) -> _Column:
    """Returns the values of a column as a reader of the data trained on would, for `Task.decode`."""
    kind, dtype = _kind(task, name)
    if texts is not None and name == TOKENS and not isinstance(values, Ragged):
        is_single = isinstance(values, str)
        listed = [values] if is_single else list(values)
        if listed and all(isinstance(text, str) for text in listed):
            return _Column(Ragged.of(texts.encode(listed), np.int32), _number(listed), is_single)
        values = listed
    # Vectors of small numbers are no pictures.
    is_vector = getattr(task, "kinds", {}).get(name) == "array"
    if kind == "bytes" or ((kind, dtype) == ("array", "|u1") and not is_vector):
        return _read_pictures(values, as_arrays=kind == "array")
    if kind == "list" and not isinstance(values, Ragged):
        lists = [np.asarray(row) for row in values]
        values = Ragged.of(lists, np.result_type(*lists) if lists else np.int64)
    elif kind == "array" and not isinstance(values, np.ndarray):
        values = np.stack([np.asarray(row) for row in values])
    elif kind in ("number", "integer") or not hasattr(values, "__len__"):
        values = np.asarray(values)
    elif kind == "text":
        values = list(values)
    return _Column(values, _number(values))


def _number(values: Any) -> list[str]:
    return [f"row {row}, counted from 0" for row in range(len(values))]


def _read_pictures(values: Any, as_arrays: bool) -> _Column:
    """Returns images as encoded files or, for a model of arrays, as arrays (rows, height, width[, channels])."""
    if hasattr(values, "numpy"):
        values = values.numpy()
    sources, is_single = _list_pictures(values, as_arrays)
    if as_arrays and isinstance(sources, np.ndarray):
        return _Column(sources, _number(sources), is_single)
    names = [str(one) if isinstance(one, str | os.PathLike) else f"image {i}" for i, one in enumerate(sources)]
    names = [f"{name}, counted from 0" if name.startswith("image ") else name for name in names]
    pictures = []
    for name, source in zip(names, sources, strict=True):
        try:
            encoded = _encode_picture(source)
            pictures.append(_to_array(encoded) if as_arrays else encoded)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(f"{name} cannot be used: {reason}.") from error
    return _Column(np.stack(pictures) if as_arrays else pictures, names, is_single)


def _list_pictures(values: Any, as_arrays: bool) -> tuple[Any, bool]:
    """Returns the images that the caller gave one by one, and whether it is one image."""
    if isinstance(values, str | os.PathLike) and os.path.isdir(os.path.expanduser(values)):
        return list_pictures(Path(values).expanduser()), False
    if isinstance(values, np.ndarray):
        # Of a model of arrays, (rows, height, width) is several images, as its data set has them.
        return (
            (values, False)
            if values.ndim > _SINGLE_AXES or (as_arrays and values.ndim == _SINGLE_AXES)
            else ([values], True)
        )
    is_one = isinstance(values, str | os.PathLike | bytes | bytearray | memoryview) or hasattr(values, "getexif")
    return ([values], True) if is_one or not hasattr(values, "__iter__") else (list(values), False)


def list_pictures(folder: Path) -> list[Path]:
    """Returns the images below a folder by name; raises DataError if there are none."""
    if files := sorted(file for file in folder.rglob("*") if _is_picture(file)):
        return files
    raise DataError(f"{folder} has neither images nor a Parquet data set; name a folder with image files.")


def _is_picture(file: Path) -> bool:
    if file.name.startswith(".") or not file.is_file():
        return False
    with file.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
    return has_image_signature(head) or is_convertible_image(head)


def _encode_picture(source: Any) -> bytes:
    """Returns an image as the bytes that an ingest would store."""
    if isinstance(source, str | os.PathLike):
        source = Path(source).expanduser().read_bytes()
    if isinstance(source, bytes | bytearray | memoryview):
        encoded = bytes(source)
        return convert_image(encoded, first_frame=False) if is_convertible_image(encoded[:HEAD_BYTES]) else encoded
    return encode_picture(source)


def _to_array(encoded: bytes) -> npt.NDArray[np.uint8]:
    """Returns the pixels of an image, (height, width, 3), or (height, width) if it is gray."""
    pixels = decode_image(encoded)
    is_gray = pixels.ndim == _SINGLE_AXES and (pixels[0] == pixels[1]).all() and (pixels[0] == pixels[2]).all()
    return pixels[0] if is_gray else np.ascontiguousarray(np.moveaxis(pixels, -3, -1))


def _columns_of(task: Task, targets: bool) -> tuple[list[str], Decode]:
    """Returns the columns to read, and what decodes them; without `targets` these are zeros."""
    unread = WithoutTargets(task)
    return (task.columns(), task.decode) if targets else (unread.columns, unread)


def _decode(decode: Decode, columns: dict[str, _Column]) -> Arrays:
    """Decodes the rows together; an error names the first row that cannot be decoded alone."""
    rows = {name: column.values for name, column in columns.items()}
    try:
        return decode(rows)
    except Exception:
        names = next(iter(columns.values())).names
        for row, name in enumerate(names):
            try:
                decode({column: _take_row(values, row) for column, values in rows.items()})
            except Exception as error:
                raise DataError(f"{name} cannot be used: {error}.") from error
        raise


def _take_row(values: Any, row: int) -> Any:
    return Ragged.of([values.row(row)], values.values.dtype) if isinstance(values, Ragged) else values[row : row + 1]


def read_decoded(task: Task, path: str, targets: bool = True) -> Arrays:
    """Decodes a whole data set in this process, see `open_rows`."""
    return load_all(fetch_in_process, open_rows(task, path, targets)).arrays


def open_rows(task: Task, path: str, targets: bool = True, read_mb: float = _READ_MB) -> RowSource:
    """Opens the rows of a data set for a prepared task; without `targets` these are zeros.

    Args:
        path: Folder (or file) of Parquet.
        read_mb: Largest size of the decoded rows of one read task in megabytes.

    Raises:
        DataError: The data set does not exist, or has another schema than the training data.
    """
    dataset = open_dataset(path, task.data_schema.get("classes"))
    return _open_checked(task, dataset, path, targets, read_mb, None)


def open_evaluation_rows(task: Task, config: Config) -> RowSource:
    """Opens the rows on which a run evaluates, for its prepared task; see `open_rows` for the errors."""
    dataset = open_evaluation_data(config, task.data_schema.get("classes"))
    name, read_mb = config.data.evaluation_name, config.data.read_task_mb
    return _open_checked(task, dataset, name, True, read_mb, config.evaluate.max_rows)


def _open_checked(
    task: Task, dataset: Dataset, name: str, targets: bool, read_mb: float, max_rows: int | None
) -> RowSource:
    refuse_other_data(task, dataset.facts, name, "the training data of the model")
    if targets:
        task.prepare(dataset.facts)
    return open_source(task, dataset, targets, read_mb, max_rows)


def open_source(task: Task, dataset: Dataset, targets: bool, read_mb: float, max_rows: int | None) -> RowSource:
    """Returns the source of the rows of a data set that fits the task, see `open_rows`."""
    columns, decode = _columns_of(task, targets)
    fields = probe(dataset, columns, decode)
    reader = Reader(dataset.root, columns, decode, fields, rules=dataset.manifest.rules)
    return RowSource(reader, dataset.manifest.thin_out(max_rows), rows_per_task(fields, read_mb))
