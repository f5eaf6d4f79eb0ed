"""Scores of a constant prediction: those that a run must exceed to have learned anything.

`constant_scores` computes them at a start; `describe_constant` compares them with the evaluations at the end of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray_app.plan.manifest import DataFacts
from ray_app.task.base import Task

_MAX_ROWS = 50_000_000
"""Labels of more rows are not counted for this."""


def constant_scores(task: Task, trained: DataFacts, evaluated: DataFacts) -> dict[str, float]:
    """Returns the accuracies and R2 scores of a constant on the rows of an evaluation, by the name of the metric.

    The constant is the most frequent class of the training data, or its mean, which has an R2 of 0 at most. Other
    metrics, and targets that are not one column of classes or numbers, have no such score.
    """
    targets = [name for name in task.targets() if name not in task.weight_columns()]
    facts = trained.columns.get(targets[0]) if len(targets) == 1 else None
    if facts is None or facts.kind not in ("integer", "number", "text"):
        return {}
    named = {str(name): metric for name, metric in task.metrics().items(keep_base=True, copy_state=False)}
    scores = {name: 0.0 for name, metric in named.items() if type(metric).__name__ == "R2Score"}
    accuracies = [name for name, metric in named.items() if _is_accuracy(name, metric)]
    if accuracies and facts.kind != "number" and max(trained.num_rows, evaluated.num_rows) <= _MAX_ROWS:
        assert trained.count is not None
        assert evaluated.count is not None
        counts, expected = trained.count(targets[0]), evaluated.count(targets[0])
        majority = min(counts, key=lambda value: (-counts[value], value), default=None)
        share = expected.get(majority, 0) / max(1, sum(expected.values())) if majority is not None else math.nan
        scores |= dict.fromkeys(accuracies, share)
    return scores


def _is_accuracy(name: str, metric: Any) -> bool:
    """Whether a metric is the share of the rows with the right class; a mean over classes is not."""
    kind = type(metric).__name__
    if kind == "KerasMetric":
        return name in ("accuracy", "sparse_categorical_accuracy", "binary_accuracy")
    is_micro = kind == "MulticlassAccuracy" and metric.average == "micro" and metric.top_k == 1
    return is_micro or kind == "BinaryAccuracy"


def describe_constant(summary: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each metric of a run's summary that a constant has a score of, from `constant_scores`.

    The metric that chooses the best checkpoint has the value of this checkpoint, which a run returns and exports.
    """
    lines = []
    best = summary.get("best")
    metrics = summary.get("metrics", {}) | ({best["metric"]: best["value"]} if best else {})
    for name, constant in summary.get("constant", {}).items():
        value = metrics.get(name)
        if value is None:
            continue
        kind = "the mean" if constant == 0 and "r2" in name.lower() else "the most frequent class"
        text = f"{kind} of the training data in every row gives {name} {constant:.4f}"
        # An accuracy is a float32, so an equal one may be lower in the last bit.
        if value < constant - 1e-6:
            text = (
                f"Warning: {name} {value:.4f} is below the score of a constant: {text}. The model has learned nothing"
                " that holds for these rows. Train longer, or check the learning rate, the scale of inputs and target,"
                " and whether the evaluation data is similar."
            )
        lines.append(text)
    return lines
