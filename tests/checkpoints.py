"""Small checkpoints for tests, and waiting for what happens in other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ray_app.checkpoint.commit import Commit
from ray_app.checkpoint.format import Snapshot


def commit_of(step: int, fence: int = 1) -> Commit:
    return Commit(step, fence, 0, step, "cadence", "config", "manifest", 4, "params", {"torch": "x"}, 0.0)


def snapshot_of(step: int, values: int = 3) -> Snapshot:
    """A snapshot with so many numbers in the model, and as many in the optimizer."""
    numbers = torch.full((values,), float(step))
    return Snapshot(step, {"weight": numbers}, {"state": {0: {"m": numbers.clone()}}, "param_groups": []}, None)


def until(true: Callable[[], Any], what: str) -> None:
    """Waits until something is true; `what` is said if it is not within three minutes."""
    deadline_s = time.monotonic() + 180
    while not true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)
