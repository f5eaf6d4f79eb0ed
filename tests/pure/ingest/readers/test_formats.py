"""Readers of each format store the values of the source, and refuse damaged input with a reason."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ray_app.errors import ConfigError, DataError
from ray_app.ingest import options
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import sources
from ray_app.ingest.shards import Shards
from ray_app.task.image import ImageClassification
from tests.support.ingest_inputs import read_columns, write_images


def test_images_keep_their_bytes(tmp_path: Path) -> None:
    files = write_images(tmp_path / "in")
    summary = ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in")))
    columns = read_columns(tmp_path / "out")
    assert sorted(columns["row_id"]) == ["cat/a.jpg", "cat/b.png", "cat/c.gif", "dog/y.jpeg", "dog/z.WEBP"]
    assert dict(zip(columns["row_id"], columns["image"], strict=True)) == files
    assert columns["label"] == [int(row_id.startswith("dog")) for row_id in columns["row_id"]]
    part = summary.parts[""]
    assert (part.classes, part.class_counts, part.skipped_files) == (["cat", "dog"], {"cat": 3, "dog": 2}, 1)


def test_classes_of_images_are_mixed_and_the_order_depends_on_the_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label in range(4):
        for i in range(50):
            path = tmp_path / "in" / str(label) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(10 + i))
    ingest(IngestOptions("images", str(tmp_path / "a"), str(tmp_path / "in"), check=False))
    monkeypatch.setattr(options, "ROW_GROUP_ROWS", 3)
    ingest(IngestOptions("images", str(tmp_path / "b"), str(tmp_path / "in"), check=False, split_bytes=100))
    columns = read_columns(tmp_path / "a", as_stored=True)
    assert columns["row_id"] == read_columns(tmp_path / "b", as_stored=True)["row_id"]
    for low in range(0, 200, 40):
        assert min(Counter(columns["label"][low : low + 40])[label] for label in range(4)) >= 3, (
            "40 rows lack a class, as they do where rows are stored in the order of the classes"
        )


def test_csv_types_fit_every_row_and_classes_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With blocks of 256 bytes, the first block alone would give the wrong types.
    monkeypatch.setattr(sources, "BLOCK_BYTES", 256)
    folder = tmp_path / "in"
    folder.mkdir()
    head = "width,kind,note,count\n"
    first = "".join(f"{i},wasp,{i},{i}\n" for i in range(100)) + '0.5,ant,"two\nlines",7\n'
    (folder / "a.csv").write_text(head + first)
    (folder / "b.csv.gz").write_bytes(gzip.compress((head + ",bee,NA, 3\n").encode()))
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(folder), label="kind", rename={"width": "w"}))
    columns = read_columns(tmp_path / "out")
    assert list(columns) == ["row_id", "w", "label", "note", "count"]
    assert columns["w"] == [float(i) for i in range(100)] + [0.5, None]
    assert columns["label"] == [2] * 100 + [0, 1]
    assert columns["note"][-2:] == ["two\nlines", "NA"]
    assert columns["count"] == [*range(100), 7, 3]
    assert columns["row_id"] == [f"a.csv:{i}" for i in range(2, 103)] + ["b.csv.gz:2"]
    part = summary.parts[""]
    assert (part.classes, part.class_counts) == (["ant", "bee", "wasp"], {"ant": 1, "bee": 1, "wasp": 100})
    assert part.columns["w"] == {"type": "double", "shape": [], "dtype": "float64", "nulls": 1}
    assert part.columns["count"]["dtype"] == "int64"


def test_digits_without_a_fraction_to_hold_out_are_one_data_set(tmp_path: Path) -> None:
    summary = ingest(IngestOptions("digits", str(tmp_path / "out"), eval_fraction=0.0))
    assert {name: part.rows for name, part in summary.parts.items()} == {"train": 1797}


def test_digits_are_complete_stratified_and_fixed(tmp_path: Path) -> None:
    ingest(IngestOptions("digits", str(tmp_path / "out")))
    data, parts = load_digits(), {name: read_columns(tmp_path / "out" / name) for name in ("train", "eval")}
    assert Counter(parts["train"]["row_id"] + parts["eval"]["row_id"]) == Counter(str(i) for i in range(1797))
    for part in parts.values():
        rows = [int(i) for i in part["row_id"]]
        np.testing.assert_array_equal(part["image"], data.images[rows])
        assert part["label"] == data.target[rows].tolist()
    per_class = Counter(parts["eval"]["label"])
    assert all(per_class[c] == round(0.2 * n) for c, n in Counter(data.target.tolist()).items())
    digest = hashlib.sha256("\n".join(parts["eval"]["row_id"]).encode()).hexdigest()
    assert digest == "23502ffd9cfeb453baeaaf1acbe2401fdc287491dc334d601db57c53d559a2d7"


def assert_refused(tmp_path: Path, expected: list[str], **options: Any) -> None:
    """Asserts that the error has all texts of `expected`, and that nothing was written next to the input `in`."""
    with pytest.raises((DataError, ConfigError)) as caught:
        ingest(IngestOptions(out=str(tmp_path / "out"), **options))
    assert [text for text in expected if text not in str(caught.value)] == [], str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def write_animated_gif(path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (0, 200)]
    frames[0].save(path / "dog" / "2.gif", save_all=True, append_images=frames[1:])


def enormous_image(kind: str) -> bytes:
    """Returns an image of 31 KB that declares 256 million pixels, or 200 frames of one million."""
    file = io.BytesIO()
    if kind == "gif":
        frames = [Image.new("L", (1000, 1000), i) for i in range(200)]
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    else:
        Image.new("1", (16000, 16000)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", pytest.param("gif", marks=pytest.mark.rest)])
def test_an_enormous_image_is_refused_before_it_is_decoded(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = enormous_image(kind)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / f"1.{kind}").write_bytes(content)
    assert_refused(
        tmp_path,
        [f"cat/1.{kind}", "not an image that can be decoded", "pixels"],
        source="images",
        input=str(tmp_path / "in"),
    )
    task = ImageClassification(size=8)
    with pytest.raises(ValueError, match="pixels"):
        task.decode({"image": [content], "label": [0]})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda path: shutil.rmtree(path / "cat") or shutil.rmtree(path / "dog"),
            ["no class folders", "DIR/cat/1.png"],
        ),
        (lambda path: (path / "dog" / "1.png").unlink(), ["dog: no image", "webp", "remove the folder"]),
        (lambda path: (path / "dog" / "puppy").mkdir(), ["dog: a class folder with a folder inside ('puppy')"]),
        (
            lambda path: (path / "dog" / "1.png").write_bytes((path / "dog" / "1.png").read_bytes()[:-20]),
            ["dog/1.png", "not an image that can be decoded", "--check false"],
        ),
        (lambda path: (path / "dog" / "1.png").write_bytes(b""), ["dog/1.png", "the file is empty"]),
        (lambda path: Image.new("F", (4, 4)).save(path / "dog" / "2.tif"), ["dog/2.tif", "the mode F", "Convert"]),
        (write_animated_gif, ["dog/2.gif", "the file has 2 frames", "first_frame"]),
    ],
)
def test_bad_images_are_refused(tmp_path: Path, change: Any, expected: list[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "in" / name / "1.png")
    change(tmp_path / "in")
    assert_refused(tmp_path, expected, source="images", input=str(tmp_path / "in"))


@pytest.mark.parametrize("source", ["images", "csv", "numpy", "idx"])
def test_a_missing_input_is_refused(tmp_path: Path, source: Any) -> None:
    with pytest.raises(DataError) as caught:
        ingest(IngestOptions(source, str(tmp_path / "out"), str(tmp_path / "absent")))
    assert str(tmp_path / "absent") in str(caught.value)
    assert "expected" in str(caught.value)


def test_a_column_that_parquet_rejects_is_not_a_storage_error(tmp_path: Path) -> None:
    """pyarrow raises an OSError for both, so ingest has to distinguish them."""
    shards = Shards(tmp_path / "out", "part-", tmp_path / "scratch", (9, 9, 9), None)
    shards.write(sources.make_table(["a"], {"x": np.ones((1, 2, 0))}))
    with pytest.raises(DataError, match=r"the columns .* cannot be written: Invalid FIXED_LEN_BYTE_ARRAY length: 0"):
        shards.close()


def test_parquet_is_described_and_not_rewritten(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i, rows in enumerate((5, 3)):
        pq.write_table(
            pa.table({"x": [0.5] * rows, "label": [i] * rows}), tmp_path / "in" / f"{i}.parquet", row_group_size=2
        )
    summary = ingest(IngestOptions("parquet", input=str(tmp_path / "in")))
    part = summary.parts[""]
    assert (summary.reused, part.rows, part.path) == (True, 8, str(tmp_path / "in"))
    assert [(s["path"], s["rows"], s["row_groups"]) for s in part.shards] == [("0.parquet", 5, 3), ("1.parquet", 3, 2)]
    assert part.columns["label"]["type"] == "integer"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.parquet", "1.parquet", "in"]
    (tmp_path / "in" / "1.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        ingest(IngestOptions("parquet", input=str(tmp_path / "in")))
