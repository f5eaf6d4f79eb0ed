"""What the checks before a run share: a `PreflightContext`, and probes, which run rows through a task without a step.

`RowProbe` trains or evaluates on rows and tells whether their length is the reason for an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ray_app.checkpoint.store import Commit
from ray_app.config.config import Config
from ray_app.data.arrays import ArraySpec
from ray_app.data.dataset import Dataset
from ray_app.data.reader import RowSource
from ray_app.devices import HOST
from ray_app.errors import ConfigError, TaskError
from ray_app.plan.order import Plan
from ray_app.preflight.changes import CodeVersions, DataVersions, changed_fields, fill_defaults
from ray_app.preflight.inputs import InitialParameters
from ray_app.preflight.short_trainings import ShortTrainings
from ray_app.runlog.paths import RunPaths
from ray_app.task.base import Batch, Rows, Task
from ray_app.task.environment import restore_process_state, set_threads_and_kernels
from ray_app.task.metrics import score
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.user_loop import LoopTask
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState, seed_init
from ray_app.watch.terminal import Level


@dataclass(frozen=True)
class CheckResult:
    """What a check has shown that has not refused the run.

    Args:
        text: The result; empty: the message of the check.
        level: `ok`; or `warning` or `failed`, with which the run would start nevertheless.
        warnings: Warnings besides the result, each one or two sentences.
        seconds: Duration, if the check ran concurrently with others.
    """

    text: str = ""
    level: Level = "ok"
    warnings: Sequence[str] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class ReadingRates:
    """The rates that show whether CPUs decode as many rows as GPUs train on, by the times of a few rows on this CPU.

    Args:
        decode_s: Time in which a CPU decodes a row.
        train_rows: Rows per second on which a worker with a GPU is expected to train.
    """

    decode_s: float
    train_rows: float

    def find_shortage(self, workers: int, cpus: float) -> list[str]:
        """Returns a warning if `cpus` logical CPUs decode fewer rows than a number of workers train on."""
        rows = workers * self.train_rows
        needed_cpus = rows * self.decode_s
        if needed_cpus <= cpus:
            return []
        return [
            f"By the time that a few rows take here, {workers} workers with GPUs train on about {rows:,.0f} rows per"
            f" second; the {cpus:g} CPUs that are free for reading decode only about {cpus / self.decode_s:,.0f}"
            f" ({1e3 * self.decode_s:.2g} ms per row), so the GPUs would wait for data. Use nodes with more CPUs (about"
            f" {needed_cpus:,.0f} for reading), store smaller images, decode large JPEG files at a smaller scale"
            " (task.init_args.jpeg_scaling of ImageClassification), or set data.cache to disk or memory, so that only"
            " the first epoch decodes."
        ]


@dataclass(frozen=True)
class Branch:
    """The checkpoint of another run that a new run continues from.

    Args:
        paths: The paths of the other run.
        config: The configuration of the other run, without the default arguments of its classes.
        commit: The checkpoint.
        training: The content of `training.pt` with the options of the new run; empty before they are compared.
        changed: The values of both runs by the dotted names of the fields that differ.
    """

    paths: RunPaths
    config: Config
    commit: Commit
    training: bytes = b""
    changed: Mapping[str, list[Any]] = field(default_factory=dict)

    def compare(self, config: Config) -> Branch:
        """Returns the branch with all fields that the complete configuration of the new run changes."""
        changed = changed_fields(fill_defaults(self.config)[0], fill_defaults(config)[0])
        return replace(self, changed={name: both for name, both in changed.items() if not name.startswith("run.")})

    def __str__(self) -> str:
        lines = "".join(f"\n  {name}: {then} -> {now}" for name, (then, now) in self.changed.items())
        return f"A branch of {self.paths.root} from step {self.commit.step} on. It changes{lines or ' nothing'}"


class PreflightContext:
    """The values that checks compute for those after them.

    Args:
        config: The configuration as the user wrote it; the checks `configuration`, `initial parameters` and `task`
            complete it.
    """

    # The check `configuration` sets these.
    paths: RunPaths
    before: Config | None
    initial: InitialParameters
    # The checks `data`, `task`, `plan` and `code` set these.
    dataset: Dataset
    task: Task
    used_columns: list[str]
    plan: Plan
    code: CodeVersions
    # The check `rows` sets these.
    undecoded_row: Rows
    rows: Arrays
    fields: dict[str, ArraySpec]
    job: Job
    # The checks `model` and, from here on, `one row` set these.
    row_probe: RowProbe
    accepted_rows: Arrays
    are_short: bool
    unused_parameters: dict[str, torch.nn.Parameter]
    single_values: dict[str, torch.nn.Module]
    # The checks `data files` and `randomness` set these.
    data_versions: DataVersions
    short_trainings: ShortTrainings

    def __init__(self, config: Config) -> None:
        self.config = config
        # The differences from the last start, if the run exists.
        self.changed_code: list[str] = []
        self.changed_data: list[str] = []
        # The check `branch` sets it for a new run with `run.branch_from`.
        self.branch: Branch | None = None
        # The check `evaluation data` sets these, if there is any.
        self.eval_dataset: Dataset | None = None
        self.eval_task: Task | None = None
        self.eval_source: RowSource | None = None
        self.eval_rows: Arrays | None = None
        self.constant_scores: dict[str, float] = {}
        # The check `reading time` sets it, if there are GPUs.
        self.reading_rates: ReadingRates | None = None
        self.exit_stack = ExitStack()

    @property
    def model(self) -> torch.nn.Module:
        """Returns the model, on the CPU."""
        return self.row_probe.state.model

    def close(self) -> None:
        """Ends what the checks keep running."""
        self.exit_stack.close()

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Runs a block as a worker would on a CPU, restores the state of the process, and refuses errors of the task.

        Raises:
            ConfigError: The code of the task has raised an error.
        """
        config = self.config
        try:
            with restore_process_state(), user_code(lambda: "building model, optimizer and schedule"):
                set_threads_and_kernels(torch.get_num_threads(), config.train.reduction == "exact")
                seed_init(config.seed, HOST)
                yield
        except TaskError as error:
            raise ConfigError(
                f"The dry run with one row failed: {error}\nCheck the task, task.init_args, optimizer and schedule; the"
                f" dry run used {config.task.class_path} {config.task.init_args}, {config.optimizer.class_path}"
                f" {config.optimizer.init_args}"
                + (f", {config.schedule.class_path} {config.schedule.init_args}." if config.schedule else ".")
            ) from error


logger = logging.getLogger(__name__)

MAX_NUMBERS = 1 << 12
"""Longest row that is searched for and checked, in numbers: attention takes time and memory by the square of it."""
SHORT_LENGTH = 8
"""Length of the lists of rows that are used for most checks."""


@dataclass(frozen=True)
class RowProbe:
    """Runs rows through a task and its model before the start, without a step.

    Args:
        task: The prepared task.
        state: The model and its optimizers.
    """

    task: Task
    state: TrainingState

    def losses(self, fields: Batch) -> Iterator[tuple[str | None, Any]]:
        """Yields the training loss of a batch with the name of its optimizer, None for the only one."""
        for turn in self.state.turns.optimizers if self.state.turns is not None else ():
            yield turn, self.task.loss_for_optimizer(turn, self.state.model, fields)
        if self.state.turns is None:
            yield None, self.task.training_loss(self.state.model, fields)

    def make_batch(self, rows: Arrays) -> Batch:
        """Returns rows as a training batch, and puts the model into training mode."""
        self.state.train()
        return self.task.augment(to_batch(rows), torch.arange(len(next(iter(rows.values())))))

    def run(self, rows: Arrays, evaluates: bool, description: str) -> None:
        """Computes the training loss of rows, or evaluates them.

        Args:
            rows: Decoded rows.
            evaluates: Whether the rows are evaluated rather than trained on.
            description: Description of the rows in error messages.

        Raises:
            TaskError: The task fails on these rows.
        """
        count, model = len(next(iter(rows.values()))), self.state.model
        activity = "evaluating" if evaluates else "training"
        with torch.no_grad(), user_code(lambda: f"{activity} on {description} of {describe_fields(rows)}"):
            if evaluates:
                list(score(self.task, model, rows, count, HOST))
                return
            list(self.losses(self.make_batch(rows)))

    def can_run(self, rows: Arrays, evaluates: bool) -> bool:
        """Returns whether the task accepts the rows; see `run`."""
        try:
            self.run(rows, evaluates, "rows")
        except TaskError:
            return False
        return True

    def explain_too_long(self, rows: Arrays, evaluates: bool) -> str | None:
        """Returns a message if the length of rows is the reason why the task fails on them, otherwise None.

        It is the reason if the task accepts the first number of each row alone, but not repeated to the length of the
        row.
        """
        lists = {name: values for name, values in rows.items() if isinstance(values, Ragged)}
        if not lists or isinstance(self.task, LoopTask):
            return None
        repeated = {
            **rows,
            **{name: v.like(np.repeat(row[:1], len(row), axis=0) for row in v) for name, v in lists.items()},
        }
        if (
            self.can_run(rows, evaluates)
            or not self.can_run(truncate(rows, 1), evaluates)
            or self.can_run(repeated, evaluates)
        ):
            return None
        longest = max(int(values.lengths.max()) for values in lists.values())
        return (
            f"The model cannot be {'evaluated' if evaluates else 'trained'} on rows of {longest} numbers in"
            f" {' or '.join(map(repr, lists))}, but on rows of one number it can. A model has a limited number of"
            " positions (max_position_embeddings, block_size): increase it, or set task.init_args.max_length to it."
        )


def describe_fields(rows: Arrays) -> str:
    """Returns the type and the shape of each field of some rows, such as `x float32 (2, 5)`."""
    batch = to_batch(rows)
    return ", ".join(f"{name} {str(v.dtype).removeprefix('torch.')} {tuple(v.shape)}" for name, v in batch.items())


def longest_of(rows: Arrays) -> Arrays:
    """Returns the longest of some rows, each field of shape (1, ...); the first if all have the same length."""
    total = _numbers_per_row(rows)
    return _row_at(rows, int(np.where(total <= MAX_NUMBERS, total, 0).argmax()))


def shortest_of(rows: Arrays) -> Arrays:
    """Returns the shortest row of at least `SHORT_LENGTH` numbers, or the longest; each field of shape (1, ...)."""
    total = _numbers_per_row(rows)
    enough = total >= SHORT_LENGTH
    return _row_at(rows, int(np.where(enough, total, total.max() + 1).argmin() if enough.any() else total.argmax()))


def _row_at(rows: Arrays, index: int) -> Arrays:
    return {name: values[index : index + 1] for name, values in rows.items()}


def count_numbers(rows: Arrays) -> int:
    """Returns the number of numbers in the lists of some rows."""
    return int(_numbers_per_row(rows).sum())


def _numbers_per_row(rows: Arrays) -> np.ndarray:
    """Returns the number of numbers in the lists of each row, or one zero if no field is a list."""
    lengths = [values.lengths for values in rows.values() if isinstance(values, Ragged) and not values.row_shape]
    return np.sum(lengths, axis=0) if lengths else np.zeros(1, np.int64)


def truncate(rows: Arrays, max_length: int) -> Arrays:
    """Returns the rows with lists of at most `max_length` numbers."""
    return {name: values.cut(max_length) if isinstance(values, Ragged) else values for name, values in rows.items()}


def cut_unevenly(rows: Arrays) -> Arrays:
    """Returns rows with lists cut to different lengths, at most `SHORT_LENGTH`.

    With equal lengths a mean over tokens could not be told from a mean over rows.
    """
    return {
        name: values.like(row[: SHORT_LENGTH - i % (SHORT_LENGTH // 2)] for i, row in enumerate(values))
        if isinstance(values, Ragged)
        else values
        for name, values in rows.items()
    }
