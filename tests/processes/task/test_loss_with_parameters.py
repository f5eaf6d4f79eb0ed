"""A configured loss with parameters or buffers is a part of the model: trained, stored, alike on any workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from torch import nn

from ray_app.errors import ConfigError
from ray_app.models.export import load_model, write_export
from ray_app.task.configured_arguments import compute_row_losses, load_loss
from ray_app.task.metrics import combine, score
from ray_app.task.module import ModuleTask
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import train
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.state.parameters import load_initial_parameters
from tests.support.local_world import CPU, make_job
from tests.support.user_objects import LearnedVariance

OBJECTS = "tests.support.user_objects."
LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 1}}
CHAIN = {"class_path": OBJECTS + "linear_chain"}
ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype(np.float32)
    y = (x @ np.array([1, -2, 0.5, 3], np.float32)).astype(np.float32)
    pq.write_table(pa.table({"x": pa.FixedSizeListArray.from_arrays(x.ravel(), 4), "y": y}), root / "0.parquet")
    return root, x, y


def task_of(model: dict[str, Any]) -> ModuleTask:
    return ModuleTask(model, ["x"], "y", {"class_path": OBJECTS + "LearnedVariance"})


def job_of(folder: Path, data: Path, model: dict[str, Any], logical_workers: int, **fields: Any) -> Job:
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05}}
    fields = {"optimizer": adam, "train__epochs": 3, **fields}
    return make_job(folder, data, logical_workers=logical_workers, batch=ROWS, task=task_of(model), **fields)


@pytest.mark.parametrize("spec", [LINEAR, CHAIN])
def test_it_trains_as_in_a_plain_loop_and_is_stored(
    data: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path, spec: dict[str, Any]
) -> None:
    root, x, y = data
    job = job_of(tmp_path / "run", root, spec, 1, train__grad_clip_norm=1.0)
    torch.manual_seed(0)
    model: Any = job.task.build_model()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(initial, tmp_path / "initial.pt")
    safetensors.torch.save_file(initial, tmp_path / "initial.safetensors")
    job = job_of(
        tmp_path / "begun",
        root,
        spec,
        1,
        train__grad_clip_norm=1.0,
        train__init_from=str(tmp_path / "initial.safetensors"),
    )
    train(WorkerContext(job, SingleProcessMembership(1, lambda: False), cache_windows, CPU, Hooks()))
    trained = read_trained_run(job).snapshot.model
    plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)) if spec is CHAIN else nn.Linear(4, 1)
    loss = LearnedVariance()
    plain.load_state_dict({name: value for name, value in initial.items() if "task_loss" not in name})
    loss.load_state_dict({name[10:]: value for name, value in initial.items() if "task_loss" in name})
    parameters = [*plain.parameters(), *loss.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss(plain(torch.from_numpy(x))[:, 0], torch.from_numpy(y)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    expected = {**plain.state_dict(), **{f"task_loss.{name}": value for name, value in loss.state_dict().items()}}
    assert trained.keys() == expected.keys()
    assert all(torch.allclose(value, expected[name], atol=1e-5) for name, value in trained.items())
    model.load_state_dict(trained)
    values = combine(job.task, score(job.task, model, {"x": x, "y": y}, 8, CPU)).values
    assert values["loss"] == pytest.approx(loss.eval()(plain(torch.from_numpy(x))[:, 0], torch.from_numpy(y)).item())
    source: Any = {"run": "r", "step": 1, "params_digest": ""}
    write_export(job.task, model, {"x": x[:2], "y": y[:2]}, tmp_path / "export", source)
    predicted = load_model(tmp_path / "export").predict({"x": x})
    assert np.allclose(predicted, plain(torch.from_numpy(x))[:, 0].detach().numpy(), atol=1e-5)


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local_sgd", "central_storage", "parameter_server"])
@pytest.mark.parametrize("spec", [LINEAR, CHAIN])
def test_it_is_bit_identical_for_any_number_of_workers(
    worker_pool: WorkerPool, data: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path, strategy: str, spec: Any
) -> None:
    groups = [{"names": ["task_loss.*"], "lr": 0.5}]
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05}, "groups": groups}
    fields: dict[str, Any] = {"optimizer": adam, "train__ema_decay": 0.9}
    digests = []
    for size, name in (
        (1, "ddp" if strategy in ("fsdp", "central_storage") else strategy),
        (2, strategy),
        (3, strategy),
    ):
        if name == "parameter_server" and size == 1:
            continue
        job = job_of(tmp_path / f"{name}-{size}", data[0], spec, 6, train__strategy=name, **fields)
        digests.append(worker_pool.train_new_run(job, size, cache_windows).digests)
    assert all(digest == digests[0] for digest in digests)


@pytest.mark.rest
def test_an_update_that_draws_is_the_same_on_every_rank(
    worker_pool: WorkerPool, data: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    optimizer = {"class_path": "tests.support.odd_optimizers.NoisySgd"}
    runs = (job_of(tmp_path / str(size), data[0], LINEAR, 6, optimizer=optimizer) for size in (1, 3))
    one, three = (worker_pool.train_new_run(job, n, cache_windows) for job, n in zip(runs, (1, 3), strict=True))
    assert one.digests == three.digests


def test_initial_parameters_may_lack_the_loss_or_have_another_tasks() -> None:
    model = task_of(LINEAR).build_model()
    initial = {"weight": torch.ones(1, 4), "bias": torch.ones(1)}
    before = model.get_parameter("task_loss.log_variance").clone()
    load_initial_parameters(model, initial, "f")
    assert torch.equal(model.get_parameter("task_loss.log_variance"), before)
    load_initial_parameters(nn.Linear(4, 1), {**initial, "task_loss.log_variance": torch.ones(1)}, "f")
    with pytest.raises(ConfigError, match="missing: bias"):
        load_initial_parameters(model, {"weight": torch.ones(1, 4)}, "f")


def test_a_packaged_model_gets_the_loss_of_its_parameters() -> None:
    task, packaged = task_of(LINEAR), nn.Module()
    model: Any = task.build_model()
    load_loss(packaged, task.loss_spec, model.state_dict())
    assert torch.equal(packaged.task_loss.log_variance, model.task_loss.log_variance)
    with pytest.raises(ConfigError, match="LearnedVariance has parameters or buffers, but the model has no task_loss"):
        compute_row_losses(task.loss_spec, torch.zeros(2), torch.zeros(2))


def test_a_model_with_an_attribute_of_this_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "task_loss", None, raising=False)
    with pytest.raises(ConfigError, match="Linear has an attribute task_loss"):
        task_of(LINEAR).build_model()


def test_losses_without_a_state_add_nothing_to_the_model() -> None:
    loss = {"class_path": "torch.nn.CrossEntropyLoss", "init_args": {"weight": [1, 2]}}
    assert ModuleTask(LINEAR, ["x"], "y", loss).build_model().state_dict().keys() == {"weight", "bias"}
