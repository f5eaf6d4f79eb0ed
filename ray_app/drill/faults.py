"""What the drill does to the processes of a run. Everything here is pickled and happens in a worker, the evaluator or
another driver.

Whatever happens first leaves a file that says where, when and to which process: a fault without its proof does not
count.
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

TOGETHER_S = 20.0
"""Longest that workers which are to die together wait for each other."""
_LOOK_S = 0.02


class DrillStopError(RayAppError):
    """Ends a run on purpose, so that it can be started again."""


@dataclass(frozen=True)
class Evidence:
    """One file for each thing that happened in a scenario.

    Args:
        folder: Where they are; all nodes must see it, as they see the run.
    """

    folder: str

    def put(self, name: str, **facts: Any) -> bool:
        """Says that something happens now, and to which process; returns whether it is the first to say so."""
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
        said = {"time_s": time.time(), "node": node, "process": asdict(LeaseHolder.here())}
        return put_json(to_location(self.folder) / f"{name}.json", said | facts, if_absent=True)

    def has(self, name: str) -> bool:
        """Whether it happened."""
        return (to_location(self.folder) / f"{name}.json").exists()

    def get(self, name: str) -> dict[str, Any] | None:
        """What was said of it."""
        found: dict[str, Any] | None = read_json(to_location(self.folder) / f"{name}.json")
        return found

    def all(self) -> dict[str, dict[str, Any]]:
        """Everything that happened, by name."""
        return {
            name.removesuffix(".json"): read_json(file) for name, file in list_tree(to_location(self.folder)).items()
        }

    def wait(self, names: list[str], limit_s: float) -> bool:
        """Waits until all of it has happened; returns whether it did in time."""
        deadline_s = time.monotonic() + limit_s
        while not all(map(self.has, names)):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def claim(self, slots: list[str], **facts: Any) -> bool:
        """Takes one of several places for things that happen; returns whether there was a free one."""
        return any(not self.has(slot) and self.put(slot, **facts) for slot in slots)


@dataclass(frozen=True)
class Several:
    """Several hooks, one after the other."""

    hooks: tuple[Callable[..., None], ...]

    def __call__(self, *arguments: Any) -> None:
        """Calls all of them."""
        for hook in self.hooks:
            hook(*arguments)


@dataclass(frozen=True)
class Kill:
    """SIGKILL after a step, of all given ranks at the same moment.

    Args:
        proofs: Where it is recorded.
        names: One name of a proof for each worker that dies.
        step: Finished steps at which it happens.
        ranks: To which ranks.
    """

    proofs: Evidence
    names: list[str]
    step: int
    ranks: list[int]

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank in self.ranks and self.proofs.claim(self.names, rank=rank, step=step):
            self.proofs.wait(self.names, TOGETHER_S)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class KillAt:
    """SIGKILL when a worker begins something, see `Hooks.at`."""

    phase: str
    kill: Kill

    def __call__(self, phase: str, rank: int, step: int) -> None:
        """See `Hooks.at`."""
        if phase == self.phase:
            self.kill(rank, step)


@dataclass
class KillNewcomer:
    """SIGKILL of a worker that forms its first generation after something has happened: it comes for somebody who is
    lost.

    Args:
        proofs: Where it is recorded.
        name: Name of the proof.
        after: Name of the proof of what has happened.
    """

    proofs: Evidence
    name: str
    after: str
    _was_there: bool = False

    def __call__(self, phase: str, rank: int, step: int) -> None:
        """See `Hooks.at`."""
        if (
            not self._was_there
            and phase == "forming"
            and self.proofs.has(self.after)
            and self.proofs.claim([self.name], step=step)
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        self._was_there = True


@dataclass(frozen=True)
class KillOnCommit:
    """SIGKILL of the process that writes, or evaluates, the first checkpoint from a step on."""

    proofs: Evidence
    name: str
    step: int

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit` and `Faults.before_evaluation`."""
        if commit.step >= self.step and self.proofs.claim([self.name], step=commit.step):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Stop:
    """An error in every worker after a step, so that the run ends."""

    proofs: Evidence
    name: str
    step: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step:
            self.proofs.put(self.name, rank=rank, step=step)
            raise DrillStopError(f"stopped by the drill at step {step}")


def driver_command(file: Path, config: Config, faults: Faults) -> list[str]:
    """The command of a process of its own that runs a configuration on the cluster that this process is
    connected to.
    """
    file.write_bytes(pickle.dumps((config, faults, ray.get_runtime_context().gcs_address)))
    return [sys.executable, "-m", "ray_app.drill.faults", str(file)]


def _drive(file: Path) -> None:
    config, faults, address = pickle.loads(file.read_bytes())
    ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    run_training(config, Console(), faults)


if __name__ == "__main__":
    _drive(Path(sys.argv[1]))
