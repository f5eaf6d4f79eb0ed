"""Models with unusual tensors are bit-identical after a resume, or are refused; they never train to other values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.testing import DieAfter, WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks
from ray_app.train.state.state import TrainingState
from tests.support.local_world import CLASSES, CPU, TinyImages, make_job, write_images

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}


class TransposedWeight(TinyImages):
    """A task with a weight that is a transposed view, or, for comparison, contiguous."""

    def __init__(self, is_transposed: bool = True) -> None:
        super().__init__()
        self.is_transposed = is_transposed

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.is_transposed:
            model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())
        return model


class ReplacesBuffer(nn.Module):
    """A model that assigns a new tensor to a buffer, from its fourth pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.last = 0, nn.Linear(64, CLASSES)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        flat = images.flatten(1)
        if self.passes > 3:
            self.mean = 0.9 * self.mean + 0.1 * flat.detach().mean(0)
        return self.last(flat - self.mean)


class LateRebinding(TinyImages):
    def build_model(self) -> nn.Module:
        return ReplacesBuffer()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("memory") / "data", [[13, 14]])


@pytest.mark.rest
@pytest.mark.parametrize(
    "optimizer", [SGD, {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}], ids=["SGD", "Adam"]
)
def test_a_transposed_weight_is_bit_identical_to_a_contiguous_one(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    def run(name: str, is_transposed: bool, dies_after: int | None = None) -> Any:
        fields: dict[str, Any] = {"optimizer": optimizer, "train__epochs": 2, "checkpoint__every_steps": 3}
        job = make_job(
            tmp_path / name, data, logical_workers=3, batch=12, task=TransposedWeight(is_transposed), **fields
        )
        if dies_after is not None:
            assert [
                outcome.error
                for outcome in worker_pool.train(job, 1, Hooks(after_step=DieAfter(dies_after)), cache_windows)
            ] != [None], "the worker did not die"
        worker_pool.train_to_end(job, 1)
        return read_trained_run(job).digests

    plain = run("plain", False)
    assert run("turned", True) == plain
    assert run("resumed", True, 3) == plain


@pytest.mark.rest
def test_a_model_that_replaces_a_buffer_in_training_is_refused(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "run", data, logical_workers=3, batch=12, task=LateRebinding())
    for workers in (1, 2):
        messages = [
            str(outcome.error)
            for outcome in worker_pool.train(job, workers, Hooks(), cache_windows)
            if isinstance(outcome.error, ConfigError)
        ]
        assert messages, "no rank refuses the buffer; ranks that only lose a peer may report that"
        assert all("another tensor for mean" in message for message in messages)


def test_the_state_of_an_optimizer_keeps_its_dtype(data: Path, tmp_path: Path) -> None:
    nadam = {"class_path": "torch.optim.NAdam", "init_args": {"lr": 0.01}}
    job = make_job(tmp_path / "run", data, logical_workers=1, batch=9, task=TinyImages(), optimizer=nadam)

    def advance(steps: int, state: TrainingState | None = None) -> TrainingState:
        if state is None:
            state = TrainingState(job.config, job.task, CPU, 6)
            state.initialize(None)
            state.model.to(torch.bfloat16)
        for _ in range(steps):
            for i, p in enumerate(state.model.parameters()):
                p.grad = torch.full_like(p, 0.1 * (i + state.step + 1))
            state.optimizer_step()
        return state

    undisturbed, half = advance(6), advance(3).snapshot()
    restored = advance(0)
    restored.load(half)
    resumed = advance(3, restored)
    for one, other in zip(undisturbed.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert one["mu_product"].dtype == other["mu_product"].dtype == torch.float32
        assert one["mu_product"].equal(other["mu_product"])
    assert all(p.equal(q) for p, q in zip(undisturbed.model.parameters(), resumed.model.parameters(), strict=True))
