"""Snapshots in memory outside the workers: the newest one that is still what was sent."""

from __future__ import annotations

import dataclasses
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from ray_app.checkpoint.format import MODEL, pack
from ray_app.train.checkpointing import snapshots
from ray_app.train.checkpointing.snapshots import PackedSnapshot, SnapshotActor, SnapshotSender
from tests.support.checkpoints import snapshot_of


def kept_of(step: int) -> PackedSnapshot:
    files = pack(snapshot_of(step))
    return PackedSnapshot(step, files, {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}, [])


def flipped(kept: PackedSnapshot) -> PackedSnapshot:
    """With a bit of the parameters that is another."""
    data = bytearray(kept.files[MODEL])
    data[-1] ^= 1
    return dataclasses.replace(kept, files={**kept.files, MODEL: bytes(data)})


def sender_of(monkeypatch: pytest.MonkeyPatch, *held: PackedSnapshot) -> SnapshotSender:
    """One with a keeper, here in this process, for each of what is held."""
    monkeypatch.setattr(snapshots.ray, "get", lambda answer, timeout: answer)
    handles: list[Any] = []
    for kept in held:
        keeper = SnapshotActor()
        keeper.store_snapshot(kept)
        handles.append(SimpleNamespace(newest=SimpleNamespace(remote=keeper.newest)))
    return SnapshotSender(handles)


def test_a_snapshot_with_a_wrong_digest_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sender_of(monkeypatch, flipped(kept_of(7)), kept_of(5)).newest()
    assert found is not None
    assert found[0].step == 5
    assert sender_of(monkeypatch, flipped(kept_of(7))).newest() is None
    newest = sender_of(monkeypatch, kept_of(7), kept_of(5)).newest()
    assert newest is not None
    assert newest[0].step == 7


def test_a_keeper_does_not_take_an_older_one() -> None:
    keeper = SnapshotActor()
    for step in (5, 7, 6):
        keeper.store_snapshot(kept_of(step))
    newest = keeper.newest()
    assert newest is not None
    assert newest.step == 7
