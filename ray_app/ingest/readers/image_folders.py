"""Reader of folders of images, one folder a class; the encoded files go unchanged into the column `image`, the classes mixed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import pyarrow as pa

from ray_app.data.dataset.files import File, Place, entries_in, files_in, find, folders_in, is_folder, opened, parsing, relative, text
from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.task.rows.file_kinds import HEAD_BYTES, is_image, name_other_format

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp")
"""A file with such a name is a row, which is refused if it cannot be decoded."""
NOT_AN_IMAGE = (
    "not an image that can be decoded ({}). Allowed is one intact still image as png, jpeg, webp or gif. Convert it, or give check=False to"
    " store it unread"
)


@dataclass(frozen=True)
class Images:
    """A folder with one sub-folder a class.

    Args:
        root: The folder.
        check: Whether to decode every image.
        limits: Of a piece.
    """

    root: Place
    check: bool
    limits: base.Limits

    def files(self) -> Iterator[File]:
        """The images, class after class."""
        for images in self._classes.values():
            yield from images

    def parts(self, run: base.Run) -> list[base.Part]:
        """One part, which names every file that is no row; its classes are the sub-folders' names, sorted.

        The order is that of a hash of the names: training mixes rows within windows of neighbours, which class after class would be of one
        class each.
        """
        del run
        rows = [(file, label) for label, images in enumerate(self._classes.values()) for file in images]
        rows.sort(key=lambda row: hashlib.blake2b(os.fsencode(relative(row[0].place, self.root)), key=b"order").digest())
        pieces = [
            base.Piece(len(some), partial(_tables, self.root, self.check, some))
            for some in base.groups(rows, lambda row: row[0].size, self.limits)
        ]
        classes = tuple(text(folder.name) for folder in self._classes)
        return [base.Part("", pieces, classes, self._left_out(), keeps_order=True)]

    def _left_out(self) -> tuple[tuple[str, str], ...]:
        """Each file that is no row, by its path below the folder, and why."""
        named = []
        images = {file.place for files in self._classes.values() for file in files}
        for folder in [self.root, *self._classes]:
            for place in entries_in(folder):
                if place not in images and place not in self._classes:
                    named.append((text(relative(place, self.root)), _why_left_out(place, is_loose=folder == self.root)))
        return tuple(named)

    @cached_property
    def _classes(self) -> dict[Place, list[File]]:
        """Folder of each class, and the images in it."""
        expected = "expected one sub-folder a class, with the images directly inside: DIR/cat/1.png, DIR/dog/2.jpg"
        if not is_folder(self.root):
            raise DataError(f"{self.root}: not a folder; {expected}. Give that folder as input.")
        classes = {folder: [file for file in files_in(folder) if _is_row(file)] for folder in folders_in(self.root)}
        if not classes:
            raise DataError(f"{self.root}: no class folders in it; {expected}. Move the images into class folders.")
        for folder, images in classes.items():
            if inner := folders_in(folder):
                raise DataError(
                    f"{folder}: a class folder with a folder inside ({inner[0].name!r}); {expected}. "
                    "Give the folder above the classes as input, or move the images up."
                )
            if not images:
                others = files_in(folder)
                first = f" (of {len(others)} files the first is {others[0].name}: {_why_left_out(others[0].place)})" if others else ""
                raise DataError(
                    f"{folder}: no image in this class folder{first}; allowed are png, jpeg, webp and gif. Add images or remove the folder."
                )
        return classes


def _is_row(file: File) -> bool:
    """Whether a file is an image by its name or, whatever it is called, by its first bytes."""
    return file.place.name.lower().endswith(IMAGE_SUFFIXES) or is_image(_head(file))


def _head(file: File) -> bytes:
    with parsing(file, ""), opened(file.place) as stream:
        return stream.read(HEAD_BYTES)


def _why_left_out(place: Place, is_loose: bool = False) -> str:
    """Why a file or folder is no row, as a text that is the same each time."""
    if place.name.startswith("."):
        return "left out: hidden, since its name begins with a dot"
    file = find(place)
    if file is None:
        return "left out: no plain file, or a link that leads nowhere"
    if is_loose and _is_row(file):
        return "left out: an image outside of the class folders, so it has no class; move it into one"
    return f"left out: it is {name_other_format(_head(file)) or 'no image'}; images are png, jpeg, webp and gif files"


def _tables(root: Place, check: bool, rows: list[tuple[File, int]], refuse: base.Refuse) -> Iterator[pa.Table]:
    for block in base.in_blocks(_read(root, check, rows, refuse), lambda row: len(row[1])):
        yield base.image_table(block)


def _read(root: Place, check: bool, rows: list[tuple[File, int]], refuse: base.Refuse) -> Iterator[tuple[str, bytes, int | None]]:
    for file, label in rows:
        row_id = text(relative(file.place, root))
        encoded = file.place.read_bytes()
        if check and (reason := base.undecodable(encoded)):
            refuse(row_id, NOT_AN_IMAGE.format(reason))
        else:
            yield row_id, encoded, label
