"""Image files of every supported kind, and damaged variants of them; all are the same in each run."""

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Returns an image as a file in a format of Pillow."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def smooth_pixels(height: int, width: int, channels: int = 3, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Returns pixels that change slowly, so that JPEG compression changes them little."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, channels), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height)))


def png_chunk(kind: bytes, body: bytes, checksum: int | None = None) -> bytes:
    """Returns a chunk of a PNG file, with its correct checksum or the given one."""
    crc = zlib.crc32(kind + body) if checksum is None else checksum
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)


def png(header: tuple[int, ...], data: bytes, *before: bytes) -> bytes:
    """Returns a PNG file.

    Args:
        header: Width, height, bits, type of colours, 0, 0, and whether it is interlaced.
        data: Its compressed image data.
        before: Chunks between the header and the data.
    """
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *header))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def png_chunks(encoded: bytes) -> list[tuple[bytes, bytes]]:
    """Returns kind and content of each chunk of a PNG file."""
    chunks, at = [], 8
    while at < len(encoded):
        size, kind = struct.unpack(">I4s", encoded[at : at + 8])
        chunks.append((kind, encoded[at + 8 : at + 8 + size]))
        at += size + 12
    return chunks


def intact_files() -> dict[str, bytes]:
    """Returns an intact file of each format and pixel mode, and animated ones, by name."""
    pixels = Image.fromarray(smooth_pixels(33, 41, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    modes = {
        "jpeg": ("RGB", "L", "CMYK"),
        "png": ("RGB", "RGBA", "P", "L", "1", "LA"),
        "gif": ("P",),
        "webp": ("RGB", "RGBA"),
        "bmp": ("RGB",),
    }
    files = {
        f"{kind} {mode}": encode(pixels.convert(mode), kind) for kind, several in modes.items() for mode in several
    }
    files["jpeg progressive"] = encode(pixels.convert("RGB"), "jpeg", progressive=True, exif=exif)
    files["png with EXIF"] = encode(pixels, "png", exif=exif)
    files["png of 16 bits"] = encode(Image.fromarray(smooth_pixels(33, 41, 4)[..., 0].astype(np.uint16) * 257), "png")
    files["tiff"] = encode(pixels.convert("RGB"), "tiff")
    files["tiff LZW"] = encode(pixels.convert("RGB"), "tiff", compression="tiff_lzw")
    frames = [Image.fromarray(smooth_pixels(12, 10, 3, seed)) for seed in range(3)]
    files |= {
        f"animated {kind}": encode(frames[0], kind, save_all=True, append_images=frames[1:])
        for kind in ("gif", "webp", "png")
    }
    return files


def damaged_files(per_kind: int) -> Iterator[tuple[str, bytes]]:
    """Yields files that are cut off at each chunk, with wrong checksums, with too little image data, and with randomly
    changed bytes.

    Args:
        per_kind: Number of files with randomly changed bytes, for each kind of image.
    """
    for name, encoded in intact_files().items():
        draw = random.Random(name)
        yield f"{name} cut to nothing", b""
        for at in sorted(draw.sample(range(1, len(encoded)), 12)):
            yield f"{name} cut to {at} bytes", encoded[:at]
        for number in range(per_kind):
            changed = bytearray(encoded)
            for _ in range(draw.choice([1, 1, 2, 5, 20])):
                changed[draw.randrange(len(changed) if draw.random() < 0.5 else min(64, len(changed)))] = draw.choice(
                    [0, 1, 128, 255]
                )
            yield f"{name} change {number}", bytes(changed)
            if encoded.startswith(b"\x89PNG"):
                yield f"{name} change {number} with right checksums", _with_right_checksums(bytes(changed))
        if encoded.startswith(b"\x89PNG"):
            yield from _damaged_png(name, encoded)


def _with_right_checksums(encoded: bytes) -> bytes:
    whole, at = encoded[:8], 8
    while at + 12 <= len(encoded):
        (size,) = struct.unpack(">I", encoded[at : at + 4])
        whole += png_chunk(encoded[at + 4 : at + 8], encoded[at + 8 : at + 8 + size])
        at += size + 12
    return whole


def _damaged_png(name: str, encoded: bytes) -> Iterator[tuple[str, bytes]]:
    chunks, signature = png_chunks(encoded), encoded[:8]
    for number, (kind, _) in enumerate(chunks):
        before = b"".join(png_chunk(*chunk) for chunk in chunks[:number])
        after = b"".join(png_chunk(*chunk) for chunk in chunks[number + 1 :])
        yield f"{name} cut before {kind!r}", signature + before
        yield f"{name} without {kind!r}", signature + before + after
        yield (
            f"{name} with a wrong checksum of {kind!r}",
            signature + before + png_chunk(*chunks[number], checksum=1) + after,
        )
    unpacked = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    header = struct.unpack(">IIBBBBB", chunks[0][1])
    others = [png_chunk(*chunk) for chunk in chunks if chunk[0] in (b"PLTE", b"tRNS", b"eXIf")]
    for size in (0, 1, len(unpacked) // 3, len(unpacked) - 1):
        yield f"{name} with {size} bytes of image data", png(header, zlib.compress(unpacked[:size]), *others)
    yield f"{name} without zlib's format", png(header, unpacked, *others)
    yield f"{name} of no width", png((0, *header[1:]), zlib.compress(unpacked), *others)
    yield f"{name} of no height", png((header[0], 0, *header[2:]), zlib.compress(unpacked), *others)
    for width in (2**14, 2**31 - 1, 2**32 - 1):
        yield f"{name} {width} wide", png((width, width, *header[2:]), zlib.compress(unpacked), *others)
    yield f"{name} interlaced", png((*header[:6], 1), zlib.compress(unpacked), *others)


if __name__ == "__main__":
    from ray_app.task.images import decode_image, decode_mask

    for damage, content in damaged_files(per_kind=8):
        for decode in (decode_image, decode_mask):
            # The file is named before it is decoded: the last line says which one ended the process.
            print(f"{damage}: {decode.__name__}: ", end="", flush=True)
            try:
                print(tuple(decode(content).shape))
            except ValueError as error:
                print(f"refused: {error}")
    print("done")
