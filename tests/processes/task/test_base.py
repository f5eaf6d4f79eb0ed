"""Tasks that leave most methods out: the defaults of these methods, and bit-identical training of such a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from ray_app import Ragged, check_task, load_config
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.base import Batch, Rows, Task
from ray_app.task.metrics import combine, score
from ray_app.task.ragged import to_batch
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.pictures import table_data
from tests.support.task_checks import all_ok, levels


class Sums(nn.Module):
    """Adds a number and the sum of a list."""

    def forward(self, number: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return number + (values * (torch.arange(values.shape[1]) < lengths[:, None])).sum(1)


class Adding(Task):
    """Defines three methods and the targets."""

    input_columns: ClassVar[tuple[str, ...]] = ("number", "values")
    compared: ClassVar[tuple[str, ...]] = ("total",)

    def columns(self) -> list[str]:
        return [*self.input_columns, *self.compared]

    def targets(self) -> list[str]:
        return list(self.compared)

    def build_model(self) -> nn.Module:
        return Sums()

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs - batch[self.compared[0]]).abs()


class Measured(Adding):
    """Defines metrics, but no `update`."""

    def metrics(self) -> Any:
        import torchmetrics

        return torchmetrics.MetricCollection({"error": torchmetrics.MeanAbsoluteError()})


ROWS: Rows = {
    "number": np.array([1, 2, 3], np.float64),
    "values": Ragged.of([[1], [1, 2, 3], []], np.int32, fill=-7),
    "total": np.array([2, 8, 3], np.int16),
}


@pytest.mark.rest
def test_the_task_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_task` compares one worker with four, resumes midway, evaluates and exports."""
    page = next(block.text for block in blocks(ROOT / "docs" / "own-task.md") if "class Stars" in block.text)
    (tmp_path / "stars.py").write_text(page)
    monkeypatch.syspath_prepend(str(tmp_path))
    random = np.random.default_rng(0)
    data = table_data(
        tmp_path / "data",
        {"reader": random.integers(0, 1000, 64), "book": random.integers(0, 500, 64), "stars": random.random(64)},
    )
    config = load_config(
        task={"class_path": "stars.Stars", "init_args": {}},
        optimizer={"class_path": "torch.optim.Adam", "init_args": {}},
        **{f"data__{name}": value for name, value in data.items()},
        run__storage_path=str(tmp_path / "runs"),
        scaling__max_workers=4,
    )
    check = check_task(config)
    assert levels(check) == all_ok(), check


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1.5, 2.5]), np.array([1.5, 2.5], np.float32)),
        (np.array([1, 2], np.uint8), np.array([1, 2], np.int64)),
        (np.array([True, False]), np.array([1, 0], np.int64)),
        (np.ones((2, 3, 3), np.uint8), np.ones((2, 3, 3), np.uint8)),
        (np.ones((2, 3)), np.ones((2, 3), np.float32)),
    ],
)
def test_plain_columns_are_decoded_by_their_type(values: npt.NDArray, expected: npt.NDArray) -> None:
    class OneColumn(Adding):
        input_columns, compared = ("a",), ()

    decoded = OneColumn().decode({"a": values, "other": values})
    assert list(decoded) == ["a"]
    assert decoded["a"].dtype == expected.dtype
    assert np.array_equal(decoded["a"], expected)


def test_lists_stay_ragged_and_reach_the_model_with_their_lengths() -> None:
    task = Adding()
    decoded = task.decode(ROWS)
    assert isinstance(decoded["values"], Ragged)
    assert decoded["values"].values.dtype == np.int64
    assert task.forward(task.build_model(), to_batch(decoded)).tolist() == ROWS["total"].tolist()


def test_a_task_without_metrics_evaluates_the_loss() -> None:
    evaluation = combine(Adding(), score(Adding(), Sums(), Adding().decode(ROWS), 2, torch.device("cpu")))
    assert evaluation.values == {"loss": 0.0}


def test_metrics_compare_the_outputs_with_the_target() -> None:
    rows = ROWS | {"total": ROWS["total"] + 2}
    evaluation = combine(Measured(), score(Measured(), Sums(), Measured().decode(rows), 2, torch.device("cpu")))
    assert evaluation.values == {"error": 2.0, "loss": 2.0}


@pytest.mark.parametrize("compared", [(), ("total", "number")])
def test_metrics_without_one_target_need_an_update(compared: tuple[str, ...]) -> None:
    class Several(Measured):
        pass

    Several.compared = compared
    with pytest.raises(ConfigError, match=r"has metrics but leaves `update` out.*Write `update`"):
        Several().update(Several().metrics(), torch.zeros(1), {})


def test_fields_of_other_names_need_a_forward() -> None:
    with pytest.raises(ConfigError, match="columns number, values; decoded fields are both, total, without"):
        Adding().forward(Sums(), {"both": torch.zeros(1), "total": torch.zeros(1)})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (ColumnFacts("text"), "holds text; the task Adding, which leaves `decode` out, needs number or integer or"),
        (ColumnFacts("bytes"), "holds bytes; the task Adding"),
        (ColumnFacts("number", "float32", nulls=3), "has 3 missing values"),
        (None, "has no column 'values'"),
    ],
)
def test_columns_that_need_a_decode_method_are_refused_at_start(facts: ColumnFacts | None, message: str) -> None:
    columns = {"number": ColumnFacts("number", "float32"), "total": ColumnFacts("integer", "int64")}
    columns |= {"values": facts} if facts is not None else {}
    with pytest.raises(DataError) as caught:
        Adding().prepare(DataFacts("data", 3, columns))
    assert message in str(caught.value)


def test_a_task_with_a_decode_method_may_read_any_column() -> None:
    class DecodingTask(Adding):
        def decode(self, rows: Rows) -> dict[str, npt.NDArray]:
            return {"number": np.zeros(len(rows["number"]))}

    task = DecodingTask()
    assert task.prepare(DataFacts("data", 3, {})) is task
