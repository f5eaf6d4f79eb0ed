"""The rendezvous as an actor of Ray: connections that tell when a process ends, calls that wait, and its own restart."""

from __future__ import annotations

import asyncio
import time
import warnings
from contextlib import suppress
from typing import Any

import ray

from ray_app.cluster.rendezvous import Rendezvous
from ray_app.train.group.messages import Beat, Formed, Orders

_LOOK_S = 0.2


class _Actor(Rendezvous):
    """A rendezvous that Ray starts again when it dies; what it knew is gone then, the numbers that it gave as well."""

    def __init__(self, silence_s: float, step_timeout_s: float | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's property asks another one of Ray's that is deprecated
            again = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(silence_s, step_timeout_s, first=time.time_ns() // 10**6 if again else 1)
        self._server: asyncio.Task[asyncio.Server] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def lifeline(self) -> tuple[str, int]:
        """Where workers keep a connection open, so that the end of a process is known at once."""
        if self._server is None:
            self._server = asyncio.create_task(asyncio.start_server(self._attend, ray.util.get_node_ip_address(), 0))
            self._tasks.add(asyncio.create_task(self._watch()))
        return (await self._server).sockets[0].getsockname()[:2]

    async def close(self) -> None:
        """Stops watching and listening, before the actor is ended: asyncio complains of what it finds going on then."""
        if self._server is not None:
            (await self._server).close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def beat(self, beat: Beat) -> Orders:
        """See `Rendezvous.answer`."""
        return self.answer(beat)

    async def join(self, beat: Beat, lost: bool) -> Formed:
        """See `Rendezvous.enter`; waits for the next generation."""
        return await asyncio.shield(asyncio.wrap_future(self.enter(beat, lost)))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            worker = (await reader.read(64)).decode()
            with suppress(OSError):
                await reader.read()
            self.lose(worker)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(self._clock())


def start_rendezvous(name: str, silence_s: float, step_timeout_s: float | None) -> Any:
    """Starts the rendezvous actor on this node, so that it lives as long as the driver, and returns its handle."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 1000, "scheduling_strategy": here}
    return ray.remote(_Actor).options(name=name, **options).remote(silence_s, step_timeout_s)
