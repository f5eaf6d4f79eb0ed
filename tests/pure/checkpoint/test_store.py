"""The checkpoint store returns to an intact checkpoint after any damage to its files, and the run log records it."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import threading
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_app.checkpoint import store as put_module
from ray_app.checkpoint import store as store_module
from ray_app.checkpoint.format import MODEL, TRAINING, Snapshot, pack, params_digest, unpack
from ray_app.checkpoint.retention import Pin, removable_steps, skipped_evaluations
from ray_app.checkpoint.store import CheckpointStore, Fallback
from ray_app.errors import CheckpointError
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage import files as files_module
from ray_app.storage.files import put_atomic
from ray_app.testing import KilledError
from ray_app.train.checkpointing.restore import record_fallback
from tests.support.checkpoints import (
    DAMAGES,
    change_commit,
    commit_of,
    flip,
    make_store_of_three,
    remove,
    snapshot_of,
    truncate,
)
from tests.support.local_world import make_job, write_images
from tests.support.mutations import Malicious


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture
def store(paths: RunPaths) -> CheckpointStore:
    return make_store_of_three(paths)


def load(store: CheckpointStore) -> tuple[int, list[Fallback]]:
    """Returns the loaded step and the fallbacks, and checks that the content is that of this step."""
    fallbacks: list[Fallback] = []
    loaded = store.load_newest(fallbacks.append)
    assert loaded is not None
    commit, snapshot = loaded
    assert snapshot.step == commit.step
    assert params_digest(snapshot.model) == params_digest(snapshot_of(commit.step).model)
    return commit.step, fallbacks


# --- falling back


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_marked_and_reported(
    store: CheckpointStore, paths: RunPaths, damage: str
) -> None:
    do_damage, reason = DAMAGES[damage]
    newest = paths.checkpoint(3, 1)
    do_damage(newest)
    names_before = sorted(p.name for p in newest.iterdir())
    step, [fallback] = load(store)
    assert step == 2
    assert fallback.name == newest.name
    assert reason in fallback.reason
    assert sorted(p.name for p in newest.iterdir()) == ["BAD.json", *names_before], (
        "a file of the damaged checkpoint was removed"
    )
    assert json.loads((newest / "BAD.json").read_bytes())["reason"] == fallback.reason
    assert [c.step for c in store.commits()] == [1, 2]
    assert load(store) == (2, [fallback]), "the marked checkpoint is not reported by the second load"


def test_two_starts_report_a_checkpoint_that_an_evaluator_marked_damaged_once(
    store: CheckpointStore, paths: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(paths.root, write_images(tmp_path / "data", [[20, 20]]), logical_workers=2, batch=8)
    flip(paths.checkpoint(3, 1), TRAINING)
    store.mark_bad(commit_of(3), "training.pt differs")

    # Each load is that of one start.
    for _ in range(2):
        loaded = store.load_newest(partial(record_fallback, job))
        assert loaded is not None
        assert loaded[0].step == 2
    [event] = read_events(paths, "fallback")
    assert event.details == {"checkpoint": "step-00000003-0001", "reason": "training.pt differs"}
    assert [record.getMessage() for record in caplog.records] == [
        "The checkpoint step-00000003-0001 is skipped: training.pt differs"
    ]


@pytest.mark.parametrize("fence", [1, 2])
def test_a_damaged_checkpoint_is_written_again(store: CheckpointStore, paths: RunPaths, fence: int) -> None:
    """The start that marked it damaged writes it again, too, when the repeated steps reach it."""
    flip(paths.checkpoint(3, 1), MODEL)
    assert load(store)[0] == 2
    store.write(pack(snapshot_of(3)), commit_of(3, fence))
    assert load(store) == (3, [])
    assert [(c.step, c.fence) for c in store.commits()] == [(1, 1), (2, 1), (3, fence)]


def test_a_checkpoint_of_a_later_version_is_passed_over_and_not_marked_damaged(
    store: CheckpointStore, paths: RunPaths
) -> None:
    newest = paths.checkpoint(3, 1)
    intact = (newest / "COMMIT.json").read_bytes()
    change_commit(newest, schema_version=99)
    for _ in range(2):
        step, [fallback] = load(store)
        assert step == 2
        assert "schema version 99; this version reads 4" in fallback.reason
    assert [c.step for c in store.commits()] == [1, 2]
    (newest / "COMMIT.json").write_bytes(intact)
    assert load(store) == (3, [])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
@pytest.mark.parametrize("reader", ["torch.load", "safetensors.torch.load"])
def test_a_checkpoint_that_does_not_fit_in_memory_is_not_marked_damaged(
    store: CheckpointStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, error: Exception, reader: str
) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise error

    with monkeypatch.context() as out_of_memory:
        out_of_memory.setattr(reader, fails)
        with pytest.raises(MemoryError, match="Not enough memory for"):
            load(store)
    assert not (paths.checkpoint(3, 1) / "BAD.json").exists()
    assert load(store) == (3, [])


def test_two_damaged_checkpoints_are_both_passed_over(store: CheckpointStore, paths: RunPaths) -> None:
    flip(paths.checkpoint(3, 1), MODEL)
    truncate(paths.checkpoint(2, 1), TRAINING)
    step, fallbacks = load(store)
    assert step == 1
    assert [f.name for f in fallbacks] == ["step-00000003-0001", "step-00000002-0001"]


def test_without_an_intact_checkpoint_the_error_names_each_and_nothing_is_deleted(
    store: CheckpointStore, paths: RunPaths
) -> None:
    flip(paths.checkpoint(3, 1), MODEL)
    remove(paths.checkpoint(2, 1), TRAINING)
    truncate(paths.checkpoint(1, 1), "COMMIT.json")
    before = {p for p in paths.checkpoints.rglob("*") if p.is_file()}
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            store.load_newest(lambda _: None)
        for text in (
            "step-00000003-0001",
            "SHA-256",
            "step-00000002-0001",
            "is missing",
            "step-00000001-0001",
            "COMMIT.json",
        ):
            assert text in str(caught.value)
        assert "Nothing was deleted" in str(caught.value)
    assert {p for p in paths.checkpoints.rglob("*") if p.is_file() and p.name != "BAD.json"} == before


def test_a_run_without_checkpoints_loads_none(paths: RunPaths) -> None:
    assert CheckpointStore(paths).load_newest(lambda _: None) is None
    assert CheckpointStore(paths).commits() == []
    (paths.checkpoints / "step-00000004-0001").mkdir(parents=True)
    (paths.checkpoints / "notes").mkdir()
    assert CheckpointStore(paths).load_newest(lambda _: None) is None


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_a_crash_before_the_commit_marker_leaves_the_previous_checkpoint(
    store: CheckpointStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The process dies after `written` files; after three of them it dies between the data and the commit marker."""
    done: list[Path] = []

    def dying(path: Path, data: bytes, if_absent: bool = False) -> bool:
        if len(done) == written:
            raise KilledError(path.name)
        done.append(path)
        return put_atomic(path, data, if_absent=if_absent)

    monkeypatch.setattr(put_module, "put_atomic", dying)
    monkeypatch.setattr(
        store_module, "put_json", lambda path, value, if_absent: dying(path, json.dumps(value).encode(), if_absent)
    )
    with pytest.raises(KilledError, match=["WRITER.json", MODEL, TRAINING, "COMMIT.json"][written]):
        store.write(pack(snapshot_of(4)), commit_of(4))
    monkeypatch.undo()
    assert load(store) == (3, [])
    assert [c.step for c in store.commits()] == [1, 2, 3]
    store.clean(fence=1)
    assert not written or paths.checkpoint(4, 1).exists(), "clean() removed files that this start may still write"
    store.clean(fence=2)
    assert not paths.checkpoint(4, 1).exists()
    assert [c.step for c in store.commits()] == [1, 2, 3]
    store.write(pack(snapshot_of(4)), commit_of(4))
    assert load(store)[0] == 4


def test_a_flip_of_any_bit_of_the_commit_marker_is_detected(store: CheckpointStore, paths: RunPaths) -> None:
    marker = paths.checkpoint(3, 1) / "COMMIT.json"
    intact = marker.read_bytes()
    for i in range(len(intact)):
        marker.write_bytes(intact[:i] + bytes([intact[i] ^ (1 << i % 8)]) + intact[i + 1 :])
        assert [c.step for c in store.commits()] == [1, 2], i
        if i % 16 == 0:
            assert load(store)[0] == 2, i
        # A marker that looks like that of another version is not marked damaged.
        (paths.checkpoint(3, 1) / "BAD.json").unlink(missing_ok=True)
    marker.write_bytes(intact)
    assert load(store) == (3, [])


def test_the_commit_marker_of_another_checkpoint_is_refused(store: CheckpointStore, paths: RunPaths) -> None:
    shutil.copytree(paths.checkpoint(2, 1), paths.checkpoint(9, 1))
    step, [fallback] = load(store)
    assert step == 3
    assert "it belongs to step 2 and fence 1, not to step-00000009-0001" in fallback.reason


def test_the_highest_fence_of_the_highest_step_wins(paths: RunPaths) -> None:
    store = CheckpointStore(paths)
    for step, fence in ((5, 1), (5, 12), (5, 3), (4, 20)):
        files = pack(replace(snapshot_of(step), schedule={"last_epoch": fence}))
        store.write(files, commit_of(step, fence))
    assert [(c.step, c.fence) for c in store.commits()] == [(4, 20), (5, 1), (5, 3), (5, 12)]
    loaded = store.load_newest(lambda _: None)
    assert loaded is not None
    assert (loaded[0].step, loaded[0].fence, loaded[1].schedule) == (5, 12, {"last_epoch": 12})


def test_a_committed_checkpoint_is_not_overwritten(store: CheckpointStore, paths: RunPaths) -> None:
    before = {p: p.stat().st_mtime_ns for p in paths.checkpoint(3, 1).iterdir()}
    store.write(pack(snapshot_of(7)), commit_of(3))
    assert {p: p.stat().st_mtime_ns for p in paths.checkpoint(3, 1).iterdir()} == before
    assert load(store) == (3, [])


@pytest.mark.parametrize("form", ["zip", "plain pickle", "inside"])
def test_code_in_a_checkpoint_is_not_executed(store: CheckpointStore, tmp_path: Path, form: str) -> None:
    """The digests of the malicious checkpoint are correct."""
    target = tmp_path / "it ran"
    data = io.BytesIO()
    if form == "plain pickle":
        data.write(pickle.dumps(Malicious(target), protocol=2))
    else:
        torch.save(
            Malicious(target)
            if form == "zip"
            else {"step": 9, "optimizer": {"x": Malicious(target)}, "schedule": None},
            data,
        )
        assert zipfile.is_zipfile(data)
    store.write({MODEL: pack(snapshot_of(9))[MODEL], TRAINING: data.getvalue()}, commit_of(9))
    step, [fallback] = load(store)
    assert step == 3
    assert re.search(r"training.pt is refused: .*[Ww]eights.only", fallback.reason, re.DOTALL)
    assert load(store) == (3, [fallback]), "a refused checkpoint is marked damaged, although its digests are correct"
    assert not target.exists()
    torch.load(io.BytesIO(data.getvalue()), weights_only=False) if form != "plain pickle" else pickle.loads(
        data.getvalue()
    )
    assert target.exists(), "the payload does not even work with an unsafe load"


@given(
    st.dictionaries(
        st.text("ab.", min_size=1),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
        max_size=4,
    )
)
def test_a_snapshot_survives_packing(dtypes: dict[str, torch.dtype]) -> None:
    model = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in dtypes.items()} | {
        "scalar": torch.tensor(3.0)
    }
    snapshot = Snapshot(
        7,
        model,
        {"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(2)}}, "param_groups": [{"betas": (0.9, 1)}]},
        None,
    )
    unpacked = unpack(pack(snapshot))
    assert pack(snapshot)[MODEL] == safetensors.torch.save(model), "the bytes differ from those that safetensors writes"
    assert (unpacked.step, unpacked.schedule) == (7, None)
    assert params_digest(unpacked.model) == params_digest(model)
    assert unpacked.optimizer["param_groups"] == snapshot.optimizer["param_groups"]
    assert torch.equal(unpacked.optimizer["state"][0]["m"], snapshot.optimizer["state"][0]["m"])


def test_the_parameters_digest_depends_on_names_types_shapes_and_bytes() -> None:
    values = torch.tensor([1.0, 2.0])
    models = [
        {"a": values},
        {"b": values},
        {"a": values.double()},
        {"a": values[None]},
        {"a": values.flip(0)},
        {"a": values, "b": values},
        {"a": -values},
    ]
    assert len({params_digest(model) for model in models}) == len(models)
    assert params_digest({"a": values, "b": -values}) == params_digest({"b": -values, "a": values})
    assert params_digest({"a": torch.ones(2, 3).t()}) == params_digest({"a": torch.ones(3, 2)}), (
        "the digest depends on the layout in memory"
    )


# --- retention

step_lists = st.lists(st.integers(1, 200), max_size=60)
pin_lists = st.lists(st.builds(Pin, st.integers(0, 200), st.floats(0, 20)), max_size=3)


@given(step_lists, st.integers(0, 5), st.lists(st.integers(1, 200), max_size=3), pin_lists)
def test_retention_removes_no_newest_best_or_pinned_checkpoint(
    steps: list[int], keep_last: int, best: list[int], pins: list[Pin]
) -> None:
    now_s = 10.0
    removed = removable_steps(steps, keep_last, best, pins, now_s)
    kept = set(steps) - removed
    live = [pin.done_step for pin in pins if pin.expires_s > now_s]
    assert removed <= set(steps)
    assert set(sorted(set(steps))[-max(keep_last, 1) :]) <= kept, "one of the newest is removed"
    assert set(best) & set(steps) <= kept, "one of the best is removed"
    needed = sorted(step for step in set(steps) if live and step > min(live))
    assert set(needed[-Pin.max_checkpoints :]) <= kept, "a pinned checkpoint is removed"
    num_pinned = min(len(needed), Pin.max_checkpoints)
    assert len(kept) <= max(keep_last, 1) + len(set(best)) + num_pinned, "more checkpoints stay than needed"
    assert removable_steps(steps, keep_last, best, [pin for pin in pins if pin.expires_s > now_s], now_s) == removed, (
        "expired pins keep checkpoints"
    )
    assert removable_steps(kept, keep_last, best, pins, now_s) == set(), "a second call removes more"


def test_a_pin_keeps_no_more_than_its_max_checkpoints() -> None:
    steps = range(1, Pin.max_checkpoints + 11)
    assert removable_steps(steps, 2, [], [Pin(0, 11.0)], 10.0) == set(range(1, 11))


def test_a_pin_that_expires_at_this_moment_no_longer_counts() -> None:
    pins = [Pin(0, 10.0, evaluator="other")]
    assert removable_steps([1, 2, 3], 1, [], pins, now_s=10.0) == {1, 2}
    assert removable_steps([1, 2, 3], 1, [], pins, now_s=9.9) == set()
    assert skipped_evaluations([1], pins, now_s=10.0) == set()
    assert skipped_evaluations([1], pins, now_s=9.9) == {(1, "other")}


def test_retain_removes_checkpoints_from_storage(store: CheckpointStore, paths: RunPaths) -> None:
    store.write(pack(snapshot_of(4)), commit_of(4))
    store.write(pack(snapshot_of(4)), commit_of(4, fence=2))
    flip(paths.checkpoint(4, 2), MODEL)
    assert load(store) == (
        4,
        [Fallback("step-00000004-0002", "step-00000004-0002/model.safetensors differs from its commit (SHA-256)")],
    )
    store.put_pin("eval", Pin(2, time.time() + 60))
    assert store.read_pins()[0].done_step == 2
    assert store.retain(keep_last=1, best=[1]) == [2]
    assert [(c.step, c.fence) for c in store.commits()] == [(1, 1), (3, 1), (4, 1)]
    store.put_pin("eval", Pin(2, time.time() - 60))
    assert store.retain(keep_last=1, best=[1]) == [3]
    assert not paths.checkpoint(3, 1).exists()
    assert load(store)[0] == 4


def test_a_pin_removed_while_the_pins_are_listed_is_ignored(
    store: CheckpointStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listing(folder: Path) -> dict[str, Path]:
        files = files_module.list_tree(folder)
        store.remove_pin("b")
        return files

    store.put_pin("a", Pin(1, time.time() + 60))
    store.put_pin("b", Pin(2, time.time() + 60))
    monkeypatch.setattr(store_module, "list_tree", listing)
    assert [pin.done_step for pin in store.read_pins()] == [1]
    assert len(list(paths.pins.iterdir())) == 1


def test_removing_a_checkpoint_removes_its_commit_marker_first(
    store: CheckpointStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(folder: Path, ignore_errors: bool) -> None:
        raise KilledError(f"{folder} {ignore_errors}")

    monkeypatch.setattr(shutil, "rmtree", dying)
    with pytest.raises(KilledError):
        store.retain(keep_last=2, best=[])
    assert (paths.checkpoint(1, 1) / MODEL).exists()
    assert [c.step for c in store.commits()] == [2, 3], "a partly removed checkpoint counts as committed"


# --- put_atomic


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_atomic_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a" / "file"
    assert put_atomic(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="disk full"):
        put_atomic(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["file"], "a temporary file is left behind"


def test_one_of_several_concurrent_writers_wins(tmp_path: Path) -> None:
    for i in range(30):
        path = tmp_path / str(i)
        start = threading.Barrier(4)
        winners: list[str] = []

        def write(name: str, path: Path = path, start: threading.Barrier = start, winners: list[str] = winners) -> None:
            start.wait()
            if put_atomic(path, name.encode() * 1000, if_absent=True):
                winners.append(name)

        threads = [threading.Thread(target=write, args=(str(n),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert path.read_bytes() == winners[0].encode() * 1000
        assert not put_atomic(path, b"later", if_absent=True)
        assert path.read_bytes() == winners[0].encode() * 1000
    assert len(list(tmp_path.iterdir())) == 30, "a temporary file is left behind"


def test_concurrent_readers_read_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = (b"a" * 100_000, b"b" * 50_000)
    stop = threading.Event()
    put_atomic(path, contents[0])

    def write() -> None:
        for i in range(100):
            put_atomic(path, contents[i % 2])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    contents_read = set()
    while not stop.is_set():
        contents_read.add(path.read_bytes())
    writer.join()
    assert contents_read <= set(contents)
