"""Reader of TFRecord files of `tf.train.Example`, as TensorFlow writes them, without TensorFlow.

A record is the length of its data (8 bytes), a checksum of these, the data, and a checksum of the data; a file is
records, or gzip of them. The checksums are CRC-32C, masked as in
https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from ray_app.config.import_paths import require
from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.ingest.readers.base import match_files
from ray_app.ingest.readers.hugging_face import need_all_numbers
from ray_app.ingest.readers.image_folders import NOT_AN_IMAGE
from ray_app.storage.data_files import File, parser_errors

MAX_RECORD_BYTES = 512 << 20
_IMAGE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|RIFF.{4}WEBP", re.DOTALL)
_FILE = re.compile(r"\.tfrecord|-\d{5}-of-\d{5}")
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|eval)(?=[-_.]|$)")
_DTYPES: dict[str, np.dtype] = {"float_list": np.dtype(np.float32), "int64_list": np.dtype(np.int64)}

Kind = tuple[str, int]
"""Of a feature: `bytes_list`, `float_list` or `int64_list`, and how many values a row has."""


@dataclass(frozen=True)
class TFRecord:
    """TFRecord files.

    Args:
        pattern: A folder with them, one of them, or a pattern as of `matching`.
        label: Feature of one integer that becomes `label`; None: the one of this name, if there is one.
        columns: Features to keep; None: all.
        check: Whether to decode every image: values of features that hold one in the first row.
        piece_bytes: Most bytes of files that one task reads.
    """

    pattern: str
    label: str | None
    columns: list[str] | None
    check: bool
    piece_bytes: int

    def files(self) -> list[File]:
        """The files of every split."""
        return [file for files in self._splits.values() for file in files]

    def parts(self, run: base.Run) -> list[base.Part]:
        """One part, or one for each split that the names of the files tell; its columns are the features of its first
        row.
        """
        del run
        require("google_crc32c", "--source tfrecord")
        parts = []
        for split, files in self._splits.items():
            form = self._form(files)
            pieces = [
                base.InputSplit(None, partial(_tables, form, some))
                for some in base.group_files(files, self.piece_bytes)
            ]
            parts.append(base.Part(split, pieces))
        return parts

    @cached_property
    def _splits(self) -> dict[str, list[File]]:
        """The files by split; all under "" where their names tell none, or the same.

        Raises:
            DataError: Some names tell a split and some do not, or one of several numbered files is missing.
        """
        found = match_files(self.pattern, lambda name: bool(_FILE.search(name)), "TFRecord file")
        need_all_numbers(self.pattern, found)
        splits: dict[str, list[File]] = {}
        for file in found:
            told = _SPLIT.search(file.name)
            splits.setdefault(told[1] if told else "", []).append(file)
        if len(splits) > 1 and "" in splits:
            raise DataError(
                f"{self.pattern}: {splits[''][0].name} does not say whether it is of"
                f" {' or '.join(sorted(splits.keys() - {''}))}, as the"
                " others do. Give the files of one split at a time, by a pattern."
            )
        return splits if len(splits) > 1 else {"": found}

    def _form(self, files: list[File]) -> _Form:
        """What every row is held against, by the first one.

        Raises:
            DataError: There is no row, or a feature cannot be kept.
        """
        first = next(((file, data) for file in files for _, data in _records(file)), None)
        if first is None:
            raise DataError(f"{self.pattern}: no record in these files. Give files with records.")
        file, data = first
        with parser_errors(file, "Its first record is no tf.train.Example; allowed are TFRecord files of these."):
            values = _features(data)
        names = sorted(values)
        label = self.label or ("label" if "label" in values else None)
        if missing := [name for name in [*(self.columns or []), *([label] if label else [])] if name not in values]:
            raise DataError(
                f"{file}: no feature {missing[0]!r} in the first row; the features are {names}. Name one of them."
            )
        keep = [name for name in names if self.columns is None or name in {*self.columns, label}]
        if label not in (None, "label") and "label" in keep:
            raise DataError(
                f"{file}: {label!r} is to become 'label', but there is another feature 'label'. Leave it out by"
                f" columns."
            )
        if label and (given := (values[label][0], len(values[label][1]))) != ("int64_list", 1):
            raise DataError(
                f"{file}: label {label!r} is a {given[0]} of {given[1]} in the first row; allowed is one integer."
            )
        kinds = {name: (kind, len(found)) for name, (kind, found) in values.items() if name in keep}
        for name, (kind, count) in kinds.items():
            if not count or (kind == "bytes_list" and count > 1):
                raise DataError(
                    f"{file}: the feature {name!r} has {count} values ({kind}) in the first row; allowed are one or"
                    f" more numbers, or one"
                    " string of bytes. Leave it out by naming the columns to keep."
                )
        images = {
            name for name, (kind, _) in kinds.items() if kind == "bytes_list" and _IMAGE.match(values[name][1][0])
        }
        return _Form(kinds, label, images if self.check else set())


@dataclass(frozen=True)
class _Form:
    """Kind of each feature that is kept, the one that becomes `label`, and those whose images are decoded to check
    them.
    """

    kinds: dict[str, Kind]
    label: str | None
    images: set[str]


def _tables(form: _Form, files: list[File], refuse: base.Refuse) -> Iterator[pa.Table]:
    rows = (row for file in files for row in _usable(form, file, refuse))
    for block in base.batch_rows(rows, lambda row: row[2]):
        columns: dict[str, Any] = {}
        for name, (kind, count) in form.kinds.items():
            found = [row[1][name] for row in block]
            column = "label" if name == form.label else name
            if kind == "bytes_list":
                columns[column] = pa.array([values[0] for values in found], pa.binary())
            else:
                array = np.array(found, _DTYPES[kind])
                columns[column] = array if count > 1 else array[:, 0]
        yield base.make_table([row[0] for row in block], columns)


def _usable(form: _Form, file: File, refuse: base.Refuse) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Id, values by feature, and bytes of every row that can be used."""
    for number, (_, data) in enumerate(_records(file)):
        row_id = f"{file.name}:{number}"
        try:
            yield row_id, _values(form, data), len(data)
        except ValueError as error:
            refuse(row_id, str(error))


def _values(form: _Form, data: bytes) -> dict[str, Any]:
    """The values of a row by feature.

    Raises:
        ValueError: It cannot be used.
    """
    found, values = _features(data), {}
    for name, expected in form.kinds.items():
        kind, values[name] = found.get(name, ("nothing", ()))
        if (kind, len(values[name])) != expected:
            raise ValueError(
                f"feature {name!r} has {len(values[name])} values ({kind}), in the first row {expected[1]}"
                f" ({expected[0]})"
            )
        if name in form.images and (reason := base.explain_undecodable(values[name][0])):
            raise ValueError(f"{name}: {NOT_AN_IMAGE.format(reason)}")
    return values


def _features(data: bytes) -> dict[str, tuple[str, Any]]:
    """Kind and values of each feature of a `tf.train.Example`.

    Raises:
        ValueError: It is none.
    """
    from google.protobuf.message import DecodeError

    try:
        example = _example().FromString(data)
    except DecodeError as error:
        raise ValueError(f"no tf.train.Example: {error}") from error
    if example.feature_lists:
        raise ValueError("a tf.train.SequenceExample; allowed is tf.train.Example")
    features = {name: (feature.WhichOneof("kind"), feature) for name, feature in example.features.feature.items()}
    if not features:
        raise ValueError("no tf.train.Example with features")
    return {
        name: (kind or "nothing", getattr(feature, kind).value if kind else ())
        for name, (kind, feature) in features.items()
    }


@cache
def _example() -> Any:
    """The class of `tf.train.Example`, of a pool of its own, beside whatever TensorFlow brings where it is installed.

    `feature_lists` is what a `tf.train.SequenceExample` has besides.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

    def message(name: str, *fields: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "field": [{"label": "LABEL_OPTIONAL", "number": i, **field} for i, field in enumerate(fields, 1)],
            **more,
        }

    def of(name: str, message: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "type": "TYPE_MESSAGE", "typeName": f".example.{message}", **more}

    lists = {"bytes_list": "TYPE_BYTES", "float_list": "TYPE_FLOAT", "int64_list": "TYPE_INT64"}
    entry = message(
        "FeatureEntry", {"name": "key", "type": "TYPE_STRING"}, of("value", "Feature"), options={"mapEntry": True}
    )
    described = {
        "name": "example.proto",
        "package": "example",
        "syntax": "proto3",
        "messageType": [
            *(
                message(name, {"name": "value", "label": "LABEL_REPEATED", "type": kind})
                for name, kind in lists.items()
            ),
            message("Feature", *(of(name, name, oneofIndex=0) for name in lists), oneofDecl=[{"name": "kind"}]),
            message("Features", of("feature", "Features.FeatureEntry", label="LABEL_REPEATED"), nestedType=[entry]),
            message("Example", of("features", "Features"), {"name": "feature_lists", "type": "TYPE_BYTES"}),
        ],
    }
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(described, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("example.Example"))


def _records(file: File) -> Iterator[tuple[int, bytes]]:
    """Where each record of a file begins (unpacked), and its data.

    Raises:
        DataError: The file is damaged, with the byte where the record begins.
    """
    at = 0
    with (
        parser_errors(file, "The file is damaged or no TFRecord file, plain or gzipped; write it again."),
        _opened(file) as stream,
    ):
        while head := stream.read(12):
            length = _checked(head, 8, f"the length at byte {at}")
            (size,) = struct.unpack("<Q", length)
            if size > MAX_RECORD_BYTES:
                raise ValueError(f"the record at byte {at} has {size} bytes; allowed are {MAX_RECORD_BYTES}")
            yield at, _checked(stream.read(size + 4), size, f"the record at byte {at}")
            at += size + 16


def _opened(file: File) -> IO[bytes]:
    """Opens a file; it is gzipped if it looks so, whatever it is called, and does not begin with a length and its
    checksum.
    """
    stream = file.open()
    head = stream.read(12)
    stream.seek(0)
    if not head.startswith(b"\x1f\x8b") or (len(head) == 12 and struct.unpack("<I", head[8:])[0] == _masked(head[:8])):
        return stream
    return cast(IO[bytes], gzip.open(stream))


def _checked(read: bytes, size: int, what: str) -> bytes:
    """The first `size` bytes of what was read, which their checksum follows.

    Raises:
        EOFError, ValueError: The file ended, or the checksum is of other bytes.
    """
    if len(read) < size + 4:
        raise EOFError(f"the file ends in {what}")
    data = read[:size]
    if struct.unpack("<I", read[size:])[0] != _masked(data):
        raise ValueError(f"{what} does not have its checksum")
    return data


def _masked(data: bytes) -> int:
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
