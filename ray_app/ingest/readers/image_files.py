"""Images, their masks and the boxes of their objects as an ingest stores them.

Files that training decodes stay unchanged; TIFF, BMP and AVIF files, and first frames, become PNG. Masks become PNG
files of one channel that has the classes, if the user names these by values or colours.

`AnnotatedImages` is the base of the readers of annotations (`boxes.py`, `yolo.py`). An image without annotations is a
row without boxes. With the option `segmentation` the outlines of objects become one mask of classes for each image.
"""

from __future__ import annotations

import hashlib
import io
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.config.import_paths import require
from ray_app.data.arrays import to_list_array
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.readers import sources
from ray_app.storage.data_files import HEAD_BYTES, File, is_convertible_image, parser_errors
from ray_app.storage.files import Location
from ray_app.storage.object_stores import CONNECTIONS
from ray_app.task.images import (
    MAX_PIXELS,
    check_boxes,
    convert_image,
    decode_image,
    decode_mask,
    encode_picture,
    library_errors,
)
from ray_app.task.ragged import Ragged

T = TypeVar("T")
_CANNOT_CONVERT = (
    "not an image that can be decoded ({}). Allowed is one intact still image of a usual format, such as png, jpeg,"
    " webp, gif, tiff or bmp. Convert it"
)
"""The reason for a file that has to become PNG, which `--check false` does not change."""
NOT_AN_IMAGE = f"{_CANNOT_CONVERT}, or set --check false to store it undecoded"
IGNORED = 255
"""Class of the pixels of a mask that count in no loss (`ignore_index`)."""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_NAMED = 8
BACKGROUND = "background"
"""The name of class 0, which no box has."""
_MAX_CLASSES = IGNORED
_MAX_FILE_BYTES = 16 << 20
"""Limit of the annotations of one image, and of a file with names of classes."""
_MAX_NUMBER = 1e9
"""Limit of a coordinate: larger ones are no pixels, and integers may be too large for a float."""


Box = tuple[float, float, float, float]


def read_image(file: File, check: bool, first_frame: bool = False) -> bytes:
    """Returns an image as it is stored: its file unchanged, or as PNG where training does not decode its format.

    Args:
        file: The file.
        check: Whether it is decoded.
        first_frame: Whether the first frame of several is taken.

    Raises:
        ValueError: It cannot be decoded; the message says why and what to do.
    """
    encoded = file.location.read_bytes()
    is_converted = is_convertible_image(encoded[:HEAD_BYTES])
    try:
        if is_converted or (first_frame and _count_frames(encoded) > 1):
            return convert_image(encoded, first_frame)
    except ValueError as error:
        raise ValueError(_CANNOT_CONVERT.format(error)) from error
    if check and (reason := sources.explain_undecodable(encoded) or _explain_animated_png(encoded)):
        remedy = "; --first_frame true uses the first one" if reason.endswith(" frames") else ""
        raise ValueError(NOT_AN_IMAGE.format(reason + remedy))
    return encoded


def _explain_animated_png(encoded: bytes) -> str | None:
    """Returns the reason why an animated PNG file is refused, like other animations; None for another file.

    Training decodes its first frame, since to most programs the file is a still image.
    """
    if not encoded.startswith(_PNG_SIGNATURE) or b"acTL" not in encoded:
        return None
    frames = _count_frames(encoded)
    return f"the file has {frames} frames" if frames > 1 else None


def _count_frames(encoded: bytes) -> int:
    """Returns the number of frames of a GIF, WebP or PNG file; 1 for one that cannot be opened."""
    from PIL import Image

    try:
        return int(getattr(Image.open(io.BytesIO(encoded), formats=("GIF", "WEBP", "PNG")), "n_frames", 1))
    except Exception:
        # The check of the image says what is wrong with it.
        return 1


@dataclass(frozen=True)
class MaskValues:
    """The classes of masks by the values, or the colours as one number, of their pixels, in ascending order."""

    values: tuple[int, ...]
    numbers: tuple[int, ...]
    classes: tuple[str, ...]
    is_color: bool

    def to_classes(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Returns the class of each pixel; raises ValueError for a value without one."""
        named = np.array(self.values, np.int64)
        index = np.minimum(np.searchsorted(named, values), len(named) - 1)
        if not (is_known := named[index] == values).all():
            others = np.unique(values[~is_known]).tolist()
            listed = ", ".join(map(self._written, others[:_MAX_NAMED]))
            raise ValueError(
                f"the mask has the values {listed}, but --mask_values names only"
                f" {', '.join(map(self._written, self.values))}"
            )
        return np.array(self.numbers, np.uint8)[index]

    def _written(self, value: int) -> str:
        return "/".join(map(str, value.to_bytes(3, "big"))) if self.is_color else str(value)


def parse_mask_values(text: str) -> MaskValues:
    """Returns the classes of the values of masks, written as `0=background,255=object` or `255/0/0=road`.

    Raises:
        ConfigError: The text is not of this form.
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    keys, names = [key.strip() for key, _, _ in pairs], [name.strip() for _, _, name in pairs]
    are_colors = all(re.fullmatch(r"\d{1,3}/\d{1,3}/\d{1,3}", key) for key in keys)
    are_values = all(re.fullmatch(r"\d{1,5}", key) for key in keys)
    classes = list(dict.fromkeys(name for name in names if name != "ignore"))
    colors = [list(map(int, key.split("/"))) for key in keys] if are_colors else []
    is_too_large = any(part > np.iinfo(np.uint8).max for color in colors for part in color)
    if (
        not (are_colors or are_values)
        or is_too_large
        or not all(names)
        or "=" in "".join(names)
        or len(set(keys)) < len(keys)
    ):
        raise ConfigError(
            f"mask_values is {text!r}; allowed are values or colours with unique names, such as 0=background,255=object"
            " or 0/0/0=background,255/0/0=road (red, green, blue)."
        )
    if not classes or len(classes) > IGNORED:
        raise ConfigError(f"mask_values names {len(classes)} classes; allowed are 1 to {IGNORED}.")
    values = [int.from_bytes(color, "big") for color in colors] or list(map(int, keys))
    numbers = [IGNORED if name == "ignore" else classes.index(name) for name in names]
    in_order = sorted(zip(values, numbers, strict=True))
    return MaskValues(tuple(v for v, _ in in_order), tuple(n for _, n in in_order), tuple(classes), are_colors)


def read_mask(file: File, image: bytes, mask_values: MaskValues | None, check: bool) -> bytes:
    """Returns the mask of an image as a PNG file of classes; raises ValueError if it cannot be used."""
    encoded = file.location.read_bytes()
    try:
        if is_convertible_image(encoded[:HEAD_BYTES]):
            encoded = convert_image(encoded, first_frame=False)
        encoded = _without_alpha(encoded)
        if mask_values:
            encoded = encode_picture(mask_values.to_classes(_mask_values(encoded, mask_values.is_color)))
        mask_size = decode_mask(encoded).shape
    except ValueError as error:
        raise ValueError(f"its mask {file.name}: {error}") from error
    if check and mask_size != (size := decode_image(image).shape[-2:]):
        raise ValueError(f"its mask {file.name} has {mask_size} rows and columns, and the image {size}")
    return encoded


def _without_alpha(encoded: bytes) -> bytes:
    """Returns a mask; of gray with an opaque alpha channel (LA) only the gray values, as PNG."""
    from PIL import Image, ImageOps

    if not encoded.startswith(_PNG_SIGNATURE):
        return encoded
    with library_errors():
        image = Image.open(io.BytesIO(encoded), formats=("PNG",))
        if image.mode != "LA" or image.width * image.height > MAX_PIXELS:
            return encoded
        gray, alpha = ImageOps.exif_transpose(image).split()
        if alpha.getextrema() != (255, 255):
            raise ValueError("the mask is gray with transparent pixels without class. Save it without transparency")
        return encode_picture(np.asarray(gray))


def has_only_0_and_255(masks: Sequence[File]) -> bool:
    """Returns whether all pixels of masks are 0 or 255, both of which occur; masks that cannot be used do not count."""
    values: set[int] = set()
    for file in masks:
        with suppress(ValueError):
            values.update(np.unique(decode_mask(_without_alpha(file.location.read_bytes()))).tolist())
    return values == {0, IGNORED}


def _mask_values(encoded: bytes, is_color: bool) -> npt.NDArray[np.int64]:
    """Returns the values, or the colours as one number, of the pixels of a mask, (height, width)."""
    if not is_color:
        return decode_mask(encoded).astype(np.int64)
    if encoded.startswith(b"\xff\xd8"):
        raise ValueError("the mask is a JPEG file, which changes colours; masks of colours must be PNG files")
    red, green, blue = decode_image(encoded).astype(np.int64)
    return red << 16 | green << 8 | blue


@dataclass(frozen=True)
class Shape:
    """The outline of an object: polygons, each x, y, x, y ..., or the lengths of runs of a mask, column by column.

    Args:
        size: Height and width of a mask of runs.
    """

    polygons: tuple[npt.NDArray[np.float64], ...] = ()
    runs: tuple[int, ...] | str = ()
    size: tuple[int, int] = (0, 0)


def parse_coco_shape(value: Any) -> Shape | None:
    """Returns the outline of an object; None for another value."""
    if isinstance(value, list) and value and all(_is_polygon(points) for points in value):
        return Shape(tuple(np.array(points, np.float64) for points in value))
    if isinstance(value, dict):
        size, runs = value.get("size"), value.get("counts")
        if isinstance(size, list) and len(size) == 2 and all(type(length) is int for length in size):
            if isinstance(runs, str):
                return Shape(runs=runs, size=(size[0], size[1]))
            if isinstance(runs, list) and all(type(length) is int for length in runs):
                return Shape(runs=tuple(runs), size=(size[0], size[1]))
    return None


def is_numbers(value: Any, count: int) -> bool:
    """Returns whether a value is a list of so many numbers, each of at most `_MAX_NUMBER`."""
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(item) in (int, float) and abs(item) <= _MAX_NUMBER for item in value)


def _is_polygon(points: Any) -> bool:
    return isinstance(points, list) and len(points) % 2 == 0 and len(points) >= 6 and is_numbers(points, len(points))


class Object(NamedTuple):
    """An object in an image.

    Args:
        box: Left, top, right, bottom, in pixels, or as fractions of the image; None for a crowd.
        label: The class, from 1; `IGNORED` for a crowd.
        name: What a message calls it.
        shape: The outline, to be drawn into a mask.
    """

    box: Box | None
    label: int
    name: str
    shape: Shape | None = None


@dataclass(frozen=True)
class ObjectRow:
    """An image with its objects before the image is read; pickled to tasks.

    Args:
        row_id: Its name.
        image: Its file; None if the row is refused for the `reason`.
        size: Width and height, as the annotations say; None if they do not.
        image_id: The number of the image in the annotations.
    """

    row_id: str
    image: File | None
    objects: tuple[Object, ...] = ()
    size: tuple[int, int] | None = None
    image_id: int | None = None
    is_fraction: bool = False
    reason: str = ""

    @property
    def boxed(self) -> list[Object]:
        """The objects that are no crowds."""
        return [one for one in self.objects if one.box]


def read_small_file(file: File) -> bytes:
    """Returns the content of a file of at most `_MAX_FILE_BYTES`."""
    if file.size > _MAX_FILE_BYTES:
        raise DataError(f"{file} has {file.size} bytes; allowed are {_MAX_FILE_BYTES}. It is probably not an image.")
    with parser_errors(file, ""), file.open() as stream:
        return stream.read()


def map_small_files(function: Callable[[File, bytes], T], files: Sequence[File]) -> list[T]:
    """Calls a function with each of many small files and its content, in several threads; returns the results."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(lambda file: function(file, read_small_file(file)), files))


def decode_text(file: File, content: bytes) -> str:
    """Returns the text of a file of UTF-8, with or without a mark of the byte order."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error}. Save it as UTF-8.") from error


@dataclass(frozen=True)
class Annotations:
    """The annotations of one data set: its rows, the names of the classes from 1 on, and notes for the user.

    Args:
        skipped: Files that do not become a row, with the reason.
    """

    rows: list[ObjectRow]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class AnnotatedImages(sources.SourceReader):
    """Base of the readers of annotated images; `annotations` reads the annotations of each data set."""

    @abstractmethod
    def annotation_files(self) -> dict[str, list[File]]:
        """Returns the files with the annotations of each data set, by its name."""

    @abstractmethod
    def annotations(self) -> dict[str, Annotations]:
        """Returns the annotations of each data set, by its name."""

    @cached_property
    def _annotations(self) -> dict[str, Annotations]:
        return self.annotations()

    def files(self) -> Iterator[File]:
        """Yields the files of annotations and the images."""
        for files in self.annotation_files().values():
            yield from files
        for part in self._annotations.values():
            yield from (row.image for row in part.rows if row.image)

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns the data sets, all with the same classes; their rows are in the order of a hash of their names."""
        del run
        if self.options.segmentation:
            require("pycocotools", "Masks of objects")
        several = self._annotations
        classes = next(iter(several.values())).classes
        if others := [name for name, one in several.items() if one.classes != classes]:
            raise DataError(
                f"{self.path}: the classes of {others[0]!r} are {list(several[others[0]].classes)}, of the first data"
                f" set {list(classes)}. All data sets need the same classes."
            )
        named = name_classes(self.pattern, classes)
        if len(classes) >= _MAX_CLASSES and self.options.segmentation:
            raise DataError(f"{self.path}: {len(classes)} classes; a mask has fewer than {_MAX_CLASSES}.")
        tables = partial(object_tables, self.options.check, self.options.segmentation)
        parts = []
        for name, one in several.items():
            rows = sorted(
                _refuse_repeated(one.rows), key=lambda row: hashlib.blake2b(row.row_id.encode(), key=b"order").digest()
            )
            groups = sources.group_items(
                rows,
                lambda row: row.image.size if row.image else 0,
                self.options.shard_rows,
                self.options.split_bytes,
            )
            splits = [sources.InputSplit(len(group), partial(tables, group)) for group in groups]
            notes = [*one.notes]
            if empty := sum(not row.boxed for row in rows if row.image):
                notes.append(f"{empty} of {len(rows)} images have no box; they are rows without objects.")
            parts.append(sources.Part(name, splits, named, one.skipped, keeps_order=True, notes=tuple(notes)))
        return parts


def name_classes(where: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the classes of boxes with that of the background, which is class 0, before them."""
    classes = (BACKGROUND, *names)
    if repeated := [name for name, count in Counter(classes).items() if count > 1]:
        raise DataError(
            f"{where}: two classes have the name {repeated[0]!r} (class 0 is {BACKGROUND!r}). Rename one of them."
        )
    return classes


def _refuse_repeated(rows: list[ObjectRow]) -> list[ObjectRow]:
    """Returns rows; refuses a row if an earlier one of the data set has the same image."""
    first_of: dict[Location, str] = {}
    checked = []
    for row in rows:
        if row.image and (before := first_of.get(row.image.location)) is not None:
            reason = f"{before} has the same image; an image has one row. Merge their annotations"
            checked.append(replace(row, image=None, reason=reason))
            continue
        if row.image:
            first_of[row.image.location] = row.row_id
        checked.append(row)
    return checked


def object_tables(
    check: bool, segmentation: bool, rows: Iterable[ObjectRow], refuse: sources.Refuse
) -> Iterator[pa.Table]:
    """Yields the tables of images with `boxes`, `labels` and, with `segmentation`, `mask`; refuses unusable rows."""
    read = _read(check, segmentation, rows, refuse)
    for block in sources.batch_rows(read, lambda item: len(item[1]), sources.FILES_BYTES):
        some = [item[0] for item in block]
        columns: dict[str, Any] = {
            "image": pa.array([item[1] for item in block], pa.binary()),
            "boxes": to_list_array(Ragged.of((item[2] for item in block), np.float32, row_shape=(4,))),
            "labels": to_list_array(Ragged.of(([one.label for one in row.boxed] for row in some), np.int64)),
        }
        if segmentation:
            columns["mask"] = pa.array([item[3] for item in block], pa.binary())
        if some[0].image_id is not None:
            columns["image_id"] = pa.array([row.image_id for row in some], pa.int64())
        yield sources.make_table([row.row_id for row in some], columns)


def _read(
    check: bool, segmentation: bool, rows: Iterable[ObjectRow], refuse: sources.Refuse
) -> Iterator[tuple[ObjectRow, bytes, npt.NDArray[np.float32], bytes]]:
    """Yields each row that can be used with its image, boxes in pixels, and mask (empty without `segmentation`)."""
    for row in rows:
        try:
            if row.image is None:
                raise ValueError(row.reason)
            encoded = read_image(row.image, check)
            width, height = _size_of(row, encoded, check)
            pixels = np.array([one.box for one in row.boxed], np.float64).reshape(-1, 4)
            if row.is_fraction:
                pixels *= [width, height, width, height]
            # The checks are of the values that are stored: a thin box has no size any more.
            boxes = pixels.astype(np.float32)
            check_boxes(boxes, width, height, [one.name for one in row.boxed])
            mask = encode_picture(_draw(row, width, height)) if segmentation else b""
        except ValueError as error:
            refuse(row.row_id, str(error))
        else:
            yield row, encoded, boxes, mask


def _size_of(row: ObjectRow, encoded: bytes, check: bool) -> tuple[int, int]:
    """Returns width and height of an image as viewers show it; raises ValueError if its annotations say otherwise."""
    if not check and row.size:
        if not 0 < row.size[0] * row.size[1] <= MAX_PIXELS or min(row.size) < 1:
            raise ValueError(f"its annotations are for an image of {row.size} pixels; allowed are 1 to {MAX_PIXELS}")
        return row.size
    height, width = decode_image(encoded).shape[-2:]
    if row.size and row.size != (width, height):
        turned = "; its EXIF orientation rotates the image" if row.size == (height, width) else ""
        raise ValueError(
            f"the image is {width} wide and {height} high, but its annotations are for {row.size[0]} by"
            f" {row.size[1]}{turned}. Annotate the image as viewers show it"
        )
    return width, height


def _draw(row: ObjectRow, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Returns the mask of an image, (height, width): larger objects first, so that smaller ones lie on them.

    Crowds are `IGNORED`, and lie below all objects.
    """
    from pycocotools import mask as coco

    # The masks of all objects at once would fill the memory; their runs are small.
    packed = [(_to_runs(one.shape, row.is_fraction, width, height), one.label) for one in row.objects if one.shape]
    packed.sort(key=lambda one: (one[1] != IGNORED, -int(coco.area(one[0]))))
    mask = np.zeros((height, width), np.uint8)
    for runs, label in packed:
        mask[coco.decode(runs).astype(np.bool_)] = label
    return mask


def _to_runs(shape: Shape, is_fraction: bool, width: int, height: int) -> Any:
    """Returns which pixels an object has as runs that pycocotools has packed."""
    from pycocotools import mask as coco

    if shape.polygons:
        scale = np.array([width, height] if is_fraction else [1, 1], np.float64)
        polygons = [points.reshape(-1, 2) * scale for points in shape.polygons]
        limit = 2 * max(width, height)
        if any(not np.isfinite(points).all() or np.abs(points).max() > limit for points in polygons):
            raise ValueError("a polygon lies far outside the image. Correct or remove the annotation")
        return coco.merge(coco.frPyObjects([points.ravel().tolist() for points in polygons], height, width))
    if shape.size != (height, width):
        raise ValueError(f"a mask of an object is {shape.size[1]} wide and {shape.size[0]} high, unlike the image")
    lengths = _unpack_runs(shape.runs) if isinstance(shape.runs, str) else list(shape.runs)
    if not all(0 <= length <= height * width for length in lengths) or sum(lengths) != height * width:
        raise ValueError("the runs of a mask of an object (RLE) do not add up to the pixels of the image")
    return coco.frPyObjects({"counts": lengths, "size": [height, width]}, height, width)


def _unpack_runs(text: str) -> list[int]:
    """Returns the lengths of runs that COCO has packed into a text.

    Each is a number of digits of 5 bits, the last with its sixth bit cleared; from the fourth on it is the difference
    to the one before the last.
    """
    lengths: list[int] = []
    number = shift = 0
    for code in text.encode("latin-1", "replace"):
        digit = code - 48
        if not 0 <= digit < 64 or shift > 50:
            raise ValueError("the runs of a mask of an object (RLE) are not text in COCO's format")
        number |= (digit & 31) << shift
        shift += 5
        if not digit & 32:
            if digit & 16:
                number -= 1 << shift
            lengths.append(number + (lengths[-2] if len(lengths) > 2 else 0))
            number = shift = 0
    return lengths
