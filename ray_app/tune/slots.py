"""The slots of a study: processes of the cluster that stay, in which one trial after the other trains.

A slot is a Ray actor with the resources of a worker, in which a trial trains by itself. A trial with several workers is
driven by a thread of the study's process instead, and its workers take the resources of as many slots.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.actor import ActorHandle

from ray_app.cluster.ray_private import nodes_with_labels
from ray_app.cluster.resources import cluster_capacity, is_local_cluster, workers_in
from ray_app.config.config import Config
from ray_app.errors import RayAppError
from ray_app.process import keep_freed_memory, log_to_stderr
from ray_app.runlog.redaction import register_secrets
from ray_app.tune.record import TrialResult
from ray_app.tune.trials import TrialJob, run_trial

logger = logging.getLogger(__name__)

Outcome = tuple[TrialJob, TrialResult | BaseException]
"""A trial with its result, or the error with which its attempt has ended."""
_THREAD_POLL_S = 0.1


class LostSlotError(RayAppError):
    """The process of a slot has ended.

    Args:
        nodes: The nodes of the cluster when it began. If one has left the cluster, the trial is not at fault.
    """

    def __init__(self, nodes: set[str]) -> None:
        super().__init__("its process ended")
        self.nodes = nodes


class _TrialSlot:
    """The process of a slot. A Ray actor."""

    def __init__(self) -> None:
        keep_freed_memory()
        log_to_stderr()
        # It takes seconds, by which the speed of the first trial would be underrated.
        importlib.import_module("torchmetrics")

    def run(self, job: TrialJob) -> TrialResult:
        """See `run_trial`."""
        register_secrets(job.config.to_dict())
        return run_trial(job)


def count_slots(config: Config) -> int:
    """Returns how many workers the connected cluster has the resources for, at least one."""
    capacity, scaling = cluster_capacity(), config.scaling
    nodes = nodes_with_labels(capacity.nodes, scaling.label_selector)
    fitting = sum(workers_in(node["Resources"], scaling) for node in nodes)
    # A cluster that was started here declares more CPUs than the machine has.
    if is_local_cluster() and scaling.cpus_per_worker and not scaling.worker_gpus:
        fitting = min(fitting, (os.cpu_count() or 1) // scaling.cpus_per_worker)
    return max(1, int(fitting) if math.isfinite(fitting) else 1)


class Slots:
    """The slots of a study; leaving the context ends their processes.

    Args:
        config: Its section `scaling` says what a slot reserves.
        count: Number of slots; a trial with several workers takes as many.
    """

    def __init__(self, config: Config, count: int) -> None:
        scaling = config.scaling
        options: dict[str, Any] = {
            "num_cpus": scaling.cpus_per_worker,
            "num_gpus": scaling.worker_gpus,
            "max_restarts": 0,
        }
        if scaling.label_selector:
            options["label_selector"] = scaling.label_selector
        self._slot_class = ray.remote(_TrialSlot).options(**options)
        self.count = count
        self._idle = list[ActorHandle]()
        # The nodes of the cluster when each slot began.
        self._nodes = dict[ActorHandle, set[str]]()
        self._running = dict[ray.ObjectRef, tuple[TrialJob, ActorHandle]]()
        self._threads = dict[Future[TrialResult], TrialJob]()
        self._executor = ThreadPoolExecutor(max_workers=64, thread_name_prefix="trial")

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in [*self._idle, *(actor for _, actor in self._running.values())]:
            ray.kill(actor)
        self._executor.shutdown(wait=False)

    @property
    def jobs(self) -> list[TrialJob]:
        """The trials that train now."""
        return [*(job for job, _ in self._running.values()), *self._threads.values()]

    @property
    def free(self) -> int:
        """Number of slots without a trial; 0 on a cluster that has become too small."""
        return max(0, self.count - sum(job.workers or 1 for job in self.jobs))

    def start(self, job: TrialJob) -> None:
        """Starts a trial, for which there are free slots."""
        if job.workers is None:
            actor = self._idle.pop() if self._idle else self._slot_class.remote()
            self._nodes.setdefault(actor, alive_nodes())
            self._running[actor.run.remote(job)] = job, actor
            return
        # The processes of idle slots reserve what the workers need.
        while self._idle:
            ray.kill(self._idle.pop())
        self._threads[self._executor.submit(run_trial, job)] = job

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Returns the trials that have ended, after the first or after a time."""
        deadline_s, outcomes = time.monotonic() + timeout_s, list[Outcome]()
        if not self.jobs:
            time.sleep(timeout_s)
        while not outcomes and self.jobs:
            left_s = max(0.0, deadline_s - time.monotonic())
            outcomes += self._ended_threads()
            if self._running:
                poll_s = 0.0 if outcomes else min(left_s, _THREAD_POLL_S) if self._threads else left_s
                ended, _ = ray.wait(list(self._running), num_returns=1, timeout=poll_s)
                outcomes += self._ended_slots(ended)
            elif not outcomes:
                time.sleep(min(left_s, _THREAD_POLL_S))
            if time.monotonic() >= deadline_s:
                break
        return outcomes

    def _ended_threads(self) -> list[Outcome]:
        ended = [future for future in self._threads if future.done()]
        return [(self._threads.pop(future), future.exception() or future.result()) for future in ended]

    def _ended_slots(self, ended: Sequence[ray.ObjectRef]) -> list[Outcome]:
        outcomes = list[Outcome]()
        for ref in ended:
            job, actor = self._running.pop(ref)
            try:
                outcomes.append((job, ray.get(ref)))
                self._idle.append(actor)
            except ray.exceptions.RayActorError:
                # The next trial gets another process.
                outcomes.append((job, LostSlotError(self._nodes.pop(actor))))
            except Exception as error:
                outcomes.append((job, error))
                self._idle.append(actor)
        return outcomes


def alive_nodes() -> set[str]:
    """Returns the ids of the nodes of the connected cluster; Ray notices the end of one after some seconds."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
