"""Encoded images: decoded by torchvision, after a look at the header, since a small file can say that it is enormous."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS = 2**27
"""Of all frames together: 403 MB as RGB, an image of 11585 x 11585."""


def pixels_of(encoded: bytes) -> Tensor:
    """Decodes an image file.

    Args:
        encoded: JPEG, PNG, WebP or GIF.

    Returns:
        RGB, uint8 of shape (3, height, width); (frames, 3, height, width) where it is animated. Of 16 bits the upper 8 are kept.

    Raises:
        ValueError: It says that it has more than `MAX_PIXELS`, or does not say how many.
        RuntimeError: It cannot be decoded.
    """
    import torch
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2.functional import to_dtype

    _refuse_if_enormous(encoded)
    image = decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return image if image.dtype == torch.uint8 else to_dtype(image, torch.uint8, scale=True)


def mask_of(encoded: bytes) -> Tensor:
    """Decodes a mask: the numbers of the classes of pixels, as they are stored.

    Args:
        encoded: PNG or GIF of one channel, whose values are the numbers, or of a palette, whose indices are.

    Returns:
        Shape (height, width); uint8, or int32 where there are more than 8 bits.

    Raises:
        ValueError: It is an image of colours, or see `pixels_of`.
    """
    import numpy as np
    import torch
    from PIL import Image

    _refuse_if_enormous(encoded)
    with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP", "GIF")) as image:
        if image.format == "JPEG" or image.mode not in ("1", "L", "P", "I", "I;16"):
            raise ValueError(
                f"it is a {image.format} of mode {image.mode}, which is no mask; a mask is a PNG of one channel, or of a palette, whose"
                " values are the numbers of classes"
            )
        return torch.from_numpy(np.array(image).astype(np.int32 if image.mode.startswith("I") else np.uint8))


def _refuse_if_enormous(encoded: bytes) -> None:
    """Looks at the header.

    Raises:
        ValueError: See `pixels_of`.
    """
    if (pixels := _pixels(encoded)) > MAX_PIXELS:
        raise ValueError(f"it has {pixels} pixels; at most {MAX_PIXELS} are decoded")


def _pixels(encoded: bytes) -> int:
    """Pixels of all frames, from the headers."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP", "GIF")) as image:
            frames = getattr(image, "n_frames", 1) if image.format in ("WEBP", "GIF") else 1  # of the others one is decoded
            if image.format == "PNG":
                image.verify()  # its checksums: what is damaged ends the process in torchvision's decoder
            return image.width * image.height * frames
    except Exception as error:  # Pillow's readers raise what they like
        raise ValueError(f"its header is refused: {error}") from error
