"""The evaluations of a run: one file per evaluator and step, written once. The run's own evaluator has no name."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ray_app.record.files import Location, listing, names, put_json, read_all, with_nan
from ray_app.record.paths import RunPaths
from ray_app.record.s3 import S3Path
from ray_app.record.schema import known_fields, versioned

logger = logging.getLogger(__name__)


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
    return put_json(paths.evaluation(evaluation.step, name), versioned(asdict(evaluation)), if_absent=True)


def read_evaluations(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """The evaluations of one evaluator by step, with their tables and examples. What is damaged is left out, with a warning.

    Raises:
        OSError: The storage does not answer.
    """
    places = [place for file, place in listing(paths.evaluations_of(name)).items() if _is_evaluation(file)]
    read = zip(places, read_all(places), strict=True)
    return [made for place, data in read if (made := _parsed(place, data)) is not None]


def read_scores(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """`read_evaluations` without tables and examples. Each file is read once in a process, for those who look again and again.

    Raises:
        OSError: The storage does not answer.
    """
    folder = paths.evaluations_of(name)
    places = [place for file, place in listing(folder).items() if _is_evaluation(file)]
    keys = [(str(place), _version(place)) for place in places]
    known = _scores.get(str(folder), {})
    found = {key: known[key] for key in keys if key in known}
    new = [(key, place) for key, place in zip(keys, places, strict=True) if key not in found]
    for (key, place), data in zip(new, read_all(place for _, place in new), strict=True):
        made = _parsed(place, data)
        found[key] = replace(made, tables={}, classes=[], examples=[]) if made is not None else None
    with _lock:
        _scores.pop(str(folder), None)
        _scores[str(folder)] = found
        while len(_scores) > _MOST_FOLDERS:
            del _scores[next(iter(_scores))]
    return [made for key in keys if (made := found[key]) is not None]


_MOST_FOLDERS = 16
_scores: dict[str, dict[tuple[str, str], Evaluation | None]] = {}
"""What was read of the folders that were looked at last, by file and version of it: a run's folder may be removed and made again."""
_lock = threading.Lock()


def _version(place: Location) -> str:
    if isinstance(place, S3Path):
        return str(place.etag)
    stat = place.stat()
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _parsed(place: Location, data: bytes) -> Evaluation | None:
    try:
        made = known_fields(Evaluation, json.loads(data))
        return replace(made, metrics=with_nan(made.metrics), tables=with_nan(made.tables))
    except (ValueError, TypeError) as error:
        logger.warning("%s is left out, it is damaged or of another version: %s", place, error)
        return None


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
    """Evaluations from best to worst by a metric; of equals the earlier step is better. NaN is left out."""
    usable = [e for e in evaluations if e.metrics.get(metric) is not None and e.metrics[metric] == e.metrics[metric]]
    return sorted(usable, key=lambda e: (-e.metrics[metric] if mode == "max" else e.metrics[metric], e.step))
