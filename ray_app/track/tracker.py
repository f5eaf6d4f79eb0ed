"""Threads in the driver that send a run's record to MLflow (`Tracker`) and to TensorBoard (`EventFileWriter`).

Neither ever delays a step: they read the files that rank 0 and the evaluator write. MLflow and TensorBoard get the same
points.

`Tracker` sends the record whenever MLflow answers, and is the only writer of the MLflow run. `tracking.json` has the
last point that was sent, so that the next driver continues there. Points that were sent but not stored there are sent
again; since the record does not change, MLflow's SQL stores recognize and drop them. A loss of NaN arrives as NaN; a
SQL store shows infinity as 1.8e308.

The event file of TensorBoard is a function of the record, so it need not survive the death of a driver. The next driver
empties the old file and writes all points from the beginning, each once, to a new file. The first entry of the new file
makes an open TensorBoard drop the old points of the run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from ray_app.config.config import Config, default_tracking_uri, digest, flatten
from ray_app.config.import_paths import require
from ray_app.errors import ConfigError
from ray_app.runlog.evaluations import evaluated_steps, evaluator_names
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact, redact_value, redact_yaml
from ray_app.storage.files import list_tree, poll_interval_s, poll_pause_s, put_atomic
from ray_app.track.mlflow_client import (
    METRICS_PER_CALL,
    Backlog,
    DataSet,
    MlflowRun,
    OpenRun,
    Point,
    SentState,
    TrackingState,
    sqlite_file,
)

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]

_RETRY_S = 0.5

_EVENT_FILE_PREFIX = "events.out.tfevents."

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_LIBRARIES = ("torch", "ray", "mlflow")
_MAX_TAG = 5000
"""The maximum number of characters of a tag in MLflow's SQL stores."""


class _Sender(ABC):
    """A thread that sends a run's record to `receiver` while it grows; `busy_s` is the duration of a look at it."""

    receiver: str
    poll_s, longest_pause_s = 0.5, 10.0
    busy_s = 0.0

    def __init__(self, paths: RunPaths, config: Config) -> None:
        self._paths, self._config = paths, config
        self._status: Status | None = None
        self._is_complete = False
        self._last_error: str | None = None
        self._wake, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def close(self, status: Status, timeout_s: float) -> bool:
        """Sends the rest of a complete record and ends the thread; returns whether all was sent.

        If not, a warning names what is missing; the next start of the run sends it. A second call returns the same.

        Args:
            status: Final status of the run. With `FINISHED` the last block of steps is sent although it is not full;
                otherwise a resume will fill it.
            timeout_s: Seconds to wait.
        """
        if self._status is None:
            self._status = status
            if self._thread.ident is None:
                self._thread.start()
            self._wake.set()
            self._thread.join(timeout_s)
            self.abandon()
            if not self._is_complete:
                logger.warning("%s", self._describe_missing(status, timeout_s))
        return self._is_complete

    def abandon(self) -> None:
        """Ends the thread without further calls and writes: the run belongs to another driver now."""
        self._abandoned.set()
        self._wake.set()

    def _run(self) -> None:
        pause_s = self.poll_s
        while not self._abandoned.is_set():
            self._wake.clear()
            status = self._status
            try:
                self._sweep(finished=status == "FINISHED")
                if status is not None and not self._abandoned.is_set():
                    self._finish(status)
                    self._is_complete = True
                    break
                if self._last_error is not None:
                    logger.warning("%s accepts the record again.", self.receiver)
                self._last_error = None
                pause_s = min(poll_pause_s(self.poll_s, self.busy_s), self.longest_pause_s)
            except Exception as error:
                self._warn(error)
                self._reset()
                pause_s = _RETRY_S if status is not None else min(2 * pause_s, self.longest_pause_s)
            self._wake.wait(pause_s)

    def _warn(self, error: Exception) -> None:
        """Logs the first of several errors in a row."""
        if self._last_error is None:
            logger.warning(
                "%s does not accept the record now; training continues, and the record is sent later: %s",
                self.receiver,
                _first_line(error),
            )
        self._last_error = _first_line(error)

    @abstractmethod
    def _sweep(self, finished: bool) -> None: ...

    def _finish(self, status: Status) -> None:
        """Sends what belongs to the end of the run."""
        del status

    @abstractmethod
    def _reset(self) -> None: ...

    @abstractmethod
    def _describe_missing(self, status: Status, timeout_s: float) -> str: ...


class Tracker(_Sender):
    """Sends a run's record to MLflow while it is written, with the points that an earlier driver has not sent.

    Args:
        tags: Tags of the MLflow run, see `make_run_tags`.
        every_steps: Number of steps that are combined into one point.
        is_over: Whether the run has ended and only points that MLflow lacks are sent: parameters and tags stay.
        say: Called once with a message that names the MLflow run.
        open_run: The MLflow run in which a new one is recorded.
    """

    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        tags: dict[str, str],
        every_steps: int = 10,
        datasets: Sequence[DataSet] = (),
        is_over: bool = False,
        say: Callable[[str], None] | None = None,
        open_run: OpenRun = OpenRun(),
    ) -> None:
        super().__init__(paths, config)
        self._tags = tags
        self._datasets = datasets
        self._is_over = is_over
        self.uri, self._on_connect = default_tracking_uri(config), say
        self.receiver = f"MLflow at {redact(self.uri)}"
        self._mlflow = MlflowRun(self.uri, config.tracking.experiment, artifact_folder(paths, self.uri), open_run)
        self._backlog = Backlog(paths, every_steps, config.run.first_step)
        self._cursor: TrackingState | None = None
        self._connected = False
        self._start_ms = int(time.time() * 1e3)
        self.sent_points = self.sent_evaluations = 0

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until MLflow has answered, which takes a second or two if it can be reached."""
        return self._cursor.run_id if self._cursor is not None else None

    def send_all(self, status: Status) -> None:
        """Sends the record and the artifacts of a run that has ended, in this thread; `start` is not needed.

        It raises the errors of MLflow; points that it has accepted before are not sent again.
        """
        self._sweep(finished=status == "FINISHED")
        self._finish(status)

    def _finish(self, status: Status) -> None:
        self._mlflow.finish(status, _read_artifacts(self._paths))

    def _sweep(self, finished: bool) -> None:
        """Reads the new part of the record and sends all complete points."""
        cursor = self._cursor = self._cursor or TrackingState.load(self._paths)
        began = time.perf_counter()
        self._backlog.read(cursor)
        self.busy_s = time.perf_counter() - began
        if not self._connected:
            self._connect(cursor)
        for points in group_points(self._backlog.points(cursor, finished)):
            if self._abandoned.is_set():
                return
            self._mlflow.log(points)
            for point in points:
                cursor.add(point)
                self.sent_points += 1
                self.sent_evaluations += point.evaluator is not None
            cursor.store(self._paths)
            self._backlog.sent(cursor)

    def _connect(self, cursor: TrackingState) -> None:
        """Finds or creates the MLflow run, and stores its id before anything else is logged."""
        old_run_id = cursor.run_id
        run_id = self._mlflow.open(old_run_id, cursor.run_uuid, self._paths.root, self._start_ms)
        if run_id != old_run_id:
            if old_run_id is not None:
                logger.warning("%s lacks the run %s: the record goes to a new one.", self.receiver, old_run_id)
                cursor.forget()
                self._backlog.rewind()
            cursor.run_id = run_id
            self._backlog.read(cursor)
        if (old_run_id, cursor.uri) != (run_id, redact(self.uri)):
            cursor.uri = redact(self.uri)
            cursor.store(self._paths)
        self._mlflow.describe(flatten(redact_value(self._config.to_dict())), self._tags, self._datasets, self._is_over)
        self._connected = True
        if self._on_connect is not None:
            self._on_connect(
                redact(f"MLflow run {run_id} of the experiment {self._mlflow.experiment}: {self._mlflow.page}")
            )
            self._on_connect = None

    def _reset(self) -> None:
        self._connected = False

    def _describe_missing(self, status: Status, timeout_s: float) -> str:
        cursor = self._cursor or TrackingState()
        steps = sorted({point.step for point in self._backlog.unsent_evaluations(cursor)})
        missing = [f"its status {status}", "its artifacts"]
        if self._backlog.newest_step > cursor.sent_step:
            missing.append(f"the metrics after step {cursor.sent_step} (recorded: up to {self._backlog.newest_step})")
        if steps:
            missing.append(f"the evaluations of the steps {', '.join(map(str, steps))}")
        return (
            f"{self.receiver} did not accept the whole record within {timeout_s:g} s. Its run"
            f" {cursor.run_id or '(not created)'} may lack {'; '.join(missing)}. The whole record is in"
            f" {self._paths.root}; send it with\n  ray-app track --replay"
            f" {shlex.quote(str(self._paths.root))}\nor start {self._paths.name!r} again. Last error:"
            f" {self._last_error or 'none, it was still being sent'}"
        )


def check_available(config: Config) -> None:
    """Checks that tracking can work, without importing MLflow or connecting to it.

    Raises:
        ConfigError: MLflow is not installed, or `tracking.uri` names a store that would keep a point twice if it is
            sent twice.
    """
    if not config.tracking.enabled:
        return
    require("mlflow", "tracking.enabled: true", "set tracking.enabled to false")
    uri = default_tracking_uri(config)
    scheme, host = urlsplit(uri).scheme.partition("+")[0], urlsplit(uri).hostname
    name = "tracking.uri" if config.tracking.uri or not os.environ.get("MLFLOW_TRACKING_URI") else "MLFLOW_TRACKING_URI"
    subject = f"{name} is {redact(uri)!r}"
    valid = (
        "the URI must be an MLflow server (http://host:5000, https://...) or a database (sqlite:////folder/mlflow.db,"
        " postgresql, mysql, mssql)."
    )
    if scheme not in ("http", "https", *_DATABASES):
        raise ConfigError(
            f"{subject}; {valid} (In a folder, which MLflow no longer supports, a point that is sent twice would be"
            " stored twice.) The default is a SQLite file in run.storage_path. tracking.uri takes precedence over"
            " MLFLOW_TRACKING_URI, and tracking.enabled: false records nothing in MLflow."
        )
    if (scheme == "sqlite" and not sqlite_file(uri)) or (scheme.startswith("http") and not host):
        raise ConfigError(f"{subject}, which names no {'file' if scheme == 'sqlite' else 'host'}; {valid}")
    if scheme in _DATABASES and importlib.util.find_spec("sqlalchemy") is None:
        raise ConfigError(f"{subject}, which needs the complete mlflow, not mlflow-skinny: pip install mlflow.")


def make_run_tags(paths: RunPaths, config: Config, manifest_digest: str) -> dict[str, str]:
    """Returns what the result depends on besides parameters: digests, versions, and the commit of a git checkout.

    Of a branch there are also the other run and the changed fields.
    """
    tags = {
        "ray_app.config_digest": digest(config, manifest_digest),
        "ray_app.manifest_digest": manifest_digest,
        "ray_app.version.python": platform.python_version(),
    }
    for event in read_events(paths, "branched")[-1:] if config.run.branch_from is not None else ():
        changed = [f"{name}: {then} -> {now}" for name, (then, now) in event.details["changed"].items()]
        tags["ray_app.branch_from"] = f"{event.details['source']}@step-{event.details['step']}"
        tags["ray_app.branch_changes"] = "; ".join(changed)[:_MAX_TAG]
    for library in _LIBRARIES:
        try:
            tags[f"ray_app.version.{library}"] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return tags
    return tags | ({"mlflow.source.git.commit": git.stdout.strip()} if git.returncode == 0 else {})


def group_points(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yields the points in groups that fit into one call; a point that is too large for one call is its own group."""
    group: list[Point] = []
    for point in points:
        if group and sum(len(p.metrics) for p in (*group, point)) > METRICS_PER_CALL:
            yield group
            group = []
        group.append(point)
    if group:
        yield group


def _read_artifacts(paths: RunPaths) -> dict[str, str]:
    """Returns the texts to store of an ended run, without secrets, by their paths, with the newest evaluations."""
    texts = {file.name: file.read_text() for file in (paths.config, paths.summary, paths.report) if file.exists()}
    if paths.config.name in texts:
        texts[paths.config.name] = redact_yaml(texts[paths.config.name])
    for name in (None, *evaluator_names(paths)):
        if steps := evaluated_steps(paths, name):
            file = paths.evaluation(max(steps), name)
            texts["/".join(filter(None, ("evaluations", name, file.name)))] = file.read_text()
    return texts


def artifact_folder(paths: RunPaths, uri: str) -> Path | None:
    """Returns the folder for the artifacts of an MLflow without a server: next to the run, or next to the SQLite file.

    If the run is in a bucket, it is next to the SQLite file; None if MLflow has no SQLite file either.
    """
    if isinstance(paths.root, Path):
        return paths.root.resolve().parent / "mlartifacts"
    return Path(sqlite_file(uri)).resolve().parent / "mlartifacts" if uri.startswith("sqlite") else None


def _first_line(error: Exception) -> str:
    return redact(f"{type(error).__name__}: {error}").splitlines()[0][:500]


class EventFileWriter(_Sender):
    """Writes the event files of a run while its record grows."""

    receiver = "The event file of TensorBoard"
    longest_pause_s = 60.0

    def __init__(self, paths: RunPaths, config: Config) -> None:
        super().__init__(paths, config)
        self.poll_s = poll_interval_s(paths.root)
        self._temporary = (
            None if isinstance(paths.root, Path) else tempfile.TemporaryDirectory(prefix="ray_app-tensorboard-")
        )
        self._folder = Path(self._temporary.name) if self._temporary is not None else Path(str(paths.tensorboard))
        self._writer: EventsWriter | None = None
        self._put_bytes = 0
        self._reset()

    def _sweep(self, finished: bool) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        began_s = time.perf_counter()
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
        self.busy_s = time.perf_counter() - began_s

    def _open_writer(self) -> EventsWriter:
        """Empties the run's event files and opens a new one.

        `SummaryWriter` would write in a thread of its own, which ends at an error and which `flush` does not wait for.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        for name, file in list_tree(self._paths.tensorboard).items():
            if name.startswith(_EVENT_FILE_PREFIX):
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
        self._close()
        every_steps, first_step = self._config.tracking.every_steps, self._config.run.first_step
        self._backlog, self._sent = Backlog(self._paths, every_steps, first_step), SentState()

    def _run(self) -> None:
        super()._run()
        self._close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _describe_missing(self, status: Status, timeout_s: float) -> str:
        del status, timeout_s
        return (
            f"The event files of TensorBoard lack the end of the run; starting {self._paths.name!r} again writes them."
        )

    def _close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._warn(error)
        self._writer = None
