"""What Ray keeps for a run: a start whose predecessor was killed takes over what that had asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.train import ScalingConfig

from ray_app.cluster.hooks import Control
from ray_app.cluster.sizes import Sizes
from ray_app.config.config import Config


def sizes(run_root: str, config: Config, workers: int) -> Any:
    """The policy of a start that has asked for all CPUs of the cluster."""
    made = Sizes(ScalingConfig(num_workers=(1, workers)), Control(run_root, 1, config, None, 0, True))
    made.after_controller_start(None)
    return made


def test_a_start_does_not_wait_for_what_its_killed_predecessor_asked_for(ray_cluster: None, short_run: Callable[..., Config]) -> None:
    workers = int(ray.cluster_resources()["CPU"])
    config = short_run(scaling__max_workers=workers, scaling__logical_workers=workers, data__global_batch_size=workers * 4)
    killed = sizes("/runs/this", config, workers)
    try:
        assert killed.possible() == workers
        other = sizes("/runs/other", config, workers)
        try:
            assert other.possible() == 0, "this cluster has room for both, so nothing is shown"
        finally:
            other._cancel_resource_request()
        assert sizes("/runs/this", config, workers).possible() == workers
    finally:
        killed._cancel_resource_request()
