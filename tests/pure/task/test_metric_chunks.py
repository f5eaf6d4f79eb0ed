"""Metrics over chunks of rows: class counts with deterministic kernels, parts of evaluators, and mistakes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app.errors import TaskError
from ray_app.task.base import Batch
from ray_app.task.environment import use_deterministic_algorithms
from ray_app.task.image import ImageClassification
from ray_app.task.metrics import MAX_MISTAKES, combine, score
from ray_app.task.ragged import Ragged

CLASSES, ROWS = 200, 64
CPU = torch.device("cpu")


class MaxTensorBytes(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, result.nbytes if isinstance(result, torch.Tensor) else 0)
        return result


class ScoresInData(ImageClassification):
    """A task that reads its scores from the data."""

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return batch["image"]


class WritesIntoBatches(ScoresInData):
    """A task that writes into the batches of an evaluation."""

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return batch["image"].mul_(-2)


def test_what_an_evaluation_writes_into_its_batch_is_not_in_the_next_one() -> None:
    random = np.random.default_rng(0)
    arrays = {"image": random.random((ROWS, CLASSES), np.float32), "label": random.integers(0, CLASSES, ROWS)}
    task = WritesIntoBatches()
    task.num_classes, task.classes = CLASSES, [str(c) for c in range(CLASSES)]
    task.picture = lambda batch, row: b""
    first, second = (combine(task, score(task, nn.Identity(), arrays, 32, CPU)).values for _ in range(2))
    assert first == second


def score_random_rows() -> dict[str, Any]:
    random = np.random.default_rng(0)
    arrays = {
        "image": random.standard_normal((ROWS, CLASSES)).astype(np.float32),
        "label": random.integers(0, CLASSES, ROWS),
    }
    arrays["image"][np.arange(ROWS // 2), arrays["label"][: ROWS // 2]] += 9
    task = ScoresInData()
    task.num_classes, task.classes = CLASSES, [str(c) for c in range(CLASSES)]
    task.picture = lambda batch, row: b""
    evaluation = combine(task, score(task, nn.Identity(), arrays, 32, CPU))
    return {**evaluation.values, **evaluation.tables}


def test_deterministic_counts_are_equal_and_build_no_table_of_rows_and_bins() -> None:
    nondeterministic = score_random_rows()
    use_deterministic_algorithms(True)
    with MaxTensorBytes() as largest:
        assert score_random_rows() == nondeterministic
    assert 0.4 < nondeterministic["accuracy"] < 0.7
    assert largest.bytes == 8 * CLASSES**2, "a table of rows and bins was allocated"


def test_the_parts_of_several_evaluators_cover_all_rows_once() -> None:
    random = np.random.default_rng(0)
    arrays = {"image": random.standard_normal((ROWS, 3)).astype(np.float32), "label": random.integers(0, 3, ROWS)}
    task = ScoresInData()
    task.num_classes, task.classes = 3, ["a", "b", "c"]
    task.picture = lambda batch, row: b""
    whole = list(score(task, nn.Identity(), arrays, 8, CPU, chunk_rows=10))
    assert [(chunk.low, chunk.rows) for chunk in whole] == [(low, min(10, ROWS - low)) for low in range(0, ROWS, 10)]
    parts = [chunk for part in range(3) for chunk in score(task, nn.Identity(), arrays, 8, CPU, part, 3, chunk_rows=10)]
    assert sorted(chunk.low for chunk in parts) == [chunk.low for chunk in whole]
    expected, together = combine(task, whole), combine(task, parts)
    assert (together.values, together.tables) == (expected.values, expected.tables)


def test_an_error_in_a_metric_names_the_rows_of_the_chunk() -> None:
    class Failing(ScoresInData):
        def loss(self, outputs: Any, batch: Batch) -> Any:
            raise ValueError("no loss")

    arrays = {"image": np.zeros((13, 3), np.float32), "label": np.zeros(13, np.int64)}
    task = Failing()
    task.num_classes, task.classes = 3, ["a", "b", "c"]
    with pytest.raises(TaskError, match="evaluating rows 10 to 12"):
        list(score(task, nn.Identity(), arrays, 4, CPU, part=1, parts=2, chunk_rows=10))


def test_the_mistakes_of_highest_confidence_in_all_chunks_are_kept_in_order() -> None:
    rows = 4 * MAX_MISTAKES
    scores = np.zeros((rows, 2), np.float32)
    scores[:, 1] = (np.random.default_rng(1).permutation(rows) + 1) / rows
    task = ScoresInData()
    task.num_classes, task.classes = 2, ["right", "wrong"]
    pictures: list[int] = []
    task.picture = lambda batch, row: pictures.append(row) or b"picture"
    arrays = {"image": scores, "label": np.zeros(rows, np.int64)}
    mistakes = combine(task, score(task, nn.Identity(), arrays, 4, CPU, chunk_rows=4)).mistakes
    assert [m.row for m in mistakes] == np.argsort(-scores[:, 1])[:MAX_MISTAKES].tolist()
    assert all(m.image == b"picture" for m in mistakes)
    assert len(pictures) < rows


@pytest.mark.parametrize("rows", [10, 1000, 20_000])
def test_a_chunk_consists_of_whole_forward_passes(rows: int) -> None:
    arrays = {"image": np.zeros((rows, 3), np.float32), "label": np.zeros(rows, np.int64)}
    task = ScoresInData()
    task.num_classes, task.classes = 3, ["a", "b", "c"]
    sizes = [chunk.rows for chunk in score(task, nn.Identity(), arrays, 8, CPU)]
    assert sum(sizes) == rows
    assert all(size % 8 == 0 for size in sizes[:-1])
    assert len(sizes) <= 100, "chunks are large because an update of a metric costs much more than a row"


def test_a_chunk_of_rows_of_different_length_is_one_forward_pass() -> None:
    class Words(ScoresInData):
        def forward(self, model: nn.Module, batch: Batch) -> Any:
            assert batch["image"].shape[1] == int(batch["image_lengths"].max()), "a pass is padded to its longest row"
            return torch.zeros(len(batch["label"]), 3)

    rows = 100
    words = Ragged.of([np.ones(1 + row % 7) for row in range(rows)], np.float32)
    task = Words()
    task.num_classes, task.classes = 3, ["a", "b", "c"]
    task.picture = lambda batch, row: b""
    chunks = list(score(task, nn.Identity(), {"image": words, "label": np.zeros(rows, np.int64)}, 3, CPU))
    assert {chunk.rows for chunk in chunks[:-1]} == {3}
