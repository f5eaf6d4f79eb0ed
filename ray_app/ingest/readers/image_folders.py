"""Reader of folders of images.

The class of an image is its folder, or a file of labels has a row for each, or a folder has its mask. Files that
training decodes go unchanged into the column `image`; TIFF, BMP and AVIF files are stored as PNG. The rows are mixed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.converter import label_texts, to_class_indices
from ray_app.ingest.readers.csv_files import Csv
from ray_app.ingest.readers.image_files import (
    MaskValues,
    has_only_0_and_255,
    parse_mask_values,
    read_image,
    read_mask,
)
from ray_app.ingest.readers.image_names import (
    ImageNames,
    has_image_suffix,
    images_below,
    order_splits,
    walk,
    without_suffix,
)
from ray_app.storage.data_files import (
    HEAD_BYTES,
    File,
    entries_in,
    files_in,
    find_file,
    folders_in,
    has_image_signature,
    is_convertible_image,
    is_folder,
    is_within,
    name_other_format,
    open_data_file,
    parser_errors,
    printable_name,
    relative_path,
)
from ray_app.storage.files import Location, to_location
from ray_app.storage.object_stores import CONNECTIONS

ALLOWED = "png, jpeg, webp and gif, and tiff, bmp and avif, which are stored as png"
_EXPECTED = "expected one sub-folder per class with the images directly inside: DIR/cat/1.png, DIR/dog/2.jpg"
_SAMPLED_MASKS = 8
"""Number of masks that are read to see which values they have."""
_MAX_LABEL_BYTES = 512 << 20
"""Maximum size of a file of labels, which one process reads into memory."""


@dataclass(frozen=True)
class ImageRow:
    """A row before its files are read; pickled to tasks.

    Args:
        row_id: The path of the image below the input, or a row of the file of labels.
        image: Its file; None if there is none.
        index: The row of the table of values, its further columns.
        reason: Why the row is refused; empty if it is not.
    """

    row_id: str
    image: File | None
    index: int
    mask: File | None = None
    reason: str = ""

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(file.size for file in (self.image, self.mask) if file)


@dataclass(frozen=True)
class _Labels:
    """What the folders or the file of labels say of the images: rows, a table of values, names of the classes."""

    rows: list[ImageRow]
    values: pa.Table
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Images(sources.SourceReader):
    """A folder of images, with one sub-folder a class, or any folders and a file of labels or masks."""

    traits = FormatTraits(
        options=frozenset(
            {
                "check",
                "label",
                "labels",
                "targets",
                "columns",
                "masks",
                "mask_values",
                "first_frame",
            }
        ),
        eval_fraction=0.1,
    )

    def files(self) -> Iterator[File]:
        """Yields the file of labels, the images, folder after folder, and their masks."""
        if self._has_label_file:
            yield self._label_file
        yield from self._images
        yield from self._masks.values()

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns one part, or one for each folder `train`, `val` and `test`; each lists every skipped file.

        The rows are in the order of a hash of their names: training shuffles rows within windows, and a window of rows
        in the order of the classes would have one class.
        """
        labels = self._labels_in_file(run) if self._has_label_file else self._labels_of_folders()
        mask_values = parse_mask_values(self.options.mask_values) if self.options.mask_values else None
        classes = labels.classes or (mask_values.classes if mask_values else None)
        skipped = self._skipped_files({row.image.location for row in labels.rows if row.image})
        options = self.options
        form = _Form(self.path, options.check, options.first_frame, mask_values)
        notes = (*labels.notes, *self._notes_on_masks(labels.rows))
        parts = []
        for name in order_splits(self._splits.values()) or [""]:
            rows = [row for row in labels.rows if self._split_of(row) == name]
            if not rows:
                raise DataError(
                    f"{self.path}: no image for the data set {name!r}. Add some, or set input to another folder."
                )
            rows = sorted(rows, key=self._order)
            groups = sources.group_items(rows, lambda row: row.size, options.shard_rows, options.split_bytes)
            splits = [
                sources.InputSplit(len(group), partial(_tables, form, group, _values_of(group, labels.values)))
                for group in groups
            ]
            parts.append(sources.Part(name, splits, classes, skipped, keeps_order=True, notes=notes))
        return parts

    def _order(self, row: ImageRow) -> bytes:
        """Returns the key by which rows are ordered, a hash of the name of the image."""
        name = row.row_id.encode() if row.image is None else os.fsencode(relative_path(row.image.location, self.path))
        return hashlib.blake2b(name, key=b"order").digest()

    @property
    def _has_label_file(self) -> bool:
        return self.options.labels not in (None, "none")

    @property
    def _has_classes(self) -> bool:
        """Whether the class of an image is its folder."""
        return self.options.labels is None and self.options.masks is None

    @cached_property
    def _splits(self) -> dict[str, str]:
        """The data set by the name of a folder in the input; empty where these folders are no data sets.

        They are data sets if all have the usual names, one of them is to train on, and images are not directly in them
        (or have no class folders).
        """
        inner = folders_in(self.path) if is_folder(self.path) else []
        names = {folder.name: sources.SPLITS.get(folder.name.lower(), "") for folder in inner}
        if len(names) < 2 or "train" not in names.values() or not all(names.values()):
            return {}
        if self._has_classes and not all(folders_in(folder) for folder in inner):
            return {}
        if len(set(names.values())) < len(names):
            raise DataError(f"{self.path}: two of the folders {sorted(names)} mean the same data set. Merge them.")
        return names

    def _split_of(self, row: ImageRow) -> str:
        """Returns the data set of a row; one without a file belongs to the first."""
        if not self._splits or row.image is None:
            return next(iter(order_splits(self._splits.values())), "")
        return self._splits[relative_path(row.image.location, self.path).partition("/")[0]]

    @cached_property
    def _files(self) -> dict[Location, list[File]]:
        """The visible files of the input and of the folders in it, as far down as images may be."""
        if not is_folder(self.path):
            raise DataError(f"{self.path}: not a folder; {_EXPECTED}. Set input to that folder.")
        if not self._has_classes:
            return walk(self.path)
        above = [self.path / name for name in self._splits] or [self.path]
        classes = [inner for folder in above for inner in folders_in(folder)]
        return {folder: files_in(folder) for folder in dict.fromkeys([self.path, *above, *classes])}

    @cached_property
    def _classes(self) -> dict[Location, list[File]]:
        """The folder of each class, and the images in it."""
        above = {self.path, *(self.path / name for name in self._splits)}
        classes = {
            folder: list(filter(self._is_image, files)) for folder, files in self._files.items() if folder not in above
        }
        if not classes:
            raise DataError(
                f"{self.path}: no class folders in it; {_EXPECTED}. Move the images into class folders, name a file of"
                " labels (labels=FILE), or set labels=none if they have none."
            )
        for folder, images in classes.items():
            if inner := folders_in(folder):
                raise DataError(
                    f"{folder}: a class folder with a folder inside ({inner[0].name!r}); {_EXPECTED}. Set input to the"
                    " folder above the classes, or move the images up."
                )
            if not images:
                first = ""
                if others := self._files[folder]:
                    reason = self._explain_skip(others[0].location)
                    first = f" (of {len(others)} files the first is {others[0].name}: {reason})"
                raise DataError(
                    f"{folder}: no image in this class folder{first}; allowed are {ALLOWED}. Add images or remove the"
                    " folder."
                )
        return classes

    @cached_property
    def _images(self) -> list[File]:
        if self._has_classes:
            return [file for files in self._classes.values() for file in files]
        images = [file for files in self._files.values() for file in files if self._is_image(file)]
        if self.options.masks is not None:
            images = self._without_masks(images)
        if not images:
            raise DataError(f"{self.path}: no image in this folder or below it; allowed are {ALLOWED}. Add images.")
        return images

    def _without_masks(self, images: list[File]) -> list[File]:
        """Returns the images that are no masks of others: masks may be beside the images, or in a folder below."""
        root = to_location(str(self.options.masks))
        if root != self.path:
            masks = {file.location for file in self._masks.values()} if is_within(root, self.path) else set()
            return [file for file in images if file.location not in masks]
        stems = {without_suffix(relative_path(file.location, root)): file for file in images}
        masks = {file.location for stem, file in stems.items() if stem.removesuffix("_mask") in stems.keys() - {stem}}
        return [file for file in images if file.location not in masks]

    def _notes_on_masks(self, rows: list[ImageRow]) -> list[str]:
        """Returns notes on masks without a row, and on masks of 0 and 255 that have no names of classes."""
        notes = []
        used = [row.mask for row in rows if row.mask]
        if used and not self.options.mask_values and has_only_0_and_255(used[:_SAMPLED_MASKS]):
            notes.append(
                "the masks have the values 0 and 255, which are the classes 0 and 255. To use the classes 0 and 1, set"
                " --mask_values '0=background,255=object'."
            )
        locations = {file.location for file in [*used, *self._images]}
        if others := [name for name, file in self._masks.items() if file.location not in locations]:
            notes.append(f"{len(others)} masks without a row are left out, such as {printable_name(others[0])!r}.")
        return notes

    @cached_property
    def _masks(self) -> dict[str, File]:
        """The masks by their path below the folder of masks, without its suffix."""
        if self.options.masks is None:
            return {}
        root = to_location(self.options.masks)
        if not is_folder(root):
            raise DataError(f"masks {self.options.masks!r} is not a folder; name the folder with the masks.")
        masks: dict[str, File] = {}
        for file in images_below(root):
            stem = without_suffix(relative_path(file.location, root))
            if other := masks.get(stem):
                raise DataError(f"{other} and {file} are masks of the same image. Remove one of them.")
            masks[stem] = file
        return masks

    def _row(self, image: File, index: int, row_id: str = "") -> ImageRow:
        """Returns the row of an image with its mask, or refused where it has none."""
        path = relative_path(image.location, self.path)
        row = ImageRow(row_id or printable_name(path), image, index)
        if self.options.masks is None:
            return row
        stem = without_suffix(path)
        for mask in (self._masks.get(stem), self._masks.get(f"{stem}_mask")):
            # Where images and masks are in one folder, an image is not its own mask.
            if mask and mask.location != image.location:
                return replace(row, mask=mask)
        reason = f"no mask; expected {stem}.png or {stem}_mask.png in {self.options.masks}"
        return replace(row, image=None, reason=printable_name(reason))

    def _labels_of_folders(self) -> _Labels:
        """Returns the images with the class of their folder, or without a label."""
        rows = [self._row(image, index) for index, image in enumerate(self._images)]
        if not self._has_classes:
            return _Labels(rows, pa.table({}))
        names = [printable_name(folder.name) for folder, images in self._classes.items() for _ in images]
        classes = tuple(sorted(set(names)))
        labels = to_class_indices(pa.array(names), classes)
        return _Labels(rows, pa.table({"label": labels}), classes, self._note_on_missing_classes(rows, names))

    def _note_on_missing_classes(self, rows: list[ImageRow], names: list[str]) -> tuple[str, ...]:
        """Returns a note on classes of other data sets that the one to train on lacks."""
        trained = {name for row, name in zip(rows, names, strict=True) if self._split_of(row) in ("", "train")}
        if missing := sorted(set(names) - trained):
            return (f"no training image has the classes {sources.format_items(missing)}, which other folders have.",)
        return ()

    @cached_property
    def _label_file(self) -> File:
        file = find_file(to_location(str(self.options.labels)))
        if file is None:
            raise DataError(f"labels {self.options.labels!r}: no such file; expected a CSV file with a row per image.")
        if file.size > _MAX_LABEL_BYTES:
            raise DataError(f"labels {file} has {file.size} bytes; allowed are {_MAX_LABEL_BYTES}. Divide the images.")
        return file

    def _labels_in_file(self, run: sources.Run) -> _Labels:
        """Returns the rows of the file of labels."""
        # `Csv` reads the file twice; the first pass finds the types of the columns.
        # A column that is left out here is not read, whatever it holds.
        drop = [name for name in self.options.drop or [] if name not in (self.columns_to_drop() or [])]
        options = replace(self.options, source="csv", label=None, columns=None, drop=drop)
        part = Csv(str(self._label_file), options).parts(run)[0]
        refused: list[tuple[str, str]] = []
        tables = [table for split in part.input_splits for table in split.tables(lambda *row: refused.append(row))]
        table = pa.concat_tables(tables)
        value_columns = [self.options.label, *(self.options.targets or []), *(self.options.columns or [])]
        image_names = ImageNames(self._images, self.path)
        names = image_names.name_column(self._label_file, table, [name for name in value_columns if name])
        label, others = self._chosen_columns(table, names)
        values, classes = {name: table[name] for name in others}, None
        if label and pa.types.is_string(table[label].type):
            texts = label_texts(table[label])
            classes = sources.sort_classes(f"{self._label_file}: column {label!r}", texts, skip=True)
            values[label] = to_class_indices(table[label].combine_chunks(), classes)
        values = {"label" if name == label else name: column for name, column in values.items()}
        if not label and not self.options.targets and len(others) == 1:
            values = {"target": values[others[0]]}
        rows = self._match_rows(table["row_id"].to_pylist(), table[names].to_pylist(), image_names)
        if label:
            is_missing = values["label"].is_null().to_pylist()
            reason = f"no label in the column {label!r}; every row needs one"
            ids = table["row_id"].to_pylist()
            rows = [
                replace(row, row_id=ids[row.index], reason=reason) if is_missing[row.index] and not row.reason else row
                for row in rows
            ]
        rows += [ImageRow(row_id, None, 0, reason=reason) for row_id, reason in refused]
        return _Labels(rows, pa.table(values), classes, part.notes)

    def columns_to_drop(self) -> list[str] | None:
        """Returns those of the option `drop` that the tables of the reader have: not those of the file of labels."""
        drop = self.options.drop or []
        return [name for name in drop if name in ("image", "mask", "label", "target") or not self._has_label_file]

    def _chosen_columns(self, table: pa.Table, names: str) -> tuple[str | None, list[str]]:
        """Returns the column of the label, and all columns of values with it."""
        label, targets = self.options.label, self.options.targets or []
        available = [name for name in table.column_names if name not in ("row_id", names)]
        chosen = [*(self.options.columns or available), *([label] if label else []), *targets]
        if missing := [name for name in chosen if name not in available]:
            raise DataError(
                f"{self._label_file}: no column {missing[0]!r} of values; these are {available}. Name some of them."
            )
        if not chosen:
            raise DataError(f"{self._label_file}: the only column is {names!r}, the images. Add their labels.")
        chosen = list(dict.fromkeys(chosen))
        taken = {"image", "mask"} | ({"label"} if label else set())
        if taken & {*chosen} - {label, *targets}:
            raise DataError(
                f"{self._label_file}: the columns {chosen} have names of image columns. Rename one in the file, or"
                " leave it out with --columns."
            )
        if not label and not targets and len(chosen) == 1 and not pa.types.is_floating(table[chosen[0]].type):
            label = chosen[0]
        return label, chosen

    def _match_rows(self, ids: list[str], names: list[Any], image_names: ImageNames) -> list[ImageRow]:
        """Returns the rows of the file of labels, those refused that do not name one image, or one named before."""
        rows, first_of = [], dict[Location, str]()
        for index, (row_id, name) in enumerate(zip(ids, names, strict=True)):
            files = image_names.find(name)
            reason = ""
            if len(files) != 1:
                reason = f"{name!r} names no image below {self.path}"
                if files:
                    two = [relative_path(file.location, self.path) for file in files[:2]]
                    reason = f"{name!r} names {len(files)} images, such as {two}; write paths below {self.path}"
            elif before := first_of.get(files[0].location):
                reason = f"{name!r} is also the image of {before}; an image has one row"
            if reason:
                rows.append(ImageRow(row_id, None, index, reason=printable_name(reason)))
                continue
            first_of[files[0].location] = row_id
            rows.append(self._row(files[0], index))
        return rows

    def _skipped_files(self, rows: set[Location]) -> tuple[tuple[str, str], ...]:
        """Returns each file that does not become a row by its path below the folder, with the reason."""
        entries = (path for folder in self._files for path in entries_in(folder))
        skipped = [path for path in entries if path not in rows and path not in self._files]
        masks = {file.location for file in self._masks.values()}
        if self._has_label_file:
            masks.add(self._label_file.location)
        skipped = [path for path in skipped if path not in masks]
        return tuple((printable_name(relative_path(path, self.path)), self._explain_skip(path)) for path in skipped)

    @cached_property
    def _heads(self) -> dict[Location, bytes]:
        """The first bytes of files without the suffix of an image, by many concurrent requests for a bucket."""
        files = [file for group in self._files.values() for file in group if not has_image_suffix(file)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return dict(zip((file.location for file in files), pool.map(_head, files), strict=True))

    @cached_property
    def _visible(self) -> dict[Location, File]:
        return {file.location: file for group in self._files.values() for file in group}

    def _is_image(self, file: File) -> bool:
        """Returns whether a file is an image by its suffix or by its first bytes."""
        if has_image_suffix(file):
            return True
        head = self._heads[file.location]
        return has_image_signature(head) or is_convertible_image(head)

    def _explain_skip(self, path: Location) -> str:
        """Returns the reason why a file or folder does not become a row, the same text every time."""
        if path.name.startswith("."):
            return "left out: hidden, since its name begins with a dot"
        file = self._visible.get(path)
        if file is None:
            return "left out: not a plain file, or a broken link"
        if self._is_image(file):
            if self._has_label_file:
                return f"left out: an image without a row in {self._label_file.name}"
            if self.options.masks is not None:
                return "left out: an image without a mask"
            return "left out: an image outside the class folders; move it into one"
        return f"left out: {name_other_format(self._heads[path]) or 'not an image'}; images are {ALLOWED}"


def _values_of(group: list[ImageRow], values: pa.Table) -> pa.Table:
    """Returns the values of the rows of an input split, in their order."""
    return values.take(pa.array([row.index for row in group], pa.int64())) if values.num_columns else values


def _head(file: File) -> bytes:
    with parser_errors(file, ""), open_data_file(file.location) as stream:
        return stream.read(HEAD_BYTES)


@dataclass(frozen=True)
class _Form:
    """How the rows of an input split are read; pickled to tasks."""

    root: Location
    check: bool
    first_frame: bool
    mask_values: MaskValues | None


def _tables(form: _Form, rows: list[ImageRow], values: pa.Table, refuse: sources.Refuse) -> Iterator[pa.Table]:
    read = _read(form, rows, refuse)
    for block in sources.batch_rows(read, lambda row: len(row[2]) + len(row[3] or b""), sources.FILES_BYTES):
        indices, ids, images, masks = (list(column) for column in zip(*block, strict=True))
        columns: dict[str, Any] = {"image": pa.array(images, pa.binary())}
        if masks[0] is not None:
            columns["mask"] = pa.array(masks, pa.binary())
        some = values.take(pa.array(indices, pa.int64())) if values.num_columns else values
        columns |= {name: some[name] for name in some.column_names}
        yield sources.make_table(ids, columns)


def _read(form: _Form, rows: list[ImageRow], refuse: sources.Refuse) -> Iterator[tuple[int, str, bytes, bytes | None]]:
    """Yields the index, id, image and mask of each row that can be used."""
    for index, row in enumerate(rows):
        if row.image is None or row.reason:
            refuse(row.row_id, row.reason)
            continue
        try:
            encoded = read_image(row.image, form.check, form.first_frame)
            mask = read_mask(row.mask, encoded, form.mask_values, form.check) if row.mask else None
        except ValueError as error:
            refuse(row.row_id, str(error))
        else:
            yield index, row.row_id, encoded, mask
