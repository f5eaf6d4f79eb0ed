"""The configuration of a study, `TuneSection`, and its checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from ray_app.config.config import Config
from ray_app.config.rules import NumberRange, PositiveFloat, PositiveInt, check_fields, find_empty_fields, refuse
from ray_app.retrain.options import RetrainSection
from ray_app.retrain.options import check_section as check_retraining
from ray_app.tune.space import parse_space

_NAME = re.compile(r"\w[\w.-]{0,99}")
_OPTUNA = ("tpe", "gp")


@dataclass(frozen=True)
class StudyScheduler:
    """How a study divides epochs among its trials.

    Args:
        kind: `halving`: all trials train `min_epochs` epochs, the best of them `eta` times as many, and so on up to
            `train.epochs` (successive halving). `asha`: the same, but a trial is promoted as soon as it is among the
            best of those that have reached its rung. `median`: the same rungs, and a trial stops if its best result is
            worse than the median of the earlier trials' averages. `none`: every trial trains `train.epochs` epochs.
        eta: The share of the trials of a rung that is promoted is one over this, rounded down, and at least one trial.
            With `median` only the epochs of each rung follow from it.
        min_epochs: Epochs of the first rung.
    """

    kind: Literal["halving", "asha", "median", "none"] = "halving"
    eta: Annotated[int, NumberRange(ge=2)] = 3
    min_epochs: PositiveInt = 1


@dataclass(frozen=True)
class StudyBudget:
    """What a study may use; beyond it no trial is begun or promoted, and those that train go on to their rung.

    Args:
        hours: Hours of all starts of the study together.
        worker_hours: Hours of all workers together.
    """

    hours: PositiveFloat | None = None
    worker_hours: PositiveFloat | None = None


@dataclass(frozen=True)
class TuneSection:
    """The settings that a study tries, the number of its trials, and the rules by which it compares them.

    Args:
        name: Name of the study and of its folder below `run.storage_path`. A start with the name of an existing study
            continues it.
        space: For each setting, by its dotted name, the values to try: `{choice: [A, B]}`, `{uniform: [LOW, HIGH]}`,
            `{log_uniform: [LOW, HIGH]}` or `{int_uniform: [LOW, HIGH]}`, with both ends.
        trials: Number of trials. A higher number than at the last start adds trials to a study.
        metric: Metric that compares trials. Default: `evaluate.metric`, or the one that the task declares.
        scheduler: How epochs are divided among the trials.
        sampler: `random`: each setting is drawn from (`seed`, number of the trial, name of the setting). `grid`: all
            combinations of choices and integers. `tpe` and `gp`: as Optuna proposes by the results of the first rung.
        ahead: With `tpe` and `gp`, trial n is proposed by the results of the trials up to n - `ahead`, so that as many
            can train at the same time.
        order: `fixed`: every decision depends on the results and numbers of the trials, not on which result comes
            first, so that the winner is the same on any cluster. `arrival`: decisions are made as results come.
        folds: Trains each trial on each fold of `data.path` in place of `data.eval_path`, and compares trials by the
            mean: the number of folds, or a mapping with perhaps it (`folds`), and one of the columns `by`, `by_class`
            and `by_time`.
        split_evaluation: Whether trials are compared by one half of the evaluation rows, so that the other half gives a
            score of the winner that nothing was chosen by. With folds no rows are left for that.
        slots: Trials that train at the same time. Default: as many as the cluster has capacity for.
        reuse: Names of other studies below `run.storage_path`. A trial that one of them has trained, with the same
            settings, data and code, is copied from there and not trained again.
        budget: What the study may use.
        register: Whether the winner becomes a version of `tracking.registered_model`, which serves if it passes the
            gate of retraining, with the settings of the section `retrain`.
        dry_run: Only shows the trials and rungs; nothing is trained or written.
    """

    name: str = "study"
    space: dict[str, dict[str, Any]] = field(default_factory=dict)
    trials: PositiveInt = 27
    metric: str | None = None
    scheduler: StudyScheduler = StudyScheduler()
    sampler: Literal["random", "grid", "tpe", "gp"] = "random"
    ahead: PositiveInt = 4
    order: Literal["fixed", "arrival"] = "fixed"
    folds: PositiveInt | dict[str, Any] | None = None
    split_evaluation: bool = True
    slots: PositiveInt | None = None
    reuse: list[str] = field(default_factory=list)
    budget: StudyBudget = StudyBudget()
    register: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Makes the options below the section of mappings, as the parser returns them."""
        for name, kind in (("scheduler", StudyScheduler), ("budget", StudyBudget)):
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, kind(**value))


def check_section(config: Config, section: TuneSection, gate: RetrainSection) -> Config:
    """Returns the configuration that the trials have in common; raises ConfigError with all problems.

    Args:
        config: The configuration as the user wrote it.
        section: The section `tune`.
        gate: The section `retrain`.
    """
    parts = {"tune.": section, "tune.scheduler.": section.scheduler, "tune.budget.": section.budget}
    problems = [problem for prefix, part in parts.items() for problem in find_empty_fields(part, prefix)]
    refuse(problems)
    problems = [problem for prefix, part in parts.items() for problem in check_fields(part, prefix)]
    if not _NAME.fullmatch(section.name):
        problems.append(
            f"tune.name is {section.name!r}; use 1 to 100 letters, digits, '.', '_' and '-', from a letter or digit on."
        )
    if config.run.name is not None:
        problems.append(f"run.name is {config.run.name!r}; a study names its runs. Leave it out, and set tune.name.")
    if config.data.eval_path is None and section.folds is None:
        problems.append(
            "data.eval_path is missing: trials are compared by its rows. Name a data set, or set tune.folds."
        )
    if config.data.eval_path is not None and section.folds is not None:
        problems.append(
            "tune.folds is set, and so is data.eval_path; trials are compared by one of them. Leave one out."
        )
    if config.scaling.max_workers == "all" and config.scaling.logical_workers is None:
        problems.append("scaling.max_workers is all, and scaling.logical_workers is not set; a study needs a number.")
    if section.register and config.tracking.registered_model is None:
        problems.append("tune.register is set without tracking.registered_model; name the model, or leave it out.")
    if section.register and section.folds is not None:
        problems.append(
            "tune.register is set, and so is tune.folds: the winner is a setting, whose model trains on a part of the"
            " rows. Leave tune.register out, and give ray-app retrain the file winner.yaml of the study."
        )
    elif section.register and not section.split_evaluation and gate.gate_path is None:
        problems.append(
            "tune.register is set, and all evaluation rows compare trials, so the gate has none. Set"
            " tune.split_evaluation, or retrain.gate_path."
        )
    if section.scheduler.min_epochs > config.train.epochs:
        problems.append(
            f"tune.scheduler.min_epochs is {section.scheduler.min_epochs}, above train.epochs = {config.train.epochs},"
            " which is what the last rung has; lower the one or raise the other."
        )
    refuse(problems)
    if section.register:
        check_retraining(config, gate)
    parse_space(section.space, section.sampler == "grid")
    if section.metric is not None:
        config = replace(config, evaluate=replace(config.evaluate, metric=section.metric))
    return config


def uses_optuna(section: TuneSection) -> bool:
    """Returns whether the sampler is one of Optuna's, which proposes settings by earlier results."""
    return section.sampler in _OPTUNA
