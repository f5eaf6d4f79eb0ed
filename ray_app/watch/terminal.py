"""The output of a run for the user: its progress (`RunConsole`) and its result (`print_end`).

`RunConsole` shows a live bar on a terminal, a live line in Jupyter, and otherwise a plain line every few seconds.
`LiveLine` is a line of a notebook cell that changes in place. `Finding` is a line of a preflight or of the check of a
task. `SafeConsole` catches its own errors, so that they never end a run.
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
from ray_app.errors import ConfigError, DataError, escape_controls
from ray_app.process import SafeStream
from ray_app.report.charts import sparkline
from ray_app.report.facts import Facts
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.history import column, count, disturbances, restarts
from ray_app.runlog.journal import StepRecord, newest_record
from ray_app.runlog.output import NewLines, TextConsole
from ray_app.runlog.redaction import redact
from ray_app.storage.files import poll_interval_s, poll_pause_s
from ray_app.task.constant_scores import describe_constant
from ray_app.train.job import Job
from ray_app.train.membership import RendezvousStatus
from ray_app.watch.metrics import RunMetrics, Speed


class LiveLine:
    """A line of a cell's output in a notebook, which changes in place.

    It needs IPython, which every Python kernel has, and only Jupyter's display protocol, which JupyterLab, VS Code and
    others implement. The stored notebook keeps the last text.
    """

    def __init__(self) -> None:
        self._display: Any = None
        self._current: tuple[str, float | None] | None = None

    def show(self, text: str, part: float | None = None) -> None:
        """Replaces the text of the line; `part`, from 0 to 1, of the work is finished, for a bar."""
        from IPython.display import display

        if (text, part) == self._current:
            return
        self._current = text, part
        bar = ""
        if part is not None:
            bar = f'<progress value="{part:.4f}" style="width: 14em; vertical-align: middle"></progress> '
        style = "white-space: pre-wrap; font-family: monospace; font-variant-numeric: tabular-nums"
        data = {"text/plain": text, "text/html": f'<div style="{style}">{bar}{escape(text)}</div>'}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)


Level = Literal["ok", "warning", "refused", "failed"]


@dataclass(frozen=True)
class Finding:
    """The result of one check of a preflight or of a task.

    Args:
        level: `refused`: the run would not work, and nothing is started. `failed`: the run would start, but not keep
            its guarantees.
        seconds: Duration of the check, if it was measured.
    """

    level: Level
    topic: str
    text: str
    seconds: float | None = None


def run_check(topic: str, check: Callable[[], str | Finding]) -> Finding:
    """Runs one check; an exception of it is a refusal, because the run would raise it, too."""
    try:
        result = check()
    except (ConfigError, DataError) as error:
        return Finding("refused", topic, str(error))
    except Exception as error:
        return Finding("refused", topic, f"{type(error).__name__}: {error}")
    return result if isinstance(result, Finding) else Finding("ok", topic, result)


def has_refusal(findings: list[Finding]) -> bool:
    """Returns whether any finding is a refusal."""
    return any(finding.level == "refused" for finding in findings)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Prints the findings without their durations."""
    width = max((len(finding.topic) for finding in findings), default=0)
    for finding in findings:
        _print_finding(console, finding, f"{finding.topic:<{width}}  ")


def print_timed_finding(console: Console, finding: Finding, width: int) -> None:
    """Prints a finding with its duration; `width` is that of the longest topic."""
    duration = "" if finding.seconds is None else f"{finding.seconds:.2f} s"
    _print_finding(console, finding, f"{finding.topic:<{width}} {duration:>8}  ")


def _print_finding(console: Console, finding: Finding, title: str) -> None:
    """Prints a finding with its title; further lines of its text are indented below the first."""
    start = f"{finding.level:<8} {title}"
    text = redact(finding.text).replace("\n", "\n" + " " * len(start))
    console.print(start + text, markup=False, highlight=False, soft_wrap=True)


logger = logging.getLogger(__name__)


class SafeConsole:
    """A console that catches its own errors, as of a full disk or a closed pipe, and reports the first one."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._failure: BaseException | None = None
        self._report: Callable[[str], object] | None = None
        self._is_reported = False

    def report_to(self, report: Callable[[str], object]) -> None:
        """Sets the function that is called once, possibly now, with the reason of the first failure."""
        self._report = report
        self._report_failure()

    def print(self, text: str) -> None:
        """Prints a text as it is, without markup."""
        with self.guarded():
            # The console may be one of the caller's.
            self.console.print(escape_controls(text), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Catches the errors of the output within the context, so that they do not end the run."""
        try:
            yield
        except SystemExit as error:
            # rich exits with code 1 when the reader of a pipe has closed it; the exit after a signal has another code.
            if error.code != 1:
                raise
            self._fail(BrokenPipeError("the reader of standard output has closed it"))
        except Exception as error:
            self._fail(error)
        self._report_failure()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            logger.warning("The console fails, but the run continues: %s: %s", type(error).__name__, error)

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
        """Returns a console on the same file for plain lines, without the displays of a terminal or a notebook."""
        plain = SafeConsole(
            TextConsole(file=self.console.file, force_terminal=False, force_jupyter=False, quiet=self.console.quiet)
        )
        plain._report = self._report_once
        return plain


_PLAIN_LINE_INTERVAL_S = 5.0
_MAX_STRAGGLERS = 3
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"


class RunConsole:
    """Shows the progress of a run with at most `max_workers` workers."""

    def __init__(
        self,
        job: Job,
        max_workers: int,
        console: SafeConsole,
        list_pending: Callable[[], list[Commit]],
        metrics: RunMetrics | None = None,
    ) -> None:
        self._job = job
        self._max_workers = max_workers
        self._console = console
        self._list_pending = list_pending
        rich = console.console
        self._live = rich.is_terminal and not rich.is_jupyter
        self._cell = LiveLine() if rich.is_jupyter else None
        self._metrics, self._speed = metrics, Speed(job.plan.global_batch_size)
        self._last_line_s = 0.0
        self._evaluation_text = ""
        self._disturbances_text = ""
        self._next_read_s = 0.0
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total} steps  {task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            console=rich,
        )
        self._bar: TaskID | None = None
        self._epoch = -1
        self._printed_wait = ""
        self._worker_output = NewLines(job.paths, job.fence)

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

    def show_status(self, status: RendezvousStatus | None) -> None:
        """Shows the status of the rendezvous, see `show`; None if it does not answer."""
        if status is None:
            self.show(None, "waiting for the rendezvous to answer ...", waits=True)
        else:
            waits_for = status.wait_reason or "waiting for the workers to start ..."
            self.show(status.record, waits_for, status.wait_reason is not None)

    def show(self, newest: StepRecord | None, waits_for: str, waits: bool = False) -> None:
        """Shows the progress of the run; errors of the output do not affect the run.

        Args:
            newest: The newest step that rank 0 has reported; None before the first.
            waits_for: The event for which the run waits, before the first step or while `waits`.
            waits: Whether the run waits for capacity now.
        """
        with self._console.guarded():
            self._show(newest, waits_for, waits)

    def _show(self, newest: StepRecord | None, waits_for: str, waits: bool) -> None:
        self._read_record(newest, waits)
        if newest is None or waits:
            self._show_wait(waits_for)
        elif self._live:
            self._update_bar(newest)
        elif self._cell is not None:
            self._cell.show(self._line(newest), newest.step / self._job.total_steps)
        elif self._is_line_due():
            self._console.print(self._line(newest))

    def show_last(self) -> None:
        """Shows the last step from the record: the newest step that rank 0 has reported may be older."""
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
        """Shows the new output of workers and evaluator."""
        for line in self._worker_output.poll():
            self._console.print(line)

    def _is_line_due(self) -> bool:
        if time.monotonic() - self._last_line_s < _PLAIN_LINE_INTERVAL_S:
            return False
        self._last_line_s = time.monotonic()
        return True

    def _read_record(self, newest: StepRecord | None, waits: bool) -> None:
        began_s = time.monotonic()
        if began_s < self._next_read_s:
            return
        if newest is not None:
            self._speed.look(newest, time.monotonic())
            if self._metrics is not None:
                self._measure(self._metrics, newest, waits)
        try:
            self._show_printed()
            evaluations = read_scores(self._job.paths)
            events = failure_events(self._job.paths)
            self._disturbances_text = disturbances(events, self._job.config.failure)
            pending = self._list_pending()
        except OSError as error:
            # An outage of the storage may pass.
            logger.warning("The record could not be read, trying again: %s", error)
            return
        finally:
            interval_s = max(1.0, poll_interval_s(self._job.paths.root))
            self._next_read_s = began_s + poll_pause_s(interval_s, time.monotonic() - began_s)
        if self._metrics is not None:
            for cause, times in restarts(events).items():
                self._metrics.set("restarts", times, cause=cause)
            self._metrics.set("sdc_detections", count(events, "sdc_detected"))
        if evaluations:
            metric, newest_evaluation = self._job.best_metric, evaluations[-1]
            value, backlog = newest_evaluation.metrics.get(metric, float("nan")), ""
            if len(pending) > 1:
                backlog = f", {len(pending)} checkpoints, {time.time() - pending[0].time_s:.0f} s behind"
            self._evaluation_text = f"{metric} {value:.4f} (step {newest_evaluation.step}{backlog})"

    def _measure(self, metrics: RunMetrics, newest: StepRecord, waits: bool) -> None:
        metrics.set("steps", newest.step)
        metrics.set("workers", 0 if waits else newest.workers)
        metrics.set("rows_per_second", self._speed.rows_per_s)
        metrics.set("goodput", self._speed.goodput)

    def _line(self, newest: StepRecord) -> str:
        (epoch, epoch_step), epochs = self._position(newest), self._job.config.train.epochs
        return f"epoch {epoch + 1}/{epochs} step {epoch_step}/{self._job.steps_per_epoch} {self._text(newest)}"

    def _position(self, newest: StepRecord) -> tuple[int, int]:
        """Returns the epoch of a step, from 0, and the number of the step in it, from 1."""
        epoch, step = divmod(newest.step - 1, self._job.steps_per_epoch)
        return epoch, step + 1

    def _text(self, newest: StepRecord) -> str:
        rate = self._speed.rows_per_s
        speed = f"{rate:,.0f} rows/s" if rate else "- rows/s"
        named = [f"{name} {value:.4f}" for name, value in newest.metrics.items()]
        parts = [f"loss {newest.loss:.4f}", *named, speed, f"{newest.workers} of {self._max_workers} workers"]
        parts += [
            f"rank {rank} takes {times:.1f}x as long" for rank, times in list(newest.slow.items())[:_MAX_STRAGGLERS]
        ]
        return "  ".join([*parts, *filter(None, (self._evaluation_text, self._disturbances_text))])

    def _update_bar(self, newest: StepRecord) -> None:
        """Updates the bar of the epoch; in a new epoch ends it and adds the next one."""
        per_epoch, text, (epoch, epoch_step) = self._job.steps_per_epoch, self._text(newest), self._position(newest)
        if self._bar is None or epoch != self._epoch:
            if self._bar is not None:
                if epoch > self._epoch:
                    self._progress.update(self._bar, completed=per_epoch)
                self._progress.stop_task(self._bar)
            self._epoch, epochs = epoch, self._job.config.train.epochs
            self._bar = self._progress.add_task("", total=per_epoch, epoch=epoch + 1, epochs=epochs, text=text)
        self._progress.update(self._bar, completed=epoch_step, text=text)

    def _show_wait(self, waits_for: str) -> None:
        if self._cell is not None:
            self._cell.show(waits_for)
        elif waits_for != self._printed_wait:
            self._printed_wait = waits_for
            self._console.print(waits_for)


def describe_best(summary: dict[str, Any], metric: str) -> str | None:
    """Returns a message with the best checkpoint of a run, or why there is none; None if nothing was evaluated."""
    best, evaluations = summary["best"], summary["evaluation"]["done"]
    if best and best["value"] is not None:
        return f"{best['metric']} {best['value']:.4f} at step {best['step']}"
    if not evaluations:
        return None
    consequence = "the newest checkpoint is used instead"
    if best:
        consequence = f"step {best['step']}, the first evaluated one, is kept as the result"
    return (
        f"unknown: {metric} is not a number in any of {evaluations} evaluations; {consequence}. Let evaluate.metric"
        " name another metric."
    )


def print_end(
    console: SafeConsole, job: Job, summary: dict[str, Any], facts: Facts | None, tracking_uri: str | None
) -> None:
    """Prints the result of a run, the place of the report if it was written, and that of MLflow if tracked."""
    rows = [("status", summary["status"])]
    rows += [
        (f"evaluation {name}", "not a number" if value is None else f"{value:.4f}")
        for name, value in summary["metrics"].items()
    ]
    if (best := describe_best(summary, job.best_metric)) is not None:
        rows.append(("best", best))
    rows += [("constant", text) for text in describe_constant(summary)]
    rows.append(("steps, rows", f"{summary['steps']:,} steps, {summary['rows']:,} rows"))
    sizes = ", then ".join(f"{workers} from step {step}" for step, workers in summary["world_sizes"])
    rows.append(("workers", f"{sizes or 'none'} (arithmetic of {summary['logical_workers']})"))
    if start_s := summary["start_s"]:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in start_s.items())
        rows.append(("start", f"{sum(start_s.values()):.1f} s: {parts}"))
    if facts is not None:
        rows += [("loss", curve) for curve in [format_loss_curve(facts, console.console.encoding)] if curve]
        rows.append(("cluster", facts.story))
    else:
        rows.append(("cluster", failure_summary(job.paths, job.config.failure) or "nothing went wrong"))
    rows.append(("parameters", f"sha256 {summary['params_digest']}"))
    if summary.get("model"):
        rows.append(("model", describe_model(summary["model"])))
    rows.append(("run directory", str(job.paths.root)))
    if facts is not None:
        rows.append(("report", str(job.paths.report)))
    if tracking_uri:
        rows.append(("MLflow page", find_mlflow_page(tracking_uri)))
    if job.config.tracking.tensorboard:
        rows.append(("TensorBoard", shlex.join(["tensorboard", "--logdir", str(job.paths.tensorboard)])))
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    if not _is_utf8(console.console.encoding):
        text = text.replace("→", "->").encode("ascii", "replace").decode()
    console.print(text)


def describe_model(model: dict[str, Any]) -> str:
    """Returns a registered version in one line, from the field `model` of a summary."""
    return f"{model['name']} version {model['version']}" + "".join(f" @{alias}" for alias in model["aliases"])


def format_loss_curve(facts: Facts, encoding: str) -> str:
    """Returns first loss, sparkline, as ASCII without UTF-8, and last loss; empty without steps."""
    losses = column(facts.records, "loss")
    marks = _BLOCKS if _is_utf8(encoding) else _ASCII
    return f"{losses[0]:.4f} {sparkline(losses, marks)} {losses[-1]:.4f}" if len(losses) else ""


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("-", "") == "utf8"


def find_mlflow_page(uri: str) -> str:
    """Returns the address of the MLflow page, or the command that serves it from a database."""
    if uri.startswith("http"):
        return uri
    command = Path(sys.executable).parent / "mlflow"
    path = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)
    return shlex.join([path, "ui", "--backend-store-uri", uri])
