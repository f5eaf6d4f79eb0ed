"""Objects that the configuration specifies by import path, transforms among them, and random numbers by row.

Transforms such as `torchvision.transforms.v2` draw from torch's default generator. `drawing` replaces it for a block by
a generator with the seed of a row, so that a row is transformed alike on every reader.
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
    """A context in which code that draws from torch's default generator draws from a seeded generator instead::

        with drawing(key):
            image = RandomResizedCrop(224)(image)

    Numbers are drawn on the CPU. Only this thread is affected, and torch's default generators do not change: a training
    step may draw from them at the same time.

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
        """Calls a function, with the generator of the context if it draws, see `TorchFunctionMode`."""
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
    """Returns one uniform number in [0, 1) per key, which depends only on key and salt.

    Args:
        keys: 63-bit integers, shape (rows,), on the CPU.
        salt: Distinguishes the random numbers of a row; each salt gives an independent one.

    Returns:
        float64, shape (rows,).
    """
    hashed = hash_array(key(salt), keys.numpy())
    return torch.from_numpy((hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


Spec = dict[str, Any]
"""`class_path` (a class or a function) and `init_args`, which may contain specifications themselves."""


def instantiate(spec: Any, called: str) -> Any:
    """Makes the object of a specification, and those inside it; returns any other value unchanged.

    Args:
        spec: A value of the configuration.
        called: The name of its field, for messages.

    Raises:
        ConfigError: The class or function cannot be imported or called.
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
        factory = load_class(spec["class_path"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{called}.class_path {spec['class_path']!r} cannot be imported: {error}.") from error
    if not callable(factory):
        raise ConfigError(
            f"{called}.class_path is {spec['class_path']!r}, which cannot be called. Name a class or a function by its"
            " import path, such as torchvision.models.resnet18."
        )
    arguments = {name: instantiate(value, called) for name, value in (spec.get("init_args") or {}).items()}
    try:
        return factory(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{called}.class_path {spec['class_path']} cannot be made with {sorted(arguments)}: {error}."
        ) from error


def instantiate_once(spec: Any, called: str) -> Any:
    """Makes the object of a specification once in a process, see `instantiate`: a task itself holds only settings."""
    return _instantiate_json(json.dumps(spec), called)


@lru_cache(64)
# An evaluation in inference mode may be the first caller, and training cannot use tensors that are made in it.
@torch.inference_mode(False)
def _instantiate_json(spec: str, called: str) -> Any:
    return instantiate(json.loads(spec), called)


def apply_transforms(sample: Any, transforms: Sequence[Any], key: int | None) -> Any:
    """Applies all transforms to a sample; random ones draw from its key.

    Args:
        sample: An image as a tensor (channels, height, width), or a dictionary of such images and of masks and boxes as
            `torchvision.tv_tensors`.
        transforms: The transforms in the order in which they apply.
        key: The key of the row and the epoch; None where no transform is random.
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
    """Returns a transformed image as a plain tensor, without its torchvision type."""
    from torchvision.tv_tensors import TVTensor

    return image.as_subclass(Tensor) if isinstance(image, TVTensor) else image
