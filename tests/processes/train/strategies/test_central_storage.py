"""Central storage: the bits of `ddp`, with one worker that holds the optimizer's state, also when that one is lost."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.errors import ConfigError, PeerLostError, PreemptedError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World
from ray_app.runlog.journal import read_events
from ray_app.task.base import Batch
from ray_app.task.device import set_up_torch
from ray_app.task.image import ImageClassification
from ray_app.testing import DieAfter, KilledError, WorkerPool, cache_windows, read_trained_run
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags
from ray_app.train.strategies import central_storage, partitioned
from ray_app.train.strategies.central_storage import CentralState
from tests.support.injector import KillSaving
from tests.support.local_world import CPU, LocalMembership, TinyImages, feed_of, make_job, write_images
from tests.support.shifting_world import KillOnce, train_shifting
from tests.support.waiting import until

ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.02}}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("central") / "data", [[50, 1], [46]])


def central_job(folder: Path, data: Path, **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "train__strategy": "central_storage",
        "train__epochs": 2,
        "schedule": ONE_CYCLE,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 6,
    }
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    return make_job(folder, data, logical_workers=4, batch=12, task=task, **(defaults | fields))


@pytest.mark.rest
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train__ema_decay": 0.9, "train__grad_clip_norm": 0.5, "train__precision": "fp16", "train__freeze": ["0.*"]},
    ],
)
def test_the_bits_are_those_of_ddp_for_every_number_of_workers_and_across_a_resume(
    pool: WorkerPool, data: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    job = central_job(tmp_path / "run", data, **fields)
    plain = pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows)
    for size in (1, 3):
        found = pool.train_new_run(job, size, cache_windows)
        assert found.digests == plain.digests
        assert found.steps == plain.steps
    pool.train(job, 3, Hooks(after_step=DieAfter(8)), cache_windows)
    assert read_trained_run(job).commit.step == 6
    pool.train_to_end(job, 2, cache_windows)
    assert read_trained_run(job).digests == plain.digests


@pytest.mark.parametrize(("lost", "goes_back"), [(0, True), (1, False)])
def test_a_lost_worker(pool: WorkerPool, data: Path, tmp_path: Path, lost: int, goes_back: bool) -> None:
    """Without the one that holds the optimizer's state the other goes back to its newest copy, otherwise nothing is
    done again.
    """
    job = central_job(tmp_path / "run", data)
    plain = pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=8, rank=lost)
    outcomes = train_shifting(pool, job, [[0, 1], [1 - lost]], [], Hooks(after_step=kill))
    assert kill.proof.exists()
    assert outcomes[1 - lost].trace == ""
    found = read_trained_run(job)
    assert found.digests == plain.digests
    assert found.steps == plain.steps
    assert [set(workers) for workers in found.workers[8:]] == [{1}] * 10
    assert all((1 in workers) == goes_back for workers in found.workers[6:8])
    assert all(2 in workers for workers in found.workers[:7]), "what is done again was not recorded the first time"
    assert not any(1 in workers for workers in found.workers[:6]), "the copy of the checkpoint was not used"


@pytest.mark.rest
def test_the_holder_has_to_leave_while_it_waits_for_a_lost_worker(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """Nobody is there to make a whole copy with, and nothing is done again."""
    job = central_job(tmp_path / "run", data)
    plain = pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=8, rank=1)
    left = train_shifting(pool, job, [[0, 1], [], []], [], Hooks(after_step=kill))[0]
    assert kill.proof.exists()
    assert isinstance(left.error, PreemptedError), left.trace
    assert [(c.step, c.why) for c in CheckpointStore(job.paths).commits()] == [(6, "cadence"), (8, "extra")]
    pool.train_to_end(job, 2, cache_windows)
    found = read_trained_run(job)
    assert found.digests == plain.digests
    assert [len(workers) for workers in found.workers] == [1] * 18


class LateFailure:
    """A hook that makes one rank's next whole copy fail after it went through on the others, as gloo does when a peer
    dies.

    Args:
        proof: A file that says that it did.
    """

    def __init__(self, rank: int, step: int, proof: Path) -> None:
        self.rank, self.step, self.proof = rank, step, proof

    def __call__(self, rank: int, step: int) -> None:
        if (rank, step) != (self.rank, self.step):
            return
        send = partitioned.transfer_snapshot

        def fails_once(*args: Any) -> None:
            partitioned.transfer_snapshot = send
            send(*args)
            self.proof.touch()
            raise RuntimeError("Connection closed by peer")

        partitioned.transfer_snapshot = fails_once


def test_a_checkpoint_that_only_some_have_copies_for_is_made_up(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """Rank 0 dies before it commits, and who becomes rank 0 has no copy of that checkpoint, but another worker does."""
    job = central_job(tmp_path / "run", data, checkpoint__keep_last=10)
    plain = pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillSaving(str(tmp_path / "killed"), step=6)
    hooks = Hooks(after_step=LateFailure(1, 5, tmp_path / "failed"), before_commit=kill)
    outcomes = train_shifting(pool, job, [[0, 1, 2], [1, 2]], [], hooks)
    assert kill.happened == 1
    assert (tmp_path / "failed").exists()
    assert [o.trace for o in outcomes[1:]] == ["", ""]
    assert [(c.step, c.why) for c in CheckpointStore(job.paths).commits()] == [
        (step, "cadence") for step in (6, 12, 18)
    ]
    found = read_trained_run(job)
    assert found.digests == plain.digests
    assert [set(workers) for workers in found.workers[6:]] == [{2}] * 12, "nothing before it is done again"


@dataclasses.dataclass(frozen=True)
class DieOnceCommitted:
    """A hook: rank 0 is killed after step 8, when the checkpoint of step 6 is there."""

    job: Job

    def __call__(self, rank: int, step: int) -> None:
        if (rank, step) == (0, 8):
            until(lambda: bool(CheckpointStore(self.job.paths).commits()), "no checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.rest
def test_a_restart_after_the_holder_was_killed(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """As with `failure.recovery: restart`: the others end, all start again from the checkpoint, here on fewer
    workers.
    """
    job = central_job(tmp_path / "run", data)
    plain = pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    outcomes = pool.train(job, 3, Hooks(after_step=DieOnceCommitted(job)), cache_windows)
    assert isinstance(outcomes[0].error, KilledError)
    assert [type(o.error) for o in outcomes[1:]] == [PeerLostError] * 2
    pool.train_to_end(job, 2, cache_windows)
    found = read_trained_run(job)
    assert found.digests == plain.digests
    assert found.steps == plain.steps
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [6]


def test_the_holder_leaves_as_planned_and_others_join(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = central_job(tmp_path / "run", data, checkpoint__every_steps=None)
    plain = pool.train_new_run(central_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    outcomes = train_shifting(pool, job, [[0, 1], [1], [1, 2, 3]], [4, 5])
    assert [o.trace for o in outcomes] == [""] * 4
    found = read_trained_run(job)
    assert [set(workers) for workers in found.workers] == [{2}] * 4 + [{1}] * 5 + [{3}] * 9, "no step is done again"
    assert found.digests == plain.digests
    assert found.steps == plain.steps


def held(rank: int, store: Path, job: Job, size: int) -> dict[str, Any]:
    """What a worker holds after two steps, in bytes, and the digests of the model that it would evaluate and of its
    snapshot.
    """
    set_up_torch(job.config, CPU)
    world = World(rank, size, job.plan.logical_workers)
    state = build_state(job.config, job.task, CPU, job.total_steps)

    def begin() -> None:
        state.step = 0

    with LocalMembership(world, store).generation(-1, False), state.bind(world):
        state.share(world, begin)
        step = build_step(job, state, world, CPU, lambda phase: None)
        feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
        for i in range(2):
            step.run(Cursor.at(i, 9), feed.next(), 12, Flags(0))
        on_device = {p.data_ptr() for p in state.model.parameters()}
        on_host = {p.data_ptr() for p in state.master.parameters()}
        with state.eval_model() as model:
            shown = params_digest(model.state_dict())
        moments = [v for values in state.optimizer.state.values() for v in values.values() if v.ndim]
        return {
            "shown": shown,
            "returned": params_digest(state.snapshot().model),
            "shared": len(on_device & on_host),
            "optimizer": sum(v.nbytes for v in moments),
            "parameters": sum(p.nbytes for p in state.model.parameters()),
        }


def test_only_one_worker_holds_the_optimizers_state_and_no_device(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    first, *others = pool.run(3, held, central_job(tmp_path / "run", data, train__ema_decay=0.9), 3)
    assert first["optimizer"] == 2 * first["parameters"] > 0, "Adam's two moments"
    assert [o["optimizer"] for o in others] == [0, 0]
    assert {o["shared"] for o in (first, *others)} == {0}, "what computes is no memory of the optimizer's"
    assert len({digest for o in (first, *others) for digest in (o["shown"], o["returned"])}) == 1, (
        "all evaluate the average"
    )


def test_offload_is_for_shards(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.cpu_offload is set, but only train.strategy: fsdp"):
        central_job(tmp_path / "run", data, train__cpu_offload=True)


class SometimesUsed(TinyImages):
    """A parameter of its model gets a gradient in some steps only."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("sometimes", nn.Parameter(torch.ones(3)))
        return model

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().training_loss(model, batch)
        return losses + model.sometimes.sum() if int(batch["id"][0]) % 2 else losses  # type: ignore[operator]


def test_a_parameter_without_a_gradient_does_not_move_by_the_one_before(
    pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """With one logical worker it has none, and is left alone; with more it has zeros."""
    make = dict(logical_workers=1, batch=12, task=SometimesUsed(), train__epochs=2)
    central = pool.train_new_run(
        make_job(tmp_path / "run", data, train__strategy="central_storage", **make), 1, cache_windows
    )
    plain = pool.train_new_run(make_job(tmp_path / "plain", data, **make), 1, cache_windows)
    assert central.digests == plain.digests


def test_only_the_memory_of_the_rank_that_moves_the_parameters_is_page_locked(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """Once in the life of a worker, however often generations form."""
    job = central_job(tmp_path / "run", data)
    state, pieces = build_state(job.config, job.task, CPU, job.total_steps), list[int]()
    assert isinstance(state, CentralState)
    monkeypatch.setattr(
        central_storage,
        "page_locked_like",
        lambda tensors: [pieces.append(t.numel()) or torch.empty_like(t) for t in tensors],
    )
    before = params_digest(state.master.state_dict())
    state._lock_pages()
    state._device, state._has_master = torch.device("cuda", 0), False
    state._lock_pages()
    assert not pieces, "neither on a CPU nor on a rank that computes alone"
    state._has_master = True
    for _ in range(2):
        state._lock_pages()
    numbers = [p.numel() for p in state.master.parameters()]
    assert pieces == [*numbers, *numbers], "parameters and gradients"
    assert params_digest(state.master.state_dict()) == before
