"""Readers of raw data that is arrays already: NumPy files, MNIST-format files, scikit-learn's digits.

Arrays in files are streamed from front to back, also out of archives; nothing is ever unpickled.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

import numpy as np
import pyarrow as pa

from ray_app.data import raw
from ray_app.data.columns import Array
from ray_app.errors import DataError

Header = tuple[np.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class _Stored:
    """One array in a file; `header` reads its dtype and shape (rows, ...) and leaves the opened file at the first row."""

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
                num_bytes = dtype.itemsize * math.prod(block)
                data = file.read(num_bytes)
                if len(data) < num_bytes:
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


def _in_file(path: Path, header: Callable[[IO[bytes]], Header]) -> _Stored:
    """The array of a whole file, gzipped or not."""
    packed = path.suffix == ".gz"
    return _Stored(str(path), lambda: cast(IO[bytes], gzip.open(path)) if packed else path.open("rb"), header)


def _array_part(name: str, arrays: dict[str, _Stored], id_prefix: str = "") -> raw.Part:
    """One part of arrays that have one row each per row, read side by side.

    Raises:
        DataError: They differ in rows, or one holds no numbers.
    """
    layouts = {column: array.layout() for column, array in arrays.items()}
    counts = {array.where: layouts[column][1][0] for column, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"arrays of different numbers of rows: {counts}. Each row needs one entry in each; make them again.")
    row_bytes = sum(dtype.itemsize * math.prod(shape[1:]) for dtype, shape in layouts.values())
    step = max(1, raw.BLOCK_BYTES // max(1, row_bytes))

    def tables() -> Iterator[pa.Table]:
        start = 0
        for blocks in zip(*(array.blocks(step) for array in arrays.values()), strict=True):
            ids = [f"{id_prefix}{i}" for i in range(start, start + len(blocks[0]))]
            yield raw.table(ids, dict(zip(arrays, blocks, strict=True)))
            start += len(ids)

    return raw.Part(name, next(iter(counts.values())), tables)


@dataclass(frozen=True)
class Numpy:
    """One .npz file, one .npy file, or a folder of .npy files, one column an array."""

    path: Path

    def files(self) -> Iterator[Path]:
        """The files, sorted by name."""
        if not self.path.exists():
            raise DataError(f"{self.path}: no such file or folder; expected one .npz file or a folder with x.npy and y.npy.")
        found = raw.listed(self.path) if self.path.is_dir() else [self.path]
        found = [p for p in found if p.suffix == ".npy" or (p == self.path and p.suffix == ".npz")]
        if not found:
            raise DataError(f"{self.path}: no array; expected one .npz file or a folder with x.npy and y.npy.")
        yield from found

    def parts(self) -> list[raw.Part]:
        """One part: x becomes `image` or `features`, y `label` or `target`, other arrays keep their names."""
        arrays = {name: array for path in self.files() for name, array in _arrays_in(path).items()}
        columns = {_column_name(name, *array.layout()): array for name, array in arrays.items()}
        if len(columns) < len(arrays):
            raise DataError(f"{self.path}: of the arrays {sorted(arrays)} two would become one of {sorted(columns)}. Rename one.")
        return [_array_part("", columns)]


def _arrays_in(path: Path) -> dict[str, _Stored]:
    """The arrays of a .npy or .npz file by name."""
    if path.suffix == ".npy":
        return {path.stem: _in_file(path, _npy_header)}
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

    def parts(self) -> list[raw.Part]:
        """One part a pair."""
        parts = []
        for prefix, (images, labels) in self._pairs().items():
            arrays = {"image": _in_file(images, partial(_idx_header, 3)), "label": _in_file(labels, partial(_idx_header, 1))}
            parts.append(_array_part("train" if prefix == "train" else "eval", arrays, f"{prefix}:"))
        return parts

    def _pairs(self) -> dict[str, list[Path]]:
        """Prefix -> [images, labels].

        Raises:
            DataError: No pair, or half a pair.
        """
        pairs = {}
        for prefix in ("train", "t10k"):
            names = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
            found = {name: path for name in names if (path := self._found(name))}
            if len(found) == 1:
                missing = next(name for name in names if name not in found)
                raise DataError(f"{self.root}: half a pair of IDX files: {missing}[.gz] is missing. Add it.")
            if found:
                pairs[prefix] = list(found.values())
        if not pairs:
            raise DataError(
                f"{self.root}: no IDX files; expected a folder with train-images-idx3-ubyte[.gz] and "
                "train-labels-idx1-ubyte[.gz], and the same for t10k. Give that folder as input."
            )
        return pairs

    def _found(self, name: str) -> Path | None:
        return next((path for path in (self.root / name, self.root / f"{name}.gz") if path.is_file()), None)


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

    def parts(self) -> list[raw.Part]:
        """`train` and `eval`, by a keyed hash of (seed, index) inside each class."""
        from sklearn.datasets import load_digits

        data = load_digits()
        held_out: list[int] = []
        for label in range(10):
            indices = np.flatnonzero(data.target == label).tolist()
            ordered = sorted(indices, key=lambda i: hashlib.blake2b(f"{self.seed}:{i}".encode()).digest())
            held_out += ordered[: round(len(ordered) * self.eval_fraction)]
        sides = {"train": sorted(set(range(len(data.target))) - set(held_out)), "eval": sorted(held_out)}

        def tables(rows: list[int]) -> Iterator[pa.Table]:
            columns = {"image": data.images[rows].astype(np.uint8), "label": data.target[rows].astype(np.int64)}
            yield raw.table([str(i) for i in rows], columns)

        return [raw.Part(side, len(rows), partial(tables, rows), tuple("0123456789")) for side, rows in sides.items()]
