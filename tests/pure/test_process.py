"""Changes of a run to its process are undone, also where two runs overlap in time."""

from __future__ import annotations

import faulthandler
import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ray_app.process import (
    STOP_SIGNALS,
    defer_interrupts,
    interrupt_at_signals,
    private_folder,
    set_variables,
    stop_at_signals,
    temporary_folder,
)
from ray_app.runlog.paths import RunPaths
from ray_app.storage.object_stores import ObjectPath
from tests.support.users import ROOT_ONLY

NAME = "RAY_APP_TEST_VARIABLE"


@pytest.mark.parametrize("value", [None, "theirs"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_variable_is_restored_in_whichever_order_overlapping_runs_end(
    monkeypatch: pytest.MonkeyPatch, value: str | None, order: tuple[int, ...]
) -> None:
    monkeypatch.delenv(NAME, raising=False) if value is None else monkeypatch.setenv(NAME, value)
    stacks = [ExitStack() for _ in range(3)]
    for number, stack in enumerate(stacks):
        stack.enter_context(set_variables(**{NAME: str(number)}))
    assert os.environ[NAME] == "2"
    for ended, number in enumerate(order, 1):
        stacks[number].close()
        if ended < 3:
            assert os.environ[NAME] != value
    assert os.environ.get(NAME) == value


def test_the_inner_context_restores_the_value_of_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with set_variables(**{NAME: "outer"}):
        with set_variables(**{NAME: None}):
            os.environ[NAME] = "somebody's"
        assert os.environ[NAME] == "outer"
    assert NAME not in os.environ


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_of_a_scheduler_stops_once_and_its_handler_is_restored(number: signal.Signals) -> None:
    before, interrupted = signal.getsignal(number), threading.Event()
    with stop_at_signals(interrupted):
        os.kill(os.getpid(), number)
        assert interrupted.is_set()
        # A scheduler may send another one before it kills, such as LSF after its warning.
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) == before


def test_a_second_interrupt_while_a_lock_is_taken_again_is_an_interrupt() -> None:
    """`Condition.wait` is interrupted before it has the lock that `with` releases."""

    def work() -> None:
        try:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        finally:
            threading.Lock().release()

    with pytest.raises(KeyboardInterrupt), stop_at_signals(threading.Event()):
        work()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    before, interrupted = signal.signal(number, signal.SIG_IGN), threading.Event()
    try:
        with stop_at_signals(interrupted), interrupt_at_signals(), defer_interrupts():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
        assert not interrupted.is_set()
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("in_c", [False, True])
def test_a_handler_of_the_program_for_a_signal_of_a_scheduler_stays(in_c: bool, tmp_path: Path) -> None:
    calls, interrupted = list[int](), threading.Event()
    with (tmp_path / "stacks").open("w") as stacks:
        if in_c:
            faulthandler.register(signal.SIGUSR1, file=stacks)
        else:
            signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
        try:
            with stop_at_signals(interrupted):
                os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1) if in_c else signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert not interrupted.is_set()
    assert calls or "most recent call first" in (tmp_path / "stacks").read_text()


def test_deferred_signals_come_once_at_the_end_of_the_block() -> None:
    received = list[int]()
    with ExitStack() as stack:
        for number in (signal.SIGHUP, signal.SIGUSR2):
            stack.callback(signal.signal, number, signal.signal(number, signal.SIG_DFL))
        with suppress(KeyboardInterrupt), interrupt_at_signals(), defer_interrupts():
            for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGHUP):
                os.kill(os.getpid(), number)
            received.append(0)
            # The signals come when the block has ended.
            stack.callback(received.append, 1)
    assert received == [0, 1]


RETAINED_MB = """
import resource, threading, torch
from ray_app.process import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

def step():
    held = [torch.ones(2 << 20) for _ in range(32)]

step()
before = resident()
keep_freed_memory()
for _ in range(4):
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
step()
print(resident() - before)
"""
"""A script that prints how many megabytes a process retains after it has freed 32 tensors of 8 MB in each of four
successive threads, and in its main thread.
"""


def retained_mb(**variables: str) -> int:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    } | variables
    done = subprocess.run(
        [sys.executable, "-c", RETAINED_MB], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.rest
def test_freed_memory_is_retained_once_and_not_per_thread() -> None:
    assert 200 < retained_mb() < 256 + 4 * 64 + 30


@pytest.mark.rest
def test_malloc_variables_of_the_environment_take_precedence() -> None:
    assert retained_mb(MALLOC_TRIM_THRESHOLD_="131072") < 60


def _as_user(user: int, work: Callable[[], object]) -> str:
    """Returns what a process of another user gets from a function, or its error."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(user)
            os.umask(0o022)
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def shared_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns a temporary folder that all users may write to; those of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    temporary_folder.cache_clear()
    yield folder
    temporary_folder.cache_clear()
    shutil.rmtree(folder)


VICTIM, STRANGER = 12345, 12346


@ROOT_ONLY
def test_runs_in_buckets_of_two_users_have_a_folder_each(shared_tmp: Path) -> None:
    def make() -> Path:
        folder = RunPaths(ObjectPath.parse("s3://bucket/run")).ray_storage(3)
        folder.mkdir(parents=True)
        return folder

    for user in (VICTIM, STRANGER):
        assert _as_user(user, make).startswith(f"{shared_tmp}/ray_app-{user}/run-")
        assert stat.S_IMODE((shared_tmp / f"ray_app-{user}").stat().st_mode) == 0o700


def _link(folder: Path) -> None:
    (folder.parent / "theirs").mkdir(mode=0o777)
    folder.symlink_to(folder.parent / "theirs")


@ROOT_ONLY
@pytest.mark.parametrize("prepare", [lambda f: f.mkdir(0o777), lambda f: f.write_text("x"), _link])
def test_a_folder_that_a_stranger_has_made_first_is_not_used(
    shared_tmp: Path, prepare: Callable[[Path], object]
) -> None:
    _as_user(STRANGER, lambda: prepare(shared_tmp / f"ray_app-{VICTIM}"))
    message = _as_user(VICTIM, private_folder)
    assert message.startswith("PermissionError: [Errno 1] the owner is another user (uid 12346); set TMPDIR to")

    def use() -> str:
        folder = RunPaths(ObjectPath.parse("s3://bucket/run")).ray_storage(3)
        mode = stat.S_IMODE(folder.parents[1].stat().st_mode)
        return f"{folder.is_relative_to(shared_tmp / f'ray_app-{VICTIM}')} {mode:o}"

    assert _as_user(VICTIM, use) == "False 700", "the run is lost, or goes to a folder of the stranger"


@pytest.mark.parametrize(
    ("mode", "problem"), [(0o770, "other users can"), (0o702, "other users can"), (None, "is not a folder")]
)
def test_a_private_folder_is_private(shared_tmp: Path, mode: int | None, problem: str) -> None:
    folder = private_folder()
    folder.chmod(0o755)
    assert private_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if mode is None:
        folder.rename(shared_tmp / "elsewhere")
        folder.symlink_to(shared_tmp / "elsewhere")
    else:
        folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"{problem}.*set TMPDIR to your own folder"):
        private_folder()
