"""Which of the two ways to recover a run has, and the name under which its starts ask for resources."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_app.cluster.trainer import WorkerArgs, _choose_backend, _recovers_in_place, fit
from ray_app.config.config import Config
from ray_app.runlog.paths import RunPaths


def test_with_a_ray_of_other_internals_all_workers_restart_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _recovers_in_place(Config())
    assert not _recovers_in_place(Config().replace(failure__recovery="restart"))
    assert not caplog.records
    monkeypatch.setitem(
        sys.modules, "ray_app.cluster.controller.controller", None
    )  # as if something that it imports were not there
    assert not _recovers_in_place(Config())
    [warning] = caplog.records
    assert "lacks what recovery in place needs" in warning.getMessage()
    assert "all workers restart after a failure" in warning.getMessage()


@pytest.mark.parametrize(("gpus", "backend"), [(0, "auto"), (0.4, "gloo"), (1, "auto")])
def test_workers_that_share_a_gpu_do_not_use_nccl(gpus: float, backend: str) -> None:
    assert _choose_backend(Config().replace(scaling__gpus_per_worker=gpus)) == backend


def test_every_start_of_a_run_asks_for_resources_under_one_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However it recovers, and whatever its number: what a killed start asked for is taken over."""
    names: list[str] = []
    monkeypatch.setattr(DataParallelTrainer, "fit", lambda trainer: names.append(trainer.train_run_context.run_id))
    monkeypatch.setattr(ray, "put", lambda value: value)

    def start(run: str, fence: int, recovery: str) -> None:
        paths = RunPaths(tmp_path / run)
        job: Any = SimpleNamespace(
            paths=paths, run_root=str(paths.root), fence=fence, config=Config().replace(failure__recovery=recovery)
        )
        fit(WorkerArgs(job, None), 2, 1.0, threading.Event())

    for recovery in ("in_place", "restart"):
        start("one", 1, recovery)
        start("one", 2, recovery)
        start("other", 1, recovery)
    assert names[0] == names[1] == names[3] == names[4]
    assert names[2] == names[5] != names[0]
