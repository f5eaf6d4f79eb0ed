"""Writing checkpoints behind the training: a copy at the step boundary, everything else in a thread."""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ray_app.checkpoint.format import Snapshot, file_writers, params_digest
from ray_app.checkpoint.store import CheckpointStore, Commit, Hold, skipped_evaluations
from ray_app.config.sections import CheckpointSection
from ray_app.errors import CheckpointError, LeaseLostError
from ray_app.runlog.evaluations import evaluated_steps
from ray_app.runlog.journal import put_event
from ray_app.runlog.paths import RunPaths

logger = logging.getLogger(__name__)

_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.5
"""Doubles with each attempt: up to 16 s in all, besides what the storage takes to refuse. The next checkpoint waits as
long.
"""


class CheckpointWriter:
    """Commits snapshots one after the other; a failed write is retried, reported, and never stops training.

    A lost lease does: nothing is written any more, and the next call says so.

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
        self._lost: LeaseLostError | None = None
        self._abandoned: list[Commit] = []
        self._untold: list[tuple[str, int, dict[str, Any]]] = []
        self._skipped: set[tuple[int, str | None]] = set()
        self.stall_s: list[float] = []

    def save(self, take: Callable[[], Snapshot], commit: Commit) -> None:
        """Copies the state now and commits it in the background; waits if the previous one is still being written.

        Args:
            take: Makes the snapshot.
            commit: What is known of it; the parameters' digest is filled in.

        Raises:
            LeaseLostError: A later start of the driver has taken the run over.
        """
        began = time.perf_counter()
        self.wait()
        self.raise_if_lost()
        snapshot = take()
        self._thread = threading.Thread(target=self._write, args=(snapshot, commit), name="saver", daemon=True)
        self._thread.start()
        self.stall_s.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def raise_if_lost(self) -> None:
        """Looks at a variable, so it can be called after every step.

        Raises:
            LeaseLostError: The last write found that a later start of the driver has taken the run over.
        """
        if self._lost is not None:
            raise self._lost

    def check(self) -> None:
        """Waits for the last commit.

        Raises:
            CheckpointError: It failed, so the run's result is not on storage.
            LeaseLostError: A later start of the driver has taken the run over.
        """
        self.wait()
        self.raise_if_lost()
        if self._failed is not None:
            raise CheckpointError(
                f"The last checkpoint could not be written: {self._failed}. Free or repair the storage and start again."
            )

    def _write(self, snapshot: Snapshot, commit: Commit) -> None:
        reason: str | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._write_once(snapshot, commit)
                if reason is not None:
                    put_event(
                        self._paths, "write_retried", commit.fence, step=commit.step, attempts=attempt, reason=reason
                    )
                self._failed = None
                return
            except LeaseLostError as error:
                self._lost = error
                logger.error("Checkpoint of step %d is not written: %s", commit.step, error)
                return
            except Exception as error:
                self._failed = reason = f"{type(error).__name__}: {error}"
                logger.warning(
                    "Checkpoint of step %d, attempt %d of %d failed: %s", commit.step, attempt, _ATTEMPTS, reason
                )
                if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                    self._tidy(commit.fence)  # followers may need less by now
            if attempt < _ATTEMPTS:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
        self._abandoned.append(commit)
        self._untold.append(
            ("write_failed", commit.fence, {"step": commit.step, "attempts": _ATTEMPTS, "reason": reason})
        )
        self._tidy(commit.fence)

    def _write_once(self, snapshot: Snapshot, commit: Commit) -> None:
        began = time.perf_counter()
        made = replace(commit, params_digest=params_digest(snapshot.model), time_s=time.time())
        if self._before_commit is not None:
            self._before_commit(made)
        self._store.write(file_writers(snapshot), made)
        duration_s = time.perf_counter() - began
        put_event(self._paths, "checkpointed", commit.fence, step=commit.step, why=commit.why, duration_s=duration_s)
        self._tidy(commit.fence)

    def tell(self) -> None:
        """Records what could not be written or will not be evaluated, as soon as the storage takes that: early stopping
        waits for it.
        """
        while self._untold:
            kind, fence, details = self._untold[0]
            if not put_event(self._paths, kind, fence, **details):
                return
            self._untold.pop(0)

    def _skip(self, fence: int, holds: list[Hold], gone: list[int]) -> None:
        """Records which of the checkpoints that are about to go nobody has evaluated; once, also if they go
        later only.
        """
        for step, name in sorted(skipped_evaluations(gone, holds, time.time()) - self._skipped, key=lambda one: one[0]):
            if step not in evaluated_steps(self._paths, name):
                details = {"step": step, "reason": "the evaluator lags too far behind"} | ({"by": name} if name else {})
                self._untold.append(("evaluation_skipped", fence, details))
                self._skipped.add((step, name))
        self.tell()

    def _tidy(self, fence: int) -> None:
        """Removes what nobody needs or what failed writes left; what goes wrong here is no failed write, and is tried
        again later.
        """
        self.tell()
        try:
            while self._abandoned:
                self._store.discard(self._abandoned[-1])
                self._abandoned.pop()
            holds = (
                self._store.holds()
            )  # before the best steps: what is evaluated and let go meanwhile is in one of the two
            self._store.retain(self._section.keep_last, self._best_steps(), holds, partial(self._skip, fence, holds))
        except Exception as error:
            logger.warning("Old checkpoints could not be removed, will try again: %s", error)
