"""A failure of standard output does not end a run; the first failure is recorded, and only once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ray_app.process import SafeStream
from ray_app.runlog.journal import StepRecord
from ray_app.runlog.output import copied_output
from ray_app.runlog.paths import RunPaths
from ray_app.watch import terminal as terminal_module
from ray_app.watch.terminal import RunConsole, SafeConsole
from tests.support.local_world import TinyImages, make_job, write_images


def full_disk() -> Any:
    return open("/dev/full", "w", encoding="utf-8")


def pipe_without_a_reader() -> Any:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed_descriptor() -> Any:
    stream = pipe_without_a_reader()
    os.close(stream.fileno())
    return stream


def closed_file() -> Any:
    stream = StringIO()
    stream.close()
    return stream


class LostTerminal(StringIO):
    """A terminal that has hung up: each write fails."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


class FailingFlush(StringIO):
    def flush(self) -> None:
        raise RuntimeError("something else")


BROKEN = [full_disk, pipe_without_a_reader, closed_descriptor, closed_file, LostTerminal, FailingFlush]
KINDS = ["ENOSPC", "EPIPE", "EBADF", "closed", "EIO", "other"]


def close_quietly(stream: Any) -> None:
    """Closes a stream that fails all writes, so that Python does not flush it at exit."""
    if isinstance(stream, TextIOWrapper):
        with suppress(OSError):
            stream.close()


@pytest.mark.parametrize("broken", BROKEN, ids=KINDS)
def test_a_failing_stream_is_reported_once_and_raises_no_error(
    broken: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    stream = broken()
    safe = SafeStream(stream, "standard output")
    for _ in range(3):
        print("a line", file=safe, flush=True)
    assert safe.failure is not None
    assert [record.message.partition(",")[0] for record in caplog.records] == ["standard output cannot be written"]
    close_quietly(stream)


def test_characters_outside_the_encoding_are_escaped() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii") as stream:
        safe = SafeStream(stream, "standard output")
        print("Größe ✓", file=safe)
        print("after", file=safe)
    with os.fdopen(reader) as read:
        assert read.read() == "Gr\\xf6\\xdfe \\u2713\nafter\n"
    assert safe.failure is None


def test_a_slow_reader_of_a_non_blocking_pipe_gets_every_line() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The lines are several times the capacity of a pipe.
    lines = [f"line {number} {'x' * 200}\n" for number in range(2000)]
    parts_read: list[bytes] = []

    def read() -> None:
        while part := os.read(reader, 1000):
            parts_read.append(part)

    thread = threading.Thread(target=read)
    with os.fdopen(writer, "w") as stream:
        safe = SafeStream(stream, "standard output")
        thread.start()
        for line in lines:
            safe.write(line)
            safe.flush()
    thread.join()
    os.close(reader)
    assert safe.failure is None
    assert b"".join(parts_read).decode() == "".join(lines)


@pytest.mark.rest
def test_writing_to_a_full_non_blocking_pipe_fails_after_a_while() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = os.fdopen(writer, "w")
    safe = SafeStream(stream, "standard output")
    for _ in range(1000):
        print("x" * 200, file=safe, flush=True)
    assert isinstance(safe.failure, BlockingIOError)
    os.close(reader)
    close_quietly(stream)


def test_the_warning_about_a_failed_stream_causes_no_endless_recursion() -> None:
    """The warning goes through the logging handler of the stream that has failed."""
    safe = SafeStream(LostTerminal(), "standard error")
    handler = logging.StreamHandler(safe)
    logging.getLogger().addHandler(handler)
    try:
        logging.getLogger("test").warning("a warning")
    finally:
        logging.getLogger().removeHandler(handler)
    assert isinstance(safe.failure, OSError)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    data = write_images(tmp_path / "data", [[50, 1], [45]])
    return make_job(tmp_path / "run", data, task=TinyImages(), train__epochs=2)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("broken", BROKEN, ids=KINDS)
def test_the_console_of_a_run_survives_a_failing_stream(
    job: Any, broken: Callable[[], Any], is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_module, "_PLAIN_LINE_INTERVAL_S", 0.0)
    stream, reported = broken(), list[str]()
    console = SafeConsole(Console(file=SafeStream(stream, "standard output"), force_terminal=is_terminal))
    console.report_to(reported.append)
    record = StepRecord(1, 0, 1.0, 0.5, 0.1, 1.0, 5.0, 0.0, 2, [3] * 4, [1] * 4, "1.1")
    with RunConsole(job, 4, console, list) as run_console:
        run_console.show(None, "waiting for the workers to start ...")
        run_console.show(record, "")
        run_console.show_last()
    console.print("after the run")
    assert len(reported) == 1
    close_quietly(stream)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyError("metric"), SystemExit(1)], ids=["OS", "other", "rich"]
)
def test_an_error_of_the_console_is_reported_once(error: BaseException) -> None:
    class Failing(Console):
        def print(self, *_: Any, **__: Any) -> None:
            raise error

    console, reported = SafeConsole(Failing(file=StringIO())), list[str]()
    console.print("before anything is recorded")
    console.report_to(reported.append)
    console.print("and again")
    console.as_plain().print("elsewhere")
    assert len(reported) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(15)])
def test_an_interrupt_is_not_treated_as_a_console_failure(error: BaseException) -> None:
    console = SafeConsole(Console(file=StringIO()))
    with pytest.raises(type(error)), console.guarded():
        raise error


def test_a_task_may_print_to_a_failing_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, stream = RunPaths(tmp_path / "run"), full_disk()
    monkeypatch.setattr("sys.stdout", stream)
    with copied_output(paths, 1, "worker", lambda: "step 1"):
        print("a line", flush=True)
    assert paths.output(1, "worker", "out").read_text() == "[step 1] a line\n"
    close_quietly(stream)
