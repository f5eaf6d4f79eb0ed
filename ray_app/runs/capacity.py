"""Whether decoded data fits into memory: what workers share into the object stores, shuffle windows into that of the nodes."""

from __future__ import annotations

import logging

import psutil

from ray_app.cluster.labels import Node
from ray_app.data.read.reader import RowSource
from ray_app.errors import ConfigError
from ray_app.plan.assign import micro_batches
from ray_app.train.job import Job

logger = logging.getLogger(__name__)


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


def refuse_windows(job: Job, workers: int, nodes: list[Node]) -> None:
    """Refuses shuffle windows that a worker cannot hold, and warns of those that it could not with as few workers as there may be.

    Args:
        job: The run.
        workers: With how many it starts.
        nodes: As `ray.nodes()` tells; none: this machine.

    Raises:
        ConfigError: They do not fit into a node.
    """
    if job.config.data.cache == "memory":
        return
    plan, prefetch = job.plan, job.config.data.prefetch_windows
    memory = [int(n["Resources"]["memory"]) for n in nodes if n["Alive"] and "memory" in n["Resources"]]
    there = min(memory, default=psutil.virtual_memory().total)
    rows = min(plan.window_rows, plan.stream_rows(0))
    row_bytes = sum(spec.row_bytes for spec in job.fields.values())
    for number in (workers, job.config.scaling.min_workers):
        played = micro_batches(min(number, plan.logical_workers), plan.logical_workers)
        needed = rows * row_bytes * (played * (1 + prefetch) + 1)
        if needed > there:
            said = (
                f"A worker of {number} would hold shuffle windows of {megabytes(needed)}: {rows:,} rows (data.shuffle_window_rows) x"
                f" {row_bytes:,} bytes x {played} logical workers played x {1 + prefetch} (data.prefetch_windows + 1), and one more; a node"
                f" has {megabytes(there)}. Set data.shuffle_window_rows to {max(1, rows * there // needed):,} or fewer."
            )
            if number == workers:
                raise ConfigError(said)
            logger.warning("%s Or raise scaling.min_workers.", said)


def _bytes_of(source: RowSource) -> int:
    return source.manifest.num_rows * sum(spec.row_bytes for spec in source.fields.values())


def megabytes(num_bytes: int) -> str:
    """For people, such as `1,000.0 MB`."""
    return f"{num_bytes / 1e6:,.1f} MB"
