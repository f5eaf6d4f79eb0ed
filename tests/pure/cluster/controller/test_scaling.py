"""The number of workers of a group, and the memory that snapshots of the state need."""

import pytest
from torch import nn

from ray_app.cluster.controller.decisions import ControllerState, WorkerState, choose_size
from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.train.checkpointing.persistence import check_snapshot_memory


@pytest.mark.parametrize(
    ("now", "possible", "logical", "min_workers", "max_workers", "since_s", "workers", "reason"),
    [
        (2, 4, 4, 1, 4, 60, 4, "1 logical workers instead of 2"),
        (2, 3, 4, 1, 4, 60, 2, "as slow as 2"),
        (2, 4, 4, 1, 4, 3, 2, "last change was 3 s ago"),
        (2, 8, 4, 1, 4, 60, 4, "instead of"),
        (4, 8, 4, 1, 4, 60, 4, "as many as configured"),
        (2, 1, 4, 1, 4, 60, 2, "no capacity"),
        (1, 2, 4, 2, 4, 0, 2, "below scaling.min_workers"),
        (1, 2, 4, 3, 4, 0, 1, "not enough capacity"),
        (3, 5, 8, 1, 8, 60, 5, "2 logical workers instead of 3"),
        (4, 7, 8, 1, 8, 60, 4, "as slow as 4"),
    ],
)
def test_the_group_grows_only_where_a_step_gets_faster(
    now: int, possible: int, logical: int, min_workers: int, max_workers: int, since_s: float, workers: int, reason: str
) -> None:
    config = Config().replace(
        scaling__logical_workers=logical, scaling__min_workers=min_workers, scaling__max_workers=max_workers
    )
    group = tuple(WorkerState(f"w{index}", "node") for index in range(now))
    size, size_reason = choose_size(ControllerState(config, True, group, since_change_s=since_s), possible)
    assert size == workers
    assert reason in size_reason


def test_snapshots_that_do_not_fit_into_the_drivers_memory_are_refused() -> None:
    model = nn.Linear(1000, 1000)
    check_snapshot_memory(model, 30_000_000)
    with pytest.raises(ConfigError, match="of memory on the driver"):
        check_snapshot_memory(model, 10_000_000)
