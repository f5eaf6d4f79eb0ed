"""Readers of raw data that consists of arrays: NumPy files, MNIST-format files, the bundled digits.

They stream the arrays in files from front to back, also from archives and object stores, and never unpickle anything.
`numpy.load` and the readers of torchvision would hold whole files in memory.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Array
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.converter import to_class_indices
from ray_app.storage.data_files import File, files_in, find_file, folders_in, is_folder, parser_errors

Header = tuple[np.dtype, tuple[int, ...]]
"""Type and shape (rows, ...) of an array."""
StoredHeader = tuple[np.dtype, tuple[int, ...], bool]
"""The same, and whether a file stores the first axis as the fastest one, which is Fortran's order."""

_VECTORS = ("y", "label", "labels", "target")
"""Arrays with one number for each row, which some programs store with the shape (rows, 1)."""
_LABELS = ("y", "label", "labels")
"""Arrays with texts that are the names of classes."""
_IDX_NAME = re.compile(r"(?P<set>[\w-]+-)?(?P<side>train|t10k|test)-(?P<kind>images|labels)[-.]idx[13][-.]ubyte(\.gz)?")
"""Names of IDX files: of MNIST, of Kaggle's copies, of EMNIST."""
_MAX_TEXT_BYTES = 1 << 16
"""Limit of a text in an array, in which all have the size of the longest."""
_MAX_FORTRAN_BYTES = 1 << 30
"""Limit of the rows of an input split that are stored in Fortran's order, since all of them are in memory at once."""


@dataclass(frozen=True)
class _Stored:
    """One array in a file; pickled to tasks.

    Args:
        read_header: Reads the header and leaves the opened file at the first value.
        member: Name of the array in a zip archive; None for any other file.
        is_vector: Whether an array of shape (rows, 1), as Keras stores labels, is read with the shape (rows,).
    """

    where: str
    file: File
    read_header: Callable[[IO[bytes]], StoredHeader]
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
            dtype, shape, _ = self.read_header(file)
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            if not row_bytes:
                raise ValueError(f"rows of shape {shape[1:]} are empty")
            whole_rows = shape[0] if self.is_packed else (self.file.size - file.tell()) // row_bytes
            if whole_rows < shape[0]:
                raise EOFError(f"the file ends before row {whole_rows + 1} of {shape[0]}")
            return dtype, self._row_shape(shape)

    def blocks(self, first: int, last: int, rows: int) -> Iterator[Array]:
        """Yields rows [first, last) in blocks, in the machine's byte order; checks that the file ends there."""
        with self._opened() as file:
            dtype, shape, is_fortran = self.read_header(file)
            if is_fortran and len(shape) > 1:
                values = _read_fortran(file, dtype, shape, first, last).reshape(-1, *self._row_shape(shape)[1:])
                yield from (_converted(values[low : low + rows]) for low in range(0, last - first, rows))
                return
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            if first:
                file.seek(row_bytes * first, 1)
            for start in range(first, last, rows):
                block = min(rows, last - start)
                data = file.read(row_bytes * block)
                if len(data) < row_bytes * block:
                    raise EOFError(f"the file ends before row {start + block} of {shape[0]}")
                values = np.frombuffer(data, dtype).reshape(block, *self._row_shape(shape)[1:])
                yield _converted(values)
            if last == shape[0] and file.read(1):
                raise ValueError(f"the file continues after the last of {shape[0]} rows")

    def _row_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:1] if self.is_vector and shape[1:] == (1,) else shape

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        with (
            parser_errors(self.where, "The file is damaged or has another format; write it again."),
            ExitStack() as stack,
        ):
            if self.member is None:
                yield stack.enter_context(self.file.open_unpacked())
            else:
                archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(self.file.open())))
                yield stack.enter_context(archive.open(self.member))


def _read_fortran(file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...], first: int, last: int) -> Array:
    """Returns rows [first, last) of an array that is stored one column after the other, (rows, ...)."""
    columns, rows = math.prod(shape[1:]), last - first
    if (size := columns * rows * dtype.itemsize) > _MAX_FORTRAN_BYTES:
        raise ValueError(
            f"{size} bytes are stored in Fortran order; allowed are {_MAX_FORTRAN_BYTES}: save"
            " numpy.ascontiguousarray(x), or lower --shard_rows"
        )
    values = np.empty((columns, rows), dtype)
    for column in values:
        file.seek(first * dtype.itemsize, 1)
        data = file.read(rows * dtype.itemsize)
        if len(data) < rows * dtype.itemsize:
            raise EOFError("the file ends before its last value")
        column[:] = np.frombuffer(data, dtype)
        file.seek((shape[0] - last) * dtype.itemsize, 1)
    if file.read(1):
        raise ValueError(f"the file continues after the last of {shape[0]} rows")
    return np.ascontiguousarray(values.T.reshape(rows, *shape[1:], order="F"))


def _converted(values: Array) -> Array:
    """Returns values in the machine's byte order, texts as Unicode; raises ValueError if bytes are not UTF-8."""
    if values.dtype.kind == "S":
        return np.char.decode(np.asarray(values, np.bytes_), "utf-8")
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _array_part(
    name: str, arrays: dict[str, _Stored], split_rows: int, id_prefix: str, classes: tuple[str, ...] | None = None
) -> sources.Part:
    """Returns a part with a column for each array; a label of texts has these classes."""
    layouts = {column: array.layout() for column, array in arrays.items()}
    counts = {array.where: layouts[column][1][0] for column, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise DataError(
            f"arrays with different numbers of rows: {counts}. Each row needs one entry in each array; arrays for"
            " training and testing are called x_train, y_train, x_test and y_test. Correct the arrays."
        )
    rows = next(iter(counts.values()))
    if any(array.is_packed for array in arrays.values()):
        split_rows = max(rows, 1)
    starts = range(0, rows, split_rows)
    bounds = [(start, min(start + split_rows, rows)) for start in starts]
    tables = partial(_tables, arrays, layouts, id_prefix, classes)
    splits = [sources.InputSplit(last - first, partial(tables, first, last)) for first, last in bounds]
    return sources.Part(name, splits, classes)


def _tables(
    arrays: dict[str, _Stored],
    layouts: dict[str, Header],
    id_prefix: str,
    classes: tuple[str, ...] | None,
    first: int,
    last: int,
    refuse: sources.Refuse,
) -> Iterator[pa.Table]:
    del refuse
    row_bytes = sum(dtype.itemsize * math.prod(shape[1:]) for dtype, shape in layouts.values())
    step = max(1, sources.BLOCK_BYTES // max(1, row_bytes))
    for blocks in zip(*(array.blocks(first, last, step) for array in arrays.values()), strict=True):
        ids = [f"{id_prefix}{i}" for i in range(first, first + len(blocks[0]))]
        columns: dict[str, Array | pa.Array] = dict(zip(arrays, blocks, strict=True))
        if classes is not None:
            columns["label"] = to_class_indices(pa.array(columns["label"]), classes)
        yield sources.make_table(ids, columns)
        first += len(ids)


@dataclass(frozen=True)
class Numpy(sources.SourceReader):
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

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns a part for each data set that the names of all arrays tell; otherwise one part.

        The names follow Keras' `mnist.npz` (`x_train`), or of MedMNIST (`train_images`). x and images become `image` or
        `features`, see `_column_name`, y and labels `label` or `target`, other arrays keep their names; X and Y are
        read as x and y. Labels may have the shape (rows, 1), and texts as labels are classes.
        """
        del run
        arrays = _lower_names({name: array for file in self.files() for name, array in _arrays_in(file).items()})
        sides = _divide(arrays) or {"": arrays}
        first = next(iter(sides.values()))
        if others := [side for side in sides if sides[side].keys() != first.keys()]:
            raise DataError(
                f"{self.path}: the arrays are {sorted(arrays)}; the arrays of {others[0]!r} need counterparts for"
                " training. Rename or remove some."
            )
        texts = set[str]().union(*map(_label_texts, sides.values()))
        classes = sources.sort_classes(str(self.path), texts, False) if texts else None
        columns = {side: self._columns(of_side) for side, of_side in sides.items()}
        if len({frozenset(of_side) for of_side in columns.values()}) > 1:
            layouts = "; ".join(f"{array.where}: {array.layout()}" for s in columns.values() for array in s.values())
            raise DataError(
                f"{self.path}: the arrays for training and for testing differ in type or axes: {layouts}. Save both in"
                " the same form."
            )
        return [self._part(side, of_side, classes) for side, of_side in columns.items()]

    def _columns(self, arrays: dict[str, _Stored]) -> dict[str, _Stored]:
        """Returns the arrays by the names of their columns."""
        stored = {
            name: replace(array, is_vector=name in _VECTORS or array.layout()[0].kind in "US")
            for name, array in arrays.items()
        }
        columns = {_column_name(name, *array.layout()): array for name, array in stored.items()}
        if len(columns) < len(arrays):
            raise DataError(
                f"{self.path}: two of {sorted(arrays)} would become one of the columns {sorted(columns)}. Rename one."
            )
        return columns

    def _part(self, name: str, columns: dict[str, _Stored], classes: tuple[str, ...] | None) -> sources.Part:
        # An array that is called `target` is meant as one, an array `y` may hold classes.
        y = columns.get("target")
        note = _note_on_classes(y) if y and y.name.lower().startswith("y") else None
        part = _array_part(name, columns, self.options.shard_rows, f"{name}:" if name else "", classes)
        return replace(part, notes=(note,) if note else ())


def _lower_names(arrays: dict[str, _Stored]) -> dict[str, _Stored]:
    """Returns the arrays; `X`, `Y` and names such as `X_train` become lower case where that name is not taken."""
    words = "|".join(sources.SPLITS)
    is_variant = re.compile(rf"[XY](_({words}))?|({words})_[XY]").fullmatch
    return {
        name.lower() if is_variant(name) and name.lower() not in arrays else name: array
        for name, array in arrays.items()
    }


def _divide(arrays: dict[str, _Stored]) -> dict[str, dict[str, _Stored]] | None:
    """Returns the arrays of each data set by the rest of their names; None if not all names tell a data set.

    One of the data sets must be to train on, and there must be another one.
    """
    for pattern in (r"(?P<rest>.+)_(?P<word>[a-z]+)", r"(?P<word>[a-z]+)_(?P<rest>.+)"):
        matches = {name: re.fullmatch(pattern, name) for name in arrays}
        words = {match["word"] if match else "" for match in matches.values()}
        splits = {word: sources.SPLITS.get(word, "") for word in words}
        if all(splits.values()) and "train" in splits.values() and len(set(splits.values())) == len(splits) > 1:
            sides: dict[str, dict[str, _Stored]] = {split: {} for split in ("train", "eval", "test")}
            for name, match in matches.items():
                assert match is not None
                sides[splits[match["word"]]][match["rest"]] = arrays[name]
            return {split: side for split, side in sides.items() if side}
    return None


def _label_texts(arrays: dict[str, _Stored]) -> set[str]:
    """Returns the different texts of the array of labels; none if it holds numbers."""
    texts: set[str] = set()
    for name, array in arrays.items():
        dtype, shape = array.layout()
        if name in _LABELS and dtype.kind in "US":
            rows = max(1, sources.BLOCK_BYTES // dtype.itemsize)
            for first, block in zip(range(0, shape[0], rows), array.blocks(0, shape[0], rows), strict=True):
                if (is_empty := block.reshape(-1) == "").any():
                    raise DataError(
                        f"{array.where}: the row {first + int(np.argmax(is_empty))}, counted from 0, has an empty text"
                        " as label. Each row needs the name of its class. Correct the array."
                    )
                texts.update(np.unique(block).tolist())
    return texts


def _arrays_in(file: File) -> dict[str, _Stored]:
    """The arrays of a .npy or .npz file by name."""
    if file.name.endswith(".npy"):
        return {file.name[:-4]: _Stored(str(file), file, _npy_header)}
    advice = "Expected an .npz file as numpy.savez writes it. Write it again."
    with parser_errors(file, advice), file.open() as packed, zipfile.ZipFile(packed) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
    if not members:
        raise DataError(
            f"{file}: no array in it; expected arrays such as x and y. Write it with numpy.savez(path, x=x, y=y)."
        )
    return {name[:-4]: _Stored(f"{file}:{name[:-4]}", file, _npy_header, name) for name in members}


def _npy_header(file: IO[bytes]) -> StoredHeader:
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the .npy format; allowed are arrays of numbers, versions 1.0 and 2.0")
    try:
        shape, columns_first, dtype = read(file)
    except Exception as error:  # of many kinds, as NumPy parses the header as Python
        raise ValueError(f"its header cannot be read: {error}") from error
    is_text = dtype.kind in "US" and 0 < dtype.itemsize <= _MAX_TEXT_BYTES
    if not is_text and (dtype.hasobject or dtype.kind not in "biuf" or dtype.itemsize > 8):
        how = {"M": "convert times to numbers", "m": "convert durations to numbers"}.get(dtype.kind, "")
        how = "save each field as a separate array" if dtype.names else how
        raise ValueError(
            f"an array of {dtype}; allowed are bool, integers and floats of up to 64 bits, and texts (nothing is"
            f" unpickled){how and f': {how}'}"
        )
    if not shape:
        raise ValueError("the array is stored as one single value; allowed are arrays with one entry for each row")
    if is_text and math.prod(shape[1:]) != 1:
        raise ValueError(f"an array of texts of shape {shape}; allowed is one text for each row")
    return dtype, shape, columns_first


def _note_on_classes(y: _Stored) -> str | None:
    """Returns a note on a `y` that becomes `target` although it has whole numbers; refuses one-hot classes."""
    dtype, shape = y.layout()
    if not shape[0] or len(shape) > 2:
        return None
    first = next(y.blocks(0, shape[0], max(1, sources.BLOCK_BYTES // (dtype.itemsize * math.prod(shape[1:])))))
    if len(shape) == 2 and np.isin(first, (0, 1)).all() and (first.sum(axis=1, dtype=np.float64) == 1).all():
        raise DataError(
            f"{y.where}: y has the shape {shape} and one 1 in each row, which looks like one-hot classes. To classify,"
            " save y.argmax(axis=1) as y; to keep the rows, rename the array to target."
        )
    has_whole_numbers = bool(np.isfinite(first).all() and (first == np.trunc(first)).all())
    if len(shape) == 1 and has_whole_numbers and len(np.unique(first)) <= len(first) // 2:
        return (
            f"{y.where} holds {dtype} and becomes `target`, although all its values are whole numbers. To classify save"
            f" y.astype(int)."
        )
    return None


def _column_name(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> str:
    if name in ("x", "images") and len(shape) < 3:
        return "features"
    # Numbers of three axes, such as windows of series, are images if they are bytes or the images are square.
    is_image = len(shape) > 3 or dtype == np.uint8 or shape[1:2] == shape[2:3]
    if name == "images" or (name == "x" and is_image):
        return "image"
    if name in ("y", "labels"):
        return "label" if len(shape) == 1 and dtype.kind in "biuUS" else "target"
    return name


@dataclass(frozen=True)
class Idx(sources.SourceReader):
    """MNIST-format files in one folder, gzipped or not: the pair `train-*` becomes `train`, the pair `t10k-*` `test`.

    The files have the names of MNIST (`train-images-idx3-ubyte`), of Kaggle's copies (`train-images.idx3-ubyte`, or
    each file in a folder of its name), or of EMNIST (`emnist-letters-train-images-idx3-ubyte`); the input
    `FOLDER/emnist-letters` names one of several data sets.

    One task reads up to `shard_rows` rows, or a whole gzipped file.
    """

    traits = FormatTraits(eval_fraction=0.1, has_named_parts=True)

    def files(self) -> Iterator[File]:
        """The files of each pair: images, labels."""
        for pair in self._pairs().values():
            yield from pair

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns one part for each pair of files."""
        del run
        parts = []
        for prefix, (images, labels) in self._pairs().items():
            arrays = {
                "image": _Stored(str(images), images, partial(_idx_header, 3)),
                "label": _Stored(str(labels), labels, partial(_idx_header, 1)),
            }
            side = "train" if prefix == "train" else "test"
            parts.append(_array_part(side, arrays, self.options.shard_rows, f"{prefix}:"))
        return parts

    def _pairs(self) -> dict[str, list[File]]:
        """Returns the pairs [images, labels] by their prefix, `train` and `t10k`."""
        folder, beginning = (self.path, "") if is_folder(self.path) else (self.path.parent, self.path.name)
        folders = [folder, *folders_in(folder)] if is_folder(folder) else []
        # Kaggle packs each file into a folder of its name.
        names = {
            file.location.name: file
            for one in folders
            for file in files_in(one)
            if one == folder or file.location.name == one.name
        }
        files: dict[str, dict[tuple[str, str], File]] = {}
        # A file that is not packed comes first, and stays.
        for name in sorted(names, key=lambda name: (name.endswith(".gz"), name)):
            if (match := _IDX_NAME.fullmatch(name)) and name.startswith(beginning):
                side = "train" if match["side"] == "train" else "t10k"
                files.setdefault(match["set"] or "", {}).setdefault((side, match["kind"]), names[name])
        if not files:
            raise DataError(
                f"{self.path}: no IDX files; expected a folder with train-images-idx3-ubyte[.gz] and"
                " train-labels-idx1-ubyte[.gz], and the same for t10k. Set input to that folder."
            )
        if len(files) > 1:
            raise DataError(
                f"{self.path}: IDX files of several data sets, {sorted(files)}. Set input to one of them, such as"
                f" {folder / sorted(files)[-1].rstrip('-')}."
            )
        [present] = files.values()
        for side, kind in present:
            other = (side, "labels" if kind == "images" else "images")
            if other not in present:
                name = f"{side}-{other[1]}-idx{1 if other[1] == 'labels' else 3}-ubyte"
                raise DataError(f"{self.path}: the IDX file {name}[.gz] is missing. Add it.")
        sides = [side for side in ("train", "t10k") if (side, "images") in present]
        return {side: [present[side, "images"], present[side, "labels"]] for side in sides}


def _idx_header(axes: int, file: IO[bytes]) -> StoredHeader:
    magic, expected = file.read(4), struct.pack(">I", 0x800 + axes)
    if magic != expected:
        raise ValueError(f"the magic number is {magic.hex()}; expected {expected.hex()} (unsigned bytes, {axes} axes)")
    return np.dtype("u1"), struct.unpack(f">{axes}I", file.read(4 * axes)), False


@dataclass(frozen=True)
class Digits(sources.SourceReader):
    """The bundled 1,797 images of handwritten digits, 8x8, values 0..16, in the order of scikit-learn's `load_digits`.

    Each class has the same fraction of its images in `eval`. `digits.npz` was written by `numpy.savez_compressed` with
    `image`, (rows, 8, 8) uint8, and `label`, (rows,) uint8; NOTICE names the source and the licence of the data.
    """

    traits = FormatTraits(eval_fraction=0.2, has_named_parts=True, divides_rows=True, has_input=False)

    def files(self) -> list[File]:
        """Returns no files: the images come with the package."""
        return []

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns `train` and `eval`, divided by a keyed hash of (seed, index) in each class; for 0 only `train`."""
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

        def tables(rows: list[int], refuse: sources.Refuse) -> Iterator[pa.Table]:
            del refuse
            yield sources.make_table([str(i) for i in rows], {"image": images[rows], "label": labels[rows]})

        classes = tuple("0123456789")
        return [
            sources.Part(side, [sources.InputSplit(len(rows), partial(tables, rows))], classes, keeps_order=True)
            for side, rows in sides.items()
            if side == "train" or fraction
        ]
