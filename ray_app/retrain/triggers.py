"""Is there a reason to train? A pure decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ray_app.retrain.section import RetrainSection

Trigger = Literal["none", "forced", "first", "new data", "drop", "drift", "age"]


@dataclass(frozen=True)
class TriggerFacts:
    """What the decision depends on.

    Args:
        champion: Version of the champion; None: there is none.
        age_days: Days since its promotion; None: not known.
        same_data: Whether the files are those that it was trained and promoted with; None: not known, since it was not made by a
            retraining.
        new_rows: Training rows in files that it was not trained on.
        rows: Training rows.
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        then: Its value when the champion was promoted; None: not known.
        now: Its value on the evaluation data as it is now; None: not known.
        drift: Population stability index of every column that drifted.
        judged: What came of the same data, configuration and code before; None: they are new, or were refused for another champion.
    """

    champion: str | None = None
    age_days: float | None = None
    same_data: bool | None = None
    new_rows: int = 0
    rows: int = 0
    metric: str = ""
    mode: str = "max"
    then: float | None = None
    now: float | None = None
    drift: dict[str, float] = field(default_factory=dict)
    judged: str | None = None


@dataclass(frozen=True)
class Triggered:
    """What to do.

    Args:
        retrain: Whether to train.
        trigger: Which reason came first.
        reason: The same in words, with figures.
    """

    retrain: bool
    trigger: Trigger
    reason: str


def decide(facts: TriggerFacts, section: RetrainSection) -> Triggered:
    """Decides whether to train; of several reasons the first of forced, first, new data, drop, drift, age counts.

    With the same data, configuration and code training gives the same bits, so what was judged before is not trained again, whatever
    the reason.
    """
    trigger, reason = _trigger(facts, section)
    if trigger == "none":
        return Triggered(False, trigger, reason)
    if facts.judged is not None:
        return Triggered(False, trigger, f"{reason}; but the same data, configuration and code were already judged: {facts.judged}")
    return Triggered(True, trigger, reason)


def _trigger(facts: TriggerFacts, section: RetrainSection) -> tuple[Trigger, str]:  # noqa: PLR0911 - one for each trigger
    if section.force is not None:
        return "forced", f"forced: {section.force}"
    if facts.champion is None:
        return "first", "there is no champion yet"
    if facts.same_data is None:
        return "new data", f"it is not known what data champion version {facts.champion} was trained on"
    if facts.new_rows >= section.min_new_rows:
        return "new data", f"new data: {facts.new_rows:,} of {facts.rows:,} training rows are in files that the champion was not trained on"
    fall = _fall(facts)
    if section.max_drop is not None and fall is not None and not fall <= section.max_drop:  # also NaN
        return "drop", (
            f"the champion's {facts.metric} on the evaluation data is {facts.now:.4f}, it was {facts.then:.4f} when it was promoted: worse"
            f" by {fall:.4f}, more than {section.max_drop:g}"
        )
    drifted = {name: value for name, value in facts.drift.items() if section.max_psi is not None and value > section.max_psi}
    if drifted:
        worst = sorted(drifted, key=lambda name: -drifted[name])
        return "drift", f"drift: PSI above {section.max_psi:g} in " + ", ".join(f"{name} ({drifted[name]:.2f})" for name in worst[:5])
    if section.max_age_days is not None and facts.age_days is not None and facts.age_days > section.max_age_days:
        return "age", f"the champion is {facts.age_days:.1f} days old, more than {section.max_age_days:g}"
    return "none", _nothing(facts, section)


def _fall(facts: TriggerFacts) -> float | None:
    """How much worse the champion's metric has become."""
    if facts.then is None or facts.now is None:
        return None
    return facts.then - facts.now if facts.mode == "max" else facts.now - facts.then


def _nothing(facts: TriggerFacts, section: RetrainSection) -> str:
    if facts.same_data:
        return f"the data is what champion version {facts.champion} was trained on"
    return f"{facts.new_rows:,} new training rows, fewer than {section.min_new_rows:,} (retrain.min_new_rows), and nothing else has changed"
