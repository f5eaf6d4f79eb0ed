"""Folders of images with a file of labels, with masks, or with data sets above the classes; images that become PNG."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest
from ray_app.ingest.readers.image_files import parse_mask_values
from ray_app.task.images import convert_image, decode_image, decode_mask
from tests.support.encoded_images import encode, smooth_pixels
from tests.support.ingest_inputs import ingest_error, read_columns

PHOTO = Image.fromarray(smooth_pixels(12, 10))


def write(root: Path, *names: str) -> None:
    """Writes images of distinct pixels."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        kind = "jpeg" if name.endswith(".jpg") else "png"
        (root / name).write_bytes(encode(Image.fromarray(smooth_pixels(12, 10, seed=number)), kind))


def ingest_images(tmp_path: Path, **options: Any) -> DatasetSummary:
    return ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), **options))


def labelled(tmp_path: Path, content: str, **options: Any) -> dict[str, Any]:
    """Returns the columns of the images in `in` with this file of labels."""
    (tmp_path / "labels.csv").write_text(content)
    ingest_images(tmp_path, labels=str(tmp_path / "labels.csv"), **options)
    return read_columns(tmp_path / "out")


def refusals(folder: Path) -> dict[str, str]:
    lines = (folder / "_refused.jsonl").read_text().splitlines()
    return {row["row_id"]: row["reason"] for row in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["1.png", "2.jpg", "3.png"], ["1.png", "2.jpg", "3.png"]),
        (["1", "2", "3"], ["1.png", "2.jpg", "3.png"]),
        (["1.png", "2.jpg", "3.png"], ["a/1.png", "b/c/2.jpg", "3.png"]),
        (["a/1.png", "./a/2.jpg", "b\\1.png"], ["a/1.png", "a/2.jpg", "b/1.png"]),
        (["7", "8", "9"], ["0007.png", "0008.jpg", "0009.png"]),
    ],
)
def test_a_file_of_labels_names_images_by_path_end_or_stem(tmp_path: Path, names: list[str], files: list[str]) -> None:
    write(tmp_path / "in", *files)
    rows = labelled(tmp_path, "id,kind\n" + "".join(f"{n},{k}\n" for n, k in zip(names, "xyx", strict=True)))
    label_of = dict(zip(rows["row_id"], rows["label"], strict=True))
    assert [label_of[file] for file in files] == [0, 1, 0]
    image_of = dict(zip(rows["row_id"], rows["image"], strict=True))
    assert all(image_of[file] == (tmp_path / "in" / file).read_bytes() for file in files)


def test_columns_become_labels_targets_and_columns_by_their_types(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.png", "2.png")
    rows = labelled(tmp_path, "index,file,cat,dog,age\n0,1.png,1,0,2.5\n1,2.png,0,1,3\n", targets=["cat", "dog"])
    assert rows["target"].tolist() == [[1, 0], [0, 1]]
    assert rows["target"].dtype == np.float32
    assert (rows["age"], rows["index"]) == ([2.5, 3.0], [0, 1])
    for content, name, values in (
        ("file,age\n1.png,2.5\n2.png,3\n", "target", [2.5, 3]),
        ("f,k\n1,5\n2,3\n", "label", [5, 3]),
    ):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "in", "1.png", "2.png")
        rows = labelled(tmp_path / name, content)
        assert rows.keys() == {"row_id", "image", name}
        assert rows[name] == values


def test_rows_and_images_that_do_not_match_are_refused_or_named(tmp_path: Path) -> None:
    write(tmp_path / "in", "a/1.png", "b/1.png", "2.png", "3.png", "4.png")
    content = "file,kind\n2.png,x\n3.png,y\n1.png,x\n9.png,x\n2,y\n4.png,\n"
    labelled(tmp_path, content, on_bad_row="skip")
    reasons = refusals(tmp_path / "out")
    assert "names 2 images, such as ['a/1.png', 'b/1.png']" in reasons["labels.csv:4"]
    assert "'9.png' names no image" in reasons["labels.csv:5"]
    assert "also the image of labels.csv:2" in reasons["labels.csv:6"]
    assert "no label in the column 'kind'" in reasons["labels.csv:7"]
    assert "4.png" not in reasons
    assert "an image without a row in labels.csv" in reasons["a/1.png"]
    assert sorted(read_columns(tmp_path / "out")["row_id"]) == ["2.png", "3.png"]


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("file,kind\nq.png,x\n", {}, "no column names the images"),
        ("file\n1.png\n", {}, "the only column is 'file'"),
        ("file,kind\n1.png,x\n", {"label": "k"}, "no column 'k'"),
        ("file,kind\n1.png,x\n", {"targets": ["kind"]}, "targets names 'kind', a column of string"),
        ("file,kind\n8.png,x\n1.png,x\n", {}, "row labels.csv:2: '8.png' names no image"),
        ("file,image\n1.png,x\n", {"columns": ["image"]}, "have names of image columns"),
        ("file,kind\n1.png,x\n", {"drop": ["none"]}, "drop names 'none'; the columns are ['file', 'kind']"),
        ("", {"labels": "/absent.csv"}, "no such file"),
        ("", {"labels": None, "masks": "/absent"}, "is not a folder"),
    ],
)
def test_a_file_of_labels_that_does_not_fit_is_refused(
    tmp_path: Path, content: str, options: dict[str, Any], expected: str
) -> None:
    write(tmp_path / "in", "1.png")
    (tmp_path / "labels.csv").write_text(content)
    options = {"labels": str(tmp_path / "labels.csv")} | options
    assert expected in ingest_error(tmp_path, "images", tmp_path / "in", **options)


def test_a_dropped_column_of_a_file_of_labels_is_not_its_label(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.png", "2.png")
    rows = labelled(tmp_path, "file,kind,note\n1.png,b,u\n2.png,a,v\n", drop=["note"])
    assert (rows["label"], sorted(rows)) == ([1, 0], ["image", "label", "row_id"])


def test_without_labels_images_of_all_folders_are_rows(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.png", "a/2.png", "a/b/3.jpg")
    ingest_images(tmp_path, labels="none")
    rows = read_columns(tmp_path / "out")
    assert rows.keys() == {"row_id", "image"}
    assert sorted(rows["row_id"]) == ["1.png", "a/2.png", "a/b/3.jpg"]


def test_folders_of_data_sets_above_the_classes_are_data_sets(tmp_path: Path) -> None:
    write(tmp_path / "in", "train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "test/dog/4.png", "test/eel/5.png")
    parts = ingest_images(tmp_path).parts
    assert {name: (part.rows, part.classes) for name, part in parts.items()} == {
        "train": (2, ["cat", "dog", "eel"]),
        "eval": (1, ["cat", "dog", "eel"]),
        "test": (2, ["cat", "dog", "eel"]),
    }
    assert "no training image has the classes ['eel']" in parts["test"].notes[0]
    assert sorted(read_columns(tmp_path / "out" / "test")["label"]) == [1, 2]


def test_a_tenth_of_the_folder_to_train_on_is_eval_where_only_test_is_there(tmp_path: Path) -> None:
    write(tmp_path / "in", *(f"train/cat/{n}.png" for n in range(40)), "test/cat/0.png")
    parts = ingest_images(tmp_path).parts
    assert parts.keys() == {"train", "eval", "test"}
    assert parts["train"].rows + parts["eval"].rows == 40


def test_folders_named_as_data_sets_with_images_in_them_are_classes(tmp_path: Path) -> None:
    write(tmp_path / "in", "train/1.png", "test/2.png")
    assert ingest_images(tmp_path).parts[""].classes == ["test", "train"]


def test_two_folders_of_one_data_set_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "train/cat/1.png", "val/cat/2.png", "valid/cat/3.png")
    assert "mean the same data set" in ingest_error(tmp_path, "images", tmp_path / "in")


GRAY16 = (np.arange(120, dtype=np.uint16) * 546).reshape(12, 10)


@pytest.mark.parametrize(
    ("name", "image", "options"),
    [
        ("1.tif", PHOTO, {}),
        ("1.tiff", PHOTO, {"compression": "tiff_lzw"}),
        ("1.tif", PHOTO.convert("L"), {}),
        ("1.tif", PHOTO.convert("1"), {}),
        ("1.tif", PHOTO.convert("RGBA"), {}),
        ("1.tif", PHOTO.quantize(16), {}),
        ("1.bmp", PHOTO, {}),
        ("1.tif", Image.fromarray(GRAY16), {}),
        ("1.dat", PHOTO, {"format": "tiff"}),
    ],
)
def test_images_of_other_formats_become_png_without_loss(
    tmp_path: Path, name: str, image: Image.Image, options: dict[str, Any]
) -> None:
    path = tmp_path / "in" / "a" / name
    path.parent.mkdir(parents=True)
    image.save(path, **options)
    ingest_images(tmp_path)
    [stored] = read_columns(tmp_path / "out")["image"]
    assert stored == convert_image(path.read_bytes(), first_frame=False)
    assert np.array_equal(decode_image(stored), decode_image(encode(image, "png")))


def test_avif_becomes_png_with_the_pixels_that_it_has() -> None:
    encoded = encode(PHOTO, "avif")
    stored = convert_image(encoded, first_frame=False)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored))), np.asarray(Image.open(io.BytesIO(encoded))))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_converted_images_are_turned_by_their_orientation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = decode_image(encode(PHOTO, "png", exif=exif))
    assert np.array_equal(decode_image(convert_image(encode(PHOTO, "tiff", exif=exif), False)), expected)


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (encode(Image.fromarray(np.ones((4, 4), np.float32)), "tiff"), "the mode F"),
        (encode(Image.fromarray(np.full((4, 4), -1, np.int32)), "tiff"), "go from -1 to -1"),
        (encode(PHOTO, "tiff", save_all=True, append_images=[PHOTO]), "2 frames; --first_frame"),
        (encode(PHOTO, "tiff", compression="tiff_lzw")[:-40], ""),
        (encode(PHOTO, "bmp")[:-40], "truncated"),
        (
            encode(Image.new("1", (16000, 16000)), "tiff", compression="group4"),
            "more than the allowed 134217728 pixels",
        ),
    ],
)
def test_images_that_png_cannot_store_are_refused_by_name(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "1.tif").write_bytes(content)
    message = ingest_error(tmp_path, "images", tmp_path / "in")
    assert "row a/1.tif: not an image that can be decoded" in message
    assert "--check false" not in message
    assert expected in message


@pytest.mark.parametrize("kind", ["gif", "webp", "tiff", "png"])
def test_the_first_frame_is_stored_by_wish(tmp_path: Path, kind: str) -> None:
    frames = [Image.new("RGB", (6, 5), color) for color in ("red", "blue")]
    (tmp_path / "in" / "a").mkdir(parents=True)
    lossless = {"lossless": True} if kind == "webp" else {}
    frames[0].save(tmp_path / "in" / "a" / f"1.{kind}", save_all=True, append_images=frames[1:], **lossless)
    assert "first_frame" in ingest_error(tmp_path, "images", tmp_path / "in")
    ingest_images(tmp_path, first_frame=True)
    [stored] = read_columns(tmp_path / "out")["image"]
    assert decode_image(stored)[:, 0, 0].tolist() == [255, 0, 0]


def write_mask(path: Path, values: Any, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, np.uint8))
    if mode == "P":
        image = image.convert("L")
        image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    image.save(path)


VALUES = np.zeros((12, 10), np.uint8)
VALUES[3:6, 2:5] = 255


@pytest.mark.parametrize("suffix", [".png", "_mask.png", ".tif"])
def test_masks_become_classes_by_their_values(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "in", "a/1.jpg", "2.jpg")
    write_mask(tmp_path / "masks" / f"a/1{suffix}", VALUES)
    write_mask(tmp_path / "masks" / f"2{suffix}", VALUES[::-1])
    options: dict[str, Any] = {"masks": str(tmp_path / "masks"), "mask_values": "0=background,255=object"}
    summary = ingest_images(tmp_path, **options)
    assert summary.parts[""].classes == ["background", "object"]
    rows = read_columns(tmp_path / "out")
    masks = {name: decode_mask(mask) for name, mask in zip(rows["row_id"], rows["mask"], strict=True)}
    assert np.array_equal(masks["a/1.jpg"], VALUES // 255)
    assert np.array_equal(masks["2.jpg"], VALUES[::-1] // 255)


def test_masks_of_palettes_and_colors_become_classes(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.png", "2.png", "3.png")
    classes = (np.arange(120) % 3).reshape(12, 10)
    colors = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)
    write_mask(tmp_path / "masks" / "1.png", colors[classes])
    write_mask(tmp_path / "masks" / "2.png", classes, "P")
    write_mask(tmp_path / "masks" / "3.png", colors[classes])
    ingest_images(tmp_path, masks=str(tmp_path / "masks"), mask_values="0/0/0=sky, 255/0/0=road, 0/255/0=ignore")
    for mask in read_columns(tmp_path / "out")["mask"]:
        assert np.array_equal(decode_mask(mask), np.where(classes == 2, 255, classes))


def test_masks_may_be_beside_the_images(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.jpg", "a/2.png", "3_mask.jpg")
    for name in ("1_mask.png", "a/2_mask.png", "3_mask_mask.png"):
        write_mask(tmp_path / "in" / name, VALUES)
    summary = ingest_images(tmp_path, masks=str(tmp_path / "in"))
    assert sorted(read_columns(tmp_path / "out")["row_id"]) == ["1.jpg", "3_mask.jpg", "a/2.png"]
    assert "set --mask_values '0=background,255=object'" in summary.parts[""].notes[0]


def test_masks_below_the_images_are_no_images(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.jpg")
    write_mask(tmp_path / "in" / "masks" / "1.png", VALUES)
    write_mask(tmp_path / "in" / "masks" / "9.png", VALUES)
    options: dict[str, Any] = {"masks": str(tmp_path / "in" / "masks"), "mask_values": "0=b,255=o"}
    notes = ingest_images(tmp_path, **options).parts[""].notes
    assert notes == ["1 masks without a row are left out, such as '9'."]
    assert read_columns(tmp_path / "out")["row_id"] == ["1.jpg"]


def test_masks_of_gray_and_opaque_alpha_are_masks(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.png")
    (tmp_path / "masks").mkdir()
    image = Image.fromarray(VALUES).convert("LA")
    image.save(tmp_path / "masks" / "1.png")
    ingest_images(tmp_path, masks=str(tmp_path / "masks"), mask_values="0=b,255=o")
    assert np.array_equal(decode_mask(read_columns(tmp_path / "out")["mask"][0]), VALUES // 255)
    image.putalpha(9)
    image.save(tmp_path / "masks" / "1.png")
    assert "transparent pixels" in ingest_error(
        tmp_path / "b", "images", tmp_path / "in", masks=str(tmp_path / "masks")
    )


def test_masks_without_named_values_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.png")
    write_mask(tmp_path / "masks" / "1.png", VALUES % 3, "P")
    ingest_images(tmp_path, masks=str(tmp_path / "masks"))
    assert read_columns(tmp_path / "out")["mask"] == [(tmp_path / "masks" / "1.png").read_bytes()]


@pytest.mark.parametrize(
    ("mask", "values", "expected"),
    [
        (VALUES + 7, "0=a,255=b", "has the values 6, 7, but --mask_values names only 0, 255"),
        (VALUES[:-1], "0=a,255=b", "has (11, 10) rows and columns, and the image (12, 10)"),
        (np.zeros((12, 10, 3)), None, "not a mask"),
        (np.zeros((12, 10, 3)), "255/255/255=a", "has the values 0/0/0"),
        (None, None, "no mask; expected 1.png or 1_mask.png"),
    ],
)
def test_masks_that_do_not_fit_are_bad_rows(tmp_path: Path, mask: Any, values: str | None, expected: str) -> None:
    write(tmp_path / "in", "1.png")
    (tmp_path / "masks").mkdir()
    if mask is not None:
        write_mask(tmp_path / "masks" / "1.png", mask)
    message = ingest_error(tmp_path, "images", tmp_path / "in", masks=str(tmp_path / "masks"), mask_values=values)
    assert "row 1.png: " in message
    assert expected in message


@pytest.mark.parametrize(
    "text", ["", "0", "0=", "=a", "0=a,0=b", "0=a,255/0/0=b", "255/0=a", "256/0/0=a", "-1=a", "0=ignore", "0=b;1=o"]
)
def test_wrong_mask_values_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="mask_values"):
        parse_mask_values(text)


def test_a_link_to_a_folder_above_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.png")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    with pytest.raises(DataError, match="folders are more than 32 deep"):
        ingest_images(tmp_path, labels="none")


def test_bytes_of_a_gif_in_memory_are_not_changed_without_wish(tmp_path: Path) -> None:
    write(tmp_path / "in", "a/1.png")
    still = io.BytesIO()
    PHOTO.quantize(8).save(still, "gif")
    (tmp_path / "in" / "a" / "2.gif").write_bytes(still.getvalue())
    ingest_images(tmp_path, first_frame=True)
    assert still.getvalue() in read_columns(tmp_path / "out")["image"]
