"""Images of rows and the masks that belong to them, through the same transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_app.plan.facts import ColumnFacts
from ray_app.task.rows.images import mask_of, pixels_of
from ray_app.task.rows.transforms import plain, transformed

IMAGE, MASK = "image", "mask"
_MAX_NAMED = 8
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
"""What PyTorch can compute with, of the types that it can only hold."""


def is_image_column(facts: ColumnFacts) -> bool:
    """Whether a column holds images: encoded, or as uint8 of shape (height, width) or (height, width, channels)."""
    return facts.kind == "bytes" or (facts.kind == "array" and len(facts.shape) in (2, 3) and facts.dtype == "|u1")


def is_mask(facts: ColumnFacts) -> bool:
    """Whether a column beside images can hold their masks: encoded, or integers of shape (height, width)."""
    return facts.kind == "bytes" or (facts.kind == "array" and len(facts.shape) == 2 and np.dtype(facts.dtype).kind in "uib")


def decoded(
    rows: Mapping[str, Any],
    kinds: Mapping[str, str],
    transforms: Sequence[Any],
    keys: npt.NDArray[np.int64] | None,
    exif_orientation: bool = True,
    mask_classes: Sequence[Sequence[int]] = (),
) -> dict[str, npt.NDArray]:
    """The images and masks of some rows.

    Args:
        rows: Their columns as read, encoded files as a list; zeros of shape (rows,) stand in for a target that was not read.
        kinds: `image` or `mask` by column.
        transforms: What is done to the images of a row and to its masks alike.
        keys: Of the rows, see `transformed`.
        exif_orientation: See `pixels_of`.
        mask_classes: Value and class of masks, in the order of the values; empty, if the values are the classes.

    Returns:
        By column: images of shape (rows, channels, height, width), masks of shape (rows, height, width).

    Raises:
        ValueError: One cannot be decoded, or the rows have several shapes.
    """
    stored = {name for name in kinds if isinstance(rows[name], np.ndarray)}
    lacking = [name for name in stored if rows[name].ndim == 1]
    there = {name: kind for name, kind in kinds.items() if name not in lacking}
    if not transforms and stored >= there.keys():
        found = {name: _stored(rows[name], kind) for name, kind in there.items()}
        found = {name: classes_of(values, mask_classes) if there[name] == MASK else values for name, values in found.items()}
    else:
        found = _one_by_one(rows, there, transforms, keys, exif_orientation, mask_classes)
    size = next(iter(found.values())).shape[-2:] if found else (1, 1)
    return found | {name: np.zeros((len(rows[name]), *size), np.uint8) for name in lacking}


def _stored(values: npt.NDArray, kind: str) -> npt.NDArray:
    """Arrays as read: (rows, height, width) with channels or without, which come first afterwards."""
    if kind == MASK:
        return values.astype(_SIGNED.get(values.dtype.name, values.dtype), copy=False)
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if values.ndim == 4 else values[:, None]


def _one_by_one(
    rows: Mapping[str, Any],
    kinds: Mapping[str, str],
    transforms: Sequence[Any],
    keys: npt.NDArray[np.int64] | None,
    exif_orientation: bool,
    mask_classes: Sequence[Sequence[int]],
) -> dict[str, npt.NDArray]:
    found: dict[str, list[npt.NDArray]] = {name: [] for name in kinds}
    for row in range(len(next(iter(rows.values())))):
        stored = {name: rows[name][row] for name in kinds}
        masks = {name: _mask(stored[name], exif_orientation, mask_classes) for name, kind in kinds.items() if kind == MASK}
        sample = {name: masks[name] if name in masks else image_of(stored[name], exif_orientation) for name in kinds}
        sample = transformed(sample, transforms, None if keys is None else int(keys[row]))
        for name, kind in kinds.items():
            if kind == IMAGE and sample[name].dtype != torch.uint8:
                raise ValueError(
                    f"task.init_args.transforms or evaluate_transforms make {str(sample[name].dtype).removeprefix('torch.')} of the image"
                    f" {name!r}; leave that out (ToDtype), the model gets images from 0 to 1 anyway, less mean, divided by std"
                )
            found[name].append(plain(sample[name]).numpy())
    for name, values in found.items():
        shapes = sorted({one.shape for one in values})
        if len(shapes) > 1:
            raise ValueError(
                f"images of {name!r} have the shapes {shapes[:3]}; let task.init_args.transforms and evaluate_transforms give them one size"
                " (Resize, CenterCrop, RandomResizedCrop)"
            )
    return {name: np.stack(values) for name, values in found.items()}


def classes_of(mask: npt.NDArray, pairs: Sequence[Sequence[int]]) -> npt.NDArray:
    """A mask with classes in place of its values, as bytes if they fit, in its shape; as it is, if there are no pairs.

    Args:
        mask: Integers.
        pairs: Value and class, in the order of the values.

    Raises:
        ValueError: It has values without a class.
    """
    if not pairs:
        return mask
    known, classes = np.array(pairs, np.int64).T
    if classes.min() >= 0 and classes.max() <= np.iinfo(np.uint8).max:
        classes = classes.astype(np.uint8)
    index = np.minimum(np.searchsorted(known, mask), len(known) - 1)
    if not (is_known := known[index] == mask).all():
        raise ValueError(
            f"the mask has the values {', '.join(map(str, np.unique(mask[~is_known]).tolist()[:_MAX_NAMED]))}, which"
            f" task.init_args.mask_values gives no class; it names {', '.join(map(str, known.tolist()))}"
        )
    return classes[index]


def image_of(stored: Any, exif_orientation: bool = True) -> Tensor:
    """A row's image, encoded (see `pixels_of`) or an array, channels first, as transforms know it."""
    from torchvision import tv_tensors

    if isinstance(stored, bytes):
        return tv_tensors.Image(pixels_of(stored, exif_orientation))
    return tv_tensors.Image(torch.from_numpy(_stored(stored[None], IMAGE)[0]))


def _mask(stored: Any, exif_orientation: bool, pairs: Sequence[Sequence[int]]) -> Tensor:
    """A row's mask, encoded (see `mask_of`) or an array, (height, width), with its classes."""
    from torchvision import tv_tensors

    mask = mask_of(stored, exif_orientation).numpy() if isinstance(stored, bytes) else _stored(stored, MASK)
    return tv_tensors.Mask(torch.from_numpy(classes_of(mask, pairs)))
