"""Encoded images: their headers are looked at, by Pillow where it is no usual JPEG, and torchvision decodes them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torchvision.io import decode_image

from ray_app.task.image import ImageClassification
from ray_app.task.rows import images


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif"])
def test_pillow_decodes_no_pixel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, kind)
    encoded = file.getvalue()
    Image.init()  # some of Pillow's formats load images of their own when they are first looked at
    for owner in (Image.Image, ImageFile.ImageFile):
        monkeypatch.setattr(owner, "load", lambda _: pytest.fail("Pillow decodes"))
    with pytest.raises(pytest.fail.Exception), Image.open(io.BytesIO(encoded)) as image:
        image.tobytes()
    [got] = ImageClassification(size=8, num_classes=1).decode({"image": [encoded], "label": [0]})["image"]
    np.testing.assert_array_equal(got, decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode="RGB").numpy())


def test_images_of_16_bits_keep_their_brightness() -> None:
    file = io.BytesIO()
    grey = np.array([[0, 255, 256, 257], [300, 1000, 32768, 65535]] * 2, np.uint16)
    Image.fromarray(grey).save(file, "png")
    [got] = ImageClassification(size=4, num_classes=1).decode({"image": [file.getvalue()], "label": [0]})["image"]
    np.testing.assert_array_equal(got, np.broadcast_to(grey // 256, (3, 4, 4)))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "more", [{}, {"progressive": True}, {"optimize": True, "comment": b"x" * 300}, {"exif": b"Exif\0\0" + b"\xff\xc0" * 99}]
)
def test_a_jpeg_has_the_pixels_that_pillow_says(mode: str, more: dict[str, Any]) -> None:
    file = io.BytesIO()
    Image.new(mode, (301, 17)).save(file, "jpeg", **more)
    encoded = file.getvalue()
    assert images._pixels_of_jpeg(encoded) == 301 * 17
    frame = next(at for at in range(len(encoded)) if images._pixels_of_jpeg(encoded[:at]))
    assert {images._pixels_of_jpeg(encoded[:at]) for at in range(frame)} == {0}, "then Pillow is asked"


def test_a_small_jpeg_that_says_it_is_enormous_is_refused() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "jpeg")
    encoded = bytearray(file.getvalue())
    size = encoded.index(b"\xff\xc0") + 5
    encoded[size : size + 4] = (65500).to_bytes(2, "big") * 2
    with pytest.raises(ValueError, match="it has 4290250000 pixels; at most 134217728 are decoded"):
        images.pixels_of(bytes(encoded))
