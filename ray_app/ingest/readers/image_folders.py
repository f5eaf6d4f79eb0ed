"""Reader of folders of images with one folder per class.

The encoded files go unchanged into the column `image`, and the rows of the classes are mixed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import pyarrow as pa

from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import base
from ray_app.storage.data_files import (
    HEAD_BYTES,
    File,
    entries_in,
    files_in,
    folders_in,
    has_image_signature,
    is_folder,
    name_other_format,
    open_data_file,
    parser_errors,
    printable_name,
    relative_path,
)
from ray_app.storage.files import Location
from ray_app.storage.object_stores import CONNECTIONS

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp")
"""Suffixes by which a file is a row, even if it cannot be decoded and is refused."""
NOT_AN_IMAGE = (
    "not an image that can be decoded ({}). Allowed is one intact still image as png, jpeg, webp or gif. Convert it, or"
    " give check=False to store it unread"
)


@dataclass(frozen=True)
class Images(base.SourceReader):
    """A folder with one sub-folder a class."""

    traits = FormatTraits(options=frozenset({"check"}))

    def files(self) -> Iterator[File]:
        """Yields the images, class after class."""
        for images in self._classes.values():
            yield from images

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns one part, which lists every skipped file; its classes are the sorted names of the sub-folders.

        The rows are in the order of a hash of their names: training shuffles rows within windows, and a window of rows
        in the order of the classes would have one class.
        """
        del run
        rows = [(file, label) for label, images in enumerate(self._classes.values()) for file in images]
        names = [os.fsencode(relative_path(file.location, self.path)) for file, _ in rows]
        hashes = [hashlib.blake2b(name, key=b"order").digest() for name in names]
        rows = [row for _, row in sorted(zip(hashes, rows, strict=True), key=lambda pair: pair[0])]
        options, tables = self.options, partial(_tables, self.path, self.options.check)
        groups = base.group_items(rows, lambda row: row[0].size, options.shard_rows, options.split_bytes)
        splits = [base.InputSplit(len(group), partial(tables, group)) for group in groups]
        classes = tuple(printable_name(folder.name) for folder in self._classes)
        return [base.Part("", splits, classes, self._skipped_files(), keeps_order=True)]

    def _skipped_files(self) -> tuple[tuple[str, str], ...]:
        """Returns each file that is not an image in a class folder by its path below the folder, with the reason."""
        rows = {file.location for files in self._classes.values() for file in files}
        entries = (path for folder in [self.path, *self._classes] for path in entries_in(folder))
        skipped = [path for path in entries if path not in rows and path not in self._classes]
        return tuple((printable_name(relative_path(path, self.path)), self._explain_skip(path)) for path in skipped)

    @cached_property
    def _files(self) -> dict[Location, list[File]]:
        """The visible files of the folder itself and of each folder in it."""
        return {folder: files_in(folder) for folder in [self.path, *folders_in(self.path)]}

    @cached_property
    def _heads(self) -> dict[Location, bytes]:
        """The first bytes of files without the suffix of an image, by many concurrent requests for a bucket."""
        files = [file for group in self._files.values() for file in group if not _has_image_suffix(file)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return dict(zip((file.location for file in files), pool.map(_head, files), strict=True))

    @cached_property
    def _visible(self) -> dict[Location, File]:
        return {file.location: file for group in self._files.values() for file in group}

    def _is_row(self, file: File) -> bool:
        """Returns whether a file is an image by its suffix or by its first bytes."""
        return _has_image_suffix(file) or has_image_signature(self._heads[file.location])

    def _explain_skip(self, path: Location) -> str:
        """Returns the reason why a file or folder does not become a row, the same text every time."""
        if path.name.startswith("."):
            return "left out: hidden, since its name begins with a dot"
        file = self._visible.get(path)
        if file is None:
            return "left out: no plain file, or a link that leads nowhere"
        if self._is_row(file):
            return "left out: an image outside of the class folders, so it has no class; move it into one"
        return (
            f"left out: it is {name_other_format(self._heads[path]) or 'no image'}; images are png, jpeg, webp and gif"
            f" files"
        )

    @cached_property
    def _classes(self) -> dict[Location, list[File]]:
        """The folder of each class, and the images in it."""
        expected = "expected one sub-folder a class, with the images directly inside: DIR/cat/1.png, DIR/dog/2.jpg"
        if not is_folder(self.path):
            raise DataError(f"{self.path}: not a folder; {expected}. Give that folder as input.")
        classes = {
            folder: list(filter(self._is_row, files)) for folder, files in self._files.items() if folder != self.path
        }
        if not classes:
            raise DataError(f"{self.path}: no class folders in it; {expected}. Move the images into class folders.")
        for folder, images in classes.items():
            if inner := folders_in(folder):
                raise DataError(
                    f"{folder}: a class folder with a folder inside ({inner[0].name!r}); {expected}. "
                    "Give the folder above the classes as input, or move the images up."
                )
            if not images:
                first = ""
                if others := self._files[folder]:
                    reason = self._explain_skip(others[0].location)
                    first = f" (of {len(others)} files the first is {others[0].name}: {reason})"
                raise DataError(
                    f"{folder}: no image in this class folder{first}; allowed are png, jpeg, webp and gif. Add images"
                    f" or remove the folder."
                )
        return classes


def _has_image_suffix(file: File) -> bool:
    return file.location.name.lower().endswith(IMAGE_SUFFIXES)


def _head(file: File) -> bytes:
    with parser_errors(file, ""), open_data_file(file.location) as stream:
        return stream.read(HEAD_BYTES)


def _tables(root: Location, check: bool, rows: list[tuple[File, int]], refuse: base.Refuse) -> Iterator[pa.Table]:
    for block in base.batch_rows(_read(root, check, rows, refuse), lambda row: len(row[1])):
        ids, images, labels = zip(*block, strict=True)
        yield base.make_table(ids, {"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int64())})


def _read(
    root: Location, check: bool, rows: list[tuple[File, int]], refuse: base.Refuse
) -> Iterator[tuple[str, bytes, int]]:
    for file, label in rows:
        row_id = printable_name(relative_path(file.location, root))
        encoded = file.location.read_bytes()
        if check and (reason := base.explain_undecodable(encoded)):
            refuse(row_id, NOT_AN_IMAGE.format(reason))
        else:
            yield row_id, encoded, label
