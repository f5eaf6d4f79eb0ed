"""Groups of parameters have their own options with all strategies and are bit-identical on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.config.config import Config, digest, from_yaml, result_fields
from ray_app.driver.parsing import load_config
from ray_app.errors import ConfigError
from ray_app.task.image import ImageClassification
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from tests.support import server_world
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import CPU, TinyImages, make_job

ROWS = [[50, 1], [46]]
GROUPS = [{"norms_and_biases": True, "weight_decay": 0.0}, {"names": ["9.*"], "lr": 0.05}]
ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": [0.02, 0.02, 0.1]}}


def optimizer(name: str = "AdamW", groups: list[dict[str, Any]] | None = None, **args: Any) -> dict[str, Any]:
    args = {"lr": 0.01, "weight_decay": 0.1, **args}
    return {"class_path": f"torch.optim.{name}", "init_args": args, "groups": GROUPS if groups is None else groups}


def job_of(folder: Path, data: Path, **fields: Any) -> Job:
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    return make_job(folder, data, every=4, **({"optimizer": optimizer(), "task": task} | fields))


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"schedule": ONE_CYCLE},
    "central_storage": {"train__strategy": "central_storage", "train__ema_decay": 0.9},
    "local_sgd": {
        "train__strategy": "local_sgd",
        "train__local_steps": 3,
        "checkpoint__every_steps": 3,
        "optimizer": optimizer("SGD", momentum=0.9),
        "schedule": ONE_CYCLE,
    },
}


@pytest.mark.rest
@pytest.mark.parametrize("name", STRATEGIES)
def test_groups_are_bit_identical_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    job = job_of(tmp_path / "run", data, **STRATEGIES[name])
    alone = train_and_resume(worker_pool, job)
    decays = [group["weight_decay"] for group in alone.snapshot.optimizer["param_groups"]]
    assert decays == [0.1, 0.0, 0.1], "the groups are not: the rest, norms and biases, the weight of the last layer"
    fields = STRATEGIES[name] | {"optimizer": job.config.replace(optimizer__groups=None).to_dict()["optimizer"]}
    fields["schedule"] = None
    ungrouped = worker_pool.train_new_run(job_of(tmp_path / "without", data, **fields), 1, cache_windows)
    assert ungrouped.commit.params_digest != alone.commit.params_digest


def test_groups_equal_those_of_plain_torch(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """The groups of the training state match an optimizer that is built by hand and gets the same gradients."""
    job = job_of(tmp_path / "run", data)
    state, twin = (TrainingState(job.config, job.task, CPU, 10) for _ in range(2))
    layers = dict(twin.model.named_parameters())
    flat = [p for p in layers.values() if p.ndim == 1]
    last = [layers["9.weight"]]
    rest = [p for p in layers.values() if p.ndim > 1 and p is not last[0]]
    groups = [{"params": rest}, {"params": flat, "weight_decay": 0.0}, {"params": last, "lr": 0.05}]
    plain = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)
    for step in range(3):
        for ours, theirs in zip(state.model.parameters(), twin.model.parameters(), strict=True):
            ours.grad = torch.full_like(ours, 0.1 * (step + 1))
            theirs.grad = ours.grad.clone()
        state.optimizer_step()
        plain.step()
    for ours, theirs in zip(state.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert state.lr == 0.01, "the reported rate is not that of the first group"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.rest),
        {"optimizer": optimizer("SGD", momentum=0.9), "schedule": ONE_CYCLE, "train__grad_clip_norm": 0.5},
    ],
)
def test_parameter_servers_with_groups_are_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Some of the servers have no parameter of some group, and one server is lost."""
    plain = worker_pool.train_new_run(job_of(tmp_path / "ddp", data, **fields), 2, cache_windows)
    monkeypatch.setattr("ray_app.train.strategies.parameter_server.layout._MIN_PART_BYTES", 1 << 10)
    settings = {"train__strategy": "parameter_server", **fields}
    world = server_world.ServerWorld(job_of(tmp_path / "servers", data, train__servers=3, **settings), 2)
    world.run(turns=1)
    groups = [server_optimizer.param_groups for server_optimizer in world.optimizers]
    assert [len(server_groups) for server_groups in groups] == [3, 3, 3]
    assert any(not group["params"] for server_groups in groups for group in server_groups), (
        "each server has a parameter of each group"
    )
    world.run_until(8)
    world.servers.lose(1)
    world.run()
    run = read_trained_run(world.job)
    assert (run.digests, run.steps) == (plain.digests, plain.steps)


@pytest.mark.rest
def test_fsdp_with_groups_is_bit_identical_to_ddp(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    fields = {
        "task": TinyImages(),
        "optimizer": optimizer("SGD", [{"names": ["5.*"], "lr": 0.05}, {"norms_and_biases": True, "lr": 0.0}]),
    }
    plain, sharded = (
        worker_pool.train_new_run(
            job_of(tmp_path / strategy, data, train__strategy=strategy, **fields), 2, cache_windows
        )
        for strategy in ("ddp", "fsdp")
    )
    assert (sharded.steps, sharded.digests) == (plain.steps, plain.digests)
    initial_job = job_of(tmp_path / "x", data, **fields)
    before = TrainingState(initial_job.config, initial_job.task, CPU, 10).snapshot().model
    after = sharded.snapshot.model
    assert torch.equal(after["1.bias"], before["1.bias"]), "a parameter with rate 0 was updated"
    assert not torch.equal(after["5.bias"], before["5.bias"]), (
        "the first group that matches a parameter does not take it"
    )


def test_frozen_parameters_are_in_no_group(data: Path, tmp_path: Path) -> None:
    groups = [{"names": ["0.*", "9.bias"], "lr": 0.5}, {"names": ["1.*"], "lr": 0.1}]
    job = job_of(tmp_path / "run", data, optimizer=optimizer(groups=groups), train__freeze=["0.*", "1.*"])
    state = TrainingState(job.config, job.task, CPU, 10)
    assert [(len(g["params"]), g["lr"]) for g in state.optimizer.param_groups] == [(4, 0.01), (1, 0.5)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"names": ["9.wieght"], "lr": 0.1}], "optimizer.groups names '9.wieght', which matches no parameter.*The"),
        ([{"names": ["*.bias"], "wight_decay": 0}], "sets 'wight_decay', which is not an option of AdamW; the"),
        ([{"names": ["*.bias"], "lr": "fast"}], r"groups has lr = 'fast'; it must be a number"),
        ([{"lr": 0.1}], "has {'lr': 0.1}; name the parameters with these options by names, a list, or by"),
        ([{"names": "*.bias", "lr": 0.1}], r"by names, a list"),
    ],
)
def test_invalid_groups_are_refused(data: Path, tmp_path: Path, groups: list[dict[str, Any]], message: str) -> None:
    def make_state() -> TrainingState:
        """Runs both checks: the configuration refuses some groups, the optimizer the others."""
        job = job_of(tmp_path / "run", data, optimizer=optimizer(groups=groups))
        return TrainingState(job.config, job.task, CPU, 10)

    with pytest.raises(ConfigError, match=message):
        make_state()


def test_a_schedule_that_would_override_the_rates_of_groups_is_refused(data: Path, tmp_path: Path) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.1}}
    job = job_of(tmp_path / "run", data, schedule=schedule)
    with pytest.raises(ConfigError, match=r"max_lr 0.1 for all 3 parameter groups, and would replace their rates"):
        TrainingState(job.config, job.task, CPU, 10)


def test_groups_are_in_yaml_and_in_the_digest_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(
        "task: {class_path: ray_app.task.image.ImageClassification}\ndata: {path: x}\n"
        "optimizer:\n  class_path: torch.optim.AdamW\n  groups:\n    - {names: ['*.bias'], weight_decay: 0.0}\n"
    )
    config = load_config(file)
    assert config.optimizer.groups == [{"names": ["*.bias"], "weight_decay": 0.0}]
    assert result_fields(config, "m")["optimizer.groups"] == config.optimizer.groups
    assert from_yaml(config.to_yaml()) == config
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config
    overridden = load_config(file, optimizer__groups=[{"norms_and_biases": True, "lr": 0.5}])
    assert overridden.optimizer.groups == [{"norms_and_biases": True, "lr": 0.5}]
    ungrouped = Config().replace(task__class_path="x", data__path="x")
    assert not any("groups" in name for name in result_fields(ungrouped, "m"))
    assert digest(ungrouped, "m") != digest(ungrouped.replace(optimizer__groups=[{"names": ["*"]}]), "m")
