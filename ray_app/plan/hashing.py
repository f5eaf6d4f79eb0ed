"""Keyed hashing of integers, the only source of randomness in the plan. It never changes, and no library decides it.

The mixer is SplitMix64's finalizer (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Returns SplitMix64's finalizer of one 64-bit integer."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(*parts: int, after: int = 0) -> int:
    """Returns a 64-bit key of integers in their order; `key(a, b)` is `key(b, after=key(a))`."""
    state = after
    for part in parts:
        state = mix(state ^ (part & _MASK))
    return state


def mix_array(values: UInt64) -> UInt64:
    """Returns `mix` of every element, shape unchanged."""
    values = values + np.uint64(_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_array(base: int, values: npt.NDArray[np.integer]) -> UInt64:
    """Returns 64-bit hashes of `values` under the key `base`, shape unchanged."""
    return mix_array(mix_array(values.astype(np.uint64)) ^ np.uint64(base))


def permutation(base: int, length: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of range(length) that depends on `base` and `length` only."""
    return np.argsort(hash_array(base, np.arange(length)), kind="stable")
