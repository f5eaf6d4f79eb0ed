"""Metrics of a run while it trains: its progress for Prometheus, speed and goodput.

`RunMetrics` sets metrics of Ray, which the metrics agent on the driver's node exposes. `Speed` computes speed and
goodput of the newest steps.
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
    "rows_per_second": "Training rows per second",
    "workers": "Workers that train",
    "goodput": "Rows that counted x undisturbed time per row / time since the first step of this start",
    "restarts": "Disturbances in all starts, by cause",
    "sdc_detections": "Workers that computed wrongly, in all starts",
    "evaluator_lag_seconds": "Age of the oldest checkpoint that waits for its evaluation",
}
"""Description of each metric, by its name without the prefix `ray_app_`."""
_LABELS = {"restarts": ("run", "cause")}


class RunMetrics:
    """The metrics of a run, labeled with its name.

    Setting a value takes microseconds and never blocks: a thread in Ray's core sends the values to the agent every ten
    seconds, if there is one. If Ray refuses a metric, that is logged once and nothing is set any more; without Ray
    nothing is set at all.
    """

    def __init__(self, run: str) -> None:
        self._run, self._gauges = run, dict[str, Gauge]()
        try:
            # Ray adds the prefix `ray_`.
            if ray.is_initialized():
                self._gauges = {
                    name: Gauge(f"app_{name}", text, _LABELS.get(name, ("run",))) for name, text in METRICS.items()
                }
        except Exception as error:
            self._disable(error)

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Sets the value of a metric; does nothing if the value is None, that is not known yet."""
        if value is None or not self._gauges:
            return
        try:
            self._gauges[name].set(value, {"run": self._run, **labels})
        except Exception as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._gauges = {}
        logger.warning("Ray does not accept metrics of the run: %s: %s", type(error).__name__, error)


class Speed:
    """Computes speed and goodput of a start from its newest steps, with a few sums and without reading files.

    The goodput is that of `runlog.history`, for this start only, and the more exact the more often `look` is called.
    """

    def __init__(self, batch_rows: int) -> None:
        self._batch_rows = batch_rows
        self._first_step = self._max_workers = 0
        self._last: StepRecord | None = None
        self._last_change_s = self._idle_s = self._wall_s = self._began_s = 0.0
        self._steady, self._total = (0.0, 0), (0.0, 0)
        self.rows_per_s: float | None = None

    def look(self, record: StepRecord, now_s: float) -> None:
        """Updates the sums by the newest step; `now_s` is the time of a monotonic clock."""
        last, self._idle_s = self._last, now_s - self._last_change_s
        if last is None:
            self._first_step = record.step
            self._max_workers = record.workers
            self._began_s = record.time_s
        elif (record.step, record.generation) == (last.step, last.generation):
            # Since the last step too much time has passed for a higher speed than this.
            if self.rows_per_s is not None:
                self.rows_per_s = min(self.rows_per_s, self._batch_rows / max(1e-9, self._idle_s))
            return
        elif (record.generation, record.workers) != (last.generation, last.workers):
            self._wall_s += self._idle_s
            self._began_s = record.time_s
            if record.workers > self._max_workers:
                self._max_workers = record.workers
                self._steady = (0.0, 0)
                self._total = (0.0, 0)
        else:
            self._count_steps(record.time_s - last.time_s, record.step - last.step, last.time_s)
        self._last = record
        self._last_change_s = now_s
        self._idle_s = 0.0

    def _count_steps(self, elapsed_s: float, steps: int, since_s: float) -> None:
        """Adds steps of the same workers, with their time by the workers' clock."""
        assert self._last is not None
        self._wall_s += elapsed_s
        if elapsed_s > 0:
            self.rows_per_s = steps * self._batch_rows / elapsed_s
        if self._last.workers == self._max_workers:
            self._total = self._total[0] + elapsed_s, self._total[1] + steps
            if since_s > self._began_s + SETTLING_S:
                self._steady = self._steady[0] + elapsed_s, self._steady[1] + steps

    @property
    def goodput(self) -> float | None:
        """The goodput since the first step that was passed to `look`; None until there are enough steps."""
        undisturbed_s, steps = self._steady if self._steady[1] else self._total
        wall_s = self._wall_s + self._idle_s
        if self._last is None or not steps or wall_s <= 0:
            return None
        return max(0.0, min(1.0, (self._last.step - self._first_step) * undisturbed_s / steps / wall_s))
