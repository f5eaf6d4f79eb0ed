"""`LocalCluster` and `kill_worker`, with which a notebook shows that a run survives the loss of nodes and workers."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.drill.cluster import open_drill_cluster
from ray_app.driver.background import Training, Worker
from ray_app.errors import ConfigError

_POLL_INTERVAL_S = 0.1
_DEPARTURE_TIMEOUT_S = 60.0


class LocalCluster:
    """A Ray cluster on this machine to which this process connects, with nodes that can be added, drained and killed.

    One node is for the driver and the evaluator; each other node has the capacity of one worker. There is one more of
    these than there are workers, to read the data. Close the cluster, or use it as a context manager; it also ends with
    the process.

    Args:
        workers: Number of workers that fit on the cluster at first.

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
        self._nodes = self._stack.enter_context(open_drill_cluster(workers, evaluates=True))

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_node(self) -> str:
        """Adds a node with the capacity of one worker; returns its id."""
        return self._nodes.add_nodes(1)[0]

    def remove_node(self, node: str) -> None:
        """Kills a node (not the driver's) and its processes, as a power failure does; waits for its death."""
        self._nodes.check_removable(node)
        self._nodes.kill_node(node)

    def drain_node(self, node: str, deadline_s: int = 60) -> None:
        """Drains a node, as clouds do before they take a machine away; the worker on it leaves the run by itself.

        Args:
            node: Id of the node, from `add_node` or `Worker.node`.
            deadline_s: Seconds until the node goes away.

        Raises:
            ValueError: The node is the driver's, or not in this cluster.
        """
        self._nodes.drain_node(node, deadline_s)

    def close(self) -> None:
        """Ends all nodes."""
        self._stack.close()


def kill_worker(training: Training, rank: int) -> Worker:
    """Kills a worker's process with SIGKILL; returns the worker once the run has declared it lost.

    Linux kills processes in the same way when the memory runs out.

    Raises:
        ValueError: No worker has this rank now.
        TimeoutError: The run still counts the worker as its member.
    """
    workers = training.workers()
    victim = next((worker for worker in workers if worker.rank == rank), None)
    if victim is None:
        raise ValueError(
            f"No worker of rank {rank} trains now; those that do: {workers}. training.watch(workers=...) waits for"
            f" them."
        )
    on_its_node = NodeAffinitySchedulingStrategy(victim.node, soft=False)
    ray.get(ray.remote(_kill_process).options(num_cpus=0, scheduling_strategy=on_its_node).remote(victim.pid))
    deadline_s = time.monotonic() + _DEPARTURE_TIMEOUT_S
    while any(worker.id == victim.id for worker in training.workers()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"The run still counts on {victim} {_DEPARTURE_TIMEOUT_S:g} s after it was killed.")
        time.sleep(_POLL_INTERVAL_S)
    return victim


def _kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
