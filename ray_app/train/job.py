"""What a worker needs to know to train: made once by the driver, the same for all workers and all attempts of a start.

Where a test can make something happen; users have no need of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ray_app.checkpoint.store import Commit
from ray_app.config.config import Config
from ray_app.data.arrays import ArraySpec
from ray_app.data.bad_rows import KEYS
from ray_app.data.disk_cache import cached_fetch
from ray_app.data.reader import Fetch, Reader, RowSource, rows_per_task
from ray_app.data.windows import Windows
from ray_app.plan.order import Cursor, Plan
from ray_app.runlog.evaluations import Evaluation, Verdict, early_stop, rank_candidates
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location
from ray_app.task.base import Rows, Task
from ray_app.task.ragged import Arrays
from ray_app.train.state.parameters import read_parameters


@dataclass(frozen=True)
class Job:
    """A run as its workers see it.

    Args:
        config: The resolved configuration.
        config_digest: Its digest.
        task: The prepared task.
        plan: The order of the data.
        data_root: Folder that the manifest's paths are relative to.
        fields: What a decoded row looks like.
        run_root: The run's directory.
        fence: Number of this start.
        best_metric: Metric that decides which checkpoint is best.
        best_mode: `max` or `min`.
        evaluation: The evaluation data, if there is any.
        initial: The file with the parameters to begin with, if the model does not draw them.
    """

    config: Config
    config_digest: str
    task: Task
    plan: Plan
    data_root: str
    fields: dict[str, ArraySpec]
    run_root: str
    fence: int
    best_metric: str
    best_mode: str
    evaluation: RowSource | None = None
    initial: str | None = None

    @property
    def paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(to_location(self.run_root))

    def read_initial(self) -> dict[str, Tensor] | None:
        """The parameters to begin with, if the model does not draw them.

        Raises:
            ConfigError: They are gone.
            OSError: The storage does not answer.
        """
        return read_parameters(self.initial, self.config.train.init_digest) if self.initial is not None else None

    @property
    def rendezvous(self) -> str:
        """Name of this start's rendezvous actor."""
        return f"rendezvous-{self.paths.unique_name}-{self.fence}"

    @property
    def source(self) -> RowSource:
        """The training data."""
        skips = self.config.data.on_bad_row == "skip"
        keyed = self.task.has_epoch_decode
        decode, manifest = WithKeys(self.task) if keyed else self.task.decode, self.plan.manifest
        reader = Reader(self.data_root, self.task.columns(), decode, self.fields, skips, keyed, manifest.partitions)
        return RowSource(reader, manifest, rows_per_task(self.fields, self.config.data.read_task_mb))

    def through_cache(self, fetch: Fetch) -> Fetch:
        """`fetch`, with the disk cache of this node around it if there is to be one."""
        data = self.config.data
        if data.cache != "disk":
            return fetch
        settings = json.dumps(dataclasses.asdict(self.config.task), sort_keys=True)
        return cached_fetch(fetch, self.source, settings, data.cache_dir, data.cache_gb)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch as the configuration counts them; a pass over the data has `plan.steps_per_epoch`."""
        return self.config.train.steps_per_epoch or self.plan.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.train.total_steps(self.plan.steps_per_epoch)

    @property
    def passes(self) -> int:
        """Passes over the data that the run begins."""
        return -(-self.total_steps // self.plan.steps_per_epoch)

    @property
    def steps_per_round(self) -> int:
        """Steps after which all workers have the same state again: 1, but with `local_sgd`."""
        return self.config.train.local_steps

    def is_snapshot_due(self, step: int) -> bool:
        """Whether a snapshot goes to memory outside the workers after `step` finished steps of the run."""
        every = self.config.checkpoint.snapshot_every_steps
        return every is not None and step % every == 0

    def planned_evaluations(self, last: int) -> list[int]:
        """Steps up to `last` at which the cadence plans a checkpoint that is evaluated."""
        section = self.config.checkpoint
        cadences = (section.every_steps or 0, (section.every_epochs or 0) * self.steps_per_epoch)
        planned = {step for every in cadences if every for step in range(every, last + 1, every)}
        planned |= {self.total_steps} if self.total_steps <= last else set()
        return sorted(planned)

    def early_stop(self) -> Verdict | None:
        """See `ray_app.runlog.evaluations.early_stop`."""
        return early_stop(self.paths, self.config.evaluate, self.best_metric, self.best_mode, self.planned_evaluations)

    def best_first(self) -> list[Evaluation]:
        """See `ray_app.runlog.evaluations.rank_candidates`."""
        return rank_candidates(
            self.paths, self.config.evaluate, self.best_metric, self.best_mode, self.planned_evaluations
        )

    @property
    def workers_evaluate(self) -> bool:
        """Whether the workers evaluate together at every checkpoint of the cadence."""
        return self.config.evaluate.where == "workers" and self.config.data.eval_path is not None

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether the cadence asks for a checkpoint, and with it an evaluation, after `step` finished steps of
        the run.
        """
        section = self.config.checkpoint
        if step == self.total_steps:
            return True
        every_epochs = (section.every_epochs or 0) * self.steps_per_epoch
        return any(every and step % every == 0 for every in (section.every_steps, every_epochs))


@dataclass(frozen=True)
class WithKeys:
    """Decodes rows to train on another way in every epoch.

    Args:
        task: Whose `decode_training`; rows without keys are decoded by `decode`.
    """

    task: Task

    def __call__(self, rows: Rows) -> Arrays:
        """See `Task.decode_training`."""
        if KEYS not in rows:
            return self.task.decode(rows)
        return self.task.decode_training({name: values for name, values in rows.items() if name != KEYS}, rows[KEYS])


OpenWindows = Callable[[Job, Cursor, range], Windows]
"""Opens the data at a cursor for the logical workers to play."""


@dataclass(frozen=True)
class Hooks:
    """Called in every worker.

    Args:
        after_step: With (rank, finished steps) after each step.
        before_commit: With the checkpoint before each commit, in the saver's thread.
        built: With the model when it has been made.
        at: With (phase, rank, finished steps) whenever a worker begins something else: `forming`, `data`, `compute`,
            `exchange`, `evaluate`, `done`.
    """

    after_step: Callable[[int, int], None] | None = None
    before_commit: Callable[[Commit], None] | None = None
    at: Callable[[str, int, int], None] | None = None
    built: Callable[[nn.Module], None] | None = None
