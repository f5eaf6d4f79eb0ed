"""Snapshot actors keep the newest snapshot outside of the workers, and a damaged one is not restored."""

import dataclasses
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_app.checkpoint.format import MODEL, pack
from ray_app.train.checkpointing.persistence import PackedSnapshot, SnapshotActor, SnapshotSender
from tests.support.checkpoints import snapshot_of


def packed_snapshot(step: int) -> PackedSnapshot:
    files = pack(snapshot_of(step))
    return PackedSnapshot(step, files, {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}, [])


def flip_bit(snapshot: PackedSnapshot) -> PackedSnapshot:
    """Returns the snapshot with a flipped bit in the parameters."""
    data = bytearray(snapshot.files[MODEL])
    data[-1] ^= 1
    return dataclasses.replace(snapshot, files={**snapshot.files, MODEL: bytes(data)})


def make_sender(monkeypatch: pytest.MonkeyPatch, *stored: PackedSnapshot) -> SnapshotSender:
    """Returns a sender with a snapshot actor for each stored snapshot, all in this process."""
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    handles: list[Any] = []
    for snapshot in stored:
        actor = SnapshotActor()
        actor.store_snapshot(snapshot)
        handles.append(SimpleNamespace(newest=SimpleNamespace(remote=actor.newest)))
    return SnapshotSender(handles)


def test_a_snapshot_with_a_wrong_digest_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = make_sender(monkeypatch, flip_bit(packed_snapshot(7)), packed_snapshot(5)).newest()
    assert restored is not None
    assert restored[0].step == 5
    assert make_sender(monkeypatch, flip_bit(packed_snapshot(7))).newest() is None
    newest = make_sender(monkeypatch, packed_snapshot(7), packed_snapshot(5)).newest()
    assert newest is not None
    assert newest[0].step == 7


def test_a_snapshot_actor_does_not_store_an_older_snapshot() -> None:
    actor = SnapshotActor()
    for step in (5, 7, 6):
        actor.store_snapshot(packed_snapshot(step))
    newest = actor.newest()
    assert newest is not None
    assert newest.step == 7
