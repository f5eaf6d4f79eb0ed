"""Hooks of the drill that disturb a run, and `Evidence`, which records each fault.

Some kill or stop processes of a run, others delay it: frozen and slow workers, slow and failing storage, and pauses.
The hooks are pickled and run in a worker, in the evaluator or in another driver. Before a hook acts it writes evidence:
a file with the node, the time and the process. A fault without its evidence does not count.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist

from ray_app.checkpoint.store import Commit
from ray_app.config.config import Config
from ray_app.driver.run import Faults, run_training
from ray_app.errors import RayAppError
from ray_app.runlog.lease import LeaseHolder
from ray_app.runlog.output import TextConsole
from ray_app.storage.files import list_tree, put_json, read_json, to_location
from ray_app.train.job import Job

MAX_GATHER_S = 20.0
"""Maximum time that workers which are to die at the same moment wait for each other."""
MAX_WAIT_S = 120.0
"""Maximum time that a worker waits at a step boundary until the drill has disturbed its node or its driver."""
_POLL_INTERVAL_S = 0.02


class DrillStopError(RayAppError):
    """Raised to end a run on purpose, so that it can be started again."""


def address_of_actor(name: str) -> tuple[str, int]:
    """Returns the address at which the rendezvous, or a parameter server, of this name listens now."""
    address, _secret = ray.get(ray.get_actor(name).address_and_secret.remote())
    return address


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


@dataclass(frozen=True)
class Freeze:
    """Stops a rank with SIGSTOP after a step; a separate process sends SIGCONT after some seconds."""

    evidence: Evidence
    name: str
    step: int
    rank: int
    seconds: float

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if (
            step == self.step
            and rank == self.rank
            and self.evidence.claim([self.name], rank=rank, step=step, seconds=self.seconds, stopped=True)
        ):
            wake = f"sleep {self.seconds:g}; kill -CONT {os.getpid()}"
            null = subprocess.DEVNULL
            subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True, stdin=null, stdout=null, stderr=null)
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Slow:
    """Makes a rank a straggler: it sleeps after each of the steps `first` to `last`.

    The evidence at the end has the seconds that it has slept. `factor` is the duration of a step with the sleep,
    divided by that without.
    """

    evidence: Evidence
    name: str
    first: int
    last: int
    rank: int
    factor: float
    _since_s: float = 0.0
    _wasted_s: float = 0.0

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank != self.rank or not self.first <= step <= self.last:
            return
        if step > self.first:
            waste_s = (self.factor - 1) * (time.monotonic() - self._since_s)
            time.sleep(waste_s)
            self._wasted_s += waste_s
        if step == self.last:
            self.evidence.put(self.name, rank=rank, step=self.first, seconds=self._wasted_s)
        self._since_s = time.monotonic()


@dataclass(frozen=True)
class SlowCommit:
    """Delays the commit of the first checkpoint at or after a step."""

    evidence: Evidence
    name: str
    step: int
    seconds: float

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit`."""
        if commit.step >= self.step and self.evidence.claim([self.name], step=commit.step, seconds=self.seconds):
            time.sleep(self.seconds)


@dataclass(frozen=True)
class RefusedCommit:
    """Makes the storage refuse the first checkpoint at or after a step, for some seconds or (None) always.

    `number` is that of the error, see `errno`.
    """

    evidence: Evidence
    name: str
    step: int
    seconds: float | None
    number: int

    def __call__(self, commit: Commit) -> None:
        """See `Hooks.before_commit`."""
        if commit.step < self.step:
            return
        self.evidence.claim([self.name], step=commit.step, seconds=self.seconds)
        entry = self.evidence.get(self.name)
        assert entry is not None
        if commit.step == entry["step"] and (self.seconds is None or time.time() < entry["time_s"] + self.seconds):
            raise OSError(self.number, f"{os.strerror(self.number)} (the drill's)")


@dataclass(frozen=True)
class WaitForEvidence:
    """Makes a rank wait after a step until the evidence `until` exists; in the next step the others wait for it."""

    evidence: Evidence
    name: str
    until: str
    step: int
    rank: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank == self.rank and self.evidence.claim([self.name], rank=rank, step=step):
            self.evidence.wait([self.until], MAX_WAIT_S)


@dataclass(frozen=True)
class ActOnWaits:
    """Acts in the driver while a rank waits for evidence, and then writes this evidence; an `Observe`.

    Args:
        evidence: Has the waits.
        acts: By the name of a wait: the name of the evidence that ends it, and the action. The action gets the entry
            of the wait and the job, and returns the facts of the evidence, or None to be called again later.
    """

    evidence: Evidence
    acts: Mapping[str, tuple[str, Callable[[dict[str, Any], Job], dict[str, Any] | None]]]

    def __call__(self, job: Job) -> None:
        """See `Observe`."""
        for name, (until, act) in self.acts.items():
            wait = self.evidence.get(name)
            if wait is None or self.evidence.has(until):
                continue
            # On an error the scenario counts as failed, but the run must go on: the evidence ends the wait.
            try:
                facts = act(wait, job)
            except Exception as error:
                self.evidence.put("trouble", error=f"{type(error).__name__}: {error}")
                facts = {}
            if facts is not None:
                self.evidence.put(until, **{"step": wait["step"]} | facts)


@dataclass(frozen=True)
class DelayPlan:
    """Pauses the run for a short time after each of some steps, so that a starting worker joins before the last step.

    Args:
        evidence: Records the pauses by step; the drill subtracts them from its measurements.
        sizes: World sizes at which the pauses end.
        limit_s: Maximum of all pauses together, in seconds.
        min_s: Minimum of all pauses together, in seconds.
    """

    evidence: Evidence
    first: int
    last: int
    sizes: range
    limit_s: float
    min_s: float = 0.0

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank != 0 or not self.first <= step <= self.last:
            return
        # Another process may have been rank 0 before; its pauses count, too.
        file = to_location(self.evidence.folder) / f"paced-{self.first}.json"
        pauses = (read_json(file) or {"pauses": {}})["pauses"]
        paused_s = sum(pauses.values())
        world = dist.group.WORLD
        size = 1 if world is None else world.size()
        if size in self.sizes and paused_s >= self.min_s:
            return
        pause_s = max(0.0, self.limit_s - paused_s) / (self.last - step + 1)
        time.sleep(pause_s)
        put_json(file, {"pauses": pauses | {str(step): pauses.get(str(step), 0.0) + pause_s}})


def make_driver_command(file: Path, config: Config, faults: Faults) -> list[str]:
    """Returns the command of another driver on this cluster, with a new file for its pickled arguments."""
    file.write_bytes(pickle.dumps((config, faults, ray.get_runtime_context().gcs_address)))
    return [sys.executable, "-m", "ray_app.drill.faults", str(file)]


def _run_driver(file: Path) -> None:
    config, faults, address = pickle.loads(file.read_bytes())
    ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    run_training(config, TextConsole(), faults)


if __name__ == "__main__":
    _run_driver(Path(sys.argv[1]))
