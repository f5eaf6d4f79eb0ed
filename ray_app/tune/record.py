"""The files of a study: its folder, and the record of its decisions.

The record is one JSON file, written whole before anything that it decides is carried out. A start reads it and goes on.
What trials have trained and scored is in their run directories.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray_app.config.config import Config, flatten, result_fields
from ray_app.errors import RunExistsError
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields, translate_format_errors
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

    @property
    def trials(self) -> Location:
        """Folder of the runs of the trials, the `run.storage_path` of their configurations."""
        return self.root / "trials"

    @property
    def record(self) -> Location:
        """File of the decisions."""
        return self.root / "study.json"

    @property
    def report(self) -> Location:
        """Page about the study."""
        return self.root / "report.html"

    def trial(self, number: int) -> RunPaths:
        """Returns the run directory of a trial."""
        return RunPaths(self.trials / trial_name(number))


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

    @property
    def has_failed(self) -> bool:
        """Whether the trial failed."""
        return self.reason is not None


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
        hours: Hours of all starts until the newest result.
        end: The winner with its value, as `StudyDriver` writes it at the end; None while the study goes on.
        mlflow_run_id: Id of the study's run in MLflow.
    """

    identity: dict[str, Any]
    metric: str
    mode: str
    rungs: list[int]
    trials: dict[int, dict[str, Any]] = field(default_factory=dict)
    results: list[TrialResult] = field(default_factory=list)
    promotions: list[Promotion] = field(default_factory=list)
    hours: float = 0.0
    end: dict[str, Any] | None = None
    mlflow_run_id: str | None = None

    @property
    def worker_hours(self) -> float:
        """Hours of all workers."""
        return sum(result.seconds * result.workers for result in self.results) / 3600

    def observed(self, before: int) -> list[Observed]:
        """Returns the trials below a number with a result of the first rung, by number."""
        results = {r.trial: None if r.has_failed else r.value for r in self.results if not r.rung}
        return [Observed(self.trials[trial], results[trial]) for trial in sorted(results) if trial < before]

    def newest_results(self) -> dict[int, TrialResult]:
        """Returns the result of each trial in the highest rung that it has ended."""
        return {result.trial: result for result in sorted(self.results, key=lambda r: r.rung)}


def study_identity(config: Config, section: TuneSection) -> dict[str, Any]:
    """Returns what decides the result of a study: the configuration, the space and the rules of its decisions.

    The number of trials may grow, and slots and budget do not change a decision.
    """
    rules = {name: getattr(section, name) for name in ("space", "metric", "sampler", "ahead", "order")}
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
        results = [from_known_fields(TrialResult, result) for result in values["results"]]
        # JSON has no NaN.
        record.results = [r if r.has_failed or r.value is not None else _with_nan(r) for r in results]
        record.promotions = [Promotion(*promotion) for promotion in record.promotions]
    return record


def _with_nan(result: TrialResult) -> TrialResult:
    return TrialResult(**{**asdict(result), "value": float("nan")})


def put_record(paths: StudyPaths, record: StudyRecord) -> None:
    """Writes the record of a study."""
    # It is written for each decision: copies of the results and indentation would take most of the time.
    values = {**vars(record), "results": list(map(vars, record.results))}
    put_atomic(paths.record, to_json(add_version(values)).encode())


def refuse_other_study(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises RunExistsError with the differences if the study of this name decides by something else."""
    if old == new:
        return
    before, after = ([f"{key}: {value}" for key, value in sorted(fields.items())] for fields in (old, new))
    diff = "\n".join(line for line in difflib.ndiff(before, after) if line[0] in "-+")
    raise RunExistsError(
        f"The study {name!r} exists with another configuration:\n{diff}\n(-: of the study, +: asked for now). Nothing"
        " was changed. Give another tune.name for a new study, or the study's own values to continue it."
    )


def settings_text(settings: Settings) -> str:
    """Returns settings as a short text, such as `lr 0.003, model mlp`."""
    return ", ".join(_setting_texts(settings))


def _setting_texts(settings: Settings) -> Iterator[str]:
    last_parts = [name.rpartition(".")[2] for name in settings]
    for (name, value), short in zip(settings.items(), last_parts, strict=True):
        # Two settings may have the same last part, such as those of optimizers that take turns.
        yield f"{short if last_parts.count(short) == 1 else name} {'null' if value is None else value}"
