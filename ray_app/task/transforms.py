"""Objects that the configuration specifies by import path, such as transforms, and random numbers that belong to a row.

Transforms such as those of `torchvision.transforms.v2` draw from torch's default generator. Within a `drawing` block
they draw from a generator that is seeded with the key of a row instead, so that a row is transformed alike by every
process that reads it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ray_app import torch_private
from ray_app.config.import_paths import explain_constructor, load_class
from ray_app.errors import ConfigError
from ray_app.plan import hashing

_DRAWING_FUNCTIONS = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.normal,
    torch.bernoulli,
    torch.multinomial,
    torch.poisson,
    *torch_private.DRAWING_FUNCTIONS,
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
"""Functions that draw from torch's default generator unless they are called with a `generator`."""
_LIKE_FUNCTIONS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}
"""Functions that draw and have no argument `generator`, and those that take their place."""


class drawing(TorchFunctionMode):
    """A context in which code that draws from torch's default generator draws from a seeded generator instead::

        with drawing(key):
            image = RandomResizedCrop(224)(image)

    It covers the functions that transforms draw with, such as `torch.rand` and `Tensor.uniform_`, and the distributions
    of `torch.distributions`. Dropout still draws from the default generator.

    Numbers are drawn on the CPU. Only the calling thread is affected. The states of torch's default generators do not
    change, so a training step may draw from them in another thread.

    Args:
        key: The seed, such as the key of a row.
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
        """Calls a function of torch, as for each one, with the generator of the context if it draws."""
        if func not in _DRAWING_FUNCTIONS and func not in _LIKE_FUNCTIONS:
            return func(*args, **kwargs) if kwargs else func(*args)
        options = dict(kwargs or {})
        if func in _LIKE_FUNCTIONS:
            like, *bounds = args
            # The other functions do not have this argument, and it does not change the values.
            options.pop("memory_format", None)
            options = {"dtype": like.dtype, "device": like.device} | options
            if func is torch.randint_like:
                bounds = [options.pop(name) for name in ("low", "high") if name in options] or bounds
            return _LIKE_FUNCTIONS[func](*bounds, like.shape, generator=self._generator, **options)
        if options.get("generator") is None:
            options["generator"] = self._generator
        return func(*args, **options)


def uniform(keys: Tensor, salt: int) -> Tensor:
    """Returns one uniform number in [0, 1) per key, float64 of shape (rows,), which depends only on key and salt.

    Args:
        keys: The keys of the rows, 63-bit integers, shape (rows,), on the CPU.
        salt: The number of the random number of a row: different salts give independent ones.
    """
    # A float64 has 53 bits, so the lower 11 bits of the hash are dropped.
    hashes = hashing.hash_array(hashing.key(salt), keys.numpy())
    return torch.from_numpy((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53)


Spec = dict[str, Any]
"""The specification of an object, with the entries `class_path` and optionally `init_args`.

`class_path` is the import path of a class or a function; `init_args` has its keyword arguments, which may contain
specifications.
"""


def instantiate(spec: Any, field: str) -> Any:
    """Makes the object of a specification, or the objects of all specifications inside a list or a dictionary.

    Args:
        spec: A value of the configuration; one without specifications is returned unchanged.

    Raises:
        ConfigError: The class or function cannot be imported or called.
    """
    if isinstance(spec, list):
        return [instantiate(item, field) for item in spec]
    if not isinstance(spec, dict):
        return spec
    if "class_path" not in spec:
        return {name: instantiate(value, field) for name, value in spec.items()}
    if unknown := sorted(spec.keys() - {"class_path", "init_args"}):
        raise ConfigError(f"{field} has {', '.join(unknown)} next to class_path; arguments belong in init_args.")
    try:
        factory = load_class(spec["class_path"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{field}.class_path {spec['class_path']!r} cannot be imported: {error}.") from error
    if not callable(factory):
        raise ConfigError(
            f"{field}.class_path is {spec['class_path']!r}, which cannot be called. Name a class or a function by its"
            " import path, such as torchvision.models.resnet18."
        )
    arguments = {name: instantiate(value, field) for name, value in (spec.get("init_args") or {}).items()}
    with explain_constructor(f"{field}.class_path", spec["class_path"], arguments):
        return factory(**arguments)


def instantiate_module(spec: Spec, field: str) -> nn.Module:
    """Makes the `nn.Module` of a specification, see `instantiate`; raises ConfigError if it makes something else."""
    model = instantiate(spec, field)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{field} {spec['class_path']} makes a {type(model).__name__}; it must make an nn.Module.")
    return model


def instantiate_once(spec: Any, field: str) -> Any:
    """Returns the object of a specification, see `instantiate`, which a process makes once for tasks."""
    return _instantiate_json(json.dumps(spec), field)


IS_SEEDED_ALIKE = ContextVar("IS_SEEDED_ALIKE", default=False)
"""Whether the code is in a block of `same_in_each_process`."""


@contextmanager
def same_in_each_process() -> Iterator[None]:
    """Makes objects of the user in the block draw the same numbers in every process, and restores the generators.

    Inference mode is off in it, since an evaluation may be the first to make an object, and backward cannot use tensors
    that are made in that mode.
    """
    python, numpy = random.getstate(), np.random.get_state()
    token = IS_SEEDED_ALIKE.set(True)
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        IS_SEEDED_ALIKE.reset(token)


@lru_cache(64)
def _instantiate_json(spec: str, field: str) -> Any:
    with same_in_each_process():
        return instantiate(json.loads(spec), field)


def apply_transforms(sample: Any, transforms: Sequence[Any], key: int | None) -> Any:
    """Applies transforms to a sample, one after the other, and returns the result.

    Args:
        sample: An image as a tensor (channels, height, width), or a dictionary of such images and of masks and boxes as
            `torchvision.tv_tensors`.
        key: The key of the row in this epoch, from which random transforms draw; None if no transform is random.
    """
    if key is not None:
        with drawing(key):
            return apply_transforms(sample, transforms, None)
    for transform in transforms:
        sample = transform(sample)
    return sample


def as_plain_tensor(image: Any) -> Tensor:
    """Returns a transformed image as a plain tensor, since torchvision's transforms may return a `TVTensor`."""
    from torchvision.tv_tensors import TVTensor

    return image.as_subclass(Tensor) if isinstance(image, TVTensor) else image
