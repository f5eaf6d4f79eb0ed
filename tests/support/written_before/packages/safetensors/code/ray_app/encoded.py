"""Encoded images: decoded by torchvision, after a look at the header, since a small file can say that it is enormous."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS = 2**27
"""Of all frames together: 403 MB as RGB, an image of 11585 x 11585."""


def decoded(encoded: bytes) -> Tensor:
    """Decodes an image file.

    Args:
        encoded: JPEG, PNG, WebP or GIF.

    Returns:
        RGB, uint8 of shape (3, height, width); (frames, 3, height, width) where it is animated.

    Raises:
        ValueError: It says that it has more than `MAX_PIXELS`, or does not say how many.
        RuntimeError: It cannot be decoded.
    """
    import torch
    from torchvision.io import ImageReadMode, decode_image

    pixels = _pixels(encoded)
    if pixels > MAX_PIXELS:
        raise ValueError(f"it has {pixels} pixels; at most {MAX_PIXELS} are decoded")
    return decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode=ImageReadMode.RGB)


def _pixels(encoded: bytes) -> int:
    """Pixels of all frames, from the headers."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP", "GIF")) as image:
            frames = getattr(image, "n_frames", 1) if image.format in ("WEBP", "GIF") else 1  # of the others one is decoded
            return image.width * image.height * frames
    except Exception as error:  # Pillow's readers raise what they like
        raise ValueError(f"its header is refused: {error}") from error
