"""Names of images: their suffixes, their files in folders, and how the rows of a file of labels name them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from ray_app.errors import DataError
from ray_app.storage.data_files import File, files_in, folders_in, is_folder, relative_path
from ray_app.storage.files import Location

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
"""Suffixes by which a file is a row, even if it cannot be decoded and is refused."""
MAX_DEPTH = 32
"""Maximum number of folders inside each other; a link may lead to a folder above itself."""


def without_suffix(path: str) -> str:
    """Returns a path without the suffix of its last part."""
    stem, dot, suffix = path.rpartition(".")
    return stem if dot and "/" not in suffix and stem else path


def has_image_suffix(file: File) -> bool:
    """Returns whether the name of a file has the suffix of an image."""
    return file.location.name.lower().endswith(IMAGE_SUFFIXES)


def walk(folder: Location, depth: int = 0) -> dict[Location, list[File]]:
    """Returns the visible files of a folder and of all folders below it, by folder."""
    if depth > MAX_DEPTH:
        raise DataError(f"{folder}: folders are more than {MAX_DEPTH} deep in each other. Is one of them a link?")
    files = {folder: files_in(folder)}
    for inner in folders_in(folder):
        files |= walk(inner, depth + 1)
    return files


def images_below(folder: Location) -> list[File]:
    """Returns the images in a folder and in the folders in it."""
    return [file for files in walk(folder).values() for file in files if has_image_suffix(file)]


def clean_name(name: Any) -> str:
    """Returns the name of an image in a file of labels as a path below the input."""
    return "" if name is None else str(name).strip().replace("\\", "/").removeprefix("./")


class FolderListing:
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


def is_below(name: str) -> bool:
    """Returns whether a name in annotations leads to a file below a folder, whatever folder that is."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def order_splits(names: Iterable[str]) -> list[str]:
    """Returns the names of data sets in the order in which they are written."""
    return sorted(names, key=["train", "eval", "test", ""].index)


class ImageNames:
    """The images of a folder by the names that a row of a file of labels may have for them.

    These are the path below the folder and its ends, each with and without the suffix. A stem of digits is also named
    by its number, since a column of such names holds integers.
    """

    def __init__(self, images: list[File], root: Location) -> None:
        self._root, self._first = root, images[0]
        self._by_name: dict[str, list[File]] = {}
        for image in images:
            parts = relative_path(image.location, root).split("/")
            ends = ["/".join(parts[start:]) for start in range(len(parts))]
            stem = without_suffix(parts[-1])
            names = {
                *ends,
                *(without_suffix(end) for end in ends),
                str(int(stem)) if stem.isascii() and stem.isdecimal() else stem,
            }
            for name in names:
                self._by_name.setdefault(name, []).append(image)

    def find(self, name: Any) -> list[File]:
        """Returns the images of a name; only one if the name is its whole path."""
        clean = clean_name(name)
        images = self._by_name.get(self._key(clean), [])
        return [one for one in images if relative_path(one.location, self._root) == clean] or images

    def _key(self, clean: str) -> str:
        """Returns the key of a name in `_by_name`; zeros before a number do not count where no image has them."""
        is_number = clean.isascii() and clean.isdecimal()
        return str(int(clean)) if is_number and clean not in self._by_name else clean

    def _is_file_name(self, name: Any) -> bool:
        """Returns whether a name has the suffix of an image and is the path of an image, or an end of one."""
        clean = clean_name(name)
        return clean.lower().endswith(IMAGE_SUFFIXES) and any(
            f"/{relative_path(one.location, self._root)}".endswith(f"/{clean}") for one in self._by_name.get(clean, ())
        )

    def name_column(self, where: object, table: pa.Table, value_columns: list[str]) -> str:
        """Returns the column of a file of labels in which the rows name their images.

        It is the one with the largest number of different names of files, or else of names without suffix. A column of
        numbers may match the names of files by chance, such as the index that pandas writes.

        Args:
            where: The file, for messages.
            table: Its rows; the first column is their id.
            value_columns: Columns that the user names as values; of two that fit equally well, the other one is taken.

        Raises:
            DataError: No column names an image, two fit equally well, or the header line is a row.
        """
        columns = table.column_names[1:]
        if not table.num_rows:
            raise DataError(f"{where} has no usable row. Correct its rows.")
        for name in columns:
            if self._is_file_name(name):
                self._refuse_header(where, name)
        distinct = {name: table[name].unique().drop_null().to_pylist() for name in columns}
        named = {
            name: sum(self._key(clean_name(one)) in self._by_name for one in values)
            for name, values in distinct.items()
        }
        files = {name: sum(map(self._is_file_name, values)) for name, values in distinct.items()}
        if not any(named.values()):
            first = {name: table[name][0].as_py() for name in columns}
            raise DataError(
                f"{where}: no column names the images. The first row has {first}, but an image is called"
                f" {relative_path(self._first.location, self._root)!r}. Name images by their paths below {self._root},"
                " by the ends of these, or without suffixes."
            )
        best = max(columns, key=lambda name: (files[name], named[name]))
        if files[best]:
            rivals = [name for name in columns if 2 * files[name] >= files[best] or named[name] > 2 * files[best]]
        else:
            rivals = [name for name in columns if 2 * named[name] >= named[best]]
        if len(rivals := [best, *(name for name in rivals if name != best)]) > 1:
            rivals = [name for name in rivals if name not in value_columns] or rivals
        if len(rivals) > 1:
            raise DataError(
                f"{where}: the columns {rivals[0]!r} and {rivals[1]!r} both name images, so the image of a row is"
                " ambiguous. Name the column with values with --label, --targets or --columns, leave one of them out of"
                " the file, or write the names of the images with their suffixes."
            )
        [column] = rivals
        if clean_name(column) in self._by_name and any(map(str.isdigit, column)):
            self._refuse_header(where, column)
        return column

    def _refuse_header(self, where: object, name: str) -> None:
        raise DataError(
            f"{where}: the first line names the image {name!r}, so the header line with the names of the columns is"
            " missing. Add one, such as file,label."
        )
