"""Readers of images with boxes around their objects: annotations of COCO, Pascal VOC and YOLO.

They give the columns of `ObjectDetection`: `image`, `boxes` (left, top, right, bottom in pixels of the image as viewers
show it) and `labels` (from 1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np
import yaml

from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import base
from ray_app.ingest.readers.image_files import (
    IGNORED,
    AnnotatedImages,
    Annotations,
    Box,
    ObjectRow,
    Shape,
    decode_text,
    is_numbers,
    map_small_files,
    parse_coco_shape,
    read_small_file,
)
from ray_app.ingest.readers.image_names import IMAGE_SUFFIXES, has_image_suffix, without_suffix
from ray_app.ingest.readers.json_lines import iterate_json
from ray_app.storage.data_files import (
    File,
    files_in,
    find_file,
    folders_in,
    is_folder,
    parser_errors,
    printable_name,
)
from ray_app.storage.files import Location, to_location

_MAX_XML_DEPTH = 16
_NO_SHAPE = "a segmentation that is neither polygons nor runs (RLE). Correct it, or leave segmentation out"


class _Folder:
    """The files of folders by their names; each folder is listed once."""

    def __init__(self) -> None:
        self._listings: dict[Location, dict[str, File]] = {}

    def find(self, folder: Location, name: str) -> File | None:
        """Returns the file with a path below a folder, or None."""
        *above, last = name.split("/")
        for part in above:
            folder = folder / part
        if folder not in self._listings:
            present = is_folder(folder)
            self._listings[folder] = {file.location.name: file for file in files_in(folder)} if present else {}
        return self._listings[folder].get(last)

    def find_image(self, folder: Location, stem: str) -> File | None:
        """Returns the image of a stem in a folder, or None."""
        suffixes = [case for suffix in IMAGE_SUFFIXES for case in (suffix, suffix.upper())]
        return next((file for suffix in suffixes if (file := self.find(folder, stem + suffix))), None)


def _is_below(name: str) -> bool:
    """Returns whether a name in annotations leads to a file below a folder, whatever folder that is."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _order_splits(names: Iterable[str]) -> list[str]:
    return sorted(names, key=["train", "eval", "test", ""].index)


class Coco(AnnotatedImages):
    """One JSON file of COCO, or a folder with the JSON files of several data sets."""

    traits = FormatTraits(options=frozenset({"check", "images", "segmentation"}), eval_fraction=0.1)

    def annotation_files(self) -> dict[str, list[File]]:
        """Returns the JSON file of each data set."""
        if file := find_file(self.path):
            return {"": [file]}
        if not is_folder(self.path):
            raise DataError(f"{self.path}: no such file or folder; expected a JSON file of COCO or a folder of them.")
        folders = [self.path, *folders_in(self.path)]
        files = [file for folder in folders for file in files_in(folder) if file.location.name.endswith(".json")]
        files = [file for file in files if file.location.name.startswith("instances_")] or files
        if len(files) < 2:
            if not files:
                raise DataError(f"{self.path}: no JSON file in it; expected annotations of COCO. Give another input.")
            return {"": files}
        splits: dict[str, list[File]] = {}
        for file in files:
            words = re.split(r"[^a-z]+", f"{file.location.parent.name}_{file.location.name}".lower())
            split = next((base.SPLITS[word] for word in reversed(words) if word in base.SPLITS), "")
            splits.setdefault(split, []).append(file)
        if "" in splits or any(len(group) > 1 for group in splits.values()):
            listed = base.format_items([file.name for file in files])
            raise DataError(
                f"{self.path}: the JSON files {listed} do not say by their names or folders which is of which data set"
                " (train, val, test). Give one of them as input."
            )
        return {name: splits[name] for name in _order_splits(splits)}

    def annotations(self) -> dict[str, Annotations]:
        """Returns the annotations of each JSON file."""
        return {name: self._read_file(file) for name, [file] in self.annotation_files().items()}

    def _read_file(self, file: File) -> Annotations:
        content = _CocoFile(file, self.options.segmentation)
        for key, item in iterate_json(file):
            content.add(key, item)
        return content.annotations(self._find_images(file, content))

    def _find_images(self, file: File, content: _CocoFile) -> dict[int, File | None]:
        """Returns the file of each image by its number; None where there is none.

        The folder of images is the option `images`, or one of those that data sets usually have.
        """
        names = {number: name for number, (name, _) in content.images.items() if _is_below(name)}
        above = file.location.parent
        if self.options.images:
            folders = [to_location(self.options.images)]
        else:
            outer = above.parent
            year = without_suffix(file.location.name).rpartition("_")[2]
            folders = [above, above / "images", outer / year, outer / "images" / year, outer / "images", outer]
        listing = _Folder()
        first = next(iter(names.values()), "")
        folder = next((folder for folder in folders if listing.find(folder, first)), None)
        if folder is None and (self.options.images is None or not is_folder(folders[0])):
            raise DataError(
                f"{file}: the first image, {first!r}, is in none of {[str(folder) for folder in folders]}. Name the"
                " folder of the images by images."
            )
        return {number: listing.find(folder or folders[0], name) for number, name in names.items()}


class _CocoFile:
    """Collects the items of a JSON file of COCO."""

    def __init__(self, file: File, segmentation: bool) -> None:
        self._file, self._segmentation = file, segmentation
        self.images: dict[int, tuple[str, tuple[int, int] | None]] = {}
        self._categories: dict[int, str] = {}
        self._objects: dict[int, list[tuple[int, Any, bool, Shape | None, Any]]] = {}
        """By image: category, box, whether it is a crowd, outline, and id of each object."""
        self._counts: dict[str, int] = {}

    def add(self, key: str, item: Any) -> None:
        """Adds an item of the list `key`; raises DataError if it is not of COCO's form."""
        if key not in ("images", "annotations", "categories"):
            return
        number = self._counts[key] = self._counts.get(key, 0) + 1
        where = f"{self._file}: item {number} of {key!r}"
        if not isinstance(item, dict):
            raise DataError(f"{where} is no object. Expected a JSON file of COCO.")
        if key == "categories":
            category = _integer(where, item, "id")
            if category in self._categories:
                raise DataError(f"{where} has the id {category} of an earlier one. Give each category its own.")
            self._categories[category] = _string(where, item, "name")
        elif key == "images":
            image_id = _integer(where, item, "id")
            if image_id in self.images:
                raise DataError(f"{where} has the id {image_id} of an earlier one. Give each image its own.")
            has_size = type(item.get("width")) is int and type(item.get("height")) is int
            size = (item["width"], item["height"]) if has_size else None
            self.images[image_id] = _string(where, item, "file_name"), size
        else:
            is_crowd = bool(item.get("iscrowd"))
            shape = parse_coco_shape(item.get("segmentation")) if self._segmentation else None
            category, box = _integer(where, item, "category_id"), item.get("bbox")
            image_id = _integer(where, item, "image_id")
            self._objects.setdefault(image_id, []).append((category, box, is_crowd, shape, item.get("id", number)))

    def annotations(self, files: dict[int, File | None]) -> Annotations:
        """Returns the rows; a row is refused if its image is missing or one of its objects cannot be used."""
        missing = [key for key in ("images", "annotations", "categories") if key not in self._counts]
        if "images" in missing or "categories" in missing:
            raise DataError(f"{self._file}: no {missing[0]!r} in it; expected a JSON file of COCO. Give another input.")
        if unknown := [image_id for image_id in self._objects if image_id not in self.images]:
            raise DataError(
                f"{self._file}: annotations name the image {unknown[0]}, which is not in 'images'. Correct the file."
            )
        order = sorted(self._categories)
        labels = {category: label for label, category in enumerate(order, 1)}
        rows = [self._row(image_id, files.get(image_id), labels) for image_id in self.images]
        crowds = sum(one[2] for objects in self._objects.values() for one in objects)
        notes = [f"{crowds} annotations of crowds (iscrowd) are no boxes."] if crowds else []
        if order != list(range(1, len(order) + 1)):
            notes.append(f"the categories {base.format_items(order)} became the labels 1 to {len(order)}.")
        return Annotations(rows, tuple(self._categories[category] for category in order), tuple(notes))

    def _row(self, image_id: int, file: File | None, labels: dict[int, int]) -> ObjectRow:
        name, size = self.images[image_id]
        row = ObjectRow(printable_name(name), file, size=size, image_id=image_id)
        if file is None:
            return replace(row, reason=f"no file {name!r} in the folder of images")
        boxes: list[Box] = []
        numbers: list[int] = []
        shapes: list[tuple[Shape, int]] = []
        for category, box, is_crowd, shape, annotation in self._objects.get(image_id, ()):
            if category not in labels:
                reason = f"the annotation {annotation} has the category {category}, which 'categories' lacks"
                return replace(row, image=None, reason=reason)
            if self._segmentation and shape is None:
                return replace(row, image=None, reason=f"the annotation {annotation} has {_NO_SHAPE}")
            if shape:
                shapes.append((shape, IGNORED if is_crowd else labels[category]))
            if is_crowd:
                continue
            if not is_numbers(box, 4):
                reason = f"the annotation {annotation} has the bbox {box!r}; expected [left, top, width, height]"
                return replace(row, image=None, reason=reason)
            left, top, width, height = map(float, box)
            boxes.append((left, top, left + width, top + height))
            numbers.append(labels[category])
        return replace(row, boxes=tuple(boxes), labels=tuple(numbers), shapes=tuple(shapes))


def _integer(where: str, item: dict[str, Any], key: str) -> int:
    value = item.get(key)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise DataError(f"{where} has {value!r} as {key!r}; expected an integer, as COCO has. Correct the file.")
    return value


def _string(where: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where} has {value!r} as {key!r}; expected text, as COCO has. Correct the file.")
    return value


class Voc(AnnotatedImages):
    """A folder with the XML files of Pascal VOC: `Annotations` and `JPEGImages`, or XML files beside the images."""

    traits = FormatTraits(options=frozenset({"check", "images"}), eval_fraction=0.1)

    def annotation_files(self) -> dict[str, list[File]]:
        """Returns the XML files of each data set: those that lists in `ImageSets/Main` name, or all."""
        folder = self.path / "Annotations" if is_folder(self.path / "Annotations") else self.path
        files = files_in(folder) if is_folder(folder) else []
        xml = {without_suffix(file.location.name): file for file in files if file.location.name.endswith(".xml")}
        if not xml:
            raise DataError(
                f"{self.path}: no XML file in it or in its folder Annotations; expected annotations of Pascal VOC."
            )
        stems = {split: decode_text(file, read_small_file(file)).split() for split, file in self._lists.items()}
        if "train" not in stems:
            return {"": [xml[stem] for stem in sorted(xml)]}
        for split, names in stems.items():
            if missing := [name for name in names if name not in xml]:
                raise DataError(f"{self._lists[split]}: it names {missing[0]!r}, which has no XML file. Add it.")
        return {split: [xml[name] for name in stems[split]] for split in _order_splits(stems) if stems[split]}

    def files(self) -> Iterator[File]:
        """Yields the lists of data sets, the files of annotations and the images."""
        yield from self._lists.values()
        yield from super().files()

    @cached_property
    def _lists(self) -> dict[str, File]:
        """The lists in `ImageSets/Main` by their data sets."""
        files = {split: find_file(self.path / "ImageSets" / "Main" / f"{n}.txt") for n, split in _VOC_LISTS.items()}
        return {split: file for split, file in files.items() if file}

    def annotations(self) -> dict[str, Annotations]:
        """Returns the annotations of each data set; the classes are the sorted names of all objects."""
        listing = _Folder()
        trees = {name: map_small_files(_parse_xml, files) for name, files in self.annotation_files().items()}
        objects = {id(tree): _voc_objects(tree) for several in trees.values() for tree in several}
        classes = sorted({name for several in objects.values() if isinstance(several, list) for name, _ in several})
        if not classes:
            raise DataError(f"{self.path}: no object in any of the XML files. Give another input.")
        # VOC counts pixels from 1, and a right or bottom edge includes its pixel; some tools count from 0.
        # A box far outside its image is a bad row, and says nothing about the others.
        boxes = [box for several in objects.values() if isinstance(several, list) for _, box in several]
        first = 0.0 if any(-1 <= min(box[:2]) < 1 for box in boxes) else 1.0
        note = (
            "boxes count pixels from 1, as VOC does" if first else "boxes count pixels from 0, since one begins there"
        )
        result = {}
        for name, files in self.annotation_files().items():
            rows = [
                self._row(file, tree, objects[id(tree)], classes, first, listing)
                for file, tree in zip(files, trees[name], strict=True)
            ]
            result[name] = Annotations(rows, tuple(classes), (f"{note}.",))
        return result

    def _row(
        self,
        file: File,
        tree: ElementTree.Element,
        objects: list[tuple[str, Box]] | str,
        classes: list[str],
        first: float,
        listing: _Folder,
    ) -> ObjectRow:
        stem = without_suffix(file.location.name)
        row = ObjectRow(printable_name(stem), None)
        if isinstance(objects, str):
            return replace(row, reason=objects)
        above = file.location.parent
        usual = [self.path / "JPEGImages", self.path / "images", above]
        folders = [to_location(self.options.images)] if self.options.images else usual
        name = (tree.findtext("filename") or "").strip()
        named = next(
            (f for d in folders if _is_below(name) and (f := listing.find(d, name)) and has_image_suffix(f)), None
        )
        # The name of the XML file counts, as in VOC: tools that rename or copy files leave old names in them.
        image = named
        if named is None or without_suffix(named.location.name) != stem:
            image = next((f for d in folders if (f := listing.find_image(d, stem))), named)
        if image is None:
            return replace(row, reason=f"no image {name or stem!r} in {[str(folder) for folder in folders]}")
        size = [tree.findtext(f"size/{key}", "").strip() for key in ("width", "height")]
        declared = (int(size[0]), int(size[1])) if all(re.fullmatch(r"0*[1-9]\d{0,9}", text) for text in size) else None
        boxes = tuple((left - first, top - first, right, bottom) for _, (left, top, right, bottom) in objects)
        labels = tuple(classes.index(name) + 1 for name, _ in objects)
        return replace(row, image=image, boxes=boxes, labels=labels, size=declared)


_VOC_LISTS = {"train": "train", "val": "eval", "test": "test"}


def _voc_objects(tree: ElementTree.Element) -> list[tuple[str, Box]] | str:
    """Returns name and box of each object in a file, or the reason why one of them cannot be used."""
    objects = []
    for number, item in enumerate(tree.findall("object"), 1):
        name = (item.findtext("name") or "").strip()
        texts = [(item.findtext(f"bndbox/{key}") or "").strip() for key in ("xmin", "ymin", "xmax", "ymax")]
        try:
            box = (float(texts[0]), float(texts[1]), float(texts[2]), float(texts[3]))
            if not all(map(math.isfinite, box)):
                raise ValueError
        except ValueError:
            return f"object {number} has the edges {texts}; expected four numbers (xmin, ymin, xmax, ymax)"
        if not name:
            return f"object {number} has no name"
        objects.append((name, box))
    return objects


def _parse_xml(file: File, content: bytes) -> ElementTree.Element:
    """Returns the root of an XML file; refuses declarations of types and entities, which can unpack to anything."""
    builder, depth = ElementTree.TreeBuilder(), 0

    def refuse(*_: Any) -> None:
        raise DataError(f"{file}: it declares a document type or entities, which annotations do not. Remove them.")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_XML_DEPTH:
            raise DataError(f"{file}: elements are more than {_MAX_XML_DEPTH} deep in each other. Is it of VOC?")
        builder.start(name, attributes)

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(name)

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    with parser_errors(file, "Expected an XML file of Pascal VOC. Write it again."):
        parser.Parse(content, True)
    return builder.close()


class Yolo(AnnotatedImages):
    """The `data.yaml` of a data set of YOLO, or a folder with it, or with `images`, `labels` and `classes.txt`."""

    traits = FormatTraits(options=frozenset({"check", "segmentation"}), eval_fraction=0.1)

    def annotation_files(self) -> dict[str, list[File]]:
        """Returns the files with the names of the classes and the data sets, the lists of images, and all labels."""
        lists = [one for several in self._named_images.values() for one in several if isinstance(one, File)]
        labels = [label for _, label in (pair for pairs in self._pairs.values() for pair in pairs) if label]
        return {"": [self._names_file, *lists, *labels]}

    def annotations(self) -> dict[str, Annotations]:
        """Returns the annotations of each data set."""
        result = {}
        for name, pairs in self._pairs.items():
            contents = dict(map_small_files(lambda *both: both, [label for _, label in pairs if label]))
            rows = [self._row(image, label, contents[label] if label else b"") for image, label in pairs]
            result[name] = Annotations(rows, self._classes)
        if not any(row.boxes or row.reason for one in result.values() for row in one.rows):
            raise DataError(
                f"{self.path}: no image has a label; the labels of images/a/1.jpg are in labels/a/1.txt. Give another"
                " input."
            )
        return result

    @cached_property
    def _names_file(self) -> File:
        if file := find_file(self.path):
            return file
        names = ("data.yaml", "dataset.yaml", "data.yml", "classes.txt", "obj.names", "labels/classes.txt")
        for name in names:
            if file := find_file(self.path / name):
                return file
        raise DataError(f"{self.path}: none of {', '.join(names)} in it; one of them names the classes. Add it.")

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The content of `data.yaml`; of a file with a name of a class in each line, these names."""
        file = self._names_file
        text = decode_text(file, read_small_file(file))
        if not file.location.name.endswith((".yaml", ".yml")):
            return {"names": [line.strip() for line in text.splitlines() if line.strip()]}
        with parser_errors(file, "Expected the data.yaml of a data set of YOLO. Correct it."):
            settings = yaml.safe_load(text)
        if not isinstance(settings, dict):
            raise DataError(f"{file}: no settings in it; expected names, train and val. Correct it.")
        if "kpt_shape" in settings:
            raise DataError(f"{file}: kpt_shape says that the labels have keypoints; allowed are boxes and polygons.")
        return settings

    @cached_property
    def _classes(self) -> tuple[str, ...]:
        names = self._settings.get("names")
        if isinstance(names, dict) and sorted(names, key=str) == sorted(range(len(names)), key=str):
            names = [names[number] for number in range(len(names))]
        if not isinstance(names, list) or not names or not all(isinstance(name, str | int) for name in names):
            raise DataError(
                f"{self._names_file}: the names of the classes are {str(names)[:200]}; expected a list of them, or"
                " names by the numbers from 0."
            )
        return tuple(map(str, names))

    @cached_property
    def _named_images(self) -> dict[str, list[Location | File]]:
        """The folders of images and the lists of images that `data.yaml` names, by data set."""
        named: dict[str, list[Location | File]] = {}
        for key, name in (("train", "train"), ("val", "eval"), ("test", "test")):
            if entries := self._settings.get(key):
                named[name] = [self._find(entry) for entry in (entries if isinstance(entries, list) else [entries])]
        return named

    @cached_property
    def _pairs(self) -> dict[str, list[tuple[File, File | None]]]:
        """The images of each data set with the files of their labels, if they have one."""
        listing = _Folder()
        named = self._named_images or self._usual_folders()
        splits: dict[str, list[tuple[File, File | None]]] = {}
        for name, several in named.items():
            images = []
            for one in several:
                images += self._listed_images(one) if isinstance(one, File) else _images_below(one)
                if not images:
                    raise DataError(f"{self._names_file}: no image in {one}. Correct it, or add images.")
            splits[name] = [(image, self._label_of(image, listing)) for image in images]
        return {"" if list(splits) == ["train"] else name: pairs for name, pairs in splits.items()}

    def _usual_folders(self) -> dict[str, list[Location | File]]:
        """Returns the folder `images`, or the folders of data sets in it."""
        root = self._names_file.location.parent
        root = root.parent if root.name == "labels" else root
        folder = root / "images" if is_folder(root / "images") else root
        inner = folders_in(folder)
        splits: dict[str, list[Location | File]] = {}
        for one in inner:
            splits.setdefault(base.SPLITS.get(one.name.lower(), ""), []).append(one)
        if "" in splits or "train" not in splits:
            return {"": [folder]}
        if len(splits) < len(inner) or any(has_image_suffix(file) for file in files_in(folder)):
            raise DataError(
                f"{folder}: two of the folders {sorted(one.name for one in inner)} are one data set, or images are"
                " beside them. Name the folders in data.yaml by train, val and test."
            )
        return {name: splits[name] for name in _order_splits(splits)}

    def _find(self, entry: Any) -> Location | File:
        """Returns a folder of images, or a list of images, that `data.yaml` names."""
        if not isinstance(entry, str) or "\0" in entry:
            raise DataError(
                f"{self._names_file}: it names {entry!r}; expected a folder of images, or a list. Correct it."
            )
        beside = self._names_file.location.parent
        root = self._settings.get("path")
        bare = re.sub(r"^(\.\./|\./)+", "", entry)
        bases = [beside / root / bare] if isinstance(root, str) and _is_below(root) else []
        for location in [*bases, beside / bare]:
            if is_folder(location):
                return location
            if location.name.endswith(".txt") and (file := find_file(location)):
                return file
        raise DataError(
            f"{self._names_file}: it names {entry!r}, which is no folder and no list beside it. Correct path, train,"
            " val and test, or leave them out."
        )

    def _listed_images(self, file: File) -> list[File]:
        images = []
        for line in filter(None, map(str.strip, decode_text(file, read_small_file(file)).splitlines())):
            bare = line.removeprefix("./")
            image = find_file(file.location.parent / bare) if _is_below(bare) else None
            if image is None:
                raise DataError(f"{file}: it names {line!r}, which is no file beside it. Correct the list.")
            images.append(image)
        return images

    def _label_of(self, image: File, listing: _Folder) -> File | None:
        """Returns the file of labels of an image: beside it, or in `labels` where the image is in `images`."""
        stem = f"{without_suffix(image.location.name)}.txt"
        if file := listing.find(image.location.parent, stem):
            return file
        below, folder = [stem], image.location.parent
        for _ in range(_MAX_XML_DEPTH):
            if folder.name == "images":
                return listing.find(folder.parent / "labels", "/".join(below))
            if folder.parent == folder:
                break
            below.insert(0, folder.name)
            folder = folder.parent
        return None

    def _row(self, image: File, label: File | None, content: bytes) -> ObjectRow:
        row = ObjectRow(_yolo_id(self._names_file, image), image, is_fraction=True)
        if label is None:
            return row
        boxes: list[Box] = []
        labels: list[int] = []
        shapes: list[tuple[Shape, int]] = []
        for number, line in enumerate(decode_text(label, content).splitlines(), 1):
            if not line.strip():
                continue
            try:
                category, box, points = _yolo_line(line.split(), len(self._classes))
            except ValueError as error:
                return replace(row, image=None, reason=f"{label.name}:{number}: {error}")
            boxes.append(box)
            labels.append(category + 1)
            if self.options.segmentation:
                if not points:
                    reason = f"{label.name}:{number}: a box without a polygon. Leave segmentation out"
                    return replace(row, image=None, reason=reason)
                shapes.append((Shape((np.array(points, np.float64),)), category + 1))
        return replace(row, boxes=tuple(boxes), labels=tuple(labels), shapes=tuple(shapes))


def _yolo_id(names: File, image: File) -> str:
    root = str(names.location.parent)
    text = str(image.location)
    return printable_name(text.removeprefix(root).lstrip("/"))


def _yolo_line(words: list[str], classes: int) -> tuple[int, Box, tuple[float, ...]]:
    """Returns class, box and polygon of a line: class, middle and size of a box, or class and the points of a polygon.

    The polygon of a box is empty. All are fractions of width and height. Raises ValueError for any other line.
    """
    try:
        category, numbers = int(words[0]), [float(word) for word in words[1:]]
    except ValueError as error:
        raise ValueError("it holds something else than numbers") from error
    if not 0 <= category < classes:
        raise ValueError(f"class {category}; the classes are 0 to {classes - 1}")
    if not all(-0.01 <= number <= 1.01 for number in numbers):
        raise ValueError("a number is no fraction of the image; expected 0 to 1")
    if len(numbers) == 4:
        x, y, width, height = numbers
        xs, ys = [x - width / 2, x + width / 2], [y - height / 2, y + height / 2]
        return category, (xs[0], ys[0], xs[1], ys[1]), ()
    if len(numbers) < 6 or len(numbers) % 2:
        raise ValueError(f"{len(numbers)} numbers after the class; expected 4, or the points of a polygon")
    xs, ys = numbers[::2], numbers[1::2]
    return category, (min(xs), min(ys), max(xs), max(ys)), tuple(numbers)


def _images_below(folder: Location, depth: int = 0) -> list[File]:
    """Returns the images in a folder and in the folders in it."""
    if depth > _MAX_XML_DEPTH:
        raise DataError(f"{folder}: folders are more than {_MAX_XML_DEPTH} deep in each other. Is one of them a link?")
    images = [file for file in files_in(folder) if has_image_suffix(file)]
    return [*images, *(image for inner in folders_in(folder) for image in _images_below(inner, depth + 1))]
