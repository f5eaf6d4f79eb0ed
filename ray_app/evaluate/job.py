"""What an evaluator evaluates, and in which order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ray_app.checkpoint.store import ALL, CheckpointStore, Commit, Hold
from ray_app.config.sections import EvaluateSection
from ray_app.data.reader import RowSource
from ray_app.runlog.evaluations import evaluated_steps
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location
from ray_app.task.base import Task


@dataclass(frozen=True)
class EvaluationJob:
    """What an evaluator needs to know.

    Args:
        section: How to follow.
        task: The prepared task.
        run_root: The run's directory.
        fence: Number of the driver's start.
        data: The evaluation data.
        name: Of an evaluator beside the run's own; None: the run's own.
        attached: Whether it belongs to another job than the run's driver.
        deterministic: Whether it computes with deterministic kernels, as the workers do with `reduction: exact`.
    """

    section: EvaluateSection
    task: Task
    run_root: str
    fence: int
    data: RowSource
    name: str | None = None
    attached: bool = False
    deterministic: bool = True

    @property
    def paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(to_location(self.run_root))

    @property
    def follower(self) -> str:
        """What its hold is named after."""
        return "-".join(["evaluator", *([self.name] if self.name else []), *(["attached"] if self.attached else [])])

    @property
    def actor_name(self) -> str:
        """Name of its actor."""
        return f"evaluator-{self.paths.unique_name}-{self.fence}"

    def hold(self, done_step: int, expires_s: float) -> Hold:
        """Says which checkpoints it still needs: those after `done_step`."""
        most = (
            ALL
            if self.section.patience is not None
            else 1
            if self.section.every == "latest"
            else self.section.max_pending
        )
        return Hold(done_step, expires_s, most, self.name)


def pending(job: EvaluationJob) -> list[Commit]:
    """The checkpoints that wait for an evaluation, in the order of their steps."""
    done = evaluated_steps(job.paths, job.name)
    waiting = {c.step: c for c in CheckpointStore(job.paths).commits() if c.step not in done}
    if job.section.every == "latest":  # what was passed over does not come back
        waiting = {step: c for step, c in waiting.items() if step > max(done, default=-1)}
    return [waiting[step] for step in sorted(waiting)]


def choose(waiting: list[Commit], every: Literal["checkpoint", "latest"]) -> tuple[Commit, list[Commit]]:
    """The checkpoint to evaluate next, and those that are passed over for it."""
    return (waiting[-1], waiting[:-1]) if every == "latest" else (waiting[0], [])


def last_evaluated(done: Collection[int]) -> int:
    """The newest evaluated step; -1 without any."""
    return max(done, default=-1)


def pause_s(duration_s: float, share: float, budget: float) -> float:
    """Seconds to rest after an evaluation so that evaluations take at most the budget on average.

    Args:
        duration_s: Seconds that it took.
        share: Share of the cluster that the evaluator reserves while it evaluates, 0 to 1.
        budget: Share that it may take on average.
    """
    return max(0.0, duration_s * (share / budget - 1))
