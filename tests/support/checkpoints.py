"""Small checkpoints for tests, and damages to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ray_app.checkpoint.format import MODEL, TRAINING, Snapshot, pack
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


def truncate(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def flip(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


def remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def change_commit(folder: Path, **values: Any) -> None:
    commit = json.loads((folder / "COMMIT.json").read_bytes())
    (folder / "COMMIT.json").write_text(json.dumps(commit | values))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "model cut": (lambda f: truncate(f, MODEL), f"{MODEL} has "),
    "model flipped": (lambda f: flip(f, MODEL), f"{MODEL} differs from its commit (SHA-256)"),
    "model missing": (lambda f: remove(f, MODEL), f"{MODEL} is missing"),
    "training cut": (lambda f: truncate(f, TRAINING), f"{TRAINING} has "),
    "training flipped": (lambda f: flip(f, TRAINING), f"{TRAINING} differs"),
    "training missing": (lambda f: remove(f, TRAINING), f"{TRAINING} is missing"),
    "commit cut": (lambda f: truncate(f, "COMMIT.json"), "COMMIT.json is damaged"),
    "commit empty": (lambda f: (f / "COMMIT.json").write_bytes(b"") and None, "COMMIT.json is damaged"),
    "commit binary": (lambda f: (f / "COMMIT.json").write_bytes(b"\xff\xfe") and None, "COMMIT.json is damaged"),
    "commit a list": (lambda f: (f / "COMMIT.json").write_bytes(b"[1]") and None, "COMMIT.json is damaged"),
    "commit without files": (lambda f: change_commit(f, files=None), "COMMIT.json is damaged"),
    "commit without digests": (lambda f: change_commit(f, files={MODEL: {}}), "COMMIT.json is damaged"),
    "commit of another step": (lambda f: change_commit(f, step=2), "COMMIT.json is damaged"),
}
