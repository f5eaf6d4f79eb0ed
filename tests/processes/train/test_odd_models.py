"""Unusual models, losses and optimizers of users are bit-identical on any number of workers and with all strategies."""

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
from ray_app.reduction.world import World
from ray_app.task.base import Batch
from ray_app.testing import TrainedRun, WorkerPool, cache_windows
from ray_app.train.build import build_state
from ray_app.train.job import Hooks, Job
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import CLASSES, TinyImages, make_job

ADAM = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}}


def make_layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), *more, nn.Linear(12, CLASSES))


def flat_pixels(batch: Batch) -> Tensor:
    return batch["image"].float().div(255).flatten(1)


class DenseImages(TinyImages):
    def build_model(self) -> nn.Module:
        return make_layers()


class Adversarial(DenseImages):
    """Calls `backward` for the gradient of its rows, as tutorials do, which leaves gradients of the parameters, too."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x = flat_pixels(batch).requires_grad_(True)
        functional.cross_entropy(model(x), batch["label"]).backward()
        assert x.grad is not None
        moved = (x + 0.1 * x.grad.sign()).detach()
        return functional.cross_entropy(model(moved), batch["label"], reduction="none")


class ClearingGradients(Adversarial):
    """Calls `backward` in its loss and then clears all gradients."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().training_loss(model, batch)
        model.zero_grad()
        return losses


class LeavesEvalMode(TinyImages):
    """Leaves the model in evaluation mode."""

    def build_model(self) -> nn.Module:
        return make_layers(nn.BatchNorm1d(12), nn.Dropout(0.3))

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = functional.cross_entropy(model(flat_pixels(batch)), batch["label"], reduction="none")
        model.eval()
        return losses + (model(flat_pixels(batch)) - model(flat_pixels(batch) + 0.01)).square().sum(1)


class LeavesPartInEvalMode(LeavesEvalMode):
    """Leaves a part of the model in evaluation mode."""

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        losses = functional.cross_entropy(model(flat_pixels(batch)), batch["label"], reduction="none")
        model[3].eval()
        return losses + (model(flat_pixels(batch)) - model(flat_pixels(batch) + 0.01)).square().sum(1)


class Experts(nn.Module):
    """A mixture of four layers; the rows decide which one is used."""

    def __init__(self, by_row: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.head = nn.Linear(12, CLASSES)
        self.by_row = by_row
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x.flatten(1)))
        chosen = (h.detach().sum(1) * 1000).long() % 4
        if not self.by_row:
            return self.head(self.experts[int(chosen[0])](h))
        outputs = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                outputs[chosen == number] = expert(h[chosen == number])
        return self.head(outputs)


class Routed(TinyImages):
    by_row = False

    def build_model(self) -> nn.Module:
        return Experts(self.by_row)


class RoutedByRow(Routed):
    by_row = True


class Block(nn.Module):
    """A block of four layers; the rows decide which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, h: Tensor) -> Tensor:
        return self.experts[int((h.detach().sum() * 1000).long() % 4)](h)


class Checkpointed(nn.Module):
    """Computes its block again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.block = Block()
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x.flatten(1)))
        return self.head(checkpoint(self.block, h, use_reentrant=False))


class CheckpointedRouting(TinyImages):
    def build_model(self) -> nn.Module:
        return Checkpointed()

    def shard_units(self, model: Any) -> list[nn.Module]:
        return [model.block]


class Tied(nn.Module):
    """A model with a head tied to its embedding; the shared weight is large enough for its own shard unit."""

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


class AveragedHead(nn.Module):
    """A model that also predicts with an average of its weights, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.online = make_layers(nn.BatchNorm1d(12))
        last = self.online[-1]
        assert isinstance(last, nn.Linear)
        self.register_buffer("average", last.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.average, Tensor)
        return self.online(x) + 0.5 * functional.linear(torch.relu(self.online[1](x.flatten(1))), self.average)


class Averaging(TinyImages):
    def build_model(self) -> nn.Module:
        return AveragedHead()

    def apply_gradients(self, model: Any, optimizer: Optimizer) -> None:
        optimizer.step()
        weight = model.online[-1].weight
        with torch.no_grad():
            model.average.mul_(0.9).add_(weight.full_tensor() if hasattr(weight, "full_tensor") else weight, alpha=0.1)


class Uncopyable(TinyImages):
    """A task with a model that cannot be copied."""

    def build_model(self) -> nn.Module:
        model = make_layers()
        model.lock = threading.Lock()
        return model


class ChannelsLast(TinyImages):
    """A model in channels-last layout; PyTorch reports a tensor with a size of 1 as contiguous in both layouts."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, CLASSES))
        return model.to(memory_format=torch.channels_last)


class Unfreezing(TinyImages):
    """Trains its first layer from the fifth step on."""

    def build_model(self) -> nn.Module:
        model = make_layers()
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return model

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        model.steps += 1
        model[1].requires_grad_(bool(model.steps > 4))
        return functional.cross_entropy(model(flat_pixels(batch)), batch["label"], reduction="none")

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        del model
        return []


class IntegerParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers()
        self.base = nn.Parameter(torch.ones(CLASSES, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.base


class Quantized(TinyImages):
    def build_model(self) -> nn.Module:
        return IntegerParameter()


def job_of(folder: Path, data: Path, task: TinyImages, **fields: Any) -> Job:
    return make_job(folder, data, task=task, every=4, **({"optimizer": ADAM, "train__max_steps": 6} | fields))


def train_new_run(
    pool: WorkerPool, folder: Path, data: Path, task: TinyImages, workers: int, **fields: Any
) -> TrainedRun:
    return pool.train_new_run(job_of(folder, data, task, **fields), workers, cache_windows)


FSDP = {"train__strategy": "fsdp"}
OVERLAPPED = FSDP | {"train__reduction": "overlapped"}
CENTRAL = {"train__strategy": "central_storage"}
LOCAL = {"train__strategy": "local_sgd", "train__local_steps": 3}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("task", "fields", "variants"),
    [
        (Adversarial(), {}, [(3, {})]),
        (ClearingGradients(), {}, [(3, {})]),
        (LeavesEvalMode(), {}, [(3, {}), (2, FSDP)]),
        (LeavesPartInEvalMode(), {}, [(3, {})]),
        (LeavesPartInEvalMode(), LOCAL | {"checkpoint__every_steps": 3}, [(3, {})]),
        (Routed(), {"optimizer": SGD}, [(3, {}), (3, FSDP)]),
        (RoutedByRow(), {"optimizer": SGD}, [(3, FSDP)]),
        (CheckpointedRouting(), {"optimizer": SGD}, [(1, FSDP), (3, FSDP)]),
        (TiedWords(), {}, [(1, FSDP), (3, FSDP)]),
        (Averaging(), {}, [(2, {}), (1, CENTRAL), (3, CENTRAL), (2, CENTRAL | {"train__peer_replica": True})]),
        (Uncopyable(), {}, [(2, CENTRAL)]),
        (ChannelsLast(), {}, [(2, FSDP)]),
        (Quantized(), {"train__ema_decay": 0.9}, [(2, {})]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TinyImages) else "",
)
def test_an_unusual_model_is_bit_identical_to_one_worker(
    worker_pool: WorkerPool,
    data: Path,
    tmp_path: Path,
    task: TinyImages,
    fields: dict[str, Any],
    variants: list[tuple[int, dict[str, Any]]],
) -> None:
    alone = train_new_run(worker_pool, tmp_path / "one", data, task, 1, **fields)
    for number, (workers, variant) in enumerate(variants):
        run = train_new_run(worker_pool, tmp_path / f"{number}", data, task, workers, **(fields | variant))
        assert (run.digests, [loss for _, loss, *_ in run.steps]) == (
            alone.digests,
            [loss for _, loss, *_ in alone.steps],
        ), variant


@pytest.mark.parametrize("resize_at", [0, 2])
def test_buffers_of_an_update_and_of_a_forward_survive_a_resize(data: Path, tmp_path: Path, resize_at: int) -> None:
    """A generation ends as planned between an update and the next step."""
    job = job_of(tmp_path / "run", data, Averaging(), **CENTRAL)
    state = build_state(job.config, job.task, torch.device("cpu"), job.total_steps)
    backend, world = state.backend, World(0, 1, 1)
    backend.share(world, lambda: state.initialize(None))
    plain = job.task.build_model()
    plain.load_state_dict(state.master.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    for step in range(4):
        if resize_at and step == resize_at:
            backend.collect()
            backend.share(world, lambda: None)
        backend.broadcast_parameters()
        torch.manual_seed(step)
        images = torch.rand(6, 1, 8, 8)
        for model in (state.model, plain):
            for p in model.parameters():
                p.grad = None
            model(images).square().mean().backward()
        state.optimizer_step()
        job.task.apply_gradients(plain, optimizer)
    backend.collect()
    trained = state.snapshot().model
    assert all(trained[name].equal(value) for name, value in plain.state_dict().items())


@pytest.mark.rest
@pytest.mark.parametrize("task", [Routed(), RoutedByRow(), CheckpointedRouting()], ids=lambda task: type(task).__name__)
def test_overlapped_shards_count_a_missing_gradient_as_zeros(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, task: TinyImages
) -> None:
    alone = train_new_run(worker_pool, tmp_path / "one", data, task, 1, optimizer=SGD)
    for workers in (1, 2, 3):
        run = train_new_run(worker_pool, tmp_path / f"{workers}", data, task, workers, optimizer=SGD, **OVERLAPPED)
        assert [loss for _, loss, *_ in run.steps] == pytest.approx([loss for _, loss, *_ in alone.steps], abs=1e-5)


def test_a_value_that_an_optimizer_computes_is_the_same_in_all_replicas(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    optimizer = {"optimizer": {"class_path": "tests.support.odd_optimizers.AdaptiveStepSize"}}
    fields = {**LOCAL, **optimizer, "checkpoint__every_steps": 3}
    runs = [
        train_new_run(worker_pool, tmp_path / f"{workers}", data, DenseImages(), workers, **fields)
        for workers in (1, 3)
    ]
    assert runs[0].digests == runs[1].digests
    assert runs[0].snapshot.optimizer["param_groups"] == runs[1].snapshot.optimizer["param_groups"]
    assert runs[0].snapshot.optimizer["param_groups"][0]["size"] != 0.1


@pytest.mark.rest
def test_a_learning_rate_of_a_numpy_type_survives_a_resume(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    schedule = {
        "class_path": "torch.optim.lr_scheduler.LambdaLR",
        "init_args": {"lr_lambda": "tests.support.odd_optimizers.cosine"},
    }
    train_and_resume(worker_pool, job_of(tmp_path / "run", data, DenseImages(), schedule=schedule), (1,), (3, 5))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (ClearingGradients(), OVERLAPPED, "changes the gradients of the parameters"),
        (Unfreezing(), FSDP, "changes requires_grad of a parameter"),
    ],
    ids=["gradients", "requires_grad"],
)
def test_a_model_that_fsdp_cannot_shard_is_refused_in_training(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, task: TinyImages, fields: dict[str, Any], message: str
) -> None:
    for workers in (1, 3):
        job = job_of(tmp_path / f"{workers}", data, task, **fields)
        errors = [outcome.error for outcome in worker_pool.train(job, workers, Hooks(), cache_windows)]
        assert any(isinstance(error, ConfigError) and message in str(error) for error in errors), errors
