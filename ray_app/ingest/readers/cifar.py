"""Reader of CIFAR-10 and CIFAR-100 as they are published: the binary version, and the python version (pickles).

The readers of torchvision are not used: they execute the pickles, read only local folders of a fixed layout, and name
neither file nor row of what they cannot read.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Array
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import base
from ray_app.storage.data_files import File, files_in, find_file, is_folder

_PART_BYTES = 1 << 20
_IN_PROGRESS = object()


class _Bounded:
    """A file from which a damaged length reads no more bytes into memory than the file has."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.readline = file.readline

    def read(self, size: int) -> bytes:
        """Returns the next bytes.

        Raises:
            ValueError: The file ends before.
        """
        parts = []
        remaining = size
        while remaining > 0 and (part := self._file.read(min(remaining, _PART_BYTES))):
            parts.append(part)
            remaining -= len(part)
        if remaining:
            raise ValueError(f"it ends {remaining} bytes too early")
        return b"".join(parts)


class _Dtype:
    """Stands for `numpy.dtype` in a pickle: only numbers are allowed."""

    def __init__(self, name: Any, *_: Any) -> None:
        if not isinstance(name, str):
            raise TypeError("a dtype without a name")
        if name[:1] not in "biuf" or not name[1:].isdigit():
            raise ValueError(f"an array of {name!r}; allowed are numbers")
        self.value = np.dtype(name)

    def build(self, state: Any) -> None:
        """Sets the byte order."""
        if state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


class _Array:
    """Stands for an array in a pickle; `build` is called with its content."""

    def __init__(self, *_: Any) -> None:
        self.values: np.ndarray | None = None

    def build(self, state: Any) -> None:
        """Makes the array of version, shape, dtype, order and bytes."""
        _, shape, dtype, columns_first, content = state
        data = content.encode("latin-1") if isinstance(content, str) else content
        self.values = np.frombuffer(data, dtype.value).reshape(shape, order="F" if columns_first else "C")


def _encode(text: Any, encoding: Any) -> bytes:
    """Stands for `_codecs.encode`, by which Python 3 writes bytes in protocols below 3."""
    if encoding != "latin1":
        raise ValueError("bytes in another encoding than latin1")
    return bytes(text.encode("latin-1"))


_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}
"""The names that are allowed in a pickle, and what stands for them; nothing is imported or called for a pickle."""
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.INT, pickle.LONG, pickle.BINFLOAT),
    *(pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.STRING, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.BINUNICODE8, pickle.UNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.TUPLE3, pickle.APPEND, pickle.APPENDS, pickle.BINPUT, pickle.LONG_BINPUT, pickle.PUT, pickle.MEMOIZE),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.GET, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE),
)
"""The opcodes that plain data and arrays need in protocols 1 to 4; `_PlainUnpickler` adds three of its own."""


class _PlainUnpickler(pickle._Unpickler):
    """Python's unpickler, with few opcodes and names.

    It is the one that is written in Python: that in C takes memory for a damaged length or index before it looks at the
    file, and a deeply nested tuple as the key of a dictionary ends its process.
    """

    dispatch = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}  # noqa: RUF012
    stack: list[Any]
    metastack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """Returns what stands for a name; imports nothing."""
        if (module, name) not in _NAMES:
            raise ValueError(
                f"it names {module}.{name}, which plain data has no need of; it was neither imported nor called"
            )
        return _NAMES[module, name]

    def load_build(self) -> None:
        """Gives the value on the stack its state; the original one sets any attributes of any object."""
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, _Array | _Dtype):
            raise TypeError("a state for a value that has none")
        target.build(state)

    def load_setitem(self) -> None:
        """Adds a key and a value to a dictionary."""
        self._add([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        """Adds keys and values to a dictionary."""
        self._add(self.pop_mark())  # type: ignore[attr-defined]

    def _add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("keys for a value that has none")
        # Keys of other types may take forever to hash, or crash.
        if wrong := [key for key in items[::2] if not isinstance(key, (str, bytes, int))]:
            raise ValueError(
                f"a {type(wrong[0]).__name__} as a key of a dictionary; allowed are text, bytes and integers"
            )
        target.update(zip(items[::2], items[1::2], strict=True))

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]
    dispatch[pickle.SETITEM[0]] = load_setitem  # type: ignore[assignment]
    dispatch[pickle.SETITEMS[0]] = load_setitems  # type: ignore[assignment]


def unpickle(file: IO[bytes]) -> Any:
    """Returns the data in a pickle, with text of Python 2 as `str`, byte for byte (latin-1). Nothing is executed.

    Raises:
        ValueError: The pickle is damaged, or holds something else than plain data and arrays: dictionaries, lists,
            tuples, numbers, text, bytes and NumPy arrays of numbers.
    """
    unpickler = _PlainUnpickler(cast("IO[bytes]", _Bounded(file)), encoding="latin1")
    try:
        value = unpickler.load()
    except KeyError as error:
        raise ValueError(
            f"it has the opcode {bytes(error.args)!r}, which plain data has no need of; it was not executed"
        ) from error
    except (IndexError, TypeError, AttributeError, struct.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"a part of it does not fit what comes before it: {error}") from error
    except (MemoryError, OverflowError) as error:
        raise ValueError("a length in it is too large") from error
    if unpickler.stack or unpickler.metastack:
        raise ValueError("it leaves several values where one is expected")
    try:
        return _plain(value, {})
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """Returns the value with its arrays in place, and without the objects that only a pickle needs.

    Args:
        value: The value that was read.
        done: The results for lists and dictionaries by their identity, so that one with many references is converted
            once.
    """
    if isinstance(value, _Array):
        if value.values is None:
            raise ValueError("an array without content")
        return value.values
    if isinstance(value, (dict, list, tuple)):
        if id(value) not in done:
            # Marks the value as in progress, to detect one that contains itself.
            done[id(value)] = _IN_PROGRESS
            if isinstance(value, dict):
                done[id(value)] = {key: _plain(item, done) for key, item in value.items()}
            else:
                done[id(value)] = [_plain(item, done) for item in value]
        if done[id(value)] is _IN_PROGRESS:
            raise ValueError("a list or dictionary that holds itself")
        return done[id(value)]
    if isinstance(value, (str, bytes, int, float)) or value is None:
        return value
    raise ValueError(f"a {type(value).__name__} where plain data is expected")


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
    _Version(
        {"train": [f"{name}.bin" for name in _TEN], "test": ["test_batch.bin"]},
        {"label": "batches.meta.txt"},
        {"label": "label"},
    ),
    _Version(
        {"train": ["train.bin"], "test": ["test.bin"]},
        {"label": "fine_label_names.txt"},
        {"coarse": "coarse_label", "fine": "label"},
    ),
]
_PYTHON = [
    _Version({"train": _TEN, "test": ["test_batch"]}, {"batches.meta": "label_names"}, {"labels": "label"}),
    _Version(
        {"train": ["train"], "test": ["test"]},
        {"meta": "fine_label_names"},
        {"fine_labels": "label", "coarse_labels": "coarse_label"},
    ),
]


@dataclass(frozen=True)
class Cifar(base.SourceReader):
    """The folder of one of the four archives: images (32, 32, 3), `label`, and for CIFAR-100 `coarse_label`."""

    traits = FormatTraits(eval_fraction=0.1, has_named_parts=True)

    def files(self) -> list[File]:
        """Returns the files with images, the training data first, and the file with the names of the classes."""
        version, files_by_side = self._identify()
        names = self._names(version)
        return [*(file for files in files_by_side.values() for file in files), *([names] if names else [])]

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns `train` and `test`, with an input split for each file."""
        del run
        version, files_by_side = self._identify()
        read = (
            partial(_binary, list(version.labels.values())) if version in _BINARY else partial(_python, version.labels)
        )
        classes = self._classes(version)
        return [
            base.Part(
                side,
                [
                    base.InputSplit(None, partial(_tables, read, len(classes) if classes else None, file))
                    for file in files
                ],
                classes,
            )
            for side, files in files_by_side.items()
        ]

    def _identify(self) -> tuple[_Version, dict[str, list[File]]]:
        """Returns the version that the folder holds, and its files.

        Raises:
            DataError: The folder holds no version, or an incomplete one.
        """
        available = {file.name: file for file in files_in(self.path)} if is_folder(self.path) else {}
        for version in (*_BINARY, *_PYTHON):
            required = [name for names in version.files.values() for name in names]
            missing = [name for name in required if name not in available]
            if len(missing) < len(required):
                if missing:
                    raise DataError(
                        f"{self.path}: {', '.join(missing)} of CIFAR is missing. Unpack the whole archive again."
                    )
                return version, {side: [available[name] for name in names] for side, names in version.files.items()}
        raise DataError(
            f"{self.path}: no CIFAR files; expected the unpacked folder of one archive, such as cifar-10-batches-py"
            " with data_batch_1 to 5 and test_batch, or cifar-100-binary with train.bin and test.bin. Give that folder"
            " as input."
        )

    def _names(self, version: _Version) -> File | None:
        """Returns the file with the names of the classes, or None where it is missing."""
        [(first, second)] = version.meta.items()
        return find_file(self.path / (second if version in _BINARY else first))

    def _classes(self, version: _Version) -> tuple[str, ...] | None:
        """Returns the names of the classes, or None where their file is missing."""
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
            return tuple(file.location.read_text().split())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: {error}; expected the names of the classes, one a line. Download it again."
            ) from error


def _tables(read: Any, classes: int | None, file: File, refuse: base.Refuse) -> Iterator[pa.Table]:
    pixels, labels = read(file)
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    usable = np.ones(len(images), np.bool_) if classes is None else (labels["label"] >= 0) & (labels["label"] < classes)
    for row in np.flatnonzero(~usable):
        refuse(
            f"{file.name}:{row}", f"label {labels['label'][row]}; the {classes} classes allow 0 to {(classes or 0) - 1}"
        )
    rows = np.flatnonzero(usable)
    yield base.make_table(
        [f"{file.name}:{row}" for row in rows],
        {"image": images[rows], **{name: values[rows] for name, values in labels.items()}},
    )


def _binary(columns: list[str], file: File) -> tuple[Array, dict[str, Array]]:
    """Returns pixels (rows, 3072) and labels (rows,) of a file of records: labels of a byte each, then the pixels."""
    record = len(columns) + _PIXELS
    with file.open() as opened:
        if not file.size or file.size % record:
            raise DataError(
                f"{file}: {file.size} bytes are not a whole number of records of {record}; download it again."
            )
        records = np.frombuffer(opened.read(), np.uint8).reshape(-1, record)
    return records[:, len(columns) :], {name: records[:, i].astype(np.int64) for i, name in enumerate(columns)}


def _python(columns: dict[str, str], file: File) -> tuple[Array, dict[str, Array]]:
    """Returns pixels (rows, 3072) and labels (rows,) of a file of the python version."""
    content = _dictionary(file)
    pixels = content.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(f"{file}: no array `data` of {_PIXELS} bytes a row; it is no file of CIFAR. Download it again.")
    return pixels, {column: _integers(file, key, content.get(key), len(pixels)) for key, column in columns.items()}


def _integers(file: File, key: str, values: Any, rows: int) -> Array:
    """Returns the labels in a list of a pickle, int64 of shape (rows,)."""
    try:
        array = np.array(values)
    except ValueError:
        # The list holds lists of different lengths.
        array = np.array(None)
    if array.shape != (rows,) or not np.can_cast(array.dtype, np.int64):
        raise DataError(f"{file}: `{key}` are not {rows} integers, one for each image. Download it again.")
    return array.astype(np.int64)


def _dictionary(file: File) -> dict[str, Any]:
    """Returns the dictionary in a file of the python version, with text as keys."""
    try:
        with file.open() as stream:
            content = unpickle(stream)
    except ValueError as error:
        raise DataError(
            f"{file}: not a file of CIFAR's python version: {error}. Download it again from where it is published."
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: it holds no dictionary, so it is no file of CIFAR. Download it again.")
    return {_text(key): value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
