"""The configuration of retraining, `RetrainSection`, and its checks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ray_app.config.config import Config
from ray_app.config.rules import Fraction, NonNegativeFloat, NumberRange, PositiveInt, check_fields, refuse


def _judging_field(default: Any) -> Any:
    """Returns a field that decides whether data or a model is accepted.

    If the value of such a field has changed, the same data and the same model are judged again.
    """
    return dataclasses.field(default=default, metadata={"judges": True})


@dataclass(frozen=True)
class RetrainSection:
    """When to train again, on what, and what makes the result the champion.

    Args:
        force: Reason to train now, whatever the triggers say; the data and the new model are judged as always.
        dry_run: Only says what would be decided and whether the data is sound; nothing is trained or recorded.
        min_new_rows: Training rows in files that the champion was not trained on that are a reason to train.
        max_age_days: Days since the champion's promotion after which it is trained again, if that can give another
            result; default: any.
        max_drop: Fall of the champion's metric on the evaluation data as it is now against its value when it was
            promoted that is a reason to train, in the metric's own unit; default: none is.
        max_psi: Population stability index of an input column, against the champion's training data, above which its
            drift is a reason to train; default: none is.
        start: `scratch` begins as the seed says, `champion` with the champion's parameters.
        gate_path: Folder (or file) of Parquet that champion and challenger are compared on; default: half of the rows
            of `data.eval_path`, and the run is evaluated on the other half, so that no row judges that chose a
            checkpoint.
        accept_data: Reason to accept the data although validation refuses it, such as a change of schema that was
            planned.
        min_rows_ratio: Fewest training rows, and fewest evaluation rows, as a share of those of the champion.
        min_eval_rows: Fewest rows that the gate judges on; with fewer it could not tell a better model from luck.
        max_null_increase: Largest increase of the share of missing values in a column.
        max_class_shift: Largest total variation distance of the class balance, 0 to 1.
        max_disagreement: Largest relative loss of the champion's metric on the delivered rows, against its value when
            it was promoted: more means that the labels are wrong, not that the model is old.
        min_gain: The new model is promoted if the lower bound of the interval of its gain over the champion is above
            this. 0: better beyond doubt; below 0: not worse than that (a test of non-inferiority).
        confidence: Coverage of that interval.
        min_metric: Worst value of the metric that a champion may have; default: any.
        max_recall_drop: Largest fall of the recall of a class with 20 evaluation rows or more, as far as it is no
            chance.
    """

    force: str | None = None
    dry_run: bool = False
    min_new_rows: PositiveInt = 1
    max_age_days: NonNegativeFloat | None = None
    max_drop: NonNegativeFloat | None = None
    max_psi: NonNegativeFloat | None = 0.25
    start: Literal["scratch", "champion"] = "scratch"
    gate_path: str | None = None
    accept_data: str | None = _judging_field(None)
    min_rows_ratio: Fraction = _judging_field(0.7)
    min_eval_rows: PositiveInt = _judging_field(100)
    max_null_increase: Fraction = _judging_field(0.01)
    max_class_shift: Fraction = _judging_field(0.2)
    max_disagreement: NonNegativeFloat = _judging_field(0.25)
    min_gain: float = _judging_field(0.0)
    confidence: Annotated[float, NumberRange(gt=0, lt=1)] = _judging_field(0.95)
    min_metric: float | None = _judging_field(None)
    max_recall_drop: Fraction = _judging_field(0.1)

    def acceptance_settings(self) -> dict[str, Any]:
        """Returns the settings that decide whether data or a model is accepted, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("judges")}


def check_section(config: Config, section: RetrainSection) -> None:
    """Raises ConfigError, with a line for each problem, if retraining cannot work with a configuration."""
    problems = check_fields(section, "retrain.") + _check_requirements(config, section)
    for name in ("force", "accept_data"):
        if (reason := getattr(section, name)) is not None and not reason.strip():
            problems.append(f"retrain.{name} is empty; give the reason, for those who ask later.")
    refuse(problems)


def _check_requirements(config: Config, section: RetrainSection) -> list[str]:
    problems = []
    if config.tracking.registered_model is None:
        problems.append(
            "tracking.registered_model is missing: the champion is a version of a model in MLflow's registry. Name the"
            " model."
        )
    if config.data.eval_path is None:
        problems.append(
            "data.eval_path is missing: the best checkpoint is chosen by its rows. Name a data set to evaluate on."
        )
    if config.run.name is not None:
        problems.append(
            f"run.name is {config.run.name!r}; a retraining names its run after its data, configuration and code. Leave"
            f" it out."
        )
    if config.train.init_from is not None and section.start == "champion":
        problems.append(
            "train.init_from is given and retrain.start is champion: the run can begin with one of them. Leave one out."
        )
    return problems
