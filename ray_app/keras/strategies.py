"""The strategies of `tf.distribute` by their names and arguments, as fields of a configuration.

A replica is a logical worker: `num_replicas_in_sync` is `scaling.logical_workers`, which decides the result, and the
largest number of workers. How many workers train at a time does not change the result.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

import ray
import torch

from ray_app.cli.launch import Group, TFConfigClusterResolver, join
from ray_app.cluster.resources import cluster, cluster_capacity
from ray_app.config.config import Config
from ray_app.config.strategies import StrategyName
from ray_app.devices import HOST, accelerator
from ray_app.errors import ConfigError
from ray_app.task.keras import library

logger = logging.getLogger(__name__)

_LABEL = "tf-task"
"""The label of a Ray node with the type of its machine's task in `TF_CONFIG`."""
_DEVICE = re.compile(r"/?(?:device:)?(\w+):(\d+)", re.IGNORECASE)

_current: ContextVar[Strategy | None] = ContextVar("strategy", default=None)
"""The strategy of the scope that this thread is in."""
_groups: list[Group] = []
"""The connection of this process to the others of `TF_CONFIG`."""
_at_exit = ExitStack()
atexit.register(_at_exit.close)
_of_models: WeakKeyDictionary[Any, Strategy] = WeakKeyDictionary()
"""The strategy of each model that was built in a scope."""


class Strategy:
    """What all strategies have.

    Args:
        replicas: The number of replicas.
        fields: Fields of the configuration beside the numbers of workers.
        unused: Arguments that change nothing here, by their names.
        group: The connection to the other processes of `TF_CONFIG`.

    Attributes:
        num_replicas_in_sync: The number of replicas that a global batch is divided among, the same for a whole run.
    """

    name: ClassVar[StrategyName]
    """The value of `train.strategy`."""

    def __init__(
        self, replicas: int, fields: Mapping[str, Any], unused: Mapping[str, Any], group: Group | None = None
    ) -> None:
        for argument, value in unused.items():
            if value is not None:
                logger.info("%s has no effect here; docs/from-tf-distribute.md names the replacement.", argument)
        if replicas < 1:
            raise ConfigError(f"{type(self).__name__} has {replicas} replicas; it must be at least 1.")
        self.num_replicas_in_sync, self.group = replicas, group
        self._fields = fields

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the strategy of the models that the block makes, and of functions that it gives to `fit`."""
        token = _current.set(self)
        try:
            with library.notice_models(lambda model: _of_models.__setitem__(model, self)):
                yield self
        finally:
            _current.reset(token)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a configuration by their dotted names."""
        replicas = self.num_replicas_in_sync
        workers = {"scaling.max_workers": replicas, "scaling.logical_workers": replicas}
        return {"train.strategy": self.name, **workers, **self._fields}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name} here: fit runs the loop. For your own loop, see"
            " docs/loop.md#a-loop-with-a-keras-model; docs/from-tf-distribute.md lists the other counterparts."
        )


class MirroredStrategy(Strategy):
    """Each worker has all parameters, and gradients are added in every step; the workers of one machine.

    Args:
        devices: `["gpu:0", "gpu:1"]` or `["cpu:0", "cpu:1"]`; by default all GPUs of this machine, or one CPU.
    """

    name = "ddp"

    def __init__(self, devices: list[str] | None = None, cross_device_ops: Any = None) -> None:
        super().__init__(*_replicas_of(devices), {"cross_device_ops": cross_device_ops})


class MultiWorkerMirroredStrategy(Strategy):
    """The same with the workers of several machines.

    Args:
        cluster_resolver: By default the processes of `TF_CONFIG`. If there are several, the chief waits for all others,
            which give their machines to its runs.
        communication_options: See `CommunicationOptions`.
        workers: The number of replicas; by default the number of GPUs of the chief's and the workers' machines, or of
            the Ray cluster; without GPUs of the machines.
    """

    name = "ddp"

    def __init__(
        self, cluster_resolver: Any = None, communication_options: Any = None, *, workers: int | None = None
    ) -> None:
        self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        replicas, fields, group = _replicas_on(self.cluster_resolver, workers, "chief", "master", "worker")
        super().__init__(replicas, fields | _communication_fields(communication_options), {}, group)


class CentralStorageStrategy(Strategy):
    """Parameters and optimizer are in the host memory of one worker, which makes all updates.

    Args:
        compute_devices: See `MirroredStrategy`.
    """

    name = "central_storage"

    def __init__(self, compute_devices: list[str] | None = None, parameter_device: str | None = None) -> None:
        super().__init__(*_replicas_of(compute_devices), {"parameter_device": parameter_device})


class ParameterServerStrategy(Strategy):
    """Servers hold parameters and optimizer. Steps are synchronous, unless `fields` has `train.staleness` above 0.

    Args:
        cluster_resolver: See `MultiWorkerMirroredStrategy`. Servers run on the machines of `ps`.
        workers: The number of replicas; by default the number of GPUs of the workers' machines, or of the Ray cluster;
            without GPUs of the machines.
        servers: The number of servers; by default the number of `ps` in `TF_CONFIG`, or 1.
    """

    name = "parameter_server"

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Any = None,
        *,
        workers: int | None = None,
        servers: int | None = None,
    ) -> None:
        self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        replicas, fields, group = _replicas_on(self.cluster_resolver, workers, "worker")
        fields["train.servers"] = servers or len(self.cluster_resolver.cluster_spec().as_dict().get("ps", "1"))
        super().__init__(replicas, fields, {"variable_partitioner": variable_partitioner}, group)


class OneDeviceStrategy(Strategy):
    """The model trains in this process, without workers.

    Args:
        device: `"/cpu:0"` or `"/gpu:0"`.
    """

    name = "single"

    def __init__(self, device: str) -> None:
        super().__init__(*_replicas_of([device]), {})


class _DefaultStrategy(Strategy):
    """What `get_strategy` returns outside of all scopes: one replica in this process, on its GPU if it has one."""

    name = "single"


def TPUStrategy(*_: Any, **__: Any) -> NoReturn:
    """Raises ConfigError, since there is no counterpart."""
    raise ConfigError("Workers compute on GPUs or CPUs, not on TPUs. Use MirroredStrategy for the GPUs of a machine.")


@dataclass(frozen=True)
class CommunicationOptions:
    """How gradients travel: `train.bucket_mb` in bytes, `failure.step_timeout_s`, and AUTO, NCCL or RING (gloo)."""

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: Any = "AUTO"


def _communication_fields(options: Any) -> dict[str, Any]:
    """Returns the fields that communication options become; those of TensorFlow have the same attributes."""
    if options is None:
        return {}
    kind = str(getattr(options.implementation, "value", options.implementation)).upper()
    fields = {
        "train.backend": "gloo" if kind == "RING" else "auto",
        "train.bucket_mb": options.bytes_per_pack / (1 << 20) or None,
        "failure.step_timeout_s": options.timeout_seconds,
    }
    return {name: value for name, value in fields.items() if value is not None}


def get_strategy() -> Strategy:
    """Returns the strategy of the present scope, or one of a single replica."""
    return _current.get() or _DefaultStrategy(1, {}, {})


def has_strategy() -> bool:
    """Returns whether this thread is in the scope of a strategy."""
    return _current.get() is not None


def strategy_of(model: Any) -> Strategy | None:
    """Returns the strategy with the scope in which a model was built; for other objects the present strategy."""
    made_in = _of_models.get(model) if isinstance(model, library.import_keras().Model) else None
    return made_in or _current.get()


def _replicas_of(devices: list[str] | None) -> tuple[int, dict[str, Any]]:
    """Returns the number of replicas on some devices of this machine, and the fields that choose the devices."""
    if devices is None:
        return max(1, torch.accelerator.device_count()), {}
    matches = [_DEVICE.fullmatch(device) for device in devices]
    kinds = {match[1].lower() if match else "" for match in matches}
    if not devices or len(kinds) > 1 or not kinds <= {HOST.type, "gpu"}:
        raise ConfigError(f"devices are {devices}; they must be all GPUs (gpu:0) or all CPUs (cpu:0).")
    numbers = sorted(int(match[2]) for match in matches if match)
    if HOST.type in kinds:
        return len(devices), {"scaling.gpus_per_worker": 0}
    if numbers != list(range(len(numbers))):
        raise ConfigError(
            f"devices are {devices}; workers use the first GPUs that this process sees. Start it with"
            f" {accelerator().visible_variable}={','.join(map(str, numbers))}, and name gpu:0 to"
            f" gpu:{len(numbers) - 1}."
        )
    return len(devices), {"scaling.gpus_per_worker": 1}


def _replicas_on(resolver: Any, workers: int | None, *kinds: str) -> tuple[int, dict[str, Any], Group | None]:
    """Returns the number of replicas on machines with tasks of some types, fields of the chief, and the connection."""
    tasks = resolver.cluster_spec().as_dict()
    if tasks.get("ps") and "chief" in kinds:
        raise ConfigError(
            "TF_CONFIG has tasks of the type ps, but MultiWorkerMirroredStrategy has no parameter servers. Use"
            " ParameterServerStrategy, or leave ps out of the cluster in every process."
        )
    count = sum(len(tasks.get(kind, [])) for kind in kinds)
    if (group := join_group(resolver)) is None:
        return workers or _count_cluster_devices(count), {}, None
    resources: dict[str, list[tuple[float, float]]] = {}
    for node in group.nodes:
        amounts = node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)
        resources.setdefault(node["Labels"][_LABEL], []).append(amounts)
    parts = [part for kind in kinds for part in resources.get(kind, [])]
    gpus = int(sum(gpus for _, gpus in parts)) if group.machines.nodes else torch.accelerator.device_count()
    fields: dict[str, Any] = {"evaluate.where": "actor"} if "evaluator" in tasks else {}
    for kind, field in (("evaluator", "evaluate.label_selector"), ("ps", "train.server_label_selector")):
        if kind in resources:
            fields[field] = {_LABEL: kind}
    if resources.keys() - set(kinds):
        fields["scaling.label_selector"] = {_LABEL: f"in({','.join(kinds)})"}
    if parts and not gpus:
        # One replica on each machine; a CPU is left for reading.
        fields["scaling.cpus_per_worker"] = max(1, min(cpus for cpus, _ in parts) - 1)
    return workers or int(group.broadcast(max(gpus, count))), fields, group


def join_group(resolver: Any) -> Group | None:
    """Makes a Ray cluster of the machines of a cluster resolver, until the process ends; None with one task.

    Raises:
        ConfigError: There is a Ray cluster already, and this is not the process of the chief.
    """
    task = {"type": resolver.task_type, "index": resolver.task_id}
    tasks = resolver.cluster_spec().as_dict()
    machines = TFConfigClusterResolver(json.dumps({"cluster": tasks, "task": task}) if tasks else "").machines
    if machines.size > 1 and not _groups:
        name = machines.names[machines.rank]
        if not (ray.is_initialized() or os.environ.get("RAY_ADDRESS")):
            logger.warning("This process, %s, waits for other ones of TF_CONFIG: %s.", name, ", ".join(machines.names))
            _groups.append(_at_exit.enter_context(join(machines, f"{_LABEL}={resolver.task_type}")))
        elif machines.rank:
            raise ConfigError(
                f"TF_CONFIG says that this process is {name}, but in an existing Ray cluster, Ray starts the workers."
                " Start the program once, or unset RAY_ADDRESS."
            )
    return _groups[0] if _groups else None


def _count_cluster_devices(tasks: int) -> int:
    """Returns the number of GPUs of the Ray cluster; without GPUs that of tasks or nodes; 1 without a cluster."""
    if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
        return tasks or 1
    with cluster(Config()):
        capacity = cluster_capacity()
    gpus = int(capacity.resources.get("GPU", 0))
    return gpus or tasks or max(1, sum(bool(node["Alive"]) for node in capacity.nodes))
