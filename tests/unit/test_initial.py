"""A run that begins with the parameters of a file: the same bits for every worker, part of the digest, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ray_app import load_config
from ray_app.checkpoint.format import params_digest
from ray_app.config import Config, result_fields
from ray_app.errors import ConfigError, RunExistsError
from ray_app.pipeline.prepare import claim, prepare
from ray_app.task.base import Task
from ray_app.train.state import TrainingState
from tests.cluster import ROOT


@pytest.fixture
def given(digits: Path, tmp_path: Path) -> Config:
    fields: dict[str, Any] = {"data__path": str(digits / "train"), "data__eval_path": None, "run__storage_path": str(tmp_path / "runs")}
    return load_config(ROOT / "conf" / "digits.yaml").replace(run__name="run", tracking__enabled=False, **fields)


def parameters(task: Task, place: Path, seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = {name: values.clone() for name, values in task.build_model().state_dict().items()}
    place.write_bytes(safetensors.torch.save(state))
    return state


def test_every_worker_begins_with_the_parameters_of_the_file(given: Config, tmp_path: Path) -> None:
    task = prepare(given).job.task
    state = parameters(task, tmp_path / "first.safetensors")
    config = given.replace(train__init_from=str(tmp_path / "first.safetensors"))
    job = prepare(config).job
    assert job.config.train.init_digest == params_digest(state)
    assert result_fields(job.config, "m")["train.init_digest"] == params_digest(state)
    assert "train.init_from" not in result_fields(job.config, "m")
    made = [TrainingState(job.config, task, torch.device("cpu"), job.total_steps) for _ in range(2)]
    assert {params_digest(one.model.state_dict()) for one in made} == {params_digest(state)}
    seeded = TrainingState(given, task, torch.device("cpu"), job.total_steps)
    assert params_digest(seeded.model.state_dict()) != params_digest(state)


def test_a_run_goes_on_with_the_parameters_that_it_began_with(given: Config, tmp_path: Path) -> None:
    place = tmp_path / "first.safetensors"
    task = prepare(given).job.task
    state = parameters(task, place)
    config = given.replace(train__init_from=str(place))
    claim(prepare(config), 1)
    place.rename(tmp_path / "moved.safetensors")
    assert prepare(config.replace(train__init_from=str(tmp_path / "moved.safetensors"))).resumes
    with pytest.raises(RunExistsError, match=r"- train.init_digest: "):
        prepare(given)
    parameters(task, place, seed=6)
    with pytest.raises(ConfigError, match=rf"the run begins with {params_digest(state)}"):
        prepare(config)


def test_parameters_that_are_not_the_models_are_refused_by_name(given: Config, tmp_path: Path) -> None:
    place = tmp_path / "first.safetensors"
    config = given.replace(train__init_from=str(place))
    with pytest.raises(ConfigError, match=r"first.safetensors' cannot be read: .* every node sees"):
        prepare(config)
    place.write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        prepare(config)
    state = parameters(prepare(given).job.task, place)
    state["extra"] = torch.zeros(1)
    state["9.bias"] = torch.zeros(3)
    del state["9.weight"]
    place.write_bytes(safetensors.torch.save(state))
    with pytest.raises(ConfigError) as refused:
        prepare(config)
    for text in ("missing: 9.weight", "unexpected: extra", "9.bias torch.float32 (3,), wanted torch.float32 (10,)"):
        assert text in str(refused.value)
    with pytest.raises(ConfigError, match=r"init_digest is given without train.init_from"):
        prepare(given.replace(train__init_digest="d" * 64))
