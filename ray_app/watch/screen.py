"""Shows runs on a terminal while they train (`render_screen`, `format_line`): progress, speed, workers, newest events.

`RunWatcher` reads the files of the runs again and again in a thread; it sends no requests to their processes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_app.errors import RayAppError
from ray_app.report.charts import seconds, sparkline
from ray_app.report.facts import Facts, FactsReader
from ray_app.report.html import TONES
from ray_app.report.tables import budgets, happenings, health, sizes_text, time_parts
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import poll_interval_s

logger = logging.getLogger(__name__)

_MAX_READ_SHARE = 0.05
"""Maximum share of the time that reading takes.

So runs that take long to read, such as one with a million steps, are read less often.
"""


@dataclass(frozen=True)
class RunState:
    """The state of a run at the newest successful read.

    Args:
        facts: The facts of the run; None before the first read.
        error: The error of the newest read; None if it succeeded.
        looked_s: Time of the read that gave the facts, seconds since 1970 (UTC).
    """

    paths: RunPaths
    facts: Facts | None = None
    error: str | None = None
    looked_s: float = 0.0


class RunWatcher:
    """Reads some runs repeatedly in a thread, by default each second if the storage is fast, within its context."""

    def __init__(self, runs: Sequence[RunPaths], every_s: float | None = None) -> None:
        self._readers = [FactsReader(paths) for paths in runs]
        self._every_s = every_s or max(1.0, *(poll_interval_s(paths.root) for paths in runs))
        self._sights = [RunState(paths) for paths in runs]
        self._ended, self.changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="looking", daemon=True)

    def __enter__(self) -> RunWatcher:
        """Reads the runs once, with the errors of `read_facts`, and starts the thread."""
        for number, reader in enumerate(self._readers):
            self._sights[number] = RunState(reader.paths, reader.read(), None, time.time())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def sights(self) -> list[RunState]:
        """The newest state of each run."""
        return list(self._sights)

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            for number, reader in enumerate(self._readers):
                self._sights[number] = _read_run(reader, self._sights[number])
            pause_s = max(self._every_s, (time.monotonic() - began_s) / _MAX_READ_SHARE)
            with self.changed:
                self.changed.notify_all()


def _read_run(reader: FactsReader, before: RunState) -> RunState:
    """Reads a run; returns the facts of before with the error if the storage does not answer or the run was removed."""
    try:
        return RunState(reader.paths, reader.read(), None, time.time())
    except (RayAppError, OSError) as error:
        logger.debug("%s could not be read: %s", reader.paths.root, error)
        return RunState(before.paths, before.facts, redact(f"{type(error).__name__}: {error}"), before.looked_s)


_COLORS = {
    "blue": "blue",
    "green": "green",
    "orange": "yellow",
    "red": "red",
    "purple": "magenta",
    "gray": "bright_black",
}
_LAST = 20
"""Number of steps from which the speed is computed."""
_EVENTS = 8
"""Number of lines of the table of events."""
_GENERATIONS = 6
"""Number of lines of the table of generations."""


def render_screen(sights: Sequence[RunState]) -> RenderableType:
    """Returns the display of one run with all details, or of several runs as a table with a line for each."""
    if len(sights) > 1:
        return _render_side_by_side(sights)
    [sight] = sights
    facts = sight.facts
    assert facts is not None, "the first look is made before anything is shown"
    parts: list[RenderableType] = [
        _render_head(facts),
        _render_progress(facts),
        Text(facts.story),
        *_error_text(sight),
        _render_values(facts),
    ]
    if generation_rows := list_generations(facts):
        parts.append(
            _make_table("generation", "since step", "workers", "running time", rows=generation_rows[-_GENERATIONS:])
        )
    if event_rows := happenings(facts):
        parts.append(_make_table("running time", "event", "what", rows=event_rows[-_EVENTS:]))
    return Group(*parts)


def format_line(sight: RunState) -> str:
    """Returns the state of a run in one line, for output that is not a terminal."""
    facts = sight.facts
    assert facts is not None
    step = facts.records[-1].step if facts.records else 0
    parts = [f"{facts.paths.name}: {facts.status}", f"step {step:,} of {facts.total_steps or 0:,}"]
    parts += [
        f"{name} {value}" for name, value in list_values(facts) if name in ("loss", "speed", "workers", facts.metric)
    ]
    return ", ".join(parts) + (f" ({sight.error})" if sight.error else "")


def is_over(facts: Facts) -> bool:
    """Returns whether a run has reached its end. A run that failed or was interrupted may be started again."""
    return facts.status in ("finished", "stopped early")


def rows_per_second(facts: Facts) -> float | None:
    """Returns the rows per second of the newest steps; None if there are too few."""
    newest = list(facts.in_time[-_LAST:])
    elapsed_s = newest[-1].time_s - newest[0].time_s if newest else 0.0
    return sum(sum(record.rows) for record in newest[1:]) / elapsed_s if elapsed_s > 0 else None


def remaining_seconds(facts: Facts) -> float | None:
    """Returns the seconds that the run still needs at the speed of its newest steps; None if that is unknown."""
    newest = list(facts.in_time[-_LAST:])
    if len(newest) < 2 or facts.total_steps is None:
        return None
    return (facts.total_steps - facts.records[-1].step) * (newest[-1].time_s - newest[0].time_s) / (len(newest) - 1)


def list_values(facts: Facts) -> list[tuple[str, str]]:
    """Returns names and values of the newest step, evaluation and checkpoint."""
    pairs: list[tuple[str, str]] = []
    if facts.records:
        last = facts.records[-1]
        rows_per_s = rows_per_second(facts)
        newest_records = list(facts.in_time[-_LAST:])
        pairs.append(("loss", f"{last.loss:.4f}"))
        pairs += [(name, f"{value:.4f}") for name, value in last.metrics.items()]
        pairs.append(("speed", f"{rows_per_s:,.0f} rows/s" if rows_per_s else "-"))
        pairs.append(("workers", f"{last.workers}"))
        wait_ms, step_ms = sum(r.data_wait_ms for r in newest_records), sum(r.step_ms for r in newest_records)
        pairs.append(("waits for data", f"{wait_ms / max(1e-9, step_ms):.0%} of a step"))
    pairs += [(name, f"{number}: {note}") for name, number, note in health(facts)]
    metric, best = facts.metric, facts.best
    if facts.evaluations:
        evaluation = facts.evaluations[-1]
        value = evaluation.metrics.get(metric, float("nan"))
        pairs.append((metric, f"{value:.4f} at step {evaluation.step:,}"))
        if best is not None:
            pairs.append((f"best {metric}", f"{best.metrics[metric]:.4f} at step {best.step:,}"))
    if facts.config.data.eval_path and facts.newest is not None:
        behind = facts.newest.step - (facts.evaluations[-1].step if facts.evaluations else 0)
        pairs.append(("evaluator", f"{behind:,} steps behind" if behind > 0 else "is not behind"))
    if facts.newest is not None:
        age_s = max(0.0, facts.made_s - facts.newest.time_s)
        pairs.append(("checkpoint", f"at step {facts.newest.step:,}, {seconds(age_s)} ago"))
    if parts := [f"{name}: {part:.1%}" for _, name, part in time_parts(facts) if part >= 0.001]:
        pairs.append(("time since the first step", "; ".join(parts)))
    pairs += [
        (b.name, f"{b.used} of {'any number' if b.allowed is None else b.allowed}") for b in budgets(facts) if b.used
    ]
    if facts.ray_job is not None:
        pairs.append(("Ray job", facts.ray_job))
    return pairs


def list_generations(facts: Facts) -> list[tuple[str, ...]]:
    """Returns a row for each generation: its number, its first step, its workers, and the run's time of its start."""
    rows = list[tuple[str, ...]]()
    for e in (event for event in facts.events if event.kind == "formed"):
        generation, step, workers = (e.details[name] for name in ("generation", "step", "workers"))
        rows.append((f"{e.fence}.{generation}", f"{step:,}", str(workers), seconds(facts.clock.at(e.time_s))))
    return rows


def _render_head(facts: Facts) -> Text:
    timing = f"  {seconds(facts.wall_s)}"
    if facts.status == "running" and (remaining_s := remaining_seconds(facts)) is not None:
        timing += f", about {seconds(remaining_s)} left"
    return Text.assemble(
        (facts.paths.name, "bold"), "  ", (facts.status, f"bold {_COLORS[TONES[facts.status]]}"), timing
    )


def _render_progress(facts: Facts) -> RenderableType:
    step, total = facts.records[-1].step if facts.records else 0, facts.total_steps
    table = Table.grid(padding=(0, 1))
    curve = sparkline([record.loss for record in facts.records], "▁▂▃▄▅▆▇█") if facts.records else ""
    table.add_row(
        ProgressBar(total=total or 1, completed=step, width=30), f"step {step:,} of {total or 0:,}", f"loss {curve}"
    )
    return table


def _render_values(facts: Facts) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in list_values(facts):
        table.add_row(Text(name, "bright_black"), Text(value))
    return table


def _error_text(sight: RunState) -> list[RenderableType]:
    if sight.error is None:
        return []
    return [Text(f"As seen {seconds(time.time() - sight.looked_s)} ago; since then: {sight.error}", "red")]


def _make_table(*columns: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for row in rows:
        table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in row))
    return table


def _render_side_by_side(sights: Sequence[RunState]) -> Table:
    rows = []
    for sight in sights:
        facts = sight.facts
        assert facts is not None
        value_of = dict(list_values(facts))
        step = f"{facts.records[-1].step if facts.records else 0:,} of {facts.total_steps or 0:,}"
        columns = (value_of.get(name, "-") for name in ("loss", facts.metric, "speed"))
        workers, happened = sizes_text(facts.sizes), sight.error or facts.story
        rows.append((facts.paths.name, facts.status, step, *columns, workers, happened))
    return _make_table("run", "status", "step", "loss", "evaluation", "speed", "workers", "what happened", rows=rows)


def can_redraw(console: Console) -> bool:
    """Returns whether the console can redraw a display in place."""
    return console.is_terminal and not console.is_jupyter
