"""A run with parameter servers that loses workers, servers and coordinators repeatedly, at moments drawn from a seed.

Its workers, servers and coordinator are the real ones in one thread, so that a moment is a line of the code: before a
call of the servers, and when only the first server has executed it. A lost process loses what it has not sent yet, and
a new one replaces it.
"""

import random
from collections import Counter
from typing import Any

from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.strategies.parameter_server.coordinator import Coordinator
from ray_app.train.strategies.parameter_server.protocol import CoordinatorReply
from ray_app.train.strategies.parameter_server.worker import ParameterWorker
from tests.support.local_world import CPU
from tests.support.server_world import LocalServers, ServerWorld

_CALLS = {"worker": ("pull", "push"), "coordinator": ("norms", "apply", "state", "load")}
MOMENTS = {
    "worker": (
        "data",
        "compute",
        "pushed",
        "answered",
        *(f"{half}{call}" for call in _CALLS["worker"] for half in ("", "half ")),
    ),
    "coordinator": ("asked", *(f"{half}{call}" for call in _CALLS["coordinator"] for half in ("", "half "))),
    "server": tuple(f"{half}{call}" for calls in _CALLS.values() for call in calls for half in ("", "half ")),
}
"""The moments at which a process can be lost, by its role."""
_RARE = ("state", "load")


class _LostError(BaseException):
    """The process that executes this line is lost."""


class _Servers(LocalServers):
    """Servers that report the moments of their calls."""

    def __init__(self, job: Job, on_moment: Any) -> None:
        super().__init__(job)
        self._on_moment = on_moment

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        self._on_moment(method)
        results = []
        for index, args in enumerate(arguments):
            results.append(getattr(self.servers[index], method)(*args))
            if not index:
                self._on_moment(f"half {method}")
        return results


class ServedCampaign(ServerWorld):
    """A run with losses, as the module's docstring describes it.

    Args:
        seed: Seed of the losses and of the order of workers.
        job: The run.
        workers: Number of workers.

    Attributes:
        lost_processes: Number of losses by role and moment.
    """

    def __init__(self, seed: int, job: Job, workers: int) -> None:
        self._random = random.Random(seed)
        self._fault = ("", "")
        self._moments_left = 0
        self.lost_processes = Counter[tuple[str, str]]()
        super().__init__(job, workers)
        self.servers = _Servers(job, self._on_moment)
        self.coordinator = Coordinator(job, self.servers)
        self.workers = {name: self.worker(name) for name in self.workers}

    def worker(self, name: str) -> ParameterWorker:
        hooks = Hooks(
            after_step=lambda rank, step: self._on_moment("pushed"), at=lambda phase, rank, step: self._on_moment(phase)
        )
        membership = SingleProcessMembership(self.job.plan.logical_workers, lambda: False)
        return ParameterWorker(
            WorkerContext(self.job, membership, self.windows, CPU, hooks), name, self._ask, self.servers
        )

    def _ask(self, *arguments: Any) -> CoordinatorReply:
        """Asks the coordinator; if it is lost, asks its replacement, as Ray does."""
        while True:
            try:
                self._on_moment("asked")
                answer = self.coordinator.ask(*arguments)
                break
            except _LostError:
                self.coordinator._step_log.close()
                self.coordinator = Coordinator(self.job, self.servers)
        if answer.unit is not None:
            self._on_moment("answered")
        return answer

    def _on_moment(self, moment: str) -> None:
        role, fault_moment = self._fault
        if moment != fault_moment:
            return
        self._moments_left -= 1
        if self._moments_left:
            return
        self.lost_processes[self._fault] += 1
        self._fault = ("", "")
        if role != "server":
            raise _LostError
        self.servers.lose(self._random.randrange(len(self.servers.servers)))

    def run_with_losses(self, faults: int) -> None:
        """Trains to the end, with at most `faults` losses."""
        is_over = False
        while not is_over:
            if not self._fault[0] and self.lost_processes.total() < faults:
                role = self._random.choice(list(MOMENTS))
                self._fault = role, self._random.choice(MOMENTS[role])
                is_rare = self._fault[1].endswith(_RARE)
                self._moments_left = 1 if is_rare else self._random.randint(1, 12)
            name = self._random.choice(list(self.workers))
            try:
                is_over = not self.turn(name)
            except _LostError:
                self.kill(name)
                self.add()


def run_served_campaign(job: Job, seed: int, workers: int, faults: int) -> Counter[tuple[str, str]]:
    """Trains a job; returns the number of losses by role and moment."""
    campaign = ServedCampaign(seed, job, workers)
    campaign.run_with_losses(faults)
    return campaign.lost_processes
