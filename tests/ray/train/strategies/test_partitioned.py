"""Strategies with partitioned state on a real cluster: a worker is killed, and the other continues from a peer replica
in its memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_app import run_training
from ray_app.config.config import Config
from ray_app.driver.run import Faults
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks
from tests.support.cluster import record_of
from tests.support.injector import Kill

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize("strategy", ["central_storage", "fsdp"])
def test_survivors_continue_from_a_peer_replica_after_a_kill(
    make_short_config: Callable[..., Config], reference_run: dict[str, Any], tmp_path: Path, strategy: str
) -> None:
    fields = {
        "train__strategy": strategy,
        "scaling__min_workers": 2,
        "scaling__max_workers": 2,
        "train__peer_replica": True,
    }
    kill = Kill(str(tmp_path / "killed"), step=14, rank=0)
    result = run_training(make_short_config(**fields), faults=Faults(train=Hooks(after_step=kill)))
    events = read_events(RunPaths(result.path), "formed", "resumed")
    assert (result.summary["status"], kill.num_fired) == ("finished", 1)
    # With fsdp, the survivor waits for another worker, since the state does not fit into its memory.
    workers_after = 2 if strategy == "fsdp" else 1
    assert [e.details["workers"] for e in events if e.kind == "formed"][:2] == [2, workers_after]
    # A new worker may join after the last step.
    resumed = [e for e in events if e.kind == "resumed" and e.details["step"] < 30]
    assert not resumed, "a worker resumed from a checkpoint instead of the peer replica"
    assert result.summary["redone_steps"] <= 2
    record = record_of(result.path)
    assert result.summary["params_digest"] == reference_run["params_digest"]
    assert record == reference_run["record"]


def test_recovery_by_restart_resumes_sharded_state_from_a_checkpoint(
    make_short_config: Callable[..., Config], reference_run: dict[str, Any], tmp_path: Path
) -> None:
    fields = {
        "train__strategy": "fsdp",
        "scaling__min_workers": 2,
        "scaling__max_workers": 2,
        "failure__recovery": "restart",
    }
    kill = Kill(str(tmp_path / "killed"), step=14, rank=0)
    result = run_training(make_short_config(**fields), faults=Faults(train=Hooks(after_step=kill)))
    assert (result.summary["status"], kill.num_fired, kill.is_dead) == ("finished", 1, True)
    events = read_events(RunPaths(result.path), "formed", "resumed")
    assert [e.details["workers"] for e in events if e.kind == "formed"] == [2, 2]
    assert [(e.details["source"], e.details["step"]) for e in events if e.kind == "resumed"] == [("checkpoint", 8)]
    record = record_of(result.path)
    assert record == reference_run["record"]
