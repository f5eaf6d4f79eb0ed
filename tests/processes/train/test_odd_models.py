"""Models, losses and optimizers as users write them: the same bits for every number of workers, and those of `ddp` with
every strategy.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ray_app.errors import ConfigError
from ray_app.task.base import Batch
from ray_app.testing import DieAfter, KilledError, TrainedRun, WorkerPool, cache_windows
from ray_app.train.job import Hooks, Job
from ray_app.train.strategies.central_storage import CentralState
from tests.support.local_world import CLASSES, TinyImages, make_job, write_images

ADAM = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}}


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), *more, nn.Linear(12, CLASSES))


def pixels(batch: Batch) -> Tensor:
    return batch["image"].float().div(255).flatten(1)


class Plain(TinyImages):
    def build_model(self) -> nn.Module:
        return layers()


class Adversarial(Plain):
    """Takes the gradient of its rows by `backward`, as tutorials do, which leaves those of the parameters, too."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x = pixels(batch).requires_grad_(True)
        functional.cross_entropy(model(x), batch["label"]).backward()
        assert x.grad is not None
        moved = (x + 0.1 * x.grad.sign()).detach()
        return functional.cross_entropy(model(moved), batch["label"], reduction="none")


class Cleaning(Adversarial):
    """Likewise, and puts all gradients away."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().training_loss(model, batch)
        model.zero_grad()
        return losses


class Forgetful(TinyImages):
    """Leaves the model in evaluation mode."""

    def build_model(self) -> nn.Module:
        return layers(nn.BatchNorm1d(12), nn.Dropout(0.3))

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = functional.cross_entropy(model(pixels(batch)), batch["label"], reduction="none")
        model.eval()
        return losses + (model(pixels(batch)) - model(pixels(batch) + 0.01)).square().sum(1)


class HalfForgetful(Forgetful):
    """Leaves a part of it so."""

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        losses = functional.cross_entropy(model(pixels(batch)), batch["label"], reduction="none")
        model[3].eval()
        return losses + (model(pixels(batch)) - model(pixels(batch) + 0.01)).square().sum(1)


class Experts(nn.Module):
    """Of four layers the rows decide which one is used."""

    def __init__(self, by_row: bool) -> None:
        super().__init__()
        self.first, self.head, self.by_row = nn.Linear(64, 12), nn.Linear(12, CLASSES), by_row
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x.flatten(1)))
        chosen = (h.detach().sum(1) * 1000).long() % 4
        if not self.by_row:
            return self.head(self.experts[int(chosen[0])](h))
        found = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                found[chosen == number] = expert(h[chosen == number])
        return self.head(found)


class Routed(TinyImages):
    by_row = False

    def build_model(self) -> nn.Module:
        return Experts(self.by_row)


class RoutedByRow(Routed):
    by_row = True


class Block(nn.Module):
    """Four layers, of which the rows decide which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, h: Tensor) -> Tensor:
        return self.experts[int((h.detach().sum() * 1000).long() % 4)](h)


class Checkpointed(nn.Module):
    """Computes its block again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(64, 12), Block(), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x.flatten(1)))
        return self.head(checkpoint(self.block, h, use_reentrant=False))


class RoutedAgain(TinyImages):
    def build_model(self) -> nn.Module:
        return Checkpointed()

    def shard_units(self, model: Any) -> list[nn.Module]:
        return [model.block]


class Tied(nn.Module):
    """Its head has the embedding's weights, which are enough for a unit of shards of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(2000, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 2000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words((x.flatten(1) * 20 + 25).long().clamp(0, 49)).mean(1)
        return self.head(h + torch.relu(self.block(h)))[:, :CLASSES]


class TiedWords(TinyImages):
    def build_model(self) -> nn.Module:
        return Tied()


class Target(nn.Module):
    """Predicts with an average of its weights, too, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.online = layers(nn.BatchNorm1d(12))
        last = self.online[-1]
        assert isinstance(last, nn.Linear)
        self.register_buffer("average", last.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.average, Tensor)
        return self.online(x) + 0.5 * functional.linear(torch.relu(self.online[1](x.flatten(1))), self.average)


class Averaging(TinyImages):
    def build_model(self) -> nn.Module:
        return Target()

    def apply_gradients(self, model: Any, optimizer: Optimizer) -> None:
        optimizer.step()
        weight = model.online[-1].weight
        with torch.no_grad():
            model.average.mul_(0.9).add_(weight.full_tensor() if hasattr(weight, "full_tensor") else weight, alpha=0.1)


class Uncopied(TinyImages):
    """Cannot be copied."""

    def build_model(self) -> nn.Module:
        model = layers()
        model.lock = threading.Lock()  # type: ignore[assignment]
        return model


class ChannelsLast(TinyImages):
    """Of a size of 1 PyTorch says that it is contiguous either way."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, CLASSES))
        return model.to(memory_format=torch.channels_last)


class Unfreezing(TinyImages):
    """Trains its first layer from the fifth step on."""

    def build_model(self) -> nn.Module:
        model = layers()
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return model

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        model.steps += 1
        model[1].requires_grad_(bool(model.steps > 4))
        return functional.cross_entropy(model(pixels(batch)), batch["label"], reduction="none")

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        del model
        return []


class WholeNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.base = nn.Parameter(torch.ones(CLASSES, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.base


class Quantized(TinyImages):
    def build_model(self) -> nn.Module:
        return WholeNumbers()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("odd") / "data", [[50, 1], [46]])


def job_of(folder: Path, data: Path, task: TinyImages, **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "optimizer": ADAM,
        "train__max_steps": 6,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 4,
    }
    return make_job(folder, data, logical_workers=4, batch=12, task=task, **(defaults | fields))


def trained(pool: WorkerPool, folder: Path, data: Path, task: TinyImages, workers: int, **fields: Any) -> TrainedRun:
    return pool.train_new_run(job_of(folder, data, task, **fields), workers, cache_windows)


FSDP = {"train__strategy": "fsdp"}
OVERLAPPED = FSDP | {"train__reduction": "overlapped"}
CENTRAL = {"train__strategy": "central_storage"}
LOCAL = {"train__strategy": "local_sgd", "train__local_steps": 3}


@pytest.mark.parametrize(
    ("task", "fields", "sides"),
    [
        (Adversarial(), {}, [(3, {})]),
        (Cleaning(), {}, [(3, {})]),
        (Forgetful(), {}, [(3, {}), (2, FSDP)]),
        (HalfForgetful(), {}, [(3, {})]),
        (HalfForgetful(), LOCAL | {"checkpoint__every_steps": 3}, [(3, {})]),
        (Routed(), {"optimizer": SGD}, [(3, {}), (3, FSDP)]),
        (RoutedByRow(), {"optimizer": SGD}, [(3, FSDP)]),
        (RoutedAgain(), {"optimizer": SGD}, [(1, FSDP), (3, FSDP)]),
        (TiedWords(), {}, [(1, FSDP), (3, FSDP)]),
        (Averaging(), {}, [(2, {}), (1, CENTRAL), (3, CENTRAL), (2, CENTRAL | {"train__peer_replica": True})]),
        (Uncopied(), {}, [(2, CENTRAL)]),
        (ChannelsLast(), {}, [(2, FSDP)]),
        (Quantized(), {"train__ema_decay": 0.9}, [(2, {})]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TinyImages) else "",
)
def test_the_bits_are_those_of_one_worker(
    pool: WorkerPool,
    data: Path,
    tmp_path: Path,
    task: TinyImages,
    fields: dict[str, Any],
    sides: list[tuple[int, dict[str, Any]]],
) -> None:
    alone = trained(pool, tmp_path / "one", data, task, 1, **fields)
    for number, (workers, side) in enumerate(sides):
        found = trained(pool, tmp_path / f"{number}", data, task, workers, **(fields | side))
        assert (found.digests, [loss for _, loss, *_ in found.steps]) == (
            alone.digests,
            [loss for _, loss, *_ in alone.steps],
        ), side


@pytest.mark.parametrize("again", [0, 2])
def test_buffers_of_an_update_and_of_a_forward_outlast_a_change_of_workers(
    data: Path, tmp_path: Path, again: int
) -> None:
    """A generation that ends as planned lies between an update and the next step."""
    job = job_of(tmp_path / "run", data, Averaging(), **CENTRAL)
    state = CentralState(job.config, job.task, torch.device("cpu"), job.total_steps)
    state.initialize(None)
    state._load_part(state._local_copy())
    plain = job.task.build_model()
    plain.load_state_dict(state.master.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    for step in range(4):
        if again and step == again:
            state._whole = None
            state._load_part(state.snapshot())
        state.refresh()
        torch.manual_seed(step)
        images = torch.rand(6, 1, 8, 8)
        for model in (state.model, plain):
            for p in model.parameters():
                p.grad = None
            model(images).square().mean().backward()
        state.optimizer_step()
        job.task.apply_gradients(plain, optimizer)
    state._whole = None
    found = state.snapshot().model
    assert all(found[name].equal(value) for name, value in plain.state_dict().items())


@pytest.mark.rest
@pytest.mark.parametrize("task", [Routed(), RoutedByRow(), RoutedAgain()], ids=lambda task: type(task).__name__)
def test_overlapped_shards_count_a_missing_gradient_as_zeros(
    pool: WorkerPool, data: Path, tmp_path: Path, task: TinyImages
) -> None:
    alone = trained(pool, tmp_path / "one", data, task, 1, optimizer=SGD)
    for workers in (1, 2, 3):
        found = trained(pool, tmp_path / f"{workers}", data, task, workers, optimizer=SGD, **OVERLAPPED)
        assert [loss for _, loss, *_ in found.steps] == pytest.approx([loss for _, loss, *_ in alone.steps], abs=1e-5)


def test_what_an_optimizer_finds_is_the_same_for_all_replicas(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    finding = {"optimizer": {"class_path": "tests.support.odd_optimizers.Finding"}}
    fields = {**LOCAL, **finding, "checkpoint__every_steps": 3}
    runs = [trained(pool, tmp_path / f"{workers}", data, Plain(), workers, **fields) for workers in (1, 3)]
    assert runs[0].digests == runs[1].digests
    assert runs[0].snapshot.optimizer["param_groups"] == runs[1].snapshot.optimizer["param_groups"]
    assert runs[0].snapshot.optimizer["param_groups"][0]["size"] != 0.1


def test_a_learning_rate_of_numpys_is_kept_and_read(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    schedule = {
        "class_path": "torch.optim.lr_scheduler.LambdaLR",
        "init_args": {"lr_lambda": "tests.support.odd_optimizers.cosine"},
    }
    undisturbed = trained(pool, tmp_path / "undisturbed", data, Plain(), 1, schedule=schedule)
    job = job_of(tmp_path / "run", data, Plain(), schedule=schedule)
    assert {type(outcome.error) for outcome in pool.train(job, 3, Hooks(after_step=DieAfter(5)), cache_windows)} == {
        KilledError
    }
    resumed = pool.train_new_run(job, 2, cache_windows)
    assert (resumed.digests, resumed.steps) == (undisturbed.digests, undisturbed.steps)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("task", "fields", "said"),
    [
        (Cleaning(), OVERLAPPED, "changes the gradients of the parameters"),
        (Unfreezing(), FSDP, "changes requires_grad of a parameter"),
    ],
    ids=["gradients", "requires_grad"],
)
def test_what_shards_cannot_do_is_refused_when_it_happens(
    pool: WorkerPool, data: Path, tmp_path: Path, task: TinyImages, fields: dict[str, Any], said: str
) -> None:
    for workers in (1, 3):
        job = job_of(tmp_path / f"{workers}", data, task, **fields)
        errors = [outcome.error for outcome in pool.train(job, workers, Hooks(), cache_windows)]
        assert any(isinstance(error, ConfigError) and said in str(error) for error in errors), errors
