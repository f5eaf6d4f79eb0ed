"""Groups of parameters by names: options of their own, for every strategy, with the same bits for any number of
workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.config.config import Config, digest, from_yaml, result_fields
from ray_app.driver.parsing import load_config
from ray_app.errors import ConfigError
from ray_app.task.image import ImageClassification
from ray_app.testing import DieAfter, WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks, Job
from ray_app.train.state.state import TrainingState
from tests.support import server_world
from tests.support.local_world import CPU, TinyImages, make_job, write_images

ROWS = [[50, 1], [46]]
GROUPS = [{"norms_and_biases": True, "weight_decay": 0.0}, {"names": ["9.*"], "lr": 0.05}]
ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": [0.02, 0.02, 0.1]}}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("groups") / "data", ROWS)


def optimizer(name: str = "AdamW", groups: list[dict[str, Any]] | None = None, **args: Any) -> dict[str, Any]:
    args = {"lr": 0.01, "weight_decay": 0.1, **args}
    return {"class_path": f"torch.optim.{name}", "init_args": args, "groups": GROUPS if groups is None else groups}


def job_of(folder: Path, data: Path, **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "optimizer": optimizer(),
        "train__epochs": 2,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 4,
        "task": ImageClassification(model_args={"channels": 4, "dropout": 0.3}),
    }
    return make_job(folder, data, logical_workers=4, batch=12, **(defaults | fields))


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
def test_the_same_bits_for_every_number_of_workers_and_across_a_resume(
    pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    job = job_of(tmp_path / "run", data, **STRATEGIES[name])
    alone, several = pool.train_new_run(job, 1, cache_windows), pool.train_new_run(job, 3, cache_windows)
    assert (several.digests, several.steps) == (alone.digests, alone.steps)
    pool.train(job, 3, Hooks(after_step=DieAfter(7)), cache_windows)
    pool.train_to_end(job, 2, cache_windows)
    assert read_trained_run(job).digests == alone.digests
    decays = [group["weight_decay"] for group in alone.snapshot.optimizer["param_groups"]]
    assert decays == [0.1, 0.0, 0.1], "the rest, norms and biases, what is left of the last layer"
    fields = STRATEGIES[name] | {"optimizer": job.config.replace(optimizer__groups=None).to_dict()["optimizer"]}
    fields["schedule"] = None
    without = pool.train_new_run(job_of(tmp_path / "without", data, **fields), 1, cache_windows)
    assert without.commit.params_digest != alone.commit.params_digest


def test_a_group_is_that_of_plain_torch(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """The groups of the strategies' shared state, against an optimizer that is made by hand with the same gradients."""
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
    assert state.lr == 0.01, "that of the rest"


@pytest.mark.parametrize(
    "fields", [{}, {"optimizer": optimizer("SGD", momentum=0.9), "schedule": ONE_CYCLE, "train__grad_clip_norm": 0.5}]
)
def test_parameter_servers_have_the_bits_of_ddp(
    pool: WorkerPool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """With so many servers that some have nothing of some group, and a resume on fewer."""
    plain = pool.train_new_run(job_of(tmp_path / "ddp", data, **fields), 2, cache_windows)
    monkeypatch.setattr("ray_app.train.strategies.parameter_server.layout._MIN_PART_BYTES", 1 << 10)
    served = {"train__strategy": "parameter_server", **fields}
    world = server_world.World(job_of(tmp_path / "servers", data, train__servers=3, **served), 2)
    world.run(turns=1)
    groups = [server._state.optimizer.param_groups for server in world.servers.servers]
    assert [len(each) for each in groups] == [3, 3, 3]
    assert any(not group["params"] for each in groups for group in each), "every server has something of every group"
    while world.coordinator._units.complete < 8:
        world.run(turns=1)
    world.servers.lose(1)
    world.run()
    run = read_trained_run(world.job)
    assert (run.digests, run.steps) == (plain.digests, plain.steps)


def test_sharded_it_is_the_same(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    fields = {
        "task": TinyImages(),
        "optimizer": optimizer("SGD", [{"names": ["5.*"], "lr": 0.05}, {"norms_and_biases": True, "lr": 0.0}]),
    }
    plain, sharded = (
        pool.train_new_run(job_of(tmp_path / strategy, data, train__strategy=strategy, **fields), 2, cache_windows)
        for strategy in ("ddp", "fsdp")
    )
    assert (sharded.steps, sharded.digests) == (plain.steps, plain.digests)
    begun = job_of(tmp_path / "x", data, **fields)
    before = TrainingState(begun.config, begun.task, CPU, 10).snapshot().model
    after = sharded.snapshot.model
    assert torch.equal(after["1.bias"], before["1.bias"]), "no rate"
    assert not torch.equal(after["5.bias"], before["5.bias"]), "the first group that names it wins"


def test_frozen_parameters_are_in_no_group(data: Path, tmp_path: Path) -> None:
    groups = [{"names": ["0.*", "9.bias"], "lr": 0.5}, {"names": ["1.*"], "lr": 0.1}]
    job = job_of(tmp_path / "run", data, optimizer=optimizer(groups=groups), train__freeze=["0.*", "1.*"])
    state = TrainingState(job.config, job.task, CPU, 10)
    assert [(len(g["params"]), g["lr"]) for g in state.optimizer.param_groups] == [(4, 0.01), (1, 0.5)]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [{"names": ["9.wieght"], "lr": 0.1}],
            r"optimizer.groups names '9.wieght', which matches no parameter.*The nearest: 9.weight",
        ),
        (
            [{"names": ["*.bias"], "wight_decay": 0}],
            r"sets 'wight_decay', which is not an option of AdamW; the nearest is weight_decay",
        ),
        ([{"names": ["*.bias"], "lr": "fast"}], r"groups has lr = 'fast'; it must be a number"),
        (
            [{"lr": 0.1}],
            r"has {'lr': 0.1}; say which parameters have these options by names, a list, or by norms_and_biases: true",
        ),
        ([{"names": "*.bias", "lr": 0.1}], r"by names, a list"),
    ],
)
def test_what_cannot_be_is_refused(data: Path, tmp_path: Path, groups: list[dict[str, Any]], said: str) -> None:
    def make_state() -> TrainingState:
        """The configuration's check refuses some groups, the optimizer the others."""
        job = job_of(tmp_path / "run", data, optimizer=optimizer(groups=groups))
        return TrainingState(job.config, job.task, CPU, 10)

    with pytest.raises(ConfigError, match=said):
        make_state()


def test_a_schedule_that_would_replace_the_rates_is_refused(data: Path, tmp_path: Path) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.1}}
    job = job_of(tmp_path / "run", data, schedule=schedule)
    with pytest.raises(
        ConfigError, match=r"max_lr 0.1 for all 3 groups of parameters, whose own rates \[0.01, 0.01, 0.05\] it would"
    ):
        TrainingState(job.config, job.task, CPU, 10)


def test_yaml_has_them_beside_class_path_and_only_then_the_digest(tmp_path: Path) -> None:
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
    other = load_config(file, optimizer__groups=[{"norms_and_biases": True, "lr": 0.5}])
    assert other.optimizer.groups == [{"norms_and_biases": True, "lr": 0.5}]
    without = Config().replace(task__class_path="x", data__path="x")
    assert not any("groups" in name for name in result_fields(without, "m"))
    assert digest(without, "m") != digest(without.replace(optimizer__groups=[{"names": ["*"]}]), "m")
