"""Readers of images with boxes around their objects: annotations of COCO and Pascal VOC (`yolo.py` has YOLO).

They give the columns of `ObjectDetection`: `image`, `boxes` (left, top, right, bottom in pixels of the image as viewers
show it) and `labels` (from 1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar
from xml.etree import ElementTree
from xml.parsers import expat

from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.image_files import (
    IGNORED,
    AnnotatedImages,
    Annotations,
    Box,
    Object,
    ObjectRow,
    Shape,
    decode_text,
    is_numbers,
    map_small_files,
    parse_coco_shape,
    read_small_file,
)
from ray_app.ingest.readers.image_names import FolderListing, has_image_suffix, is_below, order_splits, without_suffix
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
from ray_app.storage.text_files import iterate_json

T = TypeVar("T")
_MAX_XML_DEPTH = 16
_NO_SHAPE = "a segmentation that is neither polygons nor runs (RLE). Correct it, or leave the option segmentation out"


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
            split = next((sources.SPLITS[word] for word in reversed(words) if word in sources.SPLITS), "")
            splits.setdefault(split, []).append(file)
        if "" in splits or any(len(group) > 1 for group in splits.values()):
            listed = sources.format_items([file.name for file in files])
            raise DataError(
                f"{self.path}: the JSON files {listed} do not show by names or folders to which data set (train, val,"
                " test) they belong. Set input to one of them."
            )
        return {name: splits[name] for name in order_splits(splits)}

    def annotations(self) -> dict[str, Annotations]:
        """Returns the annotations of each JSON file."""
        return {name: self._read_file(file) for name, [file] in self.annotation_files().items()}

    def _read_file(self, file: File) -> Annotations:
        content = _CocoFile(file, self.options.segmentation)
        for key, item in iterate_json(file):
            content.add(key, item)
        content.check_lists()
        return content.annotations(self._find_images(file, content), self.skips)

    def _find_images(self, file: File, content: _CocoFile) -> dict[int, File | None]:
        """Returns the file of each image by its number; None where there is none.

        The folder of images is the option `images`, or one of those that data sets usually have.
        """
        names = {number: name for number, (name, _) in content.images.items() if is_below(name)}
        above = file.location.parent
        if self.options.images:
            folders = [to_location(self.options.images)]
        else:
            outer = above.parent
            year = without_suffix(file.location.name).rpartition("_")[2]
            folders = [above, above / "images", outer / year, outer / "images" / year, outer / "images", outer]
        listing = FolderListing()
        # One folder has all images. Where the first image is missing, any other one tells the folder.
        folder = next((one for name in names.values() for one in folders if listing.find(one, name)), None)
        if folder is None and (self.options.images is None or not is_folder(folders[0])):
            first = next(name for name, _ in content.images.values())
            raise DataError(
                f"{file}: none of the {len(content.images)} images is in any of {list(map(str, folders))}; the first"
                f" image is {first!r}. Name the folder of the images with images."
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
            raise DataError(f"{where} is not an object. Expected a JSON file of COCO.")
        if key == "categories":
            category = _field(where, item, "id", int)
            if category in self._categories:
                raise DataError(f"{where} has the id {category} of an earlier category. Use unique ids.")
            self._categories[category] = _field(where, item, "name", str)
        elif key == "images":
            image_id = _field(where, item, "id", int)
            if image_id in self.images:
                raise DataError(f"{where} has the id {image_id} of an earlier image. Use unique ids.")
            has_size = type(item.get("width")) is int and type(item.get("height")) is int
            size = (item["width"], item["height"]) if has_size else None
            self.images[image_id] = _field(where, item, "file_name", str), size
        else:
            is_crowd = item.get("iscrowd") or 0
            if isinstance(is_crowd, str) or is_crowd not in (0, 1):
                raise DataError(
                    f"{where} has {is_crowd!r} as 'iscrowd'; expected 0 or 1, as COCO has. Correct the file."
                )
            shape = parse_coco_shape(item.get("segmentation")) if self._segmentation else None
            category, box = _field(where, item, "category_id", int), item.get("bbox")
            image_id = _field(where, item, "image_id", int)
            self._objects.setdefault(image_id, []).append(
                (category, box, bool(is_crowd), shape, item.get("id", number))
            )

    def check_lists(self) -> None:
        """Raises DataError if the file lacks images or categories."""
        if missing := [key for key in ("images", "categories") if key not in self._counts]:
            raise DataError(f"{self._file}: no {missing[0]!r} in it; expected a JSON file of COCO. Give another input.")

    def annotations(self, files: dict[int, File | None], skips: bool) -> Annotations:
        """Returns the rows; a row is refused if its image is missing or one of its objects cannot be used.

        An annotation of an unknown image is a refused row where these are left out (`skips`); otherwise an error.
        """
        unknown = [
            (image_id, annotation)
            for image_id, objects in self._objects.items()
            if image_id not in self.images
            for *_, annotation in objects
        ]
        if unknown and not skips:
            raise DataError(
                f"{self._file}: annotations name the image {unknown[0][0]}, which is not in 'images'; the first one is"
                f" the annotation {unknown[0][1]}. Correct the file, or leave them out with --on_bad_row skip."
            )
        order = sorted(self._categories)
        labels = {category: label for label, category in enumerate(order, 1)}
        rows = [self._row(image_id, files.get(image_id), labels) for image_id in self.images]
        for image_id, annotation in unknown:
            reason = f"the annotation names the image {image_id}, which is not in 'images'"
            rows.append(ObjectRow(printable_name(f"annotation {annotation}"), None, reason=reason))
        crowds = sum(one[2] for objects in self._objects.values() for one in objects)
        notes = [f"{crowds} annotations of crowds (iscrowd) are not boxes."] if crowds else []
        if order != list(range(1, len(order) + 1)):
            notes.append(f"the categories {sources.format_items(order)} became the labels 1 to {len(order)}.")
        return Annotations(rows, tuple(self._categories[category] for category in order), tuple(notes))

    def _row(self, image_id: int, file: File | None, labels: dict[int, int]) -> ObjectRow:
        name, size = self.images[image_id]
        row = ObjectRow(printable_name(name), file, size=size, image_id=image_id)
        if file is None:
            return replace(row, reason=f"no file {name!r} in the folder of images")
        objects: list[Object] = []
        for category, box, is_crowd, shape, annotation in self._objects.get(image_id, ()):
            if category not in labels:
                reason = f"the annotation {annotation} has the category {category}, which 'categories' lacks"
                return replace(row, image=None, reason=reason)
            if self._segmentation and shape is None:
                return replace(row, image=None, reason=f"the annotation {annotation} has {_NO_SHAPE}")
            name = f"the annotation {annotation}"
            if is_crowd:
                objects.append(Object(None, IGNORED, name, shape))
                continue
            if not is_numbers(box, 4):
                reason = f"the annotation {annotation} has the bbox {box!r}; expected [left, top, width, height]"
                return replace(row, image=None, reason=reason)
            left, top, width, height = map(float, box)
            objects.append(Object((left, top, left + width, top + height), labels[category], name, shape))
        return replace(row, objects=tuple(objects))


def _field(where: str, item: dict[str, Any], key: str, kind: type[T]) -> T:
    value = item.get(key)
    if type(value) is not kind or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        expected = "text" if kind is str else "an integer"
        raise DataError(f"{where} has {value!r} as {key!r}; expected {expected}, as COCO has. Correct the file.")
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
        stems = {split: _listed_stems(file, xml.keys()) for split, file in self._lists.items()}
        if "train" not in stems:
            return {"": [xml[stem] for stem in sorted(xml)]}
        for split, names in stems.items():
            if missing := [name for name in names if name not in xml]:
                raise DataError(f"{self._lists[split]}: the list names {missing[0]!r}, which has no XML file. Add it.")
        return {split: [xml[name] for name in stems[split]] for split in order_splits(stems) if stems[split]}

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
        listing = FolderListing()
        trees = {name: map_small_files(_parse_xml, files) for name, files in self.annotation_files().items()}
        objects = {id(tree): _voc_objects(tree) for several in trees.values() for tree in several}
        classes = sorted({name for several in objects.values() if isinstance(several, list) for name, _ in several})
        if not classes:
            several = [
                (file, tree)
                for name, files in self.annotation_files().items()
                for file, tree in zip(files, trees[name], strict=True)
            ]
            for file, tree in several:
                if isinstance(reason := objects[id(tree)], str):
                    raise DataError(f"{file}: {reason}, and no other file has an object. Correct them.")
            raise DataError(f"{self.path}: no object in any of the XML files. Give another input.")
        # VOC counts pixels from 1, and a right or bottom edge includes its pixel; some tools count from 0.
        # A box far outside its image is a bad row, and says nothing about the others.
        boxes = [box for several in objects.values() if isinstance(several, list) for _, box in several]
        first = 0.0 if any(-1 <= min(box[:2]) < 1 for box in boxes) else 1.0
        note = (
            "boxes count pixels from 1, as VOC does" if first else "boxes count pixels from 0, since one begins there"
        )
        rows: dict[str, list[ObjectRow]] = {}
        used: set[Location] = set()
        for name, files in self.annotation_files().items():
            rows[name] = []
            for file, tree in zip(files, trees[name], strict=True):
                stem = without_suffix(file.location.name)
                image = self._find_image(stem, (tree.findtext("filename") or "").strip(), listing)
                used |= {image.location} if image else set()
                rows[name].append(self._row(file, tree, objects[id(tree)], classes, first, image))
        skipped = self._skipped_images(used)
        return {name: Annotations(several, tuple(classes), (f"{note}.",), skipped) for name, several in rows.items()}

    @cached_property
    def _image_folders(self) -> list[Location]:
        if self.options.images:
            return [to_location(self.options.images)]
        above = self.path / "Annotations" if is_folder(self.path / "Annotations") else self.path
        return [self.path / "JPEGImages", self.path / "images", above]

    def _find_image(self, stem: str, name: str, listing: FolderListing) -> File | None:
        """Returns the image of an XML file with this stem and this element `filename`."""
        folders = self._image_folders
        named = next(
            (f for d in folders if is_below(name) and (f := listing.find(d, name)) and has_image_suffix(f)), None
        )
        # The name of the XML file counts, as in VOC: tools that rename or copy files leave old names in them.
        if named is None or without_suffix(named.location.name) != stem:
            return next((f for d in folders if (f := listing.find_image(d, stem))), named)
        return named

    def _skipped_images(self, used: set[Location]) -> tuple[tuple[str, str], ...]:
        """Returns the images that no XML file of a data set describes, with the reason."""
        reason = "left out: an image without an XML file"
        reason += " that a list in ImageSets/Main names" if "train" in self._lists else ""
        folders = filter(is_folder, self._image_folders)
        images = [file for folder in folders for file in files_in(folder) if has_image_suffix(file)]
        return tuple((printable_name(file.name), reason) for file in images if file.location not in used)

    def _row(
        self,
        file: File,
        tree: ElementTree.Element,
        objects: list[tuple[str, Box]] | str,
        classes: list[str],
        first: float,
        image: File | None,
    ) -> ObjectRow:
        stem = without_suffix(file.location.name)
        row = ObjectRow(printable_name(stem), None)
        if isinstance(objects, str):
            return replace(row, reason=objects)
        if image is None:
            name = (tree.findtext("filename") or "").strip() or stem
            return replace(row, reason=f"no image {name!r} in {list(map(str, self._image_folders))}")
        size = [tree.findtext(f"size/{key}", "").strip() for key in ("width", "height")]
        declared = (int(size[0]), int(size[1])) if all(re.fullmatch(r"0*[1-9]\d{0,9}", text) for text in size) else None
        kept = tuple(
            Object(
                (left - first, top - first, right, bottom),
                classes.index(name) + 1,
                f"object {i} of {file.location.name}",
            )
            for i, (name, (left, top, right, bottom)) in enumerate(objects, 1)
        )
        return replace(row, image=image, objects=kept, size=declared)


_VOC_LISTS = {"train": "train", "val": "eval", "test": "test"}


def _listed_stems(file: File, stems: Collection[str]) -> list[str]:
    """Returns the names in a list of images; refuses a list of one class, which has images without the class, too.

    VOC's development kit has these lists as `cat_train.txt`: -1 is an image without, 1 with, 0 with a difficult object.
    """
    lines = [line.strip() for line in decode_text(file, read_small_file(file)).splitlines() if line.strip()]
    for line in lines:
        if line not in stems and line.split()[1:] in (["-1"], ["0"], ["1"]):
            raise DataError(
                f"{file}: the line {line!r} marks whether an image has one class (1, -1 or 0), but each line must have"
                " one name. Remove the second words to use all images."
            )
    return lines


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
        raise DataError(f"{file} declares a document type or entities, which annotations must not. Remove them.")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_XML_DEPTH:
            raise DataError(f"{file}: elements are nested more than {_MAX_XML_DEPTH} deep; is the file of VOC?")
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
