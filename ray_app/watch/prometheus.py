"""How a run gets on, for Prometheus: Ray's own metrics, which the agent on the driver's node shows to whoever scrapes
the cluster.
"""

from __future__ import annotations

import logging

import ray
from ray.util.metrics import Gauge

from ray_app.runlog.history import SETTLING_S
from ray_app.runlog.journal import StepRecord

logger = logging.getLogger(__name__)

METRICS = {
    "steps": "Finished steps of the run",
    "rows_per_second": "Rows per second that it trains on",
    "workers": "Workers that step",
    "goodput": "Rows that counted x undisturbed time per row / time since the first step of this start",
    "restarts": "Disturbances in all starts, by cause",
    "replay_mismatches": "Workers that were found to compute wrongly, in all starts",
    "evaluator_lag_seconds": "Age of the oldest checkpoint that waits for its evaluation",
}
"""What each is; its name is `ray_app_` and this."""
_LABELS = {"restarts": ("run", "cause")}


class RunMetrics:
    """The metrics of a run, labelled with its name.

    To set one takes microseconds and waits for nobody: a thread in Ray's core hands the values to the agent every ten
    seconds, or to nobody where there is none. What Ray refuses is said once, and then nothing more is set; without Ray
    nothing is.

    Args:
        run: Name of the run.
    """

    def __init__(self, run: str) -> None:
        self._run, self._gauges = run, dict[str, Gauge]()
        try:
            if ray.is_initialized():  # Ray puts `ray_` before a name
                self._gauges = {
                    name: Gauge(f"app_{name}", text, _LABELS.get(name, ("run",))) for name, text in METRICS.items()
                }
        except Exception as error:
            self._give_up(error)

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Sets one; None: it is not known yet."""
        if value is None or not self._gauges:
            return
        try:
            self._gauges[name].set(value, {"run": self._run, **labels})
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._gauges = {}
        logger.warning("Ray takes no metrics of the run: %s: %s", type(error).__name__, error)


class Speed:
    """Speed and goodput of a start, from looks at its newest step: a few sums, nothing is read.

    The goodput is that of `record.progress.history`, of this start alone, and as exact as looks are frequent.

    Args:
        batch_rows: Rows of a step.
    """

    def __init__(self, batch_rows: int) -> None:
        self._batch_rows = batch_rows
        self._first_step = self._most = 0
        self._last: StepRecord | None = None
        self._seen_s = self._idle_s = self._wall_s = self._began_s = 0.0
        self._settled, self._all = (0.0, 0), (0.0, 0)
        self.rows_per_s: float | None = None

    def look(self, record: StepRecord, now_s: float) -> None:
        """Takes the newest step as it is known now, by a clock that does not jump."""
        last, self._idle_s = self._last, now_s - self._seen_s
        if last is None:
            self._first_step, self._most, self._began_s = record.step, record.workers, record.time_s
        elif (record.step, record.generation) == (last.step, last.generation):
            if self.rows_per_s is not None:  # it cannot be faster than this by now
                self.rows_per_s = min(self.rows_per_s, self._batch_rows / max(1e-9, self._idle_s))
            return
        elif (record.generation, record.workers) != (last.generation, last.workers):
            self._wall_s += self._idle_s
            self._began_s = record.time_s
            if record.workers > self._most:
                self._most, self._settled, self._all = record.workers, (0.0, 0), (0.0, 0)
        else:
            self._went_on(record.time_s - last.time_s, record.step - last.step, last.time_s)
        self._last, self._seen_s, self._idle_s = record, now_s, 0.0

    def _went_on(self, took_s: float, steps: int, since_s: float) -> None:
        """Steps of the same workers: their own clock tells how long they took."""
        assert self._last is not None
        self._wall_s += took_s
        if took_s > 0:
            self.rows_per_s = steps * self._batch_rows / took_s
        if self._last.workers == self._most:
            self._all = self._all[0] + took_s, self._all[1] + steps
            if since_s > self._began_s + SETTLING_S:
                self._settled = self._settled[0] + took_s, self._settled[1] + steps

    @property
    def goodput(self) -> float | None:
        """Of the time since the first step that was seen; None: too few were."""
        undisturbed_s, steps = self._settled if self._settled[1] else self._all
        wall_s = self._wall_s + self._idle_s
        if self._last is None or not steps or wall_s <= 0:
            return None
        return max(0.0, min(1.0, (self._last.step - self._first_step) * undisturbed_s / steps / wall_s))
