"""Local SGD has a replica per logical worker, so training is bit-identical on any workers and after a lost worker."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ray_app.checkpoint.format import params_digest
from ray_app.errors import PeerLostError
from ray_app.plan.order import Cursor
from ray_app.reduction.world import World
from ray_app.task.base import Batch
from ray_app.task.environment import set_up_torch
from ray_app.task.image import ImageClassification
from ray_app.testing import WorkerPool, cache_windows, digest_tensors, read_trained_run
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Job
from ray_app.train.membership import Flags
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import ReplicaBuffers
from ray_app.train.strategies import local_sgd
from ray_app.train.strategies.local_sgd import LocalStep
from tests.support.bit_identity import train_and_resume, train_on_workers
from tests.support.local_world import CLASSES, CPU, LocalMembership, TinyImages, feed_of, make_job, write_images

ROWS = [[50, 1], [46]]
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}}


def local_job(folder: Path, data: Path, **fields: Any) -> Job:
    defaults: dict[str, Any] = {"train__strategy": "local_sgd", "train__local_steps": 3}
    defaults["task"] = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    return make_job(folder, data, every=6, **(defaults | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"optimizer": SGD, "train__outer_lr": 0.7, "train__outer_momentum": 0.9}, marks=pytest.mark.rest),
        pytest.param(
            {
                "train__ema_decay": 0.9,
                "schedule": {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.02}},
            },
            marks=pytest.mark.rest,
        ),
        pytest.param({"train__max_steps": 16}, marks=pytest.mark.rest),
    ],
    ids=["adam", "diloco", "average and schedule", "an unfinished round at the end"],
)
def test_local_sgd_is_bit_identical_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    job = local_job(tmp_path / "run", data, **fields)
    # Step 11 is in the middle of a round.
    alone = train_and_resume(worker_pool, job, ends=(3, 11))
    assert len(alone.steps) == job.total_steps
    assert read_trained_run(job).workers[6:8] == [[3, 2], [3, 2]], "the steps of the round were not repeated"


class ScalarParameter(TinyImages):
    """A task with a parameter without dimensions, such as a learned temperature."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
        return model

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().forward(model, batch) * model.temperature


def test_a_parameter_without_dimensions_is_averaged_and_the_number_of_steps_is_not(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = local_job(tmp_path / "run", data, task=ScalarParameter(), train__outer_lr=0.7)
    assert len(train_on_workers(worker_pool, job, (1, 2)).steps) == job.total_steps


def step_of(job: Job, store: Path, state: TrainingState | None = None) -> tuple[LocalStep, TrainingState, Any]:
    set_up_torch(job.config, CPU)
    if state is None:
        state = build_state(job.config, job.task, CPU, job.total_steps)
        state.step = 0
    world = World(0, 1, job.plan.logical_workers)
    with LocalMembership(world, store).generation(0, False):
        step = build_step(job, state, world, CPU, lambda phase: None)
    feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
    return step, state, feed


def test_the_average_is_the_mean_of_the_states_of_the_logical_workers(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    job = local_job(tmp_path / "run", data, optimizer=SGD)
    step, state, feed = step_of(job, tmp_path / "store")
    start = copy.deepcopy(state.model.state_dict())
    replicas, rows = [], job.plan.rows_of_step
    apply_round = local_sgd.apply_round

    def record_replicas(*args: Any) -> None:
        replicas.extend(copy.deepcopy([replica.state for replica in step.replicas.values()]))
        apply_round(*args)

    monkeypatch.setattr(local_sgd, "apply_round", record_replicas)
    for i in range(3):
        step.run(Cursor.at(i, job.plan.steps_per_epoch), feed.next(), sum(rows(i)), Flags.STOP if i == 0 else Flags(0))
        assert state.step == (3 if i == 2 else 0)
        assert (params_digest(state.model.state_dict()) == params_digest(start)) == (i < 2)
    assert len(replicas) == 4
    for name, p in state.model.named_parameters():
        values = [dict(replica.model.named_parameters())[name] for replica in replicas]
        assert len({params_digest({"": v}) for v in values}) == 4, "the replicas did not train separately"
        assert torch.allclose(p, torch.stack(values).mean(0), atol=1e-6)
    for i, p in enumerate(state.model.parameters()):
        state_of_parameter = state.optimizer.state[p]
        trained = [list(replica.model.parameters()) for replica in replicas]
        values = [replicas[v].optimizer.state[trained[v][i]]["momentum_buffer"] for v in range(4)]
        assert torch.allclose(state_of_parameter["momentum_buffer"], torch.stack(values).mean(0), atol=1e-6)


def test_a_peer_lost_at_the_end_of_a_round_undoes_the_whole_round(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are reduced last; no parameter may have changed by then."""
    job = local_job(tmp_path / "run", data, train__ema_decay=0.9, train__outer_momentum=0.9)
    step, state, feed = step_of(job, tmp_path / "store")
    before = state.snapshot()

    def lose_peer(self: ReplicaBuffers) -> None:
        raise PeerLostError("while buffers travel")

    for i in range(2):
        step.run(Cursor.at(i, 9), feed.next(), 12, Flags(0))
    with monkeypatch.context() as patched:
        patched.setattr(ReplicaBuffers, "launch", lose_peer)
        with pytest.raises(PeerLostError):
            step.run(Cursor.at(2, 9), feed.next(), 12, Flags(0))
    assert digest_tensors(state.snapshot()) == digest_tensors(before)
    assert state.step == 0
    repeated, _, feed = step_of(job, tmp_path / "again", state)
    undisturbed_step, undisturbed, undisturbed_feed = step_of(job, tmp_path / "other")
    for i in range(3):
        repeated.run(Cursor.at(i, 9), feed.next(), 12, Flags(0))
        undisturbed_step.run(Cursor.at(i, 9), undisturbed_feed.next(), 12, Flags(0))
    assert state.step == 3
    assert digest_tensors(state.snapshot()) == digest_tensors(undisturbed.snapshot())


class Branches(TinyImages):
    """A task with a parameter that gets a gradient only in some steps, and one that gets none."""

    def __init__(self) -> None:
        super().__init__("unused")

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("branch", nn.Parameter(torch.ones(CLASSES)))
        return model

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs = super().forward(model, batch)
        return outputs * model.branch if model.training and torch.rand(()) < 0.3 else outputs


@pytest.mark.rest
@pytest.mark.parametrize(
    "optimizer",
    [SGD, {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}],
    ids=["sgd", "adam"],
)
def test_a_parameter_without_a_gradient_on_some_logical_workers_is_averaged(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    job = local_job(tmp_path / "run", data, optimizer=optimizer, task=Branches())
    alone = worker_pool.train_new_run(job, 1, cache_windows)
    assert worker_pool.train_new_run(job, 3, cache_windows).digests == alone.digests
    moments = [
        values["exp_avg" if "exp_avg" in values else "momentum_buffer"]
        for values in alone.snapshot.optimizer["state"].values()
    ]
    assert [bool(value.any()) for value in moments] == [False] + [True] * 7, (
        "the unused parameter has moments, or another one has none"
    )


def test_a_logical_worker_without_rows_takes_part_in_the_average(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """Two of four logical workers have a row, so all logical workers of a worker may be without rows."""
    data = write_images(tmp_path / "few", [[2]])
    job = local_job(
        tmp_path / "run", data, task=TinyImages(), train__local_steps=2, train__epochs=4, checkpoint__every_steps=2
    )
    alone = train_on_workers(worker_pool, job, (1, 2, 4))
    assert [step[4] for step in alone.steps] == [(1, 1, 0, 0)] * 4


def test_flags_are_returned_at_the_next_average(data: Path, tmp_path: Path) -> None:
    job = local_job(tmp_path / "run", data)
    step, _, feed = step_of(job, tmp_path / "store")
    flags = [step.run(Cursor.at(i, 9), feed.next(), 12, Flags.STOP if i == 0 else Flags(0)).flags for i in range(6)]
    assert flags == [Flags(0), Flags(0), Flags.STOP, Flags(0), Flags(0), Flags(0)]


def test_one_local_step_is_bit_identical_to_ddp(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    one = worker_pool.train_new_run(local_job(tmp_path / "one", data, train__local_steps=1), 2, cache_windows)
    plain = worker_pool.train_new_run(
        local_job(tmp_path / "plain", data, train__local_steps=1, train__strategy="ddp"), 2, cache_windows
    )
    assert one.commit.params_digest == plain.commit.params_digest
    assert one.steps == plain.steps


def test_one_local_step_with_an_outer_optimizer_is_close_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """The mean of p - lr * g equals p - lr * mean(g) but for rounding; a tiny outer momentum selects this path."""
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}}
    fields = {"optimizer": sgd, "train__local_steps": 1, "train__max_steps": 9}
    local = worker_pool.train_new_run(
        local_job(tmp_path / "a", data, train__outer_momentum=1e-12, **fields), 2, cache_windows
    )
    plain = worker_pool.train_new_run(
        local_job(tmp_path / "b", data, train__strategy="ddp", **fields), 2, cache_windows
    )
    assert local.commit.params_digest != plain.commit.params_digest
    for name, value in plain.snapshot.model.items():
        if "running" not in name:
            assert torch.allclose(local.snapshot.model[name].float(), value.float(), atol=1e-4), name


def test_optimizer_state_that_is_not_averaged_is_sent_from_the_host(data: Path, tmp_path: Path) -> None:
    """A tensor of a device would arrive on the device of the same number, which the other worker may not have."""
    step, *_ = step_of(local_job(tmp_path / "run", data), tmp_path / "store")
    replica = step.replicas[0]
    with FakeTensorMode():
        for p in replica.trained:
            replica.state.optimizer.state[p] = {
                "step": torch.zeros((), device="cuda"),
                "row": torch.zeros(3, device="cuda"),
                "lr": 0.1,
            }
    sent_values = [value for numbers in replica.unaveraged_state()[0].values() for value in numbers.values()]
    assert {str(value.device) for value in sent_values if isinstance(value, Tensor)} == {"cpu"}
    assert 0.1 in [value for value in sent_values if not isinstance(value, Tensor)]
