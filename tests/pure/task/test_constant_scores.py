"""The scores of a constant prediction, and the sentences about a run that is below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data.dataset import open_dataset
from ray_app.plan.manifest import DataFacts
from ray_app.task.base import Task
from ray_app.task.constant_scores import constant_scores, describe_constant
from ray_app.task.module import ModuleTask
from ray_app.task.schema import prepare_task
from ray_app.task.tabular import TabularClassification, TabularRegression


def facts_of(folder: Path, labels: list[Any]) -> DataFacts:
    folder.mkdir()
    pq.write_table(pa.table({"x": [float(i) for i in range(len(labels))], "y": labels}), folder / "a.parquet")
    return open_dataset(str(folder)).facts


def module_task(average: str) -> ModuleTask:
    metric = {"class_path": "torchmetrics.classification.MulticlassAccuracy"}
    init_args = {"num_classes": 3, "average": average}
    return ModuleTask(
        model={"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 3}},
        inputs=["x"],
        target="y",
        loss={"class_path": "torch.nn.CrossEntropyLoss"},
        metrics={"share": metric | {"init_args": init_args}},
    )


@pytest.mark.parametrize(
    ("task", "trained", "evaluated", "expected"),
    [
        (TabularClassification("y"), ["a", "b", "b"], ["b", "a", "a", "a"], {"accuracy": 0.25}),
        (TabularClassification("y"), [0, 1, 1], [1, 1, 0, 1], {"accuracy": 0.75}),
        (TabularRegression("y"), [1.0, 2.0, 3.0], [1.0, 2.0], {"r2": 0.0}),
        (module_task("micro"), [0, 2, 2], [2, 1], {"share": 0.5}),
        (module_task("macro"), [0, 2, 2], [2, 1], {}),
    ],
    ids=["words", "numbers", "regression", "module", "mean over classes"],
)
def test_a_constant_is_scored_on_the_evaluated_rows(
    tmp_path: Path, task: Task, trained: list[Any], evaluated: list[Any], expected: dict[str, float]
) -> None:
    train, other = facts_of(tmp_path / "train", trained), facts_of(tmp_path / "eval", evaluated)
    assert constant_scores(prepare_task(task, train), train, other) == expected


def test_a_score_below_that_of_a_constant_is_a_warning() -> None:
    constants = {"accuracy": 0.6, "r2": 0.0, "absent": 0.5}
    right, wrong = describe_constant({"metrics": {"accuracy": 0.7, "r2": -1.8}, "constant": constants})
    assert right == "the most frequent class of the training data in every row gives accuracy 0.6000"
    assert wrong.startswith("Warning: r2 -1.8000 is below the score of a constant: the mean of the training data")


def test_the_best_checkpoint_is_compared_with_a_constant() -> None:
    best = {"step": 20, "metric": "accuracy", "value": 0.7}
    [line] = describe_constant({"metrics": {"accuracy": 0.5}, "constant": {"accuracy": 0.6}, "best": best})
    assert not line.startswith("Warning")
    [line] = describe_constant(
        {"metrics": {"accuracy": float(np.float32(176 / 230))}, "constant": {"accuracy": 176 / 230}}
    )
    assert not line.startswith("Warning")
