"""A step in which one of several optimizers has its turn: only its parameters get gradients, an exchange and an update."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ray_app.config.config import Config
from ray_app.data.feed.windows import MicroBatch
from ray_app.exchange.exchange import Exchange, World
from ray_app.plan.cursor import Cursor
from ray_app.task.base import Batch, Task
from ray_app.task.losses import Losses
from ray_app.train.group.messages import Flags, Phase
from ray_app.train.state.state import TrainingState
from ray_app.train.state.turns import Turns
from ray_app.train.step.step import Step
from ray_app.train.step.table import StepResult, Table


class TurnStep(Step):
    """See the module and `Step`; there is an exchange for each turn, made while only its parameters may have gradients."""

    def __init__(
        self,
        config: Config,
        task: Task,
        state: TrainingState,
        turns: Turns,
        make_exchange: Callable[[], Exchange],
        world: World,
        device: torch.device,
        enter: Callable[[Phase], None],
    ) -> None:
        self._turns, self._turn = turns, ""
        self._exchanges, self._tables = dict[str, Exchange](), {turn: Table(world) for turn in turns.optimizers}
        for turn in turns.optimizers:
            turns.take(turn)
            self._exchanges[turn] = make_exchange()
        super().__init__(config, task, state, self._exchanges[turn], world, device, enter)

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """See `Step.run`."""
        turn = self._turn = self._turns.begin(self._state.step)
        self._exchange, self._table, self._parameters = self._exchanges[turn], self._tables[turn], self._turns.parameters[turn]
        return super().run(cursor, batches, global_rows, flags)

    def _loss(self) -> Callable[[nn.Module, Batch], Tensor | Losses]:
        return lambda model, fields: self._task.turn_loss(self._turn, model, fields)

    def close(self) -> None:
        """See `Exchange.close`."""
        for exchange in self._exchanges.values():
            exchange.close()
