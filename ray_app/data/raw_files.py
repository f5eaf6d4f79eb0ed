"""Readers of raw data in files that people make: folders of images, CSV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ray_app.data import raw
from ray_app.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
MAX_CLASSES = 100_000
NULLS = pa.array(csv.ConvertOptions().null_values)
KINDS = (pa.int64(), pa.float64(), pa.bool_(), pa.string())
"""Types of CSV columns, the narrowest first."""


@dataclass(frozen=True)
class Images:
    """A folder with one sub-folder a class; the encoded files go unchanged into the column `image`."""

    root: Path
    check: bool

    def files(self) -> Iterator[Path]:
        """The images, class after class."""
        for folder in self._classes():
            yield from _images(folder)

    def parts(self) -> list[raw.Part]:
        """One part; its classes are the sub-folders' names, sorted."""
        folders = self._classes()
        rows = sum(len(_images(folder)) for folder in folders)
        visible = sum(len(raw.listed(folder)) for folder in [self.root, *folders])
        classes = tuple(raw.text(folder.name) for folder in folders)
        return [raw.Part("", rows, partial(self._tables, folders), classes, visible - rows)]

    def _classes(self) -> list[Path]:
        expected = "expected one sub-folder a class, with the images directly inside: DIR/cat/1.png, DIR/dog/2.jpg"
        if not self.root.is_dir():
            raise DataError(f"{self.root}: not a folder; {expected}. Give that folder as input.")
        folders = raw.listed(self.root, directories=True)
        if not folders:
            raise DataError(f"{self.root}: no class folders in it; {expected}. Move the images into class folders.")
        for folder in folders:
            if inner := raw.listed(folder, directories=True):
                raise DataError(
                    f"{folder}: a class folder with a folder inside ({inner[0].name!r}); {expected}. "
                    "Give the folder above the classes as input, or move the images up."
                )
            if not _images(folder):
                raise DataError(
                    f"{folder}: no image in this class folder; allowed are {', '.join(IMAGE_SUFFIXES)}. Add images or remove the folder."
                )
        return folders

    def _tables(self, folders: list[Path]) -> Iterator[pa.Table]:
        rows: list[tuple[str, bytes, int]] = []
        num_bytes = 0
        for label, folder in enumerate(folders):
            for path in _images(folder):
                encoded = path.read_bytes()
                if self.check and (reason := _undecodable(encoded)):
                    raise DataError(
                        f"{path}: not an image that can be decoded ({reason}). Allowed is one intact still image as png, jpeg, webp or "
                        "gif (torchvision decodes no bmp). Convert or remove the file, or give check=False to store it unread."
                    )
                rows.append((raw.text(path.relative_to(self.root).as_posix()), encoded, label))
                num_bytes += len(encoded)
                if num_bytes >= raw.BLOCK_BYTES:
                    yield _image_table(rows)
                    rows, num_bytes = [], 0
        if rows:
            yield _image_table(rows)


def _images(folder: Path) -> list[Path]:
    return [path for path in raw.listed(folder) if path.name.lower().endswith(IMAGE_SUFFIXES)]


def _image_table(rows: list[tuple[str, bytes, int]]) -> pa.Table:
    ids, images, labels = zip(*rows, strict=True)
    return raw.table(list(ids), {"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int64())})


def _undecodable(encoded: bytes) -> str | None:
    """Why torchvision, which training decodes with, cannot decode this as one still image; None where it can."""
    import torch
    from torchvision.io import ImageReadMode, decode_image

    if not encoded:
        return "the file is empty"
    try:
        image = decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if image.ndim == 3 else f"it has {len(image)} frames"


@dataclass(frozen=True)
class Csv:
    """One CSV file or a folder of them, with a header line; `label` names the column that becomes `label`."""

    path: Path
    label: str | None

    def files(self) -> Iterator[Path]:
        """The files, sorted by name."""
        if not self.path.exists():
            raise DataError(f"{self.path}: no such file or folder; expected one .csv or .csv.gz file or a folder of them.")
        found = raw.listed(self.path) if self.path.is_dir() else [self.path]
        found = [path for path in found if path.name.endswith((".csv", ".csv.gz"))]
        if not found:
            raise DataError(f"{self.path}: no CSV file; allowed are .csv and .csv.gz. Rename the file or give another input.")
        yield from found

    def parts(self) -> list[raw.Part]:
        """One part; a first pass over the files finds the narrowest type that holds each column, and the classes."""
        kinds: dict[str, list[pa.DataType]] = {}
        found: set[str] = set()
        rows = 0
        for _, _, block in self._blocks():
            rows += block.num_rows
            for name in block.schema.names:
                kinds[name] = [kind for kind in kinds.get(name, KINDS) if _fits(block[name], kind)]
            if self.label and len(found) <= MAX_CLASSES:
                found.update(pc.unique(block[self.label]).to_pylist())
        types = {name: fitting[0] for name, fitting in kinds.items()}
        classes = self._label_classes(types, found) if self.label and rows else None
        return [raw.Part("", rows, partial(self._tables, types, classes), classes)]

    def _blocks(self) -> Iterator[tuple[Path, int, pa.RecordBatch]]:
        """All rows as strings, in blocks: the file, the number of the block's first row in it (the header is row 1), the block."""
        header: list[str] | None = None
        for path in self.files():
            row = 2
            for block in _string_blocks(path):
                names = block.schema.names
                if header is None:
                    self._check_header(path, names)
                    header = names
                if names != header:
                    raise DataError(f"{path}: columns {names}, but the first file has {header}. Give all files one header.")
                yield path, row, block
                row += block.num_rows

    def _check_header(self, path: Path, names: list[str]) -> None:
        if len(set(names)) < len(names):
            raise DataError(f"{path}: two columns of one name in {names}. Give each column its own name.")
        if self.label and self.label not in names:
            raise DataError(f"{path}: no label column {self.label!r}; the columns are {names}. Name one of them.")
        if self.label and self.label != "label" and "label" in names:
            raise DataError(f"{path}: {self.label!r} is to become 'label', but {names} has another column 'label'. Rename that one.")

    def _label_classes(self, types: dict[str, pa.DataType], found: set[str]) -> tuple[str, ...] | None:
        """The sorted class names of a label that is not an integer, whose type becomes string; None for an integer one."""
        name = self.label or ""
        if pa.types.is_integer(types[name]):
            return None
        if pa.types.is_floating(types[name]):
            raise DataError(
                f"{self.path}: label column {name!r} holds numbers that are not integers; allowed are integers or strings. "
                f"For regression leave `label` out and rename {name!r} to 'target'."
            )
        if "" in found or len(found) > MAX_CLASSES:
            wrong = "rows without a value" if "" in found else f"more than {MAX_CLASSES} different strings"
            raise DataError(f"{self.path}: label column {name!r} has {wrong}. Name another column or correct these rows.")
        types[name] = pa.string()
        return tuple(sorted(found))

    def _tables(self, types: dict[str, pa.DataType], classes: tuple[str, ...] | None) -> Iterator[pa.Table]:
        for path, row, block in self._blocks():
            try:
                columns = {name: _converted(block[name], kind) for name, kind in types.items()}
            except (pa.ArrowInvalid, KeyError) as error:
                raise DataError(f"{path}: {error}. The file changed while it was read: start again.") from error
            columns = {"label" if name == self.label else name: values for name, values in columns.items()}
            if classes is not None:
                columns["label"] = pc.index_in(columns["label"], pa.array(classes)).cast(pa.int64())
            yield raw.table([f"{raw.text(path.name)}:{row + i}" for i in range(block.num_rows)], columns)


def _string_blocks(path: Path) -> Iterator[pa.RecordBatch]:
    """The file in blocks of about `BLOCK_BYTES`, every column as a string; one thread, so that errors can name the row."""
    read = csv.ReadOptions(use_threads=False, block_size=raw.BLOCK_BYTES)
    convert = csv.ConvertOptions(default_column_type=pa.string())
    try:
        yield from csv.open_csv(str(path), read, csv.ParseOptions(newlines_in_values=True), convert)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path}: {error}. Expected UTF-8 text with one header line and the same number of comma-separated values in "
            "every row (row 1 is the header). Correct the file."
        ) from error


def _converted(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """CSV strings as `kind`; outside string columns, space around a value goes and a spelling of "missing" becomes null."""
    if pa.types.is_string(kind):
        return values
    trimmed = pc.utf8_trim_whitespace(values)
    return pc.if_else(pc.is_in(trimmed, NULLS), None, trimmed).cast(kind)


def _fits(values: pa.Array, kind: pa.DataType) -> bool:
    try:
        _converted(values, kind)
    except pa.ArrowInvalid:
        return False
    return True
