"""Hooks of the drill that kill or stop processes of a run, and `Evidence`, which records each fault.

The hooks are pickled and run in a worker, in the evaluator or in another driver. Before a hook acts it writes evidence:
a file with the node, the time and the process. A fault without its evidence does not count.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from ray_app.checkpoint.store import Commit
from ray_app.config.config import Config
from ray_app.driver.run import Faults, run_training
from ray_app.errors import RayAppError
from ray_app.runlog.lease import LeaseHolder
from ray_app.storage.files import list_tree, put_json, read_json, to_location

MAX_GATHER_S = 20.0
"""Maximum time that workers which are to die at the same moment wait for each other."""
_POLL_INTERVAL_S = 0.02


class DrillStopError(RayAppError):
    """Raised to end a run on purpose, so that it can be started again."""


@dataclass(frozen=True)
class Evidence:
    """The entries of a scenario: a JSON file in a folder that all nodes see for each fault that happened."""

    folder: str

    def put(self, name: str, **facts: Any) -> bool:
        """Writes the entry of a fault that happens now, in this process; returns whether the entry is new."""
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
        entry = {"time_s": time.time(), "node": node, "process": asdict(LeaseHolder.here())}
        return put_json(to_location(self.folder) / f"{name}.json", entry | facts, if_absent=True)

    def has(self, name: str) -> bool:
        """Returns whether an entry exists."""
        return (to_location(self.folder) / f"{name}.json").exists()

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns the content of an entry; None if it does not exist."""
        entry: dict[str, Any] | None = read_json(to_location(self.folder) / f"{name}.json")
        return entry

    def all(self) -> dict[str, dict[str, Any]]:
        """Returns the contents of all entries, by name."""
        return {
            name.removesuffix(".json"): read_json(file) for name, file in list_tree(to_location(self.folder)).items()
        }

    def wait(self, names: list[str], limit_s: float) -> bool:
        """Waits until all of these entries exist; returns whether they do within the limit."""
        deadline_s = time.monotonic() + limit_s
        while not all(map(self.has, names)):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True

    def claim(self, slots: list[str], **facts: Any) -> bool:
        """Writes the first entry of several names that does not exist yet; returns whether there was one."""
        return any(not self.has(slot) and self.put(slot, **facts) for slot in slots)


@dataclass(frozen=True)
class HookChain:
    """A hook that calls several hooks, one after the other."""

    hooks: tuple[Callable[..., None], ...]

    def __call__(self, *arguments: Any) -> None:
        """Calls all hooks with these arguments."""
        for hook in self.hooks:
            hook(*arguments)


@dataclass(frozen=True)
class Kill:
    """Kills ranks with SIGKILL at the same moment, after a step; each of them writes one of the names of evidence."""

    evidence: Evidence
    names: list[str]
    step: int
    ranks: list[int]

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank in self.ranks and self.evidence.claim(self.names, rank=rank, step=step):
            self.evidence.wait(self.names, MAX_GATHER_S)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class KillAt:
    """Kills a worker with SIGKILL when it begins a phase, see `Hooks.at`."""

    phase: str
    kill: Kill

    def __call__(self, phase: str, rank: int, step: int) -> None:
        """See `Hooks.at`."""
        if phase == self.phase:
            self.kill(rank, step)


@dataclass
class KillJoiningWorker:
    """Kills a worker, which joins to replace a lost one, in its first generation after the evidence `after`."""

    evidence: Evidence
    name: str
    after: str
    _is_member: bool = False

    def __call__(self, phase: str, rank: int, step: int) -> None:
        """See `Hooks.at`."""
        if (
            not self._is_member
            and phase == "forming"
            and self.evidence.has(self.after)
            and self.evidence.claim([self.name], step=step)
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        self._is_member = True


@dataclass(frozen=True)
class KillOnCommit:
    """Kills the process that writes or evaluates the first checkpoint from a step on, with SIGKILL."""

    evidence: Evidence
    name: str
    step: int

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit` and `Faults.before_evaluation`."""
        if commit.step >= self.step and self.evidence.claim([self.name], step=commit.step):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Stop:
    """Raises an error in every worker after a step, so that the run ends."""

    evidence: Evidence
    name: str
    step: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step:
            self.evidence.put(self.name, rank=rank, step=step)
            raise DrillStopError(f"stopped by the drill at step {step}")


def make_driver_command(file: Path, config: Config, faults: Faults) -> list[str]:
    """Returns the command of another driver on this cluster, with a new file for its pickled arguments."""
    file.write_bytes(pickle.dumps((config, faults, ray.get_runtime_context().gcs_address)))
    return [sys.executable, "-m", "ray_app.drill.faults", str(file)]


def _run_driver(file: Path) -> None:
    config, faults, address = pickle.loads(file.read_bytes())
    ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    run_training(config, Console(), faults)


if __name__ == "__main__":
    _run_driver(Path(sys.argv[1]))
