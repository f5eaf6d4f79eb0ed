"""Seeded damage of small real files, as by disks, networks, editors and attackers."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WORDS = b"~-1~0~99999999999999999999~1e400~NaN~null~{}~[~'~\n~\0~\xff\xfe~\xf0\x9f~a,b~../x".split(b"~")


def mutate(data: bytes, seed: int, words: Sequence[bytes] = ()) -> bytes:
    """Returns the content of a file with one to three damages; some put one of the further words into it."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 3)):
        data = _damaged(data, rng, [*_WORDS, *words])
    return data


def _damaged(data: bytes, rng: random.Random, words: Sequence[bytes]) -> bytes:
    low = rng.randrange(len(data) + 1)
    high = min(len(data), low + rng.choice((1, 1, 2, 4, 8, 64)))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:low]
    if kind == 1:
        return data[:low] + data[high:]
    if kind == 2:
        return data[:low] + rng.choice(words) + data[rng.choice((low, high)) :]
    if kind == 3:
        return data[:low] + bytes(rng.choice((0, 0xFF, rng.randrange(256))) for _ in range(high - low)) + data[high:]
    if kind == 4:
        return data[:high] + data[low:]
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 1, 8)) if data else 0):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def damage(folder: Path, seed: int) -> Path:
    """Damages one file below a folder, and returns its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = files[random.Random(-1 - seed).randrange(len(files))]
    chosen.write_bytes(mutate(chosen.read_bytes(), seed))
    return chosen


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)
