"""Sharded training with the deterministic reduction tree is bit-identical to `ddp` on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ray_app.drill.faults import HookChain
from ray_app.errors import ConfigError
from ray_app.task.base import Batch
from ray_app.testing import WorkerPool, cache_windows, read_trained_run, stream_windows
from ray_app.train.job import Hooks, Job
from tests.support.bit_identity import assert_bit_identical, train_and_resume, train_on_workers
from tests.support.local_world import CLASSES, TinyImages, make_job
from tests.support.sharded import ONE_CYCLE, SGD, Units, committed_before, fsdp_job
from tests.support.shifting_world import KillOnce, train_shifting

WITH_AVERAGE = {"schedule": ONE_CYCLE, "train__ema_decay": 0.9, "train__grad_clip_norm": 0.5, "train__freeze": ["0.*"]}


def optimizer(name: str, **args: Any) -> dict[str, Any]:
    return {"class_path": name if "." in name else f"torch.optim.{name}", "init_args": args}


def assert_bit_identical_to_ddp(
    pool: WorkerPool, folder: Path, data: Path, sizes: tuple[int, ...], task: Any = None, **fields: Any
) -> None:
    plain = pool.train_new_run(
        fsdp_job(folder / "plain", data, task, train__strategy="ddp", **fields), 2, cache_windows
    )
    train_on_workers(pool, fsdp_job(folder / "run", data, task, **fields), sizes, plain)


@pytest.mark.rest
@pytest.mark.parametrize("fields", [{}, WITH_AVERAGE])
def test_fsdp_is_bit_identical_to_ddp_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """No world size divides the shapes; in the last step of an epoch one logical worker has a row."""
    job = fsdp_job(tmp_path / "run", data, **fields)
    plain = worker_pool.train_new_run(
        fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows
    )
    train_and_resume(worker_pool, job, (1, 3, 4), ends=(3, 6), expected=plain)


@pytest.mark.rest
@pytest.mark.parametrize(
    "spec",
    [
        optimizer("AdamW", lr=0.001),
        optimizer("Adam", lr=0.001, amsgrad=True, weight_decay=0.01),
        optimizer("Adagrad", lr=0.01),
        optimizer("SGD", lr=0.05, momentum=0.9, foreach=True),
        optimizer("RMSprop", lr=0.001, momentum=0.9),
        optimizer("NAdam", lr=0.001),
        optimizer("ASGD", lr=0.01),
        optimizer("tests.processes.reduction.test_sharded_exact.MeanSign", lr=0.001),
        {**SGD, "groups": [{"norms_and_biases": True, "lr": 0.01}]},
    ],
)
def test_elementwise_optimizers_are_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, spec: dict[str, Any]
) -> None:
    assert_bit_identical_to_ddp(
        worker_pool, tmp_path, data, (3,), optimizer=spec, train__epochs=1, train__grad_clip_norm=0.5
    )


class MeanSign(Optimizer):
    """An optimizer of a user, with a state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(mean.sign(), alpha=-group["lr"])


class OddModel(nn.Module):
    """A model with tied weights, a padded embedding, a nested unit, a unit that runs two times, an unused parameter,
    and a parameter that only some rows use.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Sequential(nn.Linear(7, 6), nn.Tanh()))
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.head = nn.Linear(11, CLASSES)
        self.unused, self.sometimes = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(CLASSES))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x.flatten(1) * 10).abs().long().clamp(max=10)).mean(1)
        for _ in range(2):
            h = self.block(h) if self.reentrant is None else checkpoint(self.block, h, use_reentrant=self.reentrant)
        y = self.head(self.out(h))
        return y * self.sometimes if x.flatten()[0] > x.flatten()[-1] else y


class Odd(TinyImages):
    """Trains `OddModel`."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def build_model(self) -> nn.Module:
        return OddModel(self.reentrant)

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, OddModel)
        return [model.block, model.block[1]]

    def training_loss(self, model: nn.Module, batch: Batch) -> Any:
        return super().training_loss(model, batch) * (1 if self.reentrant is None else 2)


@pytest.mark.rest
def test_an_odd_model_is_bit_identical_to_ddp(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    assert_bit_identical_to_ddp(worker_pool, tmp_path, data, (1, 2, 3, 4), Odd(), train__epochs=1)


@pytest.mark.rest
def test_checkpointed_activations_are_bit_identical_to_ddp(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    assert_bit_identical_to_ddp(worker_pool, tmp_path, data, (1, 3), Odd(reentrant=False), train__epochs=1)


@pytest.mark.rest
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_arrive_in_parts_are_refused(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, size: int
) -> None:
    outcomes = worker_pool.train(fsdp_job(tmp_path / "run", data, Odd(reentrant=True)), size, Hooks(), cache_windows)
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigError), outcome.trace
        assert "came in several parts" in str(outcome.error)


@pytest.mark.parametrize("logical_workers", [1, 6])
@pytest.mark.rest
def test_other_numbers_of_logical_workers_are_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, logical_workers: int
) -> None:
    def job(strategy: str) -> Job:
        fields = {"train__strategy": strategy, "optimizer": SGD, "train__grad_clip_norm": 0.5}
        return make_job(tmp_path / strategy, data, logical_workers=logical_workers, batch=12, task=Units(), **fields)

    plain = worker_pool.train_new_run(job("ddp"), 1, cache_windows)
    for size in range(1, min(logical_workers, 4) + 1):
        assert_bit_identical(worker_pool.train_new_run(job("fsdp"), size, cache_windows), plain)


@pytest.mark.rest
def test_half_precision_is_bit_identical_on_any_number_of_workers(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """The runs differ from `ddp`, since its autocast rounds in other places."""
    job = fsdp_job(tmp_path / "run", data, train__precision="bf16", train__epochs=1, train__grad_clip_norm=0.5)
    train_on_workers(worker_pool, job, (1, 2, 3, 4))


@pytest.mark.rest
def test_a_compiled_model_is_bit_identical_on_any_number_of_workers(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """The run differs from `ddp`, since the compiler sees the model in other pieces."""
    job = fsdp_job(tmp_path / "run", data, train__compile=True, train__epochs=1)
    train_on_workers(worker_pool, job, (1, 3))


@pytest.mark.rest
def test_a_killed_worker_and_a_joining_worker_keep_the_run_bit_identical(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = fsdp_job(tmp_path / "run", data)
    plain = worker_pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=8, rank=1)
    hooks = Hooks(after_step=HookChain((committed_before(job, 8), kill)))
    train_shifting(worker_pool, job, [[0, 1, 2], [0, 2], [0, 2, 3]], [0, 4], hooks, stream_windows)
    assert kill.proof.exists()
    assert [sizes[-1] for sizes in read_trained_run(job).workers] == [3] * 6 + [2] * 4 + [3] * 8
    assert_bit_identical(read_trained_run(job), plain)
