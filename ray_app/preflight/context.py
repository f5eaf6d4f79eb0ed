"""What the checks before a run share: each of them gets a `PreflightContext`, and returns an `Outcome`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from ray_app.config.config import Config
from ray_app.data.arrays import ArraySpec
from ray_app.data.dataset import Dataset
from ray_app.data.reader import RowSource
from ray_app.errors import ConfigError, TaskError
from ray_app.plan.order import Plan
from ray_app.preflight.changes import CodeVersions, DataVersions
from ray_app.preflight.initial_parameters import InitialParameters
from ray_app.preflight.probe_rows import RowProbe
from ray_app.preflight.short_trainings import ShortTrainings
from ray_app.runlog.paths import RunPaths
from ray_app.task.base import Rows, Task
from ray_app.task.device import restore_process_state, set_threads_and_kernels
from ray_app.task.ragged import Arrays
from ray_app.task.user_code import user_code
from ray_app.train.job import Job
from ray_app.train.state.state import seed_init
from ray_app.watch.terminal import Level


@dataclass(frozen=True)
class Outcome:
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
    norm_values: dict[str, int]
    # The checks `data files` and `randomness` set these.
    data_versions: DataVersions
    short_trainings: ShortTrainings

    def __init__(self, config: Config) -> None:
        self.config = config
        # The differences from the last start, if the run exists.
        self.changed_code: list[str] = []
        self.changed_data: list[str] = []
        # The check `evaluation data` sets these, if there is any.
        self.eval_dataset: Dataset | None = None
        self.eval_task: Task | None = None
        self.eval_source: RowSource | None = None
        self.eval_rows: Arrays | None = None
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
            with restore_process_state(), user_code(lambda: "making model, optimizer and schedule"):
                set_threads_and_kernels(torch.get_num_threads(), config.train.reduction == "exact")
                seed_init(config.seed, torch.device("cpu"))
                yield
        except TaskError as error:
            raise ConfigError(
                f"The dry run with one row failed: {error}\nCheck the task, task.init_args, optimizer and schedule;"
                f" tried were {config.task.class_path} {config.task.init_args}, {config.optimizer.class_path}"
                f" {config.optimizer.init_args}"
                + (f", {config.schedule.class_path} {config.schedule.init_args}." if config.schedule else ".")
            ) from error
