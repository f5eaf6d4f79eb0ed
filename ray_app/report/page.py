"""The page of a report: `render` fills a template, which escapes all values from the run; `write_report` stores it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from ray_app.report.charts import number, seconds
from ray_app.report.facts import Facts, changed_fields, logical_worker_shares, read_facts
from ray_app.report.figures import cluster_figures, learning_figures
from ray_app.report.tables import budgets, by_class, comparison, counters, happenings, time_parts
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import Location, put_atomic

_PROFILE = re.compile(r"profile/[\w.-]+")
TONES = {
    "running": "blue",
    "finished": "green",
    "stopped early": "green",
    "interrupted": "orange",
    "failed": "red",
    "vanished": "red",
}


def write_report(paths: RunPaths, facts: Facts | None = None) -> Location:
    """Writes `report.html` in the run's directory, and no other file; returns its location.

    Raises ConfigError if the directory is not a run directory, and OSError if the storage does not answer.
    """
    put_atomic(paths.report, render(facts or read_facts(paths)).encode())
    return paths.report


@dataclass(frozen=True)
class Live:
    """The values of a page that updates itself; `error` is that of the newest read, if it failed."""

    script: str
    number: int
    runs: Sequence[tuple[str, str]]
    error: str | None = None


def render(facts: Facts, live: Live | None = None) -> str:
    """Returns the page as HTML without secrets, with no other files and no script but that of `live`."""
    return redact(
        environment()
        .get_template("report.html.j2")
        .render(
            facts=facts,
            live=live,
            tone=TONES[facts.status],
            cards=cards_of(facts),
            learning=learning_figures(facts),
            cluster=cluster_figures(facts),
            happenings=happenings(facts),
            shares=logical_worker_shares(facts.course.rows),
            by_class=by_class(facts),
            profiles=_profiles(facts),
            budgets=budgets(facts),
            counters=counters(facts),
            time_parts=time_parts(facts),
            comparison=comparison(facts),
            fields=changed_fields(facts.config),
            environment=facts.newest.environment if facts.newest else {},
        )
    )


def _profiles(facts: Facts) -> list[str]:
    """Returns the files of traced steps, relative to the run's directory."""
    files = [str(event.details.get("file")) for event in facts.events if event.kind == "profiled"]
    return [file for file in files if _PROFILE.fullmatch(file)]


def utc(time_s: float) -> str:
    """Returns a time as a text: `2026-11-21 17:48:13 UTC`."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@cache
def environment() -> Environment:
    """Returns the Jinja environment of the templates."""
    templates = Environment(
        loader=PackageLoader("ray_app.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"seconds": seconds, "number": number, "utc": utc, "shared": lambda part: f"{part:.1%}"}
    return templates


@dataclass(frozen=True)
class Card:
    """A key figure."""

    name: str
    value: str
    note: str
    whole: str = ""


def cards_of(facts: Facts) -> list[Card]:
    """Returns the key figures of a run."""
    best = facts.best
    last = facts.records[-1] if facts.records else None
    part = facts.goodput
    cards: list[Card] = []
    if best is not None:
        cards.append(Card(f"best {facts.metric}", f"{best.metrics[facts.metric]:.4f}", f"at step {best.step:,}"))
    elif last is not None:
        cards.append(Card("loss", f"{last.loss:.4f}", f"at step {last.step:,}"))
    notes = [f"of {facts.total_steps:,}"] if facts.total_steps else []
    if facts.newest is None or last is None or facts.newest.step != last.step:
        notes.append(f"newest checkpoint at {facts.newest.step:,}" if facts.newest else "no checkpoint")
    digest = facts.digest or ""
    return [
        *cards,
        Card("steps", f"{last.step if last else 0:,}", ", ".join(notes)),
        Card("rows", f"{facts.rows:,}", f"in {facts.epochs_begun:,} epochs begun"),
        Card("wall time", seconds(facts.wall_s), _rate(facts)),
        Card("goodput", f"{part:.1%}" if part is not None else "-", "of the time since the first step"),
        Card(
            "parameters",
            digest[:10] or "-",
            "sha256 of the result"
            if facts.status == "stopped early"
            else "sha256 of the newest checkpoint"
            if digest
            else "no checkpoint",
            digest,
        ),
    ]


def _rate(facts: Facts) -> str:
    times = [record.time_s for record in facts.in_time]
    if len(times) < 2 or times[-1] <= times[0]:
        return ""
    return f"{facts.rows / (facts.clock.at(times[-1]) - facts.clock.at(times[0])):,.0f} rows/s on average"
