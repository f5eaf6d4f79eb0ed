"""System metrics of every node: a thread in the driver looks at its own node and asks a tiny actor on each of the
others.

Nobody waits for it: a node that does not answer is left out of a look, one that joins gets an actor, one that dies is
forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.runlog.journal import MAX_SMALL_FILES
from ray_app.runlog.node_metrics import NodeSample, join_samples, put_sample, summarize_nodes
from ray_app.runlog.paths import RunPaths
from ray_app.watch.node_probe import Probe

logger = logging.getLogger(__name__)

_ANSWER_S, _LAST_ANSWER_S = 5.0, 1.0
_MOST_KEPT = 10_000
"""Looks that are kept while the storage refuses them."""


@dataclass
class _Node:
    """A node other than the driver's.

    Args:
        name: What its metrics are called.
        probe: The actor on it.
        asked: Its answer that has not come yet.
    """

    name: str
    probe: Any
    asked: Any = None


class NodeSampler:
    """Records how busy the nodes are until it is closed; leave it as a context manager to close it.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        every_s: Seconds between two looks.
        step: Finished steps of the run so far.
    """

    def __init__(self, paths: RunPaths, fence: int, every_s: float, step: int = 0) -> None:
        self._paths, self._fence, self._every_s = paths, fence, every_s
        self.step = step
        self._own, self._here = Probe(), ray.get_runtime_context().get_node_id()
        self._nodes: dict[str, _Node] = {}
        self._names: dict[str, str] = {}
        self._number = 0
        self._unwritten: deque[NodeSample] = deque(maxlen=_MOST_KEPT)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-sampler", daemon=True)

    def __enter__(self) -> NodeSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(_ANSWER_S + _LAST_ANSWER_S)
        for node in self._nodes.values():
            ray.kill(node.probe, no_restart=True)

    def _run(self) -> None:
        self._guarded(self._follow_nodes)
        while not self._closed.wait(self._every_s):
            self._guarded(lambda: self._look(min(_ANSWER_S, self._every_s)))
        self._guarded(lambda: self._look(_LAST_ANSWER_S))

    def _guarded(self, act: Any) -> None:
        try:
            act()
        except Exception as error:  # of the cluster or the storage; there will be another look
            logger.warning("The nodes could not be looked at, will try again: %s", error)

    def _look(self, answer_s: float) -> None:
        found = {self._names[self._here]: self._own.measure()} if self._here in self._names else {}
        found |= self._ask(answer_s)
        if found:
            self._unwritten.append(NodeSample(self.step, time.time(), summarize_nodes(found)))
        while self._unwritten:
            put_sample(self._paths, self._fence, self._number, self._unwritten[0])
            self._unwritten.popleft()
            self._number += 1
        if not self._closed.is_set():
            self._follow_nodes()
        if self._number % MAX_SMALL_FILES == 1:
            join_samples(self._paths, self._fence)

    def _ask(self, answer_s: float) -> dict[str, dict[str, float]]:
        """What the other nodes say within a while; who has not answered yet is not asked again."""
        for node in self._nodes.values():
            node.asked = node.asked or node.probe.measure.remote()
        asked = {node.asked: key for key, node in self._nodes.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=answer_s) if asked else ([], [])
        found = {}
        for answer in answered:
            node = self._nodes[asked[answer]]
            node.asked = None
            try:
                found[node.name] = ray.get(answer)
            except (
                ray.exceptions.RayError
            ):  # the actor or its node has died; if it was the actor alone, it gets another
                del self._nodes[asked[answer]]
        return found

    def _follow_nodes(self) -> None:
        """Forgets nodes that are gone, and starts an actor on new ones; it is asked at the next look, so that it has
        something to say.
        """
        alive = {
            node["NodeID"]: str(node["NodeName"] or node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]
        }
        self._nodes = {key: node for key, node in self._nodes.items() if key in alive}
        self._names = {key: name for key, name in self._names.items() if key in alive}
        for key in sorted(alive, key=lambda key: (key != self._here, key)):
            if key not in self._names:
                self._names[key] = _free_name(alive[key], set(self._names.values()))
            if key not in self._nodes and key != self._here:
                there = NodeAffinitySchedulingStrategy(key, soft=False)
                probe = ray.remote(Probe).options(num_cpus=0, scheduling_strategy=there).remote()
                self._nodes[key] = _Node(self._names[key], probe)


def _free_name(name: str, taken: set[str]) -> str:
    """The name, or, where several nodes share an address, with a number: the one that a node left is given to
    the next.
    """
    numbered = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 2)))
    return next(candidate for candidate in numbered if candidate not in taken)
