"""What a configuration says where the task makes the optimizer."""

from __future__ import annotations

from torch.optim import Optimizer


class OwnOptimizer(Optimizer):
    """Stands for the optimizer that the task makes, see `Task.own_optimizer`; it is chosen by itself where no other is configured."""

    def __init__(self) -> None:
        raise TypeError("OwnOptimizer only stands for what Task.own_optimizer makes")
