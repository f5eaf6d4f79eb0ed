"""The output of a batch prediction, and how it splits a data set into parts."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from ray_app.errors import ConfigError
from ray_app.plan.manifest import ColumnFacts, DataFacts, Manifest
from ray_app.predict.predict import cut_parts
from ray_app.task.base import Task
from ray_app.task.classification import predict_classes, probabilities
from ray_app.task.image import ImageClassification
from ray_app.task.tabular import TabularClassification, TabularRegression


def test_a_predicted_class_has_a_name_an_index_and_a_confidence() -> None:
    predictions = predict_classes(torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]]), ["cat", "dog", "sea lion"])
    assert predictions["predicted"].tolist() == ["dog", "cat"]
    assert predictions["predicted_index"].tolist() == [1, 0]
    expected = [np.exp(3) / (1 + np.exp(3) + np.exp(1)), np.exp(5) / (np.exp(5) + 2)]
    assert np.allclose(predictions["confidence"], expected)


@given(rows=st.integers(1, 70), classes=st.integers(2, 20), seed=st.integers(0, 99))
def test_losses_and_probabilities_of_few_classes_are_those_of_each_row(rows: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 9 * torch.randn(rows, classes, generator=generator)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    losses = TabularClassification(num_classes=classes).loss(scores, {"label": labels})
    assert torch.allclose(losses, functional.cross_entropy(scores, labels, reduction="none"), rtol=1e-5, atol=1e-6)
    assert torch.allclose(probabilities(scores), scores.softmax(-1), rtol=1e-5)


@pytest.mark.parametrize("task", [
    ImageClassification(num_classes=4),
    TabularClassification(num_classes=4, missing={"default": "refuse"}, standardize=False),
])  # fmt: skip
def test_a_class_without_a_name_is_named_by_its_index(task: ImageClassification | TabularClassification) -> None:
    label = ColumnFacts("integer", "int64", minimum=0.0, maximum=1.0)
    columns = {"label": label, "image": ColumnFacts("array", "uint8", (8, 8)), "a": ColumnFacts("number", "float64")}
    prepared = task.prepare(DataFacts("data", 9, columns, ("cat", "dog")))
    scores, labels = torch.eye(4), torch.tensor([0, 1, 1, 0])
    assert prepared.predictions(scores, {"label": labels})["predicted"].tolist() == ["cat", "dog", "2", "3"]
    assert [(mistake.truth, mistake.predicted) for mistake in prepared.mistakes(scores, {"label": labels}, 9)] == [
        ("dog", "2"),
        ("cat", "3"),
    ]


def test_targets_are_not_inputs() -> None:
    assert ImageClassification().targets() == ["label"]
    task = TabularRegression(label="price", features=["a", "b"])
    assert (task.targets(), task.columns()) == (["price"], ["a", "b", "price"])
    assert task.predictions(torch.tensor([[2.0], [3.0]]), {})["predicted"].tolist() == [2.0, 3.0]


def test_predictions_of_bfloat16_are_floats() -> None:
    outputs = torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
    task = TabularRegression(label="price", features=["a"])
    assert Task.predictions(task, {"score": outputs}, {})["score"].dtype == np.float32


@pytest.mark.parametrize("outputs", [(torch.ones(2), torch.ones(2)), {"a": torch.ones(2), "b": ()}])
def test_outputs_that_are_no_columns_are_refused(outputs: object) -> None:
    with pytest.raises(ConfigError, match=r"a dictionary of tensors, but are, or contain, tuple\. Write"):
        Task.predictions(TabularRegression(), outputs, {})


@given(st.lists(st.lists(st.integers(0, 40), max_size=6), min_size=1, max_size=4), st.integers(1, 50))
def test_parts_contain_every_row_once_in_order_and_have_a_maximum_size(files: list[list[int]], max_rows: int) -> None:
    manifest = Manifest.from_files((f"part-{i}.parquet", groups) for i, groups in enumerate(files))
    parts = cut_parts(manifest, max_rows)
    spans = [span for part in parts for span in part]
    assert sum(span.rows for span in spans) == manifest.num_rows
    assert [span.position for span in spans] == [0, *accumulate(span.rows for span in spans)][: len(spans)]
    assert all(0 < sum(span.rows for span in part) <= max_rows for part in parts)
    cut = {(span.path, span.row_group) for part in parts for span in part if span.first}
    sizes = {(f"part-{i}.parquet", j): rows for i, groups in enumerate(files) for j, rows in enumerate(groups)}
    assert all(sizes[group] > max_rows for group in cut), "a row group that fits into one part was split"
