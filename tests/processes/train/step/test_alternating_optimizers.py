"""Several optimizers take turns: the step decides the turn, and training is bit-identical on any number of workers."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from ray_app.checkpoint.format import params_digest
from ray_app.config.checks import check_config
from ray_app.config.import_paths import TurnSpec
from ray_app.drill.faults import Evidence
from ray_app.drill.memory_faults import Flip
from ray_app.driver.parsing import load_config
from ray_app.errors import ConfigError, WrongResultError
from ray_app.models.export import load_model, write_export
from ray_app.runlog.journal import read_events, read_records
from ray_app.task.base import Task
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks, Job
from ray_app.train.state.alternating_optimizers import steps_in_turn, turn_at
from ray_app.train.state.state import TrainingState
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import CPU, TinyImages, make_job
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.shifting_world import KillOnce, train_shifting

GAN = (ROOT / "conf" / "own_gan.py").read_text()
exec(GAN, globals())
ON_PAGE = next(block.text for block in blocks(ROOT / "docs" / "own-task.md") if "critic" in block.text)
OPTIMIZERS = yaml.safe_load(ON_PAGE)["optimizers"]
SOURCE = {"run": "gan", "step": 1, "params_digest": ""}
STEP = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}


def gan() -> Task:
    return globals()["Gan"]()


def job_of(folder: Path, data: Path, turns: dict[str, Any] | None = None, **fields: Any) -> Job:
    default = {"class_path": "torch.optim.Adam", "init_args": {}}
    settings = {"optimizer": default, "optimizers": OPTIMIZERS if turns is None else turns, "task": gan()}
    return make_job(folder, data, every=4, **(settings | fields))


def with_schedules() -> dict[str, Any]:
    """Returns optimizers with schedules: the critic takes one step, the generator three and has a parameter group."""
    group = [{"norms_and_biases": True, "lr": 0.0}]
    return {
        "critic": {**OPTIMIZERS["critic"], "steps": 1, "schedule": STEP},
        "generator": {**OPTIMIZERS["generator"], "steps": 3, "schedule": STEP, "groups": group},
    }


@pytest.mark.rest
def test_the_code_of_the_documentation_trains_a_gan(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data)
    worker_pool.train_to_end(job, 2, cache_windows)
    records, _ = read_records(job.paths)
    turns = [sorted(records[step].metrics) for step in range(1, 7)]
    assert turns == [["caught", "critic_loss"]] * 2 + [["generator_loss"]] + [["caught", "critic_loss"]] * 2 + [
        ["generator_loss"]
    ]
    assert [records[step].lr for step in range(1, 5)] == [0.002, 0.002, 0.001, 0.002]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("turns", "fields"),
    [
        (None, {}),
        (with_schedules(), {"train__ema_decay": 0.9, "train__grad_clip_norm": 0.1}),
    ],
)
def test_turns_are_bit_identical_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, turns: dict[str, Any] | None, fields: dict[str, Any]
) -> None:
    """The run resumes in the middle of a turn of several steps, and in the middle of an epoch."""
    job = job_of(tmp_path / "run", data, turns, **fields)
    train_and_resume(worker_pool, job, (1, 2, 4))


def test_a_turn_updates_only_its_own_parameters(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    for steps, updated in ((1, {"critic"}), (2, {"critic"}), (3, {"critic", "generator"})):
        job = job_of(tmp_path / str(steps), data, train__max_steps=steps)
        trained = worker_pool.train_new_run(job, 2, cache_windows).snapshot.model
        initial = TrainingState(job.config, job.task, CPU, 10).snapshot().model
        assert {
            name.split(".")[0] for name, value in trained.items() if not torch.equal(value, initial[name])
        } == updated


def test_turns_equal_those_of_plain_torch_optimizers(data: Path, tmp_path: Path) -> None:
    """The optimizers and schedules of the state match two that are built by hand and get the same gradients."""
    job = job_of(tmp_path / "run", data, with_schedules())
    state, twin = (TrainingState(job.config, job.task, CPU, 10) for _ in range(2))
    state.step = 0
    critic, generator = (dict(twin.model[name].named_parameters()) for name in ("critic", "generator"))
    critic_optimizer = torch.optim.Adam(critic.values(), lr=0.002, betas=(0.5, 0.999), fused=True)
    groups = [{"params": [p for p in generator.values() if p.ndim == d], "lr": lr} for d, lr in ((2, 0.001), (1, 0.0))]
    generator_optimizer = torch.optim.Adam(groups, lr=0.001, betas=(0.5, 0.999), fused=True)
    schedules = {
        optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for optimizer in (critic_optimizer, generator_optimizer)
    }
    assert state.turns is not None
    for step in range(6):
        turn = state.turns.begin_step(step)
        assert {name.split(".")[0] for name, p in state.model.named_parameters() if p.requires_grad} == {turn}
        for ours, theirs in zip(state.model.parameters(), twin.model.parameters(), strict=True):
            ours.grad = torch.full_like(ours, 0.1 * (step + 1)) if ours.requires_grad else None
            theirs.grad = ours.grad.clone() if ours.grad is not None else None
        state.optimizer_step()
        active = generator_optimizer if step % 4 else critic_optimizer
        active.step()
        schedules[active].step()
    assert params_digest(state.model.state_dict()) == params_digest(twin.model.state_dict())


def test_the_step_decides_the_turn() -> None:
    turns = {name: TurnSpec("x", steps=steps) for name, steps in (("a", 2), ("b", 1), ("c", 3))}
    assert "".join(turn_at(turns, step) for step in range(14)) == "aabcccaabcccaa"
    for steps in range(20):
        assert [steps_in_turn(turns, name, steps) for name in turns] == [
            sum(turn_at(turns, s) == name for s in range(steps)) for name in turns
        ]


@pytest.mark.rest
@pytest.mark.parametrize("part", ["critic", "generator"])
def test_the_sdc_check_recomputes_the_part_of_the_turn(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, part: str
) -> None:
    """A bit flips in a gradient of rank 1, in the next step in which that part of the model has its turn."""
    job = job_of(tmp_path / "run", data, failure__sdc_check_rate=1.0)
    flip = Flip(Evidence(str(tmp_path / "evidence")), "flip", "gradient", 1, 3)
    outcomes = train_shifting(
        worker_pool, job, [[0, 1, 2], [0, 2]], [], Hooks(after_step=flip, built=FlipInPart(flip, part))
    )
    assert isinstance(outcomes[1].error, WrongResultError), outcomes[1].trace
    assert [outcomes[rank].value for rank in (0, 2)] == ["done"] * 2, [outcome.trace for outcome in outcomes]
    assert [event.details["rank"] for event in read_events(job.paths, "sdc_detected")] == [1]


def test_a_kill_between_two_steps_of_a_turn_keeps_the_run_bit_identical(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """The kill is between the two steps of the critic; the survivor knows the turn and has both optimizer states."""
    alone = worker_pool.train_new_run(job_of(tmp_path / "alone", data), 1, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=4, rank=0)
    train_shifting(worker_pool, job := job_of(tmp_path / "killed-run", data), [[0, 1], [1]], [], Hooks(after_step=kill))
    assert kill.proof.exists(), "the fault did not happen"
    assert turn_at(job.config.optimizers or {}, 3) == turn_at(job.config.optimizers or {}, 4) == "critic"
    assert read_trained_run(job).digests == alone.digests


def test_a_generator_that_draws_random_numbers_is_exported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_gan.py").write_text(GAN)
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("own_gan").Gan()
    torch.manual_seed(0)
    stored = write_export(
        task, task.build_model(), {"image": np.ones((2, 64), np.float32)}, tmp_path / "export", SOURCE
    )
    assert stored["outputs"] == "equal"
    loaded = load_model(tmp_path / "export", trust=True)
    first, second = (loaded.predict(np.ones((2, 64), np.float32), scores=True) for _ in range(2))
    assert (np.asarray(first) != np.asarray(second)).any(), "the exported generator draws no random numbers"


@dataclasses.dataclass(frozen=True)
class FlipInPart:
    """Restricts a flip to a part of the model."""

    flip: Flip
    part: str

    def __call__(self, model: nn.Module) -> None:
        self.flip.built(getattr(model, self.part))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((["critic.*"], ["generator.0.*"]), "No optimizer has the parameters generator.2.weight, generator.2.bias"),
        ((["*"], ["generator.*"]), "optimizers.generator.parameters names generator.0.weight.*, which"),
        ((["critic.*"], ["genrator.*"]), "optimizers.generator.parameters names 'genrator.\\*', which matches no"),
    ],
)
def test_a_parameter_belongs_to_one_optimizer(
    data: Path, tmp_path: Path, parameters: tuple[list[str], list[str]], message: str
) -> None:
    turns = {
        name: {**OPTIMIZERS[name], "parameters": patterns}
        for name, patterns in zip(OPTIMIZERS, parameters, strict=True)
    }
    job = job_of(tmp_path / "run", data, turns)
    with pytest.raises(ConfigError, match=message):
        TrainingState(job.config, job.task, CPU, 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train__strategy": "fsdp"}, "optimizers is set, but train.strategy fsdp.*Use ddp or single"),
        ({"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}}, "optimizer and optimizers are"),
        ({"schedule": STEP}, "set optimizers.NAME.schedule instead"),
        ({"optimizers": {"a": {**OPTIMIZERS["critic"], "steps": 0}}}, "optimizers.a.steps is 0; it must be at least 1"),
        ({"optimizers": {"a": {"class_path": "torch.optim.Adam"}}}, "optimizers.a.parameters is missing"),
    ],
)
def test_incompatible_optimizer_settings_are_refused(
    data: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    job = job_of(tmp_path / "run", data)
    with pytest.raises(ConfigError, match=message):
        check_config(job.config.replace(**fields))


def test_optimizers_in_yaml_are_checked_against_their_signatures(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    header = "task: {class_path: ray_app.task.image.ImageClassification}\ndata: {path: x}\n"
    file.write_text(header + ON_PAGE)
    config = load_config(file)
    assert config.optimizers is not None
    assert [(name, spec.steps, spec.parameters) for name, spec in config.optimizers.items()] == [
        ("critic", 2, ["critic.*"]),
        ("generator", 1, ["generator.*"]),
    ]
    file.write_text(config.to_yaml())
    assert load_config(file) == config
    for text, message in (
        ("lr: 0.002", "optimizers.critic: torch.optim.Adam has no argument .lrr.. Did you mean lr"),
        ("steps: 2", "optimizers.critic has the unknown keys stepps"),
    ):
        file.write_text(header + ON_PAGE.replace(text, text.replace("lr", "lrr").replace("steps", "stepps"), 1))
        with pytest.raises(ConfigError, match=message):
            load_config(file)


def test_a_task_without_turns_uses_its_usual_loss_in_each_turn(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    turns = {
        name: {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}, "parameters": [f"{n}.*" for n in layers]}
        for name, layers in (("first", (1, 2)), ("last", (5,)))
    }
    job = job_of(tmp_path / "run", data, turns, task=TinyImages())
    assert (
        worker_pool.train_new_run(job, 2, cache_windows).digests
        == worker_pool.train_new_run(job, 1, cache_windows).digests
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"names": ["critic.9.wieght"], "lr": 0.1}], r"optimizers.critic.groups names 'critic.9.wieght'"),
        ([{"names": ["*.bias"], "wight_decay": 0}], r"optimizers.critic.groups sets 'wight_decay'"),
    ],
)
def test_an_error_in_groups_names_the_optimizer(
    data: Path, tmp_path: Path, groups: list[dict[str, Any]], message: str
) -> None:
    turns = {**OPTIMIZERS, "critic": OPTIMIZERS["critic"] | {"groups": groups}}

    def make_state() -> TrainingState:
        job = job_of(tmp_path / "run", data, turns)
        return TrainingState(job.config, job.task, CPU, 10)

    with pytest.raises(ConfigError, match=message):
        make_state()
