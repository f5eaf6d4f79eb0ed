"""Several optimizers that take turns, as for a GAN: in each step one optimizer updates its own parameters.

The number of the step decides which optimizer is in turn. In a round every optimizer has as many consecutive steps as
its specification says, in the order of the configuration. A turn has the name of its optimizer. A task with phases uses
several optimizers, one after the other, for the rows of each step (`Task.phases`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.config.import_paths import TurnSpec
from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError, join_names
from ray_app.train.state.parameters import load_optimizer, match_names


def turn_at(turns: Mapping[str, TurnSpec], step: int) -> str:
    """Returns the name of the optimizer in turn at a step of the run, counted from 0."""
    step_in_round = step % sum(spec.steps for spec in turns.values())
    for name, spec in turns.items():
        if step_in_round < spec.steps:
            return name
        step_in_round -= spec.steps
    raise AssertionError("every step of a round belongs to a turn")


def steps_in_turn(turns: Mapping[str, TurnSpec], name: str, steps: int) -> int:
    """Returns in how many of the first `steps` steps of a run the optimizer `name` is in turn."""
    round_steps = sum(spec.steps for spec in turns.values())
    last_round = range(steps // round_steps * round_steps, steps)
    return steps // round_steps * turns[name].steps + sum(turn_at(turns, step) == name for step in last_round)


class Turns(Optimizer):
    """The optimizers of a run that take turns, in the form of one optimizer.

    Its state is that of all optimizers, with their parameters numbered through in the order of the optimizers.

    Args:
        specs: Specification of each optimizer, by name.
        named: The parameters by name; every trained parameter must belong to exactly one optimizer.
        make: Makes an optimizer from a specification and its parameters by name.
        phases: The names of the optimizers that each step uses, in their order; empty if steps take turns.

    Attributes:
        phase: The number of the present phase.
        parameters: The trained parameters of each optimizer, by the optimizer's name.
        optimizers: The optimizers by name.

    Raises:
        ConfigError: A trained parameter belongs to two optimizers or to none, or an optimizer has none.
    """

    def __init__(
        self,
        specs: Mapping[str, TurnSpec],
        named: Mapping[str, nn.Parameter],
        make: Callable[[TurnSpec, Mapping[str, nn.Parameter], str], Optimizer],
        phases: Sequence[str] = (),
    ) -> None:
        # `Optimizer.__init__` is not called: this object keeps no groups and no state besides those of the optimizers.
        self._specs, self._turn = specs, ""
        self.phases, self.phase = phases, 0
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self.parameters: dict[str, list[nn.Parameter]] = {}
        self.optimizers: dict[str, Optimizer] = {}
        owners: dict[str, str] = {}
        for turn, spec in specs.items():
            field = f"optimizers.{turn}.parameters"
            names = {name for pattern in spec.parameters for name in match_names(named, pattern, field)}
            members = {name: p for name, p in trained.items() if name in names}
            if shared := [name for name in members if name in owners]:
                raise ConfigError(
                    f"{field} names {join_names(shared)}, which optimizers.{owners[shared[0]]} also has; each parameter"
                    " belongs to one optimizer."
                )
            if not members:
                raise ConfigError(f"{field} names no trained parameter; name some, or remove optimizers.{turn}.")
            owners |= dict.fromkeys(members, turn)
            self.parameters[turn] = list(members.values())
            self.optimizers[turn] = make(spec, members, f"optimizers.{turn}")
        if unowned := [name for name in trained if name not in owners]:
            raise ConfigError(
                f"No optimizer has the parameters {join_names(unowned)}; name each in one, or in train.freeze."
            )
        self._update_groups()

    def _update_groups(self) -> None:
        """Sets `param_groups` to the groups of all optimizers; an optimizer that loads a state makes new groups."""
        self.param_groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def name_at(self, step: int) -> str:
        """Returns the name of the optimizer of the present phase, or in turn at a step of the run, counted from 0."""
        return self.phases[self.phase] if self.phases else turn_at(self._specs, step)

    def end_phase(self) -> int:
        """Ends a phase; returns 1 if the step ends with it, else 0."""
        self.phase = (self.phase + 1) % max(1, len(self.phases))
        return int(self.phase == 0)

    def begin_step(self, step: int) -> str:
        """Calls `enable_gradients` for the optimizer in turn at a step, and returns the optimizer's name."""
        self.enable_gradients(turn := self.name_at(step))
        return turn

    def enable_gradients(self, turn: str) -> None:
        """Sets `requires_grad` so that only the parameters of one optimizer get gradients.

        Args:
            turn: The name of the optimizer.
        """
        if turn != self._turn:
            self._turn = turn
            for name, parameters in self.parameters.items():
                for p in parameters:
                    p.requires_grad_(name == turn)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all optimizers in the form of the state of one optimizer."""
        state = dict[int, Any]()
        groups = list[dict[str, Any]]()
        first = 0
        for optimizer in self.optimizers.values():
            part = optimizer.state_dict()
            state |= {first + number: values for number, values in part["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in part["param_groups"]
            ]
            first += sum(len(group["params"]) for group in part["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        groups, first = list(state_dict["param_groups"]), 0
        for optimizer in self.optimizers.values():
            num_groups = len(optimizer.param_groups)
            part, groups = groups[:num_groups], groups[num_groups:]
            count = sum(len(group["params"]) for group in part)
            state = {n - first: values for n, values in state_dict["state"].items() if first <= n < first + count}
            numbered = [{**group, "params": [number - first for number in group["params"]]} for group in part]
            load_optimizer(optimizer, {"state": state, "param_groups": numbered})
            first += count
        self._update_groups()


class TurnSchedules:
    """The schedules of optimizers that take turns; each schedule advances in the turns of its optimizer only.

    Args:
        specs: Specification of each optimizer, by name.
        turns: The optimizers.
        total_steps: Steps of the run.
        make: Makes a schedule from its specification, its optimizer, and the optimizer's number of steps in the run.

    Attributes:
        step_counts: Number of steps of each schedule in the run, by the name of its optimizer.
        schedules: The schedules by the name of their optimizer; an optimizer without a schedule has no entry.
    """

    def __init__(
        self,
        specs: Mapping[str, TurnSpec],
        turns: Turns,
        total_steps: int,
        make: Callable[[ClassSpec, Optimizer, int], LRScheduler],
    ) -> None:
        self._turns = turns
        self.step_counts = {
            turn: steps_in_turn(specs, turn, total_steps) for turn, spec in specs.items() if spec.schedule is not None
        }
        self.schedules = {
            turn: make(spec.schedule, turns.optimizers[turn], self.step_counts[turn])
            for turn, spec in specs.items()
            if spec.schedule is not None
        }

    def step(self, step: int) -> None:
        """Advances the schedule of the optimizer in turn at a step, if that optimizer has a schedule."""
        turn = self._turns.name_at(step)
        if turn in self.schedules:
            self.schedules[turn].step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all schedules, by the name of their optimizer."""
        return {turn: schedule.state_dict() for turn, schedule in self.schedules.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        for turn, schedule in self.schedules.items():
            schedule.load_state_dict(state_dict[turn])
