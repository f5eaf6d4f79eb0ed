"""Central storage is bit-identical to `ddp`; one worker holds the optimizer state, and may be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.errors import PreemptedError
from ray_app.plan.order import Cursor
from ray_app.reduction.world import World
from ray_app.task.base import Batch
from ray_app.task.environment import set_up_torch
from ray_app.task.image import ImageClassification
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags
from ray_app.train.state.transfer import transfer_snapshot
from ray_app.train.strategies import central_storage
from ray_app.train.strategies.central_storage import CentralBackend
from tests.support.bit_identity import assert_bit_identical, train_and_resume
from tests.support.fake_cuda import lock_pages
from tests.support.injector import KillSaving
from tests.support.local_world import CPU, LocalMembership, TinyImages, feed_of, make_job
from tests.support.shifting_world import KillOnce, train_shifting

ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.02}}


def central_job(folder: Path, data: Path, **fields: Any) -> Job:
    defaults: dict[str, Any] = {"train__strategy": "central_storage", "schedule": ONE_CYCLE}
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    return make_job(folder, data, task=task, every=6, **(defaults | fields))


@pytest.mark.rest
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train__ema_decay": 0.9, "train__grad_clip_norm": 0.5, "train__precision": "fp16", "train__freeze": ["0.*"]},
    ],
)
def test_training_is_bit_identical_to_ddp_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    job = central_job(tmp_path / "run", data, **fields)
    plain = worker_pool.train_new_run(
        central_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows
    )
    train_and_resume(worker_pool, job, ends=(3, 8), expected=plain)


@pytest.mark.parametrize(("lost", "repeats"), [(0, True), (1, False)])
def test_a_lost_worker_repeats_steps_only_if_it_held_the_optimizer_state(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, lost: int, repeats: bool
) -> None:
    """If the holder of the optimizer state is lost, the survivor goes back to its newest copy of the state."""
    job = central_job(tmp_path / "run", data)
    plain = worker_pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=8, rank=lost)
    outcomes = train_shifting(worker_pool, job, [[0, 1], [1 - lost]], [], Hooks(after_step=kill))
    assert kill.proof.exists()
    assert outcomes[1 - lost].trace == ""
    run = read_trained_run(job)
    assert_bit_identical(run, plain)
    assert [set(workers) for workers in run.workers[8:]] == [{1}] * 10
    assert all((1 in workers) == repeats for workers in run.workers[6:8])
    assert all(2 in workers for workers in run.workers[:7]), "a repeated step was not recorded the first time"
    assert not any(1 in workers for workers in run.workers[:6]), (
        "the survivor did not go back to its copy of the checkpoint"
    )


@pytest.mark.rest
def test_the_holder_leaves_with_a_checkpoint_while_it_waits_for_a_lost_worker(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """No other worker takes part in the copy of the state, and no step is repeated."""
    job = central_job(tmp_path / "run", data)
    plain = worker_pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=8, rank=1)
    holder = train_shifting(worker_pool, job, [[0, 1], [], []], [], Hooks(after_step=kill))[0]
    assert kill.proof.exists()
    assert isinstance(holder.error, PreemptedError), holder.trace
    assert [(c.step, c.why) for c in CheckpointStore(job.paths).commits()] == [(6, "cadence"), (8, "extra")]
    worker_pool.train_to_end(job, 2, cache_windows)
    run = read_trained_run(job)
    assert run.digests == plain.digests
    assert [len(workers) for workers in run.workers] == [1] * 18


class LateFailure:
    """A hook that fails the next copy of the state on one rank after its peers succeeded, as gloo may if a peer dies.

    Args:
        proof: File that exists after the failure.
    """

    def __init__(self, rank: int, step: int, proof: Path) -> None:
        self.rank = rank
        self.step = step
        self.proof = proof

    def __call__(self, rank: int, step: int) -> None:
        if (rank, step) != (self.rank, self.step):
            return

        def fail_once(*args: Any) -> None:
            vars(central_storage)["transfer_snapshot"] = transfer_snapshot
            transfer_snapshot(*args)
            self.proof.touch()
            raise RuntimeError("Connection closed by peer")

        vars(central_storage)["transfer_snapshot"] = fail_once


def test_a_checkpoint_is_committed_by_any_worker_that_has_its_copy(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """Rank 0 dies before it commits; the next rank 0 has no copy of that checkpoint, but another worker has one."""
    job = central_job(tmp_path / "run", data, checkpoint__keep_last=10)
    plain = worker_pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillSaving(str(tmp_path / "killed"), step=6)
    hooks = Hooks(after_step=LateFailure(1, 5, tmp_path / "failed"), before_commit=kill)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], [1, 2]], [], hooks)
    assert kill.num_fired == 1
    assert (tmp_path / "failed").exists()
    assert [o.trace for o in outcomes[1:]] == ["", ""]
    assert [(c.step, c.why) for c in CheckpointStore(job.paths).commits()] == [
        (step, "cadence") for step in (6, 12, 18)
    ]
    run = read_trained_run(job)
    assert run.digests == plain.digests
    assert [set(workers) for workers in run.workers[6:]] == [{2}] * 12, "a step before the checkpoint was repeated"


def measure_state(rank: int, store: Path, job: Job, size: int) -> dict[str, Any]:
    """Returns the state of a worker after two steps, in bytes, with digests of its evaluated model and its snapshot."""
    set_up_torch(job.config, CPU)
    world = World(rank, size, job.plan.logical_workers)
    state = build_state(job.config, job.task, CPU, job.total_steps)

    def start_run() -> None:
        state.step = 0

    with LocalMembership(world, store).generation(-1, False), state.backend.bind(world):
        state.backend.share(world, start_run)
        step = build_step(job, state, world, CPU, lambda phase: None)
        feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
        for i in range(2):
            step.run(Cursor.at(i, 9), feed.next(), 12, Flags(0))
        on_device = {p.data_ptr() for p in state.model.parameters()}
        on_host = {p.data_ptr() for p in state.master.parameters()}
        with state.eval_model() as model:
            state.backend.broadcast_parameters(averaged=True)
            evaluated_digest = params_digest(model.state_dict())
        state.backend.collect()
        moments = [v for values in state.optimizer.state.values() for v in values.values() if v.ndim]
        return {
            "evaluated": evaluated_digest,
            "snapshot": params_digest(state.backend.snapshot().model),
            "shared": len(on_device & on_host),
            "optimizer": sum(v.nbytes for v in moments),
            "parameters": sum(p.nbytes for p in state.model.parameters()),
        }


def test_only_one_worker_holds_the_optimizer_state_outside_its_device(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    first, *others = worker_pool.run(3, measure_state, central_job(tmp_path / "run", data, train__ema_decay=0.9), 3)
    assert first["optimizer"] == 2 * first["parameters"] > 0, "the holder does not have the two moments of Adam"
    assert [o["optimizer"] for o in others] == [0, 0]
    assert {o["shared"] for o in (first, *others)} == {0}, (
        "parameters on the device share memory with those of the optimizer"
    )
    assert len({digest for o in (first, *others) for digest in (o["evaluated"], o["snapshot"])}) == 1, (
        "the workers evaluate different parameters"
    )


class SometimesUsed(TinyImages):
    """A task with a parameter that gets a gradient only in some steps."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("sometimes", nn.Parameter(torch.ones(3)))
        return model

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().training_loss(model, batch)
        return losses + model.sometimes.sum() if int(batch["id"][0]) % 2 else losses


def test_a_parameter_without_a_gradient_is_not_updated_by_an_old_one(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """On one logical worker the parameter has no gradient and stays unchanged; on several its gradient is zero."""
    settings = dict(logical_workers=1, batch=12, task=SometimesUsed(), train__epochs=2)
    central = worker_pool.train_new_run(
        make_job(tmp_path / "run", data, train__strategy="central_storage", **settings), 1, cache_windows
    )
    plain = worker_pool.train_new_run(make_job(tmp_path / "plain", data, **settings), 1, cache_windows)
    assert central.digests == plain.digests


def test_only_the_rank_that_updates_parameters_page_locks_its_memory(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """The memory is page-locked once in the life of a worker, however often generations form."""
    job = central_job(tmp_path / "run", data)
    state, locked_sizes = build_state(job.config, job.task, CPU, job.total_steps), list[int]()
    assert isinstance(state.backend, CentralBackend)
    monkeypatch.setattr(
        central_storage,
        "page_locked_like",
        lambda tensors: [locked_sizes.append(t.numel()) or torch.empty_like(t) for t in tensors],
    )
    before = params_digest(state.master.state_dict())
    lock_pages(state.backend, CPU, True)
    lock_pages(state.backend, torch.device("cuda", 0), False)
    assert not locked_sizes, "memory was page-locked on a CPU, or on a rank without master parameters"
    for _ in range(2):
        lock_pages(state.backend, torch.device("cuda", 0), True)
    sizes = [p.numel() for p in state.master.parameters()]
    assert locked_sizes == [*sizes, *sizes], "not exactly parameters and gradients were page-locked"
    assert params_digest(state.master.state_dict()) == before
