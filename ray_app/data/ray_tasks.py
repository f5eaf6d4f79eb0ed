"""Planned reads on a Ray cluster, a pool of actors that maps the tables of the reads, and the memory cache.

Each `ReadSpec` is one Ray Data read task, which also decodes. `fetch_ray` runs single Ray tasks instead if row groups
are read in slices, and after the loss of a process or a node; `map_in_actors` then starts a new execution.

The loss of a node is not a task's fault; a process that dies three times in the same task dies of what the task does.
Ray does not distinguish the two, and Ray Data restarts such a task without end: a row that ends the process while it is
decoded (a segmentation fault in a C library, too much memory) would be read again and again while the run waits for it.
So `RetriedTask` and `DeathCounter` count.

The memory cache is a data set that is decoded once into Ray's object store. The driver or an actor owns the decoded
arrays, not a worker, so that they outlive lost workers. Each node maps one copy of them.
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
from typing import Any, Literal

import pyarrow as pa
import ray
import ray.data
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.data.context import DataContext

from ray_app.data.reader import (
    MAX_BLOCK_BYTES,
    Decoded,
    Reader,
    ReadSpec,
    RowSource,
    SliceReader,
    count_rows,
    describe_spec,
    fetch_in_process,
    load_all,
)
from ray_app.errors import ProcessDiedError, unwrap_app_error
from ray_app.process import defer_interrupts

logger = logging.getLogger(__name__)

_MAX_TASKS_AHEAD = 8
"""Maximum number of single tasks that decode while an earlier one is consumed."""
_NO_RETRIES = {"max_retries": 0}
"""Option of Ray tasks: this module retries them, because it distinguishes a lost process from a lost node."""
_MAX_IN_FLIGHT = 16
"""Number of read tasks that run one by one after a process has died: any of those that ran then may be the cause."""
_LOST = "A read task was lost (%s); other tasks read the rest."
_LOG_LEVELS = {"ray.data": logging.WARNING, "ray.data._internal.progress": logging.ERROR}
"""Levels of Ray Data's loggers; the second one warns that no progress bars are shown."""


MAX_DEATHS = 3
"""Number of times that a process may die of the same task."""

_PROCESS_ERRORS = (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.ActorDiedError)
_NODE_ERRORS = (ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError, ray.exceptions.ActorUnavailableError)
_NODE_DIED = "its node has died"
"""Part of Ray's message about an actor on a lost node; Ray has no separate exception for it."""


def classify_loss(error: BaseException) -> Literal["process", "node"] | None:
    """Returns what was lost according to an error of a task or of a wait for it; None if the task itself raised it."""
    chain: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or current in chain:
            continue
        chain.append(current)
        todo += [current.__cause__, current.__context__]
    if any(isinstance(e, _NODE_ERRORS) or getattr(e, "preempted", False) or _NODE_DIED in str(e) for e in chain):
        return "node"
    return "process" if any(isinstance(e, _PROCESS_ERRORS) for e in chain) else None


class DeathCounter:
    """Counts how often a process died of a task, which `describe` describes: `while it read ...`."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe, self._count = describe, 0

    def note(self, error: BaseException) -> None:
        """Counts the error that ended a try; raises ProcessDiedError if a process has died of the task too often.

        An error that is not the loss of a process or a node is raised again.
        """
        loss = classify_loss(error)
        if loss is None:
            raise unwrap_app_error(error) from error
        self._count += loss == "process"
        if self._count == MAX_DEATHS:
            raise process_died_error(self._describe(), error) from error


def process_died_error(activity: str, error: BaseException | None = None) -> ProcessDiedError:
    """Returns the error that ends a run after a process died too often."""
    cause = "without a Python error: a fault or an abort in a library, or the kernel's out-of-memory killer"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        cause = "because memory was short"
    return ProcessDiedError(
        f"A process died {MAX_DEATHS} times {activity} ({cause}). Check these rows, and remove or rewrite them; if they"
        " are intact but large, lower data.read_task_mb, or give the node more memory."
    )


class RetriedTask:
    """A Ray task, with `max_retries=0`, that is submitted again when its process or its node is lost."""

    def __init__(self, submit: Callable[[], Any], describe: Callable[[], str]) -> None:
        self._submit, self._deaths = submit, DeathCounter(describe)
        self.reference = submit()

    def result(self) -> Any:
        """Waits for the task and returns its result; raises ProcessDiedError if its process died too often."""
        # Not `Retry`: a task is repeated at once, and `DeathCounter` limits the deaths of processes, not of nodes.
        while True:
            try:
                return ray.get(self.reference)
            except ray.exceptions.RayError as error:
                self._deaths.note(error)
                self.reference = self._submit()


class PlannedSource(Datasource):
    """A Ray Data source with read tasks that read what the plan says, in its order."""

    def __init__(self, reader: Reader, specs: Sequence[ReadSpec]) -> None:
        super().__init__()
        self._reader, self._specs = cloudpickle.dumps(reader), specs

    def estimate_inmemory_data_size(self) -> int | None:
        """Returns None: the size is unknown before the first decode."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        """Returns one task per planned read, whatever the requested parallelism: the plan sizes the tasks."""
        del parallelism, per_task_row_limit, data_context
        tasks = []
        for spec in self._specs:
            metadata = BlockMetadata(num_rows=count_rows(spec), size_bytes=None, input_files=None, exec_stats=None)
            tasks.append(ReadTask(partial(_read, self._reader, spec), metadata))
        return tasks


def _read(pickled_reader: bytes, spec: ReadSpec) -> Iterator[pa.Table]:
    """Yields the decoded rows of a read task, and defers Ray's interrupts while it reads.

    Ray cancels a task by an interrupt of its process, which then serves other tasks. In the middle of an import the
    interrupt would leave a broken module (torch registers some things once per process), and no later task of the
    process could decode a row.
    """
    with defer_interrupts():
        reader: Reader = pickle.loads(pickled_reader)
        tables = reader.read(spec)
        table = next(tables, None)
    while table is not None:
        yield table
        with defer_interrupts():
            table = next(tables, None)


def fetch_ray(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Runs Ray Data read tasks on any CPU of the cluster; blocks arrive in order through the object store."""
    if not specs:
        return
    if any(span.group_rows for spec in specs for span in spec):
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


def _open_ray_dataset(reader: Reader, specs: Sequence[ReadSpec]) -> ray.data.Dataset:
    """Returns a Ray data set with read tasks that Ray does not retry."""
    with warnings.catch_warnings():
        # Ray 2.60 warns of `max_retries` in `ray_remote_args`, for which it has no parameter yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ray.data.read_datasource(
            PlannedSource(reader, specs), override_num_blocks=len(specs), ray_remote_args=_NO_RETRIES
        )


def _fetch_by_ray_data(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    silence_ray_data().execution_options.preserve_order = True
    dataset = _open_ray_dataset(reader, specs)
    # Ray Data cuts what exceeds the target by half and gathers what is smaller, so that most tables become one block.
    dataset.context.target_max_block_size = MAX_BLOCK_BYTES * 3 // 4
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)


def _fetch_in_tasks(reader: Reader, specs: Sequence[ReadSpec], done: int = 0) -> Iterator[pa.Table]:
    """Runs the reads as single Ray tasks, so that a lost task is known by its rows.

    This process reads the slices of large row groups, and the tasks decode them. The first `done` rows, which were
    delivered before, are left out.
    """
    pickled_reader = ray.put(cloudpickle.dumps(reader))
    task = ray.remote(_decode).options(num_cpus=1, **_NO_RETRIES)
    waiting: deque[tuple[RetriedTask, int]] = deque()
    try:
        with closing(SliceReader.of(reader)) as slices:
            for spec in specs:
                rows = count_rows(spec)
                skipped, done = min(rows, done), max(0, done - rows)
                if skipped == rows:
                    continue
                slice_tables = ray.put([slices.take(span) for span in spec if span.group_rows])
                submit = partial(task.remote, pickled_reader, spec, slice_tables)
                waiting.append((RetriedTask(submit, partial(_describe_read, spec)), skipped))
                if len(waiting) > _MAX_TASKS_AHEAD:
                    yield from _result(*waiting.popleft())
            while waiting:
                yield from _result(*waiting.popleft())
    except Exception as error:
        raise unwrap_app_error(error) from error
    finally:
        for unconsumed, _ in waiting:
            ray.cancel(unconsumed.reference)


def _describe_read(spec: ReadSpec) -> str:
    return f"while it read {describe_spec(spec)}"


def _result(task: RetriedTask, skipped: int) -> Iterator[pa.Table]:
    """Yields the rows of a task without the first `skipped`."""
    for table in task.result():
        if skipped < table.num_rows:
            yield table.slice(skipped)
        skipped = max(0, skipped - table.num_rows)


def _decode(pickled_reader: bytes, spec: ReadSpec, slices: list[pa.Table]) -> list[pa.Table]:
    """Reads the spans that `slices` does not hold, and returns all rows of a read task decoded."""
    with defer_interrupts():
        reader: Reader = pickle.loads(pickled_reader)
        remaining = iter(slices)
        return list(reader.read(spec, lambda _: next(remaining)))


@dataclass(frozen=True)
class ActorPool:
    """A pool of actors; an instance of their class is called with a table and returns one."""

    actor_class: type
    arguments: tuple[Any, ...]
    max_actors: int
    num_cpus: float
    num_gpus: float


def map_in_actors(
    pool: ActorPool, reader: Reader, specs: Sequence[ReadSpec], spec_of: Callable[[dict[str, Any]], ReadSpec]
) -> Iterator[dict[str, Any]]:
    """Yields the row that an actor returns for each read task, which it gets as one table, in the order of completion.

    After the loss of a process or a node, a new execution runs the remaining read tasks. After the loss of a process it
    first runs read tasks one by one, to learn which one ends the process.

    Raises:
        ProcessDiedError: A process died again and again of the same rows.
    """
    remaining = list(specs)
    deaths = {spec: DeathCounter(partial(_describe_read, spec)) for spec in specs}
    single = 0
    # Not `Retry`: read tasks are repeated at once, and `DeathCounter` limits the deaths of processes, not of nodes.
    while remaining:
        batch = remaining[:1] if single else remaining[:]
        try:
            for row in _execute(pool, reader, batch):
                remaining.remove(spec_of(row))
                yield row
            single = max(0, single - 1)
        except Exception as error:
            if len(batch) == 1:
                deaths[batch[0]].note(error)
            elif (loss := classify_loss(error)) is None:
                raise unwrap_app_error(error) from error
            elif loss == "process":
                single = _MAX_IN_FLIGHT
            logger.warning(_LOST, type(error).__name__)


def _execute(pool: ActorPool, reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[dict[str, Any]]:
    """Runs one execution of `map_in_actors`.

    Where the actors reserve as much as a read task (one CPU), Ray Data lets them read themselves; otherwise any CPU of
    the cluster reads for them, and Ray Data limits how far ahead.
    """
    silence_ray_data()
    dataset = _open_ray_dataset(reader, specs)
    # Without a target size the rows of a read task stay one table.
    dataset.context.target_max_block_size = None
    with warnings.catch_warnings():
        # The same warning as in `_open_ray_dataset`.
        warnings.simplefilter("ignore", DeprecationWarning)
        mapped = _map_blocks(dataset)(
            pool.actor_class,
            fn_constructor_args=pool.arguments,
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=pool.max_actors),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            max_restarts=0,
        )
    yield from mapped.iter_rows()


def _map_blocks(dataset: ray.data.Dataset) -> Callable[..., ray.data.Dataset]:
    """Returns `Dataset.map_batches` for `batch_size=None`, a whole block at a time, which it refuses with GPUs.

    Ray's own `map_groups` calls the same method, which has had two names.
    """
    names = ("map_batches_internal", "_map_batches_without_batch_size_validation")
    return next(getattr(dataset, name) for name in names if hasattr(dataset, name))


def silence_ray_data() -> Any:
    """Turns off what Ray Data prints in this process and returns its settings."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name, level in _LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    return context


def start_shared_actors() -> None:
    """Runs a tiny Ray Data execution, so that Ray Data's shared actors live on this node.

    All readers of a cluster share these actors; the first reader creates them on its own node. If a worker created
    them, they would be lost with its node, and the other workers would stall until the cluster has noticed the loss,
    which takes a minute or two.
    """
    loggers = [logging.getLogger(name) for name in _LOG_LEVELS]
    saved_context, levels = DataContext.get_current().copy(), [ray_logger.level for ray_logger in loggers]
    try:
        silence_ray_data()
        ray.data.range(1, override_num_blocks=1).take_all()
    except Exception as error:
        # Then the first worker that reads creates them.
        logger.warning("Ray Data's shared actors could not be created here: %s", error)
    finally:
        # This may be the process of the user's notebook; its settings must stay.
        DataContext._set_current(saved_context)
        for ray_logger, level in zip(loggers, levels, strict=True):
            ray_logger.setLevel(level)


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
                "while it decoded the data set for data.cache: memory, which may need more memory than available", error
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
