"""Every exception of the application, all picklable because most of them cross a Ray boundary.

::

    RayAppError
    ├── ConfigError          refused before anything started (exit code 2)
    │   ├── RunExistsError   the run name is taken by another configuration
    │   └── RunHeldError     another driver writes this run
    ├── DataError            the data set cannot be used (exit code 2 before the start)
    │   ├── BadRowError      one row cannot be used: file, row group and row
    │   └── StorageError     a disk, the network or S3 failed; what is in the files is not to blame
    ├── CheckpointError      no checkpoint can be returned to
    ├── TrackingError        MLflow did not take what it was sent
    ├── EvaluationError      an evaluator gave up
    ├── LeaseLostError       another driver has taken the run over: write nothing more
    ├── NonFiniteError       a loss or a gradient is NaN or infinite
    ├── PeerLostError        a collective failed because a worker left: form a new generation
    ├── PreemptedError       the nodes of all workers are about to go away
    ├── RepeatedFailureError the same failure at the same step again and again
    ├── BudgetSpentError     more failures than `failure.*` allows
    ├── RegistryError        a model cannot be packaged, registered or exported
    └── RunEndedError        a run ended before it was where somebody awaited it
"""


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


class StorageError(DataError):
    """A disk, the network or S3 failed while data was read or written; it may work the next time."""


class CheckpointError(RayAppError):
    """No checkpoint can be loaded; the message names each one that was tried and why it was refused."""


class TrackingError(RayAppError):
    """MLflow did not take everything that was to be sent at once; what it took is not sent again."""


class EvaluationError(RayAppError):
    """An evaluator gave up; training is not touched, and what it had evaluated stays."""


class LeaseLostError(RayAppError):
    """A later start of the driver has taken the run over; this one must not write it any more."""


class NonFiniteError(RayAppError):
    """The loss or a gradient is NaN or infinite; the optimizer did not move."""


class PeerLostError(RayAppError):
    """A collective failed because another worker left or a new generation forms."""

    retryable = True


class PreemptedError(RayAppError):
    """All workers have to leave their nodes; they made a checkpoint and start again where there is room."""

    retryable = True


class RepeatedFailureError(RayAppError):
    """Workers failed at the same step with the same error several times in a row."""


class BudgetSpentError(RayAppError):
    """The run failed more often than `failure.*` allows; a new start has a new budget."""

    retryable = True


class RegistryError(RayAppError):
    """A model cannot be packaged, registered, exported or loaded again; the training that made it is not touched."""


class RunEndedError(RayAppError):
    """A run in the background ended before the step or the number of workers that was waited for."""


def is_refusal(error: BaseException) -> bool:
    """Whether what was given is to blame and stays wrong: a command refuses it with exit code 2. A storage that is away is a failure."""
    return isinstance(error, ConfigError | DataError) and not isinstance(error, StorageError)


def own_error(error: BaseException) -> BaseException:
    """The application's error inside whatever wrapped it on its way (Ray tasks, Ray Train, exception chains), or the error itself."""
    seen: list[BaseException] = []
    todo = [error]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.append(current)
            inner = [current.__context__, current.__cause__, getattr(current, "controller_failure", None), getattr(current, "cause", None)]
            todo += [e for e in inner if isinstance(e, BaseException)]
    plain = [e for e in seen if isinstance(e, RayAppError) and not isinstance(getattr(e, "cause", None), RayAppError)]
    return plain[0] if plain else error
