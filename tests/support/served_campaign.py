"""A run with parameter servers whose workers, servers and coordinator are lost again and again, at moments that a seed
chooses.

The real ones, in one thread, so that a moment is a line of the code: before and after each call of a server, and when
only the first server has had it. Who is lost takes along what it had not told yet; another begins in its place.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray_app.train.job import Hooks, Job
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.strategies.parameter_server.coordinator import Coordinator
from ray_app.train.strategies.parameter_server.protocol import CoordinatorReply
from ray_app.train.strategies.parameter_server.worker import ParameterWorker
from tests.support.local_world import CPU
from tests.support.server_world import Here, World

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
"""Who can be lost when."""
_RARE = ("state", "load")


class _LostError(BaseException):
    """Whoever this passes through is gone."""


class _Servers(Here):
    """Servers whose calls are moments."""

    def __init__(self, job: Job, met: Any) -> None:
        super().__init__(job)
        self._met = met

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        self._met(method)
        found = []
        for place, args in enumerate(arguments):
            found.append(getattr(self.servers[place], method)(*args))
            if not place:
                self._met(f"half {method}")
        return found


class ServedCampaign(World):
    """See the module.

    Args:
        seed: Of what happens.
        job: The run.
        workers: How many.

    Attributes:
        fired: How many were lost, by who and when.
    """

    def __init__(self, seed: int, job: Job, workers: int) -> None:
        self._random, self._fault, self._left = random.Random(seed), ("", ""), 0
        self.fired = Counter[tuple[str, str]]()
        super().__init__(job, workers)
        self.servers = _Servers(job, self._met)
        self.coordinator = Coordinator(job, self.servers)
        self.workers = {name: self.worker(name) for name in self.workers}

    def worker(self, name: str) -> ParameterWorker:
        hooks = Hooks(after_step=lambda rank, step: self._met("pushed"), at=lambda phase, rank, step: self._met(phase))
        membership = SingleProcessMembership(self.job.plan.logical_workers, lambda: False)
        return ParameterWorker(self.job, name, self._ask, self.servers, membership, self.windows, CPU, hooks)

    def _ask(self, *arguments: Any) -> CoordinatorReply:
        """Asks again whoever comes in the place of a coordinator that is lost, as Ray does."""
        while True:
            try:
                self._met("asked")
                answer = self.coordinator.ask(*arguments)
                break
            except _LostError:
                self.coordinator._step_log.close()
                self.coordinator = Coordinator(self.job, self.servers)
        if answer.unit is not None:
            self._met("answered")
        return answer

    def _met(self, moment: str) -> None:
        who, when = self._fault
        if moment != when:
            return
        self._left -= 1
        if self._left:
            return
        self.fired[self._fault] += 1
        self._fault = ("", "")
        if who != "server":
            raise _LostError
        self.servers.lose(self._random.randrange(len(self.servers.servers)))

    def disturb(self, faults: int) -> None:
        """Trains to the end, with at most so many losses."""
        is_over = False
        while not is_over:
            if not self._fault[0] and self.fired.total() < faults:
                who = self._random.choice(list(MOMENTS))
                self._fault = who, self._random.choice(MOMENTS[who])
                is_rare = self._fault[1].endswith(_RARE)
                self._left = 1 if is_rare else self._random.randint(1, 12)
            name = self._random.choice(list(self.workers))
            try:
                is_over = not self.turn(name)
            except _LostError:
                self.kill(name)
                self.add()


def served(job: Job, seed: int, workers: int, faults: int) -> Counter[tuple[str, str]]:
    """Trains a job; returns who was lost, and when."""
    campaign = ServedCampaign(seed, job, workers)
    campaign.disturb(faults)
    return campaign.fired
