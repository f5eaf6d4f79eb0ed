"""A run begins with the parameters of a file: they are the same for every worker, part of the digest, and refused if
they do not fit.
"""

from __future__ import annotations

import dataclasses
import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ray_app.checkpoint.format import Snapshot, pack, params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config, result_fields
from ray_app.errors import ConfigError, RunExistsError
from ray_app.preflight.inputs import load_initial_parameters
from ray_app.preflight.prepare import claim, prepare
from ray_app.storage.files import put_json
from ray_app.task.base import Task
from ray_app.testing import DieAfter, WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks
from ray_app.train.state.state import TrainingState
from tests.support.checkpoints import commit_of
from tests.support.jobs import digits_config
from tests.support.local_world import TinyImages, make_job, write_images


@pytest.fixture
def base_config(digits: Path, tmp_path: Path) -> Config:
    return digits_config(digits, tmp_path / "runs", run__name="run", data__eval_path=None)


def write_parameters(task: Task, path: Path, seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = {name: values.clone() for name, values in task.build_model().state_dict().items()}
    path.write_bytes(safetensors.torch.save(state))
    return state


def test_a_run_begins_with_the_parameters_of_the_file(base_config: Config, tmp_path: Path) -> None:
    task = prepare(base_config).job.task
    state = write_parameters(task, tmp_path / "first.safetensors")
    config = base_config.replace(train__init_from=str(tmp_path / "first.safetensors"))
    job = prepare(config).job
    assert job.config.train.init_digest == params_digest(state)
    assert result_fields(job.config, "m")["train.init_digest"] == params_digest(state)
    assert "train.init_from" not in result_fields(job.config, "m")
    training_state = TrainingState(job.config.replace(train__ema_decay=0.9), task, torch.device("cpu"), job.total_steps)
    assert params_digest(training_state.model.state_dict()) != params_digest(state)
    claim(prepare(config), 1)
    training_state.initialize(job.read_initial())
    assert training_state.step == 0
    assert (
        params_digest(training_state.model.state_dict())
        == params_digest(training_state.snapshot().model)
        == params_digest(state)
    )


@pytest.mark.rest
@pytest.mark.parametrize(
    "fields",
    [{}, {"train__strategy": "local_sgd", "train__local_steps": 2}, {"train__strategy": "central_storage"}],
    ids=str,
)
def test_a_resumed_run_does_not_read_the_initial_parameters(
    worker_pool: WorkerPool, tmp_path: Path, fields: dict[str, Any]
) -> None:
    task, path = TinyImages(), tmp_path / "first.safetensors"
    write_parameters(task, path)
    fields = {"train__init_from": str(path), "train__ema_decay": 0.9, "checkpoint__every_epochs": None, **fields}
    data = write_images(tmp_path / "data", [[20]])
    job = make_job(
        tmp_path / "run",
        data,
        logical_workers=2,
        batch=4,
        task=task,
        checkpoint__every_steps=2,
        train__epochs=2,
        **fields,
    )
    whole = worker_pool.train_new_run(job, 1, cache_windows)
    seeded = dataclasses.replace(job, initial=None)
    assert worker_pool.train_new_run(seeded, 1, cache_windows).steps[0] != whole.steps[0]
    worker_pool.train(job, 2, Hooks(after_step=DieAfter(5)), cache_windows)
    path.unlink()
    worker_pool.train_to_end(job, 2, cache_windows)
    assert read_trained_run(job).digests == whole.digests


def test_a_started_run_has_its_copy_of_the_initial_parameters(base_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "first.safetensors"
    state = write_parameters(prepare(base_config).job.task, path)
    config = base_config.replace(train__init_from=str(path))
    claim(prepare(config), 1)
    path.unlink()
    again = claim(prepare(config), 2)
    assert again.resumes
    assert again.job.config.train.init_digest == params_digest(again.job.read_initial() or {}) == params_digest(state)


def test_the_folder_of_an_export_names_its_parameters(base_config: Config, tmp_path: Path) -> None:
    data = tmp_path / "model" / "data" / "model"
    data.mkdir(parents=True)
    (data / "package.json").write_text("{}")
    state = write_parameters(prepare(base_config).job.task, data / "model.safetensors")
    job = prepare(base_config.replace(train__init_from=str(tmp_path / "model"))).job
    assert job.config.train.init_from == str(data / "model.safetensors")
    assert job.config.train.init_digest == params_digest(state)


@pytest.mark.parametrize("source", ["run", "checkpoint", "state dict", "Lightning", "DataParallel", "folder"])
def test_a_run_begins_with_another_run_or_a_file_of_other_tools(
    source: str, base_config: Config, tmp_path: Path
) -> None:
    before = claim(prepare(base_config.replace(run__name="before")), 1).job
    states = {}
    for step in (10, 20, 30):
        states[step] = write_parameters(before.task, tmp_path / "model.safetensors", seed=step)
        commit = replace(commit_of(step), params_digest=params_digest(states[step]))
        CheckpointStore(before.paths).write(pack(Snapshot(step, states[step], {}, None)), commit)
    put_json(before.paths.summary, {"best": {"step": 20}})
    file, state = tmp_path / "saved.ckpt", states[30]
    contents: dict[str, Any] = {
        "state dict": state,
        "Lightning": {"epoch": 3, "state_dict": state, "hyper_parameters": {"lr": 0.1}},
        "DataParallel": {f"module.{name}": values for name, values in state.items()},
    }
    torch.save(contents.get(source), file)
    paths = {"run": before.paths.root, "checkpoint": before.paths.checkpoint(10, 1), "folder": tmp_path}
    job = prepare(base_config.replace(train__init_from=str(paths.get(source, file)))).job
    expected = states[{"run": 20, "checkpoint": 10}.get(source, 30)]
    assert job.config.train.init_digest == params_digest(expected)
    if source == "run":
        # The checkpoint of step 20 is damaged, and then no checkpoint is best.
        (before.paths.checkpoint(20, 1) / "model.safetensors").write_bytes(b"")
        config = base_config.replace(run__name="later", train__init_from=str(before.paths.root))
        claimed = claim(prepare(config), 1).job
        assert claimed.config.train.init_digest == params_digest(states[30])
        shutil.rmtree(before.paths.root)
        assert prepare(config).resumes, "the run must keep its own copy"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "optimizer": {}}, "epoch, optimizer in it are not tensors"),
        (Path("x"), "none of its code was run: .*Save the parameters with"),
    ],
)
def test_a_file_with_more_than_tensors_is_refused(
    content: Any, message: str, base_config: Config, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "saved.pt")
    with pytest.raises(ConfigError, match=message):
        prepare(base_config.replace(train__init_from=str(tmp_path / "saved.pt")))


def test_a_run_continues_only_with_its_initial_parameters(base_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "first.safetensors"
    task = prepare(base_config).job.task
    state = write_parameters(task, path)
    config = base_config.replace(train__init_from=str(path))
    claim(prepare(config), 1)
    path.rename(tmp_path / "moved.safetensors")
    assert prepare(config.replace(train__init_from=str(tmp_path / "moved.safetensors"))).resumes
    with pytest.raises(RunExistsError, match=r"- train.init_digest: "):
        prepare(base_config)
    claim(prepare(base_config.replace(run__name="drawn")), 1)
    with pytest.raises(RunExistsError, match=r"\+ train.init_digest: "):
        prepare(base_config.replace(run__name="drawn", train__init_from=str(tmp_path / "moved.safetensors")))
    write_parameters(task, path, seed=6)
    job = prepare(config).job
    assert params_digest(job.read_initial() or {}) == params_digest(state), "the run must keep its own copy"
    with pytest.raises(ConfigError, match=rf"but the run began with {params_digest(state)}"):
        prepare(config.replace(run__name="new", train__init_digest=params_digest(state)))


def test_unreadable_initial_parameters_refuse_a_start_but_not_a_running_job(
    monkeypatch: pytest.MonkeyPatch, base_config: Config, tmp_path: Path
) -> None:
    path = tmp_path / "first.safetensors"
    write_parameters(prepare(base_config).job.task, path)
    config = base_config.replace(train__init_from=str(path))
    job = claim(prepare(config), 1).job

    def fails(self: Path) -> bytes:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fails)
        with pytest.raises(OSError, match="does not answer"):
            job.read_initial()
        with pytest.raises(ConfigError, match=r"cannot be read: .*does not answer"):
            load_initial_parameters(config, None)
    Path(job.initial or "").unlink()
    with pytest.raises(ConfigError, match=r"initial.safetensors' cannot be read: .*No such file"):
        job.read_initial()


def test_parameters_that_do_not_fit_the_model_are_refused_by_name(base_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "first.safetensors"
    config = base_config.replace(train__init_from=str(path))
    with pytest.raises(ConfigError, match=r"first.safetensors' cannot be read: .*Name the directory of a run"):
        prepare(config)
    path.write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="is neither a safetensors file nor one of"):
        prepare(config)
    state = write_parameters(prepare(base_config).job.task, path)
    state["extra"] = torch.zeros(1)
    state["9.bias"] = torch.zeros(3)
    del state["9.weight"]
    path.write_bytes(safetensors.torch.save(state))
    with pytest.raises(ConfigError) as refused:
        prepare(config)
    for text in ("missing: 9.weight", "unexpected: extra", "9.bias torch.float32 (3,), wanted torch.float32 (10,)"):
        assert text in str(refused.value)
    with pytest.raises(ConfigError, match=r"init_digest is .* without train.init_from"):
        prepare(base_config.replace(train__init_digest="d" * 64))
