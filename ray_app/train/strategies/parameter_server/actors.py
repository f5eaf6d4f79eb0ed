"""Parameter servers and their coordinator as Ray actors, and the workers' links to them.

`ray_app.cluster.trainer` has the workers.
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
from ray.actor import ActorHandle

from ray_app.channel import connect
from ray_app.config.config import Config
from ray_app.errors import SilentActorError, unwrap_app_error
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import register_secrets
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import RendezvousStatus
from ray_app.train.strategies.parameter_server.coordinator import Coordinator
from ray_app.train.strategies.parameter_server.protocol import (
    CoordinatorReply,
    UnitResult,
    receive,
    send,
    start_server,
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
_MONITOR_S = 0.25
_CALLS = frozenset(("era", "load", "pull", "push", "norms", "apply", "state"))


class ServerActor(ParameterServer):
    """A parameter server as an actor; it serves calls over connections of its own, one at a time.

    Args:
        config: The run's configuration.
        total_steps: Steps of the run.
    """

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, total_steps)
        self._listener = start_server(self._answer)
        # One thread, because each thread that computes has further threads of its own.
        self._calls = ThreadPoolExecutor(1, "calls")
        self._failure: Exception | None = None

    def address_and_secret(self) -> tuple[tuple[str, int], str]:
        """Returns the address and the secret for connections, see `ray_app.channel`."""
        return self._listener.listen(ray.util.get_node_ip_address()), self._listener.secret

    def well(self) -> None:
        """Returns when no call is in progress.

        Raises:
            Exception: The error of the last call that failed.
        """
        self._calls.submit(lambda: None).result()
        if self._failure is not None:
            raise self._failure

    def _answer(self, called: list[Any]) -> tuple[bool, Any]:
        """Calls a method; returns whether it succeeded, and its result."""
        method, *arguments = called
        if method not in _CALLS:
            raise ValueError(f"{method!r} is not a request that a parameter server knows")
        try:
            return True, self._calls.submit(getattr(self, method), *arguments).result()
        except Exception as error:
            self._failure = error
            return False, None


class RayServers:
    """The link to the servers as actors.

    Ray restarts a lost server under the same handle; it has no state then.

    Args:
        handles: Handles of the servers.
    """

    def __init__(self, handles: tuple[ActorHandle, ...]) -> None:
        self.handles = handles
        self._lines: list[socket.socket] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return RayServers, (self.handles,)

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        """Calls a method of every server, see `Servers.call`."""
        try:
            for handle in self.handles[len(self._lines) :]:
                address, secret = ray.get(handle.address_and_secret.remote(), timeout=_CALL_S)
                self._lines.append(connect(address, secret, _CALL_S))
            for line, server_arguments in zip(self._lines, arguments, strict=True):
                send(line, (method, *server_arguments))
            answers = [receive(line) for line in self._lines]
            for handle, (succeeded, _) in zip(self.handles, answers, strict=True):
                if not succeeded:
                    ray.get(handle.well.remote(), timeout=_CALL_S)
        # An error of a server's method may also be an OSError, which must not count as a lost server.
        except ray.exceptions.RayTaskError:
            raise
        except (*_LOST, OSError) as error:
            logger.warning("A parameter server does not answer: %s", error)
            while self._lines:
                self._lines.pop().close()
            return None
        return [answer for _, answer in answers]


class CoordinatorActor(Coordinator):
    """The coordinator as an actor; it monitors workers and servers itself.

    Args:
        job: The run.
        rendezvous: The `RendezvousHandle` of the run, in a package above this one.
        servers: Names of the parameter servers.
        snapshot_actors: Handles of the snapshot actors.
        hooks: Callbacks for fault tests.
    """

    def __init__(
        self, job: Job, rendezvous: Any, servers: list[str], snapshot_actors: list[ActorHandle], hooks: Hooks
    ) -> None:
        register_secrets(job.config.to_dict())
        handles = tuple(map(ray.get_actor, servers))
        super().__init__(job, RayServers(handles), SnapshotSender(snapshot_actors), hooks)
        self._calls = {handle: (handle.well.remote(), time.monotonic()) for handle in handles}
        self._rendezvous = rendezvous
        # Each monitor has a thread, because the first may wait for a server that hangs, and for the storage.
        for monitor in (self._monitor_workers, self.monitor_servers, self._pause_watchdog):
            threading.Thread(target=self._repeat, args=(monitor,), name="watch", daemon=True).start()

    def _repeat(self, monitor: Callable[[RendezvousStatus], None]) -> None:
        pause = threading.Event()
        while not pause.wait(_MONITOR_S):
            # The rendezvous may be restarting.
            with suppress(ray.exceptions.RayError, SilentActorError):
                monitor(self._rendezvous.status())

    def _monitor_workers(self, status: RendezvousStatus) -> None:
        self.update_workers(status.live | status.draining, status.wait_reason is not None, status.stopping)

    def monitor_servers(self, status: RendezvousStatus) -> None:
        """Ends servers that hang, before the workers count as stalled; Ray restarts them.

        Packing or loading a server's whole state may take longer than a step, so the limit is longer meanwhile.
        """
        now, limit_s = time.monotonic(), _CALL_S if self.is_waiting else status.limit_s / 2
        for server, (call, since_s) in self._calls.items():
            answered = bool(ray.wait([call], timeout=0)[0])
            if not answered and now - since_s > limit_s:
                logger.warning("A parameter server has not answered for %.0f s and is ended", limit_s)
                ray.kill(server, no_restart=False)
            if answered or now - since_s > limit_s:
                self._calls[server] = server.well.remote(), now

    def _pause_watchdog(self, status: RendezvousStatus) -> None:
        """Pauses the step watchdog while all workers wait for the storage or the servers' state."""
        del status
        if self.is_waiting:
            self._rendezvous.pause_watchdog()


@dataclass(frozen=True)
class ParameterService:
    """The coordinator and the parameter servers of a run.

    Args:
        coordinator: Handle of the coordinator.
        servers: The link to the servers.
    """

    coordinator: ActorHandle
    servers: RayServers

    @property
    def actors(self) -> list[ActorHandle]:
        """The handles of all actors."""
        return [self.coordinator, *self.servers.handles]

    def ask(
        self, worker: str, done: UnitResult | None, broken_era: int | None, wait_s: float | None
    ) -> CoordinatorReply:
        """Asks the coordinator, see `Coordinator.ask`."""
        try:
            return ray.get(self.coordinator.ask.remote(worker, done, broken_era, wait_s))
        except ray.exceptions.RayTaskError as error:
            raise unwrap_app_error(error) from error


def server_names(paths: RunPaths, fence: int, servers: int) -> list[str]:
    """Returns the names of a start's server actors."""
    return [f"server-{paths.unique_name}-{fence}-{i}" for i in range(servers)]


def start_parameter_service(
    job: Job, rendezvous: Any, snapshot_actors: list[ActorHandle], hooks: Hooks
) -> ParameterService:
    """Starts the servers on nodes with the labels of workers, and the coordinator on this node, where the driver is."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    config, name = job.config, f"{job.paths.unique_name}-{job.fence}"
    server = ray.remote(ServerActor)
    server_options: dict[str, Any] = {"num_cpus": 1, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
    if labels := config.train.server_label_selector or config.scaling.label_selector:
        server_options["label_selector"] = labels
    names = server_names(job.paths, job.fence, config.train.servers)
    servers = RayServers(
        tuple(
            server.options(name=server_name, **server_options).remote(config, job.total_steps) for server_name in names
        )
    )
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    # Each worker that waits for a unit takes a thread.
    options["max_concurrency"] = config.logical_workers + 8
    coordinator_class = ray.remote(CoordinatorActor).options(name=f"parameters-{name}", **options)
    return ParameterService(coordinator_class.remote(job, rendezvous, names, snapshot_actors, hooks), servers)
