"""A small Ray cluster on this machine with nodes that can be killed, added and drained.

Each node is a raylet. Each node except the head has one logical CPU. `DrillCluster` is the cluster of a drill. With
`LocalCluster` and `kill_worker` a notebook shows that a run survives the loss of nodes and workers.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.cluster.ray_private import on_loopback, private_files, quiet_cluster_start, require_token, search_path
from ray_app.driver.background import Training, Worker
from ray_app.errors import ConfigError
from ray_app.process import set_variables
from ray_app.runlog.lease import LeaseHolder

_NODE_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.1
_DEPARTURE_TIMEOUT_S = 60.0
_HEALTH = {"health_check_initial_delay_ms": 2000, "health_check_period_ms": 1000, "health_check_timeout_ms": 2000}


class DrillCluster:
    """The cluster that the drill starts.

    The head has the capacity of the evaluator (if any) only, so that every worker is on a node that can be killed. Its
    GCS stores the state of nodes and actors in `gcs_folder`, or in memory (None).
    """

    def __init__(self, workers: int, evaluates: bool, gcs_folder: str | None = None) -> None:
        self._workers = workers
        self._evaluates = evaluates
        self._gcs_folder = gcs_folder
        self._start()

    def _start(self) -> None:
        memory = max(100 << 20, int(0.3 * psutil.virtual_memory().total) // (self._workers + 2))
        self._options = {"object_store_memory": memory, "dashboard_agent_listen_port": 0}
        self._cluster = Cluster()
        # Ray 2.60 calls this storage of the GCS an alpha feature.
        storage = {"gcs_storage": "rocksdb", "gcs_storage_path": self._gcs_folder} if self._gcs_folder else {}
        cpus = int(self._evaluates)
        self._cluster.add_node(
            num_cpus=cpus, include_dashboard=False, object_store_memory=memory, _system_config=_HEALTH | storage
        )
        self._nodes: dict[str, Any] = {}
        self._drained: set[str] = set()
        self._connect()
        self.resize(self._workers)

    def restart(self) -> None:
        """Ends all nodes with their processes, and starts the cluster again in its first size."""
        # A cluster that has started in part, or is lost, may fail to close.
        with suppress(Exception):
            self.close()
        self._start()

    def _connect(self) -> None:
        ray.init(address=self._cluster.address, logging_level=logging.WARNING, log_to_driver=False)

    @contextmanager
    def with_storage(self) -> Iterator[DrillCluster]:
        """Connects this process within the context to a new cluster of the first size with the GCS's state on disk."""
        ray.shutdown()
        try:
            with (
                tempfile.TemporaryDirectory(prefix="ray-app-drill-") as folder,
                closing(DrillCluster(self._workers, self._evaluates, folder)) as other,
            ):
                yield other
        finally:
            # The other cluster may have started in part: then this process is still connected to it.
            ray.shutdown()
            self._connect()

    def kill_gcs(self) -> LeaseHolder:
        """Kills the GCS of the head; returns the identity of that process."""
        process = LeaseHolder.of(self._gcs)
        self._cluster.head_node.kill_gcs_server()
        return process

    def start_gcs(self) -> LeaseHolder:
        """Starts a new GCS at the address of the last one; returns its process once all nodes have reported to it."""
        self._cluster.head_node.start_gcs_server()
        _wait_until(list(self._nodes), alive=True)
        return LeaseHolder.of(self._gcs)

    @property
    def _gcs(self) -> int:
        """The process id of the head's GCS."""
        return int(self._cluster.head_node.all_processes["gcs_server"][0].process.pid)

    def resize(self, workers: int) -> None:
        """Kills dead and drained nodes; adds or kills others to one for each worker, and one for a reading task."""
        alive = _alive_nodes()
        for node in [n for n in self._nodes if n not in alive or n in self._drained]:
            self.kill_node(node)
        for node in list(self._nodes)[workers + 1 :]:
            self.kill_node(node)
        self.add_nodes(workers + 1 - len(self._nodes))

    def add_nodes(self, count: int) -> list[str]:
        """Adds nodes with the capacity of one worker each; returns their ids when they are alive."""
        added = []
        for _ in range(count):
            node = self._cluster.add_node(num_cpus=1, **self._options)
            self._nodes[node.node_id] = node
            added.append(node.node_id)
        _wait_until(added, alive=True)
        return added

    def check_removable(self, node: str) -> None:
        """Raises `ValueError` for the head and for a node that is not in this cluster."""
        if node not in self._nodes:
            raise ValueError(f"the node {node} is the head of the drill's cluster, or not a part of it")

    def kill_node(self, node: str) -> None:
        """Kills a node's processes; returns when the cluster has declared the node dead."""
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)
        _wait_until([node], alive=False)

    def drain_node(self, node: str, deadline_s: int) -> None:
        """Drains a node with the reason of a preemption, as clouds do before they take a machine away.

        Raises:
            ValueError: The node is the head, or not in this cluster.
            RuntimeError: Ray does not accept the request.
        """
        self.check_removable(node)
        self._drained.add(node)
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={self._cluster.address}"]
        command += [f"--node-id={node}", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=drill"]
        command += [f"--deadline-remaining-seconds={deadline_s}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ray drain-node failed: {done.stderr.strip()[-500:]}")

    def close(self) -> None:
        """Ends all nodes."""
        ray.shutdown()
        self._cluster.shutdown()


def _alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@contextmanager
def open_drill_cluster(workers: int, evaluates: bool) -> Iterator[DrillCluster]:
    """Starts the drill's own cluster and connects to it; the cluster ends with the context."""
    # Two messages of Ray tell the user nothing here: that this is the newest cluster of the machine, and that it has a
    # token.
    quiet_cluster_start()
    require_token()
    # The nodes and their workers inherit these variables.
    with (
        set_variables(
            PYTHONPATH=os.pathsep.join(search_path()), RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5", **private_files()
        ),
        on_loopback(),
        closing(DrillCluster(workers, evaluates)) as nodes,
    ):
        yield nodes


def _wait_until(nodes: list[str], alive: bool) -> None:
    deadline = time.monotonic() + _NODE_TIMEOUT_S
    while any((node in _alive_nodes()) is not alive for node in nodes):
        if time.monotonic() > deadline:
            state = "alive" if alive else "dead"
            raise TimeoutError(f"Ray did not report within {_NODE_TIMEOUT_S:g} s that the nodes {nodes} are {state}.")
        time.sleep(0.1)


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
                "This process is connected to a Ray cluster already; leave it with ray.shutdown() or"
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
            f"No worker of rank {rank} trains now; the training ranks are {workers}. training.watch(workers=...) waits"
            " for them."
        )
    on_its_node = NodeAffinitySchedulingStrategy(victim.node, soft=False)
    kill = ray.remote(lambda pid: os.kill(pid, signal.SIGKILL))
    ray.get(kill.options(num_cpus=0, scheduling_strategy=on_its_node).remote(victim.pid))
    deadline_s = time.monotonic() + _DEPARTURE_TIMEOUT_S
    while any(worker.id == victim.id for worker in training.workers()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"The run still counts on {victim} {_DEPARTURE_TIMEOUT_S:g} s after it was killed.")
        time.sleep(_POLL_INTERVAL_S)
    return victim
