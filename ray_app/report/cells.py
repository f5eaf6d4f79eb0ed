"""What a notebook shows of a run: the report's figures and style, as a piece of a page."""

from __future__ import annotations

from functools import cache
from typing import Any

from markupsafe import Markup

from ray_app.record.redact import redact
from ray_app.report.facts import Facts
from ray_app.report.figures import cluster_figures, learning_figures
from ray_app.report.page import TONES, cards_of, environment


def run_cell(facts: Facts) -> str:
    """One run as HTML: its key figures, what happened, the loss, and the metric that decides (without one, the learning rate)."""
    figures = [*learning_figures(facts)[:2], *cluster_figures(facts)]
    return cell("run_cell.html.j2", facts=facts, tone=TONES[facts.status], cards=cards_of(facts), figures=figures)


def cell(template: str, **values: Any) -> str:
    """Fills a template that extends `cell.html.j2`; what comes from runs is escaped, secrets are hidden."""
    return redact(environment().get_template(template).render(css=_css(), **values))


@cache
def _css() -> Markup:
    """The report's style sheet, to stand inside a rule: what it says of the page's root is then said of the piece."""
    env = environment()
    assert env.loader is not None
    return Markup(env.loader.get_source(env, "report.css")[0].replace(":root", "&"))
