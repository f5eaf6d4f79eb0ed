"""What MLflow gets to see of a run's record: one point for every block of steps and one for every evaluation.

A point is a function of the record alone, its time too, so a point that is sent a second time is the same one to the last bit, and
MLflow's SQL stores drop it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ray_app.record.evaluations import Evaluation, read_evaluations
from ray_app.record.files import Location, names
from ray_app.record.journal import MetricsReader, StepRecord, read_events
from ray_app.record.paths import RunPaths

_LOST_AFTER_S = 60.0
_TAKEN = StepRecord(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, [], [], "")


@dataclass(frozen=True)
class Point:
    """Metrics of one step.

    Args:
        step: Finished steps.
        time_ms: When it was recorded, milliseconds since 1970 (UTC).
        metrics: Value by name; NaN and infinity are left as they are.
        evaluation: Whether an evaluator found them.
    """

    step: int
    time_ms: int
    metrics: dict[str, float]
    evaluation: bool


class Backlog:
    """The part of a run's record that has not been sent; its memory grows with that part, and by some bytes per step.

    Args:
        paths: The run.
        every_steps: Steps of a block; blocks are aligned, so that it does not matter who sends them.
    """

    def __init__(self, paths: RunPaths, every_steps: int) -> None:
        self._paths, self._every_steps = paths, every_steps
        self._evaluations: list[Evaluation] = []
        self._failed_at_s: list[float] = []
        self._files: dict[Location, int] = {}
        self.rewind()

    def rewind(self) -> None:
        """Reads the record from its beginning at the next `read`."""
        self._reader = MetricsReader(self._paths)
        self._steps: dict[int, StepRecord] = {}
        self._forgotten = self.newest_step = 0

    def read(self, sent_step: int) -> None:
        """Takes what is new in the record.

        Args:
            sent_step: Steps up to this one are not needed again.

        Raises:
            OSError: The run directory cannot be read for now; the next call starts over and misses nothing.
        """
        try:
            records = self._reader.poll()
        except Exception:
            self.rewind()
            raise
        self._forgotten = max(self._forgotten, sent_step)
        for record in records:
            self._reader.records[record.step] = _TAKEN
            self.newest_step = max(self.newest_step, record.step)
            if record.step > sent_step:
                self._steps[record.step] = record
        if self._has_changed(self._paths.evaluations):
            self._evaluations = read_evaluations(self._paths)
        if self._has_changed(self._paths.events):
            self._failed_at_s = [event.time_s for event in read_events(self._paths, "failed")]

    def sent(self, step: int) -> None:
        """Forgets the steps up to this one."""
        for known in range(self._forgotten + 1, step + 1):
            self._steps.pop(known, None)
        self._forgotten = max(self._forgotten, step)

    def unsent_evaluations(self, sent: Collection[int]) -> list[Evaluation]:
        """Evaluations by step, without those of the steps in `sent`."""
        return [evaluation for evaluation in self._evaluations if evaluation.step not in sent]

    def points(self, sent_step: int, sent_evaluations: Collection[int], finished: bool) -> Iterator[Point]:
        """What can be sent now, in the order of the steps, then the evaluations in theirs.

        Args:
            sent_step: The step of the last point that was sent.
            sent_evaluations: Steps whose evaluation was sent.
            finished: Whether no more steps will come, so that the last block is what there is of it.
        """
        yield from self._step_points(sent_step, finished)
        for evaluation in self.unsent_evaluations(sent_evaluations):
            yield evaluation_point(evaluation)

    def _step_points(self, sent_step: int, finished: bool) -> Iterator[Point]:
        newest, every = max(self._steps, default=0), self._every_steps
        first = sent_step + 1
        while first <= newest:
            last = -(-first // every) * every
            steps = [self._steps[step] for step in range(first, last + 1) if step in self._steps]
            if len(steps) <= last - first and not finished and not self._is_lost(last, newest):
                return
            if steps:
                yield step_point(steps, self._failed_at_s)
            first = last + 1

    def _is_lost(self, last: int, newest: int) -> bool:
        """Whether a step missing from the block that ends with `last` will never come: its writer was killed before it wrote it.

        Records come in the order of the steps, except that an attempt that starts over fills what the last one left. So a hole is
        left alone until the steps behind it span a minute.
        """
        behind = next((step for step in range(last + 1, newest + 1) if step in self._steps), newest)
        return self._steps[newest].time_s - self._steps[behind].time_s >= _LOST_AFTER_S

    def _has_changed(self, folder: Location) -> bool:
        """Whether a folder of files that are never changed has more of them than before."""
        files = len(names(folder))
        before, self._files[folder] = self._files.get(folder, 0), files
        return files != before


def step_point(steps: list[StepRecord], failed_at_s: Collection[float]) -> Point:
    """The point of a block.

    Args:
        steps: Its steps in order, at least one.
        failed_at_s: When workers failed, seconds since 1970 (UTC).
    """
    last = steps[-1]
    rows = [sum(record.rows) for record in steps]
    step_ms = [record.step_ms for record in steps]
    metrics = {
        "loss": _ratio(sum(record.loss * n for record, n in zip(steps, rows, strict=True)), sum(rows)),
        "lr": last.lr,
        "grad_norm": statistics.fmean(record.grad_norm for record in steps),
        "step_ms": statistics.median(step_ms),
        "data_wait_ms": statistics.fmean(record.data_wait_ms for record in steps),
        "rows_per_s": _ratio(1e3 * sum(rows), sum(step_ms)),
        "workers": float(last.workers),
        "restarts": float(sum(at_s <= last.time_s for at_s in failed_at_s)),
    }
    return Point(last.step, int(last.time_s * 1e3), metrics, evaluation=False)


def evaluation_point(evaluation: Evaluation) -> Point:
    """The point of an evaluation, `eval_<name>` for each of its metrics that is a number."""
    metrics = {f"eval_{name}": float(value) for name, value in evaluation.metrics.items() if isinstance(value, int | float)}
    return Point(evaluation.step, int(evaluation.time_s * 1e3), metrics, evaluation=True)


def _ratio(value: float, by: float) -> float:
    return value / by if by else float("nan")
