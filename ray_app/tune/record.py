"""The files of a study: its folder, and the record of its decisions.

The record is one JSON file, written whole before anything that it decides is carried out. A start reads it and goes on.
What trials have trained and scored is in their run directories.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from ray_app.config.config import Config, describe_changes, digest_json, flatten, result_fields
from ray_app.errors import RunExistsError
from ray_app.runlog.paths import Entry, RunPaths, add_version, from_known_fields, translate_format_errors
from ray_app.storage.files import Location, put_atomic, read_json, to_json, to_location
from ray_app.tune.options import TuneSection
from ray_app.tune.samplers import Observed, Settings
from ray_app.tune.scheduler import Promotion


@dataclass(frozen=True)
class StudyPaths:
    """The layout of `<run.storage_path>/<tune.name>`; the lease of `root` is that of the study's driver."""

    root: Location

    @classmethod
    def of(cls, config: Config, section: TuneSection) -> StudyPaths:
        """Returns the paths of a study."""
        return cls(to_location(config.run.storage_path) / section.name)

    trials = Entry("trials")
    """Folder of the runs of the trials, the `run.storage_path` of their configurations."""
    record = Entry("study.json")
    """File of the decisions."""
    winner = Entry("winner.yaml")
    """File of the winner's settings, for a command's `--config` after the configuration of the study."""
    report = Entry("report.html")
    """Page about the study."""

    def runs(self, trial: int, folds: int | None) -> list[RunPaths]:
        """Returns the run directory of a trial, or those of its folds."""
        name = trial_name(trial)
        names = [name] if folds is None else [f"{name}-fold-{fold}" for fold in range(folds)]
        return [RunPaths(self.trials / name) for name in names]


def trial_name(number: int) -> str:
    """Returns the name of the run of a trial, such as `0007`."""
    return f"{number:04d}"


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial at the end of a rung.

    Args:
        value: The metric of its best checkpoint so far; NaN if that is not a number, None if the trial failed.
        step: Step of that checkpoint.
        epochs: Epochs that it has trained.
        params_digest: Digest of the newest parameters.
        reason: Why it failed, in a line.
        seconds: Seconds from its start in a slot until its end.
        workers: Number of workers.
        ended_s: When it ended, in seconds since 1970 (UTC).
        fold: The fold of which this is the result; None for that of all folds.
        scores: The values of the folds, of which `value` is the mean.
    """

    trial: int
    rung: int
    value: float | None
    step: int = 0
    epochs: int = 0
    params_digest: str | None = None
    reason: str | None = None
    seconds: float = 0.0
    workers: int = 1
    ended_s: float = 0.0
    fold: int | None = None
    scores: list[float] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether the trial failed."""
        return self.reason is not None


def combine_folds(parts: Sequence[TrialResult]) -> TrialResult:
    """Returns the result of a trial in a rung from those of its folds, in their order."""
    first = parts[0]
    failed = next((part for part in parts if part.has_failed), None)
    scores = [float("nan") if part.value is None else part.value for part in parts]
    return TrialResult(
        first.trial,
        first.rung,
        fmean(scores) if failed is None else None,
        epochs=max(part.epochs for part in parts),
        params_digest=digest_json([part.params_digest for part in parts]),
        reason=f"fold {failed.fold}: {failed.reason}" if failed is not None else None,
        seconds=sum(part.seconds * part.workers for part in parts),
        ended_s=max(part.ended_s for part in parts),
        scores=scores if failed is None else [],
    )


@dataclass
class StudyRecord:
    """What a study has decided so far.

    Args:
        identity: What decides the result, by dotted names; a start with other values is refused.
        metric: Name of the metric that compares trials.
        mode: Whether a higher (`max`) or a lower (`min`) value is better.
        rungs: Epochs at the end of each rung.
        trials: The settings of each trial that has begun, by its number.
        results: Results in the order in which they were taken.
        promotions: Trials that go on, with the rung, in the order in which that was decided.
        folds: Number of folds on which each trial trains; None without folds.
        parts: Results of single folds.
        hours: Hours of all starts until the newest result.
        end: The winner with its value, as `StudyDriver` writes it at the end; None while the study goes on.
        mlflow_run_id: Id of the study's run in MLflow.
        slots: Number of trials that can train at the same time now.
        budget: Limits of `hours` and `worker_hours`, see `StudyBudget`.
    """

    identity: dict[str, Any]
    metric: str
    mode: str
    rungs: list[int]
    trials: dict[int, dict[str, Any]] = field(default_factory=dict)
    results: list[TrialResult] = field(default_factory=list)
    promotions: list[Promotion] = field(default_factory=list)
    folds: int | None = None
    parts: list[TrialResult] = field(default_factory=list)
    hours: float = 0.0
    end: dict[str, Any] | None = None
    mlflow_run_id: str | None = None
    slots: int = 0
    budget: dict[str, float | None] = field(default_factory=dict)

    @property
    def worker_hours(self) -> float:
        """Hours of all workers."""
        return sum(result.seconds * result.workers for result in self.results) / 3600

    @property
    def decisions(self) -> Any:
        """What does not depend on the cluster: settings, promotions, results with the digests of parameters, winner."""
        names = ("trial", "rung", "value", "step", "epochs", "params_digest", "reason", "scores")
        results = sorted((r.trial, r.rung, [getattr(r, name) for name in names]) for r in self.results)
        return self.trials, sorted(self.promotions), results, self.end

    def observed(self, before: int) -> list[Observed]:
        """Returns the trials below a number with a result of the first rung, by number."""
        results = {r.trial: None if r.has_failed else r.value for r in self.results if not r.rung}
        return [Observed(self.trials[trial], results[trial]) for trial in sorted(results) if trial < before]

    def newest_results(self) -> dict[int, TrialResult]:
        """Returns the result of each trial in the highest rung that it has ended."""
        return {result.trial: result for result in sorted(self.results, key=lambda r: r.rung)}


_RULES = ("space", "metric", "sampler", "ahead", "order", "folds", "split_evaluation")


def study_identity(config: Config, section: TuneSection) -> dict[str, Any]:
    """Returns what decides the result of a study: the configuration, the space and the rules of its decisions.

    The number of trials may grow, and slots and budget do not change a decision.
    """
    rules = {name: getattr(section, name) for name in _RULES}
    if section.sampler not in ("tpe", "gp"):
        del rules["ahead"]
    tune = {**rules, "scheduler": asdict(section.scheduler)}
    fields = result_fields(config, "") | {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    return dict(json.loads(json.dumps(flatten({"tune": tune}) | fields)))


def read_record(paths: StudyPaths) -> StudyRecord | None:
    """Returns the record of a study; None if there is none."""
    values = read_json(paths.record)
    if values is None:
        return None
    with translate_format_errors(paths.record, values):
        record = from_known_fields(StudyRecord, values)
        record.trials = {int(number): settings for number, settings in record.trials.items()}
        record.parts, record.results = map(_parse_results, (values.get("parts", []), values["results"]))
        record.promotions = [Promotion(*promotion) for promotion in record.promotions]
    return record


def _parse_results(values: list[dict[str, Any]]) -> list[TrialResult]:
    results = [from_known_fields(TrialResult, result) for result in values]
    # JSON has no NaN.
    return [r if r.has_failed or r.value is not None else replace(r, value=math.nan) for r in results]


def put_record(paths: StudyPaths, record: StudyRecord) -> None:
    """Writes the record of a study."""
    # It is written for each decision: copies of the results and indentation would take most of the time.
    values = {**vars(record), **{name: list(map(vars, getattr(record, name))) for name in ("parts", "results")}}
    put_atomic(paths.record, to_json(add_version(values)).encode())


def refuse_other_study(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises RunExistsError with the differences if the study of this name decides by something else."""
    if old == new:
        return
    diff = describe_changes(old, new)
    raise RunExistsError(
        f"The study {name!r} exists with another configuration:\n{diff}\n(-: of the study, +: asked for now). Nothing"
        " was changed. Give another tune.name for a new study, or the study's own values to continue it."
    )


def settings_text(settings: Settings) -> str:
    """Returns settings as a short text, such as `lr 0.003, model mlp`."""
    last_parts = [name.rpartition(".")[2] for name in settings]
    # Two settings may have the same last part, such as those of optimizers that take turns.
    names = [last if last_parts.count(last) == 1 else name for name, last in zip(settings, last_parts, strict=True)]
    values = ("null" if value is None else str(value) for value in settings.values())
    return ", ".join(map(" ".join, zip(names, values, strict=True)))
