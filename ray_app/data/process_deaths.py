"""Retries of Ray tasks that lose their process or their node.

The loss of a node is not the task's fault; a process that dies three times in the same task dies of what the task does.

Ray does not distinguish the two, and Ray Data restarts such a task without end: a row that ends the process while it is
decoded (a segmentation fault in a C library, too much memory) would be read again and again while the run waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import ray

from ray_app.errors import ProcessDiedError, unwrap_app_error

MAX_DEATHS = 3
"""Number of times that a process may die of the same task."""

_PROCESS_ERRORS = (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.ActorDiedError)
_NODE_ERRORS = (ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError, ray.exceptions.ActorUnavailableError)
_NODE_DIED = "its node has died"
"""Part of Ray's message about an actor on a lost node; Ray has no separate exception for it."""


def classify_loss(error: BaseException) -> Literal["process", "node"] | None:
    """Returns what was lost according to an error of a task or of a wait for it; None if the task itself raised it."""
    chain: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or current in chain:
            continue
        chain.append(current)
        todo += [current.__cause__, current.__context__]
    if any(isinstance(e, _NODE_ERRORS) or getattr(e, "preempted", False) or _NODE_DIED in str(e) for e in chain):
        return "node"
    return "process" if any(isinstance(e, _PROCESS_ERRORS) for e in chain) else None


class DeathCounter:
    """Counts how often a process died of a task, which `describe` describes: `while it read ...`."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe, self._count = describe, 0

    def note(self, error: BaseException) -> None:
        """Counts the error that ended a try; raises ProcessDiedError if a process has died of the task too often.

        An error that is not the loss of a process or a node is raised again.
        """
        loss = classify_loss(error)
        if loss is None:
            raise unwrap_app_error(error) from error
        self._count += loss == "process"
        if self._count == MAX_DEATHS:
            raise process_died_error(self._describe(), error) from error


def process_died_error(activity: str, error: BaseException | None = None) -> ProcessDiedError:
    """Returns the error that ends a run after a process died too often."""
    cause = "without a Python error: a fault or an abort in a library, or the kernel for want of memory"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        cause = "for want of memory"
    return ProcessDiedError(
        f"A process died {MAX_DEATHS} times {activity} ({cause}). Look at these rows, take them out or write them anew;"
        " if they are sound and large, lower data.read_task_mb, or give the node more memory."
    )


class RetriedTask:
    """A Ray task, with `max_retries=0`, that is submitted again when its process or its node is lost."""

    def __init__(self, submit: Callable[[], Any], describe: Callable[[], str]) -> None:
        self._submit, self._deaths = submit, DeathCounter(describe)
        self.reference = submit()

    def result(self) -> Any:
        """Waits for the task and returns its result; raises ProcessDiedError if its process died too often."""
        # Not `Retry`: a task is repeated at once, and `DeathCounter` limits the deaths of processes, not of nodes.
        while True:
            try:
                return ray.get(self.reference)
            except ray.exceptions.RayError as error:
                self._deaths.note(error)
                self.reference = self._submit()
