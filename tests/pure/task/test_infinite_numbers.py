"""Values that are NaN or infinite: tasks refuse their rows, and an evaluation names the row of such a loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection

from ray_app.data.dataset import open_dataset
from ray_app.errors import BadRowError, DataError
from ray_app.task.base import Task
from ray_app.task.fields import need_finite
from ray_app.task.metrics import score
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Ragged
from ray_app.task.tabular import TabularClassification, TabularRegression


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("column", ["x", "y"])
def test_tabular_tasks_refuse_numbers_that_are_not_finite(value: float, column: str) -> None:
    task = TabularRegression(label="y", features=["x"])
    rows = {"x": np.array([1.0, 2.0]), "y": np.array([1.0, 2.0])}
    rows[column][1] = value
    with pytest.raises(ValueError, match=r"NaN or infinite"):
        task.decode(rows)


def test_an_integer_label_that_is_nan_names_its_column() -> None:
    task = TabularClassification(label="y", features=["x"], num_classes=2)
    with pytest.raises(ValueError, match=r"column 'y' is NaN or infinite"):
        task.decode({"x": np.zeros(1), "y": np.array([np.nan])})


def test_need_finite_checks_lists_and_allows_integers() -> None:
    need_finite("x", np.arange(3))
    with pytest.raises(ValueError, match=r"x is NaN or infinite"):
        need_finite("x", Ragged.of([[1.0], [np.inf, 2.0]], np.float32))


def test_module_task_refuses_nan_in_its_columns() -> None:
    linear = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}
    task = ModuleTask(linear, ["x"], "y", {"class_path": "torch.nn.MSELoss"})
    task.kinds = {"x": "number"}
    with pytest.raises(ValueError, match=r"column 'x' is NaN or infinite"):
        task.decode({"x": np.array([0.0, np.nan])})


class LossOfX(Task):
    """A task that uses its field `x` as the loss."""

    def columns(self) -> list[str]:
        return ["x"]

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def forward(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return outputs

    def metrics(self) -> MetricCollection:
        return MetricCollection({"mean": MeanMetric(nan_strategy="ignore")})

    def update(self, metrics: MetricCollection, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        metrics.update(outputs)


def test_an_evaluation_names_the_row_that_makes_the_loss_nan(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0.0] * 5}), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"x": [0.0, 1.0, np.nan]}), tmp_path / "b.parquet", row_group_size=2)
    manifest, x = open_dataset(str(tmp_path)).manifest, np.array([0.0] * 6 + [1.0, np.nan])
    task = LossOfX()
    with pytest.raises(BadRowError, match=r"^b.parquet, row group 1, row 0: 'x' is NaN or infinite, and so is its"):
        list(score(task, torch.nn.Identity(), {"x": x}, 3, torch.device("cpu"), manifest=manifest))
    with pytest.raises(DataError, match=r"^Row 7 of the data: 'x' is NaN or infinite"):
        list(score(task, torch.nn.Identity(), {"x": x}, 3, torch.device("cpu")))


def test_a_nan_loss_of_finite_inputs_is_not_a_bad_row() -> None:
    class Diverged(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 0

    [chunk] = score(LossOfX(), Diverged(), {"x": np.array([1.0, 0.0])}, 3, torch.device("cpu"))
    assert np.isnan(chunk.loss)
