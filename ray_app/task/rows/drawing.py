"""Random numbers of a row's own, for code that draws from torch without asking where from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ray_app.plan.keyed import hash_array, key

_DRAWING = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.normal,
    torch.bernoulli,
    torch.multinomial,
    torch.poisson,
    Tensor.uniform_,
    Tensor.normal_,
    Tensor.random_,
    Tensor.bernoulli_,
    Tensor.bernoulli,
    Tensor.exponential_,
    Tensor.geometric_,
    Tensor.log_normal_,
    Tensor.cauchy_,
    Tensor.multinomial,
}
_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


class drawing(TorchFunctionMode):
    """Lets what draws from torch's default generator in this thread draw from a generator of its own::

        with drawing(key):
            image = RandomResizedCrop(224)(image)

    Numbers are drawn on the CPU. Other threads, and torch's generators, are not touched: a step may be drawing at the same time.

    Args:
        key: Seed, such as the key of a row.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(int(key))

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func not in _DRAWING and func not in _LIKE:
            return func(*args, **kwargs) if kwargs else func(*args)
        named = dict(kwargs or {})
        if func in _LIKE:
            like = args[0]
            return _LIKE[func](like.shape, generator=self._generator, **{"dtype": like.dtype, "device": like.device} | named)
        if named.get("generator") is None:
            named["generator"] = self._generator
        return func(*args, **named)


def uniform(keys: Tensor, salt: int) -> Tensor:
    """One uniform number in [0, 1) per key, the same everywhere for the same (key, salt).

    Args:
        keys: 63-bit integers, shape (rows,), on the CPU.
        salt: Which of a row's random numbers; another salt gives an independent one.

    Returns:
        float64, shape (rows,).
    """
    hashed = hash_array(key(salt), keys.numpy())
    return torch.from_numpy((hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53)
