"""A data set decoded once into Ray's object store, owned by an actor that is not a worker; nodes map one copy each."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray

from ray_app.data.columns import ArraySpec
from ray_app.data.source import Reader, fetch_ray, load_all
from ray_app.plan.manifest import Manifest


class MemoryCache:
    """An actor that owns the decoded arrays of a data set, see `start_cache`.

    Args:
        reader: Reads and decodes.
        manifest: What to read.
        fields: What a decoded row looks like.
        task_rows: Most rows of one read task.
    """

    def __init__(self, reader: Reader, manifest: Manifest, fields: dict[str, ArraySpec], task_rows: int) -> None:
        self._load = partial(load_all, fetch_ray, reader, manifest, fields, task_rows)
        self._references: dict[str, Any] = {}

    def arrays(self) -> dict[str, Any]:
        """References to one array per field, each (rows, ...) in manifest order; decodes at the first call.

        Raises:
            BadRowError: A row cannot be decoded.
        """
        if not self._references:
            self._references = {name: ray.put(values) for name, values in self._load().items()}
        return self._references


def start_cache(reader: Reader, manifest: Manifest, fields: dict[str, ArraySpec], task_rows: int) -> Any:
    """Starts the actor and returns its handle; it decodes while the workers start."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # a lost node must not take it along
    made = ray.remote(MemoryCache).options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    actor = made.remote(reader, manifest, fields, task_rows)
    actor.arrays.remote()
    return actor
