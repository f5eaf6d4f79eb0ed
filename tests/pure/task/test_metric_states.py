"""Metrics combined from the states of chunks equal those that torchmetrics computes over all rows, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics as tm
from torch import Tensor, nn
from torchmetrics import classification, wrappers

from ray_app.errors import ConfigError
from ray_app.task.base import Task
from ray_app.task.metric_states import load_states, make_metrics, take_states

ROWS, CLASSES = 23, 3


class WrappingMetric(tm.Metric):
    """Keeps its state in another metric: an attribute, in a list or in a dictionary."""

    def __init__(self, how: str) -> None:
        super().__init__()
        accuracy = classification.MulticlassAccuracy(CLASSES, average="micro")
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


class StatelessMetric(tm.Metric):
    """Counts in plain attributes instead of states."""

    def __init__(self) -> None:
        super().__init__()
        self.correct = self.count = 0

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self.correct += int((outputs.argmax(1) == target).sum())
        self.count += len(target)

    def compute(self) -> Tensor:
        return torch.tensor(self.correct / max(1, self.count))


def accuracy() -> Any:
    return classification.MulticlassAccuracy(CLASSES, average="micro")


def per_class() -> Any:
    return classification.MulticlassF1Score(CLASSES, average=None)


SEVERAL: dict[str, Callable[[], Any]] = {
    "accuracy": accuracy,
    "f1": per_class,
    "top 2": lambda: classification.MulticlassAccuracy(CLASSES, top_k=2),
    "auroc": lambda: classification.MulticlassAUROC(CLASSES),
    "binned auroc": lambda: classification.MulticlassAUROC(CLASSES, thresholds=20),
    "average precision": lambda: classification.MulticlassAveragePrecision(CLASSES),
    "calibration": lambda: classification.MulticlassCalibrationError(CLASSES),
    "cohen kappa": lambda: classification.MulticlassCohenKappa(CLASSES),
    "confusion": lambda: classification.MulticlassConfusionMatrix(CLASSES),
    "exact match": lambda: classification.MulticlassExactMatch(CLASSES, multidim_average="global"),
    "hinge": lambda: classification.MulticlassHingeLoss(CLASSES),
    "jaccard": lambda: classification.MulticlassJaccardIndex(CLASSES),
    "matthews": lambda: classification.MulticlassMatthewsCorrCoef(CLASSES),
    "specificity": lambda: classification.MulticlassSpecificity(CLASSES),
    "by task": lambda: tm.Accuracy(task="multiclass", num_classes=CLASSES),
    "error rate": lambda: 1 - accuracy(),
    "sum": lambda: accuracy() + classification.MulticlassRecall(CLASSES),
    "composed twice": lambda: abs(2 * (accuracy() - 0.5)),
    "min max": lambda: wrappers.MinMaxMetric(accuracy()),
    "classwise": lambda: wrappers.ClasswiseWrapper(per_class()),
    "inside attribute": lambda: WrappingMetric("attribute"),
    "inside list": lambda: WrappingMetric("list"),
    "inside dict": lambda: WrappingMetric("dict"),
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
    "accuracy": classification.BinaryAccuracy,
    "auroc": classification.BinaryAUROC,
    "average precision": classification.BinaryAveragePrecision,
    "f1": classification.BinaryF1Score,
    "fbeta": lambda: classification.BinaryFBetaScore(2.0),
    "calibration": classification.BinaryCalibrationError,
    "specificity": lambda: classification.BinarySpecificityAtSensitivity(0.5),
    "recall at precision": lambda: classification.BinaryRecallAtFixedPrecision(0.5),
    "hinge": classification.BinaryHingeLoss,
    "eer": classification.BinaryEER,
    "log auc": classification.BinaryLogAUC,
    "fairness": lambda: classification.BinaryAccuracy() * classification.BinaryRecall(),
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


class MetricTask(Task):
    """A task that has only metrics."""

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


def compute_in_chunks(make: Callable[[], Any], outputs: Tensor, target: Tensor, rows: int) -> Any:
    """Computes a metric from the states of chunks of `rows` rows, as an evaluation does."""
    task, states = MetricTask(m=make), []
    scoring = make_metrics(task)["m"]
    for low in range(0, ROWS, rows):
        scoring.update(outputs[low : low + rows], target[low : low + rows])
        states.append(take_states(scoring))
    combined = make_metrics(task)["m"]
    load_states(combined, states)
    return combined.compute()


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        pytest.param(kind, make, id=f"{kind} {name}")
        for kind, metrics in (("several", SEVERAL), ("numbers", NUMBERS), ("binary", BINARY))
        for name, make in metrics.items()
    ],
)
def test_a_metric_is_the_same_for_every_chunk_size(kind: str, make: Callable[[], Any]) -> None:
    outputs, target = outputs_and_target(kind)
    if kind == "numbers" and "tweedie" in str(make):
        outputs, target = outputs.abs(), target.abs()
    at_once = make()
    at_once.update(outputs, target)
    expected = at_once.compute()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (ROWS, 16, 5, 1):
            assert_close(compute_in_chunks(make, outputs, target, rows), expected)


def test_the_states_of_a_multioutput_wrapper_combine() -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, target = torch.randn(ROWS, 2, generator=generator), torch.randn(ROWS, 2, generator=generator)
    at_once = wrappers.MultioutputWrapper(tm.MeanAbsoluteError(), 2)
    at_once.update(outputs, target)
    assert_close(
        compute_in_chunks(lambda: wrappers.MultioutputWrapper(tm.MeanAbsoluteError(), 2), outputs, target, 5),
        at_once.compute(),
    )


@pytest.mark.parametrize("make", [StatelessMetric, lambda: 1 - StatelessMetric()])
def test_a_metric_without_states_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no states.*self\.add_state"):
        compute_in_chunks(make, *outputs_and_target("several"), rows=5)


@pytest.mark.parametrize(
    "make", [tm.PearsonCorrCoef, tm.ConcordanceCorrCoef, lambda: tm.MeanMetric() + tm.PearsonCorrCoef()]
)
def test_states_without_a_supported_reduction_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="CorrCoef cannot be combined from parts: the reduction of its state"):
        load_states(make(), [take_states(make()), take_states(make())])


def test_metrics_with_equal_states_on_the_first_rows_stay_separate() -> None:
    """torchmetrics groups metrics with equal states after the first batch and updates only one of each group."""
    task = MetricTask(
        low=lambda: classification.BinaryAccuracy(threshold=0.5),
        high=lambda: classification.BinaryAccuracy(threshold=0.9),
    )
    metrics = make_metrics(task)
    target = torch.ones(4, dtype=torch.long)
    for scores in ([0.95] * 4, [0.7] * 4):
        metrics.update(torch.tensor(scores), target)
    assert {name: float(value) for name, value in metrics.compute().items()} == {"low": 1.0, "high": 0.5}


def test_metrics_must_return_a_metric_collection() -> None:
    class Single(MetricTask):
        def metrics(self) -> Any:
            return accuracy()

    with pytest.raises(ConfigError, match=r"Single.metrics returned a MulticlassAccuracy; it must return a"):
        make_metrics(Single())
