"""Small checkpoints for tests."""

from __future__ import annotations

import torch

from ray_app.checkpoint.commit import Commit
from ray_app.checkpoint.format import Snapshot


def commit_of(step: int, fence: int = 1) -> Commit:
    return Commit(step, fence, 0, step, "cadence", "config", "manifest", 4, "params", {"torch": "x"}, 0.0)


def snapshot_of(step: int, values: int = 3) -> Snapshot:
    """A snapshot with so many numbers in the model, and as many in the optimizer."""
    numbers = torch.full((values,), float(step))
    return Snapshot(step, {"weight": numbers}, {"state": {0: {"m": numbers.clone()}}, "param_groups": []}, None)
