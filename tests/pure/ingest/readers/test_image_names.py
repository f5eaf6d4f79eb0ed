"""The column of a file of labels in which the rows name their images."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from ray_app.ingest.ingest import IngestOptions, ingest
from tests.support.ingest_inputs import ingest_error, read_columns


def write_images(root: Path, content: str) -> str:
    """Writes the images 0.png to 3.png and a file of labels; returns its path."""
    (root / "in").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (6, 5), (number, 0, 0)).save(root / "in" / f"{number}.png")
    (root / "labels.csv").write_text(content)
    return str(root / "labels.csv")


@pytest.mark.parametrize(
    ("content", "label", "expected"),
    [
        (
            ",file,k\n0,3.png,7\n1,2.png,6\n2,1.png,5\n3,0.png,4\n",
            "k",
            {"0.png": 4, "1.png": 5, "2.png": 6, "3.png": 7},
        ),
        ("k,file\n3,0.png\n0,1.png\n1,2.png\n2,3.png\n", "k", {"0.png": 3, "1.png": 0, "2.png": 1, "3.png": 2}),
        ("k,file\n3,0.png\n0,1.png\n", None, {"0.png": 3, "1.png": 0}),
        ("k,id\n0,3\n0,2\n1,1\n1,0\n", "k", {"0.png": 1, "1.png": 1, "2.png": 0, "3.png": 0}),
        ("k,id\n3,0\n0,1\n1,2\n2,3\n", "k", {"0.png": 3, "1.png": 0, "2.png": 1, "3.png": 2}),
    ],
)
def test_all_rows_tell_the_column_of_names(
    tmp_path: Path, content: str, label: str | None, expected: dict[str, int]
) -> None:
    labels = write_images(tmp_path, content)
    ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), labels=labels, label=label))
    rows = read_columns(tmp_path / "out")
    assert dict(sorted(zip(rows["row_id"], rows["label"], strict=True))) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("left,right,k\n0.png,1.png,x\n2.png,3.png,y\n", "the columns 'left' and 'right' both name images"),
        ("k,id\n3,0\n0,1\n1,2\n2,3\n", "the columns 'k' and 'id' both name images"),
        ("0.png,x\n1.png,y\n", "the first line names the image '0.png'"),
        ("bird_0,x\nbird_1,y\n", "the first line names the image 'bird_0'"),
    ],
)
def test_a_file_of_labels_that_leaves_the_names_open_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    labels = write_images(tmp_path, content)
    for number in range(2):
        Image.new("RGB", (6, 5)).save(tmp_path / "in" / f"bird_{number}.png")
    assert expected in ingest_error(tmp_path, "images", tmp_path / "in", labels=labels)


def test_only_the_rows_that_name_no_image_are_left_out(tmp_path: Path) -> None:
    labels = write_images(tmp_path, "file,k\n8.png,x\n9.png,y\n7.png,x\n1.png,y\n")
    ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), labels=labels, on_bad_row="skip"))
    assert read_columns(tmp_path / "out")["row_id"] == ["1.png"]


@pytest.mark.parametrize("last", ["3,9,b", "3,3,b", "3,0,b"])
def test_a_name_that_is_wrong_or_repeated_makes_no_index_the_names(tmp_path: Path, last: str) -> None:
    labels = write_images(tmp_path, f"index,id,y\n0,3,a\n1,2,b\n2,1,a\n{last}\n")
    message = ingest_error(tmp_path, "images", tmp_path / "in", labels=labels, label="y", columns=["y"])
    assert "the columns 'index' and 'id' both name images" in message


def test_names_with_other_zeros_before_the_number_name_the_images(tmp_path: Path) -> None:
    labels = write_images(tmp_path, "id,y\n0000,a\n0001,b\n0002,b\n0003,a\n")
    ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), labels=labels, label="y"))
    assert read_columns(tmp_path / "out")["label"] == [0, 1, 1, 0]


def test_a_file_of_labels_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    labels = write_images(tmp_path, "file,y\n0.png,1,9\n1.png,2,2.5\n")
    message = ingest_error(tmp_path, "images", tmp_path / "in", labels=labels, on_bad_row="skip")
    assert "has no usable row" in message


def test_a_dropped_column_may_hold_what_cannot_be_stored(tmp_path: Path) -> None:
    labels = write_images(tmp_path, "file,y,m\n0.png,a,9007199254740993\n1.png,b,2.5\n")
    options = {"labels": labels, "drop": ["m"]}
    ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), **options))
    assert read_columns(tmp_path / "out")["label"] == [0, 1]
