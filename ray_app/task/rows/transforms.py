"""Transforms from the configuration, such as `torchvision.transforms.v2`, for images and what belongs to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ray_app.config.class_path import load_class
from ray_app.errors import ConfigError
from ray_app.task.rows.drawing import drawing

Spec = dict[str, Any]
"""`class_path` (a class or a function) and `init_args`, whose values may be such specifications themselves."""


def made(spec: Any, called: str) -> Any:
    """What a specification stands for; whatever is none stands for itself.

    Args:
        spec: From the configuration.
        called: The field, for messages.

    Raises:
        ConfigError: It cannot be imported or made.
    """
    if isinstance(spec, list):
        return [made(one, called) for one in spec]
    if not isinstance(spec, dict):
        return spec
    if "class_path" not in spec:
        return {name: made(value, called) for name, value in spec.items()}
    if unknown := sorted(spec.keys() - {"class_path", "init_args"}):
        raise ConfigError(f"{called} has {', '.join(unknown)} beside class_path; its arguments belong below init_args.")
    try:
        found = load_class(spec["class_path"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{called}.class_path {spec['class_path']!r} cannot be imported: {error}.") from error
    if not callable(found):
        raise ConfigError(
            f"{called}.class_path is {spec['class_path']!r}, which is nothing that can be made. Name a class or a function by its import"
            " path, such as torchvision.models.resnet18."
        )
    arguments = {name: made(value, called) for name, value in (spec.get("init_args") or {}).items()}
    try:
        return found(**arguments)
    except TypeError as error:
        raise ConfigError(f"{called}.class_path {spec['class_path']} cannot be made with {sorted(arguments)}: {error}.") from error


def made_once(spec: Any, called: str) -> Any:
    """What a specification stands for, see `made`, made once in a process: a task holds settings only."""
    return _made_once(json.dumps(spec), called)


@lru_cache(64)
@torch.inference_mode(False)  # an evaluation may be the first to ask
def _made_once(spec: str, called: str) -> Any:
    return made(json.loads(spec), called)


def transformed(sample: Any, transforms: Sequence[Any], key: int | None) -> Any:
    """A sample after all transforms, which draw from its key.

    Args:
        sample: An image as a tensor (channels, height, width), or a dictionary of such with `torchvision.tv_tensors` for masks and boxes.
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


def plain(image: Any) -> Tensor:
    """A transformed image as a tensor like any other."""
    from torchvision.tv_tensors import TVTensor

    return image.as_subclass(Tensor) if isinstance(image, TVTensor) else image
