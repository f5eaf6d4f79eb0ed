"""`NodeSampler` records the load of every node, in a thread of the driver.

The thread measures its own node, and queries a small actor on each other node. Nothing waits for a node: a sample
lacks the nodes that do not reply in time. A node that joins gets an actor; a node that dies is removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.runlog.journal import MAX_SMALL_FILES
from ray_app.runlog.node_metrics import NodeSample, join_samples, put_sample, summarize_nodes
from ray_app.runlog.paths import RunPaths
from ray_app.watch.node_probe import Probe

logger = logging.getLogger(__name__)

_REPLY_TIMEOUT_S, _LAST_REPLY_TIMEOUT_S = 5.0, 1.0
_MAX_UNWRITTEN = 10_000
"""Maximum number of samples that wait in memory while the storage does not accept them; the oldest are dropped."""


@dataclass
class _Node:
    """A node other than the driver's."""

    name: str
    probe: ActorHandle
    pending_reply: ray.ObjectRef | None = None


class NodeSampler:
    """Records the load of the nodes in a thread, every `every_s` seconds, within its context."""

    def __init__(self, paths: RunPaths, fence: int, every_s: float, step: int = 0) -> None:
        self._paths = paths
        self._fence = fence
        self._every_s = every_s
        self.step = step
        self._local_probe, self._local_node = Probe(), ray.get_runtime_context().get_node_id()
        self._nodes: dict[str, _Node] = {}
        self._names: dict[str, str] = {}
        self._number = 0
        self._unwritten: deque[NodeSample] = deque(maxlen=_MAX_UNWRITTEN)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-sampler", daemon=True)

    def __enter__(self) -> NodeSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(_REPLY_TIMEOUT_S + _LAST_REPLY_TIMEOUT_S)
        for node in self._nodes.values():
            ray.kill(node.probe, no_restart=True)

    def _run(self) -> None:
        self._log_errors(self._update_nodes)
        while not self._closed.wait(self._every_s):
            self._log_errors(lambda: self._record_load(min(_REPLY_TIMEOUT_S, self._every_s)))
        self._log_errors(lambda: self._record_load(_LAST_REPLY_TIMEOUT_S))

    def _log_errors(self, act: Callable[[], None]) -> None:
        """Calls a function; logs its errors, which come from the cluster or the storage and may not come again."""
        try:
            act()
        except Exception as error:
            logger.warning("The nodes could not be looked at, will try again: %s", error)

    def _record_load(self, timeout_s: float) -> None:
        """Measures all nodes and writes the sample, with those that the storage did not accept before."""
        metrics_by_node = (
            {self._names[self._local_node]: self._local_probe.measure()} if self._local_node in self._names else {}
        )
        metrics_by_node |= self._query_nodes(timeout_s)
        if metrics_by_node:
            self._unwritten.append(NodeSample(self.step, time.time(), summarize_nodes(metrics_by_node)))
        while self._unwritten:
            put_sample(self._paths, self._fence, self._number, self._unwritten[0])
            self._unwritten.popleft()
            self._number += 1
        if not self._closed.is_set():
            self._update_nodes()
        if self._number % MAX_SMALL_FILES == 1:
            join_samples(self._paths, self._fence)

    def _query_nodes(self, timeout_s: float) -> dict[str, dict[str, float]]:
        """Returns the load of the other nodes that reply in time. A node with a pending reply is not queried again."""
        for node in self._nodes.values():
            node.pending_reply = node.pending_reply or node.probe.measure.remote()
        nodes_by_reply = {node.pending_reply: key for key, node in self._nodes.items()}
        metrics_by_node: dict[str, dict[str, float]] = {}
        if not nodes_by_reply:
            return metrics_by_node
        ready, _ = ray.wait(list(nodes_by_reply), num_returns=len(nodes_by_reply), timeout=timeout_s)
        for reply in ready:
            node = self._nodes[nodes_by_reply[reply]]
            node.pending_reply = None
            try:
                metrics_by_node[node.name] = ray.get(reply)
            except ray.exceptions.RayError:
                # The actor or its node has died. If only the actor has died, the node gets a new one.
                del self._nodes[nodes_by_reply[reply]]
        return metrics_by_node

    def _update_nodes(self) -> None:
        """Removes dead nodes and starts an actor on each new one, which the next sample queries."""
        alive = {
            node["NodeID"]: str(node["NodeName"] or node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]
        }
        self._nodes = {key: node for key, node in self._nodes.items() if key in alive}
        self._names = {key: name for key, name in self._names.items() if key in alive}
        for key in sorted(alive, key=lambda key: (key != self._local_node, key)):
            if key not in self._names:
                self._names[key] = _free_name(alive[key], set(self._names.values()))
            if key not in self._nodes and key != self._local_node:
                on_the_node = NodeAffinitySchedulingStrategy(key, soft=False)
                probe = ray.remote(Probe).options(num_cpus=0, scheduling_strategy=on_the_node).remote()
                self._nodes[key] = _Node(self._names[key], probe)


def _free_name(name: str, taken: set[str]) -> str:
    """Returns the name, with a number if another node has it already; the number of a removed node is free again."""
    numbered = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 2)))
    return next(candidate for candidate in numbered if candidate not in taken)
