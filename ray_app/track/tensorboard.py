"""TensorBoard event files (`EventFileWriter`): a thread in the driver writes the points of a run's record.

MLflow gets the same points. The file is a function of the record, so it need not survive the death of a driver. The
next driver empties the old file and writes all points from the beginning, each once, to a new file. The first entry of
the new file makes an open TensorBoard drop the old points of the run.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ray_app.config.config import Config
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact, redact_yaml
from ray_app.storage.files import list_tree, poll_interval_s, put_atomic
from ray_app.track.mlflow_client import Backlog, SentState

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

logger = logging.getLogger(__name__)

_PREFIX = "events.out.tfevents."
_RETRY_S, _LONGEST_PAUSE_S = 0.5, 60.0
_PAUSE_PER_SWEEP = 20
"""Pause after a sweep, in durations of the sweep, so that sweeps take at most a twentieth of the time.

A sweep reads the record and, in a bucket, uploads the whole file again.
"""


class EventFileWriter:
    """Writes the event files of a run while its record grows."""

    def __init__(self, paths: RunPaths, config: Config) -> None:
        self._paths, self._config = paths, config
        self._temporary = (
            None if isinstance(paths.root, Path) else tempfile.TemporaryDirectory(prefix="ray_app-tensorboard-")
        )
        self._folder = Path(self._temporary.name) if self._temporary is not None else Path(str(paths.tensorboard))
        self._writer: EventsWriter | None = None
        self._put_bytes = 0
        self._reset()
        self._finished: bool | None = None
        self._is_complete = self._has_warned = False
        self._wake, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def close(self, finished: bool, timeout_s: float) -> bool:
        """Writes the rest of a complete record and ends the thread; returns whether everything was written.

        With `finished` it writes the last block of steps although it is not full. If the storage takes longer than the
        timeout, a warning is logged.
        """
        self._finished = finished
        self._wake.set()
        self._thread.join(timeout_s)
        self.abandon()
        if not self._is_complete:
            logger.warning(
                "The event files of TensorBoard lack the end of the run; starting %r again writes them.",
                self._paths.name,
            )
        return self._is_complete

    def abandon(self) -> None:
        """Ends the thread without further writes: the run belongs to another driver now."""
        self._abandoned.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._abandoned.is_set():
            self._wake.clear()
            finished, began_s = self._finished, time.perf_counter()
            try:
                self._sweep(finished is True)
                self._has_warned = False
                if finished is not None:
                    self._is_complete = True
                    break
            except Exception as error:
                self._warn_once(error)
                self._close()
                self._reset()
            pause_s = max(poll_interval_s(self._paths.root), _PAUSE_PER_SWEEP * (time.perf_counter() - began_s))
            self._wake.wait(_RETRY_S if finished is not None else min(pause_s, _LONGEST_PAUSE_S))
        self._close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _sweep(self, finished: bool) -> None:
        """Writes the new points of the record."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._backlog.read(self._sent)
        if self._writer is None:
            self._writer = self._open_writer()
        for point in self._backlog.points(self._sent, finished):
            if self._abandoned.is_set():
                return
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.metrics.items()]
            self._writer.write_event(
                Event(wall_time=point.time_ms / 1e3, step=point.step, summary=Summary(value=values))
            )
            self._sent.add(point)
        self._backlog.sent(self._sent)
        self._writer.flush()
        if self._temporary is not None:
            self._upload()

    def _open_writer(self) -> EventsWriter:
        """Empties the run's event files and opens a new one.

        `SummaryWriter` would write in a thread of its own, which ends at an error and which `flush` does not wait for.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        for name, file in list_tree(self._paths.tensorboard).items():
            if name.startswith(_PREFIX):
                # An open TensorBoard that reads the file would never continue with the next one if it were removed.
                put_atomic(file, b"")
        if self._temporary is not None:
            self._put_bytes = 0
            for leftover in self._folder.iterdir():
                leftover.unlink()
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, which begin with the time in whole seconds.
        writer = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
        config = "".join(f"    {line}\n" for line in redact_yaml(self._config.to_yaml()).splitlines())
        writer.write_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        writer.write_event(Event(wall_time=time.time(), step=0, summary=text("config", config)))
        return writer

    def _upload(self) -> None:
        """Uploads the file to the run's storage if it has grown."""
        [file] = self._folder.iterdir()
        if file.stat().st_size > self._put_bytes:
            data = file.read_bytes()
            put_atomic(self._paths.tensorboard / file.name, data)
            self._put_bytes = len(data)

    def _reset(self) -> None:
        """Starts from the beginning of the record."""
        self._backlog, self._sent = Backlog(self._paths, self._config.tracking.every_steps), SentState()

    def _close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._warn_once(error)
        self._writer = None

    def _warn_once(self, error: Exception) -> None:
        """Logs the first of several errors in a row."""
        if not self._has_warned:
            logger.warning(
                "The event files of TensorBoard cannot be written for now; training goes on: %s", redact(str(error))
            )
        self._has_warned = True
