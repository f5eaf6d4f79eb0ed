"""Planned reads as a Ray Data source, one read task per `ReadSpec`, decoding included; and a pool of actors that they flow through."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import ray.data
from ray import cloudpickle
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.data.context import DataContext

from ray_app.data.read.reader import AT_ONCE, Reader, ReadSpec
from ray_app.data.read.slices import Slices
from ray_app.errors import own_error
from ray_app.process import uninterrupted

logger = logging.getLogger(__name__)

_AHEAD = 8
"""Tasks that decode slices while others are consumed."""
_LOGGERS = {"ray.data": logging.WARNING, "ray.data._internal.progress": logging.ERROR}
"""What is left of what they say; the second warns that no bars are shown."""


class PlannedSource(Datasource):
    """Ray Data reads what the plan says, in its order.

    Args:
        reader: Reads and decodes.
        specs: One read task each.
    """

    def __init__(self, reader: Reader, specs: Sequence[ReadSpec]) -> None:
        super().__init__()
        self._reader, self._specs = cloudpickle.dumps(reader), specs

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown before the first decode."""
        return None

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None) -> list[ReadTask]:
        """One task per planned read, whatever parallelism is asked for: the plan sizes them."""
        del parallelism, per_task_row_limit, data_context
        return [
            ReadTask(
                partial(_read, self._reader, spec),
                BlockMetadata(num_rows=sum(p.rows for p in spec), size_bytes=None, input_files=None, exec_stats=None),
            )
            for spec in self._specs
        ]


def _read(packed: bytes, spec: ReadSpec) -> Iterator[pa.Table]:
    """Ray cancels a task by an interrupt of its process, which goes on to serve other tasks. In the middle of an import it would leave a
    broken module there (torch registers some things once per process), and no row of any later task could be decoded.
    """
    with uninterrupted():
        reader: Reader = pickle.loads(packed)
        tables = reader.read(spec)
        table = next(tables, None)
    while table is not None:
        yield table
        with uninterrupted():
            table = next(tables, None)


def fetch_ray(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads as Ray Data read tasks on any CPU of the cluster; blocks arrive in order through the object store."""
    if not specs:
        return
    if any(span.of for spec in specs for span in spec):
        yield from _fetch_sliced(reader, specs)
        return
    quieten().execution_options.preserve_order = True
    dataset = ray.data.read_datasource(PlannedSource(reader, specs), override_num_blocks=len(specs))
    dataset.context.target_max_block_size = AT_ONCE
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    except Exception as error:
        raise own_error(error) from error


def _fetch_sliced(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """The same where row groups are read in slices: those are read here, and decoded by tasks on any CPU of the cluster."""
    packed = ray.put(cloudpickle.dumps(reader))
    task = ray.remote(_decoded).options(num_cpus=1)
    waiting: deque[Any] = deque()
    try:
        with closing(Slices(reader.root, reader.columns)) as slices:
            for spec in specs:
                waiting.append(task.remote(packed, spec, [slices.take(span) for span in spec if span.of]))
                if len(waiting) > _AHEAD:
                    yield from ray.get(waiting.popleft())
            while waiting:
                yield from ray.get(waiting.popleft())
    except Exception as error:
        raise own_error(error) from error
    finally:
        for left in waiting:
            ray.cancel(left)


def _decoded(packed: bytes, spec: ReadSpec, sliced: list[pa.Table]) -> list[pa.Table]:
    """Reads what is not read in slices, and decodes all."""
    with uninterrupted():
        reader: Reader = pickle.loads(packed)
        given = iter(sliced)
        return list(reader.read(spec, lambda _: next(given)))


@dataclass(frozen=True)
class Pool:
    """Actors that tables flow through.

    Args:
        made_of: Class of the actors; an instance turns one table into another.
        arguments: What it is made with.
        most: Actors at most; the first one is enough to go on.
        num_cpus: Logical CPUs that each reserves.
        num_gpus: GPUs that each reserves.
    """

    made_of: type
    arguments: tuple[Any, ...]
    most: int
    num_cpus: float
    num_gpus: float


def through(pool: Pool, reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[dict[str, Any]]:
    """Gives each read task's rows as one table to an actor, and yields the rows that come out of them, as they are done.

    Where the actors reserve what a read task does (one CPU), Ray Data lets them read themselves; otherwise any CPU of the cluster reads for
    them, and how far ahead is bounded by Ray Data.
    """
    quieten()
    dataset = ray.data.read_datasource(PlannedSource(reader, specs), override_num_blocks=len(specs))
    dataset.context.target_max_block_size = None  # what a task has read stays one table
    done = dataset.map_batches(
        pool.made_of,
        fn_constructor_args=pool.arguments,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=pool.most),
        num_cpus=pool.num_cpus,
        num_gpus=pool.num_gpus,
    )
    try:
        yield from done.iter_rows()
    except Exception as error:
        raise own_error(error) from error


def quieten() -> Any:
    """Ray Data's settings of this process, with nothing printed."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    return context


def anchor_here() -> None:
    """Reads nothing with Ray Data, so that the actors that it shares among all readers of a cluster live on this node.

    Whoever reads first makes them, on its node, and everyone who reads asks them. Made by a worker they would be lost with its node, and
    the other workers would stand still until the cluster has noticed that, which takes a minute or two.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before, levels = DataContext.get_current().copy(), [each.level for each in loggers]
    try:
        quieten()
        ray.data.range(1, override_num_blocks=1).take_all()
    except Exception as error:  # then the first worker makes them
        logger.warning("Ray Data's shared actors could not be made here: %s", error)
    finally:  # it is the process of the user's notebook
        DataContext._set_current(before)
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
