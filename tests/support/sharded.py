"""Runs of `fsdp` on a few rows, and what is asked of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ray_app.task.image import ImageClassification
from ray_app.testing import TrainedRun
from ray_app.train.job import Job
from tests.support.local_world import make_job, write_images

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}}
ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.05}}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("fsdp") / "data", [[50, 1], [46]])  # the last step has one row


class Units(ImageClassification):
    """Shards by layers, which are too small to be units of themselves."""

    def __init__(self, own: bool = True) -> None:
        super().__init__(model_args={"channels": 4, "dropout": 0.3})
        self.own = own

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return (
            [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
            if self.own
            else super().shard_units(model)
        )


def fsdp_job(folder: Path, data: Path, task: Any = None, **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "train__strategy": "fsdp",
        "train__epochs": 2,
        "optimizer": SGD,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 6,
    }
    return make_job(folder, data, logical_workers=4, batch=12, task=task or Units(), **(defaults | fields))


def assert_bits(found: TrainedRun, expected: TrainedRun) -> None:
    """The same numbers in every step, and the same state."""
    assert found.steps == expected.steps
    assert found.digests == expected.digests
