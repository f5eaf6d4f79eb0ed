"""The rendezvous as an actor of Ray with real connections from this process, and the cost of Ray's own calls instead:
for `scale.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from typing import Any

import psutil
import ray

from ray_app.channel import FrameReader, pack_frame
from ray_app.cluster.rendezvous.actor import RendezvousHandle, start_rendezvous
from ray_app.cluster.rendezvous.server import decode_reply, encode
from ray_app.train.membership import Heartbeat, HeartbeatReply

SECONDS, TICK_S = 10.0, 0.05
CALLS = 1000


class _RayCalls:
    async def beat(self, beat: Heartbeat) -> HeartbeatReply:
        return HeartbeatReply(beat.generation)


def _cpu_s(actor: Any) -> Any:
    process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
    return lambda: sum(process.cpu_times()[:2])


async def _measure_connections(workers: int, address: tuple[str, int], secret: str, cpu_s: Any) -> dict[str, float]:
    writers: list[Any] = [None] * workers
    formed_workers, period_s = set[int](), 0.0
    began = cpu_s()

    def beat(i: int, **fields: Any) -> bytes:
        return pack_frame(encode(Heartbeat(f"{i:032x}", f"{i // 8:056x}", f"10.0.0.{i // 8}", 40000, i, **fields)))

    async def work(i: int) -> None:
        nonlocal period_s
        reader, writers[i] = await asyncio.open_connection(*address, limit=1 << 22)
        writers[i].write(secret.encode() + beat(i, wait_number=1))
        frames = FrameReader()
        while data := await reader.read(1 << 16):
            for reply in map(decode_reply, frames.feed(data)):
                period_s = max(period_s, reply.period_s)
                if reply.formed is not None:
                    formed_workers.add(i)

    tasks = [asyncio.create_task(work(i)) for i in range(workers)]
    while len(formed_workers) < workers:
        await asyncio.sleep(TICK_S)
    forming, began = cpu_s() - began, cpu_s()
    began_s, sent = time.monotonic(), 0
    due, i = 0.0, 0
    while time.monotonic() - began_s < SECONDS:
        due += workers / period_s * TICK_S
        while due >= 1:
            writers[i].write(beat(i, generation=1, rank=i, phase="compute"))
            due -= 1
            sent, i = sent + 1, (i + 1) % workers
        await asyncio.sleep(TICK_S)
    seconds = time.monotonic() - began_s
    figures = {"actor: forming, s of CPU": forming, "actor: rendezvous, % of a core": 100 * (cpu_s() - began) / seconds}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures | {"actor: us per sign of life": 1e4 * figures["actor: rendezvous, % of a core"] * seconds / sent}


def as_actor(workers: int) -> dict[str, float]:
    """Measures CPU time of the actor's process for a generation and for heartbeats, and of a call by Ray instead of a
    heartbeat.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        actor = start_rendezvous("rendezvous-scale", 30.0, None)
        address, secret = ray.get(actor.address_and_secret.remote())
        RendezvousHandle(actor).set_expected(workers)
        figures = asyncio.run(_measure_connections(workers, address, secret, _cpu_s(actor)))
        ray_actor: Any = ray.remote(_RayCalls).options(num_cpus=0, max_concurrency=1000).remote()
        cpu_s, beat = _cpu_s(ray_actor), Heartbeat("w", "n", "10.0.0.1", 40000)
        ray.get([ray_actor.beat.remote(beat) for _ in range(100)])
        began = cpu_s()
        for _ in range(CALLS // 100):
            ray.get([ray_actor.beat.remote(beat) for _ in range(100)])
        return figures | {"actor: us of a call by Ray": 1e6 * (cpu_s() - began) / CALLS}
    finally:
        ray.shutdown()
