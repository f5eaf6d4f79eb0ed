"""The rendezvous as a Ray actor, and the handle by which the other processes of a run call it."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Collection
from typing import Any

import ray

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.cluster.rendezvous.server import ConnectionServer
from ray_app.errors import SilentActorError
from ray_app.process import log_to_stderr
from ray_app.train.membership import Flags, Heartbeat, RendezvousStatus

logger = logging.getLogger(__name__)

_CHECK_S = 0.2
"""Seconds between two checks for silent workers and stalled generations."""


class _RendezvousActor:
    """Has the `Rendezvous`. Ray restarts it when it dies, without its members and its newest generation number."""

    def __init__(self, silence_s: float, step_timeout_s: float | None, min_workers: int) -> None:
        log_to_stderr()
        with warnings.catch_warnings():
            # This property of Ray reads another one that is deprecated, which would warn.
            warnings.simplefilter("ignore")
            is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        # The milliseconds since 1970 exceed every number that an earlier instance can have reached, since a generation
        # takes longer than a millisecond.
        first_generation = time.time_ns() // 10**6 if is_restarted else 1
        self._rendezvous = Rendezvous(
            silence_s, step_timeout_s, first_generation=first_generation, min_workers=min_workers
        )
        self._connections = ConnectionServer(self._rendezvous)
        self._listening: asyncio.Task[tuple[str, int]] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Calls a method of the rendezvous in the event loop, which also handles the heartbeats."""
        return getattr(self._rendezvous, method)(*arguments)

    async def address_and_secret(self) -> tuple[tuple[str, int], str]:
        """Returns the address for the workers' connections and the secret that a client sends first.

        The first call starts to listen and to check for silent workers. A call after one that failed tries again.
        """
        if self._listening is not None and self._listening.done() and self._listening.exception() is not None:
            self._listening = None
        if self._listening is None:
            self._listening = asyncio.create_task(self._connections.listen(ray.util.get_node_ip_address()))
            self._watching = self._watching or asyncio.create_task(self._watch())
        return await self._listening, self._connections.secret

    async def close(self) -> None:
        """Stops listening and checking; asyncio would complain about a task that runs when the actor is killed."""
        self._connections.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Checks for silent workers and stalled generations, again and again."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                self._rendezvous.check_liveness(time.monotonic())
            # Any error is retried: without this check a frozen worker would stall the others for good.
            except Exception:
                logger.exception("The workers could not be checked, trying again.")


def start_rendezvous(name: str, silence_s: float, step_timeout_s: float | None, min_workers: int = 1) -> Any:
    """Starts the actor of a `Rendezvous` on this node, so that it lives as long as the driver; returns Ray's handle."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 1000,
        "scheduling_strategy": this_node,
    }
    actor = ray.remote(_RendezvousActor).options(name=name, **options)
    return actor.remote(silence_s, step_timeout_s, min_workers)


class RendezvousHandle:
    """Calls the rendezvous actor and waits for its replies; `Rendezvous` describes the methods of the same names.

    Every method raises `SilentActorError` if the rendezvous does not reply in time.

    Args:
        actor: Ray's handle of the actor.
        timeout_s: Seconds to wait for a reply.
    """

    def __init__(self, actor: Any, timeout_s: float = 120.0) -> None:
        self._actor, self._timeout_s = actor, timeout_s

    def status(self) -> RendezvousStatus:
        """Returns the state of the members."""
        return self._call("status")

    def workers(self) -> list[Heartbeat]:
        """Returns the newest heartbeat of each worker of the current generation, by rank."""
        return self._call("workers")

    def set_expected(self, workers: int, wait_reason: str | None = None, over: bool = False) -> None:
        """Sets the number of workers that the next generation waits for."""
        self._call("set_expected", workers, wait_reason, over)

    def drain(self, draining: Collection[str]) -> None:
        """Sets the nodes of draining workers, and draining workers on other nodes."""
        self._call("drain", set(draining))

    def remove(self, workers: Collection[str]) -> None:
        """Removes workers for good."""
        self._call("remove", set(workers))

    def raise_flags(self, flags: Flags) -> None:
        """Raises flags for good."""
        self._call("raise_flags", flags)

    def report_exit(self, heartbeat: Heartbeat, over: bool) -> None:
        """Reports that the worker of a heartbeat exits, and whether because the run is over."""
        self._call("report_exit", heartbeat, over)

    def pause_watchdog(self) -> None:
        """Restarts the time limit of the step watchdog."""
        self._call("pause_watchdog")

    def address_and_secret(self) -> tuple[tuple[str, int], str]:
        """Returns the address for the workers' connections and the secret that a client sends first."""
        return self._reply(self._actor.address_and_secret.remote())

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._reply(self._actor.call.remote(method, arguments))

    def _reply(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise SilentActorError(
                f"The rendezvous has not answered for {self._timeout_s:g} s. Check the load and the open files of the"
                " driver's node, then start the same run again."
            ) from error
