"""Looking at runs again and again from outside: reads their files, asks nobody, and costs them nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray_app.errors import RayAppError
from ray_app.record.files import poll_s
from ray_app.record.paths import RunPaths
from ray_app.record.redact import redact
from ray_app.report.facts import Facts, FactsReader

logger = logging.getLogger(__name__)

_SHARE = 0.05
"""The part of the time that looking takes at most: what takes long, because a run has a million steps, is done less often."""


@dataclass(frozen=True)
class Sight:
    """What the newest look at a run found.

    Args:
        paths: The run.
        facts: None: it could not be read yet.
        error: Why the newest look failed; None if it did not.
        looked_s: When it ended, seconds since 1970 (UTC).
    """

    paths: RunPaths
    facts: Facts | None = None
    error: str | None = None
    looked_s: float = 0.0


class Looking:
    """Looks at some runs in a thread, until it is left.

    Args:
        runs: Which.
        every_s: Seconds between two looks, at least; not given: one, or as the storage likes it.
    """

    def __init__(self, runs: Sequence[RunPaths], every_s: float | None = None) -> None:
        self._readers = [FactsReader(paths) for paths in runs]
        self._every_s = every_s or max(1.0, *(poll_s(paths.root) for paths in runs))
        self._sights = [Sight(paths) for paths in runs]
        self._ended, self.changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="looking", daemon=True)

    def __enter__(self) -> Looking:
        """Looks once, and begins.

        Raises:
            ConfigError: Something is no run.
            OSError: The storage does not answer.
        """
        for number, reader in enumerate(self._readers):
            self._sights[number] = Sight(reader.paths, reader.read(), None, time.time())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def sights(self) -> list[Sight]:
        """The newest of each run."""
        return list(self._sights)

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            for number, reader in enumerate(self._readers):
                self._sights[number] = _look(reader, self._sights[number])
            pause_s = max(self._every_s, (time.monotonic() - began_s) / _SHARE)
            with self.changed:
                self.changed.notify_all()


def _look(reader: FactsReader, before: Sight) -> Sight:
    try:
        return Sight(reader.paths, reader.read(), None, time.time())
    except (RayAppError, OSError) as error:  # the storage is away, or a run was removed: what was seen stays
        logger.debug("%s could not be read: %s", reader.paths.root, error)
        return Sight(before.paths, before.facts, redact(f"{type(error).__name__}: {error}"), before.looked_s)
