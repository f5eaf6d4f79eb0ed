"""The trial before the start: a mistake anywhere in a task is refused, with the task's own line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from ray_app.errors import ConfigError
from ray_app.runs.preparing.rehearsal import rehearse
from ray_app.task.base import Batch
from tests.support.local_world import TinyImages, make_job, write_images


class Mistaken(TinyImages):
    """Has a mistake in one method."""

    def __init__(self, where: str) -> None:
        super().__init__(loss_shape="mean" if where == "loss" else "rows")
        self.where = where

    def _stumble(self, where: str) -> None:
        if where == self.where:
            raise KeyError("labels")

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        self._stumble("augment")
        return super().augment(batch, keys)

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        self._stumble("training_loss")
        return super().training_loss(model, batch)

    def metrics(self) -> Any:
        self._stumble("metrics")
        return super().metrics()

    def update(self, metrics: Any, outputs: Any, batch: Batch) -> None:
        self._stumble("update")
        super().update(metrics, outputs, batch)

    def predictions(self, outputs: Any) -> Any:
        self._stumble("predictions")
        return super().predictions(outputs)


def trial(tmp_path: Path, where: str, **fields: Any) -> None:
    data = write_images(tmp_path / "data", [[8]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=4, task=Mistaken(where), **({"data__eval_path": str(data)} | fields))
    row = {name: np.zeros((1, *spec.shape), np.dtype(spec.dtype)) for name, spec in job.fields.items()}
    rehearse(job, row, None)


@pytest.mark.parametrize("where", ["augment", "training_loss", "metrics", "update", "predictions"])
def test_a_mistake_is_refused_with_its_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="A trial with one row failed: KeyError: 'labels'") as caught:
        trial(tmp_path, where)
    assert f"in {where}\n" in str(caught.value)
    assert "test_rehearsal.py" in str(caught.value).splitlines()[0]


def test_a_mean_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"returned shape \(\) for 2 rows"):
        trial(tmp_path, "loss")


def test_nothing_is_refused_where_nothing_is_wrong(tmp_path: Path) -> None:
    trial(tmp_path, "")


def test_without_evaluation_its_methods_are_not_needed(tmp_path: Path) -> None:
    trial(tmp_path, "update", data__eval_path=None)
