"""Parameter servers without Ray: the real workers, servers and coordinator in one thread; a test chooses the order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ray_app.task.image import ImageClassification
from ray_app.testing import cache_windows
from ray_app.train.context import WorkerContext
from ray_app.train.job import Job, OpenWindows
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.strategies.parameter_server.coordinator import Coordinator, UnitScheduler
from ray_app.train.strategies.parameter_server.protocol import UnitResult
from ray_app.train.strategies.parameter_server.server import ParameterServer
from ray_app.train.strategies.parameter_server.worker import ParameterWorker
from tests.support.local_world import CPU, make_job

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

    @property
    def units(self) -> UnitScheduler:
        return self.coordinator._units

    @property
    def next_steps(self) -> list[int]:
        """The next step of each logical worker."""
        return self.units._next

    @property
    def era(self) -> int:
        return self.coordinator._served.era

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of each server."""
        return [server._state.optimizer for server in self.servers.servers]

    @property
    def results(self) -> dict[str, UnitResult]:
        """The results that the coordinator has not received, by worker."""
        return {name: worker._result for name, worker in self.workers.items() if worker._result is not None}

    @property
    def splits_variables(self) -> bool:
        return any(self.coordinator._served.layout.incomplete())

    def received(self, step: int) -> set[int]:
        """Returns the logical workers with a gradient of a step that the first server has, but has not applied."""
        sums = self.servers.servers[0]._sums
        return set(sums[step].received) if step in sums else set()

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
        assert turns is not None, f"the run does not end, at step {self.units.complete}"
        return False

    def run_until(self, complete: int) -> None:
        """Lets the workers take turns until so many steps are done."""
        while self.units.complete < complete:
            self.run(turns=1)

    def close(self) -> None:
        """Waits until the coordinator has written its records and checkpoints."""
        self.coordinator._step_log.close()

    def restart_coordinator(self) -> None:
        """Replaces the coordinator by a new one without state, and all workers by new ones of the same names."""
        self.close()
        self.coordinator = Coordinator(self.job, self.servers)
        self.workers = {name: self.worker(name) for name in self.workers}


def make_server_job(folder: Path, data: Path, **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "train__strategy": "parameter_server",
        "train__servers": 2,
        "train__epochs": 2,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 5,
        "checkpoint__keep_last": 10,
    }
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    return make_job(folder, data, logical_workers=4, batch=12, **({"task": task} | defaults | fields))
