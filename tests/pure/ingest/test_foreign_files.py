"""Files that ingest leaves out are listed with a reason; Git LFS pointers and web pages are named as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError, DataError, remove_addresses
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.runlog.redaction import redact
from ray_app.task.user_code import describe_error, format_calls, row_error_reason
from ray_app.train.state import parameters
from tests.support.encoded_images import encode, smooth_pixels
from tests.support.ingest_inputs import read_columns, write_idx

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"  # noqa: E501
PAGE = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n"
PHOTO = Image.fromarray(smooth_pixels(8, 9))


def refusal_reasons(folder: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (folder / "_refused.jsonl").read_text().splitlines()]
    assert len({line["row_id"] for line in lines}) == len(lines)
    return {line["row_id"]: line["reason"] for line in lines}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Returns a folder of two classes, each with an image under a standard name and four under unusual ones."""
    for label in ("a", "b"):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for name, kind in {"1.jpg": "jpeg", "2.jfif": "jpeg", "3": "png", "4.JPG": "png", "5.dat": "webp"}.items():
            (folder / name).write_bytes(encode(PHOTO, kind))
    return tmp_path / "photos"


def test_images_are_recognized_by_content_not_by_suffix(photos: Path, tmp_path: Path) -> None:
    part = ingest(IngestOptions("images", str(tmp_path / "out"), str(photos))).parts[""]
    assert (part.rows, part.skipped_files, part.refused) == (10, 0, 0)
    assert sorted(read_columns(tmp_path / "out")["row_id"])[:5] == ["a/1.jpg", "a/2.jfif", "a/3", "a/4.JPG", "a/5.dat"]
    assert not (tmp_path / "out" / "_refused.jsonl").exists()


def test_every_file_that_is_left_out_is_named_with_its_reason(photos: Path, tmp_path: Path) -> None:
    left_out = {
        "loose.jpg": (encode(PHOTO, "jpeg"), "an image outside the class folders"),
        "readme.txt": (b"photos of cats", "not an image"),
        "a/scan.jp2": (encode(PHOTO, "jpeg2000"), "a JPEG 2000 image"),
        "a/Thumbs.db": (b"\xd0\xcf\x11\xe0", "not an image"),
        "b/.DS_Store": (b"\0\0\0\1Bud1", "hidden"),
        "b/._1.jpg": (b"\0\5\x16\7", "hidden"),
        "b/nothing": (b"", "empty"),
        "b/photo.heic": (b"\0\0\0\x18ftypheic\0\0", "a HEIC image"),
        "b/pointer": (POINTER, "a Git LFS pointer"),
    }
    for name, (content, _) in left_out.items():
        (photos / name).write_bytes(content)
    (photos / "b" / "link.jpg").symlink_to("gone.jpg")
    (photos / ".ipynb_checkpoints").mkdir()
    (photos / "b" / "other.jpg").symlink_to(photos / "b" / "1.jpg")
    part = ingest(IngestOptions("images", str(tmp_path / "out"), str(photos), on_bad_row="fail")).parts[""]
    reasons = refusal_reasons(tmp_path / "out")
    expected = {name: reason for name, (_, reason) in left_out.items()}
    expected |= {"b/link.jpg": "a broken link", ".ipynb_checkpoints": "hidden"}
    assert reasons.keys() == expected.keys()
    assert all(
        reasons[name].startswith("left out: ") and part_of_reason in reasons[name]
        for name, part_of_reason in expected.items()
    )
    assert (part.rows, part.refused, part.skipped_files) == (11, 0, len(expected)), "a link to an image should be a row"


def test_files_left_out_are_listed_in_each_part_of_a_split(photos: Path, tmp_path: Path) -> None:
    (photos / "a" / "notes.txt").write_text("x")
    (photos / "a" / "bad.png").write_bytes(encode(PHOTO, "png")[:-30])
    summary = ingest(IngestOptions("images", str(tmp_path / "out"), str(photos), eval_fraction=0.5, on_bad_row="skip"))
    reasons = {side: refusal_reasons(tmp_path / "out" / side) for side in ("train", "eval")}
    assert all("a/notes.txt" in reasons[side] for side in reasons)
    assert sum("a/bad.png" in reasons[side] for side in reasons) == 1
    assert sum(part.refused for part in summary.parts.values()) == 1


def test_a_class_without_images_says_what_is_in_its_folder(photos: Path, tmp_path: Path) -> None:
    (photos / "c").mkdir()
    (photos / "c" / "1.jp2").write_bytes(encode(PHOTO, "jpeg2000"))
    with pytest.raises(DataError, match=r"c: no image in this class folder \(of 1 files the first is 1.jp2: left"):
        ingest(IngestOptions("images", str(tmp_path / "out"), str(photos)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(POINTER, "Git LFS pointer"), (PAGE, "a web page"), (b"", "empty"), (b"BM1234", "its header is damaged")],
)
def test_a_file_with_only_the_suffix_of_an_image_is_a_bad_row(
    photos: Path, tmp_path: Path, content: bytes, reason: str
) -> None:
    (photos / "a" / "6.jpg").write_bytes(content)
    for attempt in ("one", "two"):
        ingest(IngestOptions("images", str(tmp_path / attempt), str(photos), on_bad_row="skip"))
    assert reason in refusal_reasons(tmp_path / "one")["a/6.jpg"]
    assert (tmp_path / "one" / "_refused.jsonl").read_bytes() == (tmp_path / "two" / "_refused.jsonl").read_bytes()
    with pytest.raises(DataError, match=rf"row a/6.jpg: not an image that can be decoded \(.*{reason}"):
        ingest(IngestOptions("images", str(tmp_path / "three"), str(photos)))


@pytest.mark.parametrize("content", [POINTER, PAGE])
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("csv", "x.csv"),
        ("csv", "x.csv.gz"),
        ("jsonl", "x.jsonl"),
        ("jsonl", "x.jsonl.gz"),
        ("numpy", "x.npy"),
        ("numpy", "x.npz"),
        ("idx", "train-images-idx3-ubyte"),
        ("idx", "train-labels-idx1-ubyte.gz"),
        ("webdataset", "x.tar"),
        ("webdataset", "x.tar.gz"),
        ("tfrecord", "x.tfrecord"),
        ("hf", "data-00000-of-00001.arrow"),
        ("hf", "x.parquet"),
        ("parquet", "x.parquet"),
    ],
)
def test_every_reader_names_a_git_lfs_pointer_or_web_page(
    tmp_path: Path, source: Any, name: str, content: bytes
) -> None:
    folder = tmp_path / "in"
    if source == "idx":
        write_idx(folder, "train", 3, name.endswith(".gz"))
    else:
        folder.mkdir()
    (folder / name).write_bytes(content)
    path = folder / name if source == "numpy" else folder
    expected = (
        "a Git LFS pointer, not the file itself (fetch the files with git lfs pull)"
        if content == POINTER
        else "a web page (HTML)"
    )
    with pytest.raises(DataError) as caught:
        ingest(IngestOptions(source, "" if source == "parquet" else str(tmp_path / "out"), str(path)))
    assert expected in str(caught.value)
    assert name in str(caught.value)
    if source == "parquet":
        with pytest.raises(DataError, match=r"x\.parquet is a "):
            open_dataset(str(folder))


def test_git_lfs_pointers_as_tokenizer_or_parameters_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\na\n")
    (tmp_path / "pointer").write_bytes(POINTER)
    pointer = str(tmp_path / "pointer")
    with pytest.raises(ConfigError, match="is a Git LFS pointer"):
        ingest(IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "rows.csv"), tokenizer=pointer))
    with pytest.raises(ConfigError, match="is a Git LFS pointer"):
        parameters.read_parameters(pointer, None)


def test_error_messages_have_no_memory_addresses() -> None:
    class Opaque:
        """Its `str` is Python's default, with the memory address."""

    error = ValueError(f"{Opaque()} does not fit {open}")
    assert " at 0x" in str(error), "the error has no address, so this test would show nothing"
    try:
        raise error
    except ValueError:
        texts = [
            row_error_reason(error),
            describe_error(error),
            format_calls(error),
            redact(str(error)),
            remove_addresses(str(error)),
        ]
    assert not any("0x" in text for text in texts)
    assert all("Opaque object>" in text for text in texts)
    assert remove_addresses("marker 0xd9 at 0x1F") == "marker 0xd9 at 0x1F", (
        "numbers that are not addresses should stay"
    )
