"""What MLflow gets to see of a run's record: one point for every block of steps, every evaluation and every look at the nodes.

A point is a function of the record alone, its time too, so a point that is sent a second time is the same one to the last bit, and
MLflow's SQL stores drop it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ray_app.record.evaluations import Evaluation, evaluator_names, read_scores
from ray_app.record.files import Location, names
from ray_app.record.paths import RunPaths
from ray_app.record.progress.history import means
from ray_app.record.progress.journal import FirstRecords, read_events
from ray_app.record.progress.segments import StepRecord
from ray_app.record.progress.system import Look, read_looks

_LOST_AFTER_S = 60.0


OWN = ""
"""What stands for the run's own evaluator, which has no name, where a name is needed."""


@dataclass(frozen=True)
class Point:
    """Metrics of one step.

    Args:
        step: Finished steps.
        time_ms: When it was recorded, milliseconds since 1970 (UTC).
        metrics: Value by name; NaN and infinity are left as they are.
        evaluator: Which evaluator found them, see `OWN`; None: none did.
        look: Name of the look at the nodes that they come from; None: they do not. With neither they are of a block of steps.
    """

    step: int
    time_ms: int
    metrics: dict[str, float]
    evaluator: str | None = None
    look: str | None = None


@dataclass
class Sent:
    """How far the record was sent.

    Args:
        sent_step: Step of the last point of a block that MLflow has.
        evaluations: For each evaluator, the steps whose evaluation MLflow has.
        look: Name of the last look at the nodes that MLflow has.
    """

    sent_step: int = 0
    evaluations: dict[str, list[int]] = field(default_factory=dict)
    look: str = ""

    def add(self, point: Point) -> None:
        """Notes that a point was sent."""
        if point.look is not None:
            self.look = point.look
        elif point.evaluator is not None:
            self.evaluations.setdefault(point.evaluator, []).append(point.step)
        else:
            self.sent_step = point.step


class Backlog:
    """The part of a run's record that has not been sent; its memory grows with that part, and by some bytes per step.

    Args:
        paths: The run.
        every_steps: Steps of a block; blocks are aligned, so that it does not matter who sends them.
    """

    def __init__(self, paths: RunPaths, every_steps: int) -> None:
        self._paths, self._every_steps = paths, every_steps
        self._evaluations: dict[str, list[Evaluation]] = {}
        self._failed_at_s: list[float] = []
        self._files: dict[Location, int] = {}
        self.rewind()

    def rewind(self) -> None:
        """Reads the record from its beginning at the next `read`."""
        self._reader = FirstRecords(self._paths)
        self._steps: dict[int, StepRecord] = {}
        self._forgotten = self.newest_step = 0
        self._looks: dict[str, Look] = {}

    def read(self, sent: Sent) -> None:
        """Takes what is new in the record.

        Args:
            sent: What is not needed again.

        Raises:
            OSError: The run directory cannot be read for now; the next call starts over and misses nothing.
        """
        self._forgotten = max(self._forgotten, sent.sent_step)
        try:
            for record in self._reader.poll():
                self.newest_step = max(self.newest_step, record.step)
                if record.step > sent.sent_step:
                    self._steps[record.step] = replace(record, rows=[sum(record.rows)], row_hash=[])  # all that points are made of
        except Exception:
            self.rewind()
            raise
        for name in (OWN, *evaluator_names(self._paths)):
            with self._change(self._paths.evaluations_of(name or None)) as is_new:
                if is_new:
                    self._evaluations[name] = read_scores(self._paths, name or None)
        with self._change(self._paths.events) as is_new:
            if is_new:
                self._failed_at_s = [event.time_s for event in read_events(self._paths, "failed")]
        self._looks |= read_looks(self._paths, sent.look, self._looks)

    def sent(self, sent: Sent) -> None:
        """Forgets what was sent."""
        for known in range(self._forgotten + 1, sent.sent_step + 1):
            self._steps.pop(known, None)
        self._forgotten = max(self._forgotten, sent.sent_step)
        self._looks = {name: look for name, look in self._looks.items() if name > sent.look}

    def unsent_evaluations(self, sent: Sent) -> Iterator[Point]:
        """The points of evaluations that were not sent, of one evaluator after the other, by step."""
        for name, evaluations in self._evaluations.items():
            known = frozenset(sent.evaluations.get(name, ()))
            yield from (evaluation_point(evaluation, name) for evaluation in evaluations if evaluation.step not in known)

    def points(self, sent: Sent, finished: bool) -> Iterator[Point]:
        """What can be sent now, in the order of the steps, then the evaluations and the looks at the nodes in theirs.

        Args:
            sent: What was sent before this call.
            finished: Whether no more steps will come, so that the last block is what there is of it.
        """
        yield from self._step_points(sent.sent_step, finished)
        yield from list(self.unsent_evaluations(sent))
        yield from [look_point(name, look) for name, look in sorted(self._looks.items()) if name > sent.look]

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

    @contextmanager
    def _change(self, folder: Location) -> Iterator[bool]:
        """Whether a folder of files that are never changed has more of them than were read before; noted when they are read."""
        files = len(names(folder))
        yield files != self._files.get(folder, 0)
        self._files[folder] = files


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
        **means(steps),
        "lr": last.lr,
        "grad_norm": _mean([record.grad_norm for record in steps if math.isfinite(record.grad_norm)]),  # infinite where fp16 overflowed
        "step_ms": statistics.median(step_ms),
        "data_wait_ms": statistics.fmean(record.data_wait_ms for record in steps),
        "rows_per_s": _ratio(1e3 * sum(rows), sum(step_ms)),
        "workers": float(last.workers),
        "restarts": float(sum(at_s <= last.time_s for at_s in failed_at_s)),
    }
    if imbalances := [record.imbalance for record in steps if record.imbalance is not None]:
        metrics["imbalance"] = statistics.fmean(imbalances)
    return Point(last.step, int(last.time_s * 1e3), metrics)


def evaluation_point(evaluation: Evaluation, evaluator: str = OWN) -> Point:
    """The point of an evaluation: `eval_<metric>` for each metric that is a number, of a named evaluator `eval_<evaluator>_<metric>`."""
    prefix = f"eval_{evaluator}_" if evaluator else "eval_"
    metrics = {prefix + name: float(value) for name, value in evaluation.metrics.items() if isinstance(value, int | float)}
    return Point(evaluation.step, int(evaluation.time_s * 1e3), metrics, evaluator)


def look_point(name: str, look: Look) -> Point:
    """The point of a look at the nodes, `system/<node>/<value>` for each value."""
    metrics = {f"system/{node}/{key}": value for node, values in sorted(look.nodes.items()) for key, value in values.items()}
    return Point(look.step, int(look.time_s * 1e3), metrics, look=name)


def _mean(values: list[float]) -> float:
    return _ratio(math.fsum(values), len(values))


def _ratio(value: float, by: float) -> float:
    return value / by if by else float("nan")
