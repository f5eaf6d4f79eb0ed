"""Transforms from the configuration, such as `torchvision.transforms.v2`, for images and what belongs to them.

Random numbers of a row's own, for code that draws from torch without asking where from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ray_app.config.import_paths import load_class
from ray_app.errors import ConfigError
from ray_app.plan.hashing import hash_array, key

_DRAWING_FUNCTIONS = {
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
_LIKE_FUNCTIONS = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


class drawing(TorchFunctionMode):
    """Lets what draws from torch's default generator in this thread draw from a generator of its own::

        with drawing(key):
            image = RandomResizedCrop(224)(image)

    Numbers are drawn on the CPU. Other threads, and torch's generators, are not touched: a step may be drawing at the
    same time.

    Args:
        key: Seed, such as the key of a row.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(int(key))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func not in _DRAWING_FUNCTIONS and func not in _LIKE_FUNCTIONS:
            return func(*args, **kwargs) if kwargs else func(*args)
        named = dict(kwargs or {})
        if func in _LIKE_FUNCTIONS:
            like = args[0]
            return _LIKE_FUNCTIONS[func](
                like.shape, generator=self._generator, **{"dtype": like.dtype, "device": like.device} | named
            )
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


Spec = dict[str, Any]
"""`class_path` (a class or a function) and `init_args`, whose values may be such specifications themselves."""


def instantiate(spec: Any, called: str) -> Any:
    """What a specification stands for; whatever is none stands for itself.

    Args:
        spec: From the configuration.
        called: The field, for messages.

    Raises:
        ConfigError: It cannot be imported or made.
    """
    if isinstance(spec, list):
        return [instantiate(one, called) for one in spec]
    if not isinstance(spec, dict):
        return spec
    if "class_path" not in spec:
        return {name: instantiate(value, called) for name, value in spec.items()}
    if unknown := sorted(spec.keys() - {"class_path", "init_args"}):
        raise ConfigError(f"{called} has {', '.join(unknown)} beside class_path; its arguments belong below init_args.")
    try:
        found = load_class(spec["class_path"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{called}.class_path {spec['class_path']!r} cannot be imported: {error}.") from error
    if not callable(found):
        raise ConfigError(
            f"{called}.class_path is {spec['class_path']!r}, which is nothing that can be made. Name a class or a"
            " function by its import path, such as torchvision.models.resnet18."
        )
    arguments = {name: instantiate(value, called) for name, value in (spec.get("init_args") or {}).items()}
    try:
        return found(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{called}.class_path {spec['class_path']} cannot be made with {sorted(arguments)}: {error}."
        ) from error


def instantiate_once(spec: Any, called: str) -> Any:
    """What a specification stands for, see `instantiate`, made once in a process: a task holds settings only."""
    return _instantiate_json(json.dumps(spec), called)


@lru_cache(64)
@torch.inference_mode(False)  # an evaluation may be the first to ask
def _instantiate_json(spec: str, called: str) -> Any:
    return instantiate(json.loads(spec), called)


def apply_transforms(sample: Any, transforms: Sequence[Any], key: int | None) -> Any:
    """A sample after all transforms, which draw from its key.

    Args:
        sample: An image as a tensor (channels, height, width), or a dictionary of such with `torchvision.tv_tensors`
            for masks and boxes.
        transforms: What to apply, in this order.
        key: Of the row and the epoch; None: nothing is drawn.
    """
    if key is None:
        for transform in transforms:
            sample = transform(sample)
        return sample
    with drawing(key):
        for transform in transforms:
            sample = transform(sample)
    return sample


def as_plain_tensor(image: Any) -> Tensor:
    """A transformed image as a tensor like any other."""
    from torchvision.tv_tensors import TVTensor

    return image.as_subclass(Tensor) if isinstance(image, TVTensor) else image
