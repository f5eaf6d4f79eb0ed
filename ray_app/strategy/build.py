"""The table of exchanges; `train/build.py` has those of what a strategy keeps and how it steps."""

from __future__ import annotations

from torch import nn

from ray_app.sections import TrainSection
from ray_app.strategy.base import Strategy, World
from ray_app.strategy.ddp import DataParallel


def build_strategy(train: TrainSection, model: nn.Module, world: World) -> Strategy:
    """Makes the exchange of the configured strategy for a model and the workers of now; all but `fsdp` have that of `ddp`."""
    if train.strategy == "fsdp":
        from ray_app.strategy.fsdp import FullySharded  # two seconds of imports that the others do not need

        return FullySharded(model)
    return DataParallel(model, world, train.reduction, train.bucket_mb, train.gradient_compression)
