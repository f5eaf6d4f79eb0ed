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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from ray_app.config.import_paths import require
from ray_app.data.arrays import to_list_array
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import base
from ray_app.ingest.readers.base import match_files
from ray_app.ingest.readers.converter import ANY, learn_classes, to_class_indices
from ray_app.ingest.readers.hugging_face import need_all_numbers
from ray_app.ingest.readers.image_files import NOT_AN_IMAGE, ObjectRow, name_classes, object_tables
from ray_app.storage.data_files import File, parser_errors
from ray_app.task.images import has_orientation
from ray_app.task.ragged import Ragged

MAX_RECORD_BYTES = 512 << 20
_IMAGE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|RIFF.{4}WEBP", re.DOTALL)
_FILE = re.compile(r"\.tfrecord|-\d{5}-of-\d{5}")
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|eval)(?=[-_.]|$)")
_RAGGED_ADVICE = "; if its length differs from row to row, name it in --ragged"
_OBJECT = "image/object/"
"""Beginning of the names of the features of boxes in TensorFlow's Object Detection API."""
_LABEL = _OBJECT + "class/label"
_LABEL_KINDS = (("int64_list", 1), ("float_list", 1), ("bytes_list", 1))
_DTYPES: dict[str, np.dtype] = {"float_list": np.dtype(np.float32), "int64_list": np.dtype(np.int64)}

Kind = tuple[str, int]
"""Of a feature: `bytes_list`, `float_list` or `int64_list`, and how many values a row has; `ANY` if `ragged`."""


class TFRecord(base.SourceReader):
    """TFRecord files; an image is a feature that holds one in the first row."""

    traits = FormatTraits(
        leaves_out_columns=True,
        options=frozenset({"label", "classes", "columns", "ragged", "targets", "boxes", "check"}),
    )

    def files(self) -> list[File]:
        """Returns the files of every split."""
        return [file for files in self._splits.values() for file in files]

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns one part, or one for each split; its columns are the features of its first row.

        A label of text takes a pass over all records to find the classes.
        """
        require("google_crc32c", "--source tfrecord")
        if self.options.boxes:
            return self._parts_with_boxes(run)
        forms = {split: self._form(files) for split, files in self._splits.items()}
        learn = partial(_label_texts, next(iter(forms.values())).label or "")
        classes = learn_classes(self, run, learn, "label", forms, self._splits)
        if classes is None and self.options.classes:
            classes = tuple(self.options.classes)
        forms = {split: replace(form, classes=classes) for split, form in forms.items()}
        return [
            base.Part(split, self.input_splits(files, partial(_tables, forms[split])), classes)
            for split, files in self._splits.items()
        ]

    def _parts_with_boxes(self, run: base.Run) -> list[base.Part]:
        """Returns the parts of images with boxes; a pass over all records finds the classes."""
        facts = {
            split: _ObjectFacts.joined(run(_learn_objects, base.group_files(files, self.options.split_bytes)))
            for split, files in self._splits.items()
        }
        together = _ObjectFacts.joined(facts.values())
        if repeated := [label for label, names in sorted(together.names.items()) if len(names) > 1]:
            names = sorted(together.names[repeated[0]])
            raise DataError(f"{self.pattern}: class {repeated[0]} is called {names}. Give it one name.")
        count = together.max_label
        # Without a row that can be used, reading says why.
        if (together.images and not count) or count > base.MAX_CLASSES:
            problem = f"a box is of class {count}" if count else f"no record has a box ({_OBJECT}bbox/xmin and others)"
            raise DataError(f"{self.pattern}: {problem}; expected 1 to {base.MAX_CLASSES} classes of boxes.")
        classes = name_classes(self.pattern, [min(together.names.get(i, {str(i)})) for i in range(1, count + 1)])
        tables = partial(_object_tables, self.options.check)
        return [
            base.Part(split, self.input_splits(files, tables), classes, notes=facts[split].notes())
            for split, files in self._splits.items()
        ]

    @cached_property
    def _splits(self) -> dict[str, list[File]]:
        """The files by split; all under "" where their names have no split, or the same one."""
        files = match_files(self.pattern, lambda name: bool(_FILE.search(name)), "TFRecord file")
        need_all_numbers(self.pattern, files)
        splits: dict[str, list[File]] = {}
        for file in files:
            match = _SPLIT.search(file.name)
            splits.setdefault(match[1] if match else "", []).append(file)
        if len(splits) > 1 and "" in splits:
            raise DataError(
                f"{self.pattern}: {splits[''][0].name} does not say whether it is of"
                f" {' or '.join(sorted(splits.keys() - {''}))}, as the others do. Give the files of one split at a"
                " time, by a pattern."
            )
        return splits if len(splits) > 1 else {"": files}

    @cached_property
    def _ragged_kinds(self) -> dict[str, Kind]:
        """The kinds of the features of the option `ragged`, each from the first row with values, in any split.

        Raises:
            DataError: A feature is not kept, holds no numbers, or has no value in any row.
        """
        missing, kinds = set(self.options.ragged or []), dict[str, Kind]()
        kept = self.options.kept_columns
        if left_out := sorted(missing - set(missing if kept is None else kept)):
            raise DataError(
                f"{self.pattern}: ragged names {left_out[0]!r}, but columns keeps {self.options.columns}. Name it"
                " there, too, or leave it out of ragged."
            )
        for file in self.files():
            for _, data in _records(file) if missing else ():
                try:
                    features = _features(data)
                except ValueError:
                    # Reading the rows refuses this one.
                    continue
                for name in sorted(missing & {name for name, (_, items) in features.items() if items}):
                    kind = features[name][0]
                    if kind == "bytes_list":
                        raise DataError(f"{file}: ragged names {name!r}, a {kind}; allowed are features of numbers.")
                    kinds[name] = (kind, ANY)
                    missing.remove(name)
                if not missing:
                    break
        if missing:
            raise DataError(
                f"{self.pattern}: ragged names {sorted(missing)[0]!r}, of which no record has a value. Leave it out."
            )
        return kinds

    def _form(self, files: list[File]) -> _TFRecordForm:
        """Returns the form that every row must have: that of the first one."""
        first = next(((file, data) for file in files for _, data in _records(file)), None)
        if first is None:
            raise DataError(f"{self.pattern}: no record in these files. Give files with records.")
        file, data = first
        with parser_errors(file, "Its first record is no tf.train.Example; allowed are TFRecord files of these."):
            values = _features(data)
        ragged = self._ragged_kinds
        names = sorted({*values, *ragged})
        label = self.options.label or self.default_label(values)
        keep = self.kept_columns(f"{file}: the first row", names, label, "feature")
        if label in ragged:
            raise DataError(f"{file}: ragged names the label {label!r}; allowed are other features.")
        if label and (label_kind := (values[label][0], len(values[label][1]))) not in _LABEL_KINDS:
            raise DataError(
                f"{file}: label {label!r} is a {label_kind[0]} of {label_kind[1]} in the first row; allowed are one"
                " number and one text."
            )
        kinds = {name: ragged.get(name) or (values[name][0], len(values[name][1])) for name in names if name in keep}
        for name, (kind, count) in kinds.items():
            if not count or (kind == "bytes_list" and count > 1):
                raise DataError(
                    f"{file}: the feature {name!r} has {count} values ({kind}) in the first row; allowed are one or"
                    " more numbers, or one string of bytes. Leave it out by naming the columns to keep"
                    + (_RAGGED_ADVICE if kind != "bytes_list" else "")
                    + "."
                )
        images = {
            name for name, (kind, _) in kinds.items() if kind == "bytes_list" and _IMAGE.match(values[name][1][0])
        }
        return _TFRecordForm(kinds, label, images if self.options.check else set())


@dataclass(frozen=True)
class _TFRecordForm:
    """The form of a row, with the kind of each feature that is kept."""

    kinds: dict[str, Kind]
    label: str | None
    images: set[str]
    classes: tuple[str, ...] | None = None

    @property
    def has_text_label(self) -> bool:
        """Whether the label is text, from which class indices are made."""
        return self.label is not None and self.kinds[self.label][0] == "bytes_list"


def _label_texts(label: str, files: list[File]) -> set[str]:
    """Returns the labels in files as texts; rows that cannot be used, which reading refuses, have none."""
    texts = set[str]()
    for file in files:
        for _, data in _records(file):
            with suppress(ValueError):
                _, values = _features(data).get(label, ("", ()))
                texts.update(value.decode() for value in values if isinstance(value, bytes) and len(values) == 1)
    return texts - {""}


def _tables(form: _TFRecordForm, files: list[File], refuse: base.Refuse) -> Iterator[pa.Table]:
    rows = (row for file in files for row in _usable(form, file, refuse))
    for block in base.batch_rows(rows, lambda row: row[2]):
        columns: dict[str, Any] = {}
        for name, (kind, count) in form.kinds.items():
            values = [row[1][name] for row in block]
            column = "label" if name == form.label else name
            if column == "label" and form.classes is not None:
                labels = [items[0].decode() if kind == "bytes_list" else items[0] for items in values]
                columns[column] = to_class_indices(pa.array(labels), form.classes)
            elif kind == "bytes_list":
                columns[column] = pa.array([items[0] for items in values], pa.binary())
            elif count == ANY:
                columns[column] = to_list_array(Ragged.of(values, _DTYPES[kind]))
            else:
                array = np.array(values, _DTYPES[kind])
                columns[column] = array if count > 1 else array[:, 0]
        yield base.make_table([row[0] for row in block], columns)


@dataclass
class _ObjectFacts:
    """What one pass finds in rows that can be used: names by class, the largest class, images, and crowds."""

    names: dict[int, set[str]] = field(default_factory=dict)
    max_label: int = 0
    images: int = 0
    images_without_box: int = 0
    crowds: int = 0

    @classmethod
    def joined(cls, several: Iterable[_ObjectFacts]) -> _ObjectFacts:
        """Returns the facts of several files together."""
        total = cls()
        for facts in several:
            for label, names in facts.names.items():
                total.names.setdefault(label, set()).update(names)
            total.max_label = max(total.max_label, facts.max_label)
            total.images += facts.images
            total.images_without_box += facts.images_without_box
            total.crowds += facts.crowds
        return total

    def notes(self) -> tuple[str, ...]:
        """Returns the notes for the user."""
        notes = {
            f"{self.crowds} crowds ({_OBJECT}is_crowd) are no boxes.": self.crowds,
            f"{self.images_without_box} of {self.images} images have no box; they are rows without objects.": (
                self.images_without_box
            ),
        }
        return tuple(note for note, count in notes.items() if count)


def _learn_objects(files: list[File]) -> _ObjectFacts:
    """Returns the facts of the boxes in files; rows that reading refuses count in none of them."""
    facts = _ObjectFacts()
    for _, data in (record for file in files for record in _records(file)):
        with suppress(ValueError):
            features = _features(data)
            row = _object_row("", features)
            labels = _values_of(features, _LABEL, "int64_list")
            for label, name in zip(labels, _class_names(features, labels), strict=True):
                facts.names.setdefault(label, set()).update([name] if name else [])
            facts.max_label = max([facts.max_label, *labels])
            facts.images += 1
            facts.images_without_box += not row.boxes
            facts.crowds += len(labels) - len(row.labels)
    # A class without a name is known by its number.
    facts.names = {label: names for label, names in facts.names.items() if names}
    return facts


def _class_names(features: dict[str, tuple[str, Any]], labels: list[int]) -> list[str]:
    """Returns the name of the class of each box, "" without names; raises ValueError if some have one."""
    texts = _values_of(features, _OBJECT + "class/text", "bytes_list")
    if texts and len(texts) != len(labels):
        raise ValueError(
            f"it has {len(texts)} names of classes for {len(labels)} boxes; expected one for each, or none"
        )
    try:
        return [text.decode() for text in texts] or [""] * len(labels)
    except UnicodeDecodeError as error:
        raise ValueError(f"the name of a class is no UTF-8 text: {error}") from error


def _values_of(features: dict[str, tuple[str, Any]], name: str, expected: str) -> list[Any]:
    """Returns the values of a feature, none if it is absent; raises ValueError for one of another kind."""
    kind, values = features.get(name, (expected, ()))
    if values and kind != expected:
        raise ValueError(f"feature {name!r} is of kind {kind}; expected {expected}")
    return list(values)


def _object_tables(check: bool, files: list[File], refuse: base.Refuse) -> Iterator[pa.Table]:
    yield from object_tables(check, False, (row for file in files for row in _object_rows(file)), refuse)


def _object_rows(file: File) -> Iterator[ObjectRow]:
    """Yields the rows of a file of the form of TensorFlow's Object Detection API.

    The form is that of https://github.com/tensorflow/models/blob/master/research/object_detection/g3doc/using_your_own_dataset.md
    """
    for number, (_, data) in enumerate(_records(file)):
        row_id = f"{file.name}:{number}"
        try:
            yield _object_row(row_id, _features(data))
        except ValueError as error:
            yield ObjectRow(row_id, None, reason=str(error))


def _object_row(row_id: str, features: dict[str, tuple[str, Any]]) -> ObjectRow:
    images = _values_of(features, "image/encoded", "bytes_list")
    if len(images) != 1:
        raise ValueError(f"it has {len(images)} values of 'image/encoded'; expected one image")
    sides = [_values_of(features, f"{_OBJECT}bbox/{side}", "float_list") for side in ("xmin", "ymin", "xmax", "ymax")]
    labels = _values_of(features, _LABEL, "int64_list")
    _class_names(features, labels)
    if len(counts := {len(values) for values in (*sides, labels)}) > 1:
        raise ValueError(
            f"it has {len(sides[0])} boxes by {_OBJECT}bbox/xmin and {len(labels)} labels, and the numbers of all"
            f" sides are {sorted(counts)}; expected one value of each for a box"
        )
    if labels and min(labels) < 1:
        raise ValueError(f"a box is of class {min(labels)}; classes count from 1")
    crowds = _values_of(features, _OBJECT + "is_crowd", "int64_list") or [0] * len(labels)
    if len(crowds) != len(labels):
        raise ValueError(f"it has {len(crowds)} values of {_OBJECT}is_crowd for {len(labels)} boxes")
    if has_orientation(images[0]):
        raise ValueError(
            "its EXIF orientation turns it as viewers show it, and TensorFlow decodes it as stored, so its boxes would"
            " not fit. Write the image without an orientation"
        )
    size = [_values_of(features, f"image/{side}", "int64_list") for side in ("width", "height")]
    boxes = [box for box, crowd in zip(zip(*sides, strict=True), crowds, strict=True) if not crowd]
    return ObjectRow(
        row_id,
        images[0],
        tuple(boxes),
        tuple(label for label, crowd in zip(labels, crowds, strict=True) if not crowd),
        size=(size[0][0], size[1][0]) if all(len(one) == 1 for one in size) else None,
        is_fraction=True,
    )


def _usable(form: _TFRecordForm, file: File, refuse: base.Refuse) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields id, values by feature, and bytes of every row that can be used."""
    for number, (_, data) in enumerate(_records(file)):
        row_id = f"{file.name}:{number}"
        try:
            yield row_id, _values(form, data), len(data)
        except ValueError as error:
            refuse(row_id, str(error))


def _values(form: _TFRecordForm, data: bytes) -> dict[str, Any]:
    """Returns the values of a row by feature."""
    features, values = _features(data), {}
    for name, expected in form.kinds.items():
        kind, values[name] = features.get(name, ("nothing", ()))
        # TensorFlow writes a list without values as a feature that is empty or absent.
        is_ragged = expected[1] == ANY
        if is_ragged and kind not in (expected[0], "nothing"):
            raise ValueError(f"feature {name!r} is a {kind}; other rows have {expected[0]}")
        if not is_ragged and (kind, len(values[name])) != expected:
            raise ValueError(
                f"feature {name!r} has {len(values[name])} values ({kind}), in the first row {expected[1]}"
                f" ({expected[0]})" + (_RAGGED_ADVICE if kind == expected[0] != "bytes_list" else "")
            )
        if name == form.label and kind == "bytes_list":
            try:
                values[name][0].decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"label {name!r} is no UTF-8 text: {error}") from error
        if name in form.images and (reason := base.explain_undecodable(values[name][0])):
            raise ValueError(f"{name}: {NOT_AN_IMAGE.format(reason)}")
    return values


def _features(data: bytes) -> dict[str, tuple[str, Any]]:
    """Returns kind and values of each feature of a `tf.train.Example`."""
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


def _records(file: File) -> Iterator[tuple[int, bytes]]:
    """Yields the offset of each record of a file (uncompressed) and its data."""
    offset = 0
    with (
        parser_errors(file, "The file is damaged or no TFRecord file, plain or gzipped; write it again."),
        _open_records(file) as stream,
    ):
        while head := stream.read(12):
            length = _verify_checksum(head, 8, f"the length at byte {offset}")
            (size,) = struct.unpack("<Q", length)
            if size > MAX_RECORD_BYTES:
                raise ValueError(f"the record at byte {offset} has {size} bytes; allowed are {MAX_RECORD_BYTES}")
            yield offset, _verify_checksum(stream.read(size + 4), size, f"the record at byte {offset}")
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
        raise ValueError(f"{section} does not have its checksum")
    return data


def _masked(data: bytes) -> int:
    """Returns the masked CRC-32C of the TFRecord format."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
