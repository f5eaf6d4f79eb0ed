"""The cluster: joining or starting one, and whether the run fits into it.

Whether decoded data fits into memory: what workers share into the object stores, shuffle windows into that of the
nodes.

Imports while a cluster starts, which the driver only waits for.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import psutil
import ray
import torch
from ray.exceptions import AuthenticationError
from ray.util.client import ray as client

from ray_app.cluster.ray_private import (
    Node,
    count_fitting,
    count_fitting_on_gpus,
    evaluator_gpus,
    has_evaluator,
    job_config,
    known_labels,
    max_resources,
    nodes_with_labels,
    require_token,
    restore_auth_mode,
    search_path,
)
from ray_app.config.config import Config
from ray_app.data.reader import RowSource
from ray_app.errors import ConfigError
from ray_app.plan.assignment import count_passes
from ray_app.process import defer_interrupts, restore_handler, set_variables, without_gc
from ray_app.train.job import Job

_READING_CPUS = 1
_SOCKET_TOO_LONG = "AF_UNIX path length"
"""What Ray and Python say of the path of a socket that the system cannot hold."""
_SET_TOKEN = (
    "Set RAY_AUTH_MODE=token, and put the cluster's token into ~/.ray/auth_token, a file that RAY_AUTH_TOKEN_PATH"
    " names, or RAY_AUTH_TOKEN."
)
_ANY = 1_000_000


def needs_cluster(config: Config) -> bool:
    """Whether anything of the run is outside the calling process: workers, an evaluator, or a cluster that it is told
    to join.
    """
    return config.train.strategy != "single" or has_evaluator(config) or config.run.ray_address is not None


@contextmanager
def cluster(config: Config) -> Iterator[bool]:
    """Connects to Ray: the connection that is there, the configured address, `RAY_ADDRESS`, or a local cluster of our
    own.

    A run that does not need one gets none, unless there is a connection already.

    Only a cluster of our own declares more logical CPUs than the machine has cores, so that a small machine can try
    several workers.

    When it is over, the environment and the handler of SIGTERM are what they were: the next cell of a notebook may join
    another cluster. A connection that several runs of one process share, in its threads, is closed by the last of them.

    Yields:
        Whether the cluster is our own, or there is none; then what is in it ends with the context.

    Raises:
        ConfigError: Ray Client is, or is to be, the connection.
    """
    if client.is_connected() or (_address(config) or "").startswith("ray://"):
        raise ConfigError(
            "A run cannot go through Ray Client (an address ray://...): its driver is a part of the cluster. Start it"
            " on a node of the"
            " cluster, for instance by ray-app submit, or in Jupyter on the head node, with the address auto."
        )
    if not ray.is_initialized() and not needs_cluster(config):
        yield True
        return
    interval = set_variables(
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=os.environ.get("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    )
    with interval, _shared.connected(partial(_connect, config)) as is_first:
        yield is_first and not _address(config)


def _connect(config: Config) -> None:
    if (address := _address(config)) is not None:
        ray.init(address=address, job_config=job_config(), logging_level=logging.WARNING)
    else:
        _start(config)


def reconnect(config: Config) -> None:
    """Leaves the cluster that this process has connected to, which ends the actors and tasks that it left there, and
    connects anew.

    A connection that `cluster` has not made, such as a notebook's, stays: with it would go what its owner has there.
    """
    if _shared.is_connected:
        ray.shutdown()
        _connect(config)


def _address(config: Config) -> str | None:
    """The cluster to join, if there is one."""
    return config.run.ray_address or os.environ.get("RAY_ADDRESS")


def _start(config: Config) -> None:
    """Starts a cluster of our own; an interrupt waits for that, or its processes would be left."""
    logging.getLogger("ray._private.authentication").setLevel(
        logging.ERROR
    )  # that our own cluster has a token is no warning
    require_token()
    with (
        set_variables(PYTHONPATH=os.pathsep.join(search_path())),
        defer_interrupts(),
    ):  # of a `runtime_env` Ray starts no processes in advance
        ray.init(
            address="local",
            num_cpus=max(
                os.cpu_count() or 1,
                math.ceil(_wanted_cpus(config, config.scaling.worker_limit + config.scaling.standby_workers)),
            ),
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )


class _Shared:
    """The connection to Ray that the runs of a process make: by the first of those that are there at a time, until the
    last has ended.
    """

    def __init__(self) -> None:
        self._lock, self._end, self._users = threading.Lock(), ExitStack(), 0

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that the runs made."""
        return self._users > 0

    @contextmanager
    def connected(self, connect: Callable[[], object]) -> Iterator[bool]:
        """The time of one run; yields whether it is the one that connected. A connection of the user's is taken, and
        left.
        """
        with self._lock:
            is_first = not self._users and not ray.is_initialized()
            if is_first:
                self._connect(connect)
            counts = bool(is_first or self._users)
            self._users += counts
        try:
            yield is_first
        finally:
            with self._lock:
                self._users -= counts
                if counts and not self._users:
                    self._end.close()

    def _connect(self, connect: Callable[[], object]) -> None:
        with ExitStack() as stack:
            stack.enter_context(restore_auth_mode())
            stack.enter_context(restore_handler(signal.SIGTERM))  # Ray puts its own in place
            stack.callback(ray.shutdown)
            with connection_errors():
                connect()
            self._end = stack.pop_all()


@contextmanager
def connection_errors() -> Iterator[None]:
    """The time of connecting to Ray; what a user can change about an error is said.

    Raises:
        ConfigError: The cluster does not answer or wants a token, or the folder of Ray's sockets has too long a path.
    """
    try:
        yield
    except AuthenticationError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"The Ray cluster wants a token, and this process gave none, or another: {reason} {_SET_TOKEN}"
        ) from error
    except ConnectionError as error:
        # To a process that gives no token a cluster that wants one does not answer.
        raise ConfigError(
            f"Ray does not answer: {error}. Check the address (run.ray_address, RAY_ADDRESS) and that the cluster runs."
            f" `ray start` may"
            f" also have asked for a token. {_SET_TOKEN}"
        ) from error
    except OSError as error:
        if _SOCKET_TOO_LONG not in str(error):
            raise
        raise ConfigError(
            f"Ray cannot open its sockets, whose paths may have 107 bytes: {error}. TMPDIR or RAY_TMPDIR is too long a"
            f" path; set RAY_TMPDIR"
            " to a short folder, such as /tmp/ray-1."
        ) from error


_shared = _Shared()


def _evaluator_cpus(config: Config) -> float:
    return config.evaluate.num_cpus if has_evaluator(config) else 0


def _server_cpus(config: Config) -> float:
    return config.train.servers * config.train.server_cpus if config.train.strategy == "parameter_server" else 0


def reserved_cpus(config: Config) -> float:
    """Logical CPUs that are not for training workers: the evaluator's, the parameter servers' and one for reading."""
    return _evaluator_cpus(config) + _server_cpus(config) + _READING_CPUS


def _wanted_cpus(config: Config, workers: int) -> float:
    each = config.scaling.cpus_per_worker if config.train.strategy != "single" else 0
    return workers * each + reserved_cpus(config)


def resolve_max_workers(config: Config, before: Config | None = None) -> Config:
    """With a number of workers in place of `scaling.max_workers: all`: that of the run if it exists, else as many as
    the cluster that it would join has room for, or may grow to; on one of its own as many as this machine has cores, or
    GPUs.

    Args:
        config: As given.
        before: That of the run that exists.

    Raises:
        ConfigError: Not even `min_workers` fit, or nobody knows how far the cluster may grow.
    """
    scaling = config.scaling
    if scaling.max_workers != "all":
        return config
    if before is not None:
        return config.replace(scaling__max_workers=before.scaling.max_workers)
    most = config.replace(scaling__max_workers=scaling.logical_workers or _ANY)
    if config.train.strategy == "single" or ray.is_initialized() or _address(config):
        with cluster(config):
            there = (ray.cluster_resources(), ray.nodes(), max_resources()) if ray.is_initialized() else ({}, [], None)
            found = workers_that_fit(most, *there)
            if found == _ANY:
                raise ConfigError(
                    "scaling.max_workers is all, and the cluster's autoscaler does not tell how many nodes it may"
                    " start; give a number."
                )
            return most.replace(scaling__max_workers=found)
    if scaling.gpus_per_worker:
        fitting = count_fitting_on_gpus(torch.cuda.device_count() - evaluator_gpus(config), scaling.gpus_per_worker)
    else:
        fitting = count_fitting(os.cpu_count() or 1, scaling.cpus_per_worker)
    return most.replace(scaling__max_workers=max(scaling.min_workers, min(int(fitting), most.scaling.worker_limit)))


def _refuse_unlabelled(config: Config, nodes: list[Node]) -> None:
    """Refuses selectors of the evaluator and of parameter servers that no node carries which has what one of them
    reserves.

    Raises:
        ConfigError: Ray would wait for such a node for ever.
    """
    evaluate, train = config.evaluate, config.train
    needed = (
        [("evaluate.label_selector", evaluate.label_selector, evaluate.num_cpus, evaluate.num_gpus)]
        if has_evaluator(config)
        else []
    )
    if train.strategy == "parameter_server":
        needed.append(("train.server_label_selector", train.server_label_selector, train.server_cpus, 0))
    for field, selector, cpus, gpus in needed:
        carrying = nodes_with_labels(nodes, selector, field) if selector else []
        if selector and not any(
            n["Resources"].get("CPU", 0.0) >= cpus and n["Resources"].get("GPU", 0.0) >= gpus for n in carrying
        ):
            raise ConfigError(
                f"{field} is {selector}, and no node of {cpus:g} CPU and {gpus:g} GPU is labelled so; the labels are"
                f" {known_labels(nodes)}."
                " Start a node with `ray start --labels name=value`, or choose other labels."
            )


def _workers_on(config: Config, nodes: list[Node]) -> int:
    """How many workers the nodes that carry the labels of `scaling.label_selector` have room for.

    Raises:
        ConfigError: No node carries them.
    """
    scaling = config.scaling
    carrying = nodes_with_labels(nodes, scaling.label_selector)
    if not carrying:
        raise ConfigError(
            f"scaling.label_selector is {scaling.label_selector}, and no node of the cluster is labelled so; its labels"
            f" are"
            f" {known_labels(nodes)}. Start a node with `ray start --labels name=value`, or choose other labels."
        )
    needs = [("CPU", scaling.cpus_per_worker, count_fitting), ("GPU", scaling.gpus_per_worker, count_fitting_on_gpus)]
    needs = [need for need in needs if need[1]]
    if not needs:
        return scaling.worker_limit
    return sum(
        int(min(fitting(node["Resources"].get(name, 0.0), each) for name, each, fitting in needs)) for node in carrying
    )


def workers_that_fit(
    config: Config, resources: dict[str, float], nodes: list[Node], most: dict[str, float] | None = None
) -> int:
    """How many workers the cluster has room for besides the evaluator and one CPU for reading, at most `max_workers`.

    Args: config: What each part reserves. resources: All resources of the cluster by Ray's names. nodes: Its nodes;
        looked at with `scaling.label_selector` only. most: What an autoscaler may make of the resources; then the run
        waits for that, and nodes that are still to come have any label.

    Raises:
        ConfigError: Not even `min_workers` fit, so that the run would wait for ever.
    """
    if config.train.strategy == "single":
        return 1
    scaling = config.scaling
    cpus, gpus = (max(resources.get(name, 0.0), (most or {}).get(name, 0.0)) for name in ("CPU", "GPU"))
    room = [float(scaling.worker_limit)]
    free_cpus = cpus - reserved_cpus(config)
    free_gpus = gpus - evaluator_gpus(config)
    for free, each, fitting in (
        (free_cpus, scaling.cpus_per_worker, count_fitting),
        (free_gpus, scaling.gpus_per_worker, count_fitting_on_gpus),
    ):
        room.append(0 if free < 0 else fitting(free, each) if each else math.inf)
    workers = int(min(room))
    if most is None:
        _refuse_unlabelled(config, nodes)
    if scaling.label_selector and most is None:
        on_labelled = _workers_on(config, nodes)
        if on_labelled < scaling.min_workers:
            raise ConfigError(
                f"The run does not fit: the nodes labelled {scaling.label_selector} (scaling.label_selector) have room"
                f" for {on_labelled}"
                f" workers of {scaling.cpus_per_worker:g} CPU and {scaling.gpus_per_worker:g} GPU, below"
                f" scaling.min_workers ="
                f" {scaling.min_workers}. Label more nodes, or lower scaling.min_workers."
            )
        workers = min(workers, on_labelled)
    if workers < scaling.min_workers:
        has = "has" if most is None else "grows to at most"
        raise ConfigError(
            f"The run does not fit: scaling.min_workers = {scaling.min_workers} workers of {scaling.cpus_per_worker:g}"
            f" CPU and"
            f" {scaling.gpus_per_worker:g} GPU, the evaluator ({_evaluator_cpus(config):g} CPU,"
            f" {evaluator_gpus(config):g} GPU),"
            f" parameter servers ({_server_cpus(config):g} CPU) and {_READING_CPUS} CPU for reading need"
            f" {_wanted_cpus(config, scaling.min_workers):g} CPU and"
            f" {scaling.min_workers * scaling.gpus_per_worker + evaluator_gpus(config):g} GPU; the cluster {has}"
            f" {cpus:g} CPU and"
            f" {gpus:g} GPU. Add nodes, or lower scaling.min_workers, scaling.cpus_per_worker or"
            " what evaluate.num_cpus and evaluate.num_gpus reserve."
        )
    return workers


logger = logging.getLogger(__name__)


def shared_bytes(job: Job) -> int:
    """Bytes in the object store of each node: the training data with `data.cache: memory`, and what the workers
    evaluate.
    """
    if job.config.train.strategy == "single":
        return 0  # in the calling process
    trained = _bytes_of(job.source) if job.config.data.cache == "memory" else 0
    return trained + (_bytes_of(job.evaluation) if job.workers_evaluate and job.evaluation is not None else 0)


def check_object_stores(needed: int, nodes: list[Node]) -> str:
    """Whether every node's object store holds the decoded data.

    Args:
        needed: Bytes of it.
        nodes: As `ray.nodes()` tells.

    Raises:
        ConfigError: One does not.
    """
    stores = {
        str(n["NodeManagerAddress"]): int(n["Resources"].get("object_store_memory", 0)) for n in nodes if n["Alive"]
    }
    name, least = min(stores.items(), key=lambda item: item[1])
    if needed > least:
        raise ConfigError(
            f"The decoded data that workers share (data.cache: memory, evaluate.where: workers) needs"
            f" {megabytes(needed)} in each node's"
            f" object store; {name} has {megabytes(least)}. Set data.cache to disk or none and evaluate.where to actor,"
            f" or start the nodes"
            " with a larger --object-store-memory."
        )
    return f"{megabytes(needed)} of decoded data fit into each node's object store (the smallest: {megabytes(least)})."


def check_window_memory(job: Job, workers: int, nodes: list[Node]) -> None:
    """Refuses shuffle windows that a worker cannot hold, and warns of those that it could not with as few workers as
    there may be.

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
        played = count_passes(min(number, plan.logical_workers), plan.logical_workers)
        needed = rows * row_bytes * (played * (1 + prefetch) + 1)
        if needed > there:
            said = (
                f"A worker of {number} would hold shuffle windows of {megabytes(needed)}: {rows:,} rows"
                f" (data.shuffle_window_rows) x"
                f" {row_bytes:,} bytes x {played} logical workers played x {1 + prefetch} (data.prefetch_windows + 1),"
                f" and one more; a node"
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


def import_in_background(module: str) -> None:
    """Imports in a thread what is needed as soon as the cluster is there.

    Who imports it before that is done waits for the rest, and so does the end of the process: an import that it cuts
    short can abort it.
    """

    def work() -> None:
        with suppress(Exception), without_gc():  # raised again where it is needed
            importlib.import_module(module)

    threading.Thread(target=work, name="imports").start()
