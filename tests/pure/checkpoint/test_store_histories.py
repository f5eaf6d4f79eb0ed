"""Stateful property tests of a run's directory: checkpoints of two concurrent writers, and the lease.

Invariants of checkpoints: the committed content is the written one, under its step and fence; a start that lost the run
to a later one commits nothing; no checkpoint that is pinned, best, or among the newest is removed; loading returns the
newest intact checkpoint and reports each one that it skips. Invariants of the lease: it has one holder at a time, each
fence is larger than all earlier ones, and a superseded holder notices it before it commits.
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
from ray_app.checkpoint.retention import Pin, removable_steps
from ray_app.checkpoint.store import CheckpointStore, Commit, Fallback
from ray_app.errors import CheckpointError, LeaseLostError, RunHeldError
from ray_app.runlog.lease import Lease, LeaseHolder, LeaseRecord, acquire_lease, check_lease, newest_fence
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Content, put_json, remove_tree

Key = tuple[int, int]
STEPS = st.integers(1, 6)
CONCURRENT_ACTIONS = [
    # These happen while the second file of a checkpoint is written.
    *("nothing", "start", "same", "discard", "stop", "retain"),
    *("start before the commit", "discard before the commit", "discard after the commit"),
]


def commit_of(key: Key) -> Commit:
    step, fence = key
    return Commit(step, fence, 0, step, "cadence", "", "", 4, "", {}, 0.0)


def run_afterwards(call: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    def call_and_act(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        act()
        return result

    return call_and_act


def content_of(key: Key) -> dict[str, Content]:
    return file_writers(Snapshot(key[0], {"p": torch.full((4,), key[0] + key[1] / 100)}, {}, None))


class Checkpoints(RuleBasedStateMachine):
    """The store with its fences, pins and retention: any fence may try to write at any time, and other actions happen
    during a write.
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

    @rule(step=STEPS, back=st.integers(0, 1), between=st.sampled_from(CONCURRENT_ACTIONS))
    def write(self, step: int, back: int, between: str) -> None:
        """The newest start, or the one before it, writes a checkpoint while another action happens."""
        key = (step, max(1, self.fence - back))
        commit, files = commit_of(key), content_of(key)
        is_new = key not in self.committed or key in self.marked
        acts: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "start": self.start,
            # A worker that leaves its node writes the same checkpoint.
            "same": lambda: self.store.write(content_of(key), commit),
            "discard": lambda: self.store.discard(commit),
            "stop": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
            "retain": lambda: self.retain(1, 1),
            "start before the commit": self.start,
            "discard before the commit": lambda: self.store.discard(commit),
            # A start that listed the checkpoints before the commit removes the folder.
            "discard after the commit": lambda: remove_tree(self.paths.checkpoint(*key)),
        }

        def action_at(moment: str) -> Callable[[], object]:
            return acts[between] if between.endswith(moment) else acts["nothing"]

        def write_with_action(file: IO[bytes]) -> None:
            acts["nothing" if between.endswith("the commit") else between]()
            write_content = files[TRAINING]
            assert callable(write_content)
            write_content(file)

        before = run_afterwards(check_lease, action_at("before the commit"))
        after = run_afterwards(put_json, action_at("after the commit"))
        with patch.object(store_module, "check_lease", before), patch.object(store_module, "put_json", after):
            try:
                self.store.write({**files, TRAINING: write_with_action}, commit)
                written = True
            except (LeaseLostError, OSError, KeyboardInterrupt):
                written = False
        if is_new:
            assert not written or key[1] == self.fence, "a start that was superseded has committed"
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
        [file] = Path(str(self.paths.checkpoint(*key))).glob(f"*{TRAINING}")
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1
        file.write_bytes(content)
        self.damaged.add(key)

    @rule(
        name=st.sampled_from(["one", "other"]),
        done=st.integers(0, 5),
        max_checkpoints=st.integers(1, 6),
        is_over=st.sampled_from([False, False, False, True]),
    )
    def put_pin(self, name: str, done: int, max_checkpoints: int, is_over: bool) -> None:
        self.pins[name] = Pin(done, time.time() + (-1 if is_over else 3600), max_checkpoints, name)
        self.store.put_pin(name, self.pins[name])

    @rule(name=st.sampled_from(["one", "other"]))
    def remove_pin(self, name: str) -> None:
        self.pins.pop(name, None)
        self.store.remove_pin(name)

    @rule(keep_last=st.sampled_from([1, 1, 2, 3]), best=STEPS)
    def retain(self, keep_last: int, best: int) -> None:
        usable = self.committed - self.marked
        steps = sorted({step for step, _ in usable})
        needed = set(steps[-keep_last:]) | {best}
        for pin in self.pins.values():
            if pin.expires_s > time.time():
                needed |= set([step for step in steps if step > pin.done_step][-pin.max_checkpoints :])
        removed = set(self.store.retain(keep_last, [best]))
        assert removed == set(steps) - needed
        dropped = {key for key in usable if key[0] in removed}
        self.committed -= dropped
        self.damaged -= dropped

    @property
    def intact(self) -> set[Key]:
        return self.committed - self.damaged - self.marked

    @rule()
    def load(self) -> None:
        fallbacks: list[Fallback] = []
        newest = max(self.intact, default=None)
        try:
            loaded = self.store.load_newest(fallbacks.append)
            assert (loaded is None) == (not self.committed)
            if loaded is not None:
                commit, snapshot = loaded
                assert (commit.step, commit.fence) == newest
                assert torch.equal(snapshot.model["p"], torch.full((4,), commit.step + commit.fence / 100))
        except CheckpointError:
            assert self.committed
            assert newest is None
        skipped = {key for key in self.committed if newest is None or key > newest}
        assert len(fallbacks) == len(skipped), "not each skipped checkpoint is reported once"
        self.marked |= skipped & self.damaged

    @invariant()
    def committed_checkpoints_are_listed_and_intact_ones_load(self) -> None:
        commits = self.store.commits()
        assert {(c.step, c.fence) for c in commits} == self.committed - self.marked
        for commit in commits:
            if (commit.step, commit.fence) in self.intact:
                self.store.load(commit)


@dataclass(eq=False)
class Driver:
    lease: Lease
    is_dead: bool = False


class Leases(RuleBasedStateMachine):
    """Drivers that start, end, die and stall, on this machine and, as far as the lease can tell, on another."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.paths = RunPaths(self.folder / "run")
        self.holder: Driver | None = None
        self.superseded: list[Lease] = []
        self.fences: list[int] = []

    def teardown(self) -> None:
        for lease in [*self.superseded, *([self.holder.lease] if self.holder else [])]:
            lease.release()
        shutil.rmtree(self.folder)

    @rule()
    def start(self) -> None:
        try:
            lease = acquire_lease(self.paths, waits=False)
        except RunHeldError:
            assert self.holder is not None
            assert not self.holder.is_dead, "a dead driver holds the run against a new start"
            return
        assert self.holder is None or self.holder.is_dead, "two drivers hold the run"
        if self.holder is not None:
            self.superseded.append(self.holder.lease)
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
        """Its process ended, or its machine is another and it has not renewed its lease for half an hour."""
        assert self.holder is not None
        lease, here = self.holder.lease, LeaseHolder.here()
        lease.release()
        dead_holder = replace(here, pid_ticks=-1) if how == "killed" else replace(here, machine="another")
        record = LeaseRecord(dead_holder, time.time(), time.time() - (0 if how == "killed" else 2000), 30.0)
        put_json(self.paths.fence(lease.fence), asdict(record))
        self.holder.is_dead = True

    @invariant()
    def a_superseded_driver_cannot_commit(self) -> None:
        for lease in self.superseded:
            with pytest.raises(LeaseLostError):
                check_lease(self.paths, lease.fence)
        if self.holder is not None:
            check_lease(self.paths, self.holder.lease.fence)

    @invariant()
    def fences_grow(self) -> None:
        assert self.fences == list(range(1, len(self.fences) + 1))
        with suppress(FileNotFoundError):
            assert newest_fence(self.paths) == len(self.fences)


def removable_steps_without_pins(
    steps: list[int], keep_last: int, best: list[int], pins: list[Pin], now_s: float
) -> set[int]:
    return removable_steps(steps, keep_last, best, [], now_s)


FEW_HISTORIES = settings(max_examples=15, stateful_step_count=20, deadline=None)
MANY_HISTORIES = settings(max_examples=600, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("machine", [Checkpoints, Leases])
def test_a_few_histories_break_no_invariant(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=FEW_HISTORIES)


@pytest.mark.search
@pytest.mark.parametrize("machine", [Checkpoints, Leases])
def test_many_histories_break_no_invariant(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=MANY_HISTORIES)


@pytest.mark.search
@pytest.mark.parametrize(
    ("name", "broken"),
    [("removable_steps", removable_steps_without_pins), ("_check_files_exist", lambda folder, expected: None)],
)
def test_a_store_without_one_of_its_rules_breaks_an_invariant(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Histories without pins, and without removals during a commit, detect neither of these two mutations."""
    monkeypatch.setattr(store_module, name, broken)
    with pytest.raises((AssertionError, CheckpointError)):
        run_state_machine_as_test(Checkpoints, settings=settings(MANY_HISTORIES, phases=(Phase.generate,)))
