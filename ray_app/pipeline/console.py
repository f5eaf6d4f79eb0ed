"""What a person sees while a run trains: a live bar on a terminal, a plain line every few seconds otherwise."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ray_app.record.evaluations import read_evaluations
from ray_app.record.journal import read_events
from ray_app.train.job import Job

_PLAIN_EVERY_S = 5.0


@dataclass
class _Rate:
    """Rows per second between two looks."""

    step: int = 0
    time_s: float = 0.0
    rows_per_s: float = 0.0

    def update(self, step: int, time_s: float, batch_rows: int) -> float:
        if step < self.step:
            self.step, self.time_s = step, time_s
        elif time_s - self.time_s > 0.5 and step > self.step:
            if self.time_s:
                self.rows_per_s = (step - self.step) * batch_rows / (time_s - self.time_s)
            self.step, self.time_s = step, time_s
        return self.rows_per_s


class RunConsole:
    """Shows one run.

    Args:
        job: The run.
        max_workers: Most workers it can have.
        console: Where to print.
    """

    def __init__(self, job: Job, max_workers: int, console: Console) -> None:
        self._job, self._max_workers, self._console = job, max_workers, console
        self._live = console.is_terminal or console.is_jupyter
        self._rate, self._line_s = _Rate(), 0.0
        self._evaluated, self._restarts, self._looked_s = "", 0, 0.0
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total} steps  {task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=not console.is_jupyter,
        )
        self._bar: TaskID | None = None
        self._epoch = -1

    def __enter__(self) -> RunConsole:
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()

    def show(self, progress: dict[str, Any], phase: str) -> None:
        """Shows how far the run is.

        Args:
            progress: What rank 0 last said; empty before the first step.
            phase: What the run is waiting for when there is no progress.
        """
        self._look_at_record()
        if not progress:
            self._show_phase(phase)
            return
        text = self._text(progress)
        if self._live:
            self._update_bar(progress, text)
        elif time.monotonic() - self._line_s > _PLAIN_EVERY_S:
            self._line_s = time.monotonic()
            per_epoch = self._job.plan.steps_per_epoch
            done = progress["step"] - progress["epoch"] * per_epoch
            epochs = self._job.config.train.epochs
            self._console.print(f"epoch {progress['epoch'] + 1}/{epochs} step {done}/{per_epoch} {text}", markup=False, highlight=False)

    def _look_at_record(self) -> None:
        if time.monotonic() - self._looked_s < 1.0:
            return
        self._looked_s = time.monotonic()
        evaluations = read_evaluations(self._job.paths)
        if evaluations:
            metric = self._job.best_metric
            self._evaluated = f"{metric} {evaluations[-1].metrics.get(metric, float('nan')):.4f} (step {evaluations[-1].step})"
        self._restarts = len(read_events(self._job.paths, "failed"))

    def _text(self, progress: dict[str, Any]) -> str:
        rate = self._rate.update(progress["step"], progress["time_s"], self._job.plan.global_batch_size)
        parts = [f"loss {progress['loss']:.4f}", f"{rate:,.0f} rows/s", f"{progress['workers']} of {self._max_workers} workers"]
        if self._evaluated:
            parts.append(self._evaluated)
        if self._restarts:
            parts.append(f"{self._restarts} restarts")
        return "  ".join(parts)

    def _update_bar(self, progress: dict[str, Any], text: str) -> None:
        per_epoch, epoch = self._job.plan.steps_per_epoch, progress["epoch"]
        if self._bar is None or epoch != self._epoch:
            if self._bar is not None:
                last = self._progress.tasks[self._bar]
                self._progress.update(self._bar, completed=per_epoch if epoch > self._epoch else last.completed)
                self._progress.stop_task(self._bar)
            self._bar = self._progress.add_task("", total=per_epoch, epoch=epoch + 1, epochs=self._job.config.train.epochs, text=text)
            self._epoch = epoch
        self._progress.update(self._bar, completed=progress["step"] - epoch * per_epoch, text=text)
        if self._console.is_jupyter:
            self._progress.refresh()

    def _show_phase(self, phase: str) -> None:
        if not self._live and time.monotonic() - self._line_s > _PLAIN_EVERY_S:
            self._line_s = time.monotonic()
            self._console.print(phase, markup=False)


def print_end(console: Console, job: Job, summary: dict[str, Any], tracking_uri: str | None) -> None:
    """Says what came of the run and where to look."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("status", summary["status"])
    for name, value in summary["metrics"].items():
        table.add_row(f"evaluation {name}", f"{value:.4f}")
    if summary["best"]:
        table.add_row("best", f"{summary['best']['metric']} {summary['best']['value']:.4f} at step {summary['best']['step']}")
    table.add_row("steps, rows", f"{summary['steps']:,} steps, {summary['rows']:,} rows")
    sizes = ", then ".join(f"{workers} from step {step}" for step, workers in summary["world_sizes"])
    table.add_row("workers", f"{sizes or 'none'} (arithmetic of {summary['logical_workers']})")
    restarts = ", ".join(f"{count} {name}" for name, count in summary["restarts"].items() if count)
    table.add_row("restarts", restarts or "none")
    table.add_row("parameters", f"sha256 {summary['params_digest']}")
    table.add_row("run directory", str(job.paths.root))
    if tracking_uri:
        table.add_row("MLflow page", f"mlflow ui --backend-store-uri {tracking_uri}")
    console.print(table, soft_wrap=True)
