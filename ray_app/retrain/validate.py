"""Is a delivery of data sound? A pure function of its profile and of what is known of the champion's data; all problems at once."""

from __future__ import annotations

from dataclasses import dataclass

from ray_app.retrain.profile import Profile, class_shift
from ray_app.retrain.section import RetrainSection


@dataclass(frozen=True)
class Agreement:
    """How far the champion agrees with the labels of some rows.

    Args:
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        accepted: Its value on the evaluation data when it was promoted.
        training: Its value on a sample of the delivered training rows.
        evaluation: Its value on the delivered evaluation rows.
    """

    metric: str
    mode: str
    accepted: float
    training: float
    evaluation: float

    def loss(self, value: float) -> float:
        """How much worse a value is than the accepted one, relative to that."""
        worse = self.accepted - value if self.mode == "max" else value - self.accepted
        return worse / max(abs(self.accepted), 1e-12)


@dataclass(frozen=True)
class Known:
    """What a delivery is held against.

    Args:
        train: Profile of the training data of the champion; None: there is none that is known, as before the first champion.
        evaluation: Profile of the evaluation data that it was promoted on.
    """

    train: Profile | None = None
    evaluation: Profile | None = None


def problems(
    train: Profile, evaluation: Profile, known: Known, agreement: Agreement | None, twice: list[str], section: RetrainSection
) -> list[str]:
    """Everything that speaks against training on a delivery.

    Args:
        train: Profile of the delivered training data.
        evaluation: Profile of the delivered evaluation data.
        known: What these are held against.
        agreement: How far the champion agrees with the labels; None without a champion.
        twice: Files that are there twice, as text.
        section: The thresholds.
    """
    found = list(twice)
    if evaluation.rows < section.min_eval_rows:
        found.append(
            f"the evaluation data has {evaluation.rows} rows; with fewer than retrain.min_eval_rows = {section.min_eval_rows} no gate can"
            " tell a better model from luck"
        )
    found += _against("training data", train, known.train, section)
    found += _against("evaluation data", evaluation, known.evaluation, section)
    return found + (_disagreements(agreement, section) if agreement is not None else [])


def _against(what: str, now: Profile, before: Profile | None, section: RetrainSection) -> list[str]:
    """Problems of one data set; without one to compare it with, none."""
    if before is None:
        return []
    found = []
    for name in sorted(now.schema.keys() | before.schema.keys()):
        if now.schema.get(name) != before.schema.get(name):
            found.append(f"{what}: column {name!r} is {now.schema.get(name, 'missing')}, it was {before.schema.get(name, 'not there')}")
    if now.rows < section.min_rows_ratio * before.rows:
        found.append(
            f"{what}: {now.rows:,} rows, {now.rows / before.rows:.0%} of the {before.rows:,} of the champion's; allowed are"
            f" {section.min_rows_ratio:.0%} (retrain.min_rows_ratio)"
        )
    for name, share in now.nulls.items():
        if share > before.nulls.get(name, 0.0) + section.max_null_increase:
            found.append(
                f"{what}: {share:.1%} of column {name!r} are missing, {before.nulls.get(name, 0.0):.1%} were; allowed are"
                f" {section.max_null_increase:.1%} more (retrain.max_null_increase)"
            )
    gone = sorted((name for name, rows in before.classes.items() if rows and not now.classes.get(name)), key=int)
    if gone:
        found.append(f"{what}: no row of class {', '.join(gone)}, of which there were {', '.join(str(before.classes[n]) for n in gone)}")
    shift = class_shift(now.classes, before.classes)
    if shift > section.max_class_shift:
        found.append(
            f"{what}: the class balance has shifted by {shift:.2f} (total variation); allowed are {section.max_class_shift:.2f}"
            " (retrain.max_class_shift)"
        )
    return found


def _disagreements(agreement: Agreement, section: RetrainSection) -> list[str]:
    found = []
    for what, value in (("training", agreement.training), ("evaluation", agreement.evaluation)):
        loss = agreement.loss(value)
        if not loss <= section.max_disagreement:  # also NaN
            found.append(
                f"labels of the {what} data: the champion's {agreement.metric} on them is {value:.4f}, it was {agreement.accepted:.4f} when"
                f" it was promoted, a loss of {loss:.0%}; allowed are {section.max_disagreement:.0%} (retrain.max_disagreement). A model"
                " does not age like that: the labels look wrong"
            )
    return found
