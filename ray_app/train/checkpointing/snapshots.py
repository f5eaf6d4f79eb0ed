"""Snapshots in memory outside the workers, so that the loss of all workers redoes little."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from torch import nn

from ray_app.checkpoint.format import Snapshot, pack, unpack
from ray_app.config.sections import TrainSection
from ray_app.errors import ConfigError
from ray_app.runlog.journal import StepRecord

logger = logging.getLogger(__name__)

MAX_SNAPSHOT_ACTORS = 2
"""Most keepers of a run: one on the driver's node and one elsewhere."""
_SEND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PackedSnapshot:
    """A snapshot as a keeper holds it.

    Args:
        step: Finished steps.
        files: What `checkpoint.format.pack` makes.
        sha256: Digest of each file.
        records: Records of steps that may not be on storage yet.
    """

    step: int
    files: dict[str, bytes]
    sha256: dict[str, str]
    records: list[StepRecord]

    def is_intact(self) -> bool:
        """Whether the files are those that were sent."""
        return self.sha256 == {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}


class SnapshotActor:
    """Holds the newest snapshot of a run. An actor, see `start_snapshot_actors`."""

    def __init__(self) -> None:
        self._kept: PackedSnapshot | None = None

    def keep(self, kept: PackedSnapshot) -> None:
        """Takes a snapshot, unless a newer one is there."""
        if self._kept is None or kept.step >= self._kept.step:
            self._kept = kept

    def newest(self) -> PackedSnapshot | None:
        """The newest one."""
        return self._kept


def check_snapshot_memory(model: nn.Module, free_bytes: int) -> None:
    """Checks that a keeper's memory is there: the snapshot it holds and the one that arrives.

    Args:
        model: What is trained; the optimizer is taken to keep two values per parameter.
        free_bytes: Free memory of this node.

    Raises:
        ConfigError: It is not.
    """
    needed = 2 * _state_bytes(model)
    if needed > free_bytes:
        raise ConfigError(
            f"checkpoint.snapshot_every_steps needs about {needed / 1e9:.1f} GB of memory on the driver's node, and on"
            f" one other"
            f" node; {free_bytes / 1e9:.1f} GB are free here. Leave it out, or start the driver where there is more"
            f" memory."
        )


def page_locked_memory_warnings(model: nn.Module, train: TrainSection, workers: int, total_bytes: int) -> list[str]:
    """What is to be said if the copies of the state that workers with GPUs keep for checkpoints, page-locked, do not
    fit into a machine.

    Args:
        model: What is trained; the optimizer is taken to keep two values per parameter.
        train: The strategy, and whether there are averages.
        workers: How many are on the machine.
        total_bytes: Its memory.
    """
    averages = sum(p.numel() * p.element_size() for p in model.parameters()) if train.ema_decay is not None else 0
    copies = (
        3 if train.strategy in ("fsdp", "central_storage") else 2
    )  # those of two checkpoints, and the one that is being made
    each = copies * (_state_bytes(model) + averages)
    if workers * each <= total_bytes:
        return []
    return [
        f"Each worker keeps {copies} copies of the state for checkpoints in page-locked host memory, about"
        f" {each / 1e9:.1f} GB, and"
        f" {workers} of them on a machine like this {workers * each / 1e9:.1f} GB; it has {total_bytes / 1e9:.1f} GB."
        f" Use machines with"
        " more memory, or fewer workers on each (scaling.max_workers), or the kernel may end them."
    ]


def _state_bytes(model: nn.Module) -> int:
    values = [*model.parameters(), *model.parameters(), *model.parameters(), *model.buffers()]
    return sum(value.numel() * value.element_size() for value in values)


def start_snapshot_actors() -> list[Any]:
    """Starts the keepers: one on this node, and one on another node if there is one."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    actor = ray.remote(SnapshotActor)
    return [
        actor.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in [here, *sorted(others)][:MAX_SNAPSHOT_ACTORS]
    ]


class SnapshotSender:
    """Sends snapshots to the keepers from a thread of its own, one after the other.

    Args:
        keepers: Handles of the keepers; none: nothing is sent.
    """

    def __init__(self, keepers: list[Any]) -> None:
        self._keepers = keepers
        self._thread: threading.Thread | None = None

    def send(self, take: Callable[[], Snapshot], records: list[StepRecord]) -> None:
        """Copies the state now and sends it in the background; waits while the previous one is on its way."""
        if not self._keepers:
            return
        self.wait()
        self._thread = threading.Thread(target=self._send, args=(take(), records), name="snapshots", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is on its way."""
        if self._thread is not None:
            self._thread.join()

    def newest(self) -> tuple[Snapshot, list[StepRecord]] | None:
        """The newest intact snapshot that a keeper has."""
        found: list[PackedSnapshot] = []
        for keeper in self._keepers:
            try:
                kept = ray.get(keeper.newest.remote(), timeout=_SEND_TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("A keeper of snapshots is gone: %s", error)
                continue
            if kept is not None and kept.is_intact():
                found.append(kept)
        if not found:
            return None
        newest = max(found, key=lambda kept: kept.step)
        return unpack(newest.files), newest.records

    def _send(self, snapshot: Snapshot, records: list[StepRecord]) -> None:
        files = pack(snapshot)
        kept = PackedSnapshot(
            snapshot.step, files, {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}, records
        )
        sent = [keeper.keep.remote(kept) for keeper in self._keepers]
        done, _ = ray.wait(sent, num_returns=len(sent), timeout=_SEND_TIMEOUT_S)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                logger.warning("A snapshot could not be kept: %s", error)
