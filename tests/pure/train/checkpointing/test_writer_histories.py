"""Random histories of the saver: checkpoints that are written at the first try, later, or never, beside evaluators that
pin some.

What is committed is what could be written, but for what nobody needs. Each that could not be written, and each that
goes before an evaluator has seen it, is told once, also where the storage takes no events for a while. Nothing is left
of what was given up; a start that was followed writes nothing and says so, also while the next one writes the same
step.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ray_app.checkpoint import store as store_module
from ray_app.checkpoint.format import Snapshot
from ray_app.checkpoint.store import COMMIT, CheckpointStore, Commit, Pin
from ray_app.config.sections import CheckpointSection
from ray_app.errors import CheckpointError, LeaseLostError
from ray_app.retry import Retry
from ray_app.runlog import journal
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.journal import PendingEvents, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from ray_app.train.checkpointing import writer as module
from ray_app.train.checkpointing.writer import CheckpointWriter

KEPT = 2
OWN: str | None = None
EVALUATORS = st.sampled_from([OWN, "other"])


class Saving(RuleBasedStateMachine):
    """A driver that saves, and evaluators."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.paths = RunPaths(self.folder / "run")
        self.store = CheckpointStore(self.paths)
        self.step = self.fence = 0
        self.saver: CheckpointWriter | None = None
        self.earlier: tuple[CheckpointWriter, int] | None = None
        self.refusals: list[OSError] = []
        self.is_deaf = False
        self.committed: set[int] = set()
        self.given_up: list[int] = []
        self.skipped: set[tuple[int, str | None]] = set()
        self.pins: dict[str | None, Pin] = {}
        self.evaluated: set[tuple[int, str | None]] = set()
        self.patches = [
            patch.object(module, "_RETRY", Retry(0.0, attempts=6)),
            patch.object(journal, "put_json", self._put_event_file),
            patch.object(store_module, "put_json", self._put_json),
        ]
        for each in self.patches:
            each.start()
        self.start()

    def teardown(self) -> None:
        for each in self.patches:
            each.stop()
        shutil.rmtree(self.folder)

    def _put_event_file(self, *arguments: Any, **options: Any) -> bool:
        if self.is_deaf:
            raise OSError(errno.EIO, "refused")
        return put_json(*arguments, **options)

    def _put_json(self, place: Any, *arguments: Any, **options: Any) -> bool:
        if place.name == COMMIT and self.refusals:
            raise self.refusals.pop()
        return put_json(place, *arguments, **options)

    @rule()
    def start(self) -> None:
        """The run is started again; what an earlier start had not told yet is lost with it."""
        self.listen()
        self.earlier = (self.saver, self.fence) if self.saver is not None else None
        self.fence += 1
        put_json(self.paths.fence(self.fence), {})
        self.store.clean(self.fence)
        self.saver = CheckpointWriter(self.paths, CheckpointSection(keep_last=KEPT), lambda: [])

    @rule(
        ahead=st.integers(1, 3),
        refused=st.sampled_from([0, 0, 0, 1, 5, 6]),
        is_full=st.booleans(),
        follows=st.sampled_from([False] * 9 + [True]),
    )
    def save(self, ahead: int, refused: int, is_full: bool, follows: bool) -> None:
        """The commit is refused so many times; the sixth is the last try. Or a later start takes the run over before
        it.
        """
        self.step += ahead
        error = OSError(errno.ENOSPC if is_full else errno.EIO, "refused")
        self.refusals = [error] * refused
        if follows:
            self.fence += 1
            put_json(self.paths.fence(self.fence), {})
        commit = Commit(self.step, self.fence - follows, 0, self.step, "cadence", "", "", 4, "", {}, 0.0)
        self.saver.save(lambda: Snapshot(self.step, {"p": torch.full((4,), float(self.step))}, {}, None), commit)
        self.saver.wait()
        self.refusals = []
        if follows:
            with pytest.raises(LeaseLostError):
                self.saver.check()
            with pytest.raises(LeaseLostError):
                self.saver.save(lambda: pytest.fail("it takes a snapshot"), commit)
            self.fence -= 1  # `start` counts on
            self.start()
            self.earlier = None  # it knows
            return
        if refused == 6:
            self.given_up.append(self.step)
            with pytest.raises(CheckpointError, match="could not be written"):
                self.saver.check()
        else:
            self.committed.add(self.step)
            self.saver.check()
        self._tidy()

    @rule(ahead=st.integers(1, 3), order=st.sampled_from([1, -1]))
    def save_beside_an_earlier_start(self, ahead: int, order: int) -> None:
        """Whose driver still lives and saves the same step at the same time: it commits nothing, leaves nothing, and is
        told.
        """
        if self.earlier is None:
            return
        self.step += ahead
        both = [self.earlier, (self.saver, self.fence)]
        for saver, fence in both[::order]:
            commit = Commit(self.step, fence, 0, self.step, "cadence", "", "", 4, "", {}, 0.0)
            saver.save(lambda: Snapshot(self.step, {"p": torch.full((4,), float(self.step))}, {}, None), commit)
        for saver, _ in both:
            saver.wait()
        self.saver.check()
        with pytest.raises(LeaseLostError):
            self.earlier[0].check()
        self.earlier = None
        self.committed.add(self.step)
        self._tidy()

    def _tidy(self) -> None:
        """What `keep_last` and the pins leave over goes, told before to whoever waits for it."""
        kept = set(sorted(self.committed)[-KEPT:])
        live = [pin for pin in self.pins.values() if pin.expires_s > time.time()]
        for pin in live:
            kept |= set([step for step in sorted(self.committed) if step > pin.done_step][-pin.max_checkpoints :])
        gone, self.committed = self.committed - kept, kept
        for name, pin in self.pins.items():
            if name is OWN or pin in live:
                self.skipped |= {(step, name) for step in gone if step > pin.done_step} - self.evaluated

    @rule(
        name=EVALUATORS, behind=st.integers(0, 8), most=st.integers(1, 4), is_over=st.sampled_from([False, False, True])
    )
    def put_pin(self, name: str | None, behind: int, most: int, is_over: bool) -> None:
        self.pins[name] = Pin(max(0, self.step - behind), time.time() + (-1 if is_over else 3600), most, name)
        self.store.put_pin(name or "evaluator", self.pins[name])

    @rule(name=EVALUATORS)
    def remove_pin(self, name: str | None) -> None:
        self.pins.pop(name, None)
        self.store.remove_pin(name or "evaluator")

    @rule(name=EVALUATORS)
    def evaluate(self, name: str | None) -> None:
        if self.committed:
            step = max(self.committed)
            put_evaluation(self.paths, Evaluation(step, 0, "", {}, 1, 0.0, 0.0), name)
            self.evaluated.add((step, name))

    @rule()
    def stop_listening(self) -> None:
        """The storage takes no events."""
        self.is_deaf = True

    @rule()
    def listen(self) -> None:
        self.is_deaf = False
        if self.fence:
            self.saver.pending_events.flush()

    @invariant()
    def what_could_be_written_and_is_needed_is_there(self) -> None:
        found = self.store.commits()
        assert [commit.step for commit in found] == sorted(self.committed)
        for commit in found:
            self.store.load(commit)

    @invariant()
    def nothing_is_left_of_what_was_given_up(self) -> None:
        folders = Counter(int(folder.name.split("-")[1]) for folder in Path(str(self.paths.checkpoints)).glob("*"))
        assert folders == Counter(self.committed)

    @invariant()
    def each_is_told_once(self) -> None:
        if not self.is_deaf:
            assert [event.details["step"] for event in read_events(self.paths, "write_failed")] == self.given_up
            told = [
                (event.details["step"], event.details.get("by"))
                for event in read_events(self.paths, "evaluation_skipped")
            ]
            assert Counter(told) == Counter(self.skipped)


SOME = settings(max_examples=10, stateful_step_count=15, deadline=None)
MANY = settings(max_examples=400, stateful_step_count=40, deadline=None)


def test_some_histories() -> None:
    run_state_machine_as_test(Saving, settings=SOME)


@pytest.mark.search
def test_many_histories() -> None:
    run_state_machine_as_test(Saving, settings=MANY)


@pytest.mark.search
@pytest.mark.parametrize("broken", ["flush", "skipped_evaluations", "discard"])
def test_a_saver_without_one_of_its_duties_would_be_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: dict[str, Any] = {
        "flush": PendingEvents,
        "skipped_evaluations": module,
        "discard": CheckpointStore,
    }
    monkeypatch.setattr(owners[broken], broken, lambda *_: set())
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Saving, settings=settings(MANY, phases=(Phase.generate,)))
