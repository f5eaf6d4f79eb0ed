"""Reader of CIFAR-10 and CIFAR-100 as they are published: the binary version and the python version (which is not unpickled)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ray_app.data.dataset.arrays import Array
from ray_app.data.dataset.files import File, Place, files_in, find, is_folder
from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.ingest.readers.unpickled import unpickled

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Version:
    """One way in which CIFAR is published.

    Args:
        files: Names of the files of `train` and of `test`.
        meta: Files with the names of the classes: column -> name (text, one a line) or key in the pickle `meta`.
        labels: Columns of labels, as they stand before the pixels, or keys in the pickle -> column.
    """

    files: dict[str, list[str]]
    meta: dict[str, str]
    labels: dict[str, str]


_TEN = [f"data_batch_{i}" for i in range(1, 6)]
_BINARY = [
    _Version({"train": [f"{name}.bin" for name in _TEN], "test": ["test_batch.bin"]}, {"label": "batches.meta.txt"}, {"label": "label"}),
    _Version(
        {"train": ["train.bin"], "test": ["test.bin"]},
        {"label": "fine_label_names.txt"},
        {"coarse": "coarse_label", "fine": "label"},
    ),
]
_PYTHON = [
    _Version({"train": _TEN, "test": ["test_batch"]}, {"batches.meta": "label_names"}, {"labels": "label"}),
    _Version(
        {"train": ["train"], "test": ["test"]}, {"meta": "fine_label_names"}, {"fine_labels": "label", "coarse_labels": "coarse_label"}
    ),
]


@dataclass(frozen=True)
class Cifar:
    """The folder of one of the four archives: images (32, 32, 3), `label`, and for CIFAR-100 `coarse_label`.

    Args:
        root: The folder.
    """

    root: Place

    def files(self) -> list[File]:
        """The files with images, the training data first, and that with the names of the classes."""
        version, found = self._found()
        names = self._names(version)
        return [*(file for files in found.values() for file in files), *([names] if names else [])]

    def parts(self, run: base.Run) -> list[base.Part]:
        """`train` and `test`, a piece a file."""
        del run
        version, found = self._found()
        read = partial(_binary, list(version.labels.values())) if version in _BINARY else partial(_python, version.labels)
        classes = self._classes(version)
        return [
            base.Part(side, [base.Piece(None, partial(_tables, read, len(classes) if classes else None, file)) for file in files], classes)
            for side, files in found.items()
        ]

    def _found(self) -> tuple[_Version, dict[str, list[File]]]:
        """The version that is there, and its files.

        Raises:
            DataError: None is, or one is not complete.
        """
        there = {file.name: file for file in files_in(self.root)} if is_folder(self.root) else {}
        for version in (*_BINARY, *_PYTHON):
            wanted = [name for names in version.files.values() for name in names]
            missing = [name for name in wanted if name not in there]
            if len(missing) < len(wanted):
                if missing:
                    raise DataError(f"{self.root}: {', '.join(missing)} of CIFAR is missing. Unpack the whole archive again.")
                return version, {side: [there[name] for name in names] for side, names in version.files.items()}
        raise DataError(
            f"{self.root}: no CIFAR files; expected the unpacked folder of one archive, such as cifar-10-batches-py with data_batch_1 to 5"
            " and test_batch, or cifar-100-binary with train.bin and test.bin. Give that folder as input."
        )

    def _names(self, version: _Version) -> File | None:
        """The file with the names of the classes, if it is there."""
        [(first, second)] = version.meta.items()
        return find(self.root / (second if version in _BINARY else first))

    def _classes(self, version: _Version) -> tuple[str, ...] | None:
        """Names of the classes, if the file with them is there."""
        file = self._names(version)
        if file is None:
            return None
        if version not in _BINARY:
            [key] = version.meta.values()
            names = _dictionary(file).get(key)
            if not isinstance(names, list):
                raise DataError(f"{file}: no list `{key}` of the names of the classes. Download it again.")
            return tuple(_text(name) for name in names)
        try:
            return tuple(file.place.read_text().split())
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: {error}; expected the names of the classes, one a line. Download it again.") from error


def _tables(read: Any, classes: int | None, file: File, refuse: base.Refuse) -> Iterator[pa.Table]:
    pixels, labels = read(file)
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    usable = np.ones(len(images), np.bool_) if classes is None else (labels["label"] >= 0) & (labels["label"] < classes)
    for row in np.flatnonzero(~usable):
        refuse(f"{file.name}:{row}", f"label {labels['label'][row]}; the {classes} classes allow 0 to {(classes or 0) - 1}")
    rows = np.flatnonzero(usable)
    yield base.table(
        [f"{file.name}:{row}" for row in rows], {"image": images[rows], **{name: values[rows] for name, values in labels.items()}}
    )


def _binary(columns: list[str], file: File) -> tuple[Array, dict[str, Array]]:
    """Pixels (rows, 3072) and labels (rows,) of a file of records: labels of a byte each, then the pixels."""
    record = len(columns) + _PIXELS
    with file.open() as opened:
        if not file.size or file.size % record:
            raise DataError(f"{file}: {file.size} bytes are not a whole number of records of {record}; download it again.")
        records = np.frombuffer(opened.read(), np.uint8).reshape(-1, record)
    return records[:, len(columns) :], {name: records[:, i].astype(np.int64) for i, name in enumerate(columns)}


def _python(columns: dict[str, str], file: File) -> tuple[Array, dict[str, Array]]:
    """The same from a file of the python version."""
    found = _dictionary(file)
    pixels = found.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(f"{file}: no array `data` of {_PIXELS} bytes a row; it is no file of CIFAR. Download it again.")
    return pixels, {column: _integers(file, key, found.get(key), len(pixels)) for key, column in columns.items()}


def _integers(file: File, key: str, values: Any, rows: int) -> Array:
    """The labels in a list of a pickle, int64 of shape (rows,)."""
    try:
        array = np.array(values)
    except ValueError:  # lists of different lengths in it
        array = np.array(None)
    if array.shape != (rows,) or not np.can_cast(array.dtype, np.int64):
        raise DataError(f"{file}: `{key}` are not {rows} integers, one for each image. Download it again.")
    return array.astype(np.int64)


def _dictionary(file: File) -> dict[str, Any]:
    """The dictionary in a file of the python version, by text keys."""
    try:
        with file.open() as opened:
            found = unpickled(opened)
    except ValueError as error:
        raise DataError(f"{file}: not a file of CIFAR's python version: {error}. Download it again from where it is published.") from error
    if not isinstance(found, dict):
        raise DataError(f"{file}: it holds no dictionary, so it is no file of CIFAR. Download it again.")
    return {_text(key): value for key, value in found.items()}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
