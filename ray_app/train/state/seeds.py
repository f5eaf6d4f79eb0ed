"""What torch's generators are seeded with: one number for making the model, and one for each logical worker's share of each step."""

from __future__ import annotations

from functools import lru_cache

import torch

from ray_app.plan.keyed import key

_INIT, _STEP = 21, 22  # salts: what the generators are seeded for


def _seed(value: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(value >> 1)
    if device.type == "cuda":
        torch.cuda.manual_seed(value >> 1)


def seed_init(seed: int, device: torch.device) -> None:
    """Seeds torch's generators for making the model."""
    _seed(key(_INIT, seed), device)


def seed_step(seed: int, epoch: int, step: int, logical_worker: int, device: torch.device) -> None:
    """Seeds torch's generators for one logical worker's share of one step."""
    _seed(key(step, logical_worker, after=_of_epoch(seed, epoch)), device)


@lru_cache(1)
def _of_epoch(seed: int, epoch: int) -> int:
    return key(_STEP, seed, epoch)
