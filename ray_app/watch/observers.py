"""Observers of a run: classes of the user's that the driver tells what happens. They see the record, and never hold up
a step.

An observer that posts what happens to a chat or another program.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ray_app.runlog.history import means
from ray_app.runlog.journal import Event, EventsReader, FirstRecords, StepRecord, put_event
from ray_app.storage.files import poll_interval_s
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_FAILURES = ("failed", "preempted", "storage_failed")


class Observer:
    """To be derived from; every method does nothing. It is called in a thread of the driver, some seconds after what it
    tells happened.

    What it raises becomes an event of the run, `observer_failed`, and nothing else.
    """

    def begun(self, run: str) -> None:
        """A start of the run, whose directory that is, begins."""

    def epoch_ended(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """An epoch, counted from 0, has ended.

        Args:
            epoch: Which.
            step: Finished steps of the run.
            metrics: `loss` and the task's own metrics, means over the epoch's training steps (of this start).
        """

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """The checkpoint of a step was evaluated."""

    def checkpointed(self, step: int) -> None:
        """A checkpoint was committed."""

    def failed(self, reason: str) -> None:
        """A worker failed, a node went away, or the storage did not answer; the run may go on."""

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """This start of the run has ended.

        Args:
            status: `finished`, `stopped_early`, `interrupted` or `failed`.
            summary: What stands in `summary.json`.
        """


class Observers:
    """Tells observers what the record of a run says.

    Args:
        job: The run.
        observers: Who is told.
    """

    def __init__(self, job: Job, observers: Sequence[Observer]) -> None:
        self._job, self._observers = job, observers
        self._records, self._epoch = FirstRecords(job.paths), list[StepRecord]()
        self._events, self._knows_before = EventsReader(job.paths), False
        self._began = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The time of a start; a thread looks at the record meanwhile, and once more at the end."""
        if not self._observers:
            yield
            return
        self._began = time.time()
        with suppress(Exception):  # then what is older than this counts as known
            self._events.read_new()  # what was there before this start is no news
            self._knows_before = True
        self._tell("begun", str(self._job.paths.root))
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), name="observers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._look()

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Tells them that the run has ended."""
        self._tell("ended", status, summary)

    def _run(self, over: threading.Event) -> None:
        while not over.wait(max(1.0, poll_interval_s(self._job.paths.root))):
            self._look()

    def _look(self) -> None:
        """Tells what is new; what cannot be read now is told later."""
        try:
            steps = list(self._records.poll())
            events = [event for event in self._events.read_new() if self._knows_before or event.time_s > self._began]
        except Exception as error:
            logger.warning("The record could not be read for observers, will try again: %s", error)
            return
        self._knows_before = True
        for record in steps:
            if record.time_s >= self._began:
                self._step(record)
        for event in events:
            self._event(event)

    def _step(self, record: StepRecord) -> None:
        self._epoch.append(record)
        if record.step % self._job.steps_per_epoch == 0:
            epoch, self._epoch = self._epoch, []
            self._tell("epoch_ended", record.step // self._job.steps_per_epoch - 1, record.step, means(epoch))

    def _event(self, event: Event) -> None:
        details = event.details
        if event.kind == "evaluated" and "by" not in details:
            self._tell("evaluated", details["step"], details["metrics"])
        elif event.kind == "checkpointed":
            self._tell("checkpointed", details["step"])
        elif event.kind in _FAILURES:
            self._tell("failed", str(details.get("errors") or details.get("reason") or event.kind))

    def _tell(self, what: str, *facts: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, what)(*facts)
            except Exception as error:
                logger.warning("Observer %s raised in %s: %s", type(observer).__name__, what, error)
                said = f"{type(observer).__name__}.{what}: {type(error).__name__}: {error}"
                put_event(self._job.paths, "observer_failed", self._job.fence, reason=said)


_TIMEOUT_S = 10.0


class Webhook(Observer):
    """Posts a line for each epoch, failure and end of a run as JSON, `{"text": ...}`, which Slack, Mattermost and Teams
    understand.

    Args:
        url: Where to.
    """

    def __init__(self, url: str) -> None:
        self.url, self.run = url, ""

    def post(self, text: str) -> None:
        """Sends a line, with the name of the run before it.

        Raises:
            OSError: It did not arrive.
        """
        body = json.dumps({"text": f"{self.run}: {text}" if self.run else text}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()

    def begun(self, run: str) -> None:
        """Remembers the name of the run."""
        self.run = run.rstrip("/").rpartition("/")[2]

    def epoch_ended(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """Posts the metrics of the epoch."""
        del step
        self.post(f"epoch {epoch + 1}, {', '.join(f'{name} {value:.4f}' for name, value in metrics.items())}")

    def failed(self, reason: str) -> None:
        """Posts what failed; the run may go on."""
        self.post(f"a failure, {reason}")

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Posts how the run ended."""
        self.post(f"{status} after {summary['steps']} steps")
