"""What a process computes on and with which kernels."""

from __future__ import annotations

import pytest
import torch

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.runs.cluster import cluster
from ray_app.task.environment import gpu_of, pin


@pytest.mark.parametrize(
    ("ids", "visible", "index"),
    [
        ([3], "3", 0),  # it sees what it has
        ([3], "0,1,2,3", 3),  # and that of the other workers of its node
        ([2], "2,3", 0),
        (["3"], "2,3", 1),  # a worker that came later, as Ray writes it elsewhere
        ([3], None, 3),  # Ray leaves alone what it sees
        ([0], "", 0),
        ([2, 3], "0,1,2,3", 2),  # the first of two
        (["GPU-b2"], "GPU-a1,GPU-b2", 1),
        ([], None, 0),  # not Ray's
    ],
)
def test_a_worker_computes_on_the_gpu_that_ray_gave_it(ids: list[int | str], visible: str | None, index: int) -> None:
    assert gpu_of(ids, visible) == torch.device("cuda", index)


def test_ray_client_is_refused() -> None:
    config = Config().replace(run__ray_address="ray://head:10001")
    with pytest.raises(ConfigError, match=r"Ray Client.*ray-app submit"), cluster(config):
        pass


@pytest.mark.parametrize(("deterministic", "refuses", "mode"), [(True, True, 2), (True, False, 1), (False, True, 0)])
def test_kernels_are_asked_for_refused_or_warned_of(deterministic: bool, refuses: bool, mode: int) -> None:
    torch.set_deterministic_debug_mode("default")
    pin(1, deterministic, refuses)
    assert torch.get_deterministic_debug_mode() == mode
