"""A run whose workers are killed again and again, at moments that a seed chooses: the real loop, real processes and
SIGKILL, no Ray.

A worker is forked from a process that has imported everything, so its death and its successor cost little. Who is there
forms the next generation, in any order of ranks; a successor comes at once, or while the others step, who then make
room for it. Every death is told by the worker in its last moment, with where it was, and proved by how its process
ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.reduction.base import World
from ray_app.testing import cache_windows
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.loop import train
from ray_app.train.membership import Flags, GenerationInfo
from tests.support.local_world import CPU, LocalMembership

PHASES = ("forming", "data", "compute", "reduction", "stepped", "committing", "any moment")
_SILENCE_S = 120.0


@dataclass(frozen=True)
class Fault:
    """A death.

    Args:
        phase: What the worker is doing.
        times: At which time that it does that in this generation, from 1.
    """

    phase: str
    times: int


DILOCO = {"train__local_steps": 3, "train__outer_lr": 0.7, "train__outer_momentum": 0.9}


class Death:
    """Waits in a worker for the moment of a fault."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._fault, self._left = pipe, Fault("", 0), 0

    def arm(self, fault: Fault | None) -> None:
        self._fault = fault or Fault("", 0)
        self._left = self._fault.times
        if self._fault.phase == "any moment":
            threading.Timer(0.004 * self._left, self._die, (self._fault,)).start()

    def met(self, phase: str) -> None:
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
            self.met(phase)

        def after_step(rank: int, step: int) -> None:
            self.met("stepped")

        def before_commit(commit: Commit) -> None:
            self.met("committing")

        return Hooks(after_step, before_commit, at)


class PipedMembership(LocalMembership):
    """The membership of a worker of a campaign, which asks it who steps together."""

    recovers = True

    def __init__(self, pipe: Connection, folder: Path, logical_workers: int, death: Death) -> None:
        super().__init__(World(0, 1, logical_workers), folder)
        self._pipe, self._folder, self._death, self._number = pipe, folder, death, 0

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`."""
        self._death.arm(None)
        self._pipe.send(("waits", step))
        kind = ""
        while kind != "formed":
            kind, *said = self._pipe.recv()
        self._number, rank, size, fault = said
        self._world = World(rank, size, self._world.logical_workers)
        self._store = self._folder / str(self._number)
        with super().generation(step, lost) as (world, formed):
            self._death.arm(fault)
            yield world, replace(formed, number=self._number)

    def flags(self) -> Flags:
        """See `Membership.flags`."""
        asked = Flags(0)
        while self._pipe.poll():
            _, number = self._pipe.recv()
            asked |= Flags.REFORM if number == self._number else Flags(0)
        return asked


def _work(pipe: Connection, folder: Path, job: Job, windows: OpenWindows, device: torch.device) -> None:
    death = Death(pipe)
    try:
        train(job, PipedMembership(pipe, folder, job.plan.logical_workers, death), windows, device, death.hooks)
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
    """See the module.

    Args:
        folder: For the files that process groups meet at.
        seed: Of what happens.
        job: The run.
        workers: Most of them.
        windows: Where the data comes from.
        device: Where all of them compute.

    Attributes:
        fired: How many deaths there were in which phase.
        story: What happened, for a failing test.
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
        self._folder, self._job, self._most, self._windows, self._device = folder, job, workers, windows, device
        self._random = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.campaign", "ray_app.task.image", "torchmetrics"])
        self._live: list[_Worker] = []
        self._number = self._barren = 0
        self._newest = -1  # and for how many generations in a row nobody came further
        self.fired = Counter[str]()
        self.story = [f"seed {seed}"]

    def run(self, faults: int) -> None:
        """Trains to the end, with at most so many deaths.

        Raises:
            AssertionError: A worker failed, or nothing happens any more; the message is the story.
        """
        try:
            while not self._is_over():
                if not self._live:
                    self._start(self._most)
                self._hear()
                if self._live and all(w.state == "waits" for w in self._live):
                    self._form(faults - self.fired.total())
        finally:
            for worker in self._live:
                worker.process.kill()

    def _is_over(self) -> bool:
        commits = CheckpointStore(self._job.paths).commits() if not self._live else []
        return bool(commits) and commits[-1].step == self._job.total_steps

    def _start(self, most: int) -> None:
        for _ in range(most - len(self._live)):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_work, args=(theirs, self._folder, self._job, self._windows, self._device), daemon=True
            )
            process.start()
            theirs.close()
            self._live.append(_Worker(process, ours))

    def _hear(self) -> None:
        heard = wait([w.pipe for w in self._live], _SILENCE_S)
        if not heard:
            self._fail("nothing happens any more: " + ", ".join(f"{w.state} at {w.step}" for w in self._live))
        for worker in list(self._live):
            if worker.pipe not in heard:
                continue
            try:
                kind, said = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._bury(worker)
                continue
            if kind == "waits":
                worker.state, worker.step = "waits", said
                self._make_room(worker)
            elif kind == "failed":
                self._fail(said)
            else:
                worker.state = f"{kind} {said}"

    def _make_room(self, newcomer: _Worker) -> None:
        """Asks those who step to form the next generation with somebody who waits."""
        for worker in self._live:
            if worker.state == "steps":
                worker.pipe.send(("reform", self._number))

    def _bury(self, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        self._live.remove(worker)
        if worker.state == "done None":
            return
        kind, _, phase = worker.state.partition(" ")
        if kind != "dies" or worker.process.exitcode != -signal.SIGKILL:
            self._fail(f"a worker that {worker.state} ended with {worker.process.exitcode}")
        self.fired[phase] += 1
        self.story.append(f"  dies: {phase}")
        if self._live and self._random.random() < 0.7:
            self._start(self._most)

    def _form(self, faults: int) -> None:
        members, self._number = self._live, self._number + 1
        self._random.shuffle(members)
        newest = max(w.step for w in members)
        if newest >= 0:
            self._barren = self._barren + 1 if newest <= self._newest else 0
            self._newest = newest
        dying = min(faults, len(members), self._random.choice((1, 1, 1, 1, 1, 2, 3)))
        self.story.append(f"generation {self._number} of {len(members)} from step {newest}, {dying} are to die")
        victims = self._random.sample(range(len(members)), dying)
        for rank, worker in enumerate(members):
            worker.state = "steps"
            worker.pipe.send(
                ("formed", self._number, rank, len(members), self._fault(rank) if rank in victims else None)
            )
        if len(members) < self._most and self._random.random() < 0.7:
            self._start(self._most)

    def _fault(self, rank: int) -> Fault:
        if self._barren > 3:  # a loop that never gets on gives up
            return Fault("stepped", 7)
        phase = self._random.choice([phase for phase in PHASES if rank == 0 or phase != "committing"])
        most = {"forming": 1, "committing": 1, "any moment": 20}.get(phase, 6)
        return Fault(phase, self._random.randint(1, most))

    def _fail(self, text: str) -> None:
        raise AssertionError("\n".join([*self.story, text]))


def rows_of(job: Job) -> dict[int, Any]:
    """What rows every step had; those of a step that was done again are the same."""
    found: dict[int, Any] = {}
    metrics = job.paths.metrics
    assert isinstance(metrics, Path)
    for path in sorted(metrics.glob("*.json")):
        columns = json.loads(path.read_bytes())
        for step, rows, row_hash in zip(columns["step"], columns["rows"], columns["row_hash"], strict=True):
            assert found.setdefault(step, (rows, row_hash)) == (rows, row_hash)
    assert sorted(found) == list(range(1, job.total_steps + 1)), "a step has no record"
    return found
