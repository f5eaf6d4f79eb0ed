"""Annotations of COCO, Pascal VOC and YOLO become the columns of `ObjectDetection`, as pycocotools reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO

from ray_app.errors import DataError
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest
from ray_app.storage import text_files
from ray_app.storage.data_files import find_file
from ray_app.storage.text_files import iterate_json
from ray_app.task.images import decode_mask
from tests.support.encoded_images import encode, smooth_pixels
from tests.support.ingest_inputs import ingest_error, read_columns

WIDTH, HEIGHT = 40, 30


def write_images(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(smooth_pixels(HEIGHT, WIDTH, seed=number)).save(folder / name)


def runs_of(mask: np.ndarray) -> list[int]:
    """Returns the runs of a mask, column by column, the first of zeros."""
    flat = mask.T.ravel()
    changes = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *changes, len(flat)]).tolist()
    return runs if not flat[0] else [0, *runs]


DISC = ((np.mgrid[:HEIGHT, :WIDTH] - np.array([15, 20])[:, None, None]) ** 2).sum(0) < 60
BLOB = np.random.default_rng(1).random((HEIGHT, WIDTH)) < 0.3


def content() -> dict[str, Any]:
    """Returns annotations with polygons, runs of both forms, a crowd, gaps between categories, and an empty image."""
    size = {"width": WIDTH, "height": HEIGHT}
    packed = coco_masks.encode(np.asfortranarray(BLOB.astype(np.uint8)))["counts"].decode()
    square = [2.0, 3.0, 12.5, 3.0, 12.5, 9.25, 2.0, 9.25]
    objects = [
        (1, 8, [square], [2, 3, 10.5, 6.25], 0),
        (1, 90, {"size": [HEIGHT, WIDTH], "counts": runs_of(DISC)}, [12, 7, 16, 16], 0),
        (1, 8, [[0, 0, 39, 0, 39, 5], [20, 20, 30, 20, 25, 28]], [0, 0, 39, 28], 0),
        (3, 8, {"size": [HEIGHT, WIDTH], "counts": packed}, [0, 0, 40, 30], 1),
        (3, 3, [square], [2, 3, 10.5, 6.25], 0),
    ]
    return {
        "info": {"year": 2026},
        "annotations": [
            {"id": n, "image_id": i, "category_id": c, "segmentation": s, "bbox": b, "iscrowd": crowd, "area": 1.0}
            for n, (i, c, s, b, crowd) in enumerate(objects, 1)
        ],
        "images": [{"id": n, "file_name": f"{n}.png", **size} for n in (1, 2, 3)],
        "categories": [{"id": 90, "name": "brush"}, {"id": 3, "name": "car"}, {"id": 8, "name": "truck"}],
    }


def write_coco(root: Path, change: Any = None) -> Path:
    write_images(root / "images", "1.png", "2.png", "3.png")
    annotations = content()
    if change:
        change(annotations)
    file = root / "annotations" / "instances_train.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(annotations))
    return file


def run(tmp_path: Path, source: Any, root: Path, **options: Any) -> DatasetSummary:
    return ingest(IngestOptions(source, str(tmp_path / "out"), str(root), **options))


def test_coco_is_read_as_pycocotools_reads_it(tmp_path: Path) -> None:
    file = write_coco(tmp_path)
    part = run(tmp_path, "coco", file, segmentation=True).parts[""]
    rows = read_columns(tmp_path / "out")
    reference = COCO(str(file))
    labels = {category: label for label, category in enumerate(sorted(reference.getCatIds()), 1)}
    assert part.classes == ["background", *(one["name"] for one in reference.loadCats(sorted(labels)))]
    assert rows["image_id"] == [1, 2, 3]
    for index, image_id in enumerate(rows["image_id"]):
        annotations = reference.loadAnns(reference.getAnnIds(image_id, iscrowd=False))
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (one["bbox"] for one in annotations)]
        assert rows["boxes"][index] == boxes
        assert rows["labels"][index] == [labels[one["category_id"]] for one in annotations]
        expected = np.zeros((HEIGHT, WIDTH), np.uint8)
        for one in reference.loadAnns(reference.getAnnIds(image_id, iscrowd=True)):
            expected[reference.annToMask(one) == 1] = 255
        for one in sorted(annotations, key=lambda one: -int(reference.annToMask(one).sum())):
            expected[reference.annToMask(one) == 1] = labels[one["category_id"]]
        assert np.array_equal(decode_mask(rows["mask"][index]), expected)
    assert any("1 annotations of crowds" in note for note in part.notes)
    assert any("categories [3, 8, 90] became the labels 1 to 3" in note for note in part.notes)
    assert any("1 of 3 images have no box" in note for note in part.notes)
    assert part.class_counts == {"background": 0, "car": 1, "truck": 2, "brush": 1}


@pytest.mark.parametrize(("value", "boxes"), [(None, [2, 0, 1]), (0.0, [2, 0, 1]), (1.0, [2, 0, 0]), (True, [2, 0, 0])])
def test_a_crowd_may_be_null_a_boolean_or_a_float(tmp_path: Path, value: Any, boxes: list[int]) -> None:
    def change(annotations: Any) -> None:
        annotations["annotations"] = [annotations["annotations"][number] for number in (0, 1, 4)]
        annotations["annotations"][2]["iscrowd"] = value

    run(tmp_path, "coco", write_coco(tmp_path, change))
    assert [len(one) for one in read_columns(tmp_path / "out")["boxes"]] == boxes


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c["annotations"][0].update(bbox=[30, 3, 20, 5]), "which lies outside the image, which is 40 wide"),
        (lambda c: c["annotations"][0].update(bbox=[3, 3, 0, 5]), "the annotation 1 has the box [3.0, 3.0, 3.0, 8.0]"),
        (lambda c: c["annotations"][0].update(bbox=[3, 3, 5]), "expected [left, top, width, height]"),
        (lambda c: c["annotations"][0].update(category_id=7), "category 7, which 'categories' lacks"),
        (lambda c: c["annotations"][0].update(segmentation=[[1e9, 0, 0, 1e9, 5, 5]]), "far outside the image"),
        (lambda c: c["annotations"][1]["segmentation"].update(counts=[5, 5]), "do not add up"),
        (lambda c: c["annotations"][1]["segmentation"].update(counts="zzzz"), "not text in COCO's format"),
        (lambda c: c["annotations"][1]["segmentation"].update(size=[3, 3]), "unlike the image"),
        (lambda c: c["images"][0].update(width=WIDTH + 1), "its annotations are for 41 by"),
        (lambda c: c["images"][0].update(file_name="absent.png"), "no file 'absent.png'"),
        (lambda c: c["images"][0].update(file_name="../images/1.png"), "no file '../images/1.png'"),
    ],
)
def test_images_with_objects_that_cannot_be_used_are_bad_rows(tmp_path: Path, change: Any, expected: str) -> None:
    file = write_coco(tmp_path, change)
    images = str(tmp_path / "images")
    message = ingest_error(tmp_path, "coco", file, segmentation=True, images=images)
    assert expected in message
    run(tmp_path, "coco", file, segmentation=True, images=images, on_bad_row="skip")
    assert read_columns(tmp_path / "out")["image_id"] == [2, 3]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.pop("categories"), "no 'categories' in it"),
        (lambda c: c["annotations"][0].update(image_id=9), "annotations name the image 9"),
        (lambda c: c["annotations"][0].update(image_id="9"), "'9' as 'image_id'; expected an integer"),
        (lambda c: c["images"].append(c["images"][0]), "has the id 1 of an earlier"),
        (lambda c: c["images"].append(3), "is not an object"),
        (lambda c: [one.update(file_name="/x.png") for one in c["images"]], "the first image is '/x.png'"),
        (lambda c: c["annotations"][0].update(iscrowd="0"), "has '0' as 'iscrowd'; expected 0 or 1"),
        (lambda c: c["annotations"][0].update(iscrowd=2), "has 2 as 'iscrowd'; expected 0 or 1"),
        (lambda c: c["annotations"][0].update(segmentation=[[1, 2]]), "neither polygons"),
        (lambda c: [one.update(file_name=f"x{one['id']}.png") for one in c["images"]], "Name the folder of the images"),
    ],
)
def test_files_that_are_not_of_coco_are_refused(tmp_path: Path, change: Any, expected: str) -> None:
    assert expected in ingest_error(tmp_path, "coco", write_coco(tmp_path, change), segmentation=True)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda c: c["images"][0].update(file_name="absent.png"), "absent.png"),
        (lambda c: c["annotations"].append({**c["annotations"][0], "id": 77, "image_id": 9}), "annotation 77"),
    ],
)
def test_only_what_is_wrong_in_a_file_of_coco_is_left_out(tmp_path: Path, change: Any, refused: str) -> None:
    run(tmp_path, "coco", write_coco(tmp_path, change), on_bad_row="skip")
    [line] = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert json.loads(line)["row_id"] == refused
    assert read_columns(tmp_path / "out")["image_id"] == ([2, 3] if "absent" in refused else [1, 2, 3])


def test_a_list_is_no_file_of_coco(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"id": 1}]')
    assert "no 'images' in it; expected a JSON file of COCO" in ingest_error(tmp_path, "coco", tmp_path / "a.json")


def test_an_exif_orientation_that_the_annotations_ignore_is_named(tmp_path: Path) -> None:
    file = write_coco(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "images" / "1.png").write_bytes(encode(Image.fromarray(smooth_pixels(HEIGHT, WIDTH)), "png", exif=exif))
    assert "its EXIF orientation rotates the image" in ingest_error(tmp_path, "coco", file)


def test_json_files_of_several_data_sets_are_data_sets(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        write_images(tmp_path / "in" / split, "1.png", "2.png", "3.png")
        (tmp_path / "in" / split / "_annotations.coco.json").write_text(json.dumps(content()))
    parts = run(tmp_path, "coco", tmp_path / "in").parts
    assert {name: part.rows for name, part in parts.items()} == {"train": 3, "eval": 3}
    write_coco(tmp_path / "other").rename(tmp_path / "other" / "a.json")
    (tmp_path / "other" / "b.json").write_text("{}")
    assert "do not show by names" in ingest_error(tmp_path / "second", "coco", tmp_path / "other")


VALUES = [1, -2.5e3, 'a,]}"\\ü', None, [1, [2, {"a": []}]], {"b": {"c": [3]}}, True, 12345678901234567890, []]


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_read_item_by_item_at_any_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None
) -> None:
    monkeypatch.setattr(text_files._JsonText, "_BLOCK", block)
    value = {"x": VALUES, "y": 3, "z": [], "w": {"v": VALUES}}
    for whole, expected in (
        (value, [*(("x", one) for one in VALUES), ("y", 3), ("w", {"v": VALUES})]),
        (VALUES, [("", one) for one in VALUES]),
    ):
        (tmp_path / "a.json").write_text(json.dumps(whole, indent=indent))
        file = find_file(tmp_path / "a.json")
        assert file
        assert list(iterate_json(file)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "begins with neither"),
        ("3", "begins with neither"),
        ("[1, 2", "a comma or ] is expected"),
        ("[1 2]", "a comma or ] is expected"),
        ("[1,]", "Expecting value"),
        ('{"a": [1], 3: 4}', "no key"),
        ('{"a" [1]}', "no key"),
        ("[1] 2", "continues after the end"),
        ("[NaN]", "NaN is not JSON"),
        ('["abc', "Unterminated string"),
        ("[" * 100_000, "too deep"),
        ('["' + "a" * 3_000_000 + '"]', "more than the allowed 1048576 characters"),
    ],
)
def test_other_json_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.json").write_text(text)
    file = find_file(tmp_path / "a.json")
    assert file
    with pytest.raises(DataError, match=r"a\.json: ") as caught:
        list(iterate_json(file))
    assert expected in str(caught.value)


def voc(*objects: tuple[str, Any], name: str = "", size: tuple[int, int] | None = (WIDTH, HEIGHT)) -> str:
    text = f"<annotation><filename>{name}</filename>"
    if size:
        text += f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    for kind, box in objects:
        edges = "".join(
            f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        )
        text += f"<object><name>{kind}</name><difficult>0</difficult><bndbox>{edges}</bndbox></object>"
    return text + "</annotation>"


def write_voc(root: Path, files: dict[str, str]) -> Path:
    write_images(root / "JPEGImages", *(f"{stem}.jpg" for stem in files))
    (root / "Annotations").mkdir(parents=True, exist_ok=True)
    for stem, text in files.items():
        (root / "Annotations" / f"{stem}.xml").write_text(text)
    return root


def test_voc_boxes_count_pixels_from_one(tmp_path: Path) -> None:
    files = {
        "a": voc(("dog", (1, 1, WIDTH, HEIGHT)), ("cat", (5, 6, 9, 10)), name="a.jpg"),
        "b": voc(name="other.jpg", size=None),
        "c": voc(("cat", (2.5, 3.5, 9, 10))),
    }
    root = write_voc(tmp_path / "in", files)
    part = run(tmp_path, "voc", root).parts[""]
    rows = read_columns(tmp_path / "out")
    assert rows["row_id"] == ["a", "b", "c"]
    assert rows["boxes"] == [[[0, 0, WIDTH, HEIGHT], [4, 5, 9, 10]], [], [[1.5, 2.5, 9, 10]]]
    assert rows["labels"] == [[2, 1], [], [1]]
    assert part.classes == ["background", "cat", "dog"]
    assert "boxes count pixels from 1, as VOC does." in part.notes
    assert rows["image"][1] == (root / "JPEGImages" / "b.jpg").read_bytes()


def test_voc_of_a_tool_that_counts_from_zero_is_recognized(tmp_path: Path) -> None:
    root = write_voc(tmp_path / "in", {"a": voc(("dog", (0, 3, 9, 9))), "b": voc(("dog", (1, 1, 5, 5)))})
    part = run(tmp_path, "voc", root).parts[""]
    assert read_columns(tmp_path / "out")["boxes"] == [[[0, 3, 9, 9]], [[1, 1, 5, 5]]]
    assert "boxes count pixels from 0, since one begins there." in part.notes


def test_lists_of_voc_are_data_sets(tmp_path: Path) -> None:
    root = write_voc(tmp_path / "in", {stem: voc(("dog", (1, 1, 5, 5))) for stem in "abcd"})
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for name, stems in {"train": "a\nb\n", "val": "c\n", "trainval": "a\nb\nc\n", "test": "d\n"}.items():
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text(stems)
    parts = run(tmp_path, "voc", root).parts
    assert {name: part.rows for name, part in parts.items()} == {"train": 2, "eval": 1, "test": 1}
    (root / "ImageSets" / "Main" / "val.txt").write_text("z\n")
    (tmp_path / "out").rename(tmp_path / "before")
    assert "names 'z'" in ingest_error(tmp_path, "voc", root)
    (root / "ImageSets" / "Main" / "val.txt").write_text("c  1\nd -1\n")
    assert "the line 'c  1' marks whether" in ingest_error(tmp_path, "voc", root)


def test_bad_boxes_in_all_files_of_voc_are_named(tmp_path: Path) -> None:
    root = write_voc(tmp_path / "in", {"a": voc(("dog", ("x", 1, 5, 5)))})
    assert "a.xml: object 1 has the edges ['x', '1', '5', '5']" in ingest_error(tmp_path, "voc", root)


def test_images_of_voc_without_an_xml_file_are_named(tmp_path: Path) -> None:
    root = write_voc(tmp_path / "in", {stem: voc(("dog", (1, 1, 5, 5))) for stem in "abd"})
    write_images(root / "JPEGImages", "c.jpg")
    assert run(tmp_path, "voc", root).parts[""].skipped_files == 1
    assert '"row_id": "c.jpg", "reason": "left out: an image without' in (tmp_path / "out/_refused.jsonl").read_text()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "train.txt").write_text("a\n")
    (root / "ImageSets" / "Main" / "val.txt").write_text("b\n")
    (tmp_path / "out").rename(tmp_path / "before")
    assert [part.skipped_files for part in run(tmp_path, "voc", root).parts.values()] == [2, 2]


BOMB = '<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><annotation>&b;</annotation>'
LEAK = (
    '<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]><annotation><object><name>&f;</name></object></annotation>'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, "declares a document type or entities"),
        (LEAK, "declares a document type or entities"),
        ("<a>" * 40 + "</a>" * 40, "more than 16 deep"),
        ("<annotation>", "no element found"),
        ("no xml", "syntax error"),
        ("", "no element found"),
        (voc(("dog", (1, 2, 3, "x"))), "object 1 has the edges"),
        (voc(("", (1, 2, 3, 4))), "object 1 has no name"),
        (voc(("dog", (1, 2, WIDTH + 5, 4))), "lies outside the image"),
        (voc(("cat", (1, 2, 3, 4)), ("dog", (9, 2, 3, 4))), "object 2 of a.xml has the box [8.0, 1.0, 3.0, 4.0]"),
        (voc(("dog", ("nan", 2, 3, 4))), "expected four numbers"),
        (voc(("dog", (1, 2, 3, 4)), size=(3, 3)), "its annotations are for 3 by"),
    ],
)
def test_hostile_and_wrong_xml_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    root = write_voc(tmp_path / "in", {"a": text, "b": voc(("dog", (1, 2, 3, 4)))})
    assert expected in ingest_error(tmp_path, "voc", root)


def test_a_large_xml_file_is_refused_unread(tmp_path: Path) -> None:
    root = write_voc(tmp_path / "in", {"a": voc(("dog", (1, 2, 3, 4)))})
    with (root / "Annotations" / "a.xml").open("r+b") as file:
        file.truncate(1 << 30)
    assert "has 1073741824 bytes; allowed are" in ingest_error(tmp_path, "voc", root)


def write_yolo(root: Path, labels: dict[str, str | None], folder: str = "images") -> Path:
    write_images(root / folder, *(f"{stem}.png" for stem in labels))
    for stem, text in labels.items():
        if text is not None:
            file = root / folder.replace("images", "labels") / f"{stem}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return root


POLYGON = "1 0.1 0.1 0.5 0.1 0.5 0.6"


@pytest.mark.parametrize("names", ["classes.txt", "data.yaml"])
def test_yolo_fractions_become_pixels(tmp_path: Path, names: str) -> None:
    root = write_yolo(tmp_path / "in", {"1": "0 0.5 0.5 1.0 1.0\n1 0.25 0.5 0.1 0.2\n", "2": None, "3": POLYGON})
    (root / names).write_text("cat\ndog\n" if names == "classes.txt" else "names: {0: cat, 1: dog}\nnc: 2\n")
    part = run(tmp_path, "yolo", root).parts[""]
    rows = read_columns(tmp_path / "out")
    assert rows["row_id"] == ["images/1.png", "images/2.png", "images/3.png"]
    assert np.allclose(rows["boxes"][0], [[0, 0, 40, 30], [8, 12, 12, 18]], atol=1e-5)
    assert rows["boxes"][1] == []
    assert np.allclose(rows["boxes"][2], [[4, 3, 20, 18]], atol=1e-5)
    assert rows["labels"] == [[1, 2], [], [2]]
    assert part.classes == ["background", "cat", "dog"]


def test_yolo_polygons_become_masks_and_a_box_alone_is_refused(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "in", {"1": "0 0.5 0.5 1.0 1.0\n", "3": POLYGON})
    (root / "classes.txt").write_text("cat\ndog\n")
    error = ingest_error(tmp_path / "refused", "yolo", root, segmentation=True)
    assert "1.txt:1: a box without a polygon. Leave segmentation out" in error
    (root / "labels" / "1.txt").unlink()
    run(tmp_path, "yolo", root, segmentation=True)
    rows = read_columns(tmp_path / "out")
    assert not decode_mask(rows["mask"][0]).any()
    polygon = (np.array(POLYGON.split()[1:], float).reshape(-1, 2) * [WIDTH, HEIGHT]).ravel().tolist()
    inside = coco_masks.decode(coco_masks.merge(coco_masks.frPyObjects([polygon], HEIGHT, WIDTH)))
    assert np.array_equal(decode_mask(rows["mask"][1]), 2 * inside)


@pytest.mark.parametrize(
    ("settings", "folders"),
    [
        ("train: images/train\nval: images/val\nnames: [cat, dog]\n", ("images/train", "images/val")),
        ("path: .\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n", ("images/train", "images/val")),
        (
            "train: ../train/images\nval: ../valid/images\nnc: 2\nnames: ['cat', 'dog']\n",
            ("train/images", "valid/images"),
        ),
        ("train: [train/images]\nval: val.txt\nnames: [cat, dog]\n", ("train/images", "valid/images")),
        ("names: [cat, dog]\n", ("images/train", "images/val")),
    ],
)
def test_data_sets_of_yolo_are_data_sets(tmp_path: Path, settings: str, folders: tuple[str, str]) -> None:
    root = tmp_path / "in"
    for folder, rows in zip(folders, (3, 2), strict=True):
        write_yolo(root, {f"{number}": "0 0.5 0.5 0.5 0.5" for number in range(rows)}, folder)
    (root / "val.txt").write_text(f"./{folders[1]}/0.png\n{folders[1]}/1.png\n")
    (root / "data.yaml").write_text(settings)
    parts = run(tmp_path, "yolo", root / "data.yaml").parts
    assert {name: (part.rows, part.class_counts) for name, part in parts.items()} == {
        "train": (3, {"background": 0, "cat": 3, "dog": 0}),
        "eval": (2, {"background": 0, "cat": 2, "dog": 0}),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 0.5 0.5 0.1 0.1", "1.txt:1: class 2; the classes are 0 to 1"),
        ("0 0.5 0.5 0.1", "3 numbers after the class"),
        ("0 20 10 5 5", "not a fraction of the image"),
        ("cat 0.5 0.5 0.1 0.1", "text that is not a number"),
        ("\n0 0.5 0.5 0.0 0.1", "1.txt:2 has the box [20.0, 13.5, 20.0, 16.5] (left, top, right, bottom), which"),
        ("0 0.9 0.5 0.5 0.1", "lies outside the image"),
        ("0 nan 0.5 0.5 0.1", "not a fraction of the image"),
    ],
)
def test_lines_of_yolo_that_cannot_be_used_are_bad_rows(tmp_path: Path, text: str, expected: str) -> None:
    root = write_yolo(tmp_path / "in", {"1": text})
    (root / "classes.txt").write_text("cat\ndog\n")
    message = ingest_error(tmp_path, "yolo", root)
    assert "row images/1.png: " in message
    assert expected in message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("names: 3\n", "the names of the classes are '3'"),
        ("names: [cat]\ntrain: labels\n", "no image in"),
        ("names: [cat]\ntrain: ../../../../etc\n", "no folder or list of images at"),
        ("names: [cat]\ntrain: [[a]]\n", "expected a folder of images"),
        ("- a\n", "no settings in it"),
        ("names: [", "Expected the data.yaml"),
        ("names: !!python/object/apply:os.system ['true']\n", "Expected the data.yaml"),
    ],
)
def test_wrong_settings_of_yolo_are_refused(tmp_path: Path, settings: str, expected: str) -> None:
    root = write_yolo(tmp_path / "in", {"1": "0 0.5 0.5 0.1 0.1"})
    (root / "data.yaml").write_text(settings)
    assert expected in ingest_error(tmp_path, "yolo", root)
