"""Reader of folders of images, one folder a class; the encoded files go unchanged into the column `image`, the classes mixed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import pyarrow as pa

from ray_app.data.dataset.files import File, Place, files_in, folders_in, is_folder, relative, text
from ray_app.errors import DataError
from ray_app.ingest.readers import base

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
NOT_AN_IMAGE = (
    "not an image that can be decoded ({}). Allowed is one intact still image as png, jpeg, webp or gif (torchvision decodes no bmp)."
    " Convert it, or give check=False to store it unread"
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
        """One part; its classes are the sub-folders' names, sorted.

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
        return [base.Part("", pieces, classes, self._visible - len(rows), keeps_order=True)]

    @property
    def _visible(self) -> int:
        return sum(len(files_in(folder)) for folder in [self.root, *self._classes])

    @cached_property
    def _classes(self) -> dict[Place, list[File]]:
        """Folder of each class, and the images in it."""
        expected = "expected one sub-folder a class, with the images directly inside: DIR/cat/1.png, DIR/dog/2.jpg"
        if not is_folder(self.root):
            raise DataError(f"{self.root}: not a folder; {expected}. Give that folder as input.")
        found = {folder: [file for file in files_in(folder) if _is_image(file)] for folder in folders_in(self.root)}
        if not found:
            raise DataError(f"{self.root}: no class folders in it; {expected}. Move the images into class folders.")
        for folder, images in found.items():
            if inner := folders_in(folder):
                raise DataError(
                    f"{folder}: a class folder with a folder inside ({inner[0].name!r}); {expected}. "
                    "Give the folder above the classes as input, or move the images up."
                )
            if not images:
                raise DataError(
                    f"{folder}: no image in this class folder; allowed are {', '.join(IMAGE_SUFFIXES)}. Add images or remove the folder."
                )
        return found


def _is_image(file: File) -> bool:
    return file.place.name.lower().endswith(IMAGE_SUFFIXES)


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
