"""Runs of `fsdp` on a few rows, and the comparison of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ray_app.task.image import ImageClassification
from ray_app.train.job import Job
from tests.support.injector import DelayUntilEvent
from tests.support.local_world import make_job

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}}
ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.05}}


class Units(ImageClassification):
    """A task that names its layers as shard units, since they are too small for the default."""

    def __init__(self, names_units: bool = True) -> None:
        super().__init__(model_args={"channels": 4, "dropout": 0.3})
        self.names_units = names_units

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return (
            [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
            if self.names_units
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


def committed_before(job: Job, kill: int, step: int = 6) -> DelayUntilEvent:
    """Returns a hook that delays the steps from `kill` on until the checkpoint of a step is committed."""
    return DelayUntilEvent(job.run_root, "checkpointed", {"step": step}, after=kill, each_s=60.0)
