"""The evaluations of a run, early stopping, and the choice of the best checkpoint.

There is one file per evaluator and step, written once; the run's own evaluator has no name. Early stopping
(`check_patience`) is a pure function of the evaluations of planned checkpoints in the order of their steps. The time of
an evaluation, and how far training has run ahead by then, make no difference: the same evaluations give the same step.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ray_app.config.sections import EvaluateSection
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields
from ray_app.storage.files import Location, list_files, list_tree, put_json, read_all, restore_nan
from ray_app.storage.object_stores import S3Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluator for one checkpoint.

    Args:
        step: Number of finished steps of the checkpoint.
        epoch: Epoch of the checkpoint.
        params_digest: Digest of the parameters that were evaluated.
        metrics: Values by name.
        rows: Number of evaluated rows.
        duration_s: Duration in seconds.
        time_s: Time of the end, seconds since 1970 (UTC).
        data_digest: Digest of the evaluation data's manifest.
        behind: Number of checkpoints that waited at that time.
        lag_s: Seconds from the commit of the checkpoint to that time.
        tables: Metrics that are lists, one number per class, or matrices.
        classes: Names of the classes, in the order of the tables.
        examples: Some rows with a wrong prediction, those with the highest confidence first.
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
    """Records an evaluation; returns False if that evaluator has one of the step already, which then stays.

    Args:
        paths: The run.
        evaluation: The evaluation.
        name: Name of the evaluator; None is the run's own.
    """
    return put_json(paths.evaluation(evaluation.step, name), add_version(asdict(evaluation)), if_absent=True)


def read_evaluations(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """Returns the evaluations of one evaluator by step, with their tables and examples.

    Damaged files are left out, with a warning.

    Raises:
        OSError: The storage does not answer.
    """
    files = [file for path, file in list_tree(paths.evaluations_of(name)).items() if _is_evaluation(path)]
    evaluations = map(_parse_evaluation, files, read_all(files))
    return [evaluation for evaluation in evaluations if evaluation is not None]


def read_scores(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """Returns the evaluations of one evaluator by step, without tables and examples.

    A process reads each file once, so that frequent calls are cheap.

    Raises:
        OSError: The storage does not answer.
    """
    folder = paths.evaluations_of(name)
    files = [file for path, file in list_tree(folder).items() if _is_evaluation(path)]
    keys = [(str(file), _version(file)) for file in files]
    cached = _scores.get(str(folder), {})
    scores = {key: cached[key] for key in keys if key in cached}
    new = [(key, file) for key, file in zip(keys, files, strict=True) if key not in scores]
    for (key, file), data in zip(new, read_all(file for _, file in new), strict=True):
        evaluation = _parse_evaluation(file, data)
        scores[key] = replace(evaluation, tables={}, classes=[], examples=[]) if evaluation is not None else None
    with _lock:
        # The folder that was read least recently is dropped.
        _scores.pop(str(folder), None)
        _scores[str(folder)] = scores
        while len(_scores) > _MAX_FOLDERS:
            del _scores[next(iter(_scores))]
    return [evaluation for key in keys if (evaluation := scores[key]) is not None]


_MAX_FOLDERS = 16
_scores: dict[str, dict[tuple[str, str], Evaluation | None]] = {}
"""The evaluations in the folders that were read last, by file and version of the file: the folder of a run may be
removed
and created again.
"""
_lock = threading.Lock()


def _version(file: Location) -> str:
    """Returns a text that changes with the content of a file."""
    if isinstance(file, S3Path):
        return str(file.etag)
    stat = file.stat()
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _parse_evaluation(file: Location, data: bytes) -> Evaluation | None:
    try:
        evaluation = from_known_fields(Evaluation, json.loads(data))
        return replace(evaluation, metrics=restore_nan(evaluation.metrics), tables=restore_nan(evaluation.tables))
    except (ValueError, TypeError) as error:
        logger.warning("%s is left out, it is damaged or of another version: %s", file, error)
        return None


def evaluated_steps(paths: RunPaths, name: str | None = None) -> set[int]:
    """Returns the steps with an evaluation of one evaluator, from the names of the files."""
    files = filter(_is_evaluation, list_files(paths.evaluations_of(name)))
    return {int(file.removeprefix("step-").removesuffix(".json")) for file in files}


def evaluator_names(paths: RunPaths) -> list[str]:
    """Returns the sorted names of the evaluators, without the run's own, that have evaluated a checkpoint."""
    parts = [path.partition("/") for path in list_tree(paths.evaluators)]
    return sorted({name for name, _, file in parts if _is_evaluation(file)})


def _is_evaluation(file: str) -> bool:
    return file.startswith("step-") and file.endswith(".json")


def rank_evaluations(evaluations: list[Evaluation], metric: str, mode: Literal["max", "min"] | str) -> list[Evaluation]:
    """Returns evaluations from best to worst by a metric; of equals the earlier step comes first. NaN is left out."""
    usable = [e for e in evaluations if e.metrics.get(metric) is not None and e.metrics[metric] == e.metrics[metric]]
    return sorted(usable, key=lambda e: (-e.metrics[metric] if mode == "max" else e.metrics[metric], e.step))


@dataclass(frozen=True)
class Verdict:
    """The decision of early stopping that training is over.

    Args:
        stop_step: The planned checkpoint at which patience ran out; later steps do not count.
        best_step: The best planned checkpoint up to `stop_step`, the result of the run; of equals the earlier one.
    """

    stop_step: int
    best_step: int


def check_patience(
    values: Mapping[int, float | None], planned: Iterable[int], patience: int, min_delta: float, mode: str
) -> Verdict | None:
    """Returns the verdict if patience has run out, or None.

    Args:
        values: The metric by step; None for a checkpoint that can never be evaluated, which is skipped.
        planned: Steps of the planned checkpoints in order; those from the first one on that is not in `values` are
            ignored.
        patience: The number of consecutive planned checkpoints without an improvement after which it runs out.
        min_delta: A change counts as an improvement if it is more than this.
        mode: Whether higher (`max`) or lower (`min`) is better. NaN is never an improvement.
    """
    sign = -1.0 if mode == "min" else 1.0
    best_step, best, bar, waited = 0, -math.inf, -math.inf, 0
    for step in planned:
        if step not in values:
            return None
        value = values[step]
        if value is None:
            continue
        signed = -math.inf if math.isnan(value) else sign * value
        if not best_step or signed > best:
            best_step, best = step, signed
        is_better = signed > bar + min_delta
        bar, waited = (signed, 0) if is_better else (bar, waited + 1)
        if waited == patience:
            return Verdict(step, best_step)
    return None


Planned = Callable[[int], list[int]]
"""Returns the steps, up to its argument, of the planned checkpoints that are evaluated."""


def early_stop(paths: RunPaths, section: EvaluateSection, metric: str, mode: str, planned: Planned) -> Verdict | None:
    """Returns the verdict of `evaluate.patience`; None if training goes on.

    Args:
        paths: The run.
        section: Its `patience` and `min_delta` count.
        metric: The metric that decides which evaluation is best.
        mode: `max` or `min`.
        planned: Returns the steps that are evaluated.
    """
    if section.patience is None:
        return None
    # The names are read before the contents: a step with a file by now that is not among `evaluations` is damaged.
    steps = evaluated_steps(paths)
    evaluations = read_scores(paths)
    last = max((*steps, *(e.step for e in evaluations)), default=0)
    not_evaluated = read_events(paths, "evaluation_skipped", "write_failed")
    values: dict[int, float | None] = dict.fromkeys(steps)
    values |= {e.details["step"]: None for e in not_evaluated if "by" not in e.details}
    values |= {e.step: e.metrics.get(metric, float("nan")) for e in evaluations}
    return check_patience(values, planned(last), section.patience, section.min_delta, mode)


def rank_candidates(
    paths: RunPaths, section: EvaluateSection, metric: str, mode: str, planned: Planned
) -> list[Evaluation]:
    """Returns the evaluations that may be the result of the run, from best to worst.

    Only evaluations on the newest evaluation data count. With patience, if the metric is NaN in all of them, it is the
    first one, since the verdict names it and its checkpoint has to be kept.

    Args:
        paths: The run.
        section: See `early_stop`.
        metric: See `early_stop`.
        mode: See `early_stop`.
        planned: See `early_stop`.
    """
    evaluations = read_scores(paths)
    newest = max(evaluations, key=lambda e: e.time_s, default=None)
    evaluations = [e for e in evaluations if newest is not None and e.data_digest == newest.data_digest]
    if section.patience is not None:
        last = max((e.step for e in evaluations), default=0)
        stop = early_stop(paths, section, metric, mode, planned)
        counted = set(planned(stop.stop_step if stop else last))
        evaluations = [e for e in evaluations if e.step in counted]
    candidates = rank_evaluations(evaluations, metric, mode)
    if not candidates and section.patience is not None:
        # `check_patience` names the earliest of equal steps.
        return sorted((e for e in evaluations if metric in e.metrics), key=lambda e: e.step)[:1]
    return candidates
