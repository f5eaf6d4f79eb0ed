"""Parameter servers without Ray: the real workers, servers and coordinator in one thread; a test chooses the order."""

import itertools
from typing import Any

import torch

from ray_app.testing import cache_windows
from ray_app.train.context import WorkerContext
from ray_app.train.job import Job, OpenWindows
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.strategies.parameter_server.coordinator import Coordinator
from ray_app.train.strategies.parameter_server.server import ParameterServer
from ray_app.train.strategies.parameter_server.worker import ParameterWorker
from tests.support.local_world import CPU

_MAX_TURNS = 1000


class LocalServers:
    """The servers in this process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.servers = [self._new() for _ in range(job.config.train.servers)]

    def _new(self) -> ParameterServer:
        return ParameterServer(self._job.config, self._job.total_steps)

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        return [getattr(server, method)(*args) for server, args in zip(self.servers, arguments, strict=True)]

    def lose(self, index: int) -> None:
        """Replaces a server by a new one without state."""
        self.servers[index] = self._new()


class ServerWorld:
    """A coordinator, its servers and its workers."""

    def __init__(
        self, job: Job, workers: int, windows: OpenWindows = cache_windows, device: torch.device = CPU
    ) -> None:
        self.job = job
        self.servers = LocalServers(job)
        self.windows = windows
        self.device = device
        self.coordinator = Coordinator(job, self.servers)
        self.workers = {str(i): self.worker(str(i)) for i in range(workers)}
        self._number = itertools.count(workers)
        self.order: list[tuple[str, int]] = []

    def worker(self, name: str) -> ParameterWorker:
        context = WorkerContext(self.job, SingleProcessMembership(4, lambda: False), self.windows, self.device)
        return ParameterWorker(context, name, self.coordinator.ask, self.servers)

    def turn(self, name: str) -> bool:
        """Lets a worker process one unit; returns whether the run continues."""
        return self.workers[name].once(0.0)

    def kill(self, name: str) -> None:
        """Removes a worker together with the results that it has not sent."""
        self.coordinator.update_workers(set(self.workers), False, False)
        del self.workers[name]
        self.coordinator.update_workers(set(self.workers), False, False)

    def add(self) -> str:
        name = str(next(self._number))
        self.workers[name] = self.worker(name)
        return name

    def run(self, turns: int | None = None) -> bool:
        """Lets the workers take turns, `turns` times or until the run is over; returns whether it is over."""
        for _ in range(_MAX_TURNS if turns is None else turns):
            if not all([self.turn(name) for name in list(self.workers)]):
                return True
        assert turns is not None, f"the run does not end, at step {self.coordinator._units.complete}"
        return False
