"""The strategies of `tf.distribute` by their names and arguments, as fields of a configuration.

A replica is a logical worker: `num_replicas_in_sync` is `scaling.logical_workers`, which decides the result, and the
largest number of workers. How many workers train at a time does not change the result.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import ray
import torch

from ray_app.cluster.resources import cluster, cluster_capacity
from ray_app.config.config import Config
from ray_app.config.strategies import StrategyName
from ray_app.devices import HOST, accelerator
from ray_app.errors import ConfigError
from ray_app.task.keras import library

_REFUSED = {
    "cross_device_ops": "Gradients are added in one fixed order, so that the result is the same on any workers; with"
    ' fields={"train.reduction": "overlapped"} the backend adds them.',
    "communication_options": 'Give fit the fields: {"train.backend": ...}, {"train.bucket_mb": ...},'
    ' {"failure.step_timeout_s": ...}.',
    "cluster_resolver": "Ray knows the machines: start it on each (ray start), set RAY_ADDRESS, and give workers=.",
    "variable_partitioner": "Each server holds an equal part of every large parameter; give servers=.",
    "parameter_device": "Parameters are in the host memory of one worker.",
}
"""The arguments of `tf.distribute` without a counterpart, and what to do instead of giving them."""
_DEVICE = re.compile(r"/?(?:device:)?(\w+):(\d+)", re.IGNORECASE)

_current: ContextVar[Strategy | None] = ContextVar("strategy", default=None)
"""The strategy of the scope that this thread is in."""
_of_models: WeakKeyDictionary[Any, Strategy] = WeakKeyDictionary()
"""The strategy of each model that was built in a scope."""


class Strategy:
    """What all strategies have.

    Args:
        replicas: The number of replicas.
        fields: Fields of the configuration beside the numbers of workers.
        refused: Arguments that must be None, by their names.

    Attributes:
        num_replicas_in_sync: The number of replicas that a global batch is divided among, the same for a whole run.

    Raises:
        ConfigError: An argument has no counterpart here.
    """

    name: ClassVar[StrategyName]
    """The value of `train.strategy`."""

    def __init__(self, replicas: int, fields: Mapping[str, Any], refused: Mapping[str, Any]) -> None:
        for argument, value in refused.items():
            if value is not None:
                raise ConfigError(f"{type(self).__name__} takes no {argument} here. {_REFUSED[argument]}")
        if replicas < 1:
            raise ConfigError(f"{type(self).__name__} has {replicas} replicas; it must be at least 1.")
        self.num_replicas_in_sync = replicas
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
            f"{type(self).__name__} has no {name} here: fit runs the loop. A loop of your own is docs/loop.md of"
            " ray_app; docs/from-tf-distribute.md has the counterparts of all else."
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
        workers: The number of replicas; by default the number of workers in `TF_CONFIG`, of GPUs of the Ray cluster, or
            of its nodes.
    """

    name = "ddp"

    def __init__(
        self, cluster_resolver: Any = None, communication_options: Any = None, *, workers: int | None = None
    ) -> None:
        refused = {"cluster_resolver": cluster_resolver, "communication_options": communication_options}
        hosts = _hosts_in_tf_config("chief", "worker")
        super().__init__(workers or hosts or _count_cluster_devices(), {}, refused)


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
        workers: The number of replicas; by default the number of workers in `TF_CONFIG`, of GPUs of the Ray cluster, or
            of its nodes.
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
        fields = {"train.servers": servers or _hosts_in_tf_config("ps") or 1}
        refused = {"cluster_resolver": cluster_resolver, "variable_partitioner": variable_partitioner}
        super().__init__(workers or _hosts_in_tf_config("worker") or _count_cluster_devices(), fields, refused)


class OneDeviceStrategy(Strategy):
    """The model trains in this process, without workers.

    Args:
        device: `"/cpu:0"` or `"/gpu:0"`.
    """

    name = "single"

    def __init__(self, device: str) -> None:
        super().__init__(*_replicas_of([device]), {})


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


def _hosts_in_tf_config(*jobs: str) -> int:
    """Returns the number of processes with some jobs in `TF_CONFIG`, 0 without it.

    Raises:
        ConfigError: This is not the process that starts the program.
    """
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        hosts, task = config.get("cluster", {}), config.get("task", {})
        kind, number = task.get("type", "chief"), int(task.get("index", 0))
        count = sum(len(hosts.get(job, [])) for job in jobs)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"TF_CONFIG is not JSON as TensorFlow reads it: {error}. Unset it, and give workers=.") from (
            error
        )
    is_first = kind == "chief" or (kind == "worker" and number == 0 and "chief" not in hosts)
    if not is_first:
        raise ConfigError(
            f"TF_CONFIG says that this process is {kind} {number}. Start the program once, where it says chief or"
            " worker 0, or without TF_CONFIG: Ray starts the workers on the machines of its cluster."
        )
    return count


def _count_cluster_devices() -> int:
    """Returns the number of GPUs of the Ray cluster, or of its nodes if none has one; 1 without a cluster to join."""
    if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
        return 1
    with cluster(Config()):
        capacity = cluster_capacity()
    gpus = int(capacity.resources.get("GPU", 0))
    return gpus or max(1, sum(bool(node["Alive"]) for node in capacity.nodes))
