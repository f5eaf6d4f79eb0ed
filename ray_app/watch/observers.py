"""Observers of a run: classes with methods that the driver calls on events (`Observer`).

Users write them. `Webhook` is an observer that posts the events to a chat or another program. Observers get their
facts from the run's record, in a thread of the driver, so that they never delay a step.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ray_app.errors import ConfigError
from ray_app.runlog.history import means
from ray_app.runlog.journal import Event, EventsReader, RecordReader, StepRecord, put_event
from ray_app.storage.files import poll_interval_s
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_FAILURES = ("failed", "preempted", "storage_failed")


class Observer:
    """Base class of observers; all methods do nothing. The driver calls them in a thread, some seconds after the event.

    An exception of an observer becomes an event of the run, `observer_failed`, and has no other effect.
    """

    def begun(self, run: str) -> None:
        """Is called when a start of the run begins, with the run's directory."""

    def epoch_ended(self, epoch: int, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Is called when an epoch has ended.

        Args:
            epoch: Number of the epoch, from 0.
            step: Finished steps of the run.
            metrics: `loss` and the task's own metrics, means over the epoch's training steps (of this start).
            seconds: The time of these steps.
        """

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Is called when the checkpoint of a step was evaluated."""

    def checkpointed(self, step: int) -> None:
        """Is called when the checkpoint of a step was committed."""

    def failed(self, reason: str) -> None:
        """Is called when a worker failed, a node went away, or the storage did not answer; the run may go on."""

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Is called when this start of the run has ended.

        Args:
            status: `finished`, `stopped_early`, `interrupted` or `failed`.
            summary: The content of `summary.json`.
        """


class Observers:
    """Reads the record of a run and calls its observers."""

    def __init__(self, job: Job, observers: Sequence[Observer]) -> None:
        self._job, self._observers = job, observers
        self._records, self._epoch = RecordReader(job.paths), list[StepRecord]()
        self._events, self._has_skipped_old = EventsReader(job.paths), False
        self._began_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reads the record in a thread while a start of the run lasts, and once more at its end."""
        if not self._observers:
            yield
            return
        self._began_s = time.time()
        # Events of earlier starts are skipped. If they cannot be read now, events are skipped by their time later.
        with suppress(Exception):
            self._events.read_new()
            self._has_skipped_old = True
            # The records of earlier starts are read without making them.
            for _ in self._records.read_tables():
                pass
        self._notify("begun", str(self._job.paths.root))
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), name="observers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.process_news()

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Calls the observers' `ended`."""
        self._notify("ended", status, summary)

    def _run(self, over: threading.Event) -> None:
        while not over.wait(max(1.0, poll_interval_s(self._job.paths.root))):
            self.process_news()

    def process_news(self) -> None:
        """Calls the observers with the new records and events; what cannot be read now is read the next time."""
        try:
            records = list(self._records.first_records())
            events = self._events.read_new()
            if not self._has_skipped_old:
                events = [event for event in events if event.time_s > self._began_s]
        except Exception as error:
            logger.warning("The record could not be read for observers, trying again: %s", error)
            return
        self._has_skipped_old = True
        for record in records:
            if record.time_s >= self._began_s:
                self._process_record(record)
        for event in events:
            self._process_event(event)

    def _process_record(self, record: StepRecord) -> None:
        self._epoch.append(record)
        if record.step % self._job.steps_per_epoch == 0:
            epoch, self._epoch = self._epoch, []
            seconds = sum(step.step_ms for step in epoch) / 1e3
            number = record.step // self._job.steps_per_epoch - 1
            self._notify("epoch_ended", number, record.step, means(epoch), seconds)

    def _process_event(self, event: Event) -> None:
        details = event.details
        if event.kind == "evaluated" and "by" not in details:
            self._notify("evaluated", details["step"], details["metrics"])
        elif event.kind == "checkpointed":
            self._notify("checkpointed", details["step"])
        elif event.kind in _FAILURES:
            self._notify("failed", str(details.get("errors") or details.get("reason") or event.kind))

    def _notify(self, method: str, *facts: Any) -> None:
        """Calls a method of all observers; records their exceptions as events."""
        for observer in self._observers:
            try:
                getattr(observer, method)(*facts)
            except Exception as error:
                logger.warning("Observer %s raised in %s: %s", type(observer).__name__, method, error)
                reason = f"{type(observer).__name__}.{method}: {type(error).__name__}: {error}"
                put_event(self._job.paths, "observer_failed", self._job.fence, reason=reason)


_TIMEOUT_S = 10.0


class Webhook(Observer):
    """Posts a line for each epoch, failure and end of a run as JSON.

    Slack, Mattermost and Teams understand the format, `{"text": ...}`.

    Args:
        url: Address of the webhook. It lets everyone post, so it is hidden as a secret is; by default it is the
            environment variable `RAY_APP_WEBHOOK_URL`, which keeps it out of the configuration.
    """

    def __init__(self, url: str | None = None) -> None:
        self.url, self.run = url or os.environ.get("RAY_APP_WEBHOOK_URL", ""), ""
        if not self.url:
            raise ConfigError("ray_app.Webhook has no address: pass url, or set RAY_APP_WEBHOOK_URL.")

    def post(self, text: str) -> None:
        """Sends a line, after the name of the run; raises OSError if the address does not accept it."""
        body = json.dumps({"text": f"{self.run}: {text}" if self.run else text}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()

    def begun(self, run: str) -> None:
        """Stores the name of the run for the lines."""
        self.run = run.rstrip("/").rpartition("/")[2]

    def epoch_ended(self, epoch: int, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Posts the metrics of the epoch."""
        del step, seconds
        self.post(f"epoch {epoch + 1}, {', '.join(f'{name} {value:.4f}' for name, value in metrics.items())}")

    def failed(self, reason: str) -> None:
        """Posts the reason of a failure; the run may go on."""
        self.post(f"a failure, {reason}")

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Posts the status of the run and its number of steps."""
        self.post(f"{status} after {summary['steps']} steps")
