"""The description of a drill scenario: its input, the plan that it returns, and the run that the plan has disturbed."""

import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from ray_app.config.config import Config
from ray_app.drill.cluster import DrillCluster
from ray_app.drill.faults import DelayPlan, Evidence, HookChain
from ray_app.driver.result import Result
from ray_app.driver.run import Faults, Observe
from ray_app.runlog.journal import Event, read_events
from ray_app.runlog.lease import LeaseHolder
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location

MAX_DELAY_S = 40.0
"""Maximum of all pauses of one `DelayPlan` together."""


@dataclass(frozen=True)
class ScenarioContext:
    """The input of a scenario: the configuration and the dimensions of its run in optimizer steps, and the cluster.

    At first `workers` train. `random` draws steps and ranks. `nodes` is the cluster that the drill has started, None on
    a cluster of the user; `train` is `run_training`.
    """

    config: Config
    workers: int
    total_steps: int
    steps_per_epoch: int
    checkpoint_every: int
    evidence: Evidence
    random: random.Random
    nodes: DrillCluster | None
    train: Callable[[Config, Faults], Result]

    @property
    def paths(self) -> RunPaths:
        """The directory of the scenario's run."""
        return RunPaths(to_location(self.config.run.storage_path) / str(self.config.run.name))

    def choose_step(self) -> int:
        """Returns a random step in the middle of the run."""
        return self.random.randrange(int(0.3 * self.total_steps), int(0.6 * self.total_steps))

    def choose_checkpoint_step(self) -> int:
        """Returns the step of a random checkpoint in the middle of the run."""
        return self.checkpoint_every * self.random.randrange(3, 6)

    def choose_rank(self) -> int:
        """Returns a random rank."""
        return self.random.randrange(self.workers)

    @property
    def sufficient_workers(self) -> range:
        """The numbers of workers at which the largest share has as many logical workers as with all workers."""
        logical = self.config.logical_workers
        return range(ceil(logical / ceil(logical / self.workers)), self.workers + 1)

    def make_delay_plan(
        self, first: int, last: int | None = None, sizes: range | None = None, min_s: float = 0.0
    ) -> DelayPlan:
        """Returns a hook that pauses the run after steps, until a replacement worker has joined.

        By default it ends shortly before the end of the run, and at `sufficient_workers`; see `DelayPlan`.
        """
        last = last or self.total_steps - max(3, self.total_steps // 10)
        return DelayPlan(self.evidence, first, last, sizes or self.sufficient_workers, MAX_DELAY_S, min_s)

    def delayed(
        self, step: int, *hooks: Callable[[int, int], None], sizes: range | None = None, min_s: float = 0.0
    ) -> HookChain:
        """Returns hooks for `Hooks.after_step`, followed by pauses after the steps that follow a step."""
        return HookChain((*hooks, self.make_delay_plan(step + 1, sizes=sizes, min_s=min_s)))


@dataclass(frozen=True)
class ScenarioResult:
    """A run after its disturbance; `evidence` has the contents of the entries of `Evidence`, by name."""

    paths: RunPaths
    summary: dict[str, Any]
    evidence: dict[str, dict[str, Any]]

    def events(self, kind: str) -> list[Event]:
        """Returns the run's events of one kind."""
        return read_events(self.paths, kind)

    @property
    def sizes(self) -> list[int]:
        """The world sizes of the run's generations, in the order of time."""
        return [workers for _, workers in self.summary["world_sizes"]]


@dataclass(frozen=True)
class Scenario:
    """The plan of a disturbance: the faults, and how to confirm that they happened.

    Args:
        steps: Finished steps at which the faults happen, for the certificate.
        expected: Names of the evidence that must exist at the end.
        confirm: Returns a line for each trace of the disturbance that is missing in the run.
        waits: Pairs of names of evidence between which the drill makes the run wait: from the key to the value. The
            time between them is taken out of the measurements.
        initial_workers: Number of workers that fit on the drill's own cluster at first; None: all.
        changes: Configuration fields of this scenario's run, in place of the drill's.
        first_start: Starts the same run once and ends it early; the drill then starts the run again.
        setup: Returns a context manager that the drill enters before the run and leaves after the assessment; it yields
            more configuration fields.
    """

    steps: list[int]
    expected: list[str]
    confirm: Callable[[ScenarioResult], list[str]]
    faults: Faults = field(default_factory=Faults)
    observe: Observe | None = None
    waits: dict[str, str] = field(default_factory=dict)
    initial_workers: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    first_start: Callable[[Config], None] | None = None
    setup: Callable[[], AbstractContextManager[dict[str, Any]]] = lambda: nullcontext({})


def is_gone(entry: dict[str, Any]) -> bool | None:
    """Returns whether the process that an entry of `Evidence` names has ended; None if it runs on another machine."""
    process = LeaseHolder(**entry["process"])
    return process.is_gone() if process.machine == LeaseHolder.here().machine else None


def unmet(*conditions: tuple[bool, str]) -> list[str]:
    """Returns the messages of the conditions that do not hold."""
    return [message for holds, message in conditions if not holds]


def kill_stopped_processes(evidence: Evidence) -> None:
    """Kills the processes of this machine that a hook has stopped (SIGSTOP), by the entries with `stopped`."""
    for entry in evidence.all().values():
        if entry.get("stopped") and is_gone(entry) is False:
            with suppress(ProcessLookupError):
                os.kill(entry["process"]["pid"], signal.SIGKILL)
