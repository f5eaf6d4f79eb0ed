"""The choice between the two kinds of recovery, and the name under which starts request resources."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError
from ray.train import TrainingFailedError
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import ControllerError

from ray_app.cluster import trainer
from ray_app.cluster.controller.decisions import StoppedWaitingError
from ray_app.cluster.trainer import (
    ElasticTrainer,
    RendezvousTorchConfig,
    RestartCallback,
    WorkerArgs,
    can_recover_in_place,
    choose_backend,
    fit,
)
from ray_app.config.config import Config
from ray_app.devices import KINDS
from ray_app.errors import BudgetSpentError, ConfigError, TaskError
from ray_app.runlog.paths import RunPaths


@pytest.mark.parametrize(
    ("version", "in_place"),
    [
        ("2.55.1", False),
        ("2.56.0", True),
        ("2.59.0rc1", True),
        (ray.__version__, True),
        ("2.61.0", False),
        ("3.0.0.dev0", False),
    ],
)
def test_recovery_in_place_is_chosen_by_the_version_of_ray(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, in_place: bool
) -> None:
    assert not can_recover_in_place(Config().replace(failure__recovery="restart"))
    monkeypatch.setattr(ray, "__version__", version)
    assert can_recover_in_place(Config()) == in_place
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (not in_place)
    assert all(f"this is Ray {version}: all workers restart after a failure" in warning for warning in warnings)


@dataclass
class Attempts:
    """What was tried, and the errors with which recovery in place ends."""

    in_place: Exception | None
    kinds: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record: Any = None

    def fit_in_place(self, args: WorkerArgs, *unused: Any) -> None:
        self.kinds.append(args.recovers_in_place)
        if self.in_place is not None:
            raise self.in_place

    def fit_with_restarts(self, args: WorkerArgs, *unused: Any) -> None:
        self.kinds.append(args.recovers_in_place)

    def status(self) -> Any:
        return SimpleNamespace(record=self.record)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    noted_attempts = Attempts(None)
    monkeypatch.setattr(trainer, "_fit_in_place", noted_attempts.fit_in_place)
    monkeypatch.setattr(trainer, "_fit_with_restarts", noted_attempts.fit_with_restarts)
    monkeypatch.setattr(trainer, "RendezvousHandle", lambda actor: noted_attempts)
    return noted_attempts


def job() -> Any:
    return SimpleNamespace(run_root="/runs/run", fence=1, config=Config())


MOVED = AttributeError("'TrainController' object has no attribute '_worker_group'")


@pytest.mark.parametrize("error", [MOVED, ControllerError(MOVED), ImportError("no module"), TypeError("arguments")])
def test_a_controller_that_fails_before_the_first_step_is_replaced_by_that_of_ray(
    attempts: Attempts, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    attempts.in_place = error
    fit(WorkerArgs(job(), None), 2, threading.Event())
    assert attempts.kinds == [True, False]
    [warning] = caplog.records
    assert "Recovery in place failed before the first step" in warning.getMessage()


@pytest.mark.parametrize(
    ("error", "record"),
    [
        (ControllerError(MOVED), object()),
        (ControllerError(BudgetSpentError("spent")), None),
        (ControllerError(ray.exceptions.RaySystemError("the cluster is gone")), None),
        (ray.exceptions.RaySystemError("the cluster is gone"), None),
        (ControllerError(OSError(28, "No space left on device")), None),
    ],
    ids=["after the first step", "budget", "cluster in the controller", "cluster", "storage"],
)
def test_other_errors_end_the_run(attempts: Attempts, error: Exception, record: object) -> None:
    attempts.in_place, attempts.record = error, record
    with pytest.raises(type(error)) as raised:
        fit(WorkerArgs(job(), None), 2, threading.Event())
    assert raised.value is error
    assert attempts.kinds == [True]


class Budget:
    """Notes the errors that it is charged with."""

    def __init__(self) -> None:
        self.charged: list[set[int]] = []

    def charge_failure(self, errors: dict[int, Exception], step: int, left: int) -> None:
        assert (step, left) == (7, 0)
        self.charged.append(set(errors))


def test_a_trainer_of_ray_without_the_overridden_method_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for base in TorchTrainer.__mro__:
        if "_initialize_and_run_controller" in vars(base):
            monkeypatch.delattr(base, "_initialize_and_run_controller")
    with pytest.raises(AttributeError, match="no method _initialize_and_run_controller"):
        ElasticTrainer(lambda config: None, budget=None, worker_args=None, prepare=None, abandoned=None)


def death(actor: int) -> Exception:
    cause = ActorDiedError(ActorDiedErrorContext(actor_id=bytes([actor]) * 16))
    return WorkerHealthCheckFailedError("a worker died", failure=cause)


def test_a_death_that_several_polls_tell_is_charged_once() -> None:
    """While the other workers of a preempted one finish, Ray Train tells its death at every poll."""
    budget, rendezvous = Budget(), SimpleNamespace(status=lambda: SimpleNamespace(step=7))
    callback = RestartCallback(budget, rendezvous)
    for errors in (
        {0: death(1)},
        {0: death(1)},
        {0: death(1), 1: death(2)},
        {0: death(3)},
        {1: ValueError("the same")},
        {1: ValueError("the same")},
    ):
        callback.after_exception(None, errors)
    assert budget.charged == [{0}, {0, 1}, {0}, {1}, {1}]


@pytest.mark.parametrize(
    ("gpus", "is_slice", "backend"), [(0, False, "auto"), (0.4, False, "gloo"), (1, False, "auto"), (1, True, "gloo")]
)
def test_workers_that_share_a_gpu_do_not_use_nccl(
    monkeypatch: pytest.MonkeyPatch, gpus: float, is_slice: bool, backend: str
) -> None:
    monkeypatch.setattr(KINDS["cuda"], "is_slice", lambda device: is_slice)
    assert choose_backend(Config().replace(scaling__gpus_per_worker=gpus), torch.device("cuda", 0)) == backend


def test_a_strategy_that_needs_nccl_is_refused_on_slices_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KINDS["cuda"], "is_slice", lambda device: True)
    config = Config().replace(scaling__gpus_per_worker=1, train__strategy="fsdp")
    assert choose_backend(config, torch.device("cuda", 0)) == "gloo", "a single worker has no peers"
    with pytest.raises(ConfigError, match=r"slice \(MIG\), but train.strategy fsdp.*Use ddp, single"):
        choose_backend(config.replace(scaling__max_workers=2), torch.device("cuda", 0))


def test_a_worker_proves_its_device_before_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a broken device fails while the process group forms, when all others wait for it."""
    config = Config().replace(scaling__gpus_per_worker=1)
    args = SimpleNamespace(job=SimpleNamespace(config=config), recovers_in_place=True)
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(trainer, "_assigned_gpu", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    def refuse(device: torch.device, backend: str) -> None:
        assert (device.type, backend) == ("cuda", "auto")
        raise RuntimeError("a broken device")

    monkeypatch.setattr(trainer, "prove_device", refuse)
    monkeypatch.setattr(trainer, "RendezvousClient", lambda *_: pytest.fail("the worker joins"))
    with pytest.raises(TaskError, match="a broken device"):
        trainer._run_worker({"args": args})


def test_every_start_of_a_run_requests_resources_under_one_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A start takes over the resource request of a killed start, for both kinds of recovery."""
    names: list[str] = []
    monkeypatch.setattr(TorchTrainer, "fit", lambda trainer: names.append(trainer.train_run_context.run_id))
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(trainer, "RendezvousHandle", lambda actor: Attempts(None))

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
    monkeypatch.setattr(trainer, "RendezvousHandle", lambda actor: Attempts(None))
    fit(WorkerArgs(job, None), 2, threading.Event())
    [torch_trainer] = trainers
    assert type(torch_trainer) is (ElasticTrainer if recovery == "in_place" else TorchTrainer)
    assert isinstance(torch_trainer.backend_config, RendezvousTorchConfig)
    assert isinstance(torch_trainer.backend_config, TorchConfig)
    backend = torch_trainer.backend_config.backend_cls
    assert backend.on_start is Backend.on_start, "the backend opens no process group"
    assert backend.has_replica_groups == (recovery == "in_place")
    assert torch_trainer.backend_config.train_func_context is nullcontext, "the worker chooses its device itself"
    monkeypatch.setattr(TorchTrainer, "fit", lambda trainer: _raise(ControllerError(BudgetSpentError("spent"))))
    with pytest.raises(TrainingFailedError):
        fit(WorkerArgs(job, None), 2, threading.Event())
    monkeypatch.setattr(TorchTrainer, "fit", lambda trainer: _raise(ControllerError(StoppedWaitingError("stopped"))))
    fit(WorkerArgs(job, None), 2, threading.Event())


def _raise(error: Exception) -> None:
    raise error
