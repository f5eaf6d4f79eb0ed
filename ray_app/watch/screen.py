"""Runs on a terminal, as they are now: how far, how fast, on which workers, what happened last.

Looking at runs again and again from outside: reads their files, asks nobody, and costs them nothing.
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
from ray_app.report.page import TONES
from ray_app.report.tables import budgets, happenings, health, sizes_text, time_parts
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import poll_interval_s

logger = logging.getLogger(__name__)

_SHARE = 0.05
"""The part of the time that looking takes at most: what takes long, because a run has a million steps, is done less
often.
"""


@dataclass(frozen=True)
class Sight:
    """What the newest look at a run found.

    Args:
        paths: The run.
        facts: None: it could not be read yet.
        error: Why the newest look failed; None if it did not.
        looked_s: When it ended, seconds since 1970 (UTC).
    """

    paths: RunPaths
    facts: Facts | None = None
    error: str | None = None
    looked_s: float = 0.0


class Looking:
    """Looks at some runs in a thread, until it is left.

    Args:
        runs: Which.
        every_s: Seconds between two looks, at least; not given: one, or as the storage likes it.
    """

    def __init__(self, runs: Sequence[RunPaths], every_s: float | None = None) -> None:
        self._readers = [FactsReader(paths) for paths in runs]
        self._every_s = every_s or max(1.0, *(poll_interval_s(paths.root) for paths in runs))
        self._sights = [Sight(paths) for paths in runs]
        self._ended, self.changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="looking", daemon=True)

    def __enter__(self) -> Looking:
        """Looks once, and begins.

        Raises:
            ConfigError: Something is no run.
            OSError: The storage does not answer.
        """
        for number, reader in enumerate(self._readers):
            self._sights[number] = Sight(reader.paths, reader.read(), None, time.time())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def sights(self) -> list[Sight]:
        """The newest of each run."""
        return list(self._sights)

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            for number, reader in enumerate(self._readers):
                self._sights[number] = _look(reader, self._sights[number])
            pause_s = max(self._every_s, (time.monotonic() - began_s) / _SHARE)
            with self.changed:
                self.changed.notify_all()


def _look(reader: FactsReader, before: Sight) -> Sight:
    try:
        return Sight(reader.paths, reader.read(), None, time.time())
    except (RayAppError, OSError) as error:  # the storage is away, or a run was removed: what was seen stays
        logger.debug("%s could not be read: %s", reader.paths.root, error)
        return Sight(before.paths, before.facts, redact(f"{type(error).__name__}: {error}"), before.looked_s)


_COLOURS = {
    "blue": "blue",
    "green": "green",
    "orange": "yellow",
    "red": "red",
    "purple": "magenta",
    "grey": "bright_black",
}
_LAST, _EVENTS, _GENERATIONS = 20, 8, 6
"""Steps that a speed is of, and lines of the two tables."""


def screen(sights: Sequence[Sight]) -> RenderableType:
    """One run with all that is known of it, or several in a table, a line each."""
    if len(sights) > 1:
        return _side_by_side(sights)
    [sight] = sights
    facts = sight.facts
    assert facts is not None, "the first look is made before anything is shown"
    parts: list[RenderableType] = [_head(facts), _progress(facts), Text(facts.story), *_error(sight), _values(facts)]
    if formed := generations(facts):
        parts.append(_table("generation", "since step", "workers", "running time", rows=formed[-_GENERATIONS:]))
    if told := happenings(facts):
        parts.append(_table("running time", "event", "what", rows=told[-_EVENTS:]))
    return Group(*parts)


def line(sight: Sight) -> str:
    """A run in a line, for what is no terminal."""
    facts = sight.facts
    assert facts is not None
    step = facts.records[-1].step if facts.records else 0
    parts = [f"{facts.paths.name}: {facts.status}", f"step {step:,} of {facts.total_steps or 0:,}"]
    parts += [f"{name} {value}" for name, value in values(facts) if name in ("loss", "speed", "workers", facts.metric)]
    return ", ".join(parts) + (f" ({sight.error})" if sight.error else "")


def is_over(facts: Facts) -> bool:
    """Whether nothing more is to come; what failed or was interrupted may be started again."""
    return facts.status in ("finished", "stopped early")


def speed(facts: Facts) -> float | None:
    """Rows per second of the newest steps; None: there are too few."""
    newest = list(facts.in_time[-_LAST:])
    took_s = newest[-1].time_s - newest[0].time_s if newest else 0.0
    return sum(sum(record.rows) for record in newest[1:]) / took_s if took_s > 0 else None


def left_s(facts: Facts) -> float | None:
    """Seconds that the run still needs at the speed of its newest steps."""
    newest = list(facts.in_time[-_LAST:])
    if len(newest) < 2 or facts.total_steps is None:
        return None
    return (facts.total_steps - facts.records[-1].step) * (newest[-1].time_s - newest[0].time_s) / (len(newest) - 1)


def values(facts: Facts) -> list[tuple[str, str]]:
    """What is known of the newest steps and evaluations: name and value."""
    found: list[tuple[str, str]] = []
    if facts.records:
        last, rate, wait = facts.records[-1], speed(facts), list(facts.in_time[-_LAST:])
        found.append(("loss", f"{last.loss:.4f}"))
        found += [(name, f"{value:.4f}") for name, value in last.metrics.items()]
        found.append(("speed", f"{rate:,.0f} rows/s" if rate else "-"))
        found.append(("workers", f"{last.workers}"))
        found.append(
            (
                "waits for data",
                f"{sum(r.data_wait_ms for r in wait) / max(1e-9, sum(r.step_ms for r in wait)):.0%} of a step",
            )
        )
    found += [(name, f"{number}: {note}") for name, number, note in health(facts)]
    if facts.evaluations:
        newest = facts.evaluations[-1]
        found.append((facts.metric, f"{newest.metrics.get(facts.metric, float('nan')):.4f} at step {newest.step:,}"))
        if facts.best is not None:
            found.append(
                (f"best {facts.metric}", f"{facts.best.metrics[facts.metric]:.4f} at step {facts.best.step:,}")
            )
    if facts.config.data.eval_path and facts.newest is not None:
        done = facts.evaluations[-1].step if facts.evaluations else 0
        found.append(
            ("evaluator", f"{facts.newest.step - done:,} steps behind" if facts.newest.step > done else "is not behind")
        )
    if facts.newest is not None:
        found.append(
            (
                "checkpoint",
                f"at step {facts.newest.step:,}, {seconds(max(0.0, facts.made_s - facts.newest.time_s))} ago",
            )
        )
    if parts := [f"{name}: {part:.1%}" for _, name, part in time_parts(facts) if part >= 0.001]:
        found.append(("time since the first step", "; ".join(parts)))
    found += [
        (b.name, f"{b.used} of {'any number' if b.allowed is None else b.allowed}") for b in budgets(facts) if b.used
    ]
    if facts.ray_job is not None:
        found.append(("Ray job", facts.ray_job))
    return found


def generations(facts: Facts) -> list[tuple[str, ...]]:
    """Each set of workers: its number, the step from which, how many, and the run's time."""
    return [
        (
            f"{e.fence}.{e.details['generation']}",
            f"{e.details['step']:,}",
            str(e.details["workers"]),
            seconds(facts.clock.at(e.time_s)),
        )
        for e in facts.events
        if e.kind == "formed"
    ]


def _head(facts: Facts) -> Text:
    ends = f"  {seconds(facts.wall_s)}"
    if facts.status == "running" and (left := left_s(facts)) is not None:
        ends += f", about {seconds(left)} left"
    return Text.assemble(
        (facts.paths.name, "bold"), "  ", (facts.status, f"bold {_COLOURS[TONES[facts.status]]}"), ends
    )


def _progress(facts: Facts) -> RenderableType:
    step, total = facts.records[-1].step if facts.records else 0, facts.total_steps
    table = Table.grid(padding=(0, 1))
    curve = sparkline([record.loss for record in facts.records], "▁▂▃▄▅▆▇█") if facts.records else ""
    table.add_row(
        ProgressBar(total=total or 1, completed=step, width=30), f"step {step:,} of {total or 0:,}", f"loss {curve}"
    )
    return table


def _values(facts: Facts) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values(facts):
        table.add_row(Text(name, "bright_black"), Text(value))
    return table


def _error(sight: Sight) -> list[RenderableType]:
    if sight.error is None:
        return []
    return [Text(f"As seen {seconds(time.time() - sight.looked_s)} ago; since then: {sight.error}", "red")]


def _table(*columns: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for row in rows:
        table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in row))
    return table


def _side_by_side(sights: Sequence[Sight]) -> Table:
    rows = []
    for sight in sights:
        facts = sight.facts
        assert facts is not None
        known = dict(values(facts))
        step = f"{facts.records[-1].step if facts.records else 0:,} of {facts.total_steps or 0:,}"
        shown = (known.get(name, "-") for name in ("loss", facts.metric, "speed"))
        rows.append((facts.paths.name, facts.status, step, *shown, sizes_text(facts.sizes), sight.error or facts.story))
    return _table("run", "status", "step", "loss", "evaluation", "speed", "workers", "what happened", rows=rows)


def can_show(console: Console) -> bool:
    """Whether a table can be drawn anew again and again."""
    return console.is_terminal and not console.is_jupyter
