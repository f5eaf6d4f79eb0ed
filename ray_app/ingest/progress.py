"""The progress of an ingest for the user: what is done now, how much of it is finished, its rate and the time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import IO, Any

from ray_app.ingest.readers import base
from ray_app.ingest.shuffle import BucketTask
from ray_app.ingest.splits import InputSplitTask

_TERMINAL_S, _LOG_S = 0.5, 15.0
"""Seconds between two updates, on a terminal and elsewhere."""


class ShownProgress:
    """Runs the tasks of an ingest by `run`, and shows the progress of each of its stages.

    A terminal has a line that changes in place. Elsewhere a line is written every `_LOG_S` seconds.

    Args:
        run: What runs the tasks. Rows of unfinished tasks count, too, if these run in this process.
        stream: Where to; a stream that cannot be written to ends no ingest.
    """

    def __init__(self, run: base.Run, stream: IO[str] | None = None) -> None:
        self._run = run
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()

    def __call__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any, None, None]:
        """Calls `function` with every item; see `base.Run`."""
        stage = _Stage(items)
        ended = threading.Event()
        thread = threading.Thread(target=self._show, args=(stage, ended), name="ingest-progress", daemon=True)
        thread.start()
        try:
            with closing(self._run(function, items)) as results:
                for result in results:
                    stage.finish(result)
                    yield result
        finally:
            ended.set()
            thread.join()

    def _show(self, stage: _Stage, ended: threading.Event) -> None:
        while not ended.wait(_TERMINAL_S if self._is_terminal else _LOG_S):
            self._write(f"\r\x1b[2K{stage.line()}" if self._is_terminal else f"{stage.line()}\n")
        if self._is_terminal:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal or the disk of a log is gone; the ingest does not need it.
            self._is_terminal = False


class _Stage:
    """The progress of one call of the tasks: a pass that learns types, the writing of rows, or their shuffle."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items, self._finished, self._rows_finished = len(items), 0, 0
        self._total: int | None = None
        self._name = "Reading types and classes"
        if items and isinstance(items[0], InputSplitTask):
            self._name, rows = "Reading rows", [task.input_split.rows for task in items]
            self._total = sum(count for count in rows if count is not None) if None not in rows else None
        elif items and isinstance(items[0], BucketTask):
            self._name = "Shuffling and writing rows"
        self._rows_before, self._start = base.ROWS_READ.value, time.monotonic()

    def finish(self, result: Any) -> None:
        """Counts a finished task by its result."""
        self._finished += 1
        if isinstance(result, dict) and "rows" in result:
            self._rows_finished += result["rows"]

    def line(self) -> str:
        """Returns the progress, such as `Reading rows: 1,000 of 4,000 (25 %), 500 rows/s, 6 s left`."""
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        # The rows of tasks in other processes are known once the tasks are finished.
        rows = max(base.ROWS_READ.value - self._rows_before, self._rows_finished)
        part = rows / self._total if self._total else self._finished / max(self._items, 1)
        texts = []
        if self._total:
            texts.append(f"{rows:,} of {self._total:,} ({part:.0%})")
        else:
            texts += [f"{rows:,} rows"] * bool(rows) + [f"{self._finished} of {self._items} tasks"] * (self._items > 1)
        if rows:
            texts.append(f"{rows / elapsed_s:,.0f} rows/s")
        texts.append(f"{elapsed_s * (1 - part) / part:.0f} s left" if 0 < part < 1 else f"{elapsed_s:.0f} s")
        return f"{self._name}: {', '.join(texts)}"
