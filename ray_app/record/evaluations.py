"""The evaluations of a run: one file per step, written once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from ray_app.record.files import listing, names, put_json, read_all
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
    """

    step: int
    epoch: int
    params_digest: str
    metrics: dict[str, float]
    rows: int
    duration_s: float
    time_s: float


def put_evaluation(paths: RunPaths, evaluation: Evaluation) -> bool:
    """Records an evaluation; returns False if the step had one already, which then stays."""
    return put_json(paths.evaluation(evaluation.step), asdict(evaluation), if_absent=True)


def read_evaluations(paths: RunPaths) -> list[Evaluation]:
    """The run's evaluations by step."""
    return [Evaluation(**json.loads(data)) for data in read_all(listing(paths.evaluations).values())]


def evaluated_steps(paths: RunPaths) -> set[int]:
    """The steps that have an evaluation, without reading them."""
    return {int(name.removeprefix("step-").removesuffix(".json")) for name in names(paths.evaluations)}


def ranked(evaluations: list[Evaluation], metric: str, mode: Literal["max", "min"] | str) -> list[Evaluation]:
    """Evaluations from best to worst by a metric; of equals the earlier step is better. NaN counts as worst."""
    usable = [e for e in evaluations if e.metrics.get(metric) is not None and e.metrics[metric] == e.metrics[metric]]
    return sorted(usable, key=lambda e: (-e.metrics[metric] if mode == "max" else e.metrics[metric], e.step))
