"""The table of strategies."""

from __future__ import annotations

from torch import nn

from ray_app.config import TrainSection
from ray_app.strategy.base import Strategy, World
from ray_app.strategy.ddp import DataParallel


def build_strategy(train: TrainSection, model: nn.Module, world: World) -> Strategy:
    """Makes the configured strategy for a model and the workers of now."""
    table = {"ddp": DataParallel, "single": DataParallel, "local_sgd": DataParallel, "parameter_server": DataParallel}
    return table[train.strategy](model, world, train.reduction)
