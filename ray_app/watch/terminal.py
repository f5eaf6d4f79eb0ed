"""A line of a notebook cell's output that changes in place, by Jupyter's display protocol alone: JupyterLab, VS Code
and others know it.

What a preflight or a check of a task found, line by line.

A console that never ends a run.

What a person sees while a run trains: a live bar on a terminal, a live line in Jupyter, a plain line every few seconds
otherwise.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ray_app.checkpoint.store import Commit
from ray_app.cluster.controller.failure_budget import failure_events, failure_summary
from ray_app.errors import ConfigError, DataError
from ray_app.process import SafeStream
from ray_app.report.charts import sparkline
from ray_app.report.facts import Facts
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.history import count, disturbances, restarts
from ray_app.runlog.journal import StepRecord, newest_record
from ray_app.runlog.output import NewLines
from ray_app.runlog.redaction import redact
from ray_app.storage.files import poll_interval_s
from ray_app.train.job import Job
from ray_app.watch.prometheus import RunMetrics, Speed


class LiveLine:
    """One line; what it showed last stays in the stored notebook. Only to be used inside a kernel, where IPython is."""

    def __init__(self) -> None:
        self._display: Any = None
        self._shown: tuple[str, float | None] | None = None

    def show(self, text: str, part: float | None = None) -> None:
        """Shows another text.

        Args:
            text: The line.
            part: How much is done, from 0 to 1, for a bar; None: nobody knows.
        """
        from IPython.display import display

        if (text, part) == self._shown:
            return
        self._shown = text, part
        bar = (
            f'<progress value="{part:.4f}" style="width: 14em; vertical-align: middle"></progress> '
            if part is not None
            else ""
        )
        style = "white-space: pre-wrap; font-family: monospace; font-variant-numeric: tabular-nums"
        data = {"text/plain": text, "text/html": f'<div style="{style}">{bar}{escape(text)}</div>'}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)


Level = Literal["ok", "warning", "refused", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of it.

    Args:
        level: `refused`: the run would not work, and nothing is started. `failed`: it would start, and not keep what is
            promised.
        topic: What was looked at, in a word or two.
        text: What was found, and what to do about it.
    """

    level: Level
    topic: str
    text: str


def look(topic: str, see: Callable[[], str | Finding]) -> Finding:
    """Looks at one thing.

    Args:
        topic: What it is.
        see: Returns what is well, or a finding of another level.

    Returns:
        The finding; an error is a refusal, since the run would meet it, too.
    """
    try:
        found = see()
    except (ConfigError, DataError) as error:
        return Finding("refused", topic, str(error))
    except Exception as error:
        return Finding("refused", topic, f"{type(error).__name__}: {error}")
    return found if isinstance(found, Finding) else Finding("ok", topic, found)


def refused(findings: list[Finding]) -> bool:
    """Whether any of them is a refusal."""
    return any(finding.level == "refused" for finding in findings)


def show(console: Console, findings: list[Finding]) -> None:
    """Prints them, further lines of a text below its first."""
    width = max((len(finding.topic) for finding in findings), default=0)
    for finding in findings:
        start = f"{finding.level:<8} {finding.topic:<{width}}  "
        text = redact(finding.text).replace("\n", "\n" + " " * len(start))
        console.print(start + text, markup=False, highlight=False, soft_wrap=True)


logger = logging.getLogger(__name__)


class SafeConsole:
    """A console whose failures stay in it: a full disk, a closed pipe, a notebook that is gone. The first one is
    reported.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._failure: BaseException | None = None
        self._report: Callable[[str], object] | None = None
        self._is_reported = False

    def report_to(self, report: Callable[[str], object]) -> None:
        """Calls `report` with the reason of the first failure, once; at once if there was one before."""
        self._report = report
        self._report_failure()

    def print(self, text: str) -> None:
        """Prints a text as it is, without markup."""
        with self.guarded():
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """The time in which something is shown; whatever that raises is no matter of the run."""
        try:
            yield
        except SystemExit as error:  # rich exits where nobody reads a pipe any more; the code of a signal is another
            if error.code != 1:
                raise
            self._fail(BrokenPipeError("nobody reads standard output any more"))
        except Exception as error:
            self._fail(error)
        self._report_failure()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            logger.warning("The console fails, the run goes on: %s: %s", type(error).__name__, error)

    def _report_failure(self) -> None:
        stream = self.console.file
        failure = self._failure or (stream.failure if isinstance(stream, SafeStream) else None)
        if failure is not None:
            self._report_once(f"{type(failure).__name__}: {failure}")

    def _report_once(self, reason: str) -> None:
        if self._report is not None and not self._is_reported:
            self._is_reported = True
            self._report(reason)

    def as_plain(self) -> SafeConsole:
        """The same without a terminal's and a notebook's display, for plain lines."""
        plain = SafeConsole(
            Console(file=self.console.file, force_terminal=False, force_jupyter=False, quiet=self.console.quiet)
        )
        plain._report = self._report_once
        return plain


_PLAIN_EVERY_S = 5.0
_MOST_SLOW = 3
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"


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
        waiting: Returns the checkpoints that wait for the evaluator.
        metrics: Told how it gets on, while it is looked at.
    """

    def __init__(
        self,
        job: Job,
        max_workers: int,
        console: SafeConsole,
        waiting: Callable[[], list[Commit]],
        metrics: RunMetrics | None = None,
    ) -> None:
        self._job, self._max_workers, self._console, self._waiting = job, max_workers, console, waiting
        rich = console.console
        self._live = rich.is_terminal and not rich.is_jupyter
        self._cell = LiveLine() if rich.is_jupyter else None
        self._metrics, self._speed = metrics, Speed(job.plan.global_batch_size)
        self._rate, self._line_s = _Rate(), 0.0
        self._evaluated, self._spent, self._looked_s = "", "", 0.0
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total} steps  {task.fields[text]}"),
            TimeElapsedColumn(),
            console=rich,
        )
        self._bar: TaskID | None = None
        self._epoch = -1
        self._told_phase = ""
        self._printed = NewLines(job.paths, job.fence)

    def __enter__(self) -> RunConsole:
        if self._live:
            with self._console.guarded():
                self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._console.guarded():
            if self._metrics is not None:
                self._metrics.set("workers", 0)
                self._metrics.set("rows_per_second", 0)
            if self._live:
                self._progress.stop()

    def show(self, newest: StepRecord | None, phase: str, waits: bool = False) -> None:
        """Shows how far the run is; a failure to do so is no failure of the run.

        Args:
            newest: The newest step that rank 0 told of; None before the first.
            phase: What the run is waiting for until then, or again.
            waits: Whether it waits for capacity now.
        """
        with self._console.guarded():
            self._show(newest, phase, waits)

    def _show(self, newest: StepRecord | None, phase: str, waits: bool) -> None:
        self._look_at_record(newest, waits)
        if newest is None or waits:
            self._show_phase(phase)
        elif self._live:
            self._update_bar(newest)
        elif self._cell is not None:
            self._cell.show(self._line(newest), newest.step / self._job.total_steps)
        elif self._is_line_due():
            self._console.print(self._line(newest))

    def show_last(self) -> None:
        """Shows the last step, as it was recorded: what rank 0 told of before may be older."""
        with self._console.guarded():
            try:
                self._show_printed()
                newest = newest_record(self._job.paths)
            except OSError as error:
                logger.warning("The record could not be read: %s", error)
                return
            if newest is not None:
                self._show(newest, "", waits=False)

    def _show_printed(self) -> None:
        """Shows what workers and evaluator have printed."""
        for line in self._printed.poll():
            self._console.print(line)

    def _is_line_due(self) -> bool:
        if time.monotonic() - self._line_s < _PLAIN_EVERY_S:
            return False
        self._line_s = time.monotonic()
        return True

    def _look_at_record(self, newest: StepRecord | None, waits: bool) -> None:
        if time.monotonic() - self._looked_s < max(1.0, poll_interval_s(self._job.paths.root)):
            return
        self._looked_s = time.monotonic()
        if self._metrics is not None and newest is not None:
            self._measure(self._metrics, newest, waits)
        try:
            self._show_printed()
            evaluations = read_scores(self._job.paths)
            events = failure_events(self._job.paths)
            self._spent = disturbances(events, self._job.config.failure)
            waiting = self._waiting()
        except OSError as error:  # a passing outage of the storage
            logger.warning("The record could not be read, will try again: %s", error)
            return
        if self._metrics is not None:
            for cause, times in restarts(events).items():
                self._metrics.set("restarts", times, cause=cause)
            self._metrics.set("replay_mismatches", count(events, "sdc_detected"))
        if evaluations:
            metric = self._job.best_metric
            behind = (
                f", {len(waiting)} checkpoints, {time.time() - waiting[0].time_s:.0f} s behind"
                if len(waiting) > 1
                else ""
            )
            self._evaluated = (
                f"{metric} {evaluations[-1].metrics.get(metric, float('nan')):.4f} (step"
                f" {evaluations[-1].step}{behind})"
            )

    def _measure(self, metrics: RunMetrics, newest: StepRecord, waits: bool) -> None:
        self._speed.look(newest, time.monotonic())
        metrics.set("steps", newest.step)
        metrics.set("workers", 0 if waits else newest.workers)
        metrics.set("rows_per_second", self._speed.rows_per_s)
        metrics.set("goodput", self._speed.goodput)

    def _line(self, newest: StepRecord) -> str:
        (epoch, done), epochs = self._place(newest), self._job.config.train.epochs
        return f"epoch {epoch + 1}/{epochs} step {done}/{self._job.steps_per_epoch} {self._text(newest)}"

    def _place(self, newest: StepRecord) -> tuple[int, int]:
        """The epoch of a step, from 0, and which of its steps it is, from 1."""
        epoch, step = divmod(newest.step - 1, self._job.steps_per_epoch)
        return epoch, step + 1

    def _text(self, newest: StepRecord) -> str:
        rate = self._rate.update(newest.step, newest.time_s, self._job.plan.global_batch_size)
        speed = f"{rate:,.0f} rows/s" if rate else "- rows/s"
        named = [f"{name} {value:.4f}" for name, value in newest.metrics.items()]
        parts = [f"loss {newest.loss:.4f}", *named, speed, f"{newest.workers} of {self._max_workers} workers"]
        parts += [f"rank {rank} takes {times:.1f}x as long" for rank, times in list(newest.slow.items())[:_MOST_SLOW]]
        if self._evaluated:
            parts.append(self._evaluated)
        if self._spent:
            parts.append(self._spent)
        return "  ".join(parts)

    def _update_bar(self, newest: StepRecord) -> None:
        """Moves the bar of the epoch, or ends it and begins the next."""
        per_epoch, text, (epoch, done) = self._job.steps_per_epoch, self._text(newest), self._place(newest)
        if self._bar is None or epoch != self._epoch:
            if self._bar is not None:
                if epoch > self._epoch:
                    self._progress.update(self._bar, completed=per_epoch)
                self._progress.stop_task(self._bar)
            self._epoch, epochs = epoch, self._job.config.train.epochs
            self._bar = self._progress.add_task("", total=per_epoch, epoch=epoch + 1, epochs=epochs, text=text)
        self._progress.update(self._bar, completed=done, text=text)

    def _show_phase(self, phase: str) -> None:
        if self._cell is not None:
            self._cell.show(phase)
        elif phase != self._told_phase:
            self._told_phase = phase
            self._console.print(phase)


def best_line(summary: dict[str, Any], metric: str) -> str | None:
    """Which checkpoint of a run is best, or why none is; None if nothing was evaluated."""
    best, done = summary["best"], summary["evaluation"]["done"]
    if best and best["value"] is not None:
        return f"{best['metric']} {best['value']:.4f} at step {best['step']}"
    if not done:
        return None
    taken = (
        f"step {best['step']}, the first evaluated, is kept as the result"
        if best
        else "the newest checkpoint is taken where one is asked for"
    )
    return (
        f"unknown: {metric} is not a number in any of {done} evaluations; {taken}. Let evaluate.metric name another"
        f" metric."
    )


def print_end(
    console: SafeConsole, job: Job, summary: dict[str, Any], facts: Facts | None, tracking_uri: str | None
) -> None:
    """Says what came of the run and where to look.

    Args:
        console: Where to print.
        job: The run.
        summary: Its `summary.json`.
        facts: What its report tells; None if that could not be made.
        tracking_uri: Where MLflow has it, if it does.
    """
    rows = [("status", summary["status"])]
    rows += [
        (f"evaluation {name}", "not a number" if value is None else f"{value:.4f}")
        for name, value in summary["metrics"].items()
    ]
    if (best := best_line(summary, job.best_metric)) is not None:
        rows.append(("best", best))
    rows.append(("steps, rows", f"{summary['steps']:,} steps, {summary['rows']:,} rows"))
    sizes = ", then ".join(f"{workers} from step {step}" for step, workers in summary["world_sizes"])
    rows.append(("workers", f"{sizes or 'none'} (arithmetic of {summary['logical_workers']})"))
    if took := summary["start_s"]:
        rows.append(
            (
                "start",
                f"{sum(took.values()):.1f} s: "
                + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in took.items()),
            )
        )
    if facts is not None:
        rows += [("loss", curve) for curve in [loss_curve(facts, console.console.encoding)] if curve]
        rows.append(("cluster", facts.story))
    else:
        rows.append(("cluster", failure_summary(job.paths, job.config.failure) or "nothing went wrong"))
    rows.append(("parameters", f"sha256 {summary['params_digest']}"))
    if summary.get("model"):
        rows.append(("model", model_line(summary["model"])))
    rows.append(("run directory", str(job.paths.root)))
    if facts is not None:
        rows.append(("report", str(job.paths.report)))
    if tracking_uri:
        rows.append(("MLflow page", _mlflow_page(tracking_uri)))
    if job.config.tracking.tensorboard:
        rows.append(("TensorBoard", shlex.join(["tensorboard", "--logdir", str(job.paths.tensorboard)])))
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    if not _is_utf8(console.console.encoding):
        text = text.replace("→", "->").encode("ascii", "replace").decode()
    console.print(text)


def model_line(model: dict[str, Any]) -> str:
    """A registered version in a line, from the field `model` of a summary."""
    return f"{model['name']} version {model['version']}" + "".join(f" @{alias}" for alias in model["aliases"])


def loss_curve(facts: Facts, encoding: str) -> str:
    """The losses of all steps in one line, between the first and the last; in plain ASCII where the console does not
    show more.
    """
    losses = [record.loss for record in facts.records]
    marks = _BLOCKS if _is_utf8(encoding) else _ASCII
    return f"{losses[0]:.4f} {sparkline(losses, marks)} {losses[-1]:.4f}" if losses else ""


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("-", "") == "utf8"


def _mlflow_page(uri: str) -> str:
    """Where the MLflow page is, or the command that opens it for a database."""
    if uri.startswith("http"):
        return uri
    command = Path(sys.executable).parent / "mlflow"
    shown = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)
    return shlex.join([shown, "ui", "--backend-store-uri", uri])
