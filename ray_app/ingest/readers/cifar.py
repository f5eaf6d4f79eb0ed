"""Reader of CIFAR-10 and CIFAR-100 as they are published: the binary version, and the python version (pickles).

`unpickle` reads plain data from a pickle without executing it: it interprets the opcodes itself, and never imports or
calls anything. It accepts dictionaries, lists, tuples, numbers, text, bytes and NumPy arrays of numbers, as Python 2
and 3 write them in protocols 1 to 4. It refuses anything else, so that a pickle that would run code is an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Array
from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.storage.data_files import File, files_in, find_file, is_folder
from ray_app.storage.files import Location

_MARK, _EMPTY = object(), object()
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NAMES = {
    **{f"{module} _reconstruct": "array" for module in _NUMPY},
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
}
"""Names that are allowed in a pickle, and their meaning here; they are never imported."""
_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "STRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_PART_BYTES = 1 << 20
_IGNORED = ("PROTO", "FRAME", "STOP")


@dataclass
class _Array:
    """An array; its content comes later in the pickle."""

    values: np.ndarray | None = None


@dataclass
class _Name:
    """A name of `_NAMES`."""

    meaning: str


class _Bounded:
    """A file from which a damaged length reads no more bytes into memory than the file has."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.readline, self.tell = file.readline, file.tell

    def read(self, size: int) -> bytes:
        """Returns the next bytes, fewer at the end of the file."""
        parts = []
        while size > 0 and (part := self._file.read(min(size, _PART_BYTES))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def unpickle(file: IO[bytes]) -> Any:
    """Returns the data in a pickle, with text of Python 2 as `str`, byte for byte (latin-1).

    Raises:
        ValueError: The pickle is damaged, or holds something else than plain data and arrays.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, position in pickletools.genops(cast("IO[bytes]", _Bounded(file))):
            try:
                _apply(opcode.name, argument, stack, memo)
            except (IndexError, KeyError, TypeError, AttributeError, StopIteration) as error:
                raise ValueError(f"{opcode.name} at byte {position} does not fit what comes before it") from error
    except (MemoryError, OverflowError) as error:
        raise ValueError("a length in it is too large") from error
    if len(stack) != 1:
        raise ValueError(f"it leaves {len(stack)} values where one is expected")
    try:
        return _plain(stack[0], {})
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _apply(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Executes one opcode on the stack and the memo.

    Raises:
        ValueError: Plain data has no need of the opcode.
    """
    if name in _PUSHED:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name]())
    elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[argument])
    elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(tuple(_pop(stack, int(name[5:]) if name[5:] else None)))
    elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
        _fill(stack, _pop(stack, {"APPEND": 1, "SETITEM": 2}.get(name)), dict if name.startswith("SET") else list)
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        stack.append(_look_up_name(argument if name == "GLOBAL" else " ".join(_pop(stack, 2))))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_call(stack.pop(), arguments))
    elif name == "BUILD":
        _build(stack, memo, stack.pop())
    elif name not in _IGNORED:
        raise ValueError(f"it holds {name}, which plain data has no need of; it was not executed")


def _fill(stack: list[Any], values: list[Any], kind: type) -> None:
    """Adds values to the list, or keys and values to the dictionary, on top of the stack."""
    target = stack[-1]
    if type(target) is not kind:
        raise TypeError
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, dict):
        # Keys of other types may take forever to hash, or crash.
        if wrong := [key for key in values[::2] if not isinstance(key, (str, bytes, int))]:
            raise ValueError(
                f"a {type(wrong[0]).__name__} as a key of a dictionary; allowed are text, bytes and integers"
            )
        target.update(zip(values[::2], values[1::2], strict=True))


def _pop(stack: list[Any], count: int | None) -> list[Any]:
    """Takes the last `count` values off the stack, or those since the last mark, and returns them."""
    if count is None:
        count = next(i for i in range(len(stack)) if stack[-1 - i] is _MARK)
        values = stack[len(stack) - count :]
        del stack[len(stack) - count - 1 :]
        return values
    if count > len(stack):
        raise IndexError
    values = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return values


def _look_up_name(name: str) -> _Name:
    if name not in _NAMES:
        raise ValueError(
            f"it names {name.replace(' ', '.')}, which plain data has no need of; it was neither imported nor called"
        )
    return _Name(_NAMES[name])


def _call(name: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns the result that a call of an allowed name would have."""
    if not isinstance(name, _Name):
        raise TypeError
    if name.meaning == "array":
        return _Array()
    if name.meaning == "dtype":
        return _dtype(arguments[0])
    if name.meaning == "encode":
        text, encoding = arguments
        if encoding != "latin1":
            raise ValueError("bytes in another encoding than latin1")
        return text.encode("latin-1")
    raise TypeError


def _dtype(name: Any) -> np.dtype:
    if not isinstance(name, str):
        raise TypeError
    if name[:1] not in "biuf" or not name[1:].isdigit():
        raise ValueError(f"an array of {name!r}; allowed are numbers")
    return np.dtype(name)


def _build(stack: list[Any], memo: dict[int, Any], state: tuple[Any, ...]) -> None:
    """Fills in the value on top of the stack: the byte order of a dtype, or shape, dtype and content of an array."""
    target = stack[-1]
    if isinstance(target, np.dtype):
        ordered = target if state[1] not in "<>" else target.newbyteorder(state[1])
        stack[-1] = ordered
        memo.update({key: ordered for key, value in memo.items() if value is target})
        return
    if not isinstance(target, _Array) or len(state) != 5:
        raise TypeError
    _, shape, dtype, columns_first, content = state
    data = content.encode("latin-1") if isinstance(content, str) else content
    target.values = np.frombuffer(data, dtype).reshape(shape, order="F" if columns_first else "C")


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
            done[id(value)] = _EMPTY
            if isinstance(value, dict):
                done[id(value)] = {key: _plain(item, done) for key, item in value.items()}
            else:
                done[id(value)] = [_plain(item, done) for item in value]
        if done[id(value)] is _EMPTY:
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
class Cifar:
    """The folder of one of the four archives: images (32, 32, 3), `label`, and for CIFAR-100 `coarse_label`.

    Args:
        root: The folder.
    """

    root: Location

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
        available = {file.name: file for file in files_in(self.root)} if is_folder(self.root) else {}
        for version in (*_BINARY, *_PYTHON):
            required = [name for names in version.files.values() for name in names]
            missing = [name for name in required if name not in available]
            if len(missing) < len(required):
                if missing:
                    raise DataError(
                        f"{self.root}: {', '.join(missing)} of CIFAR is missing. Unpack the whole archive again."
                    )
                return version, {side: [available[name] for name in names] for side, names in version.files.items()}
        raise DataError(
            f"{self.root}: no CIFAR files; expected the unpacked folder of one archive, such as cifar-10-batches-py"
            " with data_batch_1 to 5 and test_batch, or cifar-100-binary with train.bin and test.bin. Give that folder"
            " as input."
        )

    def _names(self, version: _Version) -> File | None:
        """Returns the file with the names of the classes, or None where it is missing."""
        [(first, second)] = version.meta.items()
        return find_file(self.root / (second if version in _BINARY else first))

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
