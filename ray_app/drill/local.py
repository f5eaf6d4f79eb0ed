"""For a person who wants to see what a run survives: a small cluster whose nodes come and go, and a worker that
dies.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from types import TracebackType

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.drill.cluster import local_nodes
from ray_app.driver.background import Training, Worker
from ray_app.errors import ConfigError

_LOOK_S = 0.1
_GONE_S = 60.0


class LocalCluster:
    """A Ray cluster on this machine, connected to: one node for the driver and the evaluator, and nodes with room for
    one worker each.

    One more node than workers leaves room for reading the data. Close it, or use it as a context manager; it ends with
    the process, too.

    Args:
        workers: Workers that there is room for at first.

    Raises:
        ConfigError: This process is connected to a cluster already.
    """

    def __init__(self, workers: int = 1) -> None:
        if ray.is_initialized():
            raise ConfigError(
                "This process is connected to a Ray cluster already; leave that with ray.shutdown() or"
                " LocalCluster.close()."
            )
        self._stack = ExitStack()
        self._nodes = self._stack.enter_context(local_nodes(workers, evaluates=True))

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_node(self) -> str:
        """Adds a node with room for one worker; returns its id."""
        return self._nodes.add(1)[0]

    def remove_node(self, node: str) -> None:
        """Kills a node with all its processes, as when a machine loses its power; returns when the cluster knows.

        Args:
            node: Its id, as `add_node` or `Worker.node` has it.

        Raises:
            ValueError: It is the driver's node, or no node of this cluster.
        """
        self._nodes.check(node)
        self._nodes.lose(node)

    def drain_node(self, node: str, deadline_s: int = 60) -> None:
        """Announces that a node is about to go away, as clouds do; the worker on it leaves by itself.

        Args:
            node: See `remove_node`.
            deadline_s: Seconds that it has.

        Raises:
            ValueError: See `remove_node`.
        """
        self._nodes.drain(node, deadline_s)

    def close(self) -> None:
        """Ends all nodes."""
        self._stack.close()


def kill_worker(training: Training, rank: int) -> Worker:
    """Kills a worker's process (SIGKILL), as Linux does when the memory runs out; returns when nobody counts on it any
    more.

    Args:
        training: The run.
        rank: Of the worker.

    Raises:
        ValueError: There is no such rank now.
        TimeoutError: It is still there.
    """
    workers = training.workers()
    found = next((worker for worker in workers if worker.rank == rank), None)
    if found is None:
        raise ValueError(
            f"No worker of rank {rank} trains now; those that do: {workers}. training.watch(workers=...) waits for"
            f" them."
        )
    there = NodeAffinitySchedulingStrategy(found.node, soft=False)
    ray.get(ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(found.pid))
    deadline_s = time.monotonic() + _GONE_S
    while any(worker.id == found.id for worker in training.workers()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"The run still counts on {found} {_GONE_S:g} s after it was killed.")
        time.sleep(_LOOK_S)
    return found


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
