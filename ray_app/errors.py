"""Every exception of the application, all picklable because most of them cross a Ray boundary.

::

    RayAppError
    ├── ConfigError          refused before anything started (exit code 2)
    │   ├── RunExistsError   the run name is taken by another configuration
    │   └── RunHeldError     another driver writes this run
    ├── DataError            the data set cannot be used (exit code 2 before the start)
    │   ├── BadRowError      one row cannot be used: file, row group and row
    │   ├── ProcessDiedError the process that read some rows died again and again
    │   └── StorageError     a disk, the network or S3 failed; what is in the files is not to blame
    ├── CheckpointError      no checkpoint can be returned to
    │   └── DamagedError     the files of one are not those that were committed
    ├── TrackingError        MLflow did not take what it was sent
    ├── EvaluationError      an evaluator gave up
    ├── LeaseLostError       another driver has taken the run over: write nothing more
    ├── NonFiniteError       a loss or a gradient is NaN or infinite
    ├── TaskError            the task's own code raised: what, in which line, at which step and rows
    ├── PeerLostError        a collective failed because a worker left: form a new generation
    ├── WrongResultError     this worker's hardware computes wrongly: another result than that of two others
    ├── IrreproducibleError  the same share of a step has other bits each time it is computed
    ├── PreemptedError       the nodes of all workers are about to go away
    ├── RepeatedFailureError the same failure at the same step again and again
    ├── BudgetSpentError     more failures than `failure.*` allows
    ├── SilentActorError     an actor that the run needs does not answer
    ├── RegistryError        a model cannot be packaged, registered or exported
    └── RunEndedError        a run ended before it was where somebody awaited it
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")


class RayAppError(Exception):
    """Base of all errors that the application raises on purpose."""

    retryable = False
    """Whether starting the workers again can help; a wrong configuration or a bad row stays wrong."""


class ConfigError(RayAppError):
    """The configuration is refused; the message says what was given, what is allowed and what to do."""


class RunExistsError(ConfigError):
    """A run of this name exists with another configuration."""


class RunHeldError(ConfigError):
    """Another driver writes this run; the message says who, since when, and when its lease ends."""


class DataError(RayAppError):
    """The data set is missing, empty or of the wrong shape."""


class BadRowError(DataError):
    """One row cannot be decoded.

    Args:
        path: File, relative to the data set.
        row_group: Index of the row group in the file.
        row: Index of the row in the row group.
        reason: What is wrong with it.
    """

    def __init__(self, path: str, row_group: int, row: int, reason: str) -> None:
        super().__init__(path, row_group, row, reason)
        self.path, self.row_group, self.row, self.reason = path, row_group, row, reason

    def __str__(self) -> str:
        return f"{self.path}, row group {self.row_group}, row {self.row}: {self.reason}"


class ProcessDiedError(DataError):
    """The process that reads some rows dies each time that it does; the message says which rows."""


class StorageError(DataError):
    """A disk, the network or S3 failed while data was read or written; it may work the next time."""

    retryable = True


class CheckpointError(RayAppError):
    """No checkpoint can be loaded; the message names each one that was tried and why it was refused."""


class DamagedError(CheckpointError):
    """What is on storage is not what was committed, and never will be again: the checkpoint may be marked as bad."""


class TrackingError(RayAppError):
    """MLflow did not take everything that was to be sent at once; what it took is not sent again."""


class EvaluationError(RayAppError):
    """An evaluator gave up; training is not touched, and what it had evaluated stays."""


class LeaseLostError(RayAppError):
    """A later start of the driver has taken the run over; this one must not write it any more."""


class NonFiniteError(RayAppError):
    """The loss or a gradient is NaN or infinite; the optimizer did not move."""


class TaskError(RayAppError):
    """The task's own code, or what it called, raised; made by `ray_app.task.user_code`, and kept as text, since any
    class may not pickle.

    Args: said: The error and the line of the user's that raised it: `KeyError: 'labels' (my_task.py, line 31, in
        update)`. trace: The calls that led to it, a line or two each. place: What was being done, as far as is known.
        positions: Manifest positions of the rows that it was done for.
    """

    retryable = True

    def __init__(self, said: str, trace: str, place: str = "", positions: tuple[int, ...] = ()) -> None:
        super().__init__(said, trace, place, positions)
        self.said, self.trace, self.place, self.positions = said, trace, place, positions

    def met(self, by: str, rows: str = "") -> TaskError:
        """The same with more about the place.

        Args:
            by: Who met it, and when.
            rows: The rows by their files.
        """
        return TaskError(self.said, self.trace, ", ".join(part for part in (by, self.place, rows) if part))

    def __str__(self) -> str:
        return "\n".join([self.said, *([f"  {self.place}"] if self.place else []), self.trace])


class PeerLostError(RayAppError):
    """A collective failed because another worker left or a new generation forms."""

    retryable = True


class WrongResultError(RayAppError):
    """This worker computed something else than others that did the same again; it ends and is replaced."""

    retryable = True


class IrreproducibleError(RayAppError):
    """A share of a step was computed several times with other bits each time; the message says by whom."""


class PreemptedError(RayAppError):
    """All workers have to leave their nodes; they made a checkpoint and start again where there is room."""

    retryable = True


class RepeatedFailureError(RayAppError):
    """Workers failed at the same step with the same error several times in a row."""


class BudgetSpentError(RayAppError):
    """The run failed more often than `failure.*` allows; a new start has a new budget."""

    retryable = True


class SilentActorError(RayAppError):
    """An actor that the run needs lives and does not answer; starting the same run again continues it."""

    retryable = True


class RegistryError(RayAppError):
    """A model cannot be packaged, registered, exported or loaded again; the training that made it is not touched."""


class RunEndedError(RayAppError):
    """A run in the background ended before the step or the number of workers that was waited for."""


def is_refusal(error: BaseException) -> bool:
    """Whether what was given is to blame and stays wrong: a command refuses it with exit code 2. A storage that is away
    is a failure.
    """
    return isinstance(error, ConfigError | DataError) and not isinstance(error, StorageError)


def unwrap_app_error(error: BaseException) -> BaseException:
    """The application's error inside whatever wrapped it on its way (Ray tasks, Ray Train, exception chains), or the
    error itself.
    """
    seen: list[BaseException] = []
    todo = [error]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.append(current)
            inner = [
                current.__context__,
                current.__cause__,
                getattr(current, "controller_failure", None),
                getattr(current, "cause", None),
            ]
            todo += [e for e in inner if isinstance(e, BaseException)]
    plain = [e for e in seen if isinstance(e, RayAppError) and not isinstance(getattr(e, "cause", None), RayAppError)]
    return plain[0] if plain else error


def remove_addresses(text: str) -> str:
    """Returns the text of an error without the addresses of Python objects (`<_io.BytesIO object at 0x7f3c5a1b2e80>`).

    They say nothing to a reader, and files and messages that hold them differ each time.
    """
    return _ADDRESS.sub("", text)
