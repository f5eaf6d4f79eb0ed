"""Whether the decoded data that workers share in memory fits into the object stores, which would write to disks what does not."""

from __future__ import annotations

from ray_app.cluster.labels import Node
from ray_app.data.read.reader import RowSource
from ray_app.errors import ConfigError
from ray_app.train.job import Job


def shared_bytes(job: Job) -> int:
    """Bytes in the object store of each node: the training data with `data.cache: memory`, and what the workers evaluate."""
    if job.config.train.strategy == "single":
        return 0  # in the calling process
    trained = _bytes_of(job.source) if job.config.data.cache == "memory" else 0
    return trained + (_bytes_of(job.evaluation) if job.workers_evaluate and job.evaluation is not None else 0)


def fits_object_stores(needed: int, nodes: list[Node]) -> str:
    """Whether every node's object store holds the decoded data.

    Args:
        needed: Bytes of it.
        nodes: As `ray.nodes()` tells.

    Raises:
        ConfigError: One does not.
    """
    stores = {str(n["NodeManagerAddress"]): int(n["Resources"].get("object_store_memory", 0)) for n in nodes if n["Alive"]}
    name, least = min(stores.items(), key=lambda item: item[1])
    if needed > least:
        raise ConfigError(
            f"The decoded data that workers share (data.cache: memory, evaluate.where: workers) needs {megabytes(needed)} in each node's"
            f" object store; {name} has {megabytes(least)}. Set data.cache to disk or none and evaluate.where to actor, or start the nodes"
            " with a larger --object-store-memory."
        )
    return f"{megabytes(needed)} of decoded data fit into each node's object store (the smallest: {megabytes(least)})."


def _bytes_of(source: RowSource) -> int:
    return source.manifest.num_rows * sum(spec.row_bytes for spec in source.fields.values())


def megabytes(num_bytes: int) -> str:
    """For people, such as `1,000.0 MB`."""
    return f"{num_bytes / 1e6:,.1f} MB"
