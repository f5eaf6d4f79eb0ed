"""Truths that are no longer one class: label smoothing, mixup and cutmix, with random numbers keyed by the row.

A row is mixed with the row before it in its micro-batch, which the plan has shuffled. So the result depends on the micro-batch, which is
that of a logical worker, and not on the number of workers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ray_app.task.base import uniform

_SHARE, _KIND, _ROW, _COLUMN = 21, 22, 23, 24  # salts: what a row's random number is for


def smooth_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One-hot truths with a share spread over all classes, see Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016.

    Args:
        labels: Shape (rows,).
        classes: How many there are.
        smoothing: The share, 0 to 1.

    Returns:
        float32, shape (rows, classes), each row adding up to 1.
    """
    one_hot = functional.one_hot(labels, classes).to(torch.float32)
    return one_hot * (1 - smoothing) + smoothing / classes


def mix(images: Tensor, target: Tensor, keys: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Mixes every image with the one before it, and their truths in the same proportion.

    Mixup: Zhang et al., ICLR 2018. Cutmix: Yun et al., ICCV 2019.

    Args:
        images: Shape (rows, channels, height, width).
        target: Shape (rows, classes).
        keys: See `Task.augment`.
        mixup: Parameter of mixup's Beta distribution; 0: none.
        cutmix: Parameter of cutmix's; 0: none. With both, each row gets either with the same chance.

    Returns:
        The images, float32 with `mixup`, and the truths.
    """
    pastes = uniform(keys, _KIND) < (0.5 if mixup and cutmix else 1.0 if cutmix else 0.0)
    share = torch.where(pastes, _beta(keys, cutmix), _beta(keys, mixup))
    rectangle, pasted = _rectangles(keys, share, images.shape[-2], images.shape[-1])
    kept = torch.where(pastes, 1 - pasted, share).to(images.device, torch.float32)
    other, pastes, rectangle = images.roll(1, 0), pastes.to(images.device), rectangle.to(images.device)
    mixed = torch.where(rectangle[:, None], other, images)
    if mixup:
        own = kept[:, None, None, None]
        mixed = torch.where(pastes[:, None, None, None], mixed, images * own + other * (1 - own))
    return mixed, target * kept[:, None] + target.roll(1, 0) * (1 - kept[:, None])


def _beta(keys: Tensor, alpha: float) -> Tensor:
    """One number of Beta(alpha, alpha) per key, float64, shape (rows,); ones with `alpha` 0."""
    if not alpha:
        return torch.ones(len(keys), dtype=torch.float64)
    from scipy.special import betaincinv

    return torch.from_numpy(np.asarray(betaincinv(alpha, alpha, uniform(keys, _SHARE).numpy())))


def _rectangles(keys: Tensor, share: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """A rectangle per row that covers about 1 - share of an image, as far as it lies inside.

    Returns:
        Where it is, bool of shape (rows, height, width), and the share of the image that it covers, shape (rows,).
    """
    inside = torch.ones(len(keys), height, width, dtype=torch.bool)
    for salt, size, axis in ((_ROW, height, 1), (_COLUMN, width, 2)):
        centre, half = (uniform(keys, salt) * size).floor()[:, None], ((1 - share).sqrt() * size / 2).floor()[:, None]
        place = torch.arange(size)[None]
        line = (place >= centre - half) & (place < centre + half)
        inside &= line.unsqueeze(3 - axis)
    return inside, inside.to(torch.float64).mean((1, 2))
