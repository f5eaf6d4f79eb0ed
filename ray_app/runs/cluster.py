"""The cluster: joining or starting one, and whether the run fits into it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch

from ray_app.cluster.autoscaler import most_resources
from ray_app.cluster.labels import Node, known_labels, labelled
from ray_app.cluster.room import room_for
from ray_app.cluster.search_path import job_config, search_path
from ray_app.cluster.token import require_token
from ray_app.config.config import Config
from ray_app.errors import ConfigError

_READING_CPUS = 1
_ANY = 1_000_000


def needs_cluster(config: Config) -> bool:
    """Whether anything of the run is outside the calling process: workers, an evaluator, or a cluster that it is told to join."""
    return config.train.strategy != "single" or _has_evaluator(config) or config.run.ray_address is not None


@contextmanager
def cluster(config: Config) -> Iterator[bool]:
    """Connects to Ray: the connection that is there, the configured address, `RAY_ADDRESS`, or a local cluster of our own.

    A run that does not need one gets none, unless there is a connection already.

    Only a cluster of our own declares more logical CPUs than the machine has cores, so that a small machine can try several workers.

    Yields:
        Whether the cluster is our own, or there is none; then what is in it ends with the context.
    """
    if ray.is_initialized():
        yield False
        return
    if not needs_cluster(config):
        yield True
        return
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    if address := _address(config):
        ray.init(address=address, job_config=job_config(), logging_level=logging.WARNING)
        try:
            yield False
        finally:
            ray.shutdown()
        return
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # that our own cluster has a token is no warning
    require_token()
    with environment(
        PYTHONPATH=os.pathsep.join(search_path())
    ):  # with a `runtime_env` the processes that Ray starts in advance would be of no use
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(_wanted_cpus(config, config.scaling.most_workers + config.scaling.spare_workers))),
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    try:
        yield True
    finally:
        ray.shutdown()


def _address(config: Config) -> str | None:
    """The cluster to join, if there is one."""
    return config.run.ray_address or os.environ.get("RAY_ADDRESS")


@contextmanager
def environment(**settings: str) -> Iterator[None]:
    """Sets environment variables for processes that are started meanwhile, and theirs."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _has_evaluator(config: Config) -> bool:
    return config.data.eval_path is not None and config.evaluate.where == "actor"


def _evaluator_cpus(config: Config) -> float:
    return config.evaluate.num_cpus if _has_evaluator(config) else 0


def _server_cpus(config: Config) -> float:
    return config.train.servers * config.train.server_cpus if config.train.strategy == "parameter_server" else 0


def reserved_cpus(config: Config) -> float:
    """Logical CPUs that are not for training workers: the evaluator's, the parameter servers' and one for reading."""
    return _evaluator_cpus(config) + _server_cpus(config) + _READING_CPUS


def _wanted_cpus(config: Config, workers: int) -> float:
    each = config.scaling.cpus_per_worker if config.train.strategy != "single" else 0
    return workers * each + reserved_cpus(config)


def counted(config: Config, before: Config | None = None) -> Config:
    """With a number of workers in place of `scaling.max_workers: all`: that of the run if it exists, else as many as the cluster that it
    would join has room for, or may grow to; on one of its own as many as this machine has cores, or GPUs.

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
            there = (ray.cluster_resources(), ray.nodes(), most_resources()) if ray.is_initialized() else ({}, [], None)
            found = workers_that_fit(most, *there)
            if found == _ANY:
                raise ConfigError(
                    "scaling.max_workers is all, and the cluster's autoscaler does not tell how many nodes it may start; give a number."
                )
            return most.replace(scaling__max_workers=found)
    gpus = torch.cuda.device_count() - (config.evaluate.num_gpus if _has_evaluator(config) else 0)
    has, each = (gpus, scaling.gpus_per_worker) if scaling.gpus_per_worker else (os.cpu_count() or 1, scaling.cpus_per_worker)
    return most.replace(scaling__max_workers=max(scaling.min_workers, min(int(room_for(has, each)), most.scaling.most_workers)))


def _refuse_unlabelled(config: Config, nodes: list[Node]) -> None:
    """Refuses selectors of the evaluator and of parameter servers that no node carries which has what one of them reserves.

    Raises:
        ConfigError: Ray would wait for such a node for ever.
    """
    evaluate, train = config.evaluate, config.train
    needed = [("evaluate.label_selector", evaluate.label_selector, evaluate.num_cpus, evaluate.num_gpus)] if _has_evaluator(config) else []
    if train.strategy == "parameter_server":
        needed.append(("train.server_label_selector", train.server_label_selector, train.server_cpus, 0))
    for field, selector, cpus, gpus in needed:
        carrying = labelled(nodes, selector, field) if selector else []
        if selector and not any(n["Resources"].get("CPU", 0.0) >= cpus and n["Resources"].get("GPU", 0.0) >= gpus for n in carrying):
            raise ConfigError(
                f"{field} is {selector}, and no node of {cpus:g} CPU and {gpus:g} GPU is labelled so; the labels are {known_labels(nodes)}."
                " Start a node with `ray start --labels name=value`, or choose other labels."
            )


def _workers_on(config: Config, nodes: list[Node]) -> int:
    """How many workers the nodes that carry the labels of `scaling.label_selector` have room for.

    Raises:
        ConfigError: No node carries them.
    """
    scaling = config.scaling
    carrying = labelled(nodes, scaling.label_selector)
    if not carrying:
        raise ConfigError(
            f"scaling.label_selector is {scaling.label_selector}, and no node of the cluster is labelled so; its labels are"
            f" {known_labels(nodes)}. Start a node with `ray start --labels name=value`, or choose other labels."
        )
    needs = [(name, each) for name, each in (("CPU", scaling.cpus_per_worker), ("GPU", scaling.gpus_per_worker)) if each]
    if not needs:
        return scaling.most_workers
    return sum(int(min(room_for(node["Resources"].get(name, 0.0), each) for name, each in needs)) for node in carrying)


def workers_that_fit(config: Config, resources: dict[str, float], nodes: list[Node], most: dict[str, float] | None = None) -> int:
    """How many workers the cluster has room for besides the evaluator and one CPU for reading, at most `max_workers`.

    Args:
        config: What each part reserves.
        resources: All resources of the cluster by Ray's names.
        nodes: Its nodes; looked at with `scaling.label_selector` only.
        most: What an autoscaler may make of the resources; then the run waits for that, and nodes that are still to come have any label.

    Raises:
        ConfigError: Not even `min_workers` fit, so that the run would wait for ever.
    """
    if config.train.strategy == "single":
        return 1
    scaling = config.scaling
    cpus, gpus = (max(resources.get(name, 0.0), (most or {}).get(name, 0.0)) for name in ("CPU", "GPU"))
    room = [float(scaling.most_workers)]
    free_cpus = cpus - reserved_cpus(config)
    evaluator_gpus = config.evaluate.num_gpus if _has_evaluator(config) else 0
    for free, each in ((free_cpus, scaling.cpus_per_worker), (gpus - evaluator_gpus, scaling.gpus_per_worker)):
        room.append(0 if free < 0 else room_for(free, each) if each else math.inf)
    workers = int(min(room))
    if most is None:
        _refuse_unlabelled(config, nodes)
    if scaling.label_selector and most is None:
        on_labelled = _workers_on(config, nodes)
        if on_labelled < scaling.min_workers:
            raise ConfigError(
                f"The run does not fit: the nodes labelled {scaling.label_selector} (scaling.label_selector) have room for {on_labelled}"
                f" workers of {scaling.cpus_per_worker:g} CPU and {scaling.gpus_per_worker:g} GPU, below scaling.min_workers ="
                f" {scaling.min_workers}. Label more nodes, or lower scaling.min_workers."
            )
        workers = min(workers, on_labelled)
    if workers < scaling.min_workers:
        has = "has" if most is None else "grows to at most"
        raise ConfigError(
            f"The run does not fit: scaling.min_workers = {scaling.min_workers} workers of {scaling.cpus_per_worker:g} CPU and"
            f" {scaling.gpus_per_worker:g} GPU, the evaluator ({_evaluator_cpus(config):g} CPU, {evaluator_gpus:g} GPU), parameter servers"
            f" ({_server_cpus(config):g} CPU) and {_READING_CPUS} CPU for reading need"
            f" {_wanted_cpus(config, scaling.min_workers):g} CPU and"
            f" {scaling.min_workers * scaling.gpus_per_worker + evaluator_gpus:g} GPU; the cluster {has} {cpus:g} CPU and {gpus:g} GPU."
            " Add nodes, or lower scaling.min_workers, scaling.cpus_per_worker or what evaluate.num_cpus and evaluate.num_gpus reserve."
        )
    return workers
