"""Snapshots in the memory of actors outside the workers, so that the loss of all workers costs few steps."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from torch import nn

from ray_app.checkpoint.format import Snapshot, pack, unpack
from ray_app.config.sections import TrainSection
from ray_app.errors import ConfigError
from ray_app.runlog.journal import StepRecord

logger = logging.getLogger(__name__)

MAX_SNAPSHOT_ACTORS = 2
"""The number of snapshot actors of a run: one on the driver's node and one on another node."""
_ACTOR_TIMEOUT_S = 60.0
"""Seconds that a worker waits for the answer of a snapshot actor."""


@dataclass(frozen=True)
class PackedSnapshot:
    """A snapshot as a `SnapshotActor` stores it.

    Args:
        step: Finished steps.
        files: The contents of the files by name, as `checkpoint.format.pack` makes them.
        sha256: The digest of each file.
        records: The records of steps that may not be on storage yet.
    """

    step: int
    files: dict[str, bytes]
    sha256: dict[str, str]
    records: list[StepRecord]

    def is_intact(self) -> bool:
        """Returns whether the files have the digests that were sent with them."""
        return self.sha256 == {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}


class SnapshotActor:
    """Stores the newest snapshot of a run in memory; `start_snapshot_actors` starts actors of this class."""

    def __init__(self) -> None:
        self._newest: PackedSnapshot | None = None

    def store_snapshot(self, snapshot: PackedSnapshot) -> None:
        """Stores a snapshot in place of the stored one, unless that one is newer."""
        if self._newest is None or snapshot.step >= self._newest.step:
            self._newest = snapshot

    def newest(self) -> PackedSnapshot | None:
        """Returns the stored snapshot; None if there is none."""
        return self._newest


def check_snapshot_memory(model: nn.Module, free_bytes: int) -> None:
    """Checks that this node has memory for a snapshot actor, which has two: the stored one and the one that arrives.

    Args:
        model: The model; the optimizer is assumed to keep two values per parameter.
        free_bytes: Free memory of this node.

    Raises:
        ConfigError: The free memory is too small.
    """
    needed = 2 * _state_bytes(model)
    if needed > free_bytes:
        raise ConfigError(
            f"checkpoint.snapshot_every_steps needs about {needed / 1e9:.1f} GB of memory on the driver's node, and on"
            f" one other node; {free_bytes / 1e9:.1f} GB are free here. Leave it out, or start the driver where there"
            " is more memory."
        )


def page_locked_memory_warnings(model: nn.Module, train: TrainSection, workers: int, total_bytes: int) -> list[str]:
    """Returns a warning if a machine is too small for the page-locked copies of the state of its workers with GPUs.

    Args:
        model: The model; the optimizer is assumed to keep two values per parameter.
        train: The strategy, and whether parameters are averaged.
        workers: The number of workers on the machine.
        total_bytes: The memory of the machine.

    Returns:
        A list of one warning; an empty list if the copies fit.
    """
    average_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) if train.ema_decay is not None else 0
    # A worker keeps its copies for two checkpoints, and with a partitioned state also the copy that is being made.
    copies = 3 if train.strategy_traits.has_partitioned_state else 2
    worker_bytes = copies * (_state_bytes(model) + average_bytes)
    if workers * worker_bytes <= total_bytes:
        return []
    return [
        f"Each worker keeps {copies} copies of the state for checkpoints in page-locked host memory, about"
        f" {worker_bytes / 1e9:.1f} GB, and {workers} of them on a machine like this"
        f" {workers * worker_bytes / 1e9:.1f} GB; it has {total_bytes / 1e9:.1f} GB. Use machines with more memory, or"
        " fewer workers on each (scaling.max_workers), or the kernel may end them."
    ]


def _state_bytes(model: nn.Module) -> int:
    """Returns the number of bytes of parameters, buffers, and two values of the optimizer for each parameter."""
    tensors = [*model.parameters(), *model.parameters(), *model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def start_snapshot_actors() -> list[ActorHandle]:
    """Starts the snapshot actors, one on this node and one on another node if there is one; returns their handles."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = ray.get_runtime_context().get_node_id()
    other_nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != this_node]
    actor = ray.remote(SnapshotActor)
    return [
        actor.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in [this_node, *sorted(other_nodes)][:MAX_SNAPSHOT_ACTORS]
    ]


class SnapshotSender:
    """Sends snapshots to the snapshot actors from a thread, one after the other, and fetches the newest from them.

    Args:
        actors: Handles of the snapshot actors; if the list is empty, nothing is sent.
    """

    def __init__(self, actors: list[ActorHandle]) -> None:
        self._actors = actors
        self._thread: threading.Thread | None = None

    def send(self, take: Callable[[], Snapshot], records: list[StepRecord]) -> None:
        """Copies the state and sends it in the background; first waits until the previous snapshot has been sent.

        Args:
            take: Makes the snapshot. It may reuse the memory of the previous one.
            records: The records to store with it, see `PackedSnapshot`.
        """
        if not self._actors:
            return
        self.wait()
        self._thread = threading.Thread(target=self._send, args=(take(), records), name="snapshots", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until no snapshot is being sent."""
        if self._thread is not None:
            self._thread.join()

    def newest(self) -> tuple[Snapshot, list[StepRecord]] | None:
        """Returns the newest intact snapshot that an actor stores, with its records; None if there is none."""
        snapshots: list[PackedSnapshot] = []
        for actor in self._actors:
            try:
                snapshot = ray.get(actor.newest.remote(), timeout=_ACTOR_TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("A snapshot actor does not answer: %s", error)
                continue
            if snapshot is not None and snapshot.is_intact():
                snapshots.append(snapshot)
        if not snapshots:
            return None
        newest = max(snapshots, key=lambda snapshot: snapshot.step)
        return unpack(newest.files), newest.records

    def _send(self, snapshot: Snapshot, records: list[StepRecord]) -> None:
        """Packs a snapshot and stores it in all snapshot actors; the body of the thread."""
        files = pack(snapshot)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        packed = PackedSnapshot(snapshot.step, files, digests, records)
        sent = [actor.store_snapshot.remote(packed) for actor in self._actors]
        done, _ = ray.wait(sent, num_returns=len(sent), timeout=_ACTOR_TIMEOUT_S)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                logger.warning("A snapshot could not be stored: %s", error)
