"""Files of images and masks as an ingest stores them.

Files that training decodes stay unchanged; TIFF, BMP and AVIF files, and first frames, become PNG. Masks become PNG
files of one channel that has the classes, if the user names these by values or colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_app.errors import ConfigError, remove_addresses
from ray_app.ingest.readers import base
from ray_app.storage.data_files import HEAD_BYTES, File, is_convertible_image
from ray_app.task.images import MAX_PIXELS, decode_image, decode_mask

NOT_AN_IMAGE = (
    "not an image that can be decoded ({}). Allowed is one intact still image as png, jpeg, webp or gif. Convert it, or"
    " give check=False to store it unread"
)
IGNORED = 255
"""Class of the pixels of a mask that count in no loss (`ignore_index`)."""
_PNG_MODES = ("1", "L", "P", "LA", "PA", "RGB", "RGBA", "I;16")
"""Modes of Pillow that a PNG file stores unchanged."""
_MAX_NAMED = 8


def read_image(file: File, check: bool, first_frame: bool = False) -> bytes:
    """Returns an image file as it is stored: unchanged, or as PNG where training does not decode its format.

    Raises:
        ValueError: It cannot be decoded; the message says why and what to do.
    """
    encoded = file.location.read_bytes()
    is_converted = is_convertible_image(encoded[:HEAD_BYTES])
    try:
        if is_converted or (first_frame and _has_frames(encoded)):
            return convert_image(encoded, first_frame)
    except ValueError as error:
        raise ValueError(NOT_AN_IMAGE.format(error)) from error
    if check and (reason := base.explain_undecodable(encoded)):
        remedy = "; first_frame takes the first one" if reason.endswith(" frames") else ""
        raise ValueError(NOT_AN_IMAGE.format(reason + remedy))
    return encoded


def _has_frames(encoded: bytes) -> bool:
    """Returns whether a GIF or WebP file is animated; False for one that cannot be opened."""
    from PIL import Image

    try:
        return getattr(Image.open(io.BytesIO(encoded), formats=("GIF", "WEBP")), "n_frames", 1) > 1
    except Exception:
        # The check of the image says what is wrong with it.
        return False


def convert_image(encoded: bytes, first_frame: bool) -> bytes:
    """Returns an image as a PNG file without loss: turned by its orientation, of up to 16 bits, without metadata.

    Raises:
        ValueError: It is damaged, too large, of several frames unless the first is wanted, or has values that PNG
            cannot store.
    """
    with _library_errors():
        from PIL import Image, ImageOps

        image = Image.open(io.BytesIO(encoded), formats=("TIFF", "BMP", "AVIF", "GIF", "WEBP"))
        if (pixels := image.width * image.height) > MAX_PIXELS:
            raise ValueError(f"it has {pixels} pixels; at most {MAX_PIXELS} are decoded")
        if (frames := getattr(image, "n_frames", 1)) > 1 and not first_frame:
            raise ValueError(f"it has {frames} frames; first_frame takes the first one")
        image.seek(0)
        image.load()
        image = _to_png_mode(ImageOps.exif_transpose(image))
        image.info = {name: value for name, value in image.info.items() if name == "transparency"}
        file = io.BytesIO()
        image.save(file, "png")
        return file.getvalue()


def _to_png_mode(image: Any) -> Any:
    """Returns an image in a mode that PNG stores; raises ValueError for values that would be changed."""
    from PIL import Image

    if image.mode in _PNG_MODES:
        return image
    if image.mode.startswith("I"):
        values = np.array(image)
        if values.min() < 0 or values.max() > np.iinfo(np.uint16).max:
            raise ValueError(f"its values go from {values.min()} to {values.max()}; allowed are 16 bits without sign")
        return Image.fromarray(values.astype(np.uint16))
    if image.mode in ("CMYK", "YCbCr", "RGBX"):
        return image.convert("RGB")
    raise ValueError(f"it is of mode {image.mode}; allowed are gray and colours of 8 or 16 bits. Scale it to these")


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turns errors of a library about a file, of many types, into a ValueError of one line."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        lines = remove_addresses(str(error)).strip().splitlines()
        raise ValueError(lines[0] if lines else type(error).__name__) from error


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
                f"the mask has the values {listed}, which mask_values does not name; it names"
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
    if not (are_colors or are_values) or is_too_large or not all(names) or len(set(keys)) < len(keys):
        raise ConfigError(
            f"mask_values is {text!r}; allowed are values or colours with their names, each once, such as"
            " 0=background,255=object or 0/0/0=background,255/0/0=road (red, green, blue)."
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
        if mask_values:
            encoded = encode_mask(mask_values.to_classes(_mask_values(encoded, mask_values.is_color)))
        mask_size = tuple(decode_mask(encoded).shape)
    except ValueError as error:
        raise ValueError(f"its mask {file.name}: {error}") from error
    if check and mask_size != (size := tuple(decode_image(image).shape[-2:])):
        raise ValueError(f"its mask {file.name} has {mask_size} rows and columns, and the image {size}")
    return encoded


def _mask_values(encoded: bytes, is_color: bool) -> npt.NDArray[np.int64]:
    """Returns the values, or the colours as one number, of the pixels of a mask, (height, width)."""
    if not is_color:
        return decode_mask(encoded).numpy().astype(np.int64)
    if encoded.startswith(b"\xff\xd8"):
        raise ValueError("it is a JPEG file, which has other colours than were drawn; masks of colours are PNG files")
    red, green, blue = decode_image(encoded).numpy().astype(np.int64)
    return red << 16 | green << 8 | blue


def encode_mask(classes: npt.NDArray[np.uint8]) -> bytes:
    """Returns classes of pixels, (height, width), as a PNG file of one channel."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(classes).save(file, "png")
    return file.getvalue()
