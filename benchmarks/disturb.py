"""Disturbs a run from outside, and measures its recovery from its steps: the same for every side of `recovery.py`.

Every worker writes a line for every step that it finished (`StepLog`). The process that started the run reads these
lines a few times a second (`Disturber.poll`), disturbs the run once all its workers have stepped for a while, and
reports when all disturbances are done.

The clock starts just before the disturbance (a file with its time proves that it happened) and stops when the first
step finishes that the disturbed group did not finish: a step by another number of workers, or by a new process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import torch.distributed as dist

ROWS, BATCH = 8192, 256
CHECKPOINT_EVERY = 200
"""The work of all sides: rows of the data set, rows of a step over all workers, steps between two checkpoints."""

Kind = Literal["kill", "wipe", "lose", "grow", "drain"]


@dataclass(frozen=True)
class Scenario:
    """One way to disturb a run.

    Args:
        kind: `kill`: SIGKILL of one worker. `wipe`: SIGKILL of all workers. `lose`: loss of a node. `grow`: a node is
            added. `drain`: a node announces its end, and is removed after `deadline_s`.
        workers: Minimum and maximum number of workers.
        before: Workers before the disturbance.
        stable_s: Seconds for which all workers must have stepped before a disturbance.
        times: Number of disturbances in the same run.
        nodes: CPUs of the nodes besides the head; empty: a cluster of one node.
        every_s: Seconds between two disturbances by the clock; None: as soon as the run is stable again.
        end_s: Seconds for which the run continues after the last disturbance; after kills, they begin when all workers
            step again.
        deadline_s: Deadline of `drain`.
        snapshot_every_steps: For this application, `checkpoint.snapshot_every_steps`.
        limit_s: Limit of the time of a side.
    """

    kind: Kind
    workers: tuple[int, int] = (2, 2)
    before: int = 2
    stable_s: float = 5.0
    times: int = 1
    nodes: tuple[int, ...] = ()
    every_s: float | None = None
    end_s: float = 2.0
    deadline_s: int = 60
    snapshot_every_steps: int | None = None
    limit_s: float = 300.0


@dataclass
class StepLog:
    """Notes every finished step of a worker; called with (rank, finished steps), pickled to the worker.

    Args:
        folder: Folder of the file of the worker.
    """

    folder: str
    _file: TextIO | None = field(default=None, init=False)

    def __call__(self, rank: int, step: int) -> None:
        """Notes a step."""
        if self._file is None:
            self._file = (Path(self.folder) / f"steps-{os.getpid()}").open("a")
        world = dist.group.WORLD
        workers = 1 if world is None else world.size()
        self._file.write(f"{time.time():.6f} {step} {workers} {rank}\n")
        self._file.flush()


@dataclass(frozen=True, slots=True)
class Line:
    """A step that a worker finished."""

    time_s: float
    step: int
    workers: int
    rank: int
    pid: int


class Steps:
    """The lines of all workers of a run.

    Args:
        folder: Folder of the step logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, int] = {}
        self.lines: list[Line] = []

    def poll(self) -> list[Line]:
        """Reads and returns new lines, in the order of time."""
        new = []
        for path in self._folder.glob("steps-*"):
            pid = int(path.name.partition("-")[2])
            with path.open() as file:
                file.seek(self._read.get(pid, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[pid] = self._read.get(pid, 0) + len(whole)
            for line in whole.splitlines():
                time_s, *numbers = line.split()
                new.append(Line(float(time_s), *map(int, numbers), pid))  # type: ignore[call-arg]
        new.sort(key=lambda line: line.time_s)
        self.lines += new
        return new


@dataclass
class Disturbance:
    """One disturbance and the recovery from it.

    Args:
        at_s: Time of the disturbance.
        pids: Processes that stepped before.
        victims: Processes that were killed, as far as they are known.
        next_s: Seconds to the next finished step.
        caught_up_s: Seconds to the first step that no worker had finished before.
        redone: Finished steps that were redone; a step counts as finished if a survivor has finished it, without
            survivors if any worker has.
    """

    at_s: float
    pids: list[int]
    victims: list[int]
    next_s: float | None = None
    caught_up_s: float | None = None
    redone: int | None = None


class Disturber:
    """Disturbs a run by a scenario and measures its recovery; see the module.

    Args:
        scenario: The scenario.
        folder: Folder of the step logs.
        cluster: A `ray.cluster_utils.Cluster`, if the scenario is about nodes.
    """

    def __init__(self, scenario: Scenario, folder: Path, cluster: Any | None = None) -> None:
        self.scenario = scenario
        self._folder, self._cluster = folder, cluster
        self.steps = Steps(folder)
        self.done: list[Disturbance] = []
        self.stuck = 0
        self._node: Any | None = None
        self._stable_since = float("inf")
        self._stepping_pids: set[int] = set()
        self._began_s = time.time()

    def poll(self) -> bool:
        """Reads new steps and disturbs the run when due; returns whether all is done, or the rest takes too long.

        Raises:
            TimeoutError: The run took too long to measure anything.
        """
        scenario = self.scenario
        now = time.time()
        if now - self._began_s > scenario.limit_s:
            self.stuck = len([d for d in self.done if d.next_s is None])
            self.done = [d for d in self.done if d.next_s is not None]
            if self.done:
                return True
            raise TimeoutError(
                f"{scenario.kind}: nothing measured after {scenario.limit_s:g} s, {self.stuck} disturbances without an"
                f" end"
            )
        for line in self.steps.poll():
            if line.workers != scenario.before or line.pid not in self._stepping_pids:
                self._stepping_pids.add(line.pid)
                self._stable_since = line.time_s
        if self.done and self.done[-1].next_s is None:
            self._check_recovery(self.done[-1])
            return False
        if len(self.done) == scenario.times:
            is_whole = scenario.kind not in ("kill", "wipe") or self._is_stable(now, scenario.end_s)
            return is_whole and now - self._last_s() > scenario.end_s
        if self._is_due(now):
            self.done.append(self._disturb(len(self.done)))
        return False

    def _last_s(self) -> float:
        last = self.done[-1]
        return last.at_s if self.scenario.every_s is not None else last.at_s + (last.next_s or 0.0)

    def _is_due(self, now: float) -> bool:
        if self.scenario.every_s is not None and self.done:
            return now - self.done[-1].at_s >= self.scenario.every_s
        return self._is_stable(now, self.scenario.stable_s)

    def _is_stable(self, now: float, seconds: float) -> bool:
        newest = self.steps.lines[-1].time_s if self.steps.lines else 0.0
        return now - self._stable_since >= seconds and now - newest < 1.0

    def _current(self) -> dict[int, Line]:
        """Returns the newest line of every process that currently steps."""
        newest = {line.pid: line for line in self.steps.lines[-2000:]}
        latest = max(line.time_s for line in newest.values())
        return {
            pid: line for pid, line in newest.items() if line.time_s > latest - 1.0 and Path(f"/proc/{pid}").exists()
        }

    def _disturb(self, number: int) -> Disturbance:
        """Disturbs the run; kills alternate between the last rank and rank 0."""
        current = self._current()
        ranked = sorted(current.values(), key=lambda line: line.rank)
        kind = self.scenario.kind
        if kind == "kill":
            return self._kill(current, [ranked[-1 if number % 2 == 0 else 0].pid])
        if kind == "wipe":
            return self._kill(current, [line.pid for line in ranked])
        assert self._cluster is not None
        if kind == "grow":
            handler = signal.getsignal(signal.SIGTERM)
            self._cluster.add_node(num_cpus=2)
            # Starting a node replaces the handler.
            signal.signal(signal.SIGTERM, handler)
            return self._note_disturbance(current, [])
        self._node = sorted(self._cluster.worker_nodes, key=lambda node: node.node_id)[0]
        if kind == "lose":
            disturbance = self._note_disturbance(current, [])
            self._cluster.remove_node(self._node, allow_graceful=False)
            return disturbance
        drain(self._cluster.address, self._node.node_id, self.scenario.deadline_s)
        return self._note_disturbance(current, [])

    def _note_disturbance(self, current: dict[int, Line], victims: list[int]) -> Disturbance:
        at_s = time.time()
        (self._folder / f"disturbed-{len(self.done)}").write_text(f"{at_s}")
        return Disturbance(at_s, list(current), victims)

    def _kill(self, current: dict[int, Line], pids: list[int]) -> Disturbance:
        disturbance = self._note_disturbance(current, pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return disturbance

    def _check_recovery(self, last: Disturbance) -> None:
        """Searches for the next finished step; removes a draining node at its deadline."""
        is_next = self._is_next(last)
        after = [line for line in self.steps.lines if line.time_s > last.at_s]
        next_line = next((line for line in after if is_next(line)), None)
        if next_line is None:
            if (
                self.scenario.kind == "drain"
                and self._node is not None
                and time.time() > last.at_s + self.scenario.deadline_s
            ):
                assert self._cluster is not None
                self._cluster.remove_node(self._node, allow_graceful=False)
                self._node = None
            return
        old = [
            line
            for line in self.steps.lines
            if line.pid in last.pids and line.time_s < next_line.time_s and not is_next(line)
        ]
        surviving = [line for line in old if line.pid not in last.victims]
        finished = max(line.step for line in surviving or old)
        caught_up = next((line for line in after if is_next(line) and line.step > finished), None)
        if caught_up is None:
            return
        last.next_s, last.caught_up_s = next_line.time_s - last.at_s, caught_up.time_s - last.at_s
        last.redone = max(0, finished - (next_line.step - 1))

    def _is_next(self, last: Disturbance) -> Callable[[Line], bool]:
        before = self.scenario.before
        if self.scenario.kind in ("kill", "wipe"):
            return lambda line: line.time_s > last.at_s and (line.workers != before or line.pid not in last.pids)
        if self.scenario.kind == "grow":
            return lambda line: line.time_s > last.at_s and line.workers > before
        return lambda line: line.time_s > last.at_s and line.workers < before


def start_nodes(scenario: Scenario, head_cpus: int) -> Any | None:
    """Starts the cluster of a scenario about nodes; the driver connects to its head, which has CPUs for all but the
    training workers.
    """
    if not scenario.nodes:
        return None
    from ray.cluster_utils import Cluster

    from ray_app.cluster.ray_private import require_token

    require_token()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head_cpus, "include_dashboard": False})
    for cpus in scenario.nodes:
        cluster.add_node(num_cpus=cpus)
    return cluster


def drain(address: str, node_id: str, deadline_s: int) -> None:
    """Drains a node like `ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION`."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=address).drain_node(
        node_id, reason, "benchmark", int((time.time() + deadline_s) * 1e3)
    )
    if not accepted:
        raise RuntimeError(f"the node refuses to drain: {why}")


def goodput(lines: list[Line], disturbances: list[Disturbance], full: int) -> dict[str, float]:
    """Returns the fraction of the run's time that went into useful rows, from the first disturbance to the end of the
    last period.

    Undisturbed seconds per step are measured in the same run: wall time / steps, in every stretch in which the full
    number of workers steps, from 3 s after it is complete until the next disturbance. Steps of fewer workers have the
    same number of rows.
    """
    starts = [d.at_s for d in disturbances]
    period_s = (starts[-1] - starts[0]) / (len(starts) - 1)
    end = starts[-1] + period_s
    # The line of the worker that finished each step first.
    first = {line.step: line for line in reversed(lines)}
    first_lines = [first[step] for step in sorted(first)]
    steps, seconds = 0, 0.0
    missing = 0.0
    for low, high in zip([lines[0].time_s, *starts], [*starts, end], strict=True):
        last_incomplete_s = max(
            (line.time_s for line in lines if low < line.time_s < high and line.workers != full), default=low
        )
        complete_s = next(
            (line.time_s for line in lines if last_incomplete_s < line.time_s < high and line.workers == full), high
        )
        missing += complete_s - low if low in starts else 0.0
        stretch = [line for line in first_lines if complete_s + 3.0 < line.time_s < high]
        if stretch:
            steps += stretch[-1].step - stretch[0].step
            seconds += stretch[-1].time_s - stretch[0].time_s
    useful = [line for line in first_lines if starts[0] <= line.time_s <= end]
    fraction = (useful[-1].step - useful[0].step) * (seconds / steps) / (end - starts[0])
    return {
        "goodput": fraction,
        "step_ms": seconds / steps * 1e3,
        "period_s": period_s,
        "not_full_s": missing / len(starts),
    }
