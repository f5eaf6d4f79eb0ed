"""Models whose tensors are not as most are: the same bits after a resume, or a refusal, never other numbers."""

from __future__ import annotations

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


class Turned(TinyImages):
    """Has a weight that lies in memory as its transpose, or one that a fused optimizer cannot mistake."""

    def __init__(self, is_turned: bool = True) -> None:
        super().__init__()
        self.is_turned = is_turned

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.is_turned:
            model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())
        return model


class Forgetful(nn.Module):
    """Gives itself another tensor for a buffer, from its fourth pass on."""

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
        return Forgetful()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("memory") / "data", [[13, 14]])


@pytest.mark.rest
@pytest.mark.parametrize(
    "optimizer", [SGD, {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}], ids=["SGD", "Adam"]
)
def test_a_transposed_weight_is_trained_as_any_other_and_after_a_resume(
    pool: WorkerPool, data: Path, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    def run(name: str, is_turned: bool, dies: int | None = None) -> Any:
        fields: dict[str, Any] = {"optimizer": optimizer, "train__epochs": 2, "checkpoint__every_steps": 3}
        job = make_job(tmp_path / name, data, logical_workers=3, batch=12, task=Turned(is_turned), **fields)
        if dies is not None:
            assert [
                outcome.error for outcome in pool.train(job, 1, Hooks(after_step=DieAfter(dies)), cache_windows)
            ] != [None], "nobody died"
        pool.train_to_end(job, 1)
        return read_trained_run(job).digests

    plain = run("plain", False)
    assert run("turned", True) == plain
    assert run("resumed", True, 3) == plain


def test_a_model_that_replaces_a_buffer_in_mid_training_ends_the_run_with_words(
    pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "run", data, logical_workers=3, batch=12, task=LateRebinding())
    for workers in (1, 2):
        refused = [
            str(each.error)
            for each in pool.train(job, workers, Hooks(), cache_windows)
            if isinstance(each.error, ConfigError)
        ]
        assert refused, "those who lose a peer by it may say so, who finds it says what it is"
        assert all("another tensor for mean" in said for said in refused)


def test_the_state_of_an_optimizer_keeps_its_dtype(data: Path, tmp_path: Path) -> None:
    nadam = {"class_path": "torch.optim.NAdam", "init_args": {"lr": 0.01}}
    job = make_job(tmp_path / "run", data, logical_workers=1, batch=9, task=TinyImages(), optimizer=nadam)

    def after(steps: int, state: TrainingState | None = None) -> TrainingState:
        if state is None:
            state = TrainingState(job.config, job.task, CPU, 6)
            state.initialize(None)
            state.model.to(torch.bfloat16)
        for _ in range(steps):
            for i, p in enumerate(state.model.parameters()):
                p.grad = torch.full_like(p, 0.1 * (i + state.step + 1))
            state.optimizer_step()
        return state

    undisturbed, half = after(6), after(3).snapshot()
    going_on = after(0)
    going_on.load(half)
    resumed = after(3, going_on)
    for one, other in zip(undisturbed.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert one["mu_product"].dtype == other["mu_product"].dtype == torch.float32
        assert one["mu_product"].equal(other["mu_product"])
    assert all(p.equal(q) for p, q in zip(undisturbed.model.parameters(), resumed.model.parameters(), strict=True))
