"""Counts of classes while kernels must be deterministic: the same numbers, without a table of every row and bin."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app.task.base import Batch
from ray_app.task.environment import use_deterministic_algorithms
from ray_app.task.image import ImageClassification
from ray_app.task.score.scoring import combine, score

CLASSES, ROWS = 200, 64
CPU = torch.device("cpu")


class Largest(TorchDispatchMode):
    """Notes how large the largest tensor is that is made."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, made.nbytes if isinstance(made, torch.Tensor) else 0)
        return made


class Given(ImageClassification):
    """Scores are in the data."""

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return batch["image"]


def scored() -> dict[str, Any]:
    random = np.random.default_rng(0)
    arrays = {"image": random.standard_normal((ROWS, CLASSES)).astype(np.float32), "label": random.integers(0, CLASSES, ROWS)}
    arrays["image"][np.arange(ROWS // 2), arrays["label"][: ROWS // 2]] += 9
    task = Given()
    task.num_classes, task.classes = CLASSES, [str(c) for c in range(CLASSES)]
    task.picture = lambda batch, row: b""  # type: ignore[method-assign]
    found = combine(task, score(task, nn.Identity(), arrays, 32, CPU))
    return {**found.values, **found.tables}


def test_counts_are_the_same_and_need_no_table_of_rows_and_bins() -> None:
    free = scored()
    use_deterministic_algorithms(True)
    with Largest() as largest:
        assert scored() == free
    assert 0.4 < free["accuracy"] < 0.7
    assert largest.bytes == 8 * CLASSES**2, "each forward's rows times as much"
