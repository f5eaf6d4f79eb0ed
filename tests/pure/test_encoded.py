"""Encoded images: Pillow reads their headers, torchvision decodes them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torchvision.io import decode_image

from ray_app.task.image import ImageClassification


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
