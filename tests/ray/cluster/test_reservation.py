"""Ray's reservations for a run: a start takes over the reservation of its killed predecessor, and counts the free
slots before it has one.
"""

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


def start_policy(run_root: str, config: Config, workers: int) -> Any:
    """Returns the policy of a start that has requested all CPUs of the cluster."""
    scaling = ScalingConfig(num_workers=(1, workers))
    policy = (
        ElasticPolicy(scaling, config, 0) if config.failure.recovery == "in_place" else create_scaling_policy(scaling)
    )
    trainer = TorchTrainer(lambda: None, scaling_config=scaling)
    use_stable_run_id(trainer, run_root)
    policy.after_controller_start(trainer.train_run_context)
    return policy


def count_possible_workers(policy: Any) -> int:
    """Returns the number of workers that the policy has capacity for."""
    return (
        policy.possible_workers()
        if isinstance(policy, ElasticPolicy)
        else policy._count_possible_workers(policy._get_reserved_resources())
    )


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_start_takes_over_the_reservation_of_its_killed_predecessor(
    ray_cluster: None, make_short_config: Callable[..., Config], recovery: str
) -> None:
    workers = int(ray.cluster_resources()["CPU"])
    shape = {
        "scaling__max_workers": workers,
        "scaling__logical_workers": workers,
        "data__global_batch_size": workers * 4,
    }
    config = make_short_config(**shape, failure__recovery=recovery)
    killed = start_policy("/runs/this", config, workers)
    try:
        assert count_possible_workers(killed) == workers
        other = start_policy("/runs/other", config, workers)
        try:
            assert count_possible_workers(other) == 0, (
                "the cluster has capacity for both runs, so the test shows nothing"
            )
        finally:
            other._cancel_resource_request()
        assert count_possible_workers(start_policy("/runs/this", config, workers)) == workers
    finally:
        killed._cancel_resource_request()


def test_free_slots_are_the_workers_that_fit_without_a_reservation(
    ray_cluster: None, make_short_config: Callable[..., Config]
) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    config = make_short_config(
        scaling__min_workers=2,
        scaling__max_workers=cpus,
        scaling__logical_workers=cpus,
        data__global_batch_size=cpus * 4,
    )

    def free_slots(reading_cpus: float, min_workers: int = 2) -> int:
        scaling = ScalingConfig(num_workers=(min_workers, cpus), resources_per_worker={"CPU": 1})
        return ElasticPolicy(scaling, config.replace(scaling__min_workers=min_workers), reading_cpus).free_slots()

    assert (free_slots(0), free_slots(1), free_slots(cpus - 2)) == (cpus, cpus - 1, 2)
    assert free_slots(cpus - 1) == 0, "fewer slots than min_workers are free"
