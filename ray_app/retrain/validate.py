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
        accepted: Its value on the rows of the gate when it was promoted.
        training: Its value on a sample of the delivered training rows.
        evaluation: Its value on the delivered rows of the gate.
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
        evaluation: Profile of its evaluation data.
        gate: Profile of the gate's own data that it was promoted on.
    """

    train: Profile | None = None
    evaluation: Profile | None = None
    gate: Profile | None = None


@dataclass(frozen=True)
class Gate:
    """The rows that the gate judges on.

    Args:
        rows: How many.
        own: Their profile, if they are a data set of its own (`retrain.gate_path`); None: they are a part of the evaluation data.
    """

    rows: int
    own: Profile | None = None


def problems(
    train: Profile, evaluation: Profile, gate: Gate, known: Known, agreement: Agreement | None, twice: list[str], section: RetrainSection
) -> list[str]:
    """Everything that speaks against training on a delivery.

    Args:
        train: Profile of the delivered training data.
        evaluation: Profile of the delivered evaluation data.
        gate: What the gate judges on.
        known: What these are held against.
        agreement: How far the champion agrees with the labels; None without a champion.
        twice: Files that are there twice, as text.
        section: The thresholds.
    """
    found = list(twice)
    if gate.rows < section.min_eval_rows:
        whose = (
            "the gate's data has"
            if gate.own is not None
            else f"the evaluation data has {evaluation.rows:,} rows, and the gate's part of it"
        )
        found.append(
            f"{whose} {gate.rows:,}; with fewer than retrain.min_eval_rows = {section.min_eval_rows} no gate can tell a better model"
            " from luck"
        )
    found += _against("training data", train, known.train, section)
    found += _against("evaluation data", evaluation, known.evaluation, section)
    if gate.own is not None:
        found += _against("gate data", gate.own, known.gate, section)
    judged = "gate" if gate.own is not None else "evaluation"
    return found + (_disagreements(agreement, judged, section) if agreement is not None else [])


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


def _disagreements(agreement: Agreement, judged: str, section: RetrainSection) -> list[str]:
    found = []
    for what, value in (("training", agreement.training), (judged, agreement.evaluation)):
        loss = agreement.loss(value)
        if not loss <= section.max_disagreement:  # also NaN
            found.append(
                f"labels of the {what} data: the champion's {agreement.metric} on them is {value:.4f}, it was {agreement.accepted:.4f} when"
                f" it was promoted, a loss of {loss:.0%}; allowed are {section.max_disagreement:.0%} (retrain.max_disagreement). A model"
                " does not age like that: the labels look wrong"
            )
    return found
