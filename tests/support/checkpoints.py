"""Small checkpoints for tests."""

import torch

from ray_app.checkpoint.format import Snapshot, pack
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.runlog.paths import RunPaths


def commit_of(step: int, fence: int = 1) -> Commit:
    return Commit(step, fence, 0, step, "cadence", "config", "manifest", 4, "params", {"torch": "x"}, 0.0)


def snapshot_of(step: int, values: int = 3) -> Snapshot:
    """Returns a snapshot with `values` numbers in the model, and as many in the optimizer."""
    numbers = torch.full((values,), float(step))
    model = {"weight": numbers, "steps": torch.tensor(step)}
    optimizer = {"state": {0: {"m": numbers.clone(), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
    return Snapshot(step, model, optimizer, {"last_epoch": step})


def make_store_of_three(paths: RunPaths) -> CheckpointStore:
    """Returns a store with checkpoints of the steps 1, 2 and 3."""
    store = CheckpointStore(paths)
    for step in (1, 2, 3):
        store.write(pack(snapshot_of(step)), commit_of(step))
    return store
