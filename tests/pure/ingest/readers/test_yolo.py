"""Settings of data sets of YOLO: names of classes, folders of images, and files of labels without an image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from ray_app.ingest.ingest import IngestOptions, ingest
from tests.support.ingest_inputs import ingest_error, read_columns


def write_set(root: Path, settings: str, folder: str = "images") -> Path:
    """Writes an image with a box, and `data.yaml`; returns its path."""
    for name in (folder, folder.replace("images", "labels")):
        (root / name).mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(root / folder / "1.png")
    (root / folder.replace("images", "labels") / "1.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    (root / "data.yaml").write_text(settings)
    return root / "data.yaml"


def nested_references(levels: int) -> str:
    lists = [f"a0: &a0 [{', '.join('x' * 9)}]\n"]
    lists += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, levels)]
    return "".join(lists) + f"names: *a{levels - 1}\n"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Formatting the names would need the memory and the time of 9 ** 40 words.
        (nested_references(40), "the file has references (*name), which are not allowed"),
        ("names: [" + ", ".join(["[" * 50 + "]" * 50] * 1000) + "]\n", "expected a list of them"),
        ("names: [cat, dog]\nnc: 3\n", "nc is '3', but names has 2 classes"),
        ("names: {0: cat, 0: dog}\n", "the key '0' occurs twice"),
        ("names: {0: cat, 2: dog}\n", "expected a list of them"),
        ("names: [cat]\npath: [a]\ntrain: images\n", "path is ['a']; expected a folder"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, settings: str, expected: str) -> None:
    assert expected in ingest_error(tmp_path, "yolo", write_set(tmp_path / "in", settings))


def test_names_of_classes_stay_as_they_are_written(tmp_path: Path) -> None:
    file = write_set(tmp_path / "in", "names: [yes, no, 007, 1e3, 2020-01-01]\nnc: 5\ntest:\n")
    summary = ingest(IngestOptions("yolo", str(tmp_path / "out"), str(file)))
    assert summary.parts[""].classes == ["background", "yes", "no", "007", "1e3", "2020-01-01"]


@pytest.mark.parametrize("path", ["../sets/c8", "{root}/sets/c8", "/content/of/another/machine"])
def test_the_folder_of_the_data_set_may_be_elsewhere(tmp_path: Path, path: str) -> None:
    where = "settings" if path.startswith("/content") else "sets/c8"
    write_set(tmp_path / where, "", "images/train")
    settings = f"path: {path.format(root=tmp_path)}\ntrain: images/train\nnames: [cat]\n"
    (tmp_path / "settings").mkdir(exist_ok=True)
    (tmp_path / "settings" / "data.yaml").write_text(settings)
    ingest(IngestOptions("yolo", str(tmp_path / "out"), str(tmp_path / "settings" / "data.yaml")))
    assert read_columns(tmp_path / "out")["labels"] == [[1]]


def test_a_file_of_labels_without_an_image_is_named(tmp_path: Path) -> None:
    file = write_set(tmp_path / "in", "names: [cat]\n")
    for name in ("2.txt", "classes.txt"):
        (tmp_path / "in" / "labels" / name).write_text("0 0.5 0.5 0.1 0.1\n")
    assert ingest(IngestOptions("yolo", str(tmp_path / "out"), str(file))).parts[""].skipped_files == 1
    [line] = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "row_id": "labels/2.txt",
        "reason": "left out: a file of labels without an image in the data sets",
    }
