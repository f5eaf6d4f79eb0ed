"""Reader of TFRecord files of `tf.train.Example`, as TensorFlow writes them, without TensorFlow.

A record is the length of its data (8 bytes), a checksum of these, the data, and a checksum of the data; a file is
records, or gzip of them. The checksums are CRC-32C, masked as in
https://www.tensorflow.org/tutorials/load_data/tfrecord. TensorFlow itself is not used: it is a second framework in each
process, and it names no row that cannot be used.
"""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import IO, Any, cast

import pyarrow as pa

from ray_app.config.import_paths import require
from ray_app.data.arrays import is_list
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.converter import ANY, Form, Shape, learn_classes, make_form
from ray_app.ingest.readers.hugging_face import group_by_split, need_all_numbers
from ray_app.ingest.readers.sources import match_files
from ray_app.storage.data_files import File, has_image_signature, parser_errors

MAX_RECORD_BYTES = 512 << 20
_FILE = re.compile(r"\.tfrecord|-\d{5}-of-\d{5}")
_RAGGED_ADVICE = "; if the length differs between rows, name the feature in --ragged"
_TYPES = {"float_list": pa.float32(), "int64_list": pa.int64(), "bytes_list": pa.binary()}
_KINDS = {**{kind: name for name, kind in _TYPES.items()}, pa.string(): "bytes_list"}


class TFRecord(sources.SourceReader):
    """TFRecord files; an image is a feature that holds one in the first row."""

    traits = FormatTraits(
        leaves_out_columns=True,
        options=frozenset({"label", "classes", "columns", "ragged", "targets", "check"}),
    )

    def files(self) -> list[File]:
        """Returns the files of every split."""
        return [file for files in self._splits.values() for file in files]

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns one part, or one for each split; its columns are the features of its first row.

        A label of text takes a pass over all records to find the classes.
        """
        require("google_crc32c", "--source tfrecord")
        forms = {split: self._form(files) for split, files in self._splits.items()}
        learn = partial(_label_texts, next(iter(forms.values())).label or "")
        return [
            sources.Part(split, self.input_splits(self._splits[split], partial(_tables, form)), form.classes)
            for split, form in learn_classes(self, run, learn, "label", forms, self._splits).items()
        ]

    @cached_property
    def _splits(self) -> dict[str, list[File]]:
        files = match_files(self.pattern, lambda name: bool(_FILE.search(name)), "TFRecord file")
        need_all_numbers(self.pattern, files)
        return group_by_split(self.pattern, files, ".tfrecord")

    @cached_property
    def _ragged_kinds(self) -> dict[str, str]:
        """The kind of each feature of the option `ragged`, from the first record with a value of it, in any split."""
        missing, kinds = set(self.options.ragged or ()), dict[str, str]()
        for file in self.files():
            for data in _records(file) if missing else ():
                # Reading the rows refuses a record that is no example.
                with suppress(ValueError):
                    kinds |= {n: kind for n, (kind, items) in _features(data).items() if items and n in missing}
                    missing -= kinds.keys()
                if not missing:
                    break
        return kinds

    def _form(self, files: list[File]) -> Form:
        """Returns the form that every row must have: that of the first one."""
        first = next(((file, data) for file in files for data in _records(file)), None)
        if first is None:
            raise DataError(f"{self.pattern}: no record in these files. Add files with records.")
        file, data = first
        with parser_errors(file, "The first record is not a tf.train.Example, which is the only allowed type."):
            values = _features(data)
        label, where = self.options.label or self.default_label(values), f"{file}: the first row"
        ragged = dict.fromkeys(self.options.ragged or (), pa.null())
        ragged |= {name: pa.list_(_TYPES[kind]) for name, kind in self._ragged_kinds.items()}
        types = {name: _type_of(*feature, name == label) for name, feature in values.items()} | ragged
        schema = pa.schema(sorted(types.items()))

        def find_shapes(names: list[str]) -> dict[str, Shape]:
            shapes: dict[str, Shape] = {name: (ANY,) if name in ragged else (len(values[name][1]),) for name in names}
            if empty := [name for name, shape in shapes.items() if shape == (0,)]:
                raise DataError(f"{where}: the feature {empty[0]!r} has 0 values{_RAGGED_ADVICE}.")
            return shapes

        images = frozenset(n for n, (_, items) in values.items() if items and _is_image(items[0]))
        return make_form(self, where, schema, label, "feature", find_shapes, images=images)


def _type_of(kind: str, items: Sequence[Any], is_label: bool) -> pa.DataType:
    """Returns the type of the column of a feature with these values in the first row."""
    item = pa.string() if is_label and kind == "bytes_list" else _TYPES.get(kind, pa.int64())
    return item if len(items) == 1 else pa.list_(pa.binary() if kind == "bytes_list" else item)


def _is_image(value: Any) -> bool:
    return isinstance(value, bytes) and has_image_signature(value)


def _label_texts(label: str, files: list[File]) -> set[str]:
    """Returns the labels in files as texts; rows that cannot be used, which reading refuses, have none."""
    texts = set[str]()
    for file in files:
        for data in _records(file):
            with suppress(ValueError):
                _, values = _features(data).get(label, ("", ()))
                texts.update(value.decode() for value in values if isinstance(value, bytes) and len(values) == 1)
    return texts - {""}


def _tables(form: Form, files: list[File], refuse: sources.Refuse) -> Iterator[pa.Table]:
    rows = (row for file in files for row in _usable(form, file, refuse))
    for block in sources.batch_rows(rows, lambda row: row[2]):
        columns = zip(form.schema.types, *(row[1] for row in block), strict=True)
        table = pa.table([pa.array(values, kind) for kind, *values in columns], form.schema)
        yield from form.convert(files[0], table, [row[0] for row in block], refuse)


def _usable(form: Form, file: File, refuse: sources.Refuse) -> Iterator[tuple[str, list[Any], int]]:
    """Yields id, values by column, and bytes of every row with features of the kinds of the form."""
    for number, data in enumerate(_records(file)):
        row_id = f"{file.name}:{number}"
        try:
            features = _features(data)
            values = [_value(column, *features.get(column.name, ("nothing", ()))) for column in form.schema]
        except ValueError as error:
            refuse(row_id, str(error))
        else:
            yield row_id, values, len(data)


def _value(column: pa.Field, kind: str, items: Sequence[Any]) -> Any:
    """Returns the value of a row in a column; TensorFlow writes a list without values as a feature without a kind."""
    is_several, name = is_list(column.type), column.name
    expected = _KINDS[column.type.value_type if is_several else column.type]
    if items and kind != expected:
        raise ValueError(f"feature {name!r} is a {kind}; other rows have {expected}")
    if is_several:
        return list(items)
    if len(items) != 1:
        advice = "" if expected == "bytes_list" else _RAGGED_ADVICE
        raise ValueError(f"feature {name!r} has {len(items)} values ({kind}), in the first row 1 ({expected}){advice}")
    try:
        return items[0].decode() if pa.types.is_string(column.type) else items[0]
    except UnicodeDecodeError as error:
        raise ValueError(f"label {name!r} is not UTF-8 text: {error}") from error


def _features(data: bytes) -> dict[str, tuple[str, Any]]:
    """Returns kind and values of each feature of a `tf.train.Example`."""
    from google.protobuf.message import DecodeError

    try:
        example = _example().FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a tf.train.Example: {error}") from error
    if example.feature_lists:
        raise ValueError("a tf.train.SequenceExample; allowed is tf.train.Example")
    features = {name: (feature.WhichOneof("kind"), feature) for name, feature in example.features.feature.items()}
    if not features:
        raise ValueError("not a tf.train.Example with features")
    return {
        name: (kind or "nothing", getattr(feature, kind).value if kind else ())
        for name, (kind, feature) in features.items()
    }


@cache
def _example() -> Any:
    """Returns the class of `tf.train.Example`, in a descriptor pool that cannot conflict with an installed TensorFlow.

    `feature_lists` is the field that only a `tf.train.SequenceExample` has.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

    def message(name: str, *fields: dict[str, Any], **more: Any) -> dict[str, Any]:
        numbered = [{"label": "LABEL_OPTIONAL", "number": i, **field} for i, field in enumerate(fields, 1)]
        return {"name": name, "field": numbered, **more}

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
            *(message(name, {"name": "value", "label": "LABEL_REPEATED", "type": t}) for name, t in lists.items()),
            message("Feature", *(of(name, name, oneofIndex=0) for name in lists), oneofDecl=[{"name": "kind"}]),
            message("Features", of("feature", "Features.FeatureEntry", label="LABEL_REPEATED"), nestedType=[entry]),
            message("Example", of("features", "Features"), {"name": "feature_lists", "type": "TYPE_BYTES"}),
        ],
    }
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(described, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("example.Example"))


def _records(file: File) -> Iterator[bytes]:
    """Yields the data of each record of a file."""
    offset = 0
    with (
        parser_errors(file, "The file is damaged or not a TFRecord file, plain or gzipped; write it again."),
        _open_records(file) as stream,
    ):
        while head := stream.read(12):
            length = _verify_checksum(head, 8, f"the length at byte {offset}")
            (size,) = struct.unpack("<Q", length)
            if size > MAX_RECORD_BYTES:
                raise ValueError(f"the record at byte {offset} has {size} bytes; allowed are {MAX_RECORD_BYTES}")
            yield _verify_checksum(stream.read(size + 4), size, f"the record at byte {offset}")
            offset += size + 16


def _open_records(file: File) -> IO[bytes]:
    """Opens a file, and uncompresses it if its content is gzip, whatever its name is.

    The content is gzip if it begins with the mark of gzip and not with a length and the checksum of the length.
    """
    stream = file.open()
    head = stream.read(12)
    stream.seek(0)
    if not head.startswith(b"\x1f\x8b") or (len(head) == 12 and struct.unpack("<I", head[8:])[0] == _masked(head[:8])):
        return stream
    return cast(IO[bytes], gzip.open(stream))


def _verify_checksum(raw: bytes, size: int, section: str) -> bytes:
    """Returns the first `size` bytes of `raw` after a check of the checksum that follows them."""
    if len(raw) < size + 4:
        raise EOFError(f"the file ends in {section}")
    data = raw[:size]
    if struct.unpack("<I", raw[size:])[0] != _masked(data):
        raise ValueError(f"{section} does not match its checksum")
    return data


def _masked(data: bytes) -> int:
    """Returns the masked CRC-32C of the TFRecord format."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
