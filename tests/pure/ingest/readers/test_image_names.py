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
        ("0.png,x\n1.png,y\n", "its first line names the image '0.png'"),
        ("bird_0,x\nbird_1,y\n", "its first line names the image 'bird_0'"),
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
