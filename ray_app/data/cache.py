"""A data set decoded once into Ray's object store, owned by an actor that is not a worker; nodes map one copy each."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy.typing as npt
import ray

from ray_app.data.source import RowSource, fetch_ray, load_all
from ray_app.errors import own_error


class MemoryCache:
    """An actor that owns the decoded arrays of a data set, see `start_cache`.

    Args:
        source: The data set.
    """

    def __init__(self, source: RowSource) -> None:
        self._load = partial(load_all, fetch_ray, source)
        self._references: dict[str, Any] = {}

    def arrays(self) -> dict[str, Any]:
        """References to one array per field, each (rows, ...) in manifest order; decodes at the first call.

        Raises:
            BadRowError: A row cannot be decoded.
        """
        if not self._references:
            self._references = {name: ray.put(values) for name, values in self._load().items()}
        return self._references


def start_cache(source: RowSource) -> Any:
    """Starts the actor and returns its handle; it decodes while the workers start."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # a lost node must not take it along
    made = ray.remote(MemoryCache).options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    actor = made.remote(source)
    actor.arrays.remote()
    return actor


def cached_arrays(cache: Any) -> dict[str, npt.NDArray]:
    """The decoded arrays, mapped from the object store of this node.

    Raises:
        BadRowError: A row cannot be decoded.
    """
    try:
        references = ray.get(cache.arrays.remote())
    except ray.exceptions.RayTaskError as error:
        raise own_error(error) from error
    return {name: ray.get(reference) for name, reference in references.items()}
