"""Random histories of the checkpoint writer: commits succeed at once, later or never, and evaluators pin checkpoints.

All checkpoints that could be written and are needed are committed. Each one that could not be written, and each one
that is deleted before its evaluation, is reported once, also where the storage rejects events for a while. Failed
checkpoints leave no files. A start that was superseded writes nothing and raises, also while the next one writes the
same step.
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
from ray_app.checkpoint.retention import Pin
from ray_app.checkpoint.store import COMMIT, WRITER, CheckpointStore, Commit
from ray_app.config.sections import CheckpointSection
from ray_app.errors import CheckpointError, LeaseLostError
from ray_app.retry import Retry
from ray_app.runlog import journal
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.journal import PendingEvents, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from ray_app.train.checkpointing import persistence as writer_module
from ray_app.train.checkpointing.persistence import CheckpointWriter

KEEP_LAST = 2
RUN_EVALUATOR: str | None = None
EVALUATORS = st.sampled_from([RUN_EVALUATOR, "other"])


class CheckpointWriterMachine(RuleBasedStateMachine):
    """A driver that saves checkpoints, and evaluators that pin them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.paths = RunPaths(self.folder / "run")
        self.store = CheckpointStore(self.paths)
        self.step = self.fence = 0
        self.writer: CheckpointWriter | None = None
        self.earlier: tuple[CheckpointWriter, int] | None = None
        self.refusals: list[OSError] = []
        self.rejects_events = False
        self.committed: set[int] = set()
        self.failed_steps: list[int] = []
        self.skipped: set[tuple[int, str | None]] = set()
        self.pins: dict[str | None, Pin] = {}
        self.evaluated: set[tuple[int, str | None]] = set()
        self.patches: list[Any] = [
            patch.object(writer_module, "_RETRY", Retry(0.0, attempts=6)),
            patch.object(journal, "put_json", self._put_event_file),
            patch.object(store_module, "put_json", self._put_json),
        ]
        for patcher in self.patches:
            patcher.start()
        self.start()

    def teardown(self) -> None:
        for patcher in self.patches:
            patcher.stop()
        shutil.rmtree(self.folder)

    def _put_event_file(self, *arguments: Any, **options: Any) -> bool:
        if self.rejects_events:
            raise OSError(errno.EIO, "refused")
        return put_json(*arguments, **options)

    def _put_json(self, path: Any, *arguments: Any, **options: Any) -> bool:
        if path.name == COMMIT and self.refusals:
            raise self.refusals.pop()
        return put_json(path, *arguments, **options)

    @rule()
    def start(self) -> None:
        """Starts the run again, and loses the events that the earlier start has not written."""
        self.accept_events()
        self.earlier = (self.writer, self.fence) if self.writer is not None else None
        self.fence += 1
        put_json(self.paths.fence(self.fence), {})
        self.store.clean(self.fence)
        self.writer = CheckpointWriter(self.paths, CheckpointSection(keep_last=KEEP_LAST), lambda: [])

    @rule(
        steps_ahead=st.integers(1, 3),
        num_refusals=st.sampled_from([0, 0, 0, 1, 5, 6]),
        is_full=st.booleans(),
        is_superseded=st.sampled_from([False] * 9 + [True]),
    )
    def save(self, steps_ahead: int, num_refusals: int, is_full: bool, is_superseded: bool) -> None:
        """Saves while the storage refuses `num_refusals` commits, of which the sixth is the last attempt.

        With `is_superseded`, a later start takes the run over before the commit.
        """
        self.step += steps_ahead
        error = OSError(errno.ENOSPC if is_full else errno.EIO, "refused")
        self.refusals = [error] * num_refusals
        if is_superseded:
            self.fence += 1
            put_json(self.paths.fence(self.fence), {})
        commit = Commit(self.step, self.fence - is_superseded, 0, self.step, "cadence", "", "", 4, "", {}, 0.0)
        self.writer.save(lambda: Snapshot(self.step, {"p": torch.full((4,), float(self.step))}, {}, None), commit)
        self.writer.wait()
        self.refusals = []
        if is_superseded:
            with pytest.raises(LeaseLostError):
                self.writer.wait_for_commit()
            with pytest.raises(LeaseLostError):
                self.writer.save(lambda: pytest.fail("it takes a snapshot"), commit)
            # `start` increments the fence again.
            self.fence -= 1
            self.start()
            # The earlier writer has raised already.
            self.earlier = None
            return
        if num_refusals == 6:
            self.failed_steps.append(self.step)
            with pytest.raises(CheckpointError, match="could not be written"):
                self.writer.wait_for_commit()
        else:
            self.committed.add(self.step)
            self.writer.wait_for_commit()
        self._delete_unneeded()

    @rule(steps_ahead=st.integers(1, 3), order=st.sampled_from([1, -1]))
    def save_while_an_earlier_start_saves(self, steps_ahead: int, order: int) -> None:
        """The driver of the earlier start still runs and saves the same step; it commits nothing, leaves
        nothing, and raises.
        """
        if self.earlier is None:
            return
        self.step += steps_ahead
        writers = [self.earlier, (self.writer, self.fence)]
        for writer, fence in writers[::order]:
            commit = Commit(self.step, fence, 0, self.step, "cadence", "", "", 4, "", {}, 0.0)
            writer.save(lambda: Snapshot(self.step, {"p": torch.full((4,), float(self.step))}, {}, None), commit)
        for writer, _ in writers:
            writer.wait()
        self.writer.wait_for_commit()
        with pytest.raises(LeaseLostError):
            self.earlier[0].wait_for_commit()
        self.earlier = None
        self.committed.add(self.step)
        self._delete_unneeded()

    def _delete_unneeded(self) -> None:
        """Models that checkpoints which `keep_last` and pins do not need are deleted, after an event for each
        waiting evaluator.
        """
        retained = set(sorted(self.committed)[-KEEP_LAST:])
        live_pins = [pin for pin in self.pins.values() if pin.expires_s > time.time()]
        for pin in live_pins:
            retained |= set([step for step in sorted(self.committed) if step > pin.done_step][-pin.max_checkpoints :])
        deleted, self.committed = self.committed - retained, retained
        for name, pin in self.pins.items():
            if name is RUN_EVALUATOR or pin in live_pins:
                self.skipped |= {(step, name) for step in deleted if step > pin.done_step} - self.evaluated

    @rule(
        name=EVALUATORS,
        behind=st.integers(0, 8),
        max_checkpoints=st.integers(1, 4),
        is_expired=st.sampled_from([False, False, True]),
    )
    def put_pin(self, name: str | None, behind: int, max_checkpoints: int, is_expired: bool) -> None:
        self.pins[name] = Pin(
            max(0, self.step - behind), time.time() + (-1 if is_expired else 3600), max_checkpoints, name
        )
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
    def reject_events(self) -> None:
        """The storage rejects events from now on."""
        self.rejects_events = True

    @rule()
    def accept_events(self) -> None:
        self.rejects_events = False
        if self.fence:
            self.writer.pending_events.flush()

    @invariant()
    def needed_checkpoints_exist(self) -> None:
        commits = self.store.commits()
        assert [commit.step for commit in commits] == sorted(self.committed)
        for commit in commits:
            self.store.load(commit)

    @invariant()
    def failed_checkpoints_leave_no_files(self) -> None:
        """`WRITER.json` stays, so that a slow writer cannot mix its files with those of a later one."""
        files = [file for file in Path(str(self.paths.checkpoints)).glob("*/*") if file.name != WRITER]
        folders = Counter(int(name.split("-")[1]) for name in {file.parent.name for file in files})
        assert folders == Counter(self.committed)

    @invariant()
    def each_failure_is_reported_once(self) -> None:
        if not self.rejects_events:
            assert [event.details["step"] for event in read_events(self.paths, "write_failed")] == self.failed_steps
            skipped = [
                (event.details["step"], event.details.get("by"))
                for event in read_events(self.paths, "evaluation_skipped")
            ]
            assert Counter(skipped) == Counter(self.skipped)


SOME = settings(max_examples=10, stateful_step_count=15, deadline=None)
MANY = settings(max_examples=400, stateful_step_count=40, deadline=None)


def test_a_few_random_histories_of_the_writer() -> None:
    run_state_machine_as_test(CheckpointWriterMachine, settings=SOME)


@pytest.mark.search
def test_many_random_histories_of_the_writer() -> None:
    run_state_machine_as_test(CheckpointWriterMachine, settings=MANY)


@pytest.mark.search
@pytest.mark.parametrize("broken", ["flush", "skipped_evaluations", "discard"])
def test_the_histories_detect_a_writer_without_one_of_its_duties(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: dict[str, Any] = {
        "flush": PendingEvents,
        "skipped_evaluations": writer_module,
        "discard": CheckpointStore,
    }
    monkeypatch.setattr(owners[broken], broken, lambda *_: set())
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CheckpointWriterMachine, settings=settings(MANY, phases=(Phase.generate,)))
