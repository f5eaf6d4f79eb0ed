"""Decoding of images: images per CPU second of the decoders of this application, torchvision and Pillow, in one thread.

Two tables, of JPEG files and of PNG files of 500 x 375 pixels. A step is an image, so images per CPU second are 1000 /
CPU ms. The decoder of this application also reads the header with a bound on pixels and the EXIF orientation, and
refuses damage that the others ignore.

python benchmarks/images.py                # needs a quiet machine; about 2 minutes
python benchmarks/images.py --tiny         # that it runs
"""

from __future__ import annotations

import argparse
import io
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import Sample, alternate, report
from ray_app.task.images import decode_image

HEIGHT, WIDTH = 375, 500
Decode = Callable[[bytes], object]


def encode_photos(kind: str, count: int) -> list[bytes]:
    """Makes smooth pictures with some noise; as JPEG, they are about as big as photographs of this size."""
    generator = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((WIDTH, HEIGHT))
        noisy = np.asarray(coarse, np.int16) + generator.integers(-12, 13, (HEIGHT, WIDTH, 3))
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, kind, quality=90)
        files.append(file.getvalue())
    return files


def by_torchvision(encoded: bytes) -> object:
    """Decodes by torchvision."""
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode=ImageReadMode.RGB)


def by_pillow(encoded: bytes) -> object:
    """Decodes by Pillow."""
    with Image.open(io.BytesIO(encoded)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def measure(decode: Decode, files: list[bytes]) -> Sample:
    """Returns the milliseconds per image."""
    wall, cpu = time.perf_counter(), time.process_time()
    for encoded in files:
        decode(encoded)
    return Sample((time.perf_counter() - wall) / len(files) * 1e3, (time.process_time() - cpu) / len(files) * 1e3)


def main() -> None:
    """Measures both formats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only that it runs; the figures say nothing")
    tiny = parser.parse_args().tiny
    count, rounds = (8, 1) if tiny else (400, 7)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*TorchVision are deprecated.*")
    decoders: dict[str, Decode] = {"torchvision": by_torchvision, "ray_app": decode_image, "Pillow": by_pillow}
    for kind in ("jpeg", "png"):
        files = encode_photos(kind, count)
        for name, decode in decoders.items():
            if not np.array_equal(np.asarray(decode(files[0])), decode_image(files[0])):
                sys.exit(f"{name} decodes other pixels of a {kind} file than ray_app")
        sides: dict[str, Callable[[], Sample]] = {
            name: partial(measure, decode, files) for name, decode in decoders.items()
        }
        samples = alternate(sides, rounds)
        report(f"{kind.upper()} files of {WIDTH} x {HEIGHT}, milliseconds per image", samples, {})
        for name in samples:
            cpu_ms = sorted(sample.cpu_ms for sample in samples[name])
            print(f"{name:<26}{1e3 / cpu_ms[len(cpu_ms) // 2]:>10.0f} images per CPU second")


if __name__ == "__main__":
    main()
