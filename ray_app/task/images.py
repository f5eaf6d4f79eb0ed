"""Decoding of images and masks, and their common transforms.

simplejpeg decodes JPEG files; Pillow reads all headers and decodes every other format. Both raise an error for a
damaged file, where torchvision's decoder ends the process for some PNG files. The header is read before any pixel is
decoded, since a small file can declare an enormous image.

`decode_columns` decodes the columns of images and masks of rows and applies the same transforms to both. PyTorch is
imported by the functions that need it, since an ingest decodes without it.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ray_app.errors import remove_addresses
from ray_app.plan.manifest import ColumnFacts
from ray_app.storage.data_files import HEAD_BYTES, has_image_signature, name_other_format

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS = 2**27
"""Limit of the pixels of all frames of an image together: 403 MB as RGB, 11585 x 11585 pixels."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_JPEG = ("JPEG", "MPO")
"""MPO is a JPEG file with further pictures after the first one, as many phones write it; only the first is decoded."""
_ANIMATED = ("WEBP", "GIF")
"""Of an animated PNG only the still image is decoded, which viewers without support for animations show."""
_HARMLESS = ("extraneous bytes before marker 0xd9", "unknown JFIF revision", "determine subsampling level")
"""Parts of simplejpeg's errors for files that it refuses although they have all their pixels.

The causes are surplus bytes before the end-of-image marker, an odd version number in the header, and sampling factors
that libjpeg decodes but TurboJPEG's interface has no name for.
"""
_PNG_MODES = ("1", "L", "P", "LA", "PA", "RGB", "RGBA", "I;16")
"""Modes of Pillow that a PNG file stores unchanged."""
_ORIENTATION = 0x0112
_X_FLIPS, _Y_FLIPS = (2, 3, 6, 7), (3, 4, 7, 8)
"""EXIF orientations with reversed columns, and with reversed rows; from 5 on both are swapped before."""


def decode_image(encoded: bytes, exif_orientation: bool = True, min_side: int | None = None) -> npt.NDArray[np.uint8]:
    """Decodes an image file: JPEG, PNG, WebP or GIF.

    Args:
        exif_orientation: Whether the image is rotated and mirrored by its EXIF orientation, as viewers show it.
        min_side: A JPEG file is decoded at a half, a quarter or an eighth of its size, the smallest of which both sides
            have this many pixels, as Pillow does after `Image.draft`; None for its whole size.

    Returns:
        RGB, uint8 of shape (3, height, width); (frames, 3, height, width) where it is animated. Of 16 bits the upper 8
            are kept.

    Raises:
        ValueError: The file declares more than `MAX_PIXELS`, is damaged, or is not such an image; the message says
            which.
    """
    with library_errors(encoded), _open_image(encoded) as image:
        if image.format in _JPEG:
            if min_side is not None:
                image.draft(None, (min_side, min_side))
            pixels = _jpeg_pixels(encoded, image)
        elif image.format in _ANIMATED and getattr(image, "n_frames", 1) > 1:
            pixels = _frames(image)
        else:
            _load(image, encoded)
            _check_palette(image, encoded)
            pixels = _rgb_pixels(image)
        if exif_orientation:
            pixels = _apply_orientation(pixels, _read_orientation(image), (-3, -2))
    return np.moveaxis(pixels, -1, -3)


def decode_mask(encoded: bytes, exif_orientation: bool = True) -> npt.NDArray[np.integer]:
    """Decodes a mask, (height, width): class indices as uint8, or int32 if there are more than 8 bits.

    They are the values of a PNG or GIF of one channel, or the indices of colors of one with a palette. Raises
    ValueError for an image of colors, or one that `decode_image` refuses.
    """
    with library_errors(encoded), _open_image(encoded) as image:
        if image.format in _JPEG or image.mode not in ("1", "L", "P", "I", "I;16"):
            raise ValueError(
                f"the file is a {image.format} of mode {image.mode}, which is not a mask; a mask is a PNG with one"
                " channel, or with a palette, whose values are class numbers"
            )
        _load(image, encoded)
        values = np.array(image).astype(np.int32 if image.mode.startswith("I") else np.uint8)
        return _apply_orientation(values, _read_orientation(image) if exif_orientation else 1, (-2, -1))


def describe_image_error(error: Exception) -> str:
    """Returns one line on an error that a library raised for an image."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "its header is damaged"
    if isinstance(error, Image.DecompressionBombError):
        # Pillow has a limit of its own, which is above `MAX_PIXELS`.
        return f"the image has more than the allowed {MAX_PIXELS} pixels"
    lines = remove_addresses(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def library_errors(encoded: bytes | None = None) -> Iterator[None]:
    """Turns errors of a library about a file, of many types, into a ValueError of one line.

    With the content of the file the error says what a file holds that is not an image.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        head = bytes(encoded[:HEAD_BYTES]) if encoded is not None else None
        if head is not None and not has_image_signature(head):
            other = name_other_format(head) or f"not an image: it begins with {head[:8]!r}"
            raise ValueError(f"the file is {other}") from error
        raise ValueError(describe_image_error(error)) from error


def convert_image(encoded: bytes, first_frame: bool) -> bytes:
    """Returns an image as a PNG file without loss: turned by its orientation, of up to 16 bits, without metadata.

    Raises:
        ValueError: It is damaged, too large, of several frames unless the first is wanted, or has values that PNG
            cannot store.
    """
    with library_errors():
        from PIL import Image, ImageOps

        image = Image.open(io.BytesIO(encoded), formats=("TIFF", "BMP", "AVIF", "GIF", "WEBP", "PNG"))
        if (pixels := image.width * image.height) > MAX_PIXELS:
            raise ValueError(f"the image has {pixels} pixels; at most {MAX_PIXELS} are decoded")
        if (frames := getattr(image, "n_frames", 1)) > 1 and not first_frame:
            raise ValueError(f"the image has {frames} frames; --first_frame true uses the first one")
        image.seek(0)
        image.load()
        return _save_png(ImageOps.exif_transpose(image))


def encode_picture(image: Any) -> bytes:
    """Returns an image of Pillow, or an array of bytes (height, width[, channels]), as a PNG file without loss.

    The EXIF orientation of an image of Pillow is kept, and applied when the file is decoded.

    Raises:
        ValueError: It has values or a shape that PNG cannot store.
    """
    with library_errors():
        from PIL import Image

        if hasattr(image, "getexif"):
            return _save_png(image.copy(), image.getexif())
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
            raise ValueError(
                f"an array of {array.dtype} of shape {array.shape} is not an image; an image is uint8 of shape (height,"
                " width) or (height, width, channels), with 1, 3 or 4 channels"
            )
        return _save_png(Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array))


def _save_png(image: Any, exif: Any = None) -> bytes:
    """Returns an image of Pillow as a PNG file, without metadata but the given EXIF data."""
    image = _to_png_mode(image)
    image.info = {name: value for name, value in image.info.items() if name == "transparency"}
    file = io.BytesIO()
    image.save(file, "png", exif=exif)
    return file.getvalue()


def _to_png_mode(image: Any) -> Any:
    """Returns an image in a mode that PNG stores; raises ValueError for values that would be changed."""
    from PIL import Image

    if image.mode in _PNG_MODES:
        return image
    if image.mode.startswith("I"):
        values = np.array(image)
        if values.min() < 0 or values.max() > np.iinfo(np.uint16).max:
            raise ValueError(f"the values go from {values.min()} to {values.max()}; allowed are unsigned 16 bits")
        return Image.fromarray(values.astype(np.uint16))
    if image.mode in ("CMYK", "YCbCr", "RGBX"):
        return image.convert("RGB")
    raise ValueError(
        f"the image has the mode {image.mode}; allowed are gray and colours of 8 or 16 bits. Convert it to these"
    )


def _open_image(encoded: bytes) -> Any:
    """Opens a file by its header and refuses it if the header declares too many pixels."""
    from PIL import Image

    image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
    if image.format == "GIF" and not _has_gif_end(encoded):
        raise ValueError("the file is cut off or damaged: the block that ends a GIF file is missing")
    pixels = image.width * image.height
    if pixels <= MAX_PIXELS and image.format in _ANIMATED:
        pixels *= getattr(image, "n_frames", 1)
    if pixels > MAX_PIXELS:
        raise ValueError(f"the image has {pixels} pixels; at most {MAX_PIXELS} are decoded")
    if image.format == "PNG":
        # Pillow compares the checksums of a PNG file only here, and the file cannot be decoded afterwards.
        image.verify()
        image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
    return image


def _jpeg_pixels(encoded: bytes, image: Any) -> npt.NDArray[np.uint8]:
    """Decodes the pixels of a JPEG file, (height, width, 3), at the size of the image of Pillow."""
    import simplejpeg

    if image.mode != "CMYK":
        try:
            return simplejpeg.decode_jpeg(encoded, "RGB", min_height=image.height, min_width=image.width)
        except ValueError as error:
            if not any(part in str(error) for part in _HARMLESS):
                raise
    # simplejpeg rounds CMYK in another way than Pillow, torchvision and OpenCV.
    return _rgb_pixels(image)


def _frames(image: Any) -> npt.NDArray[np.uint8]:
    """Decodes the pixels of all frames of an animated image, (frames, height, width, 3)."""
    from PIL import ImageSequence

    return np.stack([np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])


def _rgb_pixels(image: Any) -> npt.NDArray[np.uint8]:
    """Returns the RGB pixels of a still image, (height, width, 3)."""
    if image.mode.startswith("I"):
        gray = (np.array(image) >> 8).astype(np.uint8)
        return np.repeat(gray[..., None], 3, -1)
    # RGB has no transparency, and Pillow warns when it converts a palette with transparency.
    image.info.pop("transparency", None)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _load(image: Any, encoded: bytes) -> None:
    """Decodes a still image; refuses a PNG file that lacks rows, which Pillow silently makes black."""
    image.load()
    if image.format != "PNG":
        return
    height = image.height
    # Inflating the data of every PNG file a second time would cost half as much again. Rows that Pillow did not get are
    # zeros, so all rows are present if the last row is not zeros. An interlaced image does not end with its last row.
    may_lack_rows = (
        bool(image.info.get("interlace")) or not np.array(image.crop((0, height - 1, image.width, height))).any()
    )
    if may_lack_rows and (missing := _missing_png_bytes(encoded)):
        raise ValueError(f"the image data ends {missing} bytes too early")


def _check_palette(image: Any, encoded: bytes) -> None:
    """Refuses a PNG file with a pixel of a color that the palette lacks: Pillow silently makes it black."""
    if image.format == "PNG" and image.mode == "P":
        colors = sum(map(len, _png_chunks(encoded, b"PLTE"))) // 3
        if (index := image.getextrema()[1]) >= colors:
            raise ValueError(
                f"a pixel has the color {index} of a palette of {colors} colors, which are numbered from 0"
            )


def _missing_png_bytes(encoded: bytes) -> int:
    """Returns how many bytes of the rows of a PNG file its compressed image data lacks."""
    width, height, bits, color_type, _, _, interlaced = struct.unpack(">IIBBBBB", encoded[16:29])
    bits_per_pixel = bits * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color_type]
    # The seven passes of an interlaced image: the first column and row, and the steps between columns and between rows.
    adam7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    missing = 0
    for column, row, columns, rows in adam7 if interlaced else ((0, 0, 1, 1),):
        pass_width, pass_height = -(-(width - column) // columns), -(-(height - row) // rows)
        if pass_width > 0 and pass_height > 0:
            # Each row has a byte that names its filter.
            missing += pass_height * (1 + -(-pass_width * bits_per_pixel // 8))
    inflate = zlib.decompressobj()
    for data in _png_chunks(encoded, b"IDAT"):
        packed = data
        while packed and missing > 0:
            missing -= len(inflate.decompress(packed, 1 << 20))
            packed = inflate.unconsumed_tail
    return max(missing, 0)


def _png_chunks(encoded: bytes, kind: bytes) -> Iterator[bytes]:
    """Yields the contents of the chunks of a PNG file that are of one kind."""
    at = 8
    while at + 8 <= len(encoded):
        (size,) = struct.unpack(">I", encoded[at : at + 4])
        if encoded[at + 4 : at + 8] == kind:
            yield encoded[at + 8 : at + 8 + size]
        at += size + 12


def _has_gif_end(encoded: bytes) -> bool:
    """Whether the blocks of a GIF lead to the one that ends it: Pillow does not report missing frames."""

    def table_bytes(flags: int) -> int:
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    try:
        at = 13 + table_bytes(encoded[10])
        while encoded[at] in b"!,":
            # An extension begins with a label; an image with position, size, optional colors, and the size of its
            # codes. Data follows in both.
            at += 2 if encoded[at] == ord("!") else 11 + table_bytes(encoded[at + 9])
            while encoded[at]:
                at += 1 + encoded[at]
            at += 1
        return encoded[at] == ord(";")
    except IndexError:
        return False


def check_boxes(boxes: npt.NDArray[np.float32], width: int, height: int, names: Sequence[str] = ()) -> None:
    """Raises ValueError for a box without a size, or more than one pixel outside the image.

    Args:
        boxes: Left, top, right and bottom of each object, in pixels.
        names: What a message calls each object; empty for its number.
    """
    left, top, right, bottom = boxes.T
    has_size = (left < right) & (top < bottom)
    is_inside = (left >= -1) & (top >= -1) & (right <= width + 1) & (bottom <= height + 1)
    outside = f"lies outside the image, which is {width} wide and {height} high"
    for is_valid, fault in ((has_size, "has no size"), (is_inside, outside)):
        if not is_valid.all():
            index = int(np.argmin(is_valid))
            box = [round(float(value), 3) for value in boxes[index]]
            name = names[index] if names else f"object {index + 1}"
            raise ValueError(
                f"{name} has the box {box} (left, top, right, bottom), which {fault}. Correct or remove the annotation"
            )


def image_size(encoded: bytes, exif_orientation: bool) -> tuple[int, int] | None:
    """Returns height and width of an image from its header; None for one that cannot be opened."""
    try:
        image = _open_image(encoded)
        size = image.height, image.width
        return size[::-1] if exif_orientation and _read_orientation(image) > 4 else size
    except (OSError, ValueError, SyntaxError):
        return None


def _read_orientation(image: Any) -> int:
    """Returns the EXIF orientation of an image, 1 to 8; 1 (as stored) if there is no valid one."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:
        # EXIF data is separate from the image: a damaged block has no orientation, and the pixels are intact.
        return 1
    return orientation if isinstance(orientation, int) and orientation in range(1, 9) else 1


def _apply_orientation(values: npt.NDArray[Any], orientation: int, axes: tuple[int, int]) -> npt.NDArray[Any]:
    """Rotates and mirrors an image by its EXIF orientation; `axes` are those of rows (y) and columns (x)."""
    if orientation == 1:
        return values
    if orientation > 4:
        values = values.swapaxes(*axes)
    flips = zip(axes, (_Y_FLIPS, _X_FLIPS), strict=True)
    return np.ascontiguousarray(np.flip(values, tuple(axis for axis, flipped in flips if orientation in flipped)))


IMAGE, MASK = "image", "mask"
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
"""Types to convert to, by the unsigned types that PyTorch stores but does not compute with."""


def is_image_column(facts: ColumnFacts) -> bool:
    """Whether a column holds images: encoded, or as uint8 of shape (height, width) or (height, width, channels)."""
    return facts.kind == "bytes" or (facts.kind == "array" and len(facts.shape) in (2, 3) and facts.dtype == "|u1")


def is_mask(facts: ColumnFacts) -> bool:
    """Whether a column beside images can hold their masks: encoded, or integers of shape (height, width)."""
    return facts.kind == "bytes" or (
        facts.kind == "array" and len(facts.shape) == 2 and np.dtype(facts.dtype).kind in "uib"
    )


def decode_columns(
    rows: Mapping[str, Any],
    kinds: Mapping[str, str],
    transforms: Sequence[Any],
    keys: npt.NDArray[np.int64] | None,
    exif_orientation: bool = True,
) -> dict[str, npt.NDArray]:
    """Decodes the columns of images and masks of some rows, and applies the transforms to them.

    Args:
        rows: Their columns as read, encoded files as a list; zeros of shape (rows,) stand in for a target that was not
            read.
        kinds: `image` or `mask` by column.
        keys: Keys of the rows, see `apply_transforms`.

    Returns:
        By column: images of shape (rows, channels, height, width), masks of shape (rows, height, width).

    Raises:
        ValueError: An image or mask cannot be decoded, or the rows have several shapes.
    """
    stored = {name for name in kinds if isinstance(rows[name], np.ndarray)}
    unread = [name for name in stored if rows[name].ndim == 1]
    present = {name: kind for name, kind in kinds.items() if name not in unread}
    if not transforms and stored >= present.keys():
        decoded = {name: _convert_array(rows[name], kind) for name, kind in present.items()}
    else:
        decoded = _decode_by_row(rows, present, transforms, keys, exif_orientation)
    size = next(iter(decoded.values())).shape[-2:] if decoded else (1, 1)
    return decoded | {name: np.zeros((len(rows[name]), *size), np.uint8) for name in unread}


def _convert_array(values: npt.NDArray, kind: str) -> npt.NDArray:
    """Converts arrays (rows, height, width[, channels]) to images with channels first, or to masks of classes."""
    if kind == MASK:
        return values.astype(_SIGNED.get(values.dtype.name, values.dtype), copy=False)
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if values.ndim == 4 else values[:, None]


def _decode_by_row(
    rows: Mapping[str, Any],
    kinds: Mapping[str, str],
    transforms: Sequence[Any],
    keys: npt.NDArray[np.int64] | None,
    exif_orientation: bool,
) -> dict[str, npt.NDArray]:
    import torch

    from ray_app.task.transforms import apply_transforms, as_plain_tensor

    decoded: dict[str, list[npt.NDArray]] = {name: [] for name in kinds}
    for row in range(len(next(iter(rows.values())))):
        sample = {
            name: (_load_mask if kind == MASK else load_image)(rows[name][row], exif_orientation)
            for name, kind in kinds.items()
        }
        sample = apply_transforms(sample, transforms, None if keys is None else int(keys[row]))
        for name, kind in kinds.items():
            if kind == IMAGE and sample[name].dtype != torch.uint8:
                raise ValueError(
                    "task.init_args.transforms or evaluate_transforms make"
                    f" {str(sample[name].dtype).removeprefix('torch.')} of the image {name!r}; leave ToDtype out, the"
                    " model receives images from 0 to 1 anyway, minus mean, divided by std"
                )
            decoded[name].append(as_plain_tensor(sample[name]).numpy())
    for name, values in decoded.items():
        shapes = sorted({one.shape for one in values})
        if len(shapes) > 1:
            raise ValueError(
                f"images of {name!r} have the shapes {shapes[:3]}; let task.init_args.transforms and"
                " evaluate_transforms resize them to one size (Resize, CenterCrop, RandomResizedCrop)"
            )
    return {name: np.stack(values) for name, values in decoded.items()}


def load_image(stored: Any, exif_orientation: bool = True) -> Tensor:
    """Returns a row's image, encoded (see `decode_image`) or an array, as a `tv_tensors.Image`, channels first."""
    import torch
    from torchvision import tv_tensors

    is_encoded = isinstance(stored, bytes)
    pixels = decode_image(stored, exif_orientation) if is_encoded else _convert_array(stored[None], IMAGE)[0]
    return tv_tensors.Image(torch.from_numpy(pixels))


def _load_mask(stored: Any, exif_orientation: bool) -> Tensor:
    """Returns a row's mask, encoded or an array, as a `tv_tensors.Mask` of classes, (height, width)."""
    import torch
    from torchvision import tv_tensors

    mask = decode_mask(stored, exif_orientation) if isinstance(stored, bytes) else stored
    return tv_tensors.Mask(torch.from_numpy(_convert_array(mask, MASK)))


def normalize_images(images: Tensor, pixel_max: float, mean: list[float], std: list[float]) -> Tensor:
    """Returns images, (rows, channels, height, width), as float32 from 0 to 1, less the mean, divided by std."""
    import torch

    from ray_app.devices import constant_tensor

    images = images.to(torch.float32) / pixel_max
    if mean == [0.0] and std == [1.0]:
        return images
    means, stds = (constant_tensor(values, images.device)[:, None, None] for values in (mean, std))
    return (images - means) / stds
