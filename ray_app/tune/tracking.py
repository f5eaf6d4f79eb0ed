"""A study in MLflow: a run of its own, with the run of each trial as a child that is named by its settings.

A thread of the study's driver sends trials when they have ended a rung, so that no trial waits for MLflow. A trial that
MLflow does not take is sent again at the end of the study, and by the next start if MLflow has nothing of it.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from ray_app.config.config import Config, default_tracking_uri
from ray_app.driver.trained_run import send_to_mlflow
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.track.mlflow_client import MlflowRun, OpenRun, Point
from ray_app.track.tracker import artifact_folder
from ray_app.tune.record import StudyPaths, StudyRecord, settings_text

logger = logging.getLogger(__name__)

_END_S = 120.0
"""Seconds that MLflow has at the end of a study to take what is not sent yet."""


class StudyTracker:
    """Sends the trials of a study to MLflow, in a thread; the caller says when a trial has ended a rung.

    Args:
        config: The configuration that the trials have in common.
        paths: The paths of the study.
        record: The record of the study.
    """

    def __init__(self, config: Config, paths: StudyPaths, record: StudyRecord) -> None:
        self._config, self._paths = config, paths
        self._record, self._uri = record, default_tracking_uri(config)
        folder = artifact_folder(RunPaths(paths.root), self._uri)
        self._parent = MlflowRun(self._uri, config.tracking.experiment, folder, OpenRun.find(self._uri))
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._waiting = list[int]()
        self._refused = set[int]()
        self._sending: int | None = None
        self._is_closed, self._last_error = False, ""
        # What an earlier start has not sent.
        newest = record.newest_results()
        self._waiting += [trial for trial in sorted(newest) if not paths.runs(trial, record.folds)[0].tracking.exists()]
        self._thread = threading.Thread(target=self._run, name="study tracker", daemon=True)
        self._thread.start()

    def put(self, trial: int) -> None:
        """Lets the thread send a trial that does not train now."""
        with self._lock:
            self._waiting.append(trial)
        self._wake.set()

    def take_back(self, trial: int) -> bool:
        """Returns whether a trial may train: it is not being sent, and will not be until it is put again."""
        with self._lock:
            self._waiting = [other for other in self._waiting if other != trial]
            return self._sending != trial

    def close(self) -> None:
        """Sends what is left and the result of the study; a warning says what MLflow lacks."""
        with self._lock:
            self._waiting += sorted(self._refused)
        self._last_error, self._is_closed = "", True
        self._wake.set()
        self._thread.join(_END_S)
        if self._last_error or self._thread.is_alive():
            logger.warning(
                "MLflow at %s lacks trials of the study (%s); starting the study again sends them.",
                *(redact(self._uri), self._last_error or "it was too slow"),
            )

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                self._sending = self._waiting.pop(0) if self._waiting else None
            try:
                if self._sending is not None:
                    self._send(self._sending)
                elif self._is_closed:
                    return self._send_end()
                else:
                    self._wake.wait()
            # MLflow raises many types of errors.
            except Exception as error:
                self._last_error = redact(f"{type(error).__name__}: {error}").splitlines()[0]
                if self._sending is not None:
                    self._refused.add(self._sending)
                elif self._is_closed:
                    return None

    def _open(self) -> OpenRun:
        """Opens the MLflow run of the study, which the record's next version names."""
        uuid = f"study {self._paths.root}"
        run_id = self._parent.open(self._record.mlflow_run_id, uuid, self._paths.root, int(time.time() * 1e3))
        if run_id != self._record.mlflow_run_id:
            self._record.mlflow_run_id = run_id
            self._parent.describe(self._record.identity, {"ray_app.study": str(self._paths.root)}, [], is_over=False)
        return OpenRun(parent_id=run_id)

    def _send(self, trial: int) -> None:
        parent, settings = self._open(), settings_text(self._record.trials[trial])
        for paths in self._paths.runs(trial, self._record.folds):
            # A trial with refused settings has no run.
            if paths.config.exists():
                open_run = OpenRun(parent_id=parent.parent_id, name=f"{paths.name} {settings}"[:250])
                send_to_mlflow(str(paths.root), self._uri, self._parent.experiment, open_run)

    def _send_end(self) -> None:
        """Sends the result of the study, with its report."""
        self._open()
        end, record = self._record.end or {}, self._record
        metrics = {f"best_{record.metric}": end["value"], "trials": float(len(record.trials))} if end else {}
        if end.get("report") is not None:
            metrics[f"report_{record.metric}"] = end["report"]
        self._parent.log([Point(0, int(time.time() * 1e3), metrics)])
        report = self._paths.report
        artifacts = {report.name: report.read_text()} if isinstance(report, Path) and report.exists() else {}
        self._parent.finish("FINISHED" if end else "KILLED", artifacts)
