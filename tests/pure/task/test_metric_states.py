"""Metrics of all kinds: put together from the states of chunks they are what torchmetrics gives of all rows at once, or
are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics as tm
from torch import Tensor, nn
from torchmetrics import classification as known
from torchmetrics import wrappers

from ray_app.errors import ConfigError
from ray_app.task.base import Task
from ray_app.task.metric_states import load_states, make_metrics, reset_parts, states_of

ROWS, CLASSES = 23, 3


class Inside(tm.Metric):
    """Keeps its numbers in another metric, as an attribute, in a list or in a dictionary."""

    def __init__(self, how: str) -> None:
        super().__init__()
        accuracy = known.MulticlassAccuracy(CLASSES, average="micro")
        self.inner: Any = {"attribute": accuracy, "list": [accuracy], "dict": {"a": {"b": accuracy}}}[how]
        self.how = how

    @property
    def _metric(self) -> Any:
        return {"attribute": lambda: self.inner, "list": lambda: self.inner[0], "dict": lambda: self.inner["a"]["b"]}[
            self.how
        ]()

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self._metric.update(outputs, target)

    def compute(self) -> Tensor:
        return self._metric.compute()


class Counts(tm.Metric):
    """Counts in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.seen = 0

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self.right += int((outputs.argmax(1) == target).sum())
        self.seen += len(target)

    def compute(self) -> Tensor:
        return torch.tensor(self.right / max(1, self.seen))


def accuracy() -> Any:
    return known.MulticlassAccuracy(CLASSES, average="micro")


def per_class() -> Any:
    return known.MulticlassF1Score(CLASSES, average=None)


SEVERAL: dict[str, Callable[[], Any]] = {
    "accuracy": accuracy,
    "f1": per_class,
    "top 2": lambda: known.MulticlassAccuracy(CLASSES, top_k=2),
    "auroc": lambda: known.MulticlassAUROC(CLASSES),
    "binned auroc": lambda: known.MulticlassAUROC(CLASSES, thresholds=20),
    "average precision": lambda: known.MulticlassAveragePrecision(CLASSES),
    "calibration": lambda: known.MulticlassCalibrationError(CLASSES),
    "cohen kappa": lambda: known.MulticlassCohenKappa(CLASSES),
    "confusion": lambda: known.MulticlassConfusionMatrix(CLASSES),
    "exact match": lambda: known.MulticlassExactMatch(CLASSES, multidim_average="global"),
    "hinge": lambda: known.MulticlassHingeLoss(CLASSES),
    "jaccard": lambda: known.MulticlassJaccardIndex(CLASSES),
    "matthews": lambda: known.MulticlassMatthewsCorrCoef(CLASSES),
    "specificity": lambda: known.MulticlassSpecificity(CLASSES),
    "by task": lambda: tm.Accuracy(task="multiclass", num_classes=CLASSES),
    "error rate": lambda: 1 - accuracy(),
    "sum": lambda: accuracy() + known.MulticlassRecall(CLASSES),
    "composed twice": lambda: abs(2 * (accuracy() - 0.5)),
    "min max": lambda: wrappers.MinMaxMetric(accuracy()),
    "classwise": lambda: wrappers.ClasswiseWrapper(per_class()),
    "inside attribute": lambda: Inside("attribute"),
    "inside list": lambda: Inside("list"),
    "inside dict": lambda: Inside("dict"),
}
NUMBERS: dict[str, Callable[[], Any]] = {
    "mae": tm.MeanAbsoluteError,
    "rmse": lambda: tm.MeanSquaredError(squared=False),
    "r2": tm.R2Score,
    "spearman": tm.SpearmanCorrCoef,
    "kendall": tm.KendallRankCorrCoef,
    "explained variance": tm.ExplainedVariance,
    "success index": lambda: tm.regression.CriticalSuccessIndex(0.5),
    "smape": tm.SymmetricMeanAbsolutePercentageError,
    "relative squared": tm.RelativeSquaredError,
    "minkowski": lambda: tm.MinkowskiDistance(3),
    "log cosh": tm.LogCoshError,
    "tweedie": tm.TweedieDevianceScore,
    "difference": lambda: tm.MeanSquaredError() - tm.MeanAbsoluteError(),
}
BINARY: dict[str, Callable[[], Any]] = {
    "accuracy": known.BinaryAccuracy,
    "auroc": known.BinaryAUROC,
    "average precision": known.BinaryAveragePrecision,
    "f1": known.BinaryF1Score,
    "fbeta": lambda: known.BinaryFBetaScore(2.0),
    "calibration": known.BinaryCalibrationError,
    "specificity": lambda: known.BinarySpecificityAtSensitivity(0.5),
    "recall at precision": lambda: known.BinaryRecallAtFixedPrecision(0.5),
    "hinge": known.BinaryHingeLoss,
    "eer": known.BinaryEER,
    "log auc": known.BinaryLogAUC,
    "fairness": lambda: known.BinaryAccuracy() * known.BinaryRecall(),
}


def outputs_and_target(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind == "several":
        return torch.randn(ROWS, CLASSES, generator=generator).softmax(1), torch.randint(
            0, CLASSES, (ROWS,), generator=generator
        )
    if kind == "binary":
        return torch.rand(ROWS, generator=generator), torch.randint(0, 2, (ROWS,), generator=generator)
    return torch.randn(ROWS, generator=generator), torch.randn(ROWS, generator=generator)


class Measured(Task):
    """Has metrics, and no more."""

    def __init__(self, **metrics: Callable[[], Any]) -> None:
        self.make = metrics

    def columns(self) -> list[str]:
        return []

    def build_model(self) -> nn.Module:
        return nn.Identity()

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        raise NotImplementedError

    def metrics(self) -> tm.MetricCollection:
        return tm.MetricCollection({name: make() for name, make in self.make.items()})


def in_chunks(make: Callable[[], Any], outputs: Tensor, target: Tensor, rows: int) -> Any:
    """What a metric gives from the states of chunks of so many rows, as an evaluation makes it."""
    task, states = Measured(m=make), []
    scoring = make_metrics(task)["m"]
    for low in range(0, ROWS, rows):
        reset_parts(scoring)
        scoring.update(outputs[low : low + rows], target[low : low + rows])
        states.append(states_of(scoring))
    combined = make_metrics(task)["m"]
    load_states(combined, states)
    return combined.compute()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        pytest.param(kind, make, id=f"{kind} {name}")
        for kind, metrics in (("several", SEVERAL), ("numbers", NUMBERS), ("binary", BINARY))
        for name, make in metrics.items()
    ],
)
def test_chunks_of_any_size_give_what_all_rows_give_at_once(kind: str, make: Callable[[], Any]) -> None:
    outputs, target = outputs_and_target(kind)
    if kind == "numbers" and "tweedie" in str(make):
        outputs, target = outputs.abs(), target.abs()
    at_once = make()
    at_once.update(outputs, target)
    expected = at_once.compute()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (ROWS, 16, 5, 1):
            close(in_chunks(make, outputs, target, rows), expected)


def test_several_outputs_of_a_wrapper_are_carried() -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, target = torch.randn(ROWS, 2, generator=generator), torch.randn(ROWS, 2, generator=generator)
    at_once = wrappers.MultioutputWrapper(tm.MeanAbsoluteError(), 2)
    at_once.update(outputs, target)
    close(
        in_chunks(lambda: wrappers.MultioutputWrapper(tm.MeanAbsoluteError(), 2), outputs, target, 5), at_once.compute()
    )


@pytest.mark.parametrize("make", [Counts, lambda: 1 - Counts()])
def test_a_metric_without_states_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no states.*self\.add_state"):
        in_chunks(make, *outputs_and_target("several"), rows=5)


@pytest.mark.parametrize(
    "make", [tm.PearsonCorrCoef, tm.ConcordanceCorrCoef, lambda: tm.MeanMetric() + tm.PearsonCorrCoef()]
)
def test_states_that_are_not_sums_or_lists_are_refused_without_an_address(make: Callable[[], Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"CorrCoef cannot be put together from parts: the reduction of its state 'mean_x' is NoneType",
    ):
        load_states(make(), [states_of(make()), states_of(make())])


def test_metrics_that_agree_on_the_first_rows_are_not_taken_for_one() -> None:
    """torchmetrics groups metrics whose states are equal after the first batch, and updates only one of them from then
    on.
    """
    task = Measured(low=lambda: known.BinaryAccuracy(threshold=0.5), high=lambda: known.BinaryAccuracy(threshold=0.9))
    metrics = make_metrics(task)
    target = torch.ones(4, dtype=torch.long)
    for scores in ([0.95] * 4, [0.7] * 4):
        metrics.update(torch.tensor(scores), target)
    assert {name: float(value) for name, value in metrics.compute().items()} == {"low": 1.0, "high": 0.5}


def test_what_metrics_returns_is_a_collection() -> None:
    class Single(Measured):
        def metrics(self) -> Any:
            return accuracy()

    with pytest.raises(
        ConfigError,
        match=r"Single.metrics returned a MulticlassAccuracy; it must return a torchmetrics.MetricCollection",
    ):
        make_metrics(Single())
