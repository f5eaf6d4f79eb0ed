"""Random histories of what happens to a run's directory, held against what must be true of any: checkpoints of two
writers, and the lease.

Of checkpoints: what is committed is what was written, under its step and fence; who lost the run to a later start
commits nothing; nothing that is held, best, or among the newest is removed; loading finds the newest that is intact,
and tells of every one that it passes over. Of the lease: one holder at a time, fences only grow and are given once, and
who was followed knows it before it commits.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ray_app.checkpoint import store as store_module
from ray_app.checkpoint.format import TRAINING, Snapshot, file_writers
from ray_app.checkpoint.store import CheckpointStore, Commit, Fallback, Pin, removable_steps
from ray_app.errors import CheckpointError, LeaseLostError, RunHeldError
from ray_app.runlog.lease import Lease, LeaseHolder, LeaseRecord, acquire_lease, check_lease, newest_fence
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Content, put_json, remove_tree

Key = tuple[int, int]
STEPS = st.integers(1, 6)
MEANWHILE = [
    *("nothing", "start", "same", "discard", "stop", "retain"),  # while its second file is written
    *("start before the commit", "discard before the commit", "discard after the commit"),
]


def commit_of(key: Key) -> Commit:
    step, fence = key
    return Commit(step, fence, 0, step, "cadence", "", "", 4, "", {}, 0.0)


def followed_by(call: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    def both(*arguments: Any, **options: Any) -> Any:
        found = call(*arguments, **options)
        act()
        return found

    return both


def content_of(key: Key) -> dict[str, Content]:
    return file_writers(Snapshot(key[0], {"p": torch.full((4,), key[0] + key[1] / 100)}, {}, None))


class Checkpoints(RuleBasedStateMachine):
    """The store, its fences, pins and retention; any fence may try to write at any time, and others act in the middle
    of that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.paths = RunPaths(self.folder / "run")
        self.store = CheckpointStore(self.paths)
        self.fence = 0
        self.committed: set[Key] = set()
        self.damaged: set[Key] = set()
        self.marked: set[Key] = set()
        self.pins: dict[str, Pin] = {}
        self.start()
        for step in (1, 3, 5):
            self.write(step, 0, "nothing")

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule()
    def start(self) -> None:
        self.fence += 1
        put_json(self.paths.fence(self.fence), {})
        self.store.clean(self.fence)

    @rule(step=STEPS, back=st.integers(0, 1), between=st.sampled_from(MEANWHILE))
    def write(self, step: int, back: int, between: str) -> None:
        """The newest start, or the one before it, writes a checkpoint; something happens while it does."""
        key = (step, max(1, self.fence - back))
        commit, files = commit_of(key), content_of(key)
        is_new = key not in self.committed or key in self.marked
        acts: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "start": self.start,
            "same": lambda: self.store.write(content_of(key), commit),  # a worker that leaves its node
            "discard": lambda: self.store.discard(commit),
            "stop": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
            "retain": lambda: self.retain(1, 1),
            "start before the commit": self.start,
            "discard before the commit": lambda: self.store.discard(commit),
            "discard after the commit": lambda: remove_tree(
                self.paths.checkpoint(*key)
            ),  # by one who has looked before it
        }

        def acting(moment: str) -> Callable[[], object]:
            return acts[between] if between.endswith(moment) else acts["nothing"]

        def interrupted(file: IO[bytes]) -> None:
            acts["nothing" if between.endswith("the commit") else between]()
            inner = files[TRAINING]
            assert callable(inner)
            inner(file)

        before = followed_by(store_module.check_lease, acting("before the commit"))
        after = followed_by(store_module.put_json, acting("after the commit"))
        with patch.object(store_module, "check_lease", before), patch.object(store_module, "put_json", after):
            try:
                self.store.write({**files, TRAINING: interrupted}, commit)
                written = True
            except (LeaseLostError, OSError, KeyboardInterrupt):
                written = False
        if is_new:
            assert not written or key[1] == self.fence, "a start that was followed has committed"
            if key[1] == self.fence and between in ("nothing", "same"):
                assert written
        if is_new:
            (self.committed.add if written else self.committed.discard)(key)
            self.marked.discard(key)
            self.damaged.discard(key)

    @precondition(lambda self: self.intact)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.intact)))
        file = Path(str(self.paths.checkpoint(*key))) / TRAINING
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1
        file.write_bytes(content)
        self.damaged.add(key)

    @rule(
        name=st.sampled_from(["one", "other"]),
        done=st.integers(0, 5),
        most=st.integers(1, 6),
        is_over=st.sampled_from([False, False, False, True]),
    )
    def put_pin(self, name: str, done: int, most: int, is_over: bool) -> None:
        self.pins[name] = Pin(done, time.time() + (-1 if is_over else 3600), most, name)
        self.store.put_pin(name, self.pins[name])

    @rule(name=st.sampled_from(["one", "other"]))
    def remove_pin(self, name: str) -> None:
        self.pins.pop(name, None)
        self.store.remove_pin(name)

    @rule(keep_last=st.sampled_from([1, 1, 2, 3]), best=STEPS)
    def retain(self, keep_last: int, best: int) -> None:
        seen = self.committed - self.marked
        steps = sorted({step for step, _ in seen})
        needed = set(steps[-keep_last:]) | {best}
        for pin in self.pins.values():
            if pin.expires_s > time.time():
                needed |= set([step for step in steps if step > pin.done_step][-pin.max_checkpoints :])
        gone = set(self.store.retain(keep_last, [best]))
        assert gone == set(steps) - needed
        dropped = {key for key in seen if key[0] in gone}
        self.committed -= dropped
        self.damaged -= dropped

    @property
    def intact(self) -> set[Key]:
        return self.committed - self.damaged - self.marked

    @rule()
    def load(self) -> None:
        told: list[Fallback] = []
        newest = max(self.intact, default=None)
        try:
            found = self.store.load_newest(told.append)
            assert (found is None) == (not self.committed)
            if found is not None:
                commit, snapshot = found
                assert (commit.step, commit.fence) == newest
                assert torch.equal(snapshot.model["p"], torch.full((4,), commit.step + commit.fence / 100))
        except CheckpointError:
            assert self.committed
            assert newest is None
        passed = {key for key in self.committed if newest is None or key > newest}
        assert len(told) == len(passed), "each that is passed over, once"
        self.marked |= passed & self.damaged

    @invariant()
    def what_is_committed_is_there(self) -> None:
        found = self.store.commits()
        assert {(c.step, c.fence) for c in found} == self.committed - self.marked
        for commit in found:
            if (commit.step, commit.fence) in self.intact:
                self.store.load(commit)


@dataclass(eq=False)
class Driver:
    lease: Lease
    is_dead: bool = False


class Leases(RuleBasedStateMachine):
    """Drivers that start, end, die and stand still, on this machine and, as far as the lease can tell, another."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.paths = RunPaths(self.folder / "run")
        self.holder: Driver | None = None
        self.followed: list[Lease] = []
        self.fences: list[int] = []

    def teardown(self) -> None:
        for lease in [*self.followed, *([self.holder.lease] if self.holder else [])]:
            lease._ended.set()
            lease._thread.join()
        shutil.rmtree(self.folder)

    @rule()
    def start(self) -> None:
        try:
            lease = acquire_lease(self.paths, waits=False)
        except RunHeldError:
            assert self.holder is not None
            assert not self.holder.is_dead, "a dead driver is followed at once"
            return
        assert self.holder is None or self.holder.is_dead, "two hold the run"
        if self.holder is not None:
            self.followed.append(self.holder.lease)
        self.holder = Driver(lease)
        self.fences.append(lease.fence)

    @precondition(lambda self: self.holder is not None and not self.holder.is_dead)
    @rule()
    def end(self) -> None:
        assert self.holder is not None
        self.holder.lease.release()
        self.holder = None

    @precondition(lambda self: self.holder is not None and not self.holder.is_dead)
    @rule(how=st.sampled_from(["killed", "machine lost long ago"]))
    def die(self, how: str) -> None:
        """Its process is gone, or nobody can tell and it has not renewed its lease for a quarter of an hour."""
        assert self.holder is not None
        lease, here = self.holder.lease, LeaseHolder.here()
        lease._ended.set()
        lease._thread.join()
        gone = replace(here, pid_ticks=-1) if how == "killed" else replace(here, machine="another")
        record = LeaseRecord(gone, time.time(), time.time() - (0 if how == "killed" else 2000), 30.0)
        put_json(self.paths.fence(lease.fence), asdict(record))
        self.holder.is_dead = True

    @invariant()
    def who_was_followed_commits_nothing(self) -> None:
        for lease in self.followed:
            with pytest.raises(LeaseLostError):
                check_lease(self.paths, lease.fence)
        if self.holder is not None:
            check_lease(self.paths, self.holder.lease.fence)

    @invariant()
    def fences_grow(self) -> None:
        assert self.fences == list(range(1, len(self.fences) + 1))
        with suppress(FileNotFoundError):
            assert newest_fence(self.paths) == len(self.fences)


def ignoring_pins(steps: list[int], keep_last: int, best: list[int], pins: list[Pin], now_s: float) -> set[int]:
    return removable_steps(steps, keep_last, best, [], now_s)


SOME = settings(max_examples=15, stateful_step_count=20, deadline=None)
MANY = settings(max_examples=600, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("machine", [Checkpoints, Leases])
def test_some_histories(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=SOME)


@pytest.mark.search
@pytest.mark.parametrize("machine", [Checkpoints, Leases])
def test_many_histories(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=MANY)


@pytest.mark.search
@pytest.mark.parametrize(
    ("name", "broken"), [("removable_steps", ignoring_pins), ("_check_files_exist", lambda folder, wanted: None)]
)
def test_a_store_without_one_of_its_rules_would_be_found(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that histories did not find before there were pins and removals in the middle of a commit."""
    monkeypatch.setattr(store_module, name, broken)
    with pytest.raises((AssertionError, CheckpointError)):
        run_state_machine_as_test(Checkpoints, settings=settings(MANY, phases=(Phase.generate,)))
