"""Readers of raw data: siblings of one shape (`Reader`), each turning one format into streams of Arrow tables.

Every table has a column `row_id` (string): where the row came from. No reader holds more than about `BLOCK_BYTES` of rows.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ray_app.data.columns import Array, encode
from ray_app.errors import DataError

BLOCK_BYTES = 16 << 20
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
MAX_CLASSES = 100_000
NULLS = csv.ConvertOptions().null_values


@dataclass(frozen=True)
class Part:
    """One data set of a source.

    Args:
        name: Sub-folder of the output, or "" for the output folder itself.
        rows: How many rows the source says it has; held against what `tables` gives.
        tables: Starts reading: tables of one schema, in the source's order.
        classes: Name of each class by its index in `label`; None where labels have no names.
        skipped_files: Files of the input that are not data of this format.
    """

    name: str
    rows: int
    tables: Callable[[], Iterator[pa.Table]]
    classes: tuple[str, ...] | None = None
    skipped_files: int = 0


class Reader(Protocol):
    """One raw format."""

    def files(self) -> Iterator[Path]:
        """Every file that is read, in a fixed order; raises DataError where the input is missing or empty."""

    def parts(self) -> list[Part]:
        """The data sets of the source; may read the input once, in a stream, to learn its types and classes."""


def _table(row_ids: list[str], columns: dict[str, Array | pa.Array]) -> pa.Table:
    """Arrays of more than one dimension become fixed-shape array columns, the rest plain ones."""
    fields, arrays = [pa.field("row_id", pa.string(), nullable=False)], [pa.array(row_ids, pa.string())]
    for name, values in columns.items():
        many = isinstance(values, np.ndarray) and values.ndim > 1
        column = values if isinstance(values, pa.Array) else None if many else pa.array(values)
        field, array = encode(name, values) if column is None else (pa.field(name, column.type), column)
        fields.append(field)
        arrays.append(array)
    return pa.table(arrays, pa.schema(fields))


def _listed(folder: Path, directories: bool) -> list[os.DirEntry[str]]:
    """Visible entries of one kind, sorted by name."""
    with os.scandir(folder) as entries:
        found = [e for e in entries if e.is_dir() == directories and not e.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def _text(name: str) -> str:
    """A file name as valid UTF-8, whatever the file system holds."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Images:
    """A folder with one sub-folder a class; the encoded files go unchanged into the column `image`."""

    root: Path
    check: bool

    def files(self) -> Iterator[Path]:
        """The images, class after class."""
        for folder in self._classes():
            yield from self._images(folder)

    def parts(self) -> list[Part]:
        """One part; its classes are the sub-folders' names, sorted."""
        folders = self._classes()
        rows = sum(len(self._images(folder)) for folder in folders)
        visible = sum(len(_listed(folder, False)) for folder in [self.root, *folders])
        classes = tuple(_text(folder.name) for folder in folders)
        return [Part("", rows, partial(self._tables, folders), classes, visible - rows)]

    def _classes(self) -> list[Path]:
        expected = "expected one sub-folder a class, with the images directly inside: DIR/cat/1.png, DIR/dog/2.jpg"
        if not self.root.is_dir():
            raise DataError(f"{self.root}: not a folder; {expected}. Give that folder as input.")
        folders = [Path(entry.path) for entry in _listed(self.root, True)]
        if not folders:
            raise DataError(f"{self.root}: no class folders in it; {expected}. Move the images into class folders.")
        for folder in folders:
            if inner := _listed(folder, True):
                raise DataError(
                    f"{folder}: a class folder with a folder inside ({inner[0].name!r}); {expected}. "
                    "Give the folder above the classes as input, or move the images up."
                )
            if not self._images(folder):
                raise DataError(
                    f"{folder}: no image in this class folder; allowed are {', '.join(IMAGE_SUFFIXES)}. Add images or remove the folder."
                )
        return folders

    def _images(self, folder: Path) -> list[Path]:
        return [Path(e.path) for e in _listed(folder, False) if e.name.lower().endswith(IMAGE_SUFFIXES)]

    def _tables(self, folders: list[Path]) -> Iterator[pa.Table]:
        ids: list[str] = []
        data: list[bytes] = []
        labels: list[int] = []
        size = 0
        for label, folder in enumerate(folders):
            for path in self._images(folder):
                if data and size >= BLOCK_BYTES:
                    yield _image_table(ids, data, labels)
                    ids, data, labels, size = [], [], [], 0
                encoded = path.read_bytes()
                if self.check:
                    _check_image(path, encoded)
                ids.append(_text(path.relative_to(self.root).as_posix()))
                data.append(encoded)
                labels.append(label)
                size += len(encoded)
        yield _image_table(ids, data, labels)


def _image_table(ids: list[str], data: list[bytes], labels: list[int]) -> pa.Table:
    return _table(ids, {"image": pa.array(data, pa.binary()), "label": pa.array(labels, pa.int64())})


def _check_image(path: Path, encoded: bytes) -> None:
    """Decodes one image as training will.

    Raises:
        DataError: It is not one still image that torchvision can decode.
    """
    import torch
    from torchvision.io import ImageReadMode, decode_image

    try:
        if not encoded:
            raise RuntimeError("the file is empty")
        raw = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        shape = tuple(decode_image(raw, mode=ImageReadMode.RGB).shape)
        if len(shape) != 3:
            raise RuntimeError(f"it has {shape[0]} frames")
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path}: not an image that can be decoded ({reason}). Allowed is one intact still image as png, jpeg, webp or "
            "gif (torchvision decodes no bmp). Convert or remove the file, or give check=False to store it unread."
        ) from error


@dataclass(frozen=True)
class Csv:
    """One CSV file or a folder of them, with a header line; `label` names the column that becomes `label`."""

    path: Path
    label: str | None

    def files(self) -> Iterator[Path]:
        """The files, sorted by name."""
        if not self.path.exists():
            raise DataError(f"{self.path}: no such file or folder; expected one .csv or .csv.gz file or a folder of them.")
        found = [Path(e.path) for e in _listed(self.path, False)] if self.path.is_dir() else [self.path]
        found = [path for path in found if path.name.endswith((".csv", ".csv.gz"))]
        if not found:
            raise DataError(f"{self.path}: no CSV file; allowed are .csv and .csv.gz. Rename the file or give another input.")
        yield from found

    def parts(self) -> list[Part]:
        """One part; a first pass over the files finds the narrowest type that holds each column, and the classes."""
        kinds: dict[str, list[pa.DataType]] = {}
        found: set[str] = set()
        rows = 0
        for block in self._strings():
            rows += block.num_rows
            for name in block.schema.names:
                kinds[name] = [kind for kind in kinds.get(name, _KINDS) if _fits(block[name], kind)]
            if self.label and len(found) <= MAX_CLASSES:
                found.update(pc.unique(block[self.label]).to_pylist())
        types = {name: fitting[0] for name, fitting in kinds.items()}
        classes = self._label_classes(types, found) if self.label and rows else None
        return [Part("", rows, partial(self._tables, types, classes), classes)]

    def _strings(self) -> Iterator[pa.RecordBatch]:
        """All blocks of all files, every column as a string, after a check of the headers."""
        expected: list[str] | None = None
        for path in self.files():
            for block in _csv_blocks(path, csv.ConvertOptions(default_column_type=pa.string())):
                names = block.schema.names
                if expected is None and len(set(names)) < len(names):
                    raise DataError(f"{path}: two columns of one name in {names}. Give each column its own name.")
                if expected is None and self.label and self.label not in names:
                    raise DataError(f"{path}: no label column {self.label!r}; the columns are {names}. Name one of them.")
                expected = expected or names
                if names != expected:
                    raise DataError(f"{path}: columns {names}, but the first file has {expected}. Give all files one header.")
                yield block

    def _label_classes(self, types: dict[str, pa.DataType], found: set[str]) -> tuple[str, ...] | None:
        """The sorted class names of a string label; None for an integer one."""
        name = self.label or ""
        if pa.types.is_integer(types[name]):
            return None
        if pa.types.is_floating(types[name]):
            raise DataError(
                f"{self.path}: label column {name!r} holds numbers that are not integers; allowed are integers or strings. "
                f"For regression leave `label` out and rename {name!r} to 'target'."
            )
        if "" in found or len(found) > MAX_CLASSES:
            wrong = "rows without a value" if "" in found else f"more than {MAX_CLASSES} different strings"
            raise DataError(f"{self.path}: label column {name!r} has {wrong}. Name another column or correct these rows.")
        types[name] = pa.string()
        return tuple(sorted(found))

    def _tables(self, types: dict[str, pa.DataType], classes: tuple[str, ...] | None) -> Iterator[pa.Table]:
        for path in self.files():
            line = 2
            for block in _csv_blocks(path, csv.ConvertOptions(column_types=types)):
                names = ["label" if name == self.label else name for name in block.schema.names]
                columns = dict(zip(names, block.columns, strict=True))
                if classes is not None:
                    columns["label"] = pc.index_in(columns["label"], pa.array(classes)).cast(pa.int64())
                yield _table([f"{_text(path.name)}:{line + i}" for i in range(block.num_rows)], columns)
                line += block.num_rows


_KINDS = [pa.int64(), pa.float64(), pa.bool_(), pa.string()]


def _fits(values: pa.Array, kind: pa.DataType) -> bool:
    """Whether the CSV reader can convert all `values` (strings) to `kind`; spellings of a missing value fit all."""
    if pa.types.is_string(kind):
        return True
    trimmed = pc.utf8_trim_whitespace(values)
    try:
        pc.if_else(pc.is_in(trimmed, pa.array(NULLS)), None, trimmed).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _csv_blocks(path: Path, convert: csv.ConvertOptions) -> Iterator[pa.RecordBatch]:
    """The file in blocks of about `BLOCK_BYTES`; one thread, so that errors can name the line."""
    read = csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    try:
        yield from csv.open_csv(str(path), read, csv.ParseOptions(newlines_in_values=True), convert)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path}: {error}. Expected UTF-8 text with one header line and the same number of comma-separated values in "
            "every row (row 1 is the header). Correct the file."
        ) from error


Header = tuple[np.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class _Stored:
    """One array in a file, read from front to back; `header` leaves an opened file at the first row."""

    where: str
    open: Callable[[], IO[bytes]]
    header: Callable[[IO[bytes]], Header]

    def layout(self) -> Header:
        """Dtype and shape (rows, ...) of the array."""
        with self._opened() as file:
            return self.header(file)

    def blocks(self, rows: int) -> Iterator[Array]:
        """The array in blocks of `rows` rows, in the machine's byte order; the file must end with the last row."""
        with self._opened() as file:
            dtype, shape = self.header(file)
            for start in range(0, shape[0], rows):
                block = (min(rows, shape[0] - start), *shape[1:])
                data = file.read(dtype.itemsize * int(np.prod(block)))
                if len(data) < dtype.itemsize * int(np.prod(block)):
                    raise EOFError(f"the file ends before row {start + block[0]} of {shape[0]}")
                yield np.frombuffer(data, dtype).reshape(block).astype(dtype.newbyteorder("="), copy=False)
            if file.read(1):
                raise ValueError(f"there is more data after the last of {shape[0]} rows")

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        try:
            with self.open() as file:
                yield file
        except (ValueError, EOFError, struct.error, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile) as error:
            raise DataError(f"{self.where}: {error}. The file is damaged or of another format; make it again.") from error


def _open_file(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _array_part(name: str, arrays: dict[str, _Stored], id_prefix: str = "") -> Part:
    """One part of arrays that have one row each per row, read side by side.

    Raises:
        DataError: They differ in rows, or one holds no numbers.
    """
    layouts = {column: array.layout() for column, array in arrays.items()}
    counts = {array.where: layouts[column][1][0] for column, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"arrays of different numbers of rows: {counts}. Each row needs one entry in each; make them again.")
    row_bytes = sum(dtype.itemsize * int(np.prod(shape[1:])) for dtype, shape in layouts.values())
    step = max(1, BLOCK_BYTES // max(1, row_bytes))

    def tables() -> Iterator[pa.Table]:
        start = 0
        for blocks in zip(*(array.blocks(step) for array in arrays.values()), strict=True):
            ids = [f"{id_prefix}{i}" for i in range(start, start + len(blocks[0]))]
            yield _table(ids, dict(zip(arrays, blocks, strict=True)))
            start += len(ids)

    return Part(name, next(iter(counts.values())), tables)


@dataclass(frozen=True)
class Numpy:
    """One .npz file, one .npy file, or a folder of .npy files, one column an array; nothing is ever unpickled."""

    path: Path

    def files(self) -> Iterator[Path]:
        """The files, sorted by name."""
        if not self.path.exists():
            raise DataError(f"{self.path}: no such file or folder; expected one .npz file or a folder with x.npy and y.npy.")
        found = [Path(e.path) for e in _listed(self.path, False)] if self.path.is_dir() else [self.path]
        found = [p for p in found if p.suffix == ".npy" or (p == self.path and p.suffix == ".npz")]
        if not found:
            raise DataError(f"{self.path}: no array; expected one .npz file or a folder with x.npy and y.npy.")
        yield from found

    def parts(self) -> list[Part]:
        """One part: x becomes `image` or `features`, y `label` or `target`, other arrays keep their names."""
        arrays = {name: array for path in self.files() for name, array in _stored_in(path).items()}
        return [_array_part("", {_column_name(name, *a.layout()): a for name, a in arrays.items()})]


def _stored_in(path: Path) -> dict[str, _Stored]:
    if path.suffix == ".npy":
        return {path.stem: _Stored(str(path), partial(_open_file, path), _npy_header)}
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(".npy")]
    except zipfile.BadZipFile as error:
        raise DataError(f"{path}: {error}; expected an .npz file as numpy.savez writes it. Make it again.") from error
    if not members:
        raise DataError(f"{path}: no array in it; expected arrays such as x and y. Make it with numpy.savez(path, x=x, y=y).")

    def opened(member: str) -> IO[bytes]:
        return zipfile.ZipFile(path).open(member)

    return {name[:-4]: _Stored(f"{path}:{name[:-4]}", partial(opened, name), _npy_header) for name in members}


def _npy_header(file: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the .npy format; allowed are arrays of numbers, versions 1.0 and 2.0")
    shape, columns_first, dtype = read(file)
    if dtype.hasobject or dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"an array of {dtype}; allowed are bool, integers and floats of up to 64 bits (nothing is unpickled)")
    if not shape or columns_first:
        wrong = "columns first (Fortran order)" if columns_first else "one single value"
        raise ValueError(f"the array is stored as {wrong}; allowed are rows first: save numpy.ascontiguousarray(x)")
    return dtype, shape


def _column_name(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> str:
    if name == "x":
        return "image" if len(shape) >= 3 else "features"
    if name == "y":
        return "label" if len(shape) == 1 and dtype.kind in "biu" else "target"
    return name


@dataclass(frozen=True)
class Idx:
    """MNIST-format files in one folder, gzipped or not: the pair `train-*` becomes `train`, the pair `t10k-*` `eval`."""

    root: Path

    def files(self) -> Iterator[Path]:
        """The files of each pair: images, labels."""
        for pair in self._pairs().values():
            yield from pair

    def parts(self) -> list[Part]:
        """One part a pair."""
        parts = []
        for prefix, paths in self._pairs().items():
            image, label = (
                _Stored(str(path), partial(_open_file, path), partial(_idx_header, axes)) for path, axes in zip(paths, (3, 1), strict=True)
            )
            parts.append(_array_part({"train": "train", "t10k": "eval"}[prefix], {"image": image, "label": label}, f"{prefix}:"))
        return parts

    def _pairs(self) -> dict[str, list[Path]]:
        """Prefix -> [images, labels].

        Raises:
            DataError: No pair, or half a pair.
        """
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        pairs = {}
        for prefix in ("train", "t10k"):
            names = [[f"{prefix}-{kind}{end}" for end in ("", ".gz")] for kind in kinds]
            found = [next((self.root / name for name in both if (self.root / name).is_file()), None) for both in names]
            if None in found and found != [None, None]:
                missing = names[found.index(None)]
                raise DataError(f"{self.root}: half a pair of IDX files: {missing[0]}[.gz] is missing. Add it.")
            pairs[prefix] = [path for path in found if path]
        if not any(pairs.values()):
            raise DataError(
                f"{self.root}: no IDX files; expected a folder with train-{kinds[0]}[.gz] and train-{kinds[1]}[.gz], and the "
                "same for t10k. Give that folder as input."
            )
        return {prefix: paths for prefix, paths in pairs.items() if paths}


def _idx_header(axes: int, file: IO[bytes]) -> Header:
    magic, expected = file.read(4), struct.pack(">I", 0x800 + axes)
    if magic != expected:
        raise ValueError(f"the magic number is {magic.hex()}; expected {expected.hex()} (unsigned bytes, {axes} axes)")
    return np.dtype("u1"), struct.unpack(f">{axes}I", file.read(4 * axes))


@dataclass(frozen=True)
class Digits:
    """scikit-learn's bundled 1,797 images of handwritten digits, 8x8, values 0..16; the same fraction of each class in `eval`."""

    seed: int
    eval_fraction: float

    def files(self) -> Iterator[Path]:
        """None: the images come with scikit-learn."""
        return iter(())

    def parts(self) -> list[Part]:
        """`train` and `eval`, by a keyed hash of (seed, index) inside each class."""
        from sklearn.datasets import load_digits

        data = load_digits()
        held_out: list[int] = []
        for label in range(10):
            indices = np.flatnonzero(data.target == label).tolist()
            ordered = sorted(indices, key=lambda i: hashlib.blake2b(f"{self.seed}:{i}".encode()).digest())
            held_out += ordered[: round(len(ordered) * self.eval_fraction)]
        kept = sorted(set(range(len(data.target))) - set(held_out))
        parts = []
        for name, rows in (("train", kept), ("eval", sorted(held_out))):
            columns = {"image": data.images[rows].astype(np.uint8), "label": data.target[rows].astype(np.int64)}
            tables = partial(_one_table, [str(i) for i in rows], columns)
            parts.append(Part(name, len(rows), tables, tuple("0123456789")))
        return parts


def _one_table(ids: list[str], columns: dict[str, Array | pa.Array]) -> Iterator[pa.Table]:
    yield _table(ids, columns)
