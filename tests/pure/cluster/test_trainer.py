"""The choice between the two kinds of recovery, and the name under which starts request resources."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import TrainingFailedError
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import ControllerError

from ray_app.cluster.controller.decisions import StoppedWaitingError
from ray_app.cluster.trainer import (
    ElasticTrainer,
    RendezvousTorchConfig,
    WorkerArgs,
    _choose_backend,
    _recovers_in_place,
    fit,
)
from ray_app.config.config import Config
from ray_app.runlog.paths import RunPaths


def test_with_other_ray_internals_all_workers_restart_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _recovers_in_place(Config())
    assert not _recovers_in_place(Config().replace(failure__recovery="restart"))
    assert not caplog.records
    # This imitates a missing import of the module.
    monkeypatch.setitem(sys.modules, "ray_app.cluster.controller.controller", None)
    assert not _recovers_in_place(Config())
    [warning] = caplog.records
    assert "lacks what recovery in place needs" in warning.getMessage()
    assert "all workers restart after a failure" in warning.getMessage()


@pytest.mark.parametrize(("gpus", "backend"), [(0, "auto"), (0.4, "gloo"), (1, "auto")])
def test_workers_that_share_a_gpu_do_not_use_nccl(gpus: float, backend: str) -> None:
    assert _choose_backend(Config().replace(scaling__gpus_per_worker=gpus)) == backend


def test_every_start_of_a_run_requests_resources_under_one_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A start takes over the resource request of a killed start, for both kinds of recovery."""
    names: list[str] = []
    monkeypatch.setattr(TorchTrainer, "fit", lambda trainer: names.append(trainer.train_run_context.run_id))
    monkeypatch.setattr(ray, "put", lambda value: value)

    def start(run: str, fence: int, recovery: str) -> None:
        paths = RunPaths(tmp_path / run)
        job: Any = SimpleNamespace(
            paths=paths, run_root=str(paths.root), fence=fence, config=Config().replace(failure__recovery=recovery)
        )
        fit(WorkerArgs(job, None), 2, threading.Event())

    for recovery in ("in_place", "restart"):
        start("one", 1, recovery)
        start("one", 2, recovery)
        start("other", 1, recovery)
    assert names[0] == names[1] == names[3] == names[4]
    assert names[2] == names[5] != names[0]


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_the_trainer_is_ray_trains_torch_trainer_without_its_process_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recovery: str
) -> None:
    trainers = list[Any]()

    def note(trainer: Any) -> None:
        trainers.append(trainer)

    monkeypatch.setattr(TorchTrainer, "fit", note)
    monkeypatch.setattr(ray, "put", lambda value: value)
    config: Any = Config().replace(failure__recovery=recovery)
    job: Any = SimpleNamespace(paths=RunPaths(tmp_path / "run"), run_root=str(tmp_path), fence=1, config=config)
    fit(WorkerArgs(job, None), 2, threading.Event())
    [trainer] = trainers
    assert type(trainer) is (ElasticTrainer if recovery == "in_place" else TorchTrainer)
    assert isinstance(trainer.backend_config, RendezvousTorchConfig)
    assert isinstance(trainer.backend_config, TorchConfig)
    backend = trainer.backend_config.backend_cls
    assert backend.on_start is Backend.on_start, "the backend opens no process group"
    assert backend.has_replica_groups == (recovery == "in_place")
    assert trainer.backend_config.train_func_context is nullcontext, "the worker chooses its device itself"
    monkeypatch.setattr(TorchTrainer, "fit", lambda trainer: _raise(ControllerError(ValueError("wrong"))))
    with pytest.raises(TrainingFailedError):
        fit(WorkerArgs(job, None), 2, threading.Event())
    monkeypatch.setattr(TorchTrainer, "fit", lambda trainer: _raise(ControllerError(StoppedWaitingError("stopped"))))
    fit(WorkerArgs(job, None), 2, threading.Event())


def _raise(error: Exception) -> None:
    raise error
