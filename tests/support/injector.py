"""Faults that tests inject into a run. Each one writes a file when it happens, by which a test proves that it did."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.errors import NonFiniteError
from ray_app.runlog.journal import read_events
from ray_app.runlog.lease import newest_fence
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class OneShotFault:
    """A fault that happens once.

    Args:
        proof: File that is written when it happens.
        step: Number of finished steps at which it happens.
        rank: Rank to which it happens; None: to all.
    """

    proof: str
    step: int
    rank: int | None = None

    def is_due(self, rank: int, step: int) -> bool:
        if step != self.step or (self.rank is not None and rank != self.rank):
            return False
        try:
            with Path(f"{self.proof}-{rank}").open("x") as proof:
                proof.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True

    @property
    def num_fired(self) -> int:
        """The number of processes to which it happened."""
        return len(list(Path(self.proof).parent.glob(Path(self.proof).name + "-*")))

    @property
    def is_dead(self) -> bool:
        """Whether the processes to which it happened have ended."""
        pids = [proof.read_text() for proof in Path(self.proof).parent.glob(Path(self.proof).name + "-*")]
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Kill(OneShotFault):
    """SIGKILL of a worker after a step."""

    def __call__(self, rank: int, step: int) -> None:
        if self.is_due(rank, step):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class SlowDown(OneShotFault):
    """The process with this rank at this step takes `extra_s` longer for each step from then on."""

    extra_s: float = 0.05

    def __call__(self, rank: int, step: int) -> None:
        self.is_due(rank, step)
        pid = Path(f"{self.proof}-{self.rank}")
        if step >= self.step and pid.exists() and pid.read_text() == str(os.getpid()):
            time.sleep(self.extra_s)


class RaiseNonFinite(OneShotFault):
    """An error in every worker that is not retryable: the run ends."""

    def __call__(self, rank: int, step: int) -> None:
        if self.is_due(rank, step):
            raise NonFiniteError(f"injected at step {step}")


@dataclass(frozen=True)
class KillEvaluator:
    """SIGKILL of the evaluator while it evaluates the checkpoint of a step."""

    proof: str
    step: int

    def __call__(self, commit: Commit) -> None:
        if commit.step == self.step and not Path(self.proof).exists():
            Path(self.proof).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class DelayEvaluation:
    """Delays the evaluator until training has committed a checkpoint, for at most a minute.

    Args:
        run: The run's directory.
        step: The step of the checkpoint.
    """

    run: str
    step: int

    def __call__(self, commit: Commit) -> None:
        store = CheckpointStore(RunPaths(to_location(self.run)))
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and all(c.step < self.step for c in store.commits()):
            time.sleep(0.05)


@dataclass(frozen=True)
class HoldEvaluations:
    """Delays every evaluation until a file exists, for at most two minutes."""

    file: str

    def __call__(self, commit: Commit) -> None:
        deadline_s = time.monotonic() + 120
        while not Path(self.file).exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)


@dataclass(frozen=True)
class OneShotPhaseFault:
    """A fault that happens once, when a worker begins a phase (`Hooks.at`)."""

    proof: str
    phase: str
    rank: int
    step: int

    def is_due(self, phase: str, rank: int, step: int) -> bool:
        return phase == self.phase and OneShotFault(self.proof, self.step, self.rank).is_due(rank, step)

    @property
    def num_fired(self) -> int:
        """The number of processes to which it happened."""
        return OneShotFault(self.proof, self.step).num_fired

    @property
    def is_dead(self) -> bool:
        """Whether the processes to which it happened have ended."""
        return OneShotFault(self.proof, self.step).is_dead


class KillAtPhase(OneShotPhaseFault):
    """SIGKILL of a worker."""

    def __call__(self, phase: str, rank: int, step: int) -> None:
        if self.is_due(phase, rank, step):
            os.kill(os.getpid(), signal.SIGKILL)


class Stall(OneShotPhaseFault):
    """A worker that stalls for ever, as with a stuck reader."""

    def __call__(self, phase: str, rank: int, step: int) -> None:
        if self.is_due(phase, rank, step):
            threading.Event().wait()


@dataclass(frozen=True)
class Freeze(OneShotFault):
    """SIGSTOP of a worker after a step; the proof holds its pid."""

    def __call__(self, rank: int, step: int) -> None:
        if self.is_due(rank, step):
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class DelayUntilEvent:
    """Delays each step, for at most `each_s`, until an event of the run was recorded.

    Args:
        run: The run's directory.
        kind: Kind of the event to wait for.
        details: Details that the event must have.
        after: First step to delay.
        each_s: Maximum delay of a step in seconds.
    """

    run: str
    kind: str
    details: dict[str, Any]
    after: int
    each_s: float = 1.5

    def __call__(self, rank: int, step: int) -> None:
        deadline_s = time.monotonic() + self.each_s
        while step >= self.after and not self._has_event() and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def _has_event(self) -> bool:
        events = read_events(RunPaths(to_location(self.run)), self.kind)
        return any(self.details.items() <= event.details.items() for event in events)


@dataclass(frozen=True)
class AwaitJoiningWorker:
    """Delays a step until a joining worker waits at the rendezvous, for at most three minutes.

    Args:
        run: The run's directory.
        step: The step to delay.
    """

    run: str
    step: int

    def __call__(self, rank: int, step: int) -> None:
        if step == self.step:
            paths = RunPaths(to_location(self.run))
            rendezvous = ray.get_actor(f"rendezvous-{paths.unique_name}-{newest_fence(paths)}")
            wait_until(
                lambda: ray.get(rendezvous.__ray_call__.remote(_has_joining_worker)),
                "no joining worker waited at the rendezvous",
            )


def _has_joining_worker(rendezvous: Any) -> bool:
    return any(
        member.waiting_since_s is not None and not member.heartbeat.generation
        for member in rendezvous._rendezvous._members
    )


@dataclass(frozen=True)
class RaiseOSError:
    """An error of user code after a step, each time that the step is done."""

    step: int

    def __call__(self, rank: int, step: int) -> None:
        if step == self.step:
            raise OSError("flaky")


class AllowKill:
    """Removes the proof of a fault after the first step, so that the fault can happen from then on."""

    def __init__(self, proof: str) -> None:
        self.proof = proof

    def __call__(self, rank: int, step: int) -> None:
        if step == 1:
            Path(f"{self.proof}-1").unlink(missing_ok=True)


class DelayUntilFile:
    """Delays a step until a file exists, for at most 45 s."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def __call__(self, rank: int, step: int) -> None:
        deadline_s = time.monotonic() + 45
        while step == self.step and not Path(self.path).exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)


@dataclass(frozen=True)
class KillSaving:
    """SIGKILL of the worker that is about to commit the checkpoint of a step."""

    proof: str
    step: int

    def __call__(self, commit: Commit) -> None:
        if OneShotFault(self.proof, self.step).is_due(0, commit.step):
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def num_fired(self) -> int:
        """The number of processes to which it happened."""
        return OneShotFault(self.proof, self.step).num_fired


@dataclass(frozen=True)
class KillBeforeCommit:
    """Hooks that kill rank 0, and then others, two steps after a checkpoint of which no file is written; once."""

    folder: Path
    step: int
    others: tuple[int, ...]

    @property
    def proof(self) -> Path:
        """The file that exists once rank 0 dies."""
        return self.folder / "proof"

    def before_commit(self, commit: Commit) -> None:
        if commit.step == self.step and not self.proof.exists():
            wait_until((self.folder / "stepped").exists, "rank 0 makes more steps")
            self.proof.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, rank: int, step: int) -> None:
        if (rank, step) == (0, self.step + 2):
            (self.folder / "stepped").touch()
        elif rank in self.others and step == self.step + 2:
            wait_until(self.proof.exists, "rank 0 dies")
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class HoldSteps:
    """Delays every step with a number divisible by `every` until a file of that number exists, for at most a minute.

    Args:
        folder: The folder of the files.
        every: Number of steps from one delayed step to the next.
        last: The first step that is not delayed any more.
    """

    folder: str
    every: int
    last: int

    def __call__(self, rank: int, step: int) -> None:
        deadline_s = time.monotonic() + 60
        while (
            step % self.every == 0
            and step < self.last
            and not Path(self.folder, str(step)).exists()
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.02)


class RecordNode:
    """Writes a file with the id of the node, after every step of every worker or before every evaluation."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, *args: object) -> None:
        import ray

        del args

        Path(self.folder).mkdir(parents=True, exist_ok=True)
        (Path(self.folder) / ray.get_runtime_context().get_node_id()).touch()
