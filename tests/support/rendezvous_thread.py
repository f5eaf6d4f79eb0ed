"""The real rendezvous without Ray: in a thread of the test, with its server, and real clients in other processes."""

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
import ray
import torch
import torch.distributed as dist

from ray_app.cluster.rendezvous import client
from ray_app.cluster.rendezvous.members import Member
from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.cluster.rendezvous.server import ConnectionServer
from ray_app.errors import TaskError
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.testing import RankResult, cache_windows
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import train
from ray_app.train.membership import Heartbeat
from ray_app.train.process_group import ProcessGroup, use_interface_of_host
from tests.support.device_group import OUT_OF_MEMORY, SpinningGroup

T = TypeVar("T")
SILENCE_S, LOCALHOST = 5.0, "127.0.0.1"
_CHECK_S = 0.05
RECOVERY_S = 5.0
"""Seconds within which the others have to form again after the error of a worker."""


class RendezvousThread:
    """The rendezvous and its connection server in a thread.

    Args:
        clock: The clock of the rendezvous.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rendezvous = Rendezvous(SILENCE_S, None, clock)
        self.server, self.loop = ConnectionServer(self.rendezvous), asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._calls = Listener((LOCALHOST, 0))
        threading.Thread(target=self._answer, daemon=True).start()
        address = asyncio.run_coroutine_threadsafe(self.server.listen(LOCALHOST), self.loop).result(60)
        self.remote = RemoteRendezvous(address, self.server.secret, self._calls.address)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the rendezvous' thread and returns its result."""

        async def run() -> T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def _answer(self) -> None:
        """Answers calls of the methods of the rendezvous, one after the other."""
        with suppress(OSError):
            while True:
                with self._calls.accept() as connection, suppress(EOFError):
                    name, arguments = connection.recv()
                    connection.send(self.call(getattr(self.rendezvous, name), *arguments))

    def member(self, worker: str) -> Member | None:
        """Returns a worker's entry in the rendezvous."""
        return self.rendezvous._members.get(worker)

    def lost(self) -> list[str]:
        """Returns the workers that are declared lost."""
        return list(self.call(self.rendezvous.status).lost_for_s)

    def close(self) -> None:
        """Ends the threads."""
        self._calls.close()
        self.loop.call_soon_threadsafe(self.server.close)
        self.loop.call_soon_threadsafe(self.loop.stop)


def start_rendezvous(workers: int) -> RendezvousThread:
    """Starts a rendezvous with the time of this machine, which knows all workers and checks them as its actor does."""
    thread = RendezvousThread(time.monotonic)
    thread.rendezvous._started_s -= 2 * SILENCE_S
    thread.call(thread.rendezvous.set_expected, workers)

    def check() -> None:
        thread.rendezvous.check_liveness(time.monotonic())
        thread.loop.call_later(_CHECK_S, check)

    thread.loop.call_soon_threadsafe(check)
    return thread


@dataclass(frozen=True)
class RemoteRendezvous:
    """The handle of a rendezvous in another process, with the methods that a client calls, see `RendezvousHandle`.

    Args:
        address: Address of the server.
        secret: The secret of its connections.
        calls: Address for calls of methods.
    """

    address: tuple[str, int]
    secret: str
    calls: Any

    def address_and_secret(self) -> tuple[tuple[str, int], str]:
        return self.address, self.secret

    def report_exit(self, heartbeat: Heartbeat, over: bool) -> None:
        with Client(self.calls) as connection:
            connection.send(("report_exit", (heartbeat, over)))
            connection.recv()


def use_without_ray(patch: pytest.MonkeyPatch, worker: str) -> None:
    """Lets the clients of this process run without Ray, as a worker with this id."""
    context = SimpleNamespace(get_actor_id=lambda: worker, get_node_id=lambda: "node")
    util = SimpleNamespace(get_node_ip_address=lambda: LOCALHOST)
    stub = SimpleNamespace(get_runtime_context=lambda: context, util=util, exceptions=ray.exceptions)
    patch.setattr(client, "ray", stub)
    use_interface_of_host(LOCALHOST)


def train_at_rendezvous(
    rank: int, store: Path, job: Job, remote: RemoteRendezvous, backend: str, device_index: int | None, hooks: Hooks
) -> str:
    """Trains in a worker as `cluster.trainer` does, and returns "done".

    Args:
        rank: The number of the worker.
        store: Not used.
        job: What to train.
        remote: The rendezvous.
        backend: The backend of process groups.
        device_index: The first simulated device has 0; None for the CPU with an imitated group.
        hooks: Faults.
    """
    del store
    device, group_class = torch.device("cpu"), SpinningGroup
    if device_index is not None:
        import tests.device.sim  # noqa: F401
        from ray_app.devices import accelerator

        device, group_class = accelerator().device(rank + device_index), ProcessGroup
    with pytest.MonkeyPatch.context() as patch:
        use_without_ray(patch, f"worker-{rank}")
        patch.setattr(client, "ProcessGroup", group_class)
        membership = client.RendezvousClient(
            remote,
            job.plan.logical_workers,
            device,
            backend,
            RunPaths(job.run_root),
            1,
        )
        is_over = False
        try:
            is_over = train(WorkerContext(job, membership, cache_windows, device, hooks))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            membership.close(is_over)
    return "done"


@dataclass(frozen=True)
class FailOnce:
    """A hook with which rank 1 fails in its third step, once.

    Args:
        run: The run's folder; a file beside it gets the id of the process.
        fault: `memory`: a collective that a backward launches finds no memory; `mistake`: the task reads `has_mistake`.
    """

    run: str
    fault: str
    has_mistake: ClassVar[bool] = False

    @property
    def proof(self) -> Path:
        """The file with the id of the process that has failed."""
        return Path(f"{self.run}-proof")

    def __call__(self, phase: str, rank: int, step: int) -> None:
        if (phase, rank, step) == ("compute", 1, 2) and not self.proof.exists():
            self.proof.write_text(str(os.getpid()))
            group: Any = dist.group.WORLD
            if self.fault == "memory":
                group.out_of_memory_at = group.num_collectives + 2
            FailOnce.has_mistake = self.fault == "mistake"


def check_survivors(job: Job, outcomes: list[RankResult], hook: FailOnce) -> None:
    """Asserts that two workers trained to the end, and formed again soon after the error of the third, rank 1."""
    assert [outcome.value for outcome in outcomes].count("done") == 2, [outcome.trace for outcome in outcomes]
    [failed] = (outcome for outcome in outcomes if outcome.error is not None)
    assert isinstance(failed.error, TaskError), failed.trace
    assert (OUT_OF_MEMORY if hook.fault == "memory" else "a mistake") in str(failed.error)
    _, again = read_events(job.paths, "formed")
    assert again.details["workers"] == 2
    assert again.time_s - hook.proof.stat().st_mtime < RECOVERY_S
