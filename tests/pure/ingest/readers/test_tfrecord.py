"""TFRecord files of TensorFlow (`tests/support/tfrecord/make.py`) are read; damaged and unusual ones are refused."""

from __future__ import annotations

import gzip
import io
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest
from tests.support.ingest_inputs import example, read_columns, tf_record, write_tfrecord
from tests.support.paths import SUPPORT

TENSORFLOW_FILES = SUPPORT / "tfrecord"
COLUMNS = ["image/encoded", "image/class/label", "image/class/text", "floats", "integers"]


def ingest_tfrecord(tmp_path: Path, source: Path | str, **options: Any) -> DatasetSummary:
    return ingest(IngestOptions("tfrecord", str(tmp_path / "out"), str(source), **options))


def refusal(tmp_path: Path, source: Path | str, **options: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        ingest_tfrecord(tmp_path, source, **options)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_records_of_tensorflow_are_read_unchanged(tmp_path: Path) -> None:
    """There are two files, one of them gzipped, with text, images, floats and integers up to their limits."""
    summary = ingest_tfrecord(
        tmp_path,
        TENSORFLOW_FILES,
        label="image/class/label",
        columns=COLUMNS,
        rename={"image/encoded": "image"},
        split_bytes=1,
    )
    assert {name: part.rows for name, part in summary.parts.items()} == {"train": 5, "test": 3}
    for split, rows in (("train", range(5)), ("test", range(5, 8))):
        columns = read_columns(tmp_path / "out" / split)
        assert columns["label"] == [i % 3 for i in rows]
        assert [text.decode() for text in columns["image/class/text"]] == [f"class {i % 3} ä" for i in rows]
        np.testing.assert_array_equal(columns["floats"], np.array([[i, i / 8, -1e30, 0.1] for i in rows], np.float32))
        np.testing.assert_array_equal(columns["integers"], np.array([[-i, 2**63 - 1, -(2**63)] for i in rows]))
        for i, encoded in zip(rows, columns["image"], strict=True):
            np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encoded))), np.full((5, 4, 3), 10 * i))
    assert columns["row_id"] == [f"test.tfrecord-00000-of-00001:{i}" for i in range(3)]


def test_a_pattern_or_a_file_gives_one_data_set(tmp_path: Path) -> None:
    pattern = str(TENSORFLOW_FILES / "train.tfrecord-*")
    assert {
        name: part.rows
        for name, part in ingest_tfrecord(tmp_path / "a", pattern, columns=COLUMNS, eval_fraction=0.5).parts.items()
    }.keys() == {
        "train",
        "eval",
    }
    assert ingest_tfrecord(tmp_path / "b", TENSORFLOW_FILES / "test.tfrecord-00000-of-00001", columns=COLUMNS).rows == 3


def test_the_training_files_may_be_split_further(tmp_path: Path) -> None:
    summary = ingest_tfrecord(tmp_path, TENSORFLOW_FILES, columns=["floats"], eval_fraction=0.4)
    assert summary.parts.keys() == {"train", "eval", "test"}
    assert summary.rows == 8


def test_truncated_and_bit_flipped_records_are_refused_with_their_offset(tmp_path: Path) -> None:
    intact = (TENSORFLOW_FILES / "train.tfrecord-00001-of-00002").read_bytes()
    (second,) = struct.unpack("<Q", intact[:8])
    second += 16
    bad = tmp_path / "in" / "one.tfrecord"
    bad.parent.mkdir()
    for offset in range(0, len(intact), 7):
        flipped = bytearray(intact)
        flipped[offset] ^= 1 << offset % 8
        bad.write_bytes(flipped)
        message = refusal(tmp_path, bad, columns=["floats"])
        assert str(bad) in message
        assert f"at byte {second if offset >= second else 0} " in message
        if offset not in (0, second):
            bad.write_bytes(intact[:offset])
            assert f"at byte {second if offset >= second else 0}" in refusal(tmp_path, bad, columns=["floats"])


def test_a_damaged_tfrecord_gzip_is_refused(tmp_path: Path) -> None:
    packed = (TENSORFLOW_FILES / "test.tfrecord-00000-of-00001").read_bytes()
    (tmp_path / "cut.tfrecord").write_bytes(packed[:-9])
    assert "cut.tfrecord: " in refusal(tmp_path, tmp_path / "cut.tfrecord", columns=["floats"])


def test_a_plain_file_that_begins_like_gzip_is_read(tmp_path: Path) -> None:
    size = int.from_bytes(b"\x1f\x8b\x00", "little")
    row = example(a=[b"x" * (size - 60)])
    row = example(a=[b"x" * (size - 60 + size - len(row))])
    assert tf_record(row).startswith(b"\x1f\x8b")
    assert ingest_tfrecord(tmp_path / "plain", write_tfrecord(tmp_path / "a.tfrecord", row, row)).rows == 2
    (tmp_path / "b.tfrecord").write_bytes(gzip.compress(tf_record(row)))
    assert ingest_tfrecord(tmp_path / "packed", tmp_path / "b.tfrecord").rows == 1


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([], {}, "no record in these files"),
        ([b"\xff\xff"], {}, "not a tf.train.Example"),
        ([b""], {}, "not a tf.train.Example with features"),
        ([b"\x12\x03abc"], {}, "SequenceExample"),
        ([example(a=[])], {}, "'a' has 0 values"),
        ([example(a=[b"x", b"y"])], {}, "feature 'a' holds lists that are not of numbers"),
        ([example(a=[1, 2]), example(a=[1, 2, 3])], {}, ":1: 'a' is not a list of shape [2], as the first"),
        ([example(a=[1]), example(b=[1])], {}, "'a' has 0 values (nothing)"),
        ([example(a=[1]), b"\xff\xff"], {}, ":1: not a tf.train.Example"),
        ([example(a=[1.5]), example(a=[1])], {}, "feature 'a' is a int64_list; other rows have float_list"),
        ([example(a=[b"\x89PNG\r\n\x1a\n"])], {}, "not an image that can be decoded"),
    ],
)
def test_unusable_records_are_refused_with_the_file(
    tmp_path: Path, rows: list[bytes], options: dict[str, Any], expected: str
) -> None:
    message = refusal(tmp_path, write_tfrecord(tmp_path / "in" / "a.tfrecord", *rows), **options)
    assert expected in message
    assert str(tmp_path / "in" / "a.tfrecord") in message


def test_features_of_different_length_are_read_as_lists(tmp_path: Path) -> None:
    """Row 0 has no box, so the kind of the feature is that of the next one."""
    summary = ingest_tfrecord(tmp_path, TENSORFLOW_FILES, columns=["boxes", "floats"], ragged=["boxes"])
    assert summary.rows == 8
    boxes = [row for split in ("train", "test") for row in read_columns(tmp_path / "out" / split)["boxes"]]
    assert [list(row) for row in boxes] == [[0.5] * i for i in range(8)]


def test_a_split_without_a_value_of_a_ragged_feature_has_empty_lists(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "in" / "a-train.tfrecord", example(a=[1], b=[1, 2]))
    write_tfrecord(tmp_path / "in" / "a-test.tfrecord", example(a=[1]), example(a=[2], b=[]))
    ingest_tfrecord(tmp_path, tmp_path / "in", ragged=["b"])
    assert [list(row) for row in read_columns(tmp_path / "out" / "test")["b"]] == [[], []]


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([example(a=[1])], {"ragged": ["b"]}, "feature 'b' has no value at all"),
        ([example(a=[1], b=[b"x"])], {"ragged": ["b"]}, "feature 'b' holds lists that are not of numbers"),
        (
            [example(a=[1], b=[1, 2]), example(a=[1]), example(a=[1], b=[1.5])],
            {"ragged": ["b"]},
            ":2: feature 'b' is a float_list; other rows have int64_list",
        ),
    ],
)
def test_ragged_features_without_one_kind_of_numbers_are_refused(
    tmp_path: Path, rows: list[bytes], options: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(tmp_path, write_tfrecord(tmp_path / "in" / "a.tfrecord", *rows), **options)


def test_files_of_an_unclear_split_are_refused(tmp_path: Path) -> None:
    for name in ("train.tfrecord", "part.tfrecord"):
        write_tfrecord(tmp_path / "in" / name, example(a=[1]))
    assert "part.tfrecord does not name its split" in refusal(tmp_path, tmp_path / "in")
    (tmp_path / "in" / "part.tfrecord").rename(tmp_path / "in" / "test.tfrecord")
    assert ingest_tfrecord(tmp_path, tmp_path / "in").parts.keys() == {"train", "test"}


def test_a_missing_file_of_several_is_refused(tmp_path: Path) -> None:
    shutil.copytree(TENSORFLOW_FILES, tmp_path / "in")
    (tmp_path / "in" / "train.tfrecord-00001-of-00002").unlink()
    assert "train.tfrecord-00001-of-00002 is missing" in refusal(tmp_path, tmp_path / "in", columns=["floats"])


def test_a_folder_without_tfrecord_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x")
    assert "no TFRecord file" in refusal(tmp_path, tmp_path / "in")


def test_a_label_of_text_becomes_classes_over_all_splits(tmp_path: Path) -> None:
    write_tfrecord(
        tmp_path / "in/train.tfrecord", example(x=[1], label=[b"robin"]), example(x=[2], label=["Möwe".encode()])
    )
    write_tfrecord(tmp_path / "in/test.tfrecord", example(x=[3], label=[b"wren"]))
    summary = ingest_tfrecord(tmp_path, tmp_path / "in")
    assert summary.parts["train"].classes == summary.parts["test"].classes == ["Möwe", "robin", "wren"]
    assert read_columns(tmp_path / "out/train")["label"] == [1, 0]
    assert read_columns(tmp_path / "out/test")["label"] == [2]


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([example(x=[1], label=[b"\xff"])], {}, "not UTF-8 text"),
        ([example(x=[1], label=[b"a"]), example(x=[1], label=[1])], {}, "int64_list"),
        ([example(x=[1], label=[b""])], {"on_bad_row": "skip"}, "no rows"),
        ([example(x=[1], label=[b"a"])], {"targets": ["x", "label"]}, "also the label"),
    ],
)
def test_labels_that_are_no_text_are_refused(
    tmp_path: Path, rows: list[bytes], options: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(tmp_path, write_tfrecord(tmp_path / "in.tfrecord", *rows), **options)


def test_labels_of_text_and_of_numbers_in_two_splits_are_refused(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "in/train.tfrecord", example(label=[b"a"]))
    write_tfrecord(tmp_path / "in/test.tfrecord", example(label=[0]))
    assert "text in ['train'], but not in ['test']" in refusal(tmp_path, tmp_path / "in")
