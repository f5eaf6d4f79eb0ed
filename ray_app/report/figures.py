"""The figures of a report, and events as texts (`describe_event`).

The figures are curves of the training (`learning_figures`), and curves and a timeline of the cluster
(`cluster_figures`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from markupsafe import Markup

from ray_app.report.charts import (
    TIME,
    Axis,
    Frame,
    Lane,
    Line,
    Mark,
    Point,
    Tone,
    finite_points,
    line_chart,
    number,
    rows_per_second_over_time,
    seconds,
    sizes_over_time,
    smooth_points,
    spans_powers,
    thin_points,
    timeline,
    whole_ticks,
)
from ray_app.report.facts import Facts
from ray_app.runlog.evaluations import Evaluation
from ray_app.runlog.history import Numbers, column
from ray_app.runlog.journal import Event

WIDE, NARROW = 1010, 420
_LAST = 100
_SHAPES = {
    "failed": ("red", "cross"),
    "storage_failed": ("red", "cross"),
    "preempted": ("purple", "diamond"),
    "resized": ("blue", "up"),
    "replaced": ("green", "up"),
    "started": ("gray", "bar"),
}
_MAX_WORKERS = 8


@dataclass(frozen=True)
class Figure:
    """A chart with its caption.

    Args:
        wide: The chart for wide pages, or for all pages if there is no narrow one.
        legend: Tone and name of each curve, if there are several.
    """

    title: str
    unit: str
    wide: Markup
    narrow: Markup | None = None
    legend: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


def learning_figures(facts: Facts) -> list[Figure]:
    """Returns the figures of loss, evaluations, learning rate and gradient norm by step; none without steps."""
    if not facts.records:
        return []
    figures = [_loss_figure(facts)]
    for evaluator, evaluations in [("", facts.evaluations), *facts.others.items()]:
        names = {name for e in evaluations for name in e.metrics}
        if not evaluator:
            # The loss of the run's own evaluator is in the figure of the training loss.
            names = names - {"loss"} | _training_metric_names(facts)
        ordered = sorted(names, key=lambda n: (n != facts.metric, n))
        figures += [_metric_figure(facts, evaluator, evaluations, name) for name in ordered]
    if rate := thin_points(finite_points(column(facts.records, "step"), column(facts.records, "lr"))):
        chart = line_chart([Line("learning rate", "purple", rate)], Axis("learning rate"), Frame())
        figures.append(Figure("Learning rate", "of each step", chart))
    norm = finite_points(column(facts.records, "step"), column(facts.records, "grad_norm"))
    if len(norm):
        chart = line_chart(_with_mean("norm", "gray", norm), Axis("gradient norm"), Frame(), from_zero=True)
        figures.append(Figure("Gradient norm", "L2, before clipping", chart))
    return [figure for figure in figures if figure]


def cluster_figures(facts: Facts) -> list[Figure]:
    """Returns the figures of workers, speed and events, over one axis of time; none before the first event."""
    if not facts.events and not facts.records:
        return []
    figures = []
    if sizes := thin_points(sizes_over_time(facts.in_time, facts.clock)):
        marks = [_event_mark(facts, e) for e in facts.events if e.kind in _SHAPES and e.kind != "started"]
        lines, axis = [Line("workers", "blue", sizes, "steps")], Axis("workers", whole_ticks, "{:.0f}".format)
        draw = partial(line_chart, lines, axis, height=170, from_zero=True, marks=marks)
        figures.append(_over_time(facts, "Workers", "that step together; 0 where no worker steps", draw))
    if speed := rows_per_second_over_time(facts.records, facts.clock):
        lines = [Line("rows per second", "green", speed)]
        draw = partial(line_chart, lines, Axis("rows per second"), height=150, from_zero=True)
        figures.append(_over_time(facts, "Throughput", "rows that counted, per second", draw))
    draw = partial(timeline, _lanes(facts))
    figures.append(_over_time(facts, "Timeline", "checkpoints, evaluations and disturbances", draw))
    return figures


def _loss_figure(facts: Facts) -> Figure | None:
    points = finite_points(column(facts.records, "step"), column(facts.records, "loss"))
    if not len(points):
        return None
    lines, legend = _training_and_evaluation(points, metric_points(facts.evaluations, "loss"))
    log = spans_powers([y for line in lines for _, y in line.points])
    left_out = len(facts.records) - len(points)
    note = f"{left_out:,} steps whose loss was NaN or infinite are left out." if left_out else ""
    wide, narrow = (line_chart(lines, Axis("loss"), Frame(width), height=250, log=log) for width in (WIDE, NARROW))
    mean = "mean per row" if facts.records[-1].weight is None else "mean by weight"
    return Figure("Loss", f"{mean}{', logarithmic' if log else ''}", wide, narrow, legend, note)


def _training_and_evaluation(trained: Numbers, evaluated: Sequence[Point]) -> tuple[list[Line], list[tuple[str, str]]]:
    """Returns the curves of training and evaluation, and their legend."""
    lines = _with_mean("training", "blue", trained)
    legend = [("blue", "training")] if len(lines) == 1 else [("blue faint", "training, each step"), ("blue", "mean")]
    if evaluated:
        lines.append(Line("evaluation", "orange", evaluated, "dots"))
        legend.append(("orange", "evaluation"))
    return lines, legend


def _with_mean(name: str, tone: Tone, points: Numbers) -> list[Line]:
    """Returns a curve; if it has many points, a faint one and the curve of its means."""
    means, thin = smooth_points(points), thin_points(points)
    return [Line(name, tone, thin, "faint"), Line(f"{name}, mean", tone, means)] if means else [Line(name, tone, thin)]


def metric_points(evaluations: Sequence[Evaluation], name: str) -> list[Point]:
    """Returns a metric by step, where it is a finite number."""
    with_metric = [e for e in evaluations if name in e.metrics]
    return thin_points(finite_points([e.step for e in with_metric], [e.metrics[name] for e in with_metric]))


def _metric_figure(facts: Facts, evaluator: str, evaluations: list[Evaluation], name: str) -> Figure | None:
    """Returns the figure of an evaluator's metric, with that of the training steps for the own one ("")."""
    points = metric_points(evaluations, name)
    if not evaluator and name in _training_metric_names(facts):
        return _training_metric_figure(facts, name, points)
    if not points:
        return None
    marks = [] if evaluator else _best_mark(facts, name)
    unit = f"on {evaluations[-1].rows:,} held-out rows" + (", best ◆" if marks else "")
    chart = line_chart([Line(name, "orange", points, "dots")], Axis(name), Frame(), marks=marks)
    return Figure(f"Evaluation{evaluator and f' {evaluator}'}: {name.replace('_', ' ')}", unit, chart)


def _training_metric_names(facts: Facts) -> set[str]:
    """Returns the task's metrics in the last `_LAST` training steps, as those of optimizers may differ."""
    return {name for record in facts.records[-_LAST:] for name in record.metrics}


def _training_metric_figure(facts: Facts, name: str, evaluated: Sequence[Point]) -> Figure | None:
    """Returns the figure of a task's metric in each training step and evaluation; None without a value."""
    trained = finite_points(column(facts.records, "step"), column(facts.records, f"metrics.{name}"))
    if not len(trained) and not evaluated:
        return None
    lines, legend = _training_and_evaluation(trained, evaluated)
    marks = _best_mark(facts, name)
    chart = line_chart(lines, Axis(name), Frame(), marks=marks)
    return Figure(name.replace("_", " ").capitalize(), "mean" + (", best ◆" if marks else ""), chart, legend=legend)


def _best_mark(facts: Facts, name: str) -> list[Mark]:
    """Returns the mark of the best evaluation if this metric decides; otherwise nothing."""
    best = facts.best if name == facts.metric else None
    if best is None:
        return []
    return [Mark(float(best.step), "green", f"best: {best.metrics[name]:.4f} at step {best.step:,}", "diamond")]


def _over_time(facts: Facts, title: str, unit: str, draw: Callable[..., Markup]) -> Figure:
    span = (0.0, facts.clock.end_s)
    wide, narrow = (draw(frame=Frame(width, 96, span, TIME, facts.clock.pauses)) for width in (WIDE, NARROW))
    return Figure(title, unit, wide, narrow)


def _lanes(facts: Facts) -> list[Lane]:
    """Returns a lane for each kind of event that happened."""
    kinds = {
        "starts": ("started",),
        "failures": ("failed", "storage_failed"),
        "preemptions": ("preempted",),
        "resizes": ("resized", "replaced"),
    }
    lanes = [
        Lane(name, [_event_mark(facts, e) for e in facts.events if e.kind in event_kinds])
        for name, event_kinds in kinds.items()
    ]
    kinds_of_checkpoints = ("checkpointed", "write_failed", "fallback")
    checkpoints = [_checkpoint_mark(facts, e) for e in facts.events if e.kind in kinds_of_checkpoints]
    lanes.append(Lane("checkpoints", checkpoints))
    lanes.append(Lane("evaluations", [_evaluation_mark(facts, e) for e in facts.evaluations]))
    return [lane for lane in lanes if lane.marks]


def _event_mark(facts: Facts, event: Event) -> Mark:
    tone, shape = _SHAPES[event.kind]
    at = facts.clock.at(event.time_s)
    return Mark(at, tone, f"{seconds(at)}: {_first_line(event)}", shape)  # type: ignore[arg-type]


def _checkpoint_mark(facts: Facts, event: Event) -> Mark:
    at = facts.clock.at(event.time_s)
    if event.kind != "checkpointed":
        return Mark(at, "red", f"{seconds(at)}: {_first_line(event)}", "cross")
    duration_s = float(event.details.get("duration_s") or 0.0)
    is_extra = event.details.get("why") == "extra"
    return Mark(at - duration_s, "blue", f"{seconds(at)}: {_first_line(event)}", "hollow" if is_extra else "bar", at)


def _evaluation_mark(facts: Facts, evaluation: Evaluation) -> Mark:
    at = facts.clock.at(evaluation.time_s)
    value = evaluation.metrics.get(facts.metric)
    value_text = f"{facts.metric} {number(value)}, " if value is not None else ""
    backlog = f", {evaluation.behind} checkpoints behind" if evaluation.behind else ""
    text = (
        f"{seconds(at)}: step {evaluation.step:,} evaluated, {value_text}took {seconds(evaluation.duration_s)}{backlog}"
    )
    return Mark(at - evaluation.duration_s, "orange", text, "bar", at)


_TEXTS = {
    "started": "start {fence} of the driver, up to {max_workers} workers",
    "resumed": "resumed{at}, from a {source}",
    "branched": "continues {source} from step {step} on",
    "formed": "{workers} workers train together from step {step}",
    "params_diverged": "after a failure, the states of ranks {ranks} differed from the others; resumed{at}",
    "workers": "{workers} workers start",
    "failed": "failure {number}{at}, {left} workers left: {reasons}",
    "storage_failed": "the storage failed{at}, {left} workers left: {reasons}",
    "preempted": "preemption {number}{at}: {workers} workers had to leave",
    "resized": "resized from {before} to {after} workers{at}: {reason}",
    "replaced": "lost workers replaced, {before} to {after}{at}",
    "standbys": "{ready} standby workers are ready",
    "start_failed": "{workers} more workers could not start: {reason}",
    "checkpointed": "checkpoint{at} ({why}), took {duration}",
    "evaluation_skipped": "no evaluation{at}: {reason}",
    "write_retried": "checkpoint{at} written at attempt {attempts}: {reason}",
    "write_failed": "checkpoint{at} not written: {reason}",
    "fallback": "checkpoint {checkpoint} skipped: {reason}",
    "environment_changed": "environment changed{at}: before {before}, now {now}",
    "data_changed": "resumed with changed data: {names}",
    "code_changed": "resumed with changed code: {names}",
    "straggler_detected": "{straggler}{at}",
    "straggler_recovered": "rank {rank}{at_host} keeps up again{at}",
    "stalled": "{straggler} in one step{at}",
    "rebalanced": "logical workers moved{at}: {before} became {after}",
    "time_breakdown": "until{until} the workers' time was: {parts_of_time}",
    "evicted": "rank {rank}{at_host} had to leave{at}: {reason}",
    "device_memory": "{gb} of {of_gb} GB of the memory of {device} are free after step {step}",
    "device_fault": "a device{at_host} failed{at}: {reason}",
    "device_excluded": "no more workers start on a device{at_host}: it failed {times} times",
    "sdc_detected": "rank {rank}{at_host} computed logical worker {logical_worker}{at} wrongly, and ended; its last"
    " verified result is from step {clean}",
    "suspected": "checkpoints {steps} are marked: {reason}",
    "stacks": "worker {rank} stalled the group{at}, while {doing}",
    "driver_lost": "the driver had ended{at}, {status}; noticed by {noticed_by}",
    "worker_exit": "rank 0 left{at}",
    "profiled": "steps {first} to {step} traced: {file}",
}
"""Text of each kind of event, with its details, `at` (its step), and what `describe_event` adds."""


def describe_event(event: Event) -> str:
    """Returns an event as a text."""
    details = event.details
    step = f" step {details['step']:,}" if isinstance(details.get("step"), int) else ""
    at = f" at{step}" if step else ""
    if event.kind not in _TEXTS:
        reason = f": {details['reason']}" if details.get("reason") else ""
        return f"{event.kind.replace('_', ' ')}{at}{reason}"
    added = {
        "fence": event.fence,
        "at": at,
        "until": step,
        "at_host": _at_host(details),
        "duration": seconds(float(details.get("duration_s") or 0.0)),
        "names": ", ".join(map(str, details.get("changed") or [])),
        "parts_of_time": _describe_time(details),
        "reasons": _reasons(details.get("errors")),
        "straggler": _describe_straggler(details),
    }
    return _TEXTS[event.kind].format_map(defaultdict(lambda: None, details | added))


def _describe_time(details: dict[str, Any]) -> str:
    workers = details.get("workers")
    busiest = workers[:_MAX_WORKERS] if isinstance(workers, list) else []
    return "; ".join(
        f"rank {worker.get('rank')} {worker.get('compute', 0):.0%} computing, {worker.get('data', 0):.0%} waiting for"
        f" data, {worker.get('other', 0):.0%} otherwise, {worker.get('waits', 0):.0%} waiting for the others"
        for worker in busiest
    )


def _describe_straggler(details: dict[str, Any]) -> str:
    doing = {"compute": "computed", "data": "waited for data"}.get(str(details.get("cause")), "was busy otherwise")
    return (
        f"rank {details.get('rank')}{_at_host(details)} {doing} {float(details.get('times') or 0.0):.1f} times as long"
        f" as the others"
    )


def _at_host(details: dict[str, Any]) -> str:
    description = ", ".join(str(details[name]) for name in ("name", "host", "device") if details.get(name))
    return f" ({description})" if description else ""


def _first_line(event: Event) -> str:
    return describe_event(event).partition("\n")[0]


def _reasons(errors: object) -> str:
    """Returns the errors of the workers as one text; of several errors with the same first line, one."""
    messages = errors.values() if isinstance(errors, dict) else [errors]
    return "; ".join({str(error).partition("\n")[0]: str(error) for error in messages}.values())
