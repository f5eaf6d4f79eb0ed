"""The states of local SGD: what all hold at an average, and the replica that each logical worker trains on its own until the next."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.task.base import Task
from ray_app.task.own_code import own_code
from ray_app.train.state.eager import without_compiler
from ray_app.train.state.groups import in_order, load_optimizer
from ray_app.train.state.state import TrainingState
from ray_app.train.step.logical import modes_of


class LocalState(TrainingState):
    """What all hold at an average, with the outer optimizer that moves it."""

    def _equip(self) -> None:
        super()._equip()
        train = self._config.train
        trained = [p for p in self.model.parameters() if p.requires_grad]
        without_compiler(torch.optim.SGD)
        self.outer = torch.optim.SGD(trained, train.outer_lr, train.outer_momentum, nesterov=train.outer_momentum > 0)

    def take_round(self, change: list[Tensor], optimizer: dict[str, Any], replica: TrainingState, step: int) -> None:
        """Ends a round.

        Args:
            change: What the trained parameters lost in the round on average, one tensor each.
            optimizer: The averaged state of the optimizer.
            replica: One that went through the round, for its schedule.
            step: Finished steps.
        """
        for p, value in zip((p for p in self.model.parameters() if p.requires_grad), change, strict=True):
            p.grad = value
        self.outer.step()
        self.outer.zero_grad()
        load_optimizer(self.optimizer, optimizer)
        if self.schedule is not None and replica.schedule is not None:
            self.schedule.load_state_dict(copy.deepcopy(replica.schedule.state_dict()))
        if self.average is not None:
            self.average.update(self.step)
        self.step = step

    def _live(self) -> Snapshot:
        live = super()._live()
        live.more["outer"] = self.outer.state_dict()
        return live

    def load(self, snapshot: Snapshot) -> None:
        """See `TrainingState.load`."""
        super().load(snapshot)
        self.outer.load_state_dict(snapshot.more["outer"])


class Replica(TrainingState):
    """What one logical worker trains on its own."""

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        super().__init__(config.replace(train__ema_decay=None), task, device, total_steps)
        self.trained: list[nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]
        self.modes = modes_of(self.model)

    def follow(self, state: TrainingState) -> None:
        """Starts a round from the common state."""
        self.model.load_state_dict(state.model.state_dict())
        load_optimizer(self.optimizer, copy.deepcopy(state.optimizer.state_dict()))
        if self.schedule is not None and state.schedule is not None:
            self.schedule.load_state_dict(copy.deepcopy(state.schedule.state_dict()))

    def forget(self) -> None:
        """Leaves no gradient."""
        for p in self.trained:
            p.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the trained parameters."""
        return [p.grad for p in self.trained if p.grad is not None]

    def move(self, has_rows: bool) -> None:
        """Makes a step of its own."""
        if has_rows:
            with own_code(lambda: "the update of the parameters"):
                self._task.apply_gradients(self.model, self.optimizer)
        self.pass_over()

    def averaged(self) -> list[str]:
        """What of the optimizer's state is averaged: the values that are one per value of every parameter that has them."""
        held = [(name, v, p) for p in self.trained for name, v in self.optimizer.state[p].items()]
        others = {name for name, v, p in held if not isinstance(v, Tensor) or v.shape != p.shape}
        return sorted({name for name, _, _ in held} - others)

    def values(self, name: str) -> list[Tensor]:
        """One of them for every parameter; zeros where the optimizer has none."""
        return [self.optimizer.state[p].get(name, torch.zeros_like(p)).detach() for p in self.trained]

    def lost(self, starts: list[Tensor]) -> list[Tensor]:
        """What the parameters lost since they were `starts`."""
        return [start - p.detach() for start, p in zip(starts, self.trained, strict=True)]

    def numbers(self) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """The rest of the optimizer's state, such as its number of steps, by the number of the parameter, and what its groups have found,
        as Prodigy's step size; on the CPU, since it is sent.
        """
        averaged, found = self.averaged(), dict[int, dict[str, Any]]()
        for i, p in enumerate(in_order(self.optimizer)):
            found[i] = _on_cpu(self.optimizer.state[p], averaged)
        return found, [_on_cpu(group, ["params"]) for group in self.optimizer.param_groups]


def _on_cpu(values: Mapping[str, Any], but: list[str]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items() if name not in but}


def beside(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Values that were sent, each where another of the same name is."""

    def moved(value: Any, other: Any) -> Any:
        return value.to(other.device) if isinstance(value, Tensor) and isinstance(other, Tensor) else value

    return {name: moved(value, others.get(name)) for name, value in values.items()}
