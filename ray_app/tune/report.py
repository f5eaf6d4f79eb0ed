"""The views of a study: its report as HTML, from its record alone, and the screen of `ray-app watch`.

The report has key figures, curves, and a table of the trials; the screen says in addition which of them train now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, stdev
from typing import Any

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ray_app.report.charts import (
    Axis,
    Frame,
    Line,
    Point,
    Tone,
    line_chart,
    number,
    seconds,
    whole_ticks,
)
from ray_app.report.figures import NARROW, WIDE, Figure
from ray_app.report.html import Card, cell, environment
from ray_app.runlog.lease import is_held
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.tune.record import StudyPaths, StudyRecord, TrialResult, settings_text, trial_name
from ray_app.tune.scheduler import Promotion

_TONES: tuple[Tone, ...] = ("blue", "orange", "green", "purple", "red")
_MAX_CURVES = 100
_BINS = 4
"""Parts of equally many trials into which the values of a number are divided for its importance."""


def study_cell(name: str, record: StudyRecord, winner: Promotion | None) -> str:
    """Returns a study as HTML for a notebook cell, without secrets."""
    ranked = rank_trials(record)
    best = [result.trial for result in ranked if not result.has_failed]
    tones: dict[int, Tone] = dict(zip(best, _TONES, strict=False))
    weights = importance(record)
    columns = [
        "trial",
        *(f"{setting} ({weights[setting]:.0%})" for setting in weights),
        record.metric,
        "epochs",
        "time",
    ]
    failed = sum(result.has_failed for result in ranked)
    return cell(
        "study_cell.html.j2",
        name=name,
        **dict(zip(("status", "tone"), _status(record), strict=True)),
        story=_story(record, len(ranked), failed),
        cards=_cards(record, winner),
        figures=[
            *_best_figure(record),
            *_curves_figure(record, ranked, tones),
            *_settings_figure(record, ranked, tones),
        ],
        columns=[*columns, "failed"] if failed else columns,
        rows=[(tones.get(r.trial), _row(record, r, list(weights), bool(failed))) for r in ranked],
    )


def study_page(name: str, record: StudyRecord, winner: Promotion | None) -> str:
    """Returns the page about a study, with no other files and no script."""
    template = environment().get_template("study.html.j2")
    content = Markup(study_cell(name, record, winner))
    return template.render(name=redact(name), status=_status(record)[0], content=content)


def rank_trials(record: StudyRecord) -> list[TrialResult]:
    """Returns the newest result of each trial, from the best to the worst; those of higher rungs come first."""
    sign = -1 if record.mode == "max" else 1

    def key(result: TrialResult) -> tuple[Any, ...]:
        is_number = result.value is not None and not math.isnan(result.value)
        return (
            result.has_failed,
            -result.rung,
            not is_number,
            sign * (result.value or 0) if is_number else 0,
            result.trial,
        )

    return sorted(record.newest_results().values(), key=key)


def importance(record: StudyRecord) -> dict[str, float]:
    """Returns for each setting the share of the variance of the first rung's results that it explains alone.

    It is that of the means of groups: trials with the same choice, or a quarter of the trials by the size of a number.
    """
    values = {
        r.trial: r.value for r in record.results if not r.rung and r.value is not None and not math.isnan(r.value)
    }
    names = next(iter(record.trials.values()), {})
    total = pvariance(values.values()) if len(values) > 1 else 0.0
    shares = dict[str, float]()
    for name in names:
        settings = {trial: record.trials[trial][name] for trial in values}
        is_number = all(type(value) in (int, float) for value in settings.values())
        order = sorted(settings, key=lambda trial: settings[trial] if is_number else 0)
        groups = defaultdict[Any, list[float]](list)
        for position, trial in enumerate(order):
            is_binned = is_number and len(set(settings.values())) > _BINS
            group = position * _BINS // len(order) if is_binned else repr(settings[trial])
            groups[group].append(values[trial] or 0.0)
        means = [fmean(group) for group in groups.values() for _ in group]
        shares[name] = pvariance(means) / total if total else 0.0
    return shares


def _status(record: StudyRecord) -> tuple[str, Tone]:
    return ("finished", "green") if record.end is not None else ("unfinished", "orange")


def _story(record: StudyRecord, ended: int, failed: int) -> str:
    text = f"{len(record.trials)} trials, of which {ended} have a result"
    text += f" and {failed} of these failed" if failed else ""
    return f"{text}; rungs end after {', '.join(map(str, record.rungs))} epochs."


def _cards(record: StudyRecord, winner: Promotion | None) -> list[Card]:
    cards = list[Card]()
    if winner is not None:
        best = record.newest_results()[winner.trial]
        settings = settings_text(record.trials[winner.trial])
        cards.append(Card("winner", trial_name(winner.trial), settings, settings))
        cards.append(Card(f"best {record.metric}", number(best.value or 0.0), _source(best)))
        if record.end is not None and record.end.get("report") is not None:
            cards.append(Card(f"{record.metric} of others", number(record.end["report"]), "rows that chose nothing"))
        cards.append(Card("parameters", (best.params_digest or "-")[:10], "sha256", best.params_digest or ""))
    cards.append(Card("worker time", seconds(record.worker_hours * 3600), "of all trials together"))
    return [*cards, Card("time", seconds(record.hours * 3600), "of all starts")]


def _source(best: TrialResult) -> str:
    """Returns where the value of a trial comes from."""
    if not best.scores:
        return f"at step {best.step:,}"
    return f"mean of {len(best.scores)} folds, deviation {number(stdev(best.scores))}"


def _row(record: StudyRecord, result: TrialResult, names: Sequence[str], has_failures: bool) -> list[str]:
    settings = record.trials[result.trial]
    value = "-" if result.value is None else number(result.value)
    spent = sum(one.seconds for one in record.results if one.trial == result.trial)
    texts = [_text(settings[name]) for name in names]
    row = [trial_name(result.trial), *texts, value, str(result.epochs), seconds(spent)]
    return [*row, result.reason or ""] if has_failures else row


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _figure(title: str, unit: str, lines: Sequence[Line], y: Axis, x: Axis, note: str = "") -> list[Figure]:
    """Returns a list with one figure; empty without points."""
    lines = [line for line in lines if len(line.points)]
    if not lines:
        return []
    wide, narrow = (line_chart(lines, y, Frame(width, x=x), height=230) for width in (WIDE, NARROW))
    legend = [(str(line.tone), line.name) for line in reversed(lines) if line.kind != "faint"]
    return [Figure(title, unit, wide, narrow, legend if len(legend) > 1 else [], note)]


def _best_figure(record: StudyRecord) -> list[Figure]:
    better: Callable[..., float] = max if record.mode == "max" else min
    points, spent_s = list[Point](), 0.0
    for result in sorted(record.results, key=lambda one: one.ended_s):
        spent_s += result.seconds * result.workers
        if result.value is not None and not math.isnan(result.value):
            points.append((spent_s, better(result.value, points[-1][1]) if points else result.value))
    lines = [Line("best so far", "blue", points, "steps")]
    return _figure(
        "Best so far", "by time of all workers", lines, Axis(record.metric), Axis("worker time", text=seconds)
    )


def _curves_figure(record: StudyRecord, ranked: Sequence[TrialResult], tones: dict[int, Tone]) -> list[Figure]:
    curves = defaultdict[int, list[Point]](list)
    for result in sorted(record.results, key=lambda one: one.rung):
        if result.value is not None and math.isfinite(result.value):
            curves[result.trial].append((float(result.epochs), result.value))
    lines = [_line(result.trial, curves[result.trial], tones) for result in ranked[:_MAX_CURVES]]
    return _figure(
        "Trials by epochs", "at the end of each rung", lines[::-1], Axis(record.metric), Axis("epoch", whole_ticks)
    )


def _settings_figure(record: StudyRecord, ranked: Sequence[TrialResult], tones: dict[int, Tone]) -> list[Figure]:
    """Returns the figure of parallel coordinates: one line for each trial, over its settings and its result."""
    drawn = [result for result in ranked[:_MAX_CURVES] if result.value is not None and not math.isnan(result.value)]
    columns: dict[str, list[Any]] = {
        name: [record.trials[result.trial][name] for result in drawn] for name in importance(record)
    }
    columns[record.metric] = [result.value for result in drawn]
    heights, notes = list[list[float]](), list[str]()
    for name, values in columns.items():
        is_number = all(type(value) in (int, float) for value in values)
        texts = [_text(value) for value in values]
        choices = sorted(set(texts))
        numbers = [float(value) for value in values] if is_number else [float(choices.index(text)) for text in texts]
        is_log = is_number and min(numbers, default=0.0) > 0 and max(numbers) / min(numbers) > 100
        numbers = [math.log(value) for value in numbers] if is_log else numbers
        low, high = min(numbers, default=0.0), max(numbers, default=0.0)
        heights.append([(value - low) / (high - low) if high > low else 0.5 for value in numbers])
        ends = f"{number(min(values))} to {number(max(values))}" if is_number and values else ", ".join(choices)
        notes.append(f"{name.rpartition('.')[2]}: {ends}{' (logarithmic)' if is_log else ''}")
    lines = [
        _line(result.trial, [(float(x), column[row]) for x, column in enumerate(heights)], tones)
        for row, result in enumerate(drawn)
    ]
    names = [name.rpartition(".")[2] for name in columns]
    x_axis = Axis("setting", lambda low, high, _: [float(x) for x in range(len(names))], lambda x: names[round(x)])
    y_axis = Axis("value", lambda low, high, _: [0.0, 1.0], lambda y: "high" if y else "low")
    note = f"From bottom to top: {'; '.join(notes)}."
    return _figure("Settings", "one line for each trial", lines[::-1], y_axis, x_axis, note) if len(drawn) > 1 else []


def _line(trial: int, points: Sequence[Point], tones: dict[int, Tone]) -> Line:
    return Line(trial_name(trial), tones.get(trial, "gray"), points, "line" if trial in tones else "faint")


@dataclass(frozen=True)
class StudyState:
    """A study as its folder shows it at a moment.

    Args:
        status: `running`, `finished`, or `interrupted`: no driver lives, and the same command continues it.
        training: The trials that train, with the rung that they are to end.
    """

    name: str
    record: StudyRecord
    status: str
    training: dict[int, int]

    @classmethod
    def read(cls, paths: StudyPaths, record: StudyRecord) -> StudyState:
        """Returns the state of a study with this record; reads the leases of the trials that may train."""
        rungs = dict.fromkeys(record.trials, 0) | dict(sorted(record.promotions, key=lambda one: one[1]))
        ended = {(result.trial, result.rung) for result in record.results}
        training = dict[int, int]()
        for trial, rung in rungs.items():
            if (trial, rung) not in ended and any(map(is_held, paths.runs(trial, record.folds))):
                training[trial] = rung
        is_running = is_held(RunPaths(paths.root))
        status = "finished" if record.end is not None else "running" if is_running else "interrupted"
        return cls(paths.root.name, record, status, training)

    @property
    def line(self) -> str:
        """The state in one line, without what changes all the time."""
        record, newest = self.record, rank_trials(self.record)
        parts = [f"{self.name}: {self.status}", f"{len(newest)} of {len(record.trials)} trials have a result"]
        if newest and not newest[0].has_failed:
            value = float("nan") if newest[0].value is None else newest[0].value
            parts.append(f"best {record.metric} {value:.4f}, trial {trial_name(newest[0].trial)}")
        return ", ".join([*parts, f"{len(self.training)} train in {record.slots} slots"])

    def screen(self) -> RenderableType:
        """Returns the table of the trials, by rung and value, below the state of the study."""
        record = self.record
        spent = [f"{seconds(record.hours * 3600)} until the newest result"]
        for name, used in (("hours", record.hours), ("worker_hours", record.worker_hours)):
            if (limit := record.budget.get(name)) is not None:
                spent.append(f"{used:.2f} of {limit:g} {name.replace('_', '-')}")
        results = {result.trial: result for result in rank_trials(record)}
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
        for column in ("trial", "rung", "epochs", record.metric, "", "settings"):
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        for trial in dict.fromkeys([*results, *record.trials]):
            result = results.get(trial, TrialResult(trial, 0, None))
            state = result.reason or ""
            if trial in self.training:
                state = f"trains to epoch {record.rungs[self.training[trial]]}"
            value = "-" if result.value is None else number(result.value)
            row = (trial_name(trial), str(result.rung), str(result.epochs), value, state)
            table.add_row(*map(Text, map(redact, (*row, settings_text(record.trials[trial])))))
        return Group(Text(self.line, "bold"), Text(", ".join(spent)), table)
