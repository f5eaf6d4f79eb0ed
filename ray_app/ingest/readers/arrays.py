"""Readers of raw data that consists of arrays: NumPy files, MNIST-format files, the bundled digits.

They stream the arrays in files from front to back, also from archives and object stores, and never unpickle anything.
`numpy.load` and the readers of torchvision would hold whole files in memory.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Array
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import base
from ray_app.storage.data_files import File, files_in, find_file, is_folder, parser_errors

Header = tuple[np.dtype, tuple[int, ...]]

_VECTORS = ("y", "label", "target")
"""Arrays with one number for each row, which some programs store with the shape (rows, 1)."""
_TO_NUMBERS = "make numbers of texts, for labels by numpy.unique(y, return_inverse=True)[1]"


@dataclass(frozen=True)
class _Stored:
    """One array in a file; pickled to tasks.

    Args:
        read_header: Reads dtype and shape (rows, ...) and leaves the opened file at the first row.
        member: Name of the array in a zip archive; None for any other file.
        is_vector: Whether an array of shape (rows, 1), as Keras stores labels, is read with the shape (rows,).
    """

    where: str
    file: File
    read_header: Callable[[IO[bytes]], Header]
    member: str | None = None
    is_vector: bool = False

    @property
    def name(self) -> str:
        """The name of the array."""
        return self.member or self.file.name

    @property
    def is_packed(self) -> bool:
        """Whether reading can only begin at the first row."""
        return self.member is not None or self.file.location.name.endswith(".gz")

    def layout(self) -> Header:
        """Returns dtype and shape (rows, ...), compared with the size of the file unless that is packed."""
        with self._opened() as file:
            dtype, shape = self.read_header(file)
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            if not row_bytes:
                raise ValueError(f"rows of shape {shape[1:]} hold nothing")
            whole_rows = shape[0] if self.is_packed else (self.file.size - file.tell()) // row_bytes
            if whole_rows < shape[0]:
                raise EOFError(f"the file ends before row {whole_rows + 1} of {shape[0]}")
            return dtype, self._row_shape(shape)

    def blocks(self, first: int, last: int, rows: int) -> Iterator[Array]:
        """Yields rows [first, last) in blocks, in the machine's byte order; checks that the file ends there."""
        with self._opened() as file:
            dtype, shape = self.read_header(file)
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            if first:
                file.seek(row_bytes * first, 1)
            for start in range(first, last, rows):
                block = min(rows, last - start)
                data = file.read(row_bytes * block)
                if len(data) < row_bytes * block:
                    raise EOFError(f"the file ends before row {start + block} of {shape[0]}")
                values = np.frombuffer(data, dtype).reshape(block, *self._row_shape(shape)[1:])
                yield values.astype(dtype.newbyteorder("="), copy=False)
            if last == shape[0] and file.read(1):
                raise ValueError(f"there is more data after the last of {shape[0]} rows")

    def _row_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:1] if self.is_vector and shape[1:] == (1,) else shape

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        with (
            parser_errors(self.where, "The file is damaged or of another format; make it again."),
            self._open() as file,
        ):
            yield file

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        if self.member is None:
            with self.file.open_unpacked() as file:
                yield file
            return
        with self.file.open() as packed, zipfile.ZipFile(packed) as archive, archive.open(self.member) as file:
            yield file


def _in_file(file: File, header: Callable[[IO[bytes]], Header]) -> _Stored:
    """Returns the array of a whole file, gzipped or not."""
    return _Stored(str(file), file, header)


def _array_part(name: str, arrays: dict[str, _Stored], split_rows: int, id_prefix: str = "") -> base.Part:
    """Returns a part with a column for each array."""
    layouts = {column: array.layout() for column, array in arrays.items()}
    counts = {array.where: layouts[column][1][0] for column, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise DataError(
            f"arrays of different numbers of rows: {counts}. Each row needs one entry in each array; arrays to train on"
            " and to test on are called x_train, y_train, x_test and y_test. Make them again."
        )
    rows = next(iter(counts.values()))
    if any(array.is_packed for array in arrays.values()):
        split_rows = max(rows, 1)
    starts = range(0, rows, split_rows)
    bounds = [(start, min(start + split_rows, rows)) for start in starts]
    tables = partial(_tables, arrays, layouts, id_prefix)
    return base.Part(name, [base.InputSplit(last - first, partial(tables, first, last)) for first, last in bounds])


def _tables(
    arrays: dict[str, _Stored], layouts: dict[str, Header], id_prefix: str, first: int, last: int, refuse: base.Refuse
) -> Iterator[pa.Table]:
    del refuse
    row_bytes = sum(dtype.itemsize * math.prod(shape[1:]) for dtype, shape in layouts.values())
    step = max(1, base.BLOCK_BYTES // max(1, row_bytes))
    for blocks in zip(*(array.blocks(first, last, step) for array in arrays.values()), strict=True):
        ids = [f"{id_prefix}{i}" for i in range(first, first + len(blocks[0]))]
        yield base.make_table(ids, dict(zip(arrays, blocks, strict=True)))
        first += len(ids)


@dataclass(frozen=True)
class Numpy(base.SourceReader):
    """One .npz file, one .npy file, or a folder of .npy files, one column an array (two, of `_train` and `_test`).

    One task reads up to `shard_rows` rows, or a whole archive.
    """

    traits = FormatTraits(eval_fraction=0.1)

    def files(self) -> list[File]:
        """Returns the files, sorted by name."""
        single = find_file(self.path)
        if not single and not is_folder(self.path):
            raise DataError(
                f"{self.path}: no such file or folder; expected one .npz file or a folder with x.npy and y.npy."
            )
        allowed = (".npy", ".npz") if single else (".npy",)
        files = [file for file in ([single] if single else files_in(self.path)) if file.name.endswith(allowed)]
        if not files:
            raise DataError(f"{self.path}: no array; expected one .npz file or a folder with x.npy and y.npy.")
        return files

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns the parts `train` and `test` if all names end in `_train` or `_test`; otherwise one part.

        Keras' `mnist.npz` has such names. x becomes `image` or `features`, y `label` or `target`, other arrays keep
        their names. Labels may have the shape (rows, 1).
        """
        del run
        arrays = {name: array for file in self.files() for name, array in _arrays_in(file).items()}
        ends = {name.rpartition("_")[2] for name in arrays}
        if ends != {"train", "test"}:
            return [self._part("", self._columns(arrays))]
        sides = {
            end: {name[: -len(end) - 1]: arrays[name] for name in arrays if name.endswith(f"_{end}")}
            for end in ("train", "test")
        }
        if sides["train"].keys() != sides["test"].keys():
            raise DataError(
                f"{self.path}: the arrays are {sorted(arrays)}; there must be a `_test` for each `_train`. Rename some."
            )
        columns = {end: self._columns(side) for end, side in sides.items()}
        if columns["train"].keys() != columns["test"].keys():
            layouts = "; ".join(f"{array.where}: {array.layout()}" for s in columns.values() for array in s.values())
            raise DataError(
                f"{self.path}: the arrays to train on and to test on differ in type or in axes: {layouts}. Save both"
                f" alike."
            )
        return [self._part(end, side, f"{end}:") for end, side in columns.items()]

    def _columns(self, arrays: dict[str, _Stored]) -> dict[str, _Stored]:
        """Returns the arrays by the names of their columns."""
        stored = {name: replace(array, is_vector=name in _VECTORS) for name, array in arrays.items()}
        columns = {_column_name(name, *array.layout()): array for name, array in stored.items()}
        if len(columns) < len(arrays):
            raise DataError(
                f"{self.path}: of the arrays {sorted(arrays)} two would become one of {sorted(columns)}. Rename one."
            )
        return columns

    def _part(self, name: str, columns: dict[str, _Stored], id_prefix: str = "") -> base.Part:
        # An array that is called `target` is meant as one, an array `y` may hold classes.
        y = columns.get("target")
        note = _note_on_classes(y) if y and y.name.startswith("y") else None
        return replace(_array_part(name, columns, self.options.shard_rows, id_prefix), notes=(note,) if note else ())


def _arrays_in(file: File) -> dict[str, _Stored]:
    """The arrays of a .npy or .npz file by name."""
    if file.name.endswith(".npy"):
        return {file.name[:-4]: _in_file(file, _npy_header)}
    advice = "Expected an .npz file as numpy.savez writes it. Make it again."
    with parser_errors(file, advice), file.open() as packed, zipfile.ZipFile(packed) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
    if not members:
        raise DataError(
            f"{file}: no array in it; expected arrays such as x and y. Make it with numpy.savez(path, x=x, y=y)."
        )
    return {name[:-4]: _Stored(f"{file}:{name[:-4]}", file, _npy_header, name) for name in members}


def _npy_header(file: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the .npy format; allowed are arrays of numbers, versions 1.0 and 2.0")
    try:
        shape, columns_first, dtype = read(file)
    except Exception as error:  # of many kinds, as NumPy parses the header as Python
        raise ValueError(f"its header cannot be read: {error}") from error
    if dtype.hasobject or dtype.kind not in "biuf" or dtype.itemsize > 8:
        advice = {"U": _TO_NUMBERS, "S": _TO_NUMBERS, "M": "convert times to numbers"}
        how = (advice | {"m": "convert durations to numbers"}).get(dtype.kind, "")
        how = "save each field as an array of its own" if dtype.names else how
        raise ValueError(
            f"an array of {dtype}; allowed are bool, integers and floats of up to 64 bits (nothing is"
            f" unpickled){how and f': {how}'}"
        )
    if not shape:
        raise ValueError("the array is stored as one single value; allowed are arrays with one entry for each row")
    if columns_first:
        raise ValueError(
            "the array is stored as columns first (Fortran order, as pandas has its values); allowed are rows first:"
            " save numpy.ascontiguousarray(x)"
        )
    return dtype, shape


def _note_on_classes(y: _Stored) -> str | None:
    """Returns a note on a `y` that becomes `target` although it has whole numbers; refuses one-hot classes."""
    dtype, shape = y.layout()
    if not shape[0] or len(shape) > 2:
        return None
    first = next(y.blocks(0, shape[0], max(1, base.BLOCK_BYTES // (dtype.itemsize * math.prod(shape[1:])))))
    if len(shape) == 2 and np.isin(first, (0, 1)).all() and (first.sum(axis=1, dtype=np.float64) == 1).all():
        raise DataError(
            f"{y.where}: y has the shape {shape} and one 1 in each row, so it seems to hold classes (one-hot). To"
            " classify save y.argmax(axis=1) as y; to keep the rows as they are, call the array target."
        )
    has_whole_numbers = bool(np.isfinite(first).all() and (first == np.trunc(first)).all())
    if len(shape) == 1 and has_whole_numbers and len(np.unique(first)) <= len(first) // 2:
        return (
            f"{y.where} holds {dtype} and becomes `target`, although all its values are whole numbers. To classify save"
            f" y.astype(int)."
        )
    return None


def _column_name(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> str:
    if name == "x":
        return "image" if len(shape) >= 3 else "features"
    if name == "y":
        return "label" if len(shape) == 1 and dtype.kind in "biu" else "target"
    return name


@dataclass(frozen=True)
class Idx(base.SourceReader):
    """MNIST-format files in one folder, gzipped or not: the pair `train-*` becomes `train`, the pair `t10k-*` `test`.

    One task reads up to `shard_rows` rows, or a whole gzipped file.
    """

    traits = FormatTraits(eval_fraction=0.1, has_named_parts=True)

    def files(self) -> Iterator[File]:
        """The files of each pair: images, labels."""
        for pair in self._pairs().values():
            yield from pair

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns one part for each pair of files."""
        del run
        parts = []
        for prefix, (images, labels) in self._pairs().items():
            arrays = {
                "image": _in_file(images, partial(_idx_header, 3)),
                "label": _in_file(labels, partial(_idx_header, 1)),
            }
            side = "train" if prefix == "train" else "test"
            parts.append(_array_part(side, arrays, self.options.shard_rows, f"{prefix}:"))
        return parts

    def _pairs(self) -> dict[str, list[File]]:
        """Returns the pairs [images, labels] by their prefix."""
        pairs = {}
        for prefix in ("train", "t10k"):
            names = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
            files = {
                name: file
                for name in names
                if (file := find_file(self.path / name) or find_file(self.path / f"{name}.gz"))
            }
            if len(files) == 1:
                missing = next(name for name in names if name not in files)
                raise DataError(f"{self.path}: half a pair of IDX files: {missing}[.gz] is missing. Add it.")
            if files:
                pairs[prefix] = list(files.values())
        if not pairs:
            raise DataError(
                f"{self.path}: no IDX files; expected a folder with train-images-idx3-ubyte[.gz] and "
                "train-labels-idx1-ubyte[.gz], and the same for t10k. Give that folder as input."
            )
        return pairs


def _idx_header(axes: int, file: IO[bytes]) -> Header:
    magic, expected = file.read(4), struct.pack(">I", 0x800 + axes)
    if magic != expected:
        raise ValueError(f"the magic number is {magic.hex()}; expected {expected.hex()} (unsigned bytes, {axes} axes)")
    return np.dtype("u1"), struct.unpack(f">{axes}I", file.read(4 * axes))


@dataclass(frozen=True)
class Digits(base.SourceReader):
    """The bundled 1,797 images of handwritten digits, 8x8, values 0..16, in the order of scikit-learn's `load_digits`.

    Each class has the same fraction of its images in `eval`. `digits.npz` was written by `numpy.savez_compressed` with
    `image`, (rows, 8, 8) uint8, and `label`, (rows,) uint8; NOTICE names the source and the licence of the data.
    """

    traits = FormatTraits(
        eval_fraction=0.2, has_named_parts=True, divides_rows=True, row_group_rows=5_000, has_input=False
    )

    def files(self) -> list[File]:
        """Returns no files: the images come with the package."""
        return []

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns `train` and `eval`, divided by a keyed hash of (seed, index) within each class."""
        del run
        with np.load(Path(__file__).with_name("digits.npz")) as stored:
            images, labels = stored["image"], stored["label"].astype(np.int64)
        fraction = self.held_out(["train", "eval"])
        held_out: list[int] = []
        for label in range(10):
            indices = np.flatnonzero(labels == label).tolist()
            ordered = sorted(indices, key=lambda i: hashlib.blake2b(f"{self.options.seed}:{i}".encode()).digest())
            held_out += ordered[: round(len(ordered) * fraction)]
        sides = {"train": sorted(set(range(len(labels))) - set(held_out)), "eval": sorted(held_out)}

        def tables(rows: list[int], refuse: base.Refuse) -> Iterator[pa.Table]:
            del refuse
            yield base.make_table([str(i) for i in rows], {"image": images[rows], "label": labels[rows]})

        classes = tuple("0123456789")
        return [
            base.Part(side, [base.InputSplit(len(rows), partial(tables, rows))], classes, keeps_order=True)
            for side, rows in sides.items()
        ]
