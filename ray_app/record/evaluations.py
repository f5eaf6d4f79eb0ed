"""The evaluations of a run: one file per evaluator and step, written once. The run's own evaluator has no name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ray_app.record.files import listing, names, put_json, read_all_json
from ray_app.record.paths import RunPaths


@dataclass(frozen=True)
class Evaluation:
    """What an evaluator found about one checkpoint.

    Args:
        step: Finished steps of the checkpoint.
        epoch: Its epoch.
        params_digest: Digest of the parameters that were evaluated.
        metrics: Value by name.
        rows: Rows evaluated.
        duration_s: Seconds it took.
        time_s: When it was done, seconds since 1970 (UTC).
        data_digest: Digest of the evaluation data's manifest.
        behind: Checkpoints that were waiting when it was done.
        lag_s: Seconds from the commit of the checkpoint until then.
        tables: Metrics that are lists, one number per class, or matrices.
        classes: Names of the classes, in the order of the tables.
        examples: Some rows that were predicted wrong, the surest ones first.
    """

    step: int
    epoch: int
    params_digest: str
    metrics: dict[str, float]
    rows: int
    duration_s: float
    time_s: float
    data_digest: str = ""
    behind: int = 0
    lag_s: float = 0.0
    tables: dict[str, list[Any]] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)


def put_evaluation(paths: RunPaths, evaluation: Evaluation, name: str | None = None) -> bool:
    """Records an evaluation of the evaluator `name`; returns False if the step had one already, which then stays."""
    return put_json(paths.evaluation(evaluation.step, name), asdict(evaluation), if_absent=True)


def read_evaluations(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """The evaluations of one evaluator by step."""
    folder = paths.evaluations_of(name)
    return [Evaluation(**value) for value in read_all_json(folder / file for file in sorted(filter(_is_evaluation, names(folder))))]


def evaluated_steps(paths: RunPaths, name: str | None = None) -> set[int]:
    """The steps that have an evaluation of one evaluator, without reading them."""
    found = filter(_is_evaluation, names(paths.evaluations_of(name)))
    return {int(file.removeprefix("step-").removesuffix(".json")) for file in found}


def evaluator_names(paths: RunPaths) -> list[str]:
    """The evaluators beside the run's own that have evaluated something, sorted."""
    return sorted({place.partition("/")[0] for place in listing(paths.evaluators) if _is_evaluation(place.partition("/")[2])})


def _is_evaluation(file: str) -> bool:
    return file.startswith("step-") and file.endswith(".json")


def ranked(evaluations: list[Evaluation], metric: str, mode: Literal["max", "min"] | str) -> list[Evaluation]:
    """Evaluations from best to worst by a metric; of equals the earlier step is better. NaN counts as worst."""
    usable = [e for e in evaluations if e.metrics.get(metric) is not None and e.metrics[metric] == e.metrics[metric]]
    return sorted(usable, key=lambda e: (-e.metrics[metric] if mode == "max" else e.metrics[metric], e.step))
