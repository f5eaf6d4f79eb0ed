"""A run that continues from a checkpoint of another: bit-identical with the same settings, else as defined."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from ray_app import run_training
from ray_app.checkpoint.format import Snapshot, unpack
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config, from_dict
from ray_app.driver.single import train_in_process
from ray_app.errors import CheckpointError, ConfigError, RunExistsError
from ray_app.preflight.branch import copy_checkpoint
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from ray_app.task.image import ImageClassification
from ray_app.testing import WorkerPool, digest_tensors
from ray_app.track.tracker import make_run_tags
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.state.state import seed_init
from tests.support.jobs import digits_config
from tests.support.local_world import CPU, write_images

HERE = __name__
STEPS, BRANCH = 12, 5
COSINE = {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 30}}
WARM_UP = {
    "class_path": "torch.optim.lr_scheduler.SequentialLR",
    "init_args": {
        "schedulers": [
            {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"start_factor": 0.1, "total_iters": 3}},
            {"class_path": "torch.optim.lr_scheduler.MultiStepLR", "init_args": {"milestones": [1, 4]}},
        ],
        "milestones": [3],
    },
}


class LinearImages(ImageClassification):
    """A linear model of images without random numbers, which a plain loop can train, too."""

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.width = width

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.width or self.class_count))


def config_of(data: Path, storage: Path, name: str, **fields: Any) -> Config:
    config = from_dict(
        {
            "task": {"class_path": "ray_app.task.image.ImageClassification", "init_args": {"crop_padding": 1}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        }
    )
    defaults: dict[str, Any] = {
        "run__name": name,
        "run__storage_path": str(storage),
        "data__path": str(data),
        "data__global_batch_size": 12,
        "scaling__logical_workers": 3,
        "scaling__gpus_per_worker": 0,
        "train__epochs": 20,
        "train__max_steps": STEPS,
        "checkpoint__every_steps": BRANCH,
        "checkpoint__every_epochs": None,
        "checkpoint__keep_last": 10,
        "tracking__enabled": False,
    }
    return config.replace(**(defaults | fields))


def start(config: Config) -> Job:
    prepared = prepare(config)
    return claim(prepared, 1).job


def train(config: Config) -> Job:
    job = start(config)
    train_in_process(job, SingleProcessMembership(job.plan.logical_workers, lambda: False), Hooks())
    return job


def newest(job: Job) -> tuple[Commit, dict[str, Any]]:
    """Returns the newest checkpoint of a run, and all that it holds, tensors as digests."""
    store = CheckpointStore(job.paths)
    commit = store.commits()[-1]
    return commit, digest_tensors(unpack(store.load(commit)))


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("branches") / "runs"


@pytest.fixture(scope="module")
def straight(data: Path, storage: Path) -> Job:
    return train(config_of(data, storage, "straight", schedule=COSINE))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_branch_with_the_same_settings_is_the_straight_run(
    straight: Job, data: Path, tmp_path: Path, worker_pool: WorkerPool, workers: int
) -> None:
    source = f"{straight.paths.root}@step-{BRANCH}"
    job = start(config_of(data, tmp_path, "branch", schedule=COSINE, run__branch_from=source))
    assert job.config.run.first_step == BRANCH
    worker_pool.train_to_end(job, workers)
    assert newest(job)[1] == newest(straight)[1]
    assert newest(job)[0].step == STEPS
    [event] = read_events(job.paths, "branched")
    assert event.details == {"source": str(straight.paths.root), "step": BRANCH, "changed": {}}
    assert [commit.why for commit in CheckpointStore(job.paths).commits()] == ["branch", "cadence", "cadence"]


@pytest.mark.parametrize(
    "fields",
    [
        {"train__ema_decay": 0.9, "optimizer__groups": [{"norms_and_biases": True, "weight_decay": 0.0}]},
        {"train__strategy": "fsdp", "train__ema_decay": 0.9},
        {"train__strategy": "local_sgd", "train__local_steps": 5, "train__outer_momentum": 0.9, "train__max_steps": 10},
        {"train__strategy": "central_storage", "schedule": WARM_UP},
    ],
    ids=str,
)
@pytest.mark.rest
def test_a_branch_of_a_strategy_is_the_straight_run(
    data: Path, tmp_path: Path, worker_pool: WorkerPool, fields: dict[str, Any]
) -> None:
    fields |= {"scaling__max_workers": 2}
    straight = start(config_of(data, tmp_path, "straight", **fields))
    worker_pool.train_to_end(straight, 2)
    source = f"{straight.paths.root}@step-{BRANCH}"
    job = start(config_of(data, tmp_path, "branch", **fields, run__branch_from=source))
    worker_pool.train_to_end(job, 3)
    assert newest(job)[0].params_digest == newest(straight)[0].params_digest
    assert newest(job)[0].step > BRANCH


def plain_loop(job: Job, data: Path, options: Callable[[int], dict[str, float]]) -> dict[str, torch.Tensor]:
    """Trains the rows of a job in a loop of PyTorch, with options of AdamW for each step; returns the parameters."""
    table, plan = pq.read_table(data), job.plan
    images = torch.from_numpy(
        np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8).reshape(-1, 64) / np.float32(255)
    )
    labels = torch.from_numpy(table["label"].to_numpy())
    seed_init(job.config.seed, CPU)
    model = job.task.build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(job.total_steps):
        epoch, index = divmod(step, plan.steps_per_epoch)
        rows = np.concatenate([plan.epoch(epoch).rows_at(worker, index) for worker in range(plan.logical_workers)])
        optimizer.param_groups[0].update(options(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    return model.state_dict()


def cosine(step: int) -> float:
    return (1 + math.cos(math.pi * step / 30)) / 2


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"lr": 0.002, "weight_decay": 0.5}, lambda step: {"lr": 0.002, "weight_decay": 0.5}),
        ({"lr": 0.002, "schedule": COSINE}, lambda step: {"lr": 0.002 * cosine(step), "weight_decay": 0.01}),
    ],
    ids=["options", "schedule"],
)
def test_a_branch_with_another_rate_is_a_loop_that_changes_it(
    data: Path, tmp_path: Path, fields: dict[str, Any], options: Callable[[int], dict[str, float]]
) -> None:
    task = {"class_path": f"{HERE}.LinearImages", "init_args": {}}
    first = train(config_of(data, tmp_path, "first", task=task, train__max_steps=BRANCH))
    schedule = fields.pop("schedule", None)
    changed = {"class_path": "torch.optim.AdamW", "init_args": fields, "groups": None}
    branch = {"task": task, "optimizer": changed, "schedule": schedule, "run__branch_from": str(first.paths.root)}
    job = train(config_of(data, tmp_path, "branch", **branch))
    loop = plain_loop(job, data, lambda step: {"lr": 0.01, "weight_decay": 0.01} if step < BRANCH else options(step))
    store = CheckpointStore(job.paths)
    torch.testing.assert_close(store.load_model(store.commits()[-1]), loop, rtol=1e-4, atol=1e-6)
    [event] = read_events(job.paths, "branched")
    assert event.details["changed"]["optimizer.init_args.lr"] == [0.01, 0.002]
    tags = make_run_tags(job.paths, job.config, "abc")
    assert tags["ray_app.branch_from"] == f"{first.paths.root}@step-{BRANCH}"
    assert "optimizer.init_args.lr: 0.01 -> 0.002" in tags["ray_app.branch_changes"]


def test_a_longer_schedule_counts_from_the_first_step_of_the_other_run(data: Path, tmp_path: Path) -> None:
    """OneCycleLR depends on the steps of the run; those of the branch count."""
    cycle = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.01}}
    first = train(config_of(data, tmp_path, "first", schedule=cycle))
    source = f"{first.paths.root}@step-{BRANCH}"
    job = start(config_of(data, tmp_path, "branch", schedule=cycle, train__max_steps=20, run__branch_from=source))
    long = train(config_of(data, tmp_path, "long", schedule=cycle, train__max_steps=20))
    options = [snapshot_of(job_of, BRANCH).optimizer["param_groups"] for job_of in (job, long, first)]
    assert options[0] == options[1] != options[2]
    assert snapshot_of(job, BRANCH).schedule == snapshot_of(long, BRANCH).schedule


def snapshot_of(job: Job, step: int) -> Snapshot:
    store = CheckpointStore(job.paths)
    return unpack(store.load(next(commit for commit in store.commits() if commit.step == step)))


def test_the_names_of_checkpoints(straight: Job, data: Path, tmp_path: Path) -> None:
    root = straight.paths.root
    config = config_of(data, tmp_path, "branch", schedule=COSINE, train__max_steps=40)
    for name, step in {"": 12, "@newest": 12, "@step-10": 10, "@step-5-1": 5, "@step-5-0001": 5}.items():
        assert prepare(config.replace(run__branch_from=f"{root}{name}")).job.config.run.first_step == step
    for name, message in {
        "epoch-1": r"names epoch-1 of .*, which has the checkpoints step-5, step-10, step-12",
        "best": "The best one is known when the run has ended",
        "last": r"come @newest, @best, @step-N or @epoch-N",
    }.items():
        with pytest.raises(ConfigError, match=message):
            prepare(config.replace(run__branch_from=f"{root}@{name}"))
    copy = shutil.copytree(root, tmp_path / "copy")
    put_json(RunPaths(copy).summary, {"best": {"step": 10}})
    assert prepare(config.replace(run__branch_from=f"{copy}@best")).job.config.run.first_step == 10


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"seed": 1}, "seed was 0 and is 1: it decides which rows"),
        ({"scaling__logical_workers": 6}, "scaling.logical_workers was 3 and is 6"),
        ({"data__global_batch_size": 24}, "data.global_batch_size was 12 and is 24"),
        ({"data__path": "other"}, "manifest was .* the data is another"),
        ({"train__strategy": "central_storage"}, "train.strategy was 'ddp' and is 'central_storage'"),
        ({"task__init_args": {"crop_padding": 1, "model_args": {"channels": 4}}}, "checkpoint of another model"),
        ({"train__freeze": ["0.*"]}, "train.freeze was None"),
        ({"train__ema_decay": 0.9}, "another train.ema_decay"),
        ({"optimizer__class_path": "torch.optim.NAdam"}, "of a run with other optimizers: another class"),
        ({"optimizer__init_args": {"amsgrad": True}}, "of a run with amsgrad False, here it is True"),
        ({"optimizer__groups": [{"norms_and_biases": True, "lr": 0.1}]}, "other groups of parameters"),
        ({"train__max_steps": BRANCH}, "nothing is left to train"),
        ({"run__name": "straight"}, "the run itself"),
        ({"train__init_from": "x"}, "Set train.init_from to null"),
        ({"run__branch_point": f"5-{64 * '0'}"}, "and run.branch_point is 5-000"),
        ({"run__branch_point": "5"}, "Leave it out"),
    ],
    ids=str,
)
def test_what_a_branch_cannot_change_is_refused(
    straight: Job, data: Path, storage: Path, fields: dict[str, Any], reason: str
) -> None:
    if fields.get("data__path") and not (storage / "other").exists():
        write_images(storage / "other", [[40, 60]])
    fields = {**fields, "data__path": str(storage / fields.get("data__path", data))}
    source = f"{straight.paths.root}@step-{BRANCH}"
    with pytest.raises(ConfigError, match=reason):
        prepare(
            config_of(
                **{
                    "data": data,
                    "storage": storage,
                    "name": "new",
                    "schedule": COSINE,
                    "run__branch_from": source,
                    **fields,
                }
            )
        )
    assert not (storage / "new").exists()


def test_a_branch_has_its_own_copy_and_is_resumed_as_it_is(straight: Job, data: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(straight.paths.root, tmp_path / "other"))
    config = config_of(data, tmp_path, "branch", schedule=COSINE, run__branch_from=f"{root}@step-{BRANCH}")
    job = start(config)
    shutil.rmtree(root)
    resumed = prepare(config)
    assert resumed.resumes
    assert resumed.branch is None
    assert resumed.job.config.run == job.config.run
    for source in (f"{straight.paths.root}@step-10", None):
        with pytest.raises(RunExistsError, match=r"run\.branch_point"):
            prepare(config.replace(run__branch_from=source))
    train_in_process(claim(resumed, 2).job, SingleProcessMembership(3, lambda: False), Hooks())
    assert newest(job)[1] == newest(straight)[1]
    shutil.rmtree(tmp_path / "branch" / "checkpoints")
    with pytest.raises(CheckpointError, match="the checkpoint with which it began is missing"):
        train_in_process(claim(prepare(config), 3).job, SingleProcessMembership(3, lambda: False), Hooks())


def test_a_damaged_or_removed_checkpoint_is_refused_before_the_run_exists(
    straight: Job, data: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(straight.paths.root, tmp_path / "other"))
    config = config_of(data, tmp_path, "branch", schedule=COSINE, run__branch_from=f"{root}@step-{BRANCH}")
    prepared, folder = prepare(config), RunPaths(root).checkpoint(BRANCH, 1)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1] + b"x")
    with pytest.raises(ConfigError, match="differs from what was committed"):
        claim(prepared, 1)
    (folder / "training.pt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare(config)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="cannot be copied"):
        claim(prepared, 1)
    assert not (tmp_path / "branch" / "config.yaml").exists()


def test_a_copy_without_a_run_is_removed(straight: Job, data: Path, tmp_path: Path) -> None:
    """The driver was killed after the copy; another run of this name begins at its first step."""
    config = config_of(data, tmp_path, "branch", schedule=COSINE)
    source = config.replace(run__branch_from=f"{straight.paths.root}@step-10")
    prepared = prepare(source)
    assert prepared.branch is not None
    copy_checkpoint(prepared.branch, prepared.job.paths, 1, prepared.job.config_digest)
    job = claim(prepare(config), 2).job
    assert CheckpointStore(job.paths).commits() == []


@pytest.mark.rest
def test_the_command_of_the_page_trains_a_branch(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"train__strategy": "single", "evaluate__where": "workers", "train__max_steps": 30, "schedule": None}
    first = digits_config(digits, tmp_path, run__name="a", checkpoint__every_steps=20, **fields)
    run_training(first)
    branch = first.replace(run__name="b", run__branch_from=f"{tmp_path}/a@step-20", optimizer__init_args={"lr": 0.001})
    summary = run_training(branch).summary
    assert summary["branch"]["changed"]["optimizer.init_args.lr"] == [0.003, 0.001]
    assert (summary["steps"], summary["status"], summary["rows"]) == (30, "finished", 640 - 64 + 30)
    assert f"A branch of {tmp_path}/a from step 20 on. It changes" in capsys.readouterr().out
    assert sorted(score.step for score in read_scores(RunPaths(tmp_path / "b"))) == [20, 30]
    assert "continues" in (tmp_path / "b" / "report.html").read_text()


def test_planned_evaluations_begin_with_the_branch(straight: Job, data: Path, tmp_path: Path) -> None:
    source = f"{straight.paths.root}@step-{BRANCH}"
    fields: dict[str, Any] = {"checkpoint__every_steps": 2, "run__branch_from": source}
    job = prepare(config_of(data, tmp_path, "branch", schedule=COSINE, **fields)).job
    assert job.planned_evaluations(STEPS) == [6, 8, 10, 12]
