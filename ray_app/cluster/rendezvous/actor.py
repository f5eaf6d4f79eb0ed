"""The rendezvous as an actor of Ray: where workers connect to, its looks, and its own restart."""

from __future__ import annotations

import asyncio
import time
import warnings
from typing import Any

import ray

from ray_app.cluster.rendezvous.lines import Lines
from ray_app.cluster.rendezvous.rendezvous import Rendezvous

_LOOK_S = 0.2


class _Actor(Rendezvous):
    """A rendezvous that Ray starts again when it dies; what it knew is gone then, the numbers that it gave as well."""

    def __init__(self, silence_s: float, step_timeout_s: float | None, least: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's property asks another one of Ray's that is deprecated
            again = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(silence_s, step_timeout_s, first=time.time_ns() // 10**6 if again else 1, least=least)
        self._lines = Lines(self)
        self._listening: asyncio.Task[tuple[str, int]] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def lifeline(self) -> tuple[tuple[str, int], str]:
        """Where workers connect to, and what they show there, see `cluster.rendezvous.lines`."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._lines.listen(ray.util.get_node_ip_address()))
            self._watching = asyncio.create_task(self._watch())
        return await self._listening, self._lines.secret

    async def close(self) -> None:
        """Stops watching and listening, before the actor is ended: asyncio complains of what it finds going on then."""
        self._lines.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(self._clock())


def start_rendezvous(name: str, silence_s: float, step_timeout_s: float | None, least: int = 1) -> Any:
    """Starts the rendezvous actor on this node, so that it lives as long as the driver, and returns its handle."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 1000, "scheduling_strategy": here}
    return ray.remote(_Actor).options(name=name, **options).remote(silence_s, step_timeout_s, least)
