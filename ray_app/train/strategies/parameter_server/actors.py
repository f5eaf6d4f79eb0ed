"""Parameter servers and their coordinator as Ray actors, and how workers reach them; `ray_app.cluster.trainer` has the
workers.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from ray_app.config.config import Config
from ray_app.errors import unwrap_app_error
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import register_secrets
from ray_app.train.checkpointing.snapshots import SnapshotSender
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import RendezvousStatus
from ray_app.train.strategies.parameter_server.coordinator import Coordinator
from ray_app.train.strategies.parameter_server.protocol import (
    CoordinatorReply,
    Listener,
    UnitResult,
    connect,
    receive,
    send,
)
from ray_app.train.strategies.parameter_server.server import ParameterServer

logger = logging.getLogger(__name__)

_CALL_S = 300.0
_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.GetTimeoutError,
)
_LOOK_S = 0.25
_CALLS = frozenset(("era", "load", "pull", "push", "norms", "apply", "state"))


class ServerActor(ParameterServer):
    """A parameter server as an actor; it is called over connections of its own, one call at a time.

    Args:
        config: The run's.
        total_steps: Steps of the run.
    """

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, total_steps)
        self._listener = Listener(self._answer)
        self._calls = ThreadPoolExecutor(1, "calls")  # one thread, since each that computes has more of its own
        self._failure: Exception | None = None

    def lifeline(self) -> tuple[tuple[str, int], str]:
        """Where to connect to, and what to show there, see `Listener`."""
        return self._listener.listen(ray.util.get_node_ip_address()), self._listener.secret

    def well(self) -> None:
        """Answers once it is not in the middle of a call.

        Raises:
            Exception: What the last call that failed raised.
        """
        self._calls.submit(lambda: None).result()
        if self._failure is not None:
            raise self._failure

    def _answer(self, called: list[Any]) -> tuple[bool, Any]:
        """Whether a call succeeded, and what it returned."""
        method, *arguments = called
        if method not in _CALLS:
            raise ValueError(f"{method!r} is nothing that a parameter server is asked for")
        try:
            return True, self._calls.submit(getattr(self, method), *arguments).result()
        except Exception as error:
            self._failure = error
            return False, None


class RayServers:
    """The servers as actors. One that was lost is started again by Ray under the same handle, and holds nothing at
    first.

    Args:
        handles: Theirs.
    """

    def __init__(self, handles: tuple[Any, ...]) -> None:
        self.handles = handles
        self._lines: list[socket.socket] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return RayServers, (self.handles,)

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        """See `Servers.call`."""
        try:
            for handle in self.handles[len(self._lines) :]:
                address, secret = ray.get(handle.lifeline.remote(), timeout=_CALL_S)
                self._lines.append(connect(address, secret, _CALL_S))
            for line, given in zip(self._lines, arguments, strict=True):
                send(line, (method, *given))
            answers = [receive(line) for line in self._lines]
            for handle, (succeeded, _) in zip(self.handles, answers, strict=True):
                if not succeeded:
                    ray.get(handle.well.remote(), timeout=_CALL_S)
        except ray.exceptions.RayTaskError:  # which may be an OSError, too
            raise
        except (*_LOST, OSError) as error:
            logger.warning("A parameter server does not answer: %s", error)
            while self._lines:
                self._lines.pop().close()
            return None
        return [answer for _, answer in answers]


class CoordinatorActor(Coordinator):
    """The coordinator as an actor, which looks after workers and servers itself.

    Args:
        job: The run.
        servers: Names of the parameter servers.
        keepers: Handles of the actors that hold snapshots.
        hooks: For fault tests.
    """

    def __init__(self, job: Job, servers: list[str], keepers: list[Any], hooks: Hooks) -> None:
        register_secrets(job.config.to_dict())
        handles = tuple(map(ray.get_actor, servers))
        super().__init__(job, RayServers(handles), SnapshotSender(keepers), hooks)
        self._calls = {handle: (handle.well.remote(), time.monotonic()) for handle in handles}
        self._rendezvous = ray.get_actor(job.rendezvous)
        looks = (self._look_after_workers, self._look_after_servers, self._excuse_workers)
        for look in looks:  # the first has to wait for a server that hangs, and for the storage
            threading.Thread(target=self._watch, args=(look,), name="watch", daemon=True).start()

    def _watch(self, look: Callable[[RendezvousStatus], None]) -> None:
        pause = threading.Event()
        while not pause.wait(_LOOK_S):
            with suppress(ray.exceptions.RayError):  # the rendezvous may have been started anew
                look(ray.get(self._rendezvous.status.remote()))

    def _look_after_workers(self, seen: RendezvousStatus) -> None:
        self.keep(seen.live | seen.leaving, seen.waiting is not None, seen.stopping)

    def _look_after_servers(self, seen: RendezvousStatus) -> None:
        """Ends servers that neither die nor answer, before the workers count as stuck; Ray starts them again.

        Packing or loading all that a server holds may take longer than a step.
        """
        now, limit_s = time.monotonic(), _CALL_S if self.is_held_up else seen.limit_s / 2
        for server, (call, since_s) in self._calls.items():
            answered = bool(ray.wait([call], timeout=0)[0])
            if not answered and now - since_s > limit_s:
                logger.warning("A parameter server has not answered for %.0f s and is ended", limit_s)
                ray.kill(server, no_restart=False)
            if answered or now - since_s > limit_s:
                self._calls[server] = server.well.remote(), now

    def _excuse_workers(self, seen: RendezvousStatus) -> None:
        """However long the storage or the servers' state takes, no worker is ended for waiting for it."""
        del seen
        if self.is_held_up:
            ray.get(self._rendezvous.pause_watchdog.remote())


@dataclass(frozen=True)
class ParameterService:
    """Where the parameters of a run are.

    Args:
        coordinator: Handle of the coordinator.
        servers: The servers.
    """

    coordinator: Any
    servers: RayServers

    @property
    def actors(self) -> list[Any]:
        """Handles of all actors."""
        return [self.coordinator, *self.servers.handles]

    def ask(
        self, worker: str, done: UnitResult | None, broken_era: int | None, wait_s: float | None
    ) -> CoordinatorReply:
        """See `Coordinator.ask`."""
        try:
            return ray.get(self.coordinator.ask.remote(worker, done, broken_era, wait_s))
        except ray.exceptions.RayTaskError as error:
            raise unwrap_app_error(error) from error


def server_names(paths: RunPaths, fence: int, servers: int) -> list[str]:
    """Names of a start's servers on its cluster."""
    return [f"server-{paths.unique_name}-{fence}-{i}" for i in range(servers)]


def start_parameter_service(job: Job, keepers: list[Any], hooks: Hooks) -> ParameterService:
    """Starts servers and coordinator: the ones where labels allow, the other on this node, so that it lives as long as
    the driver.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    config, name = job.config, f"{job.paths.unique_name}-{job.fence}"
    server = ray.remote(ServerActor)
    where: dict[str, Any] = {"num_cpus": config.train.server_cpus, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
    if config.train.server_label_selector:
        where["label_selector"] = config.train.server_label_selector
    names = server_names(job.paths, job.fence, config.train.servers)
    servers = RayServers(tuple(server.options(name=each, **where).remote(config, job.total_steps) for each in names))
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    options["max_concurrency"] = config.logical_workers + 8  # who asks waits in a thread
    made = ray.remote(CoordinatorActor).options(name=f"parameters-{name}", **options)
    return ParameterService(made.remote(job, names, keepers, hooks), servers)
