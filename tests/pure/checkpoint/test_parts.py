"""Checkpoints in parts are written by several ranks, read as a whole or by rows, and committed with all parts."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_app.checkpoint.format import (
    Snapshot,
    StoredTensor,
    file_writers,
    make_rows,
    map_tensors,
    open_tensors,
    params_digest,
    unpack,
)
from ray_app.checkpoint.store import PARTS_VERSION, CheckpointStore, Commit, Fallback
from ray_app.config.sections import CheckpointSection
from ray_app.errors import CheckpointError
from ray_app.reduction.sharded import shard_rows
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.testing import digest_tensors
from ray_app.train.checkpointing.persistence import CheckpointWriter
from tests.support.checkpoints import commit_of


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def whole_snapshot(step: int = 5) -> Snapshot:
    """Returns a snapshot with tensors that no number of parts divides evenly, and with some that are not divided."""
    weight = torch.arange(42, dtype=torch.float32).reshape(7, 6) + step
    model = {"weight": weight, "one": torch.ones(1, dtype=torch.bfloat16), "count": torch.tensor(step)}
    state = {0: {"mean": weight / 2, "step": torch.tensor(1.0)}, 3: {"mean": torch.zeros(1)}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 3]}]}
    return Snapshot(step, model, optimizer, {"last_epoch": step}, {"parameters": {"weight": weight + 1}})


def part_of(whole: Snapshot, index: int, count: int) -> Snapshot:
    def divide(path: str, value: Tensor) -> Any:
        if not value.ndim:
            return value
        rows = shard_rows(value.shape[0], index, count)
        return make_rows(value[rows.start : rows.stop], rows.start, value.shape)

    return replace(Snapshot(**map_tensors(vars(whole), divide)), part=(index, count))


def part_commit(step: int, attempt: str = "g1.1-") -> Commit:
    return replace(commit_of(step), prefix=attempt, schema_version=PARTS_VERSION)


def write_parts(store: CheckpointStore, whole: Snapshot, count: int, attempt: str = "g1.1-") -> Commit:
    commit = part_commit(whole.step, attempt)
    for index in reversed(range(count)):
        assert not store.commit_parts(commit, count, lambda commit: None), "committed before all parts were written"
        store.write_part(file_writers(part_of(whole, index, count)), commit, index, count)
    assert store.commit_parts(commit, count, lambda commit: None)
    return store.commits()[-1]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_parts_hold_the_whole_state_and_its_digest(paths: RunPaths, count: int) -> None:
    store, whole = CheckpointStore(paths), whole_snapshot()
    commit = write_parts(store, whole, count)
    assert commit.params_digest == params_digest(whole.model)
    assert len(commit.files) == 2 * count + 1
    assert digest_tensors(unpack(store.load(commit))) == digest_tensors(whole)
    assert digest_tensors(store.load_model(commit)) == digest_tensors(whole.model)
    names = {path.name.removeprefix(commit.prefix) for path in paths.checkpoint(5, 1).iterdir()}
    assert names == {*commit.files, "COMMIT.json"}, "files of the attempt are left"


def test_any_rows_of_a_checkpoint_are_read(paths: RunPaths) -> None:
    store, whole = CheckpointStore(paths), whole_snapshot()
    snapshot = store.open_verified(write_parts(store, whole, 3))
    for low in range(8):
        for high in range(low, 8):
            stored: Any = snapshot.model["weight"]
            assert torch.equal(stored.read(low, high), whole.model["weight"][low:high])
    assert isinstance(snapshot.optimizer["state"][0]["mean"], StoredTensor)
    assert torch.equal(snapshot.optimizer["state"][0]["mean"].read(2, 6), whole.optimizer["state"][0]["mean"][2:6])


def test_rows_of_a_missing_part_are_not_read(paths: RunPaths) -> None:
    store = CheckpointStore(paths)
    files = store.load(write_parts(store, whole_snapshot(), 3), lambda name: name.startswith("model-0000"))
    del files["model-00002-of-00003.safetensors"]
    stored = open_tensors(map(io.BytesIO, files.values()))["weight"]
    assert torch.equal(stored.read(0, 3), whole_snapshot().model["weight"][:3])
    with pytest.raises(CheckpointError, match="row 3 of a tensor"):
        stored.read()


def test_a_whole_checkpoint_is_read_by_rows(paths: RunPaths) -> None:
    store, whole = CheckpointStore(paths), whole_snapshot()
    store.write(file_writers(whole), commit_of(5))
    snapshot: Any = store.open_verified(store.commits()[-1])
    assert torch.equal(snapshot.model["weight"].read(2, 5), whole.model["weight"][2:5])
    assert torch.equal(snapshot.optimizer["state"][0]["mean"], whole.optimizer["state"][0]["mean"])


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "training-00003-of-00003.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damage_in_one_part_leads_back_to_an_older_checkpoint(paths: RunPaths, name: str, damage: str) -> None:
    store, fallbacks = CheckpointStore(paths), list[Fallback]()
    write_parts(store, whole_snapshot(4), 2)
    commit = write_parts(store, whole_snapshot(5), 3)
    file = paths.checkpoint(5, 1) / f"{commit.prefix}{name}"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink() if damage == "missing" else file.write_bytes(data)
    loaded = store.load_newest(fallbacks.append, read=store.open_verified)
    assert loaded is not None
    assert loaded[0].step == 4
    assert [name in fallback.reason for fallback in fallbacks] == [True]


def test_attempts_do_not_mix_and_a_bad_checkpoint_is_replaced(paths: RunPaths) -> None:
    store, whole = CheckpointStore(paths), whole_snapshot()
    store.write_part(file_writers(part_of(whole_snapshot(5), 0, 2)), part_commit(5), 0, 2)
    store.discard(part_commit(5, "g1.0-"))
    assert len(list(paths.checkpoint(5, 1).iterdir())) == 4, "files of another attempt are removed"
    other = replace(whole, model={**whole.model, "weight": whole.model["weight"] + 1})
    commit = write_parts(store, other, 2, "g1.2-")
    store.write_part(file_writers(part_of(whole, 1, 2)), part_commit(5), 1, 2)
    assert digest_tensors(unpack(store.load(commit))) == digest_tensors(other)
    store.mark_bad(commit, "damaged")
    assert store.commits() == []
    commit = write_parts(store, whole, 2, "g1.3-")
    assert digest_tensors(unpack(store.load(commit))) == digest_tensors(whole)


@pytest.mark.parametrize("reason", ["a new generation", "an error"])
def test_a_checkpoint_without_all_parts_is_not_committed(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """It is made again by another attempt, and nothing of the first is left."""
    store, whole = CheckpointStore(paths), whole_snapshot()
    writers = [CheckpointWriter(paths, CheckpointSection(), list) for _ in range(2)]

    def save(index: int, attempt: str) -> None:
        writers[index].save(lambda: part_of(whole, index, 2), part_commit(5, attempt))

    save(0, "g1.1-")
    writers[0].wait_for_part()
    assert store.commits() == []
    if reason == "an error":
        store.fail_part(part_commit(5), 1, 2, "no space")
        writers[0].wait()
    writers[0].end_wait()
    assert store.commits() == []
    [event] = read_events(paths, "write_failed")
    assert ("no space" if reason == "an error" else "have not written") in event.details["reason"]
    for index in (1, 0):
        save(index, "g1.2-")
    writers[0].wait_for_commit()
    [commit] = store.commits()
    assert commit.prefix == "g1.2-"
    assert digest_tensors(unpack(store.load(commit))) == digest_tensors(whole)
    assert {path.name for path in paths.checkpoint(5, 1).iterdir()} == {
        "COMMIT.json",
        *(f"g1.2-{name}" for name in commit.files),
    }


def test_another_rank_commits_in_place_of_a_lost_one(paths: RunPaths) -> None:
    store, whole = CheckpointStore(paths), whole_snapshot()
    for index in range(2):
        store.write_part(file_writers(part_of(whole, index, 2)), part_commit(5), index, 2)
    CheckpointWriter(paths, CheckpointSection(), list).commit_written(part_commit(5), 2)
    assert [commit.step for commit in store.commits()] == [5]
