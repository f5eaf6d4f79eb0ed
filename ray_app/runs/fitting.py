"""Ray Train's work in a thread; the main thread is for signals and the console."""

from __future__ import annotations

import threading

from ray_app.cluster.trainer import Start, fit
from ray_app.errors import own_error
from ray_app.runs.cluster import reserved_cpus

_GIVE_UP_S = 15.0


class Fitting(threading.Thread):
    """Trains while its context lasts; who leaves that earlier has given the run up, and its workers are ended.

    Args:
        start: See `fit`.
        max_workers: Likewise.

    Attributes:
        error: What ended the run, if anything did.
    """

    def __init__(self, start: Start, max_workers: int) -> None:
        super().__init__(name="fit", daemon=True)
        self._passed, self._max_workers = start, max_workers
        self._given_up = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """See `fit`."""
        try:
            fit(self._passed, self._max_workers, reserved_cpus(self._passed.job.config), self._given_up)
        except BaseException as error:  # shown and raised by the main thread
            if not self._given_up.is_set():
                self.error = own_error(error)

    def __enter__(self) -> Fitting:
        """Begins."""
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Waits until the workers are gone, which they are if it has ended. What ended it explains what the other thread then met."""
        self._given_up.set()
        self.join(_GIVE_UP_S)
        if isinstance(error, Exception) and self.error is not None:
            raise self.error from error
