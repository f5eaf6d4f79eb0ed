"""A data set decoded once into Ray's object store, owned by the driver or an actor, not by a worker; nodes map one copy
each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray

from ray_app.data.local_readers import Decoded, load_all
from ray_app.data.process_deaths import MAX_DEATHS, process_died_error
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.reader import Reader, ReadSpec, RowSource, fetch_in_process
from ray_app.errors import unwrap_app_error


def is_small(source: RowSource) -> bool:
    """Whether one read task reads all of a data set."""
    return source.manifest.num_rows <= source.task_rows


def fetch_auto(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads all that is asked for: one read task in this process, since Ray Data takes seconds to start, more as Ray
    Data read tasks.
    """
    return (fetch_in_process if len(specs) < 2 else fetch_ray)(reader, specs)


class MemoryCache:
    """An actor that owns the decoded arrays of a data set, see `start_memory_cache`.

    Args:
        source: The data set.
    """

    def __init__(self, source: RowSource) -> None:
        self._load = partial(load_all, fetch_ray, source)
        self._decoded: Decoded | None = None

    def decoded(self) -> Decoded:
        """The data set, with a reference to an array in the place of each array; decodes at the first call.

        Raises:
            BadRowError: A row cannot be decoded.
        """
        if self._decoded is None:
            self._decoded = _shared(self._load())
        return self._decoded


def start_memory_cache(source: RowSource) -> Any:
    """Decodes a small data set here, at once; for another it starts the actor, which decodes while the workers start.

    Returns:
        The decoded data set with references, as from `MemoryCache.decoded`, or the actor's handle.

    Raises:
        BadRowError: A row of a small data set cannot be decoded.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if is_small(source):
        return _shared(load_all(fetch_in_process, source))
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )  # a lost node must not take it along
    lives = {"max_restarts": MAX_DEATHS - 1, "max_task_retries": MAX_DEATHS - 1}
    made = ray.remote(MemoryCache).options(num_cpus=0, scheduling_strategy=here, **lives)
    actor = made.remote(source)
    actor.decoded.remote()
    return actor


def end_memory_cache(cache: Any) -> None:
    """Ends the actor, if there is one."""
    if not isinstance(cache, Decoded):
        ray.kill(cache, no_restart=True)


def read_memory_cache(cache: Any) -> Decoded:
    """The data set, its arrays mapped from the object store of this node.

    Args:
        cache: From `start_memory_cache`.

    Raises:
        BadRowError: A row cannot be decoded.
        ProcessDiedError: The actor died again and again.
    """
    if isinstance(cache, Decoded):
        return _mapped(cache)
    try:
        try:
            return _mapped(ray.get(cache.decoded.remote()))
        except ray.exceptions.ObjectLostError:  # the actor died after its answer; started again it decodes again
            return _mapped(ray.get(cache.decoded.remote()))
    except ray.exceptions.RayTaskError as error:
        raise unwrap_app_error(error) from error
    except ray.exceptions.ActorDiedError as error:
        raise process_died_error(
            "while it decoded the data set for data.cache: memory, which may need more memory than there is", error
        ) from error


def _mapped(found: Decoded) -> Decoded:
    references: dict[str, Any] = found.arrays
    return Decoded({name: ray.get(reference) for name, reference in references.items()}, found.reasons)


def _shared(decoded: Decoded) -> Decoded:
    references: dict[str, Any] = {name: ray.put(values) for name, values in decoded.arrays.items()}
    return Decoded(references, decoded.reasons)
