"""The rendezvous as an actor of Ray with real connections from this process, and what Ray's own calls would cost it:
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
from ray_app.cluster.rendezvous.server import decode_reply, encode, start_rendezvous
from ray_app.train.membership import Heartbeat, HeartbeatReply

SECONDS, CALLS, TICK_S = 10.0, 1000, 0.05


class _Called:
    async def beat(self, beat: Heartbeat) -> HeartbeatReply:
        return HeartbeatReply(beat.generation)


def _cpu_s(actor: Any) -> Any:
    process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
    return lambda: sum(process.cpu_times()[:2])


async def _beating(workers: int, address: tuple[str, int], secret: str, cpu_s: Any) -> dict[str, float]:
    writers: list[Any] = [None] * workers
    formed, period_s = set[int](), 0.0
    began = cpu_s()

    def beat(i: int, **fields: Any) -> bytes:
        return pack_frame(encode(Heartbeat(f"{i:032x}", f"{i // 8:056x}", f"10.0.0.{i // 8}", 40000, i, **fields)))

    async def work(i: int) -> None:
        nonlocal period_s
        reader, writers[i] = await asyncio.open_connection(*address, limit=1 << 22)
        writers[i].write(secret.encode() + beat(i, wait_number=1))
        frames = FrameReader()
        while data := await reader.read(1 << 16):
            for orders in map(decode_reply, frames.feed(data)):
                period_s = max(period_s, orders.period_s)
                if orders.formed is not None:
                    formed.add(i)

    tasks = [asyncio.create_task(work(i)) for i in range(workers)]
    while len(formed) < workers:
        await asyncio.sleep(TICK_S)
    forming, began, began_s, sent, due, i = cpu_s() - began, cpu_s(), time.monotonic(), 0, 0.0, 0
    while time.monotonic() - began_s < SECONDS:
        due += workers / period_s * TICK_S
        while due >= 1:
            writers[i].write(beat(i, generation=1, rank=i, phase="compute"))
            due, sent, i = due - 1, sent + 1, (i + 1) % workers
        await asyncio.sleep(TICK_S)
    seconds = time.monotonic() - began_s
    found = {"actor: forming, s of CPU": forming, "actor: rendezvous, % of a core": 100 * (cpu_s() - began) / seconds}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found | {"actor: us per sign of life": 1e4 * found["actor: rendezvous, % of a core"] * seconds / sent}


def as_actor(workers: int) -> dict[str, float]:
    """CPU of the actor's process that forms a generation and hears signs of life, and that of a call by Ray instead of
    each.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        actor = start_rendezvous("rendezvous-scale", 30.0, None)
        address, secret = ray.get(actor.address_and_secret.remote())
        ray.get(actor.set_expected.remote(workers))
        found = asyncio.run(_beating(workers, address, secret, _cpu_s(actor)))
        called: Any = ray.remote(_Called).options(num_cpus=0, max_concurrency=1000).remote()
        cpu_s, beat = _cpu_s(called), Heartbeat("w", "n", "10.0.0.1", 40000)
        ray.get([called.beat.remote(beat) for _ in range(100)])
        began = cpu_s()
        for _ in range(CALLS // 100):
            ray.get([called.beat.remote(beat) for _ in range(100)])
        return found | {"actor: us of a call by Ray": 1e6 * (cpu_s() - began) / CALLS}
    finally:
        ray.shutdown()
