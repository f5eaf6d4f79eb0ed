"""The checkpoints that an evaluator evaluates, and their order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ray_app.checkpoint.retention import ALL_CHECKPOINTS, Pin
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config
from ray_app.config.sections import EvaluateSection
from ray_app.data.reader import RowSource
from ray_app.runlog.evaluations import evaluated_steps
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location
from ray_app.task.base import Task
from ray_app.task.precision import Precision


@dataclass(frozen=True)
class EvaluationJob:
    """The settings and the data of an evaluator.

    Args:
        section: The configuration of evaluation.
        name: Name of an additional evaluator; None for the evaluator that belongs to the run.
        attached: Whether it belongs to another job than the run's driver.
        deterministic: Whether it computes with deterministic kernels, as the workers do with `reduction: exact`.
        label_selector: The value of `evaluate.label_selector`, by default of `scaling.label_selector`.
        precision: How the model computes.
    """

    section: EvaluateSection
    task: Task
    run_root: str
    fence: int
    data: RowSource
    name: str | None = None
    attached: bool = False
    deterministic: bool = True
    label_selector: dict[str, str] | None = None
    precision: Precision = Precision()

    @classmethod
    def of(
        cls,
        config: Config,
        task: Task,
        run_root: str,
        fence: int,
        data: RowSource,
        name: str | None = None,
        attached: bool = False,
    ) -> EvaluationJob:
        """Returns the job with the settings of a run."""
        return cls(
            *(config.evaluate, task, run_root, fence, data, name, attached),
            deterministic=config.train.reduction == "exact",
            label_selector=config.evaluate.label_selector or config.scaling.label_selector,
            precision=Precision.of(config.train),
        )

    @property
    def paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(to_location(self.run_root))

    @property
    def evaluator_id(self) -> str:
        """The name of its pin, which no other evaluator of the run has."""
        return "-".join(["evaluator", *([self.name] if self.name else []), *(["attached"] if self.attached else [])])

    @property
    def actor_name(self) -> str:
        """The name of its actor."""
        return f"evaluator-{self.paths.unique_name}-{self.fence}"

    def make_pin(self, done_step: int, expires_s: float) -> Pin:
        """Returns a pin of the checkpoints that it still needs, which are those after `done_step`."""
        max_checkpoints = self.section.max_pending
        if self.section.patience is not None:
            # Early stopping depends on every evaluation.
            max_checkpoints = ALL_CHECKPOINTS
        return Pin(done_step, expires_s, max_checkpoints, self.name)


def pending_commits(job: EvaluationJob) -> list[Commit]:
    """Returns the checkpoints that wait for an evaluation, in the order of their steps."""
    done = evaluated_steps(job.paths, job.name)
    waiting = [commit for commit in CheckpointStore(job.paths).commits() if commit.step not in done]
    return sorted(waiting, key=lambda commit: commit.step)


def last_evaluated(done: Collection[int]) -> int:
    """Returns the newest evaluated step; -1 if there is none."""
    return max(done, default=-1)
