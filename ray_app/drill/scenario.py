"""What the scenarios of a drill have to work with, and what they are made of."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from ray_app.config.config import Config
from ray_app.drill.cluster import Nodes
from ray_app.drill.delays import DelayPlan
from ray_app.drill.faults import Evidence
from ray_app.driver.result import Result
from ray_app.driver.run import Faults, Observe
from ray_app.runlog.journal import Event, read_events
from ray_app.runlog.lease import LeaseHolder
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location

PACED_S = 40.0


@dataclass(frozen=True)
class ScenarioContext:
    """What a scenario has to work with.

    Args:
        config: The configuration of its run.
        workers: Workers that train at first.
        total_steps: Steps of the run.
        steps_per_epoch: Steps of an epoch.
        checkpoint_every: Steps between two checkpoints.
        proofs: Where it is recorded what happened.
        random: Chooses steps and ranks.
        nodes: The drill's own nodes; None on a cluster that is not its own.
        train: Runs a configuration with faults, as `run_training` does.
    """

    config: Config
    workers: int
    total_steps: int
    steps_per_epoch: int
    checkpoint_every: int
    proofs: Evidence
    random: random.Random
    nodes: Nodes | None
    train: Callable[[Config, Faults], Result]

    @property
    def paths(self) -> RunPaths:
        """The scenario's run."""
        return RunPaths(to_location(self.config.run.storage_path) / str(self.config.run.name))

    def step(self) -> int:
        """Some step in the middle."""
        return self.random.randrange(int(0.3 * self.total_steps), int(0.6 * self.total_steps))

    def checkpoint(self) -> int:
        """The step of some checkpoint in the middle."""
        return self.checkpoint_every * self.random.randrange(3, 6)

    def rank(self) -> int:
        """Some rank."""
        return self.random.randrange(self.workers)

    @property
    def enough(self) -> range:
        """Numbers of workers at which more of them would not make the run faster."""
        logical = self.config.logical_workers
        return range(ceil(logical / ceil(logical / self.workers)), self.workers + 1)

    def pace(self, first: int, last: int | None = None, sizes: range | None = None, least_s: float = 0.0) -> DelayPlan:
        """Pauses from a step on until the number of workers is one of `sizes`; not given: until there are
        enough again.
        """
        last = last or self.total_steps - max(3, self.total_steps // 10)
        return DelayPlan(self.proofs, first, last, sizes or self.enough, PACED_S, least_s)


@dataclass(frozen=True)
class ScenarioResult:
    """A run after its disturbance.

    Args:
        paths: The run.
        summary: Its summary.
        proofs: What happened, by name.
    """

    paths: RunPaths
    summary: dict[str, Any]
    proofs: dict[str, dict[str, Any]]

    def events(self, kind: str) -> list[Event]:
        """Events of a kind."""
        return read_events(self.paths, kind)

    @property
    def sizes(self) -> list[int]:
        """World sizes, one after the other."""
        return [workers for _, workers in self.summary["world_sizes"]]


@dataclass(frozen=True)
class Scenario:
    """What a scenario does.

    Args:
        steps: Where it strikes.
        expected: Names of the proofs that must be there at the end.
        confirm: Says what there is to see of it in the run besides; each line is something that is missing.
        faults: What happens in its processes while the run goes on.
        observe: What happens in the driver meanwhile.
        held: Proofs between which the run was made to wait: from the key's to the value's.
        room: Workers that the drill's own cluster has room for at first; None: for all.
        changes: Other values of the configuration.
        before: A start of the same run that ends before; the run itself is then started again.
        around: What is there from before the run until it has been judged; gives more values of the configuration.
    """

    steps: list[int]
    expected: list[str]
    confirm: Callable[[ScenarioResult], list[str]]
    faults: Faults = field(default_factory=Faults)
    observe: Observe | None = None
    held: dict[str, str] = field(default_factory=dict)
    room: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Config], None] | None = None
    around: Callable[[], AbstractContextManager[dict[str, Any]]] = lambda: nullcontext({})


def is_gone(proof: dict[str, Any]) -> bool | None:
    """Whether the process that a proof names has ended; None if it is on another machine."""
    process = LeaseHolder(**proof["process"])
    return process.is_gone() if process.machine == LeaseHolder.here().machine else None


def end_frozen(proofs: Evidence) -> None:
    """Ends what stood still and may still do so, if it is on this machine."""
    proof = proofs.get("frozen")
    if proof is not None and is_gone(proof) is False:
        with suppress(ProcessLookupError):
            os.kill(proof["process"]["pid"], signal.SIGKILL)
