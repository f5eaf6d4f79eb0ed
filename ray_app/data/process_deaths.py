"""Ray tasks whose process or node may be lost. A lost node is no fault of the task; a process that dies three times
died of what it does.

Ray treats both alike, and Ray Data starts such a task again without end: a row whose decoding ends the process (a
segmentation fault in a C library, more memory than there is) would be read again and again, and the run would wait for
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import ray

from ray_app.errors import ProcessDiedError, unwrap_app_error

MAX_DEATHS = 3
"""Times that a process may die of the same task."""


_PROCESS = (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.ActorDiedError)


_NODE_DIED = "its node has died"
"""What Ray says of an actor, whose error has no class of its own for it."""


_NODE = (ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError, ray.exceptions.ActorUnavailableError)


def classify_loss(error: BaseException) -> Literal["process", "node"] | None:
    """What an error of a task, or of what waits for one, says was lost; None if the task itself raised it."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or current in seen:
            continue
        seen.append(current)
        todo += [current.__cause__, current.__context__]
    if any(isinstance(each, _NODE) or getattr(each, "preempted", False) or _NODE_DIED in str(each) for each in seen):
        return "node"
    return "process" if any(isinstance(each, _PROCESS) for each in seen) else None


class DeathCounter:
    """Counts how often a process died of something.

    Args:
        what: What it was doing, as the end of a sentence: `while it read ...`.
    """

    def __init__(self, what: Callable[[], str]) -> None:
        self._what, self._count = what, 0

    def note(self, error: BaseException) -> None:
        """Takes what ended a try.

        Raises:
            ProcessDiedError: A process has died of it too often.
            BaseException: It is no loss of a process or a node.
        """
        lost = classify_loss(error)
        if lost is None:
            raise unwrap_app_error(error) from error
        self._count += lost == "process"
        if self._count == MAX_DEATHS:
            raise process_died_error(self._what(), error) from error


def process_died_error(what: str, error: BaseException | None = None) -> ProcessDiedError:
    """The error that ends a run whose process died too often.

    Args:
        what: See `DeathCounter`.
        error: The last loss, if it is known.
    """
    memory = isinstance(error, ray.exceptions.OutOfMemoryError)
    how = (
        "for want of memory"
        if memory
        else "without a Python error: a fault or an abort in a library, or the kernel for want of memory"
    )
    return ProcessDiedError(
        f"A process died {MAX_DEATHS} times {what} ({how}). Look at these rows, take them out or write them anew; if"
        f" they are sound and"
        " large, lower data.read_task_mb, or give the node more memory."
    )


class RetriedTask:
    """A Ray task that is submitted again when its process or its node is lost.

    Args:
        submit: Submits the task, which must not be tried again by Ray (`max_retries=0`), and returns its reference.
        what: See `DeathCounter`.
    """

    def __init__(self, submit: Callable[[], Any], what: Callable[[], str]) -> None:
        self._submit, self._deaths = submit, DeathCounter(what)
        self.reference = submit()

    def result(self) -> Any:
        """Waits for what the task returns.

        Raises:
            ProcessDiedError: Its process died too often.
            Exception: What the task raised.
        """
        while True:
            try:
                return ray.get(self.reference)
            except ray.exceptions.RayError as error:
                self._deaths.note(error)
                self.reference = self._submit()
