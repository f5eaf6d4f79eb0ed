"""A small cluster on this machine whose nodes can be lost, added and drained: several raylets, each a node of one
logical CPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from ray_app.cluster.ray_private import require_token, search_path
from ray_app.process import set_variables
from ray_app.runlog.lease import LeaseHolder

_SETTLE_S = 60.0
_HEALTH = {"health_check_initial_delay_ms": 2000, "health_check_period_ms": 1000, "health_check_timeout_ms": 2000}


class Nodes:
    """The nodes of the drill's own cluster. The head has room for the evaluator only, so every worker is on a node that
    can be lost.

    Args:
        workers: Workers that the cluster has room for at first.
        evaluates: Whether there is an evaluator.
        storage: Folder in which the head's GCS, the process that knows the nodes and the actors, keeps what it knows;
            None: nowhere.
    """

    def __init__(self, workers: int, evaluates: bool, storage: str | None = None) -> None:
        self._workers, self._evaluates, self._storage = workers, evaluates, storage
        self._begin()

    def _begin(self) -> None:
        memory = max(100 << 20, int(0.3 * psutil.virtual_memory().total) // (self._workers + 2))
        self._options = {"object_store_memory": memory, "dashboard_agent_listen_port": 0}
        self._cluster = Cluster()
        kept = (
            {"gcs_storage": "rocksdb", "gcs_storage_path": self._storage} if self._storage else {}
        )  # Ray 2.60 calls it an alpha
        cpus = int(self._evaluates)
        self._cluster.add_node(
            num_cpus=cpus, include_dashboard=False, object_store_memory=memory, _system_config=_HEALTH | kept
        )
        self._nodes: dict[str, Any] = {}
        self._drained: set[str] = set()
        self._connect()
        self.shape(self._workers)

    def renew(self) -> None:
        """Ends all nodes with all that runs there, and starts others in their place, as many as there were at first."""
        with suppress(Exception):  # of a cluster that was begun in part, or is lost
            self.close()
        self._begin()

    def _connect(self) -> None:
        ray.init(address=self._cluster.address, logging_level=logging.WARNING, log_to_driver=False)

    @contextmanager
    def with_storage(self) -> Iterator[Nodes]:
        """Another cluster in place of this one meanwhile, as large as this was at first, whose GCS keeps what it knows
        on disk.
        """
        ray.shutdown()
        try:
            with (
                tempfile.TemporaryDirectory(prefix="ray-app-drill-") as folder,
                closing(Nodes(self._workers, self._evaluates, folder)) as other,
            ):
                yield other
        finally:
            ray.shutdown()  # if the other one is there in part only
            self._connect()

    def lose_gcs(self) -> LeaseHolder:
        """Kills the GCS of the head; returns which process that was."""
        process = LeaseHolder.of(self._gcs)
        self._cluster.head_node.kill_gcs_server()
        return process

    def start_gcs(self) -> LeaseHolder:
        """Starts a GCS where the last one was; returns which process it is once it knows that all nodes are alive."""
        self._cluster.head_node.start_gcs_server()
        _wait_until(list(self._nodes), alive=True)
        return LeaseHolder.of(self._gcs)

    @property
    def _gcs(self) -> int:
        return int(self._cluster.head_node.all_processes["gcs_server"][0].process.pid)

    def shape(self, workers: int) -> None:
        """Makes room for so many workers and one reading task, on nodes that are sound."""
        self._forget_dead()
        for node in list(self._nodes)[workers + 1 :]:
            self.lose(node)
        self.add(workers + 1 - len(self._nodes))

    def add(self, count: int) -> list[str]:
        """Adds nodes with room for one worker each; returns their ids when they are alive."""
        added = []
        for _ in range(count):
            node = self._cluster.add_node(num_cpus=1, **self._options)
            self._nodes[node.node_id] = node
            added.append(node.node_id)
        _wait_until(added, alive=True)
        return added

    def check(self, node: str) -> None:
        """Refuses nodes that cannot be lost.

        Raises:
            ValueError: It is the head, or no node of this cluster.
        """
        if node not in self._nodes:
            raise ValueError(f"the node {node} is the head of the drill's cluster, or not a part of it")

    def lose(self, node: str) -> None:
        """Kills a node's processes; returns when the cluster knows that it is dead."""
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)
        _wait_until([node], alive=False)

    def drain(self, node: str, deadline_s: int) -> None:
        """Announces that a node is about to go away, as clouds do.

        Raises:
            ValueError: It is no node that can be lost.
            RuntimeError: Ray does not accept it.
        """
        self.check(node)
        self._drained.add(node)
        options = {
            "address": self._cluster.address,
            "node-id": node,
            "reason": "DRAIN_NODE_REASON_PREEMPTION",
            "reason-message": "drill",
        }
        options["deadline-remaining-seconds"] = str(deadline_s)
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "drain-node",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ray drain-node failed: {done.stderr.strip()[-500:]}")

    def close(self) -> None:
        """Ends all nodes."""
        ray.shutdown()
        self._cluster.shutdown()

    def _forget_dead(self) -> None:
        alive = _alive()
        for node in [n for n in self._nodes if n not in alive or n in self._drained]:
            self.lose(node)


@contextmanager
def local_nodes(workers: int, evaluates: bool) -> Iterator[Nodes]:
    """The drill's own cluster, connected to; it ends with the context."""
    logging.getLogger("ray._private.utils").setLevel(
        logging.WARNING
    )  # that it is the newest cluster of this machine is no news
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # that it has a token is no warning
    require_token()
    with set_variables(
        PYTHONPATH=os.pathsep.join(search_path()), RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5"
    ):  # for the nodes and their workers
        nodes = Nodes(workers, evaluates)
        try:
            yield nodes
        finally:
            nodes.close()


def _alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _wait_until(nodes: list[str], alive: bool) -> None:
    deadline = time.monotonic() + _SETTLE_S
    while any((node in _alive()) is not alive for node in nodes):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Ray does not say within {_SETTLE_S:g} s that the nodes {nodes} are {'alive' if alive else 'dead'}."
            )
        time.sleep(0.1)
