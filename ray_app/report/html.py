"""Runs as HTML: the page of a report, and the displays of one run and of several runs in a notebook.

`render` fills a template, which escapes all values from the run; `write_report` stores the page. `run_cell` shows one
run with figures of its report, `Comparison` shows several in a table with common curves; both have the report's style.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ray_app.report.charts import (
    Axis,
    Frame,
    Line,
    Point,
    Tone,
    finite_points,
    line_chart,
    number,
    seconds,
    smooth_points,
    spans_powers,
    thin_points,
)
from ray_app.report.facts import Facts, changed_fields, logical_worker_shares, read_facts, shown_fields
from ray_app.report.figures import NARROW, WIDE, Figure, cluster_figures, learning_figures, metric_points
from ray_app.report.tables import budgets, by_class, counters, happenings, sizes_text, time_parts
from ray_app.runlog.history import column
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
    times = column(facts.in_time, "time_s")
    if len(times) < 2 or times[-1] <= times[0]:
        return ""
    return f"{facts.rows / (facts.clock.at(float(times[-1])) - facts.clock.at(float(times[0]))):,.0f} rows/s on average"


def run_cell(facts: Facts) -> str:
    """Returns one run as HTML: key figures, the line about the cluster, figures of learning and cluster."""
    figures = [*learning_figures(facts)[:2], *cluster_figures(facts)]
    return cell("run_cell.html.j2", facts=facts, tone=TONES[facts.status], cards=cards_of(facts), figures=figures)


def cell(template: str, **values: Any) -> str:
    """Renders a template that extends `cell.html.j2`; values from runs are escaped, secrets are hidden."""
    return redact(environment().get_template(template).render(css=_css(), **values))


@cache
def _css() -> Markup:
    """Returns the report's style sheet for use inside a rule: its rules for the root of the page apply to the cell."""
    env = environment()
    assert env.loader is not None
    return Markup(env.loader.get_source(env, "report.css")[0].replace(":root", "&"))


_CURVE_TONES: tuple[Tone, ...] = ("blue", "orange", "green", "purple", "red", "gray")


@dataclass(frozen=True)
class Comparison:
    """Some runs side by side; a notebook shows a table and the curves of the runs."""

    facts: tuple[Facts, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each run, with results and fields in which runs differ, for `pandas.DataFrame`."""
        fields = [shown_fields(facts.config) for facts in self.facts]
        differing = [
            name
            for name in dict.fromkeys(n for run_fields in fields for n in run_fields)
            if len({run_fields.get(name) for run_fields in fields}) > 1
        ]
        metrics = list(dict.fromkeys(facts.metric for facts in self.facts))
        rows = []
        for facts, values in zip(self.facts, fields, strict=True):
            best = facts.best
            row: dict[str, Any] = {"run": facts.paths.name, "status": facts.status}
            row |= {f"best {name}": best.metrics[name] if best and name == facts.metric else None for name in metrics}
            row |= {"at step": best.step if best else None} | {name: values.get(name, "-") for name in differing}
            row |= {"last loss": facts.records[-1].loss if facts.records else None}
            row |= {
                "steps": facts.records[-1].step if facts.records else 0,
                "rows": facts.rows,
                "wall_s": round(facts.wall_s, 1),
            }
            rows.append(row | {"workers": sizes_text(facts.sizes), "parameters": facts.digest})
        return rows

    def _texts(self) -> list[dict[str, str]]:
        """Returns the rows as short texts for the table."""
        formats: dict[str, Callable[[Any], str]] = {
            "parameters": lambda v: v[:12],
            "wall_s": seconds,
            "run": str,
            "last loss": number,
        }
        texts = []
        for row in self.rows:
            values = {k: formats[k](v) if k in formats and v is not None else v for k, v in row.items()}
            values = {
                k: f"{v:,}" if isinstance(v, int) else f"{v:.4f}" if isinstance(v, float) else v
                for k, v in values.items()
            }
            texts.append({"wall time" if k == "wall_s" else k: "-" if v is None else str(v) for k, v in values.items()})
        return texts

    def __repr__(self) -> str:
        texts = self._texts()
        widths = {name: max(len(name), *(len(text[name]) for text in texts)) for name in texts[0]}
        lines = [dict(zip(widths, widths, strict=True)), *texts]
        return "\n".join(
            "  ".join(f"{line[name]:<{width}}" for name, width in widths.items()).rstrip() for line in lines
        )

    def _repr_html_(self) -> str:
        texts = self._texts()
        return cell(
            "comparison_cell.html.j2",
            columns=list(texts[0]),
            rows=list(zip(_curve_tones(len(texts)), texts, strict=True)),
            figures=self._figures(),
        )

    def _figures(self) -> list[Figure]:
        losses = [finite_points(column(f.records, "step"), column(f.records, "loss")) for f in self.facts]
        figures = self._figure(
            "Loss", "loss", "mean per row", [smooth_points(points) or thin_points(points) for points in losses], "line"
        )
        for name in dict.fromkeys(facts.metric for facts in self.facts):
            points = [metric_points(facts.evaluations, name) for facts in self.facts]
            figures += self._figure(f"Evaluation: {name.replace('_', ' ')}", name, "on held-out rows", points, "dots")
        return figures

    def _figure(self, title: str, name: str, unit: str, curves: Sequence[Sequence[Point]], kind: Any) -> list[Figure]:
        """Returns a list with one figure; empty without points."""
        tones = _curve_tones(len(curves))
        lines = [
            Line(f.paths.name, t, points, kind)
            for f, t, points in zip(self.facts, tones, curves, strict=True)
            if points
        ]
        if not lines:
            return []
        log = name == "loss" and spans_powers([y for line in lines for _, y in line.points])
        wide, narrow = (line_chart(lines, Axis(name), Frame(width), height=230, log=log) for width in (WIDE, NARROW))
        legend = [(str(line.tone), line.name) for line in lines]
        return [Figure(title, f"{unit}{', logarithmic' if log else ''}", wide, narrow, legend)]


def _curve_tones(count: int) -> list[Tone]:
    return [_CURVE_TONES[i % len(_CURVE_TONES)] for i in range(count)]
