"""The memory cache: a data set that is decoded once into Ray's object store.

The driver or an actor owns the decoded arrays, not a worker, so that they outlive lost workers. Each node maps one copy
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from ray_app.data.process_deaths import MAX_DEATHS, process_died_error
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.reader import Decoded, Reader, ReadSpec, RowSource, fetch_in_process, load_all
from ray_app.errors import unwrap_app_error


def is_small(source: RowSource) -> bool:
    """Returns whether one read task reads all of a data set."""
    return source.manifest.num_rows <= source.task_rows


def fetch_auto(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Runs a single read task in this process, and several by Ray Data, which takes seconds to start."""
    return (fetch_in_process if len(specs) < 2 else fetch_ray)(reader, specs)


class MemoryCache:
    """An actor that owns the decoded arrays of a data set, see `start_memory_cache`."""

    def __init__(self, source: RowSource) -> None:
        self._load = partial(load_all, fetch_ray, source)
        self._decoded: Decoded | None = None

    def decoded(self) -> Decoded:
        """Returns the data set with references in place of arrays; the first call decodes it."""
        if self._decoded is None:
            self._decoded = _put(self._load())
        return self._decoded


@dataclass(frozen=True)
class MemoryCacheHandle:
    """A decoded data set in Ray's object store, as other processes use it.

    Args:
        actor: The `MemoryCache` that decodes the data set; None for a small one.
        decoded: A small data set, with an object reference in place of each array.
    """

    actor: ActorHandle | None = None
    decoded: Decoded | None = None

    def read(self) -> Decoded:
        """Returns the data set with its arrays mapped from the object store of this node.

        Raises:
            BadRowError: A row cannot be decoded.
            ProcessDiedError: The actor died again and again.
        """
        if self.actor is None:
            assert self.decoded is not None
            return _get(self.decoded)
        try:
            try:
                return _get(ray.get(self.actor.decoded.remote()))
            except ray.exceptions.ObjectLostError:
                # The actor died after its answer; Ray has restarted it, and it decodes again.
                return _get(ray.get(self.actor.decoded.remote()))
        except ray.exceptions.RayTaskError as error:
            raise unwrap_app_error(error) from error
        except ray.exceptions.ActorDiedError as error:
            raise process_died_error(
                "while it decoded the data set for data.cache: memory, which may need more memory than there is", error
            ) from error

    def end(self) -> None:
        """Ends the actor, if there is one."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)


def start_memory_cache(source: RowSource) -> MemoryCacheHandle:
    """Decodes a small data set at once in this process; for a larger one it starts the actor.

    The actor decodes while the workers start.

    Raises:
        BadRowError: A row of a small data set cannot be decoded.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if is_small(source):
        return MemoryCacheHandle(decoded=_put(load_all(fetch_in_process, source)))
    # On the driver's node, so that the loss of another node does not end the actor.
    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    retries = {"max_restarts": MAX_DEATHS - 1, "max_task_retries": MAX_DEATHS - 1}
    actor_class = ray.remote(MemoryCache).options(num_cpus=0, scheduling_strategy=strategy, **retries)
    actor = actor_class.remote(source)
    actor.decoded.remote()
    return MemoryCacheHandle(actor)


def _get(cached: Decoded) -> Decoded:
    """Returns the data set with its arrays in place of the object references."""
    references: dict[str, Any] = cached.arrays
    return Decoded({name: ray.get(reference) for name, reference in references.items()}, cached.reasons)


def _put(decoded: Decoded) -> Decoded:
    """Returns the data set with object references in place of its arrays, which it puts into the object store."""
    references: dict[str, Any] = {name: ray.put(values) for name, values in decoded.arrays.items()}
    return Decoded(references, decoded.reasons)
