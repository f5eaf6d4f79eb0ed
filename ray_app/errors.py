"""The exceptions of the application. All can be pickled, since most of them cross a Ray boundary.

::

    RayAppError
    ├── ConfigError          refused before anything started (exit code 2)
    │   ├── RunExistsError   the run name is taken by another configuration
    │   └── RunHeldError     another driver writes this run
    ├── DataError            the data set cannot be used (exit code 2 before the start)
    │   ├── BadRowError      one row cannot be used: file, row group and row
    │   ├── ProcessDiedError the process that read some rows died again and again
    │   └── StorageError     a disk, the network or an object store failed; the contents of the files are not to blame
    ├── CheckpointError      no checkpoint can be returned to
    │   └── DamagedError     the files of a checkpoint differ from those that were committed
    ├── TrackingError        MLflow did not accept everything that was sent
    ├── EvaluationError      an evaluator gave up
    ├── LeaseLostError       another driver has taken the run over; this one must not write any more
    ├── NonFiniteError       a loss or a gradient is NaN or infinite
    ├── TaskError            user code raised an error; the message names the line, the step and the rows
    ├── PeerLostError        a collective failed because a worker left; a new generation has to form
    │   └── ForgedMessageError   a message has no proof that a worker of this run has sent it
    ├── DeviceFaultError     a device does not compute any more; the worker ends and is replaced
    ├── WrongResultError     silent data corruption: this worker's result differs from that of two others
    ├── IrreproducibleError  the same share of a step has another checksum each time that it is computed
    ├── PreemptedError       the nodes of all workers are about to be taken away
    ├── RepeatedFailureError the same failure at the same step again and again
    ├── BudgetSpentError     more failures than `failure.*` allows
    ├── SilentActorError     an actor that the run needs does not answer
    ├── RegistryError        a model cannot be packaged, registered or exported
    └── RunEndedError        a run ended before it reached the awaited step or number of workers
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")
_CONTROLS = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that act on a terminal: C0 and C1 but tabs and ends of lines, separators of lines, and bidi overrides."""


def join_names(names: Sequence[str], max_names: int = 12) -> str:
    """Returns names for a message, separated by commas: the first ones, and the number of further ones; or `none`."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more if names else "none"


class RayAppError(Exception):
    """Base of all errors that the application raises on purpose."""

    retryable = False
    """Whether a restart of the workers can help; a wrong configuration or a bad row stays wrong."""

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class ConfigError(RayAppError):
    """The configuration is refused; the message says what it contains, what is allowed and what to do."""


class RunExistsError(ConfigError):
    """A run of this name exists with another configuration."""


class RunHeldError(ConfigError):
    """Another driver writes this run; the message names its process, since when, and when its lease ends."""


class DataError(RayAppError):
    """The data set is missing, empty or of the wrong shape."""


class BadRowError(DataError):
    """One row, the `row`-th of a row group of a file (relative to the data set), cannot be decoded for a reason."""

    def __init__(self, path: str, row_group: int, row: int, reason: str) -> None:
        super().__init__(path, row_group, row, reason)
        self.path = path
        self.row_group = row_group
        self.row = row
        self.reason = reason

    def __str__(self) -> str:
        return escape_controls(f"{self.path}, row group {self.row_group}, row {self.row}: {self.reason}")


class ProcessDiedError(DataError):
    """The process that reads some rows dies each time; the message names the rows."""


class StorageError(DataError):
    """A disk, the network or an object store failed while data was read or written; another attempt may succeed."""

    retryable = True


class CheckpointError(RayAppError):
    """No checkpoint can be loaded; the message names each one that was tried and why it was refused."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not those that were committed, and stay so: it may be marked as bad."""


class TrackingError(RayAppError):
    """MLflow did not accept everything that was sent; what it accepted is not sent again."""


class EvaluationError(RayAppError):
    """An evaluator gave up; training continues, and its evaluations stay."""


class LeaseLostError(RayAppError):
    """A later start of the driver has taken the run over; this one must not write to it any more."""


class NonFiniteError(RayAppError):
    """The loss or a gradient is NaN or infinite; the optimizer has not changed the parameters."""


class TaskError(RayAppError):
    """User code, or a library that it called, raised an error.

    `ray_app.task.user_code` raises it. The original error is stored as text, since its class may not be picklable.

    Args:
        message: The error and the line that raised it: `KeyError: 'labels' (my_task.py, line 31, in update)`.
        trace: The calls that led to it, a line or two each.
        context: The operation during which it was raised, as far as it is known.
        positions: Manifest positions of the rows of that operation.
    """

    retryable = True

    def __init__(self, message: str, trace: str, context: str = "", positions: tuple[int, ...] = ()) -> None:
        super().__init__(message, trace, context, positions)
        self.message = message
        self.trace = trace
        self.context = context
        self.positions = positions

    def with_context(self, worker: str, rows: str = "") -> TaskError:
        """Returns the same error with more context: the worker and its step (`rank 1 after step 7`), and the rows."""
        return TaskError(self.message, self.trace, ", ".join(part for part in (worker, self.context, rows) if part))

    def __str__(self) -> str:
        return escape_controls("\n".join([self.message, *([f"  {self.context}"] if self.context else []), self.trace]))


class PeerLostError(RayAppError):
    """A collective failed because another worker left or a new generation forms."""

    retryable = True


class ForgedMessageError(PeerLostError):
    """A message of a peer has no proof that a worker of this run has sent it, so it was not read."""


class DeviceFaultError(RayAppError):
    """A device does not compute any more: each call raises its error, so this process ends and is replaced.

    Args:
        message: The error of the device, as the first line, and what to look at.
        device: The device, see `ray_app.task.environment.device_label`.
        node: Name of its node.
    """

    retryable = True

    def __init__(self, message: str, device: str, node: str) -> None:
        super().__init__(message, device, node)
        self.message = message
        self.device = device
        self.node = node

    def __str__(self) -> str:
        return escape_controls(self.message)


class WrongResultError(RayAppError):
    """This worker's result of a share differs from that of two others (SDC); it ends and is replaced."""

    retryable = True


class IrreproducibleError(RayAppError):
    """A share of a step was computed several times, each time with another checksum; the message names the ranks."""


class PreemptedError(RayAppError):
    """All workers have to leave their nodes; they wrote a checkpoint and start again where there is capacity."""

    retryable = True


class RepeatedFailureError(RayAppError):
    """Workers failed at the same step with the same error several times in a row."""


class BudgetSpentError(RayAppError):
    """The run failed more often than `failure.*` allows; a new start has a new budget."""

    retryable = True


class SilentActorError(RayAppError):
    """An actor that the run needs is alive and does not answer; another start of the same run continues it."""

    retryable = True


class RegistryError(RayAppError):
    """A model cannot be packaged, registered, exported or loaded again; its run is unchanged."""


class RunEndedError(RayAppError):
    """A run in the background ended before the awaited step or number of workers."""


def is_refusal(error: BaseException) -> bool:
    """Returns whether the input is to blame (exit code 2); a storage that does not answer is a failure instead."""
    return isinstance(error, ConfigError | DataError) and not isinstance(error, StorageError)


def unwrap_app_error(error: BaseException) -> BaseException:
    """Returns the application's error inside errors that wrap it (Ray, exception chains), or the error itself."""
    visited: list[BaseException] = []
    pending = [error]
    while pending:
        current = pending.pop()
        if current not in visited:
            visited.append(current)
            inner = [
                current.__context__,
                current.__cause__,
                getattr(current, "controller_failure", None),
                getattr(current, "cause", None),
            ]
            pending += [e for e in inner if isinstance(e, BaseException)]
    app_errors = [
        e for e in visited if isinstance(e, RayAppError) and not isinstance(getattr(e, "cause", None), RayAppError)
    ]
    return app_errors[0] if app_errors else error


def remove_addresses(text: str) -> str:
    """Returns a text without addresses of Python objects, which differ each time (`<BytesIO object at 0x7f3c5a>`)."""
    return _ADDRESS.sub("", text)


def escape_controls(text: str) -> str:
    """Returns a text with each character that acts on a terminal as an escape, such as `\\x1b` or `\\u202e`."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1].replace("\\r", "\\x0d"), text)
