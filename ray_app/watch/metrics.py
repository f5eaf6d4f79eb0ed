"""Metrics of a run while it trains: its progress for Prometheus, speed and goodput, and the load of the nodes.

`RunMetrics` sets metrics of Ray, which the metrics agent on the driver's node exposes. `Speed` computes speed and
goodput of the newest steps.

`NodeSampler` records the load of every node, in a thread of the driver. The thread measures its own node, and queries a
small actor on each other node. Nothing waits for a node: a sample lacks the nodes that do not reply in time. A node
that joins gets an actor; a node that dies is removed.
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
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.runlog.history import SETTLING_S
from ray_app.runlog.journal import MAX_SMALL_FILES, StepRecord
from ray_app.runlog.node_metrics import NodeSample, join_samples, put_sample, summarize_nodes
from ray_app.runlog.paths import RunPaths
from ray_app.watch.node_probe import Probe

logger = logging.getLogger(__name__)

METRICS = {
    "steps": "Finished steps of the run",
    "rows_per_second": "Rows per second that it trains on",
    "workers": "Workers that step",
    "goodput": "Rows that counted x undisturbed time per row / time since the first step of this start",
    "restarts": "Disturbances in all starts, by cause",
    "sdc_detections": "Workers that were found to compute wrongly, in all starts",
    "evaluator_lag_seconds": "Age of the oldest checkpoint that waits for its evaluation",
}
"""Description of each metric, by its name without the prefix `ray_app_`."""
_LABELS = {"restarts": ("run", "cause")}
_REPLY_TIMEOUT_S, _LAST_REPLY_TIMEOUT_S = 5.0, 1.0
_MAX_UNWRITTEN = 10_000
"""Maximum number of samples that wait in memory while the storage does not accept them; the oldest are dropped."""


class RunMetrics:
    """The metrics of a run, labeled with its name.

    Setting a value takes microseconds and never blocks: a thread in Ray's core sends the values to the agent every ten
    seconds, if there is one. If Ray refuses a metric, that is logged once and nothing is set any more; without Ray
    nothing is set at all.
    """

    def __init__(self, run: str) -> None:
        self._run, self._gauges = run, dict[str, Gauge]()
        try:
            # Ray adds the prefix `ray_`.
            if ray.is_initialized():
                self._gauges = {
                    name: Gauge(f"app_{name}", text, _LABELS.get(name, ("run",))) for name, text in METRICS.items()
                }
        except Exception as error:
            self._disable(error)

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Sets the value of a metric; does nothing if the value is None, that is not known yet."""
        if value is None or not self._gauges:
            return
        try:
            self._gauges[name].set(value, {"run": self._run, **labels})
        except Exception as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._gauges = {}
        logger.warning("Ray takes no metrics of the run: %s: %s", type(error).__name__, error)


class Speed:
    """Computes speed and goodput of a start from its newest steps, with a few sums and without reading files.

    The goodput is that of `runlog.history`, for this start only, and the more exact the more often `look` is called.
    """

    def __init__(self, batch_rows: int) -> None:
        self._batch_rows = batch_rows
        self._first_step = self._max_workers = 0
        self._last: StepRecord | None = None
        self._last_change_s = self._idle_s = self._wall_s = self._began_s = 0.0
        self._steady, self._total = (0.0, 0), (0.0, 0)
        self.rows_per_s: float | None = None

    def look(self, record: StepRecord, now_s: float) -> None:
        """Updates the sums by the newest step; `now_s` is the time of a monotonic clock."""
        last, self._idle_s = self._last, now_s - self._last_change_s
        if last is None:
            self._first_step = record.step
            self._max_workers = record.workers
            self._began_s = record.time_s
        elif (record.step, record.generation) == (last.step, last.generation):
            # Since the last step too much time has passed for a higher speed than this.
            if self.rows_per_s is not None:
                self.rows_per_s = min(self.rows_per_s, self._batch_rows / max(1e-9, self._idle_s))
            return
        elif (record.generation, record.workers) != (last.generation, last.workers):
            self._wall_s += self._idle_s
            self._began_s = record.time_s
            if record.workers > self._max_workers:
                self._max_workers = record.workers
                self._steady = (0.0, 0)
                self._total = (0.0, 0)
        else:
            self._count_steps(record.time_s - last.time_s, record.step - last.step, last.time_s)
        self._last = record
        self._last_change_s = now_s
        self._idle_s = 0.0

    def _count_steps(self, elapsed_s: float, steps: int, since_s: float) -> None:
        """Adds steps of the same workers, with their time by the workers' clock."""
        assert self._last is not None
        self._wall_s += elapsed_s
        if elapsed_s > 0:
            self.rows_per_s = steps * self._batch_rows / elapsed_s
        if self._last.workers == self._max_workers:
            self._total = self._total[0] + elapsed_s, self._total[1] + steps
            if since_s > self._began_s + SETTLING_S:
                self._steady = self._steady[0] + elapsed_s, self._steady[1] + steps

    @property
    def goodput(self) -> float | None:
        """The goodput since the first step that was passed to `look`; None until there are enough steps."""
        undisturbed_s, steps = self._steady if self._steady[1] else self._total
        wall_s = self._wall_s + self._idle_s
        if self._last is None or not steps or wall_s <= 0:
            return None
        return max(0.0, min(1.0, (self._last.step - self._first_step) * undisturbed_s / steps / wall_s))


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
