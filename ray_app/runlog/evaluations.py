"""The evaluations of a run, early stopping, and the choice of the best checkpoint.

There is one file per evaluator and step, which is written once. The evaluator of the run itself has no name; others,
which a user starts with `ray-app evaluate --name`, have one. Early stopping (`check_patience`) is a pure function of
the evaluations of the planned checkpoints, in the order of their steps. The same evaluations stop a run at the same
step, whenever they were computed and however far training had continued by then.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ray_app.config.sections import EvaluateSection
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields
from ray_app.storage.files import Location, file_version, list_files, list_tree, put_json, read_all, restore_nan

logger = logging.getLogger(__name__)

Planned = Callable[[int], list[int]]
"""Returns the steps, up to its argument, of the planned checkpoints that are evaluated."""

_MAX_FOLDERS = 16
_scores: dict[str, dict[tuple[str, str], Evaluation | None]] = {}
"""The results of `read_scores` in the `_MAX_FOLDERS` folders that were read last, by file and its version.

A file of the same name may have another version, because the folder of a run may be removed and created again.
"""
_scores_lock = threading.Lock()


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluator for one checkpoint.

    Args:
        step: Number of finished steps of the checkpoint.
        params_digest: Digest of the parameters that were evaluated.
        metrics: Values of the metrics by name.
        rows: Number of evaluated rows.
        time_s: When the evaluation ended, in seconds since 1970 (UTC).
        data_digest: Digest of the evaluation data's manifest.
        behind: Number of other checkpoints that waited to be evaluated when this evaluation started.
        lag_s: Seconds from the commit of the checkpoint to `time_s`.
        tables: Metrics with several values by name: a list with one number per class, or a matrix.
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
    """Records the evaluation of a (named) evaluator, unless it has recorded one of the same step; returns whether."""
    return put_json(paths.evaluation(evaluation.step, name), add_version(asdict(evaluation)), if_absent=True)


def read_evaluations(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """Returns the evaluations of one evaluator in the order of their steps, with their tables and examples.

    Damaged files are left out, with a warning.
    """
    files = [file for path, file in list_tree(paths.evaluations_of(name)).items() if _is_evaluation(path)]
    evaluations = map(_parse_evaluation, files, read_all(files))
    return [evaluation for evaluation in evaluations if evaluation is not None]


def read_evaluation(paths: RunPaths, step: int) -> Evaluation | None:
    """Returns the evaluation of a step by the run's own evaluator; None if there is none, or its file is damaged."""
    [data] = read_all([paths.evaluation(step)], missing=b"")
    return _parse_evaluation(paths.evaluation(step), data) if data else None


def read_scores(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """Returns the evaluations of one evaluator in the order of their steps, without tables, classes and examples.

    A process reads each version of a file once. Damaged files are left out, with a warning.
    """
    folder = paths.evaluations_of(name)
    files = [file for path, file in list_tree(folder).items() if _is_evaluation(path)]
    keys = [(str(file), file_version(file)) for file in files]
    cached = _scores.get(str(folder), {})
    scores = {key: cached[key] for key in keys if key in cached}
    new = [(key, file) for key, file in zip(keys, files, strict=True) if key not in scores]
    for (key, file), data in zip(new, read_all(file for _, file in new), strict=True):
        evaluation = _parse_evaluation(file, data)
        scores[key] = replace(evaluation, tables={}, classes=[], examples=[]) if evaluation is not None else None
    with _scores_lock:
        # This folder becomes the last one, and the first one is the one that was read least recently.
        _scores.pop(str(folder), None)
        _scores[str(folder)] = scores
        while len(_scores) > _MAX_FOLDERS:
            del _scores[next(iter(_scores))]
    return [evaluation for key in keys if (evaluation := scores[key]) is not None]


def _parse_evaluation(file: Location, data: bytes) -> Evaluation | None:
    """Returns the evaluation in a file; None for a damaged file, with a warning."""
    try:
        evaluation = from_known_fields(Evaluation, json.loads(data))
        return replace(evaluation, metrics=restore_nan(evaluation.metrics), tables=restore_nan(evaluation.tables))
    except (ValueError, TypeError) as error:
        logger.warning("%s is left out, because it is damaged or has another version: %s", file, error)
        return None


def evaluated_steps(paths: RunPaths, name: str | None = None) -> set[int]:
    """Returns the steps of which an evaluator has a file, damaged or not: only the names of the files are read."""
    files = filter(_is_evaluation, list_files(paths.evaluations_of(name)))
    return {int(file.removeprefix("step-").removesuffix(".json")) for file in files}


def evaluator_names(paths: RunPaths) -> list[str]:
    """Returns the sorted names of the evaluators that have evaluated a checkpoint; that of the run itself has none."""
    parts = [path.partition("/") for path in list_tree(paths.evaluators)]
    return sorted({name for name, _, file in parts if _is_evaluation(file)})


def _is_evaluation(file: str) -> bool:
    """Returns whether a name in an evaluator's folder is that of an evaluation, as `RunPaths.evaluation` makes it."""
    return file.startswith("step-") and file.endswith(".json")


def rank_evaluations(evaluations: list[Evaluation], metric: str, mode: str) -> list[Evaluation]:
    """Returns the evaluations that have a metric, from best to worst; among equal values the earlier step comes first.

    Evaluations with NaN are left out. With `mode` `max` higher values are better, with `min` lower ones.
    """
    # NaN is the only value that differs from itself.
    usable = [e for e in evaluations if e.metrics.get(metric) is not None and e.metrics[metric] == e.metrics[metric]]
    return sorted(usable, key=lambda e: (-e.metrics[metric] if mode == "max" else e.metrics[metric], e.step))


@dataclass(frozen=True)
class Verdict:
    """The decision of early stopping that training is over.

    Args:
        stop_step: Step of the planned checkpoint at which patience ran out; later checkpoints do not count.
        best_step: Step of the best planned checkpoint up to then, the result of the run; of equal values the earliest.
    """

    stop_step: int
    best_step: int


def check_patience(
    values: Mapping[int, float | None], planned: Iterable[int], patience: int, min_delta: float, mode: str
) -> Verdict | None:
    """Returns the verdict if patience has run out, otherwise None.

    Args:
        values: The metric by step. A step without an entry may still be evaluated; None marks a checkpoint that never
            will be, which is skipped.
        planned: Steps of the planned checkpoints, ascending. The first one that may still be evaluated and all after it
            are ignored, since the verdict must not depend on the order in which evaluations arrive.
        patience: Patience runs out after so many evaluated checkpoints in a row without an improvement.
        min_delta: A value is an improvement if it is better by more than this than the last improvement.
        mode: Whether higher (`max`) or lower (`min`) is better. NaN is never an improvement.
    """
    sign = -1.0 if mode == "min" else 1.0
    # With `min_delta` the best value may be better than the last improvement, by too little to be one itself.
    best_step = 0
    best = -math.inf
    last_improvement = -math.inf
    num_without = 0
    for step in planned:
        if step not in values:
            return None
        value = values[step]
        if value is None:
            continue
        signed = -math.inf if math.isnan(value) else sign * value
        if not best_step or signed > best:
            best_step, best = step, signed
        if signed > last_improvement + min_delta:
            last_improvement, num_without = signed, 0
        else:
            num_without += 1
        if num_without == patience:
            return Verdict(step, best_step)
    return None


def early_stop(paths: RunPaths, section: EvaluateSection, metric: str, mode: str, planned: Planned) -> Verdict | None:
    """Returns the verdict of early stopping on a run; None if training goes on.

    Args:
        metric: Name of the metric that decides which evaluation is best.
        mode: Whether higher (`max`) or lower (`min`) is better.
    """
    if section.patience is None:
        return None
    # The names of the files are read before their contents. So a step that is among `steps` and not among `evaluations`
    # has a damaged file, and not one that was written meanwhile.
    steps = evaluated_steps(paths)
    evaluations = read_scores(paths)
    last = max((*steps, *(e.step for e in evaluations)), default=0)
    skips = read_events(paths, "evaluation_skipped", "write_failed")
    values: dict[int, float | None] = dict.fromkeys(steps)
    # Events with `by` are those of evaluators with a name, which early stopping does not regard.
    values |= {e.details["step"]: None for e in skips if "by" not in e.details}
    values |= {e.step: e.metrics.get(metric, float("nan")) for e in evaluations}
    return check_patience(values, planned(last), section.patience, section.min_delta, mode)


def rank_candidates(
    paths: RunPaths, section: EvaluateSection, metric: str, mode: str, planned: Planned
) -> list[Evaluation]:
    """Returns the evaluations of checkpoints that may be the result of the run, from best to worst; see `early_stop`.

    Only evaluations on the newest evaluation data count; with patience only those of planned checkpoints, up to the
    step at which the run stops. If the metric is NaN in all of the latter, the first one is returned alone, since
    `Verdict` names its checkpoint, which has to be kept.
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
        # `check_patience` takes NaN for the worst value, and the earliest of equal values for the best.
        return sorted((e for e in evaluations if metric in e.metrics), key=lambda e: e.step)[:1]
    return candidates
