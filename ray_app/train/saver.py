"""Writing checkpoints behind the training: a copy at the step boundary, everything else in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ray_app.checkpoint.format import Snapshot, pack, params_digest
from ray_app.checkpoint.retention import skipped
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config import CheckpointSection
from ray_app.errors import CheckpointError
from ray_app.record.journal import put_event
from ray_app.record.paths import RunPaths

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.5


class Saver:
    """Commits snapshots one after the other; a failed write is retried, reported, and never stops training.

    Args:
        paths: The run.
        section: What to keep.
        best_steps: Says which steps are best so far.
        before_commit: Called with the checkpoint before each commit; what it raises counts as a failed write.
    """

    def __init__(
        self,
        paths: RunPaths,
        section: CheckpointSection,
        best_steps: Callable[[], list[int]],
        before_commit: Callable[[Commit], None] | None = None,
    ) -> None:
        self._paths, self._section, self._best_steps = paths, section, best_steps
        self._store = CheckpointStore(paths)
        self._before_commit = before_commit
        self._thread: threading.Thread | None = None
        self._failed: str | None = None
        self.stall_s: list[float] = []

    def save(self, take: Callable[[], Snapshot], commit: Commit) -> None:
        """Copies the state now and commits it in the background; waits if the previous one is still being written.

        Args:
            take: Makes the snapshot.
            commit: What is known of it; the parameters' digest is filled in.
        """
        began = time.perf_counter()
        self.wait()
        snapshot = take()
        self._thread = threading.Thread(target=self._write, args=(snapshot, commit), name="saver", daemon=True)
        self._thread.start()
        self.stall_s.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Waits for the last commit.

        Raises:
            CheckpointError: It failed, so the run's result is not on storage.
        """
        self.wait()
        if self._failed is not None:
            raise CheckpointError(f"The last checkpoint could not be written: {self._failed}. Free or repair the storage and start again.")

    def _write(self, snapshot: Snapshot, commit: Commit) -> None:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._write_once(snapshot, commit)
                self._failed = None
                return
            except Exception as error:
                self._failed = str(error)
                logger.warning("Checkpoint of step %d, attempt %d of %d failed: %s", commit.step, attempt, _ATTEMPTS, error)
                if attempt < _ATTEMPTS:
                    time.sleep(pause_s)
                    pause_s *= 2
        put_event(self._paths, "write_failed", commit.fence, step=commit.step, reason=self._failed)

    def _write_once(self, snapshot: Snapshot, commit: Commit) -> None:
        began = time.perf_counter()
        made = replace(commit, params_digest=params_digest(snapshot.model), time_s=time.time())
        if self._before_commit is not None:
            self._before_commit(made)
        self._store.write(pack(snapshot), made)
        duration_s = time.perf_counter() - began
        put_event(self._paths, "checkpointed", commit.fence, step=commit.step, why=commit.why, duration_s=duration_s)
        self._tidy(commit.fence)

    def _tidy(self, fence: int) -> None:
        """Removes what nobody needs; what goes wrong here is no failed write, and is tried again after the next."""
        try:
            holds = self._store.holds()
            gone = self._store.retain(self._section.keep_last, self._best_steps())
            for step in skipped(gone, holds, time.time()):
                put_event(self._paths, "evaluation_skipped", fence, step=step, reason="the evaluator lags too far behind")
        except Exception as error:
            logger.warning("Old checkpoints could not be removed, will try again: %s", error)
