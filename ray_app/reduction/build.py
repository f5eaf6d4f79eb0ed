"""The table of exchanges; `train/build.py` has those of what a strategy keeps and how it steps."""

from __future__ import annotations

from torch import nn

from ray_app.config.sections import TrainSection
from ray_app.reduction.base import GradientReducer, World
from ray_app.reduction.bucketed import BucketedReducer


def build_exchange(train: TrainSection, model: nn.Module, world: World) -> GradientReducer:
    """Makes the exchange of the configured strategy for a model and the workers of now; all but `fsdp` have that of
    `ddp`.
    """
    if train.strategy == "fsdp":
        from ray_app.reduction import sharded  # two seconds of imports that the others do not need

        return (
            sharded.DeterministicShardedReducer(model, world)
            if train.reduction == "exact"
            else sharded.FsdpReducer(model, world)
        )
    return data_parallel(train, model, world)


def data_parallel(train: TrainSection, model: nn.Module, world: World) -> BucketedReducer:
    """The exchange of `ddp`, as configured."""
    return BucketedReducer(model, world, train.reduction, train.bucket_mb, train.gradient_compression)
