"""What Ray keeps for a run: a start whose predecessor was killed takes over what that had asked for; and what is free
before it asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import create_scaling_policy

from ray_app.cluster.controller.scaling_policy import ElasticPolicy
from ray_app.cluster.ray_private import use_stable_run_id
from ray_app.config.config import Config


def started(run_root: str, config: Config, workers: int) -> Any:
    """The policy of a start that has asked for all CPUs of the cluster."""
    scaling = ScalingConfig(num_workers=(1, workers))
    made = (
        ElasticPolicy(scaling, config, 0) if config.failure.recovery == "in_place" else create_scaling_policy(scaling)
    )
    trainer = TorchTrainer(lambda: None, scaling_config=scaling)
    use_stable_run_id(trainer, run_root)
    made.after_controller_start(trainer.train_run_context)
    return made


def possible(policy: Any) -> int:
    """Workers that it finds room for."""
    return (
        policy.possible_workers()
        if isinstance(policy, ElasticPolicy)
        else policy._count_possible_workers(policy._get_reserved_resources())
    )


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_start_does_not_wait_for_what_its_killed_predecessor_asked_for(
    ray_cluster: None, short_run: Callable[..., Config], recovery: str
) -> None:
    workers = int(ray.cluster_resources()["CPU"])
    shape = {
        "scaling__max_workers": workers,
        "scaling__logical_workers": workers,
        "data__global_batch_size": workers * 4,
    }
    config = short_run(**shape, failure__recovery=recovery)
    killed = started("/runs/this", config, workers)
    try:
        assert possible(killed) == workers
        other = started("/runs/other", config, workers)
        try:
            assert possible(other) == 0, "this cluster has room for both, so nothing is shown"
        finally:
            other._cancel_resource_request()
        assert possible(started("/runs/this", config, workers)) == workers
    finally:
        killed._cancel_resource_request()


def test_a_start_begins_as_many_workers_as_are_sure_to_fit_before_it_asks(
    ray_cluster: None, short_run: Callable[..., Config]
) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    config = short_run(
        scaling__min_workers=2,
        scaling__max_workers=cpus,
        scaling__logical_workers=cpus,
        data__global_batch_size=cpus * 4,
    )

    def free(reading_cpus: float, least: int = 2) -> int:
        scaling = ScalingConfig(num_workers=(least, cpus), resources_per_worker={"CPU": 1})
        return ElasticPolicy(scaling, config.replace(scaling__min_workers=least), reading_cpus).free_slots()

    assert (free(0), free(1), free(cpus - 2)) == (cpus, cpus - 1, 2)
    assert free(cpus - 1) == 0, "the run could not start"
