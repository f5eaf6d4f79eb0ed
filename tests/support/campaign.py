"""A run that loses workers repeatedly, at moments drawn from a seed: the real loop, real processes and SIGKILL, no Ray.

Workers are forked from a process that has imported all modules, so that a replacement starts quickly. The live workers
form the next generation, in a random order of ranks; a replacement starts at once, or while the others step, which then
form a new generation with it. A worker reports its death and the phase just before it, and the exit code of its process
proves the death.
"""

import json
import os
import random
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.reduction.world import World
from ray_app.testing import cache_windows, make_context
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.loop import train
from ray_app.train.membership import Flags, GenerationInfo
from tests.support.local_world import CPU, LocalMembership

PHASES = ("forming", "data", "compute", "reduction", "stepped", "committing", "any moment")
_SILENCE_S = 120.0


@dataclass(frozen=True)
class Fault:
    """The death of a worker.

    Args:
        phase: The phase in which the worker dies.
        occurrence: The occurrence of the phase in this generation, from 1.
    """

    phase: str
    occurrence: int


DILOCO = {"train__local_steps": 3, "train__outer_lr": 0.7, "train__outer_momentum": 0.9}


class FaultTrigger:
    """Kills this worker process at the moment of a fault."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._fault = Fault("", 0)
        self._left = 0

    def arm(self, fault: Fault | None) -> None:
        self._fault = fault or Fault("", 0)
        self._left = self._fault.occurrence
        if self._fault.phase == "any moment":
            threading.Timer(0.004 * self._left, self._die, (self._fault,)).start()

    def reached(self, phase: str) -> None:
        if phase == self._fault.phase:
            self._left -= 1
            if not self._left:
                self._die(self._fault)

    def _die(self, fault: Fault) -> None:
        if fault is self._fault:
            self._pipe.send(("dies", fault.phase))
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def hooks(self) -> Hooks:
        def at(phase: str, rank: int, step: int) -> None:
            self.reached(phase)

        def after_step(rank: int, step: int) -> None:
            self.reached("stepped")

        def before_commit(commit: Commit) -> None:
            self.reached("committing")

        return Hooks(after_step, before_commit, at)


class PipedMembership(LocalMembership):
    """The membership of a worker of a campaign, which decides the generations."""

    recovers = True

    def __init__(self, pipe: Connection, folder: Path, logical_workers: int, death: FaultTrigger) -> None:
        super().__init__(World(0, 1, logical_workers), folder)
        self._pipe = pipe
        self._folder = folder
        self._death = death
        self._number = 0

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`."""
        self._death.arm(None)
        self._pipe.send(("waits", step))
        kind = ""
        while kind != "formed":
            kind, *values = self._pipe.recv()
        self._number, rank, size, fault = values
        self._world = World(rank, size, self._world.logical_workers)
        self._store = self._folder / str(self._number)
        with super().generation(step, was_broken) as (world, formed):
            self._death.arm(fault)
            yield world, replace(formed, number=self._number)

    def flags(self) -> Flags:
        """See `Membership.flags`."""
        flags_ = Flags(0)
        while self._pipe.poll():
            _, number = self._pipe.recv()
            flags_ |= Flags.REFORM if number == self._number else Flags(0)
        return flags_


def _work(pipe: Connection, folder: Path, job: Job, windows: OpenWindows, device: torch.device) -> None:
    death = FaultTrigger(pipe)
    try:
        membership = PipedMembership(pipe, folder, job.plan.logical_workers, death)
        train(WorkerContext(job, membership, windows, device, death.hooks))
        death.arm(None)
        pipe.send(("done", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: Connection
    state: str = "starting"
    step: int = -1


class Campaign:
    """A run with deaths, as the module's docstring describes it.

    Args:
        folder: Folder for the stores of process groups.
        seed: Seed of the deaths.
        job: The run.
        workers: Maximum number of workers.
        windows: Opens the data.
        device: The device of all workers.

    Attributes:
        deaths: Number of deaths by phase.
        history: The history of the run, for the message of a failing test.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        job: Job,
        workers: int,
        windows: OpenWindows = cache_windows,
        device: torch.device = CPU,
    ) -> None:
        folder.mkdir()
        self._folder = folder
        self._job = job
        self._max_workers = workers
        self._windows = windows
        self._device = device
        self._random = random.Random(seed)
        self._context = make_context()
        self._live: list[_Worker] = []
        self._number = 0
        # The newest step, and the number of generations in a row that did not advance it.
        self._newest = -1
        self._num_without_progress = 0
        self.deaths = Counter[str]()
        self.history = [f"seed {seed}"]

    def run(self, faults: int) -> None:
        """Trains to the end, with at most `faults` deaths.

        Raises:
            AssertionError: A worker failed, or no worker makes progress; the message is the history.
        """
        try:
            while not self._is_over():
                if not self._live:
                    self._start(self._max_workers)
                self._receive()
                if self._live and all(w.state == "waits" for w in self._live):
                    self._form(faults - self.deaths.total())
        finally:
            for worker in self._live:
                worker.process.kill()

    def _is_over(self) -> bool:
        commits = CheckpointStore(self._job.paths).commits() if not self._live else []
        return bool(commits) and commits[-1].step == self._job.total_steps

    def _start(self, num_workers: int) -> None:
        for _ in range(num_workers - len(self._live)):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_work, args=(theirs, self._folder, self._job, self._windows, self._device), daemon=True
            )
            process.start()
            theirs.close()
            self._live.append(_Worker(process, ours))

    def _receive(self) -> None:
        ready = wait([w.pipe for w in self._live], _SILENCE_S)
        if not ready:
            self._fail("no worker makes progress: " + ", ".join(f"{w.state} at {w.step}" for w in self._live))
        for worker in list(self._live):
            if worker.pipe not in ready:
                continue
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._remove(worker)
                continue
            if kind == "waits":
                worker.state, worker.step = "waits", value
                self._request_reform()
            elif kind == "failed":
                self._fail(value)
            else:
                worker.state = f"{kind} {value}"

    def _request_reform(self) -> None:
        """Asks the stepping workers to form the next generation with the waiting ones."""
        for worker in self._live:
            if worker.state == "steps":
                # It may have died; `_receive` gets its last message and removes it.
                with suppress(BrokenPipeError):
                    worker.pipe.send(("reform", self._number))

    def _remove(self, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        self._live.remove(worker)
        if worker.state == "done None":
            return
        kind, _, phase = worker.state.partition(" ")
        if kind != "dies" or worker.process.exitcode != -signal.SIGKILL:
            self._fail(f"a worker that {worker.state} ended with {worker.process.exitcode}")
        self.deaths[phase] += 1
        self.history.append(f"  dies: {phase}")
        if self._live and self._random.random() < 0.7:
            self._start(self._max_workers)

    def _form(self, faults: int) -> None:
        members, self._number = self._live, self._number + 1
        self._random.shuffle(members)
        newest = max(w.step for w in members)
        if newest >= 0:
            self._num_without_progress = self._num_without_progress + 1 if newest <= self._newest else 0
            self._newest = newest
        dying = min(faults, len(members), self._random.choice((1, 1, 1, 1, 1, 2, 3)))
        self.history.append(f"generation {self._number} of {len(members)} from step {newest}, {dying} are to die")
        victims = self._random.sample(range(len(members)), dying)
        for rank, worker in enumerate(members):
            worker.state = "steps"
            worker.pipe.send(
                ("formed", self._number, rank, len(members), self._fault(rank) if rank in victims else None)
            )
        if len(members) < self._max_workers and self._random.random() < 0.7:
            self._start(self._max_workers)

    def _fault(self, rank: int) -> Fault:
        # The loop gives up after several generations without a new step, so this worker dies late.
        if self._num_without_progress > 3:
            return Fault("stepped", 7)
        phase = self._random.choice([phase for phase in PHASES if rank == 0 or phase != "committing"])
        max_times = {"forming": 1, "committing": 1, "any moment": 20}.get(phase, 6)
        return Fault(phase, self._random.randint(1, max_times))

    def _fail(self, text: str) -> None:
        raise AssertionError("\n".join([*self.history, text]))


def rows_of(job: Job) -> dict[int, Any]:
    """Returns the rows of every step, and asserts that a repeated step had the same rows."""
    rows_by_step: dict[int, Any] = {}
    metrics = job.paths.metrics
    assert isinstance(metrics, Path)
    for path in sorted(metrics.glob("*.json")):
        columns = json.loads(path.read_bytes())
        for step, rows, row_hash in zip(columns["step"], columns["rows"], columns["row_hash"], strict=True):
            assert rows_by_step.setdefault(step, (rows, row_hash)) == (rows, row_hash)
    assert sorted(rows_by_step) == list(range(1, job.total_steps + 1)), "a step has no record"
    return rows_by_step
