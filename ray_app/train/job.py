"""The job that the driver hands to every worker, and the hooks by which fault tests interfere with a worker.

A job is made once for each start of the driver, and is the same for all workers and all attempts of that start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ray_app.checkpoint.format import open_tensors
from ray_app.checkpoint.store import Commit
from ray_app.config.config import Config
from ray_app.data.arrays import ArraySpec
from ray_app.data.bad_rows import KEYS
from ray_app.data.disk_cache import cached_fetch
from ray_app.data.reader import Decoded, Fetch, Reader, RowSource, choose_fetch, rows_per_task
from ray_app.data.windows import CachedWindows, StreamedWindows, Windows
from ray_app.plan.order import Cursor, Plan
from ray_app.runlog.evaluations import Evaluation, Verdict, early_stop, rank_candidates
from ray_app.runlog.paths import RunPaths
from ray_app.storage.data_files import Root, open_data_file
from ray_app.storage.files import to_location
from ray_app.task.base import Rows, Task
from ray_app.task.ragged import Arrays
from ray_app.train.interventions import stopped_at
from ray_app.train.state.parameters import check_parameters_digest, read_parameters


@dataclass(frozen=True)
class Job:
    """A training run as its workers see it.

    Args:
        config: The resolved configuration.
        config_digest: The digest of the configuration.
        task: The prepared task.
        plan: The order in which the run reads the rows.
        data_root: The root of the training data, see `ray_app.storage.data_files.Root`.
        fields: Shape and dtype of each field of a decoded row.
        run_root: The run's directory.
        fence: Number of this start's writer lease; every commit carries it.
        best_metric: Metric that decides which checkpoint is best.
        best_mode: `max` or `min`.
        eval_source: The evaluation data; None without any.
        initial: File with the initial parameters; None if the model draws them.
        is_intervened: Whether the driver may intervene between two epochs, see `train.interventions`.
        pause_step: Step after which this start ends, as if it were the last one; a later start continues. None: the
            last step of the run.
        parameters: The `parameter_layout` of the model that the driver has built.
    """

    config: Config
    config_digest: str
    task: Task
    plan: Plan
    data_root: Root
    fields: dict[str, ArraySpec]
    run_root: str
    fence: int
    best_metric: str
    best_mode: str
    eval_source: RowSource | None = None
    initial: str | None = None
    is_intervened: bool = False
    pause_step: int | None = None
    parameters: tuple[tuple[str, str], ...] = ()

    @property
    def paths(self) -> RunPaths:
        """The paths in the run directory."""
        return RunPaths(to_location(self.run_root))

    def read_initial(self) -> dict[str, Tensor] | None:
        """Returns the initial parameters by name; None if the model draws them.

        Raises:
            ConfigError: The file is missing or has other parameters than the run began with.
            OSError: The storage does not answer.
        """
        return read_parameters(self.initial, self.config.train.init_digest) if self.initial is not None else None

    def open_initial(self, verifies: bool) -> dict[str, Any] | None:
        """Returns the initial parameters as `read_initial` does, with rows that are read when they are needed.

        Args:
            verifies: Whether to compare the parameters with their digest, for which all are read.
        """
        if self.initial is None:
            return None
        parameters = open_tensors([open_data_file(to_location(self.initial))])
        if verifies:
            check_parameters_digest(parameters, self.initial, self.config.train.init_digest)
        return parameters

    @property
    def rendezvous(self) -> str:
        """The name of this start's rendezvous actor."""
        return f"rendezvous-{self.paths.unique_name}-{self.fence}"

    @property
    def source(self) -> RowSource:
        """The training data."""
        skips = self.config.data.on_bad_row == "skip"
        keyed = self.task.has_epoch_decode
        decode, manifest = WithKeys(self.task) if keyed else self.task.decode, self.plan.manifest
        reader = Reader(self.data_root, self.task.columns(), decode, self.fields, skips, keyed, manifest.rules)
        return RowSource(reader, manifest, rows_per_task(self.fields, self.config.data.read_task_mb))

    def through_cache(self, fetch: Fetch) -> Fetch:
        """Returns `fetch` behind the disk cache of this node with `data.cache: disk`, otherwise `fetch` itself."""
        data = self.config.data
        if data.cache != "disk":
            return fetch
        settings = json.dumps(dataclasses.asdict(self.config.task), sort_keys=True)
        return cached_fetch(fetch, self.source, settings, data.cache_dir, data.cache_gb)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch as the configuration counts them; one pass over the data has `plan.steps_per_epoch`."""
        return self.config.train.steps_per_epoch or self.plan.steps_per_epoch

    @cached_property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.train.total_steps(self.plan.steps_per_epoch)

    @property
    def last_step(self) -> int:
        """Last step of this start, after which all workers have the same state."""
        if self.pause_step is None:
            return self.total_steps
        return min(-(-self.pause_step // self.steps_per_round) * self.steps_per_round, self.total_steps)

    @property
    def passes(self) -> int:
        """Number of passes over the data that the run begins until the end of this start."""
        return -(-self.last_step // self.plan.steps_per_epoch)

    @property
    def steps_per_round(self) -> int:
        """Steps after which all workers have the same state again: `train.local_steps` with `local_sgd`, else 1."""
        return self.config.train.local_steps

    def is_snapshot_due(self, step: int) -> bool:
        """Returns whether a snapshot goes to the snapshot actors after `step` finished steps of the run."""
        every = self.config.checkpoint.snapshot_every_steps
        return every is not None and step % every == 0

    def planned_evaluations(self, last: int) -> list[int]:
        """Returns the steps up to `last` at which the cadence plans a checkpoint, each of which is evaluated."""
        planned = {step for every in self._cadences for step in range(every, last + 1, every)}
        planned |= {self.total_steps} if self.total_steps <= last else set()
        # Before the first step of a branch the other run has evaluated.
        return sorted(step for step in planned if step >= self.config.run.first_step)

    def early_stop(self) -> Verdict | None:
        """Returns the verdict of `ray_app.runlog.evaluations.early_stop` for this run, or that of an intervention."""
        if self.is_intervened and (step := stopped_at(self.paths)) is not None:
            return Verdict(step, step)
        return early_stop(self.paths, self.config.evaluate, self.best_metric, self.best_mode, self.planned_evaluations)

    def best_first(self) -> list[Evaluation]:
        """Returns the evaluations of `ray_app.runlog.evaluations.rank_candidates` for this run."""
        return rank_candidates(
            self.paths, self.config.evaluate, self.best_metric, self.best_mode, self.planned_evaluations
        )

    @property
    def workers_evaluate(self) -> bool:
        """Whether the workers evaluate together at every checkpoint of the cadence."""
        return self.config.evaluate.where == "workers" and self.config.data.evaluation_path is not None

    def is_checkpoint_due(self, step: int) -> bool:
        """Returns whether the cadence plans a checkpoint, and with it an evaluation, after `step` finished steps."""
        return step == self.last_step or 0 in [step % every for every in self._cadences]

    @cached_property
    def _cadences(self) -> list[int]:
        """The numbers of steps between two planned checkpoints, of each setting that has one."""
        section = self.config.checkpoint
        return [n for n in (section.every_steps, (section.every_epochs or 0) * self.steps_per_epoch) if n]


@dataclass(frozen=True)
class WithKeys:
    """Decodes training rows with `Task.decode_training`, which may differ from epoch to epoch by the rows' keys.

    Args:
        task: The task; its `decode` decodes rows that come without keys.
    """

    task: Task

    def __call__(self, rows: Rows) -> Arrays:
        """Returns the decoded rows, see `Task.decode_training`."""
        if KEYS not in rows:
            return self.task.decode(rows)
        return self.task.decode_training({name: values for name, values in rows.items() if name != KEYS}, rows[KEYS])


OpenWindows = Callable[[Job, Cursor, range], Windows]
"""Opens the data at a cursor for the logical workers that are assigned to a worker."""


class WindowSource:
    """Opens windows of a job's rows, an `OpenWindows`; all calls share one cache or one fetch.

    Args:
        fetch: Reads rows that no cache has.
        read_cache: Returns the decoded data, with `data.cache: memory`.
    """

    def __init__(self, fetch: Fetch, read_cache: Callable[[], Decoded] | None = None) -> None:
        self._fetch, self._read_cache = fetch, read_cache
        self._windows: CachedWindows | None = None
        self._cached_fetch: Fetch | None = None

    def __call__(self, job: Job, cursor: Cursor, assigned: range) -> Windows:
        """Opens the windows of some logical workers at a cursor."""
        if self._read_cache is not None:
            self._windows = self._windows or CachedWindows(self._read_cache())
            return self._windows
        data = job.config.data
        self._cached_fetch = self._cached_fetch or job.through_cache(choose_fetch(data.reader_threads, self._fetch))
        fetch, prefetch = self._cached_fetch, data.prefetch_windows
        return StreamedWindows(job.plan, cursor, assigned, job.passes, fetch, job.source, prefetch)


@dataclass(frozen=True)
class Hooks:
    """Callbacks that fault tests set, called in every worker; users have no need of them.

    Args:
        after_step: Called with (rank, finished steps) after each step.
        before_commit: Called with the checkpoint before each commit, in the checkpoint writer's thread.
        at: Called with (phase, rank, finished steps) whenever a worker begins another phase: `forming`, `data`,
            `compute`, `reduction`, `evaluate`, `done`.
        built: Called with the model when it has been built.
    """

    after_step: Callable[[int, int], None] | None = None
    before_commit: Callable[[Commit], None] | None = None
    at: Callable[[str, int, int], None] | None = None
    built: Callable[[nn.Module], None] | None = None
