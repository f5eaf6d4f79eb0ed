"""Planned reads as a Ray Data source, one read task per `ReadSpec`, decoding included; and a pool of actors that they
flow through.

Ray tasks whose process or node may be lost: a lost node is nobody's fault, a process that dies three times is that of
what it does.

Ray itself takes both for the same, and Ray Data starts such a task again for ever: a row whose decoding ends the
process (a segmentation fault in a C library, more memory than there is) would be read again and again, and the run
would wait for it.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray import cloudpickle
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.data.context import DataContext

from ray_app.data.process_deaths import DeathCounter, RetriedTask, classify_loss
from ray_app.data.reader import MAX_BLOCK_BYTES, Reader, ReadSpec, SliceReader, describe_spec
from ray_app.errors import unwrap_app_error
from ray_app.process import defer_interrupts

logger = logging.getLogger(__name__)

_AHEAD = 8
"""Tasks that decode slices while others are consumed."""
_ONCE = {"max_retries": 0}
"""Of Ray's tasks: who is lost is seen here."""
_MAX_IN_FLIGHT = 16
"""Read tasks that are tried one by one after a process has died: it may have been any of those that were under way."""
_LOST = "A read task was lost (%s); the rest is read by others."
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

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
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
    """Ray cancels a task by an interrupt of its process, which goes on to serve other tasks. In the middle of an import
    it would leave a broken module there (torch registers some things once per process), and no row of any later task
    could be decoded.
    """
    with defer_interrupts():
        reader: Reader = pickle.loads(packed)
        tables = reader.read(spec)
        table = next(tables, None)
    while table is not None:
        yield table
        with defer_interrupts():
            table = next(tables, None)


def fetch_ray(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads as Ray Data read tasks on any CPU of the cluster; blocks arrive in order through the object store."""
    if not specs:
        return
    if any(span.of for spec in specs for span in spec):
        yield from _fetch_in_tasks(reader, specs)
        return
    done = 0
    try:
        for table in _fetch_by_ray_data(reader, specs):
            done += table.num_rows
            yield table
        return
    except Exception as error:
        if classify_loss(error) is None:
            raise unwrap_app_error(error) from error
        logger.warning(_LOST, type(error).__name__)
    yield from _fetch_in_tasks(reader, specs, done)


def _planned(reader: Reader, specs: Sequence[ReadSpec]) -> ray.data.Dataset:
    """A Ray data set whose read tasks are tried once."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of Ray 2.60: `max_retries` has no parameter of its own yet
        return ray.data.read_datasource(
            PlannedSource(reader, specs), override_num_blocks=len(specs), ray_remote_args=_ONCE
        )


def _fetch_by_ray_data(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    silence_ray_data().execution_options.preserve_order = True
    dataset = _planned(reader, specs)
    dataset.context.target_max_block_size = MAX_BLOCK_BYTES
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)


def _fetch_in_tasks(reader: Reader, specs: Sequence[ReadSpec], done: int = 0) -> Iterator[pa.Table]:
    """The same as single tasks, of which each is known by its rows. Row groups that are read in slices are read here,
    and decoded there.

    Args:
        reader: Reads and decodes.
        specs: Which rows.
        done: How many of them, from the first on, were delivered before.

    Raises:
        ProcessDiedError: The process of a task died again and again.
    """
    packed = ray.put(cloudpickle.dumps(reader))
    task = ray.remote(_decoded).options(num_cpus=1, **_ONCE)
    waiting: deque[tuple[RetriedTask, int]] = deque()
    try:
        with closing(SliceReader.of(reader)) as slices:
            for spec in specs:
                rows = sum(span.rows for span in spec)
                skipped, done = min(rows, done), max(0, done - rows)
                if skipped == rows:
                    continue
                sliced = ray.put([slices.take(span) for span in spec if span.of])
                submit = partial(task.remote, packed, spec, sliced)
                waiting.append((RetriedTask(submit, partial(_reading, spec)), skipped))
                if len(waiting) > _AHEAD:
                    yield from _result(*waiting.popleft())
            while waiting:
                yield from _result(*waiting.popleft())
    except Exception as error:
        raise unwrap_app_error(error) from error
    finally:
        for left, _ in waiting:
            ray.cancel(left.reference)


def _reading(spec: ReadSpec) -> str:
    return f"while it read {describe_spec(spec)}"


def _result(task: RetriedTask, skipped: int) -> Iterator[pa.Table]:
    """The rows of a task but the first `skipped`."""
    for table in task.result():
        if skipped < table.num_rows:
            yield table.slice(skipped)
        skipped = max(0, skipped - table.num_rows)


def _decoded(packed: bytes, spec: ReadSpec, sliced: list[pa.Table]) -> list[pa.Table]:
    """Reads what is not read in slices, and decodes all."""
    with defer_interrupts():
        reader: Reader = pickle.loads(packed)
        given = iter(sliced)
        return list(reader.read(spec, lambda _: next(given)))


@dataclass(frozen=True)
class ActorPool:
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


def map_in_actors(
    pool: ActorPool, reader: Reader, specs: Sequence[ReadSpec], spec_of: Callable[[dict[str, Any]], ReadSpec]
) -> Iterator[dict[str, Any]]:
    """Gives each read task's rows as one table to an actor, and yields the row that comes out of each, as they are
    done.

    When a process or a node is lost it begins anew with what is left; where it was a process, with one read task after
    the other at first, so that it is known of which it dies.

    Args:
        pool: The actors.
        reader: Reads and decodes.
        specs: Which rows.
        spec_of: Says of which read task a row is that came out.

    Raises:
        ProcessDiedError: A process died again and again of the same rows.
    """
    left, deaths = list(specs), {spec: DeathCounter(partial(_reading, spec)) for spec in specs}
    single = 0
    while left:
        asked = left[:1] if single else left[:]
        try:
            for found in _flow(pool, reader, asked):
                left.remove(spec_of(found))
                yield found
            single = max(0, single - 1)
        except Exception as error:
            if len(asked) == 1:
                deaths[asked[0]].note(error)
            elif (lost := classify_loss(error)) is None:
                raise unwrap_app_error(error) from error
            elif lost == "process":
                single = _MAX_IN_FLIGHT
            logger.warning(_LOST, type(error).__name__)


def _flow(pool: ActorPool, reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[dict[str, Any]]:
    """One execution of `through`.

    Where the actors reserve what a read task does (one CPU), Ray Data lets them read themselves; otherwise any CPU of
    the cluster reads for them, and how far ahead is bounded by Ray Data.
    """
    silence_ray_data()
    dataset = _planned(reader, specs)
    dataset.context.target_max_block_size = None  # what a task has read stays one table
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # likewise
        done = dataset.map_batches(
            pool.made_of,
            fn_constructor_args=pool.arguments,
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=pool.most),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            max_restarts=0,
        )
    yield from done.iter_rows()


def silence_ray_data() -> Any:
    """Ray Data's settings of this process, with nothing printed."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    return context


def start_shared_actors() -> None:
    """Reads nothing with Ray Data, so that the actors that it shares among all readers of a cluster live on this node.

    Whoever reads first makes them, on its node, and everyone who reads asks them. Made by a worker they would be lost
    with its node, and the other workers would stand still until the cluster has noticed that, which takes a minute or
    two.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before, levels = DataContext.get_current().copy(), [each.level for each in loggers]
    try:
        silence_ray_data()
        ray.data.range(1, override_num_blocks=1).take_all()
    except Exception as error:  # then the first worker makes them
        logger.warning("Ray Data's shared actors could not be made here: %s", error)
    finally:  # it is the process of the user's notebook
        DataContext._set_current(before)
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
