"""The Ray cluster of a run: connecting to one or starting one, and whether the run fits into it.

`cluster` connects, and `workers_that_fit` counts the workers for which there are CPUs and GPUs. `check_object_stores`
and `check_window_memory` check that decoded data fits into memory: the data that workers share into the object stores,
and shuffle windows into the memory of a node.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import psutil
import ray
from ray.util.client import ray as client

from ray_app.cluster.ray_private import (
    Node,
    connection_errors,
    imports_in_advance,
    in_own_sessions,
    job_config,
    known_labels,
    max_resources,
    module_times,
    nodes_with_labels,
    on_loopback,
    private_files,
    quiet_cluster_start,
    require_token,
    restore_auth_mode,
    search_path,
    without_services,
)
from ray_app.config.config import Config
from ray_app.config.sections import ScalingSection
from ray_app.config.variables import python_variables, recorded_variables
from ray_app.data.reader import RowSource
from ray_app.devices import accelerator
from ray_app.errors import ConfigError
from ray_app.plan.assignment import count_passes
from ray_app.process import defer_interrupts, lasting_thread, restore_handler, set_variables
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_READING_CPUS = 1
_UNLIMITED_WORKERS = 1_000_000
"""A number of workers that no cluster fits, where `scaling.max_workers` must be a number."""


@dataclass(frozen=True)
class ClusterCapacity:
    """The resources of a cluster.

    Args:
        resources: All resources by Ray's names.
        nodes: The nodes as `ray.nodes()` returns them.
        max_resources: The resources to which an autoscaler may grow the cluster; None without an autoscaler. Then a run
            waits for them, and nodes that do not exist yet may have any label.
    """

    resources: dict[str, float]
    nodes: Sequence[Node] = ()
    max_resources: dict[str, float] | None = None


def cluster_capacity() -> ClusterCapacity:
    """Returns the capacity of the connected cluster, which is empty if there is none."""
    if not ray.is_initialized():
        return ClusterCapacity({})
    return ClusterCapacity(ray.cluster_resources(), ray.nodes(), max_resources())


def needs_cluster(config: Config) -> bool:
    """Returns whether a part of the run is outside the calling process: workers, an evaluator, or a cluster to join."""
    return config.train.strategy_traits.has_workers or has_evaluator(config) or config.run.ray_address is not None


@contextmanager
def cluster(config: Config) -> Iterator[bool]:
    """Connects to Ray: the existing connection, the configured address, `RAY_ADDRESS`, or a new local cluster.

    A run that does not need a cluster gets none, unless there is a connection already. Only a local cluster that is
    started here declares more logical CPUs than the machine has cores, so that a small machine can try several workers.

    The local cluster of a `session` that a run cannot use, see `_is_outdated`, is replaced by another.

    At the end the environment and the handler of SIGTERM are restored, because the next cell of a notebook may join
    another cluster. If several runs share a connection, in threads of one process, the last of them closes it.

    Yields:
        Whether the cluster was started here, or there is none; then its contents end with this process.

    Raises:
        ConfigError: The connection is, or would be, one of Ray Client.
    """
    if client.is_connected() or (ray_address(config) or "").startswith("ray://"):
        raise ConfigError(
            "A run cannot use Ray Client (an address ray://...), because its driver is a part of the cluster. Start it"
            " on a node of the cluster, for instance with ray-app submit, or in Jupyter on the head node, with the"
            " address auto."
        )
    if not ray.is_initialized() and not needs_cluster(config):
        yield True
        return
    interval = set_variables(
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=os.environ.get("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    )
    with interval, _shared.connected(partial(_connect, config), partial(_is_outdated, config)):
        yield is_local_cluster()


@contextmanager
def keep_connection() -> Iterator[None]:
    """Keeps a connection that `cluster` opens inside the block until its end, for later uses of `cluster`."""
    with _shared.kept():
        yield


def session() -> ExitStack:
    """Keeps Ray between the runs of this process, so that all but the first start in about a second.

    Processes of the next run are started before the present one ends. They import PyTorch, Ray and `ray_app`, for which
    they need a free CPU, and no module of the user. A run that needs more CPUs than the cluster has, or a changed
    module, gets another. The session ends with the block of a `with` statement, by its `close`, or with the process.
    """
    stack = ExitStack()
    stack.enter_context(_shared.kept(is_session=True))
    atexit.register(stack.close)
    return stack


def is_local_cluster() -> bool:
    """Returns whether a run of this process has started the connected cluster, which then ends with this process."""
    return _shared.local_files is not None and ray.is_initialized()


def is_alone() -> bool:
    """Returns whether the cluster was started here, and no other run of this process uses it now."""
    return is_local_cluster() and _shared.users == 1


def keeps_local_cluster() -> bool:
    """Returns whether the cluster was started by a run inside a `session`, so that it outlives the run."""
    return is_local_cluster() and _shared.sessions > 0


def _is_outdated(config: Config) -> bool:
    """Returns whether a run cannot use the local cluster of a session.

    It is to join another one, needs more CPUs, or a module or a variable on which the bits depend has changed: Ray's
    processes for reading have the old module, and all have the old variable.
    """
    files, variables = _shared.local_files, _shared.local_variables
    if files is None or not ray.is_initialized():
        return False
    changed = [file for file, time_ns in module_times().items() if files.setdefault(file, time_ns) != time_ns]
    is_small = ray.cluster_resources().get("CPU", 0.0) < _local_cpus(config)
    return is_small or bool(changed) or ray_address(config) is not None or variables != recorded_variables(os.environ)


def reconnect(config: Config) -> None:
    """Leaves the cluster, which ends the actors and tasks that this process left there, and connects anew.

    A connection that was not made by `cluster`, such as one of a notebook, stays: closing it would also end what its
    owner runs there.
    """
    if _shared.is_open:
        ray.shutdown()
        _connect(config)


def _connect(config: Config) -> None:
    if (address := ray_address(config)) is not None:
        ray.init(address=address, job_config=job_config(), logging_level=logging.WARNING)
    else:
        _start(config)


def ray_address(config: Config) -> str | None:
    """Returns the address of the cluster to join; None if there is none."""
    return config.run.ray_address or os.environ.get("RAY_ADDRESS")


def _start(config: Config) -> None:
    """Starts a local cluster. An interrupt is deferred until it runs, since its processes would remain otherwise."""
    # Ray warns that the cluster has a token, which `require_token` has made.
    quiet_cluster_start()
    require_token()
    # The search path is passed as a variable, because Ray starts no processes in advance for a `runtime_env`.
    variables = {"PYTHONPATH": os.pathsep.join(search_path())} | private_files() | python_variables(os.environ)
    if _shared.sessions:
        variables |= imports_in_advance()
    with set_variables(**variables), on_loopback(), in_own_sessions(), without_services(), defer_interrupts():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, _local_cpus(config)),
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    _shared.local_files, _shared.local_variables = module_times(), recorded_variables(os.environ)


def _local_cpus(config: Config) -> int:
    return math.ceil(wanted_cpus(config, config.scaling.worker_limit + config.scaling.standby_workers))


class _SharedConnection:
    """The connection to Ray that concurrent runs of a process share: the first opens it, the last closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closing = ExitStack()
        # The number of runs that use the connection, and of blocks that hold it open.
        self.users = self._holds = 0
        self.is_open = False
        self.sessions = 0
        """The number of open blocks of `session`."""
        self.local_files: dict[str, int] | None = None
        """Of a cluster that was started here: when each module of the user was changed, by its file; else None."""
        self.local_variables = dict[str, str]()

    @contextmanager
    def connected(self, connect: Callable[[], object], is_outdated: Callable[[], bool]) -> Iterator[None]:
        """Connects for the time of one run.

        A connection that the user has opened is used and left open. One that is only kept is closed before, if it
        `is_outdated`.
        """
        with self._lock:
            if self.is_open and not self.users and is_outdated():
                self._close()
            if not self.users and not ray.is_initialized():
                self._open(connect)
            # A connection that only a block still holds open is one that a run has opened, too.
            self.users += (is_counted := self.is_open)
        try:
            yield
        finally:
            with self._lock:
                self.users -= is_counted
                self._close_unused()

    @contextmanager
    def kept(self, is_session: bool = False) -> Iterator[None]:
        """Keeps a connection that a run opens inside the block until its end."""
        with self._lock:
            self._holds += 1
            self.sessions += is_session
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                self.sessions -= is_session
                self._close_unused()

    def _close_unused(self) -> None:
        """Closes the connection, if it was opened here, unless it is used or kept."""
        if not self.users and not self._holds:
            self._close()

    def _close(self) -> None:
        self.is_open = False
        self.local_files = None
        self._closing.close()

    def _open(self, connect: Callable[[], object]) -> None:
        with ExitStack() as stack:
            stack.enter_context(restore_auth_mode())
            # Ray installs its own handler.
            stack.enter_context(restore_handler(signal.SIGTERM))
            call = stack.enter_context(lasting_thread())
            stack.callback(ray.shutdown)
            with connection_errors():
                call(connect)
            self._closing, self.is_open = stack.pop_all(), True


_shared = _SharedConnection()


def count_fitting(free: float, per_worker: float) -> float:
    """Returns how many workers that need `per_worker` of a resource fit into `free` of it, whole or infinite.

    5 workers of 0.2 fit into 1.0, which a division of floats rounds to 4.
    """
    return (free + 1e-6) // per_worker if math.isfinite(free) else free


def count_fitting_on_gpus(free: float, per_worker: float) -> float:
    """Returns how many workers that need `per_worker` GPUs fit into `free` GPUs, whole or infinite.

    Ray places a fraction of a GPU on one GPU, so two workers of 0.6 fit on two GPUs, not three.
    """
    if per_worker >= 1 or not math.isfinite(free):
        return count_fitting(free, per_worker)
    whole = math.floor(free + 1e-6)
    return whole * count_fitting(1, per_worker) + count_fitting(max(0.0, free - whole), per_worker)


def workers_in(resources: dict[str, float], scaling: ScalingSection) -> float:
    """Returns how many workers fit into resources by Ray's names, such as those of a node; whole or infinite."""
    counts = [
        count(resources.get(name, 0.0), per_worker)
        for name, per_worker, count in (
            ("CPU", scaling.cpus_per_worker, count_fitting),
            ("GPU", scaling.worker_gpus, count_fitting_on_gpus),
        )
        if per_worker
    ]
    return min(counts, default=math.inf)


def has_evaluator(config: Config) -> bool:
    """Returns whether the run has an evaluator actor."""
    return config.data.evaluation_path is not None and config.evaluate.where != "workers"


def evaluator_gpus(config: Config) -> float:
    """Returns the GPUs of the evaluator, which are not for training workers."""
    return config.evaluate.num_gpus * config.evaluate.workers if has_evaluator(config) else 0.0


def reserved_cpus(config: Config) -> float:
    """Returns the logical CPUs that are not for training workers.

    They are the CPUs of the evaluator and of the parameter servers, and one for reading.
    """
    return _evaluator_cpus(config) + _server_cpus(config) + _READING_CPUS


def _evaluator_cpus(config: Config) -> float:
    return config.evaluate.num_cpus * config.evaluate.workers if has_evaluator(config) else 0


def _server_cpus(config: Config) -> float:
    return config.train.servers if config.train.strategy_traits.has_servers else 0


def wanted_cpus(config: Config, workers: int) -> float:
    """Returns the logical CPUs that a run with this many workers reserves in all."""
    cpus_per_worker = config.scaling.cpus_per_worker if config.train.strategy_traits.has_workers else 0
    return workers * cpus_per_worker + reserved_cpus(config)


def workers_that_fit(config: Config, capacity: ClusterCapacity) -> int:
    """Returns how many workers, at most `max_workers`, fit into the cluster with the evaluator and one CPU for reading.

    Raises:
        ConfigError: Not even `min_workers` fit, so that the run would wait for ever.
    """
    if not config.train.strategy_traits.has_workers:
        return 1
    scaling, max_resources = config.scaling, capacity.max_resources
    cpus, gpus = (
        max(capacity.resources.get(name, 0.0), (max_resources or {}).get(name, 0.0)) for name in ("CPU", "GPU")
    )
    free = {"CPU": cpus - reserved_cpus(config), "GPU": gpus - evaluator_gpus(config)}
    workers = min(scaling.worker_limit, 0 if min(free.values()) < 0 else workers_in(free, scaling))
    if max_resources is None:
        on_labeled = count_on_labeled(config, capacity.nodes)
        _check_labeled(config, capacity.nodes, on_labeled)
        if capacity.nodes and has_evaluator(config):
            check_evaluator_fits(config, capacity.nodes)
        workers = min(workers, on_labeled)
    if workers < scaling.min_workers:
        has = "has" if max_resources is None else "grows to at most"
        raise ConfigError(
            f"The run does not fit: scaling.min_workers = {scaling.min_workers} workers of {scaling.cpus_per_worker:g}"
            f" CPU and {scaling.worker_gpus:g} GPU, the evaluator ({_evaluator_cpus(config):g} CPU,"
            f" {evaluator_gpus(config):g} GPU), parameter servers ({_server_cpus(config):g} CPU) and"
            f" {_READING_CPUS} CPU for reading need {wanted_cpus(config, scaling.min_workers):g} CPU and"
            f" {scaling.min_workers * scaling.worker_gpus + evaluator_gpus(config):g} GPU; the cluster {has}"
            f" {cpus:g} CPU and {gpus:g} GPU. Add nodes, or lower scaling.min_workers, scaling.cpus_per_worker"
            " or what evaluate.workers, evaluate.num_cpus and evaluate.num_gpus reserve."
        )
    return int(workers)


def check_evaluator_fits(config: Config, nodes: Iterable[Node]) -> None:
    """Raises `ConfigError` if no node has what an actor of the evaluator reserves; Ray would wait for one for ever."""
    section, selector = config.evaluate, config.evaluate.label_selector or config.scaling.label_selector
    resources = [node["Resources"] for node in nodes_with_labels(nodes, selector)]
    if any(r.get("CPU", 0.0) >= section.num_cpus and r.get("GPU", 0.0) >= section.num_gpus for r in resources):
        return
    labels = f", labeled {selector}," if selector else ""
    raise ConfigError(
        f"The evaluator reserves {section.num_cpus:g} CPU and {section.num_gpus:g} GPU, which no node{labels} has."
        " Lower evaluate.num_cpus and evaluate.num_gpus (--num_cpus and --num_gpus of ray-app evaluate; 0 GPUs: it"
        " computes on the CPU), or add a node."
    )


def count_on_labeled(config: Config, nodes: Sequence[Node]) -> float:
    """Returns how many workers fit beside the evaluator and parameter servers on the nodes of `scaling.label_selector`.

    It is infinite without labels.
    """
    if not config.scaling.label_selector:
        return math.inf
    resources = [node["Resources"] for node in nodes_with_labels(nodes, config.scaling.label_selector)]
    cpus, gpus = (sum(part.get(name, 0.0) for part in resources) for name in ("CPU", "GPU"))
    # These have nodes of their own where they have labels of their own.
    evaluators, servers = config.evaluate.label_selector is None, config.train.server_label_selector is None
    cpus -= _evaluator_cpus(config) * evaluators + _server_cpus(config) * servers
    free = {"CPU": cpus, "GPU": gpus - evaluator_gpus(config) * evaluators}
    if min(free.values()) < 0:
        return 0
    return min(workers_in(free, config.scaling), sum(workers_in(part, config.scaling) for part in resources))


def _check_labeled(config: Config, nodes: Sequence[Node], workers: float) -> None:
    """Raises `ConfigError` if no node has the labels, or if these nodes have no capacity for `min_workers` workers."""
    scaling = config.scaling
    if workers >= scaling.min_workers:
        return
    if not nodes_with_labels(nodes, scaling.label_selector):
        raise ConfigError(
            f"scaling.label_selector is {scaling.label_selector}, but no node of the cluster has these labels; it has"
            f" {known_labels(nodes)}. Start a node with `ray start --labels name=value`, or choose other labels."
        )
    raise ConfigError(
        f"The run does not fit: the nodes labeled {scaling.label_selector} (scaling.label_selector) have capacity for"
        f" {workers:g} workers of {scaling.cpus_per_worker:g} CPU and {scaling.worker_gpus:g} GPU in addition to the"
        f" evaluator and parameter servers, below scaling.min_workers = {scaling.min_workers}. Label more nodes, or"
        " lower scaling.min_workers."
    )


def resolve_scaling(config: Config, before: Config | None = None) -> Config:
    """Returns the configuration without `scaling.max_workers: all`, `gpus_per_worker: auto` and `evaluate.where: auto`.

    An existing run keeps what was resolved. For a new run it follows from the cluster that it joins, with the nodes
    that an autoscaler may add; without such a cluster, from the cores and GPUs of this machine.

    Args:
        before: The configuration of the existing run; None if there is none.

    Raises:
        ConfigError: Not even `min_workers` fit, or it is not known how far the cluster may grow.
    """
    words = {"max_workers": "all", "gpus_per_worker": "auto"}
    names = [name for name, word in words.items() if getattr(config.scaling, name) == word]
    is_auto = config.evaluate.where == "auto"
    if before is not None:
        fields = {f"scaling__{name}": getattr(before.scaling, name) for name in names}
        if is_auto:
            gpus = config.evaluate.num_gpus or before.evaluate.num_gpus
            fields |= {"evaluate__where": before.evaluate.where, "evaluate__num_gpus": gpus}
        return config.replace(**fields)
    if is_auto and config.scaling.worker_gpus:
        names.append("evaluate.where")
    # A cluster that was started here has the size that an earlier run of this process needed.
    joins_cluster = (ray.is_initialized() and not is_local_cluster()) or ray_address(config) is not None
    # A run without workers knows its GPUs without a cluster.
    if names and joins_cluster and (config.train.strategy_traits.has_workers or config.scaling.max_workers == "all"):
        with cluster(config):
            return _resolve(config, cluster_capacity())
    return _resolve(config, None)


def _resolve(config: Config, capacity: ClusterCapacity | None) -> Config:
    """Returns the configuration with the numbers for a cluster of this capacity, or for this machine alone (None)."""
    if config.scaling.gpus_per_worker == "auto":
        on_gpus = _resolve_evaluation(config.replace(scaling__gpus_per_worker=1), capacity)
        config = on_gpus if _has_gpus(on_gpus, capacity) else config.replace(scaling__gpus_per_worker=0)
    config = _resolve_evaluation(config, capacity)
    scaling = config.scaling
    if scaling.max_workers != "all":
        return config
    largest = config.replace(scaling__max_workers=scaling.logical_workers or _UNLIMITED_WORKERS)
    if capacity is not None:
        workers = workers_that_fit(largest, capacity)
        if workers == _UNLIMITED_WORKERS:
            raise ConfigError(
                "scaling.max_workers is all, but the cluster's autoscaler does not report how many nodes it may start;"
                " set a number."
            )
    elif not config.train.strategy_traits.has_workers:
        workers = 1
    else:
        if scaling.worker_gpus:
            fitting = count_fitting_on_gpus(accelerator().count() - evaluator_gpus(config), scaling.worker_gpus)
        else:
            fitting = count_fitting(os.cpu_count() or 1, scaling.cpus_per_worker)
        workers = max(scaling.min_workers, min(int(fitting), largest.scaling.worker_limit))
    return largest.replace(scaling__max_workers=workers)


def _resolve_evaluation(config: Config, capacity: ClusterCapacity | None) -> Config:
    """Returns the configuration with workers or an actor, perhaps with a GPU, in place of `evaluate.where: auto`."""
    section, scaling = config.evaluate, config.scaling
    if section.where != "auto":
        return config
    if not scaling.worker_gpus or section.num_gpus or section.workers > 1:
        return config.replace(evaluate__where="actor")
    if config.train.strategy_traits.can_evaluate:
        return config.replace(evaluate__where="workers")
    gpus = accelerator().count() if capacity is None else capacity.resources.get("GPU", 0.0)
    unused = gpus - (scaling.worker_limit + scaling.standby_workers) * scaling.worker_gpus
    return config.replace(evaluate__where="actor", evaluate__num_gpus=int(unused >= 1))


def _has_gpus(config: Config, capacity: ClusterCapacity | None) -> bool:
    """Returns whether `min_workers` workers with GPUs fit into the cluster, or onto this machine (None)."""
    if capacity is None or not config.train.strategy_traits.has_workers:
        scaling = config.scaling
        return accelerator().count() >= scaling.min_workers * scaling.worker_gpus + evaluator_gpus(config)
    # An autoscaler that does not tell its limits may have no node with a GPU at all.
    if capacity.max_resources is not None and math.isinf(capacity.max_resources.get("GPU", 0.0)):
        capacity = replace(capacity, max_resources=capacity.max_resources | {"GPU": 0.0})
    try:
        workers_that_fit(config.replace(scaling__max_workers=config.scaling.min_workers), capacity)
    except ConfigError:
        return False
    return True


def shared_bytes(job: Job) -> int:
    """Returns the bytes of decoded data in the object store of each node.

    It is the training data with `data.cache: memory`, and the evaluation data if the workers evaluate.
    """
    # Without workers the data is in the calling process.
    if not job.config.train.strategy_traits.has_workers:
        return 0
    train_bytes = _decoded_bytes(job.source) if job.config.data.cache == "memory" else 0
    evaluation = job.eval_source if job.workers_evaluate else None
    return train_bytes + (_decoded_bytes(evaluation) if evaluation is not None else 0)


def check_object_stores(needed_bytes: int, nodes: Sequence[Node]) -> None:
    """Checks that the object store of every node has capacity for the decoded data.

    Raises:
        ConfigError: An object store is smaller.
    """
    stores = {
        str(n["NodeManagerAddress"]): int(n["Resources"].get("object_store_memory", 0)) for n in nodes if n["Alive"]
    }
    name, smallest_bytes = min(stores.items(), key=lambda item: item[1])
    if needed_bytes > smallest_bytes:
        raise ConfigError(
            f"The decoded data that workers share (data.cache: memory, evaluate.where: workers) needs"
            f" {megabytes(needed_bytes)} in each node's object store; {name} has {megabytes(smallest_bytes)}. Set"
            " data.cache to disk or none and evaluate.where to actor, or start the nodes with a larger"
            " --object-store-memory."
        )


def check_window_memory(job: Job, workers: int, nodes: Sequence[Node]) -> None:
    """Checks that a worker has memory for its shuffle windows, and warns if it would not with the fewest workers.

    Args:
        workers: The number of workers with which it starts.
        nodes: As `ray.nodes()` returns them; if empty, the memory of this machine counts.

    Raises:
        ConfigError: The windows of a worker do not fit into a node.
    """
    if job.config.data.cache == "memory":
        return
    plan, prefetch = job.plan, job.config.data.prefetch_windows
    memory_bytes = [int(n["Resources"]["memory"]) for n in nodes if n["Alive"] and "memory" in n["Resources"]]
    node_bytes = min(memory_bytes, default=psutil.virtual_memory().total)
    rows = min(plan.window_rows, plan.stream_rows(0))
    row_bytes = sum(spec.row_bytes for spec in job.fields.values())
    for number in (workers, job.config.scaling.min_workers):
        logical_workers = count_passes(min(number, plan.logical_workers), plan.logical_workers)
        needed_bytes = rows * row_bytes * (logical_workers * (1 + prefetch) + 1)
        if needed_bytes > node_bytes:
            message = (
                f"A worker of {number} would hold shuffle windows of {megabytes(needed_bytes)}: {rows:,} rows"
                f" (data.shuffle_window_rows) x {row_bytes:,} bytes x {logical_workers} logical workers x"
                f" {1 + prefetch} (data.prefetch_windows + 1), and one more; a node has {megabytes(node_bytes)}. Set"
                f" data.shuffle_window_rows to {max(1, rows * node_bytes // needed_bytes):,} or fewer."
            )
            if number == workers:
                raise ConfigError(message)
            logger.warning("%s Or raise scaling.min_workers.", message)


def _decoded_bytes(source: RowSource) -> int:
    return source.manifest.num_rows * sum(spec.row_bytes for spec in source.fields.values())


def megabytes(num_bytes: int) -> str:
    """Returns a number of bytes as a text such as `1,000.0 MB`."""
    return f"{num_bytes / 1e6:,.1f} MB"
