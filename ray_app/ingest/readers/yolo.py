"""Reader of images with boxes around their objects as data sets of YOLO have them: `data.yaml` and files of labels."""

from __future__ import annotations

import os
import re
import reprlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.image_files import (
    AnnotatedImages,
    Annotations,
    Box,
    Object,
    ObjectRow,
    Shape,
    decode_text,
    map_small_files,
    read_small_file,
)
from ray_app.ingest.readers.image_names import (
    MAX_DEPTH,
    FolderListing,
    has_image_suffix,
    images_below,
    is_below,
    order_splits,
    without_suffix,
)
from ray_app.storage.data_files import File, files_in, find_file, folders_in, is_folder, parser_errors, printable_name
from ray_app.storage.files import Location

_OTHER_TEXTS = ("classes.txt", "train.txt", "val.txt", "test.txt")
"""Text files beside labels that are no labels."""


class _SettingsLoader(yaml.SafeLoader):
    """Loads YAML with each word as it is written, since `yes`, `no` and `1e3` may be names of classes.

    References (`*name`) are refused: a few of them inside each other stand for gigabytes. So is a repeated key, of
    which YAML takes the last value in silence.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Returns the next node."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("the file has references (*name), which are not allowed; write the values out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Returns the keys and values of a node."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"the key {repeated[0]!r} occurs twice")
        return super().construct_mapping(node, deep)


_SettingsLoader.yaml_implicit_resolvers = {
    first: [one for one in several if one[0] == "tag:yaml.org,2002:null"]
    for first, several in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


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
            result[name] = Annotations(rows, self._classes, skipped=self._skipped_labels)
        if not any(row.objects or row.reason for one in result.values() for row in one.rows):
            raise DataError(
                f"{self.path}: no image has a label; the labels of images/a/1.jpg must be in labels/a/1.txt. Set"
                " another input."
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
        raise DataError(f"{self.path}: no {' or '.join(names)} in it, which names the classes. Add one.")

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The content of `data.yaml`; of a file with a name of a class in each line, these names."""
        file = self._names_file
        text = decode_text(file, read_small_file(file))
        if not file.location.name.endswith((".yaml", ".yml")):
            return {"names": [line.strip() for line in text.splitlines() if line.strip()]}
        with parser_errors(file, "Expected the data.yaml of a data set of YOLO. Correct it."):
            settings = yaml.load(text, _SettingsLoader)
        if not isinstance(settings, dict):
            raise DataError(f"{file}: no settings in it; expected names, train and val. Correct it.")
        if "kpt_shape" in settings:
            raise DataError(f"{file}: the labels have keypoints (kpt_shape); allowed are boxes and polygons.")
        return settings

    @cached_property
    def _classes(self) -> tuple[str, ...]:
        names = self._settings.get("names")
        if isinstance(names, dict) and names.keys() == {str(number) for number in range(len(names))}:
            names = [names[str(number)] for number in range(len(names))]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise DataError(
                f"{self._names_file}: the names of the classes are {reprlib.repr(names)}; expected a list of them, or"
                " names by the numbers from 0. Correct names."
            )
        count = self._settings.get("nc")
        if count is not None and str(count).removesuffix(".0") != str(len(names)):
            raise DataError(
                f"{self._names_file}: nc is {reprlib.repr(count)}, but names has {len(names)} classes. Correct one of"
                " them, or leave nc out."
            )
        return tuple(names)

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
        listing = FolderListing()
        named = self._named_images or self._usual_folders()
        splits: dict[str, list[tuple[File, File | None]]] = {}
        for name, several in named.items():
            images = []
            for one in several:
                images += self._listed_images(one) if isinstance(one, File) else images_below(one)
                if not images:
                    raise DataError(f"{self._names_file}: no image in {one}. Correct the path, or add images.")
            splits[name] = [(image, self._label_of(image, listing)) for image in images]
        return {"" if list(splits) == ["train"] else name: pairs for name, pairs in splits.items()}

    @cached_property
    def _skipped_labels(self) -> tuple[tuple[str, str], ...]:
        """Returns the files of labels that belong to no image of a data set, with the reason."""
        pairs = [pair for several in self._pairs.values() for pair in several]
        lists = {one.location for several in self._named_images.values() for one in several if isinstance(one, File)}
        labels = {label.location for _, label in pairs if label}
        others = labels | lists
        folders = {label.parent for label in labels}
        files = [file for folder in sorted(folders, key=str) for file in files_in(folder)]
        return tuple(
            (_yolo_id(self._names_file, file), "left out: a file of labels without an image in the data sets")
            for file in files
            if file.location not in others
            and file.location.name.endswith(".txt")
            and file.location.name not in _OTHER_TEXTS
            and not file.location.name.lower().startswith("readme")
        )

    def _usual_folders(self) -> dict[str, list[Location | File]]:
        """Returns the folder `images`, or the folders of data sets in it."""
        root = self._names_file.location.parent
        root = root.parent if root.name == "labels" else root
        folder = root / "images" if is_folder(root / "images") else root
        inner = folders_in(folder)
        splits: dict[str, list[Location | File]] = {}
        for one in inner:
            splits.setdefault(sources.SPLITS.get(one.name.lower(), ""), []).append(one)
        if "" in splits or "train" not in splits:
            return {"": [folder]}
        if len(splits) < len(inner) or any(has_image_suffix(file) for file in files_in(folder)):
            raise DataError(
                f"{folder}: two of the folders {sorted(one.name for one in inner)} mean the same data set, or images"
                " lie next to them. Name the folders in data.yaml with train, val and test."
            )
        return {name: splits[name] for name in order_splits(splits)}

    def _find(self, entry: Any) -> Location | File:
        """Returns a folder of images, or a list of images, that `data.yaml` names."""
        if not isinstance(entry, str) or "\0" in entry:
            raise DataError(f"{self._names_file} names {entry!r}; expected a folder of images, or a list. Correct it.")
        tried = self._candidates(entry)
        for location in tried:
            if is_folder(location):
                return location
            if location.name.endswith(".txt") and (file := find_file(location)):
                return file
        raise DataError(
            f"{self._names_file} names {entry!r}, but there is no folder or list of images at"
            f" {sources.format_items(list(map(str, tried)))}. Correct path, train, val and test, or leave them out."
        )

    def _candidates(self, entry: str) -> list[Location]:
        """Returns where a folder or a list of `data.yaml` may be: below `path`, or beside `data.yaml`.

        `path` counts from the folder of `data.yaml`. Many data sets say `../train/images` for a folder beside it, as
        Ultralytics' trainer allows, and have the `path` of the machine that made them.
        """
        beside, root = self._names_file.location.parent, self._settings.get("path")
        if root is not None and (not isinstance(root, str) or "\0" in root):
            raise DataError(f"{self._names_file}: path is {reprlib.repr(root)}; expected a folder. Correct it.")
        bare = re.sub(r"^(\.\./|\./)+", "", entry)
        if not isinstance(beside, Path):
            # Keys of a bucket have no folder above.
            return [beside / root / bare, beside / bare] if root and is_below(root) else [beside / bare]
        paths = [beside / root / entry, beside / root / bare] if root else []
        paths += [beside / bare, beside / entry]
        return list(dict.fromkeys(Path(os.path.normpath(path)) for path in paths))

    def _listed_images(self, file: File) -> list[File]:
        images = []
        for line in filter(None, map(str.strip, decode_text(file, read_small_file(file)).splitlines())):
            bare = line.removeprefix("./")
            image = find_file(file.location.parent / bare) if is_below(bare) else None
            if image is None:
                raise DataError(f"{file} names {line!r}, which does not exist in its folder. Correct the list.")
            images.append(image)
        return images

    def _label_of(self, image: File, listing: FolderListing) -> File | None:
        """Returns the file of labels of an image: beside it, or in `labels` where the image is in `images`."""
        stem = f"{without_suffix(image.location.name)}.txt"
        if file := listing.find(image.location.parent, stem):
            return file
        below, folder = [stem], image.location.parent
        for _ in range(MAX_DEPTH):
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
        objects: list[Object] = []
        for number, line in enumerate(decode_text(label, content).splitlines(), 1):
            if not line.strip():
                continue
            try:
                category, box, points = _yolo_line(line.split(), len(self._classes))
            except ValueError as error:
                return replace(row, image=None, reason=f"{label.name}:{number}: {error}")
            if self.options.segmentation and not points:
                reason = f"{label.name}:{number}: a box without a polygon. Leave segmentation out"
                return replace(row, image=None, reason=reason)
            shape = Shape((np.array(points, np.float64),)) if self.options.segmentation else None
            objects.append(Object(box, category + 1, f"{label.name}:{number}", shape))
        return replace(row, objects=tuple(objects))


def _yolo_id(names: File, image: File) -> str:
    return printable_name(str(image.location).removeprefix(f"{names.location.parent}/").lstrip("/"))


def _yolo_line(words: list[str], classes: int) -> tuple[int, Box, tuple[float, ...]]:
    """Returns class, box and polygon of a line: class, middle and size of a box, or class and the points of a polygon.

    The polygon of a box is empty. All are fractions of width and height. Raises ValueError for any other line.
    """
    try:
        category, numbers = int(words[0]), [float(word) for word in words[1:]]
    except ValueError as error:
        raise ValueError("the line has text that is not a number") from error
    if not 0 <= category < classes:
        raise ValueError(f"class {category}; the classes are 0 to {classes - 1}")
    if not all(-0.01 <= number <= 1.01 for number in numbers):
        raise ValueError("a number is not a fraction of the image; expected 0 to 1")
    if len(numbers) == 4:
        x, y, width, height = numbers
        xs, ys = [x - width / 2, x + width / 2], [y - height / 2, y + height / 2]
        return category, (xs[0], ys[0], xs[1], ys[1]), ()
    if len(numbers) < 6 or len(numbers) % 2:
        raise ValueError(f"{len(numbers)} numbers after the class; expected 4, or the points of a polygon")
    xs, ys = numbers[::2], numbers[1::2]
    return category, (min(xs), min(ys), max(xs), max(ys)), tuple(numbers)
