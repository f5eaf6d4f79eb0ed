"""Encoded images: the pixels of every kind of file, refused files and their reasons, and EXIF orientation."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from ray_app.task.detection import ObjectDetection
from ray_app.task.image import ImageClassification
from ray_app.task.images import decode_image, decode_mask
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Ragged
from tests.support.encoded_images import encode, intact_files, png, png_chunk, png_chunks, smooth_pixels

PHOTO = Image.fromarray(smooth_pixels(33, 41))
STILL = [name for name in intact_files() if not name.startswith(("animated", "bmp", "tiff", "png of 16"))]


def reference(encoded: bytes, min_side: int | None = None) -> Any:
    """Returns the pixels that Pillow decodes, also at a smaller scale, rotated by its own function."""
    with Image.open(io.BytesIO(encoded)) as image:
        if min_side is not None:
            image.draft(None, (min_side, min_side))
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)


def with_exif(exif: bytes, kind: str = "jpeg", image: Image.Image = PHOTO) -> bytes:
    return encode(image, kind, exif=exif, **({"lossless": True} if kind == "webp" else {}))


def orientation(number: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif.tobytes()


@pytest.mark.parametrize("kind", STILL)
def test_decoded_pixels_equal_those_of_pillow(kind: str) -> None:
    np.testing.assert_array_equal(decode_image(intact_files()[kind]), reference(intact_files()[kind]))


@pytest.mark.parametrize("subsampling", [0, 1, 2, "4:1:1"])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (37, 53)])
def test_jpeg_pixels_equal_those_of_pillow_for_every_subsampling(subsampling: Any, size: tuple[int, int]) -> None:
    encoded = encode(Image.fromarray(smooth_pixels(*size)), "jpeg", subsampling=subsampling)
    np.testing.assert_array_equal(decode_image(encoded), reference(encoded))


@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 2}, {"progressive": True}, {"mode": "CMYK"}])
@pytest.mark.parametrize(("size", "scaled"), [((32, 63), (32, 63)), ((64, 67), (32, 34)), ((415, 257), (52, 33))])
def test_a_large_jpeg_is_decoded_at_the_scale_that_pillow_would_draft(
    options: dict[str, Any], size: tuple[int, int], scaled: tuple[int, int]
) -> None:
    image = Image.fromarray(smooth_pixels(*size)).convert(options.get("mode", "RGB"))
    encoded = encode(image, "jpeg", **{name: value for name, value in options.items() if name != "mode"})
    pixels = decode_image(encoded, min_side=32)
    assert pixels.shape[1:] == scaled
    np.testing.assert_array_equal(pixels, reference(encoded, 32))


def test_jpeg_scaling_changes_only_images_of_twice_the_size() -> None:
    for size, is_equal in ((63, True), (64, False)):
        files = [with_exif(orientation(6), image=Image.fromarray(smooth_pixels(size, 90)))]
        scaled, whole = (
            ImageClassification(size=32, num_classes=1, jpeg_scaling=on).decode({"image": files, "label": [0]})["image"]
            for on in (True, False)
        )
        assert np.array_equal(scaled, whole) == is_equal
        assert np.abs(scaled.astype(int) - whole).mean() < 2


def test_unusual_jpeg_sampling_factors_are_decoded() -> None:
    encoded = bytearray(encode(PHOTO, "jpeg", subsampling=0))
    components = encoded.index(b"\xff\xc0") + 10
    for component, factors in enumerate((0x22, 0x21, 0x12)):
        encoded[components + 1 + 3 * component] = factors
    np.testing.assert_array_equal(decode_image(bytes(encoded)), reference(bytes(encoded)))


def test_a_jpeg_with_several_pictures_is_decoded_to_the_first() -> None:
    encoded = encode(PHOTO, "mpo", save_all=True, append_images=[PHOTO.rotate(180)], exif=orientation(3))
    assert Image.open(io.BytesIO(encoded)).format == "MPO"
    np.testing.assert_array_equal(decode_image(encoded), reference(encoded))
    with pytest.raises(ValueError, match="not a mask"):
        decode_mask(encode(PHOTO.convert("L"), "mpo", save_all=True, append_images=[PHOTO.convert("L")]))


def test_images_of_16_bits_keep_their_brightness() -> None:
    grey = np.array([[0, 255, 256, 257], [300, 1000, 32768, 65535]] * 2, np.uint16)
    [pixels] = ImageClassification(size=4, num_classes=1).decode(
        {"image": [encode(Image.fromarray(grey), "png")], "label": [0]}
    )["image"]
    np.testing.assert_array_equal(pixels, np.broadcast_to(grey // 256, (3, 4, 4)))


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_an_animated_image_decodes_to_all_its_frames(kind: str) -> None:
    frames = decode_image(intact_files()[f"animated {kind}"])
    assert frames.shape == (3, 3, 12, 10)
    with Image.open(io.BytesIO(intact_files()[f"animated {kind}"])) as image:
        image.seek(2)
        np.testing.assert_array_equal(frames[2], np.asarray(image.convert("RGB")).transpose(2, 0, 1))
    with pytest.raises(ValueError, match="the image has 3 frames; a classifier needs still images"):
        ImageClassification(size=4, num_classes=1).decode({"image": [intact_files()[f"animated {kind}"]], "label": [0]})


def test_an_animated_png_decodes_to_its_still_image() -> None:
    np.testing.assert_array_equal(
        decode_image(intact_files()["animated png"]), smooth_pixels(12, 10).transpose(2, 0, 1)
    )


@pytest.mark.parametrize("kind", [kind for kind in intact_files() if not kind.startswith(("bmp", "tiff"))])
def test_a_truncated_image_is_refused(kind: str) -> None:
    encoded = intact_files()[kind]
    # The last bytes of a PNG file are the checksum of an empty chunk.
    for size in {len(encoded) * part // 20 for part in range(1, 20)} | {len(encoded) - (5 if "png" in kind else 1)}:
        with pytest.raises(ValueError, match=r"\w"):
            decode_image(encoded[:size])


def test_damaged_jpeg_data_that_still_decodes_is_refused() -> None:
    encoded = bytearray(encode(PHOTO, "jpeg", quality=95))
    middle = (encoded.index(b"\xff\xda") + len(encoded)) // 2
    encoded[middle : middle + 60] = b"\xff\x00" * 30
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        decode_image(bytes(encoded))


def test_jpeg_irregularities_that_change_no_pixel_are_accepted() -> None:
    encoded = encode(PHOTO, "jpeg")
    surplus, version = encoded[:-2] + bytes(200) + encoded[-2:], bytearray(encoded)
    offset = encoded.index(b"JFIF\0") + 5
    version[offset : offset + 2] = b"\0\0"
    for odd in (surplus, bytes(version), encoded + b"behind the end"):
        np.testing.assert_array_equal(decode_image(odd), reference(encoded))


@pytest.mark.parametrize(
    ("marker", "bits", "reason"), [(0xC0, 12, "header is damaged"), (0xC3, 8, "Unsupported|broken data stream")]
)
def test_unsupported_kinds_of_jpeg_are_refused(marker: int, bits: int, reason: str) -> None:
    encoded = bytearray(encode(PHOTO, "jpeg"))
    frame = encoded.index(b"\xff\xc0")
    encoded[frame + 1], encoded[frame + 4] = marker, bits
    with pytest.raises(ValueError, match=reason):
        decode_image(bytes(encoded))


@pytest.mark.parametrize("interlaced", [0, 1])
@pytest.mark.parametrize("decode", [decode_image, decode_mask])
def test_a_png_with_too_few_rows_is_refused(interlaced: int, decode: Any) -> None:
    rows = bytes(79) if interlaced else b"".join(b"\0" + bytes(range(1, 9)) for _ in range(8))
    header = (8, 8, 8, 0, 0, 0, interlaced)
    for missing in (1, 9, 30, 60):
        with pytest.raises(ValueError, match=r"the image data ends \d+ bytes too early|file is truncated"):
            decode(png(header, zlib.compress(rows[:-missing])))
    assert decode(png(header, zlib.compress(bytes(len(rows))))).sum() == 0, "the complete image is accepted"


def test_a_colour_that_the_palette_of_a_png_lacks_is_refused() -> None:
    data, palette = zlib.compress(bytes([0, 0, 1, 0, 2, 3])), png_chunk(b"PLTE", bytes(9))
    encoded = png((2, 2, 8, 3, 0, 0, 0), data, palette)
    with pytest.raises(ValueError, match="a pixel has the color 3 of a palette of 3 colors"):
        decode_image(encoded)
    assert decode_mask(encoded).tolist() == [[0, 1], [2, 3]], "the classes of a mask are its indices, not its colours"


def test_a_wrong_checksum_of_image_data_is_refused() -> None:
    encoded = encode(PHOTO, "png")
    chunks = [png_chunk(kind, body, 7 if kind == b"IDAT" else None) for kind, body in png_chunks(encoded)]
    with pytest.raises(ValueError, match=r"checksum in b'IDAT'"):
        decode_image(encoded[:8] + b"".join(chunks))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "the file is a Git LFS pointer, not the file itself",
        ),
        (b"<!DOCTYPE html>\n<html><title>404</title></html>", "the file is a web page"),
        (b"\n<HTML>", "the file is a web page"),
        (encode(PHOTO, "bmp"), "the file is a BMP image"),
        (encode(PHOTO, "tiff"), "the file is a TIFF image"),
        (encode(PHOTO, "tiff", big_tiff=True), "the file is a TIFF image"),
        (encode(PHOTO, "avif"), "the file is an AVIF image"),
        (b"%PDF-1.7", "the file is a PDF document"),
        (b"hello, world", r"not an image: it begins with b'hello, w'"),
    ],
)
def test_a_file_that_is_not_an_image_is_refused_with_its_kind(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_image(content)


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_an_image_is_rotated_by_its_exif_orientation(kind: str, number: int) -> None:
    encoded = with_exif(orientation(number), kind)
    np.testing.assert_array_equal(decode_image(encoded), reference(encoded))
    assert (
        decode_image(encoded).strides
        == decode_image(encode(Image.fromarray(reference(encoded).transpose(1, 2, 0)), "png")).strides
    )
    np.testing.assert_array_equal(decode_image(encoded, exif_orientation=False), decode_image(with_exif(b"", kind)))


def test_an_orientation_after_the_image_data_of_a_png_is_applied() -> None:
    chunks = png_chunks(with_exif(orientation(8), "png"))
    [exif] = [body for kind, body in chunks if kind == b"eXIf"]
    last = [(kind, body) for kind, body in chunks if kind != b"eXIf"]
    last.insert(-1, (b"eXIf", exif))
    encoded = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in last)
    assert decode_image(encoded).shape == (3, 41, 33)


@pytest.mark.parametrize(
    "exif",
    [
        orientation(0),
        orientation(9),
        orientation(65535),
        b"Exif\0\0junk",
        b"Exif\0\0II*\0\xff\xff\xff\x7f",
        b"Exif\0\0",
    ],
)
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_invalid_exif_data_does_not_rotate_an_image(kind: str, exif: bytes) -> None:
    np.testing.assert_array_equal(decode_image(with_exif(exif, kind)), decode_image(with_exif(b"", kind)))


def test_every_task_rotates_images_masks_and_boxes_together() -> None:
    """A photo is stored rotated by 90 degrees, as a phone does; its box and its mask refer to the upright photo."""
    upright = np.zeros((60, 40, 3), np.uint8)
    upright[5:25, 10:20] = 255
    stored = encode(Image.fromarray(upright).rotate(90, expand=True), "png", exif=orientation(6))
    mask = encode(Image.fromarray(upright[..., 0]), "png")
    module = ModuleTask(
        {"class_path": "torch.nn.Identity"}, ["image"], "mask", {"class_path": "torch.nn.CrossEntropyLoss"}
    )
    module.kinds = {"image": "image", "mask": "mask"}
    decoded = module.decode({"image": [stored], "mask": [mask]})
    np.testing.assert_array_equal(np.asarray(decoded["image"])[0], upright.transpose(2, 0, 1))
    np.testing.assert_array_equal(np.asarray(decoded["mask"])[0], upright[..., 0])
    boxes = {
        "boxes": Ragged.of([np.array([[10, 5, 20, 25]], np.float32)], np.float32, row_shape=(4,)),
        "labels": Ragged.of([np.array([1])], np.int64),
    }
    detection = ObjectDetection({"class_path": "torch.nn.Identity"})
    detected = detection.decode({"image": [stored], **boxes})
    left, top, right, bottom = boxes["boxes"].row(0)[0].astype(int)
    image = detected["image"].row(0).reshape(3, *np.asarray(detected["size"])[0])
    assert image[:, top:bottom, left:right].min() == 255
    classifier = ImageClassification(size=40, num_classes=1)
    [pixels] = classifier.decode({"image": [stored], "label": [0]})["image"]
    np.testing.assert_array_equal(pixels, upright[10:50].transpose(2, 0, 1))


def test_a_mask_is_rotated_by_its_exif_orientation() -> None:
    numbers = np.arange(12, dtype=np.uint8).reshape(3, 4)
    encoded = encode(Image.fromarray(numbers), "png", exif=orientation(6))
    assert decode_mask(encoded).tolist() == np.rot90(numbers, -1).tolist()
    assert decode_mask(encoded, exif_orientation=False).tolist() == numbers.tolist()


@pytest.mark.parametrize("kind", ["16 bits", "palette"])
def test_an_image_is_rotated_with_its_mask(kind: str) -> None:
    values = np.array([[0, 7, 200], [200, 7, 0]], np.uint16)
    if kind == "palette":
        image = Image.fromarray(values.astype(np.uint8)).convert("L")
        image.putpalette(list(range(256)) * 3)
    else:
        values *= 300
        image = Image.fromarray(values)
    module = ModuleTask(
        {"class_path": "torch.nn.Identity"}, ["image"], "mask", {"class_path": "torch.nn.CrossEntropyLoss"}
    )
    module.kinds = {"image": "image", "mask": "mask"}
    photo = encode(Image.fromarray(np.zeros((2, 3, 3), np.uint8)), "png", exif=orientation(6))
    decoded = module.decode({"image": [photo], "mask": [encode(image, "png", exif=orientation(6))]})
    assert np.asarray(decoded["mask"]).tolist() == [np.rot90(values, -1).tolist()]
    assert np.asarray(decoded["image"]).shape == (1, 3, 3, 2)
    arrays = module.decode({"image": np.zeros((1, 2, 3, 3), np.uint8), "mask": values[None]})
    assert np.asarray(arrays["mask"]).tolist() == [values.tolist()]


def test_exif_orientation_false_leaves_images_as_they_are_stored() -> None:
    stored = with_exif(orientation(6), "png")
    off: dict[str, Any] = {"exif_orientation": False}
    module = ModuleTask(
        {"class_path": "torch.nn.Identity"}, ["image"], "image", {"class_path": "torch.nn.MSELoss"}, **off
    )
    module.kinds = {"image": "image"}
    detection = ObjectDetection({"class_path": "torch.nn.Identity"}, **off)
    none = np.zeros(1, np.int64)
    assert np.asarray(module.decode({"image": [stored]})["image"]).shape == (1, 3, 33, 41)
    assert np.asarray(detection.decode({"image": [stored], "boxes": none, "labels": none})["size"]).tolist() == [
        [33, 41]
    ]
    pixels = {
        on: ImageClassification(size=33, num_classes=1, exif_orientation=on).decode({"image": [stored], "label": [0]})
        for on in (True, False)
    }
    assert not np.array_equal(pixels[True]["image"], pixels[False]["image"])
