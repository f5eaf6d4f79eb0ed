"""The progress of an ingest: each stage, its rate and the time left, on terminals and in logs."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_app.cli import ingest as command
from ray_app.cli.ingest import ShownProgress
from ray_app.ingest.ingest import IngestOptions, ingest, run_in_threads
from ray_app.ingest.readers import sources
from ray_app.ingest.splits import write_input_split
from tests.support.ingest_inputs import read_columns


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_TERMINAL_S", 0.001)
    monkeypatch.setattr(command, "_LOG_S", 0.001)


def write_csv(path: Path, rows: int) -> Path:
    path.write_text("x,kind\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(rows)))
    return path


def wait_for(stream: io.StringIO, text: str) -> Callable[..., Generator[Any, None, None]]:
    """Returns a runner of tasks that goes on after the last task only when the stream has a text."""

    def run(function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any, None, None]:
        yield from run_in_threads(function, items)
        if function.__class__.__name__ == "partial" or text in stream.getvalue():
            return
        for _ in range(10_000):
            if text in stream.getvalue():
                return
            threading.Event().wait(0.001)
        pytest.fail(f"{text!r} is not in {stream.getvalue()!r}")

    return run


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("stream", "line"), [(Terminal(), "\r\x1b[2K{}"), (io.StringIO(), "{}")])
def test_the_rows_of_a_stage_are_shown_with_total_and_rate(tmp_path: Path, stream: io.StringIO, line: str) -> None:
    path = write_csv(tmp_path / "in.csv", 1000)
    expected = line.format("Reading rows: 1,000 of 1,000 (100%), ")
    ingest(
        IngestOptions("csv", str(tmp_path / "out"), str(path), label="kind"),
        ShownProgress(wait_for(stream, expected), stream),
    )
    assert expected in stream.getvalue()
    assert "rows/s" in stream.getvalue()
    assert len(read_columns(tmp_path / "out")["row_id"]) == 1000


@pytest.mark.parametrize(
    ("rows", "finished", "expected"),
    [
        (0, [], "Reading types and classes: 0 of 4 tasks, 10 s"),
        (500, [], "Reading types and classes: 500 rows, 0 of 4 tasks, 50 rows/s, 10 s"),
        (500, [{"rows": 700}], "Reading types and classes: 700 rows, 1 of 4 tasks, 70 rows/s, 30 s left"),
        (0, [None, None, None, None], "Reading types and classes: 4 of 4 tasks, 10 s"),
    ],
)
def test_without_a_total_the_finished_tasks_give_the_time_left(
    monkeypatch: pytest.MonkeyPatch, rows: int, finished: list[Any], expected: str
) -> None:
    """Tasks of other processes count by their results."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = command._Stage(len, range(4))
    sources.ROWS_READ.add(rows)
    for result in finished:
        stage.finish(result)
    now[0] = 110.0
    assert stage.line() == expected


def test_rows_of_an_earlier_ingest_count_and_took_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    split = SimpleNamespace(input_split=SimpleNamespace(rows=500))
    monkeypatch.setattr(command, "InputSplitTask", SimpleNamespace)
    stage = command._Stage(write_input_split, [split, split])
    sources.ROWS_READ.add(100, stored=500)
    now[0] = 110.0
    assert stage.line() == "Reading rows: 600 of 1,000 (60%), 10 rows/s, 40 s left"


def test_without_standard_error_nothing_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    path = write_csv(tmp_path / "in.csv", 10)
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(path)), ShownProgress(run_in_threads))
    assert summary.parts[""].rows == 10


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_stream_that_is_gone_ends_no_ingest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]
) -> None:
    """`isatty` of a closed file raises ValueError, and that of a terminal that is gone may still be True."""
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    stream = kind()
    stream.close()
    path = write_csv(tmp_path / "in.csv", 10)
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(path)), ShownProgress(run_in_threads, stream))
    assert summary.parts[""].rows == 10
    assert errors == []
