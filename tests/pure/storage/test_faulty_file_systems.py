"""Sequences of operations of a run on file systems that lack operations, with a fault, keep what the run promises.

A checkpoint that was committed can be read, with its content, until a retention removes it; none that is half-written
is ever read; the records of steps that were written are read, once each; and a file is put once.
"""

import ctypes
import errno
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ray_app.checkpoint.format import Snapshot, file_writers
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.runlog import journal
from ray_app.runlog.journal import StepRecord
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_atomic, try_writing
from tests.support.generated_programs import assert_none_differs

SEARCHED = 1000
Program = dict[str, Any]
_OPERATIONS = ["nothing", "train", "write", "retain", "join", "put", "start"]
GRAMMAR: dict[str, list[Any]] = {
    "fault": ["none", "error", "stop before", "stop after"],
    "at": list(range(80)),
    "links": [True, False],
    "flags": [True, False],
    "syncs": [True, False],
    "replaces": [True, False],
    **{f"operation {i}": _OPERATIONS for i in range(12)},
}


class StoppedError(BaseException):
    """The process has ended; whatever it does afterwards has no effect."""


class FileSystem:
    """Functions of the system that do what a file system has, and fail once or from then on."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._calls, self._is_stopped = 0, False
        self.paths: set[str] = set()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Replaces the functions within the block."""
        refusals = {"link": "links", "fsync": "syncs"}
        with patch.object(ctypes, "CDLL", lambda *_, **__: self):
            for name in ("link", "replace", "fsync", "unlink", "open", "rmdir"):
                trait = refusals.get(name)
                patch.object(os, name, self._wrap(getattr(os, name), trait, name == "replace")).start()
            try:
                yield
            finally:
                patch.stopall()

    def restart(self) -> None:
        """Begins another process, without a further fault."""
        self._is_stopped = False
        self._calls = self._program["at"] + 1

    def renameat2(self, _: int, source: bytes, __: int, target: bytes, ___: int) -> int:
        """The function of the C library."""
        try:
            rename: Callable[..., None] = self._wrap(_rename_new, "flags", False)
            rename(source, target)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1
        return 0

    def _wrap(self, function: Callable[..., Any], trait: str | None, is_replace: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_stopped:
                raise StoppedError
            fault = self._program["fault"] if self._calls == self._program["at"] else "none"
            self._calls += 1
            self._is_stopped = fault.startswith("stop")
            if fault == "error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if fault == "stop before":
                raise StoppedError
            if trait and not self._program[trait]:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if is_replace and not self._program["replaces"] and os.path.exists(arguments[1]):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            result = function(*arguments, **options)
            self.paths |= {os.fsdecode(name) for name in arguments if isinstance(name, str | bytes | Path)}
            if fault == "stop after":
                raise StoppedError
            return result

        return call


_real_link, _real_unlink = os.link, os.unlink


def _rename_new(source: bytes, target: bytes) -> None:
    _real_link(source, target)
    _real_unlink(source)


class Run:
    """A run on a file system, and the model of what it promises."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder / "run")
        self.store = CheckpointStore(self.paths)
        self.fence, self.step = 1, 0
        self.committed: set[tuple[int, int]] = set()
        self.maybe: set[tuple[int, int]] = set()
        self.records: dict[int, float] = {}
        self.pending: list[StepRecord] = []

    def do(self, operation: str) -> None:
        """Does an operation; one that raises may have had its effect."""
        getattr(self, f"_{operation}")()

    def _nothing(self) -> None:
        pass

    def _train(self) -> None:
        self.step += 1
        self.pending.append(_record(self.step, self.fence))
        journal.put_segment(self.paths, self.fence, self.pending)
        self.records |= {record.step: record.loss for record in self.pending}
        self.pending = []

    def _write(self) -> None:
        key = (self.step, self.fence)
        self.maybe.add(key)
        snapshot = Snapshot(self.step, {"p": torch.full((3,), self.step + self.fence / 100)}, {}, None)
        self.store.write(file_writers(snapshot), Commit(*key, 0, 0, "cadence", "", "", 1, "", {}, 0.0))
        self.committed.add(key)

    def _retain(self) -> None:
        # A process that was stopped in a write may have committed the newest one.
        newest = [(commit.step, commit.fence) for commit in self.store.commits()][-1:]
        self.maybe |= self.committed
        self.committed &= set(newest)
        self.store.retain(1, [])

    def _join(self) -> None:
        with patch.object(journal, "MAX_SMALL_FILES", 2):
            journal.join_segments(self.paths, min_age_s=-1.0)

    def _put(self) -> None:
        file, content = self.paths.root / "once", os.urandom(4)
        before = file.read_bytes() if file.exists() else None
        is_put = put_atomic(file, content, if_absent=True)
        assert is_put == (before is None), "a file is put twice"
        assert file.read_bytes() == (before or content), "a file that exists is replaced"

    def _start(self) -> None:
        self.fence += 1
        self.pending = []
        self.store.clean(self.fence)
        newest = self.store.load_newest(lambda fallback: pytest.fail(f"a checkpoint is damaged: {fallback}"))
        self.step = newest[0].step if newest else 0

    def check(self) -> None:
        """Compares what a new process reads with the model."""
        commits = {(commit.step, commit.fence): commit for commit in self.store.commits()}
        assert self.committed <= commits.keys() <= self.committed | self.maybe, "a committed checkpoint is lost"
        newest = self.store.load_newest(lambda fallback: pytest.fail(f"a checkpoint is damaged: {fallback}"))
        assert (newest[0].step if newest else 0) >= max(self.committed, default=(0, 0))[0]
        for (step, fence), commit in commits.items():
            assert self.store.load(commit), (step, fence)
        if newest:
            assert newest[1].model["p"][0].item() == pytest.approx(newest[0].step + newest[0].fence / 100)
        first, _ = journal.read_records(self.paths)
        assert self.records.keys() <= first.keys(), "the record of a step is lost"


def _record(step: int, fence: int) -> StepRecord:
    return StepRecord(step, 0, 0.0, step / 7, 0.1, 1.0, 1.0, 0.0, 1, [1], [step], f"{fence}.1")


def broken_promise(program: Program) -> str:
    """Returns the promise that a sequence breaks; empty if it breaks none."""
    with tempfile.TemporaryDirectory() as name:
        folder, system = Path(name), FileSystem(program)
        with FileSystem(program | {"fault": "none"}).used():
            try:
                try_writing(folder)
            except OSError as error:
                is_right = not program["replaces"] or not (program["links"] or program["flags"])
                return "" if is_right else f"refused: {error}"
        if not program["replaces"] or not (program["links"] or program["flags"]):
            return "a file system without what a run needs is not refused"
        run = Run(folder)
        try:
            for i in range(12):
                try:
                    with system.used(), suppress(OSError):
                        run.do(program[f"operation {i}"])
                except StoppedError:
                    system.restart()
                    with system.used():
                        run.do("start")
                run.check()
        except (AssertionError, pytest.fail.Exception) as error:
            return str(error).splitlines()[0]
        lower = {path.lower() for path in system.paths}
        return "" if len(lower) == len(system.paths) else "two names differ in the case of letters only"


def draw(seed: int) -> Program:
    source = random.Random(seed)
    rare = ("links", "flags", "syncs", "replaces")
    return {
        name: values[0] if name in rare and source.random() < 0.7 else source.choice(values)
        for name, values in GRAMMAR.items()
    }


def test_a_sequence_with_a_fault_keeps_the_promises() -> None:
    assert_none_differs(GRAMMAR, map(draw, range(5)), broken_promise)


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_sequences_with_faults_keep_the_promises() -> None:
    assert_none_differs(GRAMMAR, map(draw, range(SEARCHED)), broken_promise)
