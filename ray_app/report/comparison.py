"""Displays for notebooks: the comparison of several runs (`Comparison`), and one run (`run_cell`).

The comparison is a table with common curves. One run is shown with figures of its report; both have the report's style.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

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
)
from ray_app.report.facts import Facts, shown_fields
from ray_app.report.figures import NARROW, WIDE, Figure, cluster_figures, learning_figures
from ray_app.report.page import TONES, cards_of, environment
from ray_app.report.tables import sizes_text
from ray_app.runlog.redaction import redact


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


_TONES: tuple[Tone, ...] = ("blue", "orange", "green", "purple", "red", "gray")


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
            rows=list(zip(_tones(len(texts)), texts, strict=True)),
            figures=self._figures(),
        )

    def _figures(self) -> list[Figure]:
        losses = [finite_points((float(r.step), r.loss) for r in facts.records) for facts in self.facts]
        figures = self._figure(
            "Loss", "loss", "mean per row", [smooth_points(points) or points for points in losses], "line"
        )
        for name in dict.fromkeys(facts.metric for facts in self.facts):
            points = [
                finite_points((float(e.step), e.metrics[name]) for e in f.evaluations if name in e.metrics)
                for f in self.facts
            ]
            figures += self._figure(f"Evaluation: {name.replace('_', ' ')}", name, "on held-out rows", points, "dots")
        return figures

    def _figure(self, title: str, name: str, unit: str, curves: Sequence[Sequence[Point]], kind: Any) -> list[Figure]:
        """Returns a list with one figure; empty without points."""
        tones = _tones(len(curves))
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


def _tones(count: int) -> list[Tone]:
    return [_TONES[i % len(_TONES)] for i in range(count)]
