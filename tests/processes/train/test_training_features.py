"""The options of `train.*` and of the image task are bit-identical on any number of workers and after a resume."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import beta, kstest
from torch import Tensor, nn

from ray_app.checkpoint.format import params_digest
from ray_app.driver.single import train_in_process
from ray_app.errors import ConfigError, NonFiniteError
from ray_app.plan.order import Cursor
from ray_app.reduction.world import World
from ray_app.task.base import Batch
from ray_app.task.classification import draw_beta, mix_images, smooth_targets
from ray_app.task.environment import set_up_torch
from ray_app.task.image import ImageClassification, small_cnn
from ray_app.task.precision import FIRST_SCALE, LossScale
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.build import build_step
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags, SingleProcessMembership
from ray_app.train.state.parameters import freeze_parameters
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import Passes
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import (
    CLASSES,
    CPU,
    CustomTrainingStep,
    LocalMembership,
    TinyImages,
    feed_of,
    make_job,
)

ROWS = [[50, 1], [46]]


class SteepLoss(ImageClassification):
    """A task with gradients too large for float16 until the loss scale has been halved several times."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss(outputs, batch) * 2000


CNN = {"model_args": {"channels": 4, "dropout": 0.3}}
WARM_UP = {
    "class_path": "torch.optim.lr_scheduler.SequentialLR",
    "init_args": {
        "schedulers": [
            {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"start_factor": 0.1, "total_iters": 8}},
            {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 10}},
        ],
        "milestones": [8],
    },
}
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bf16": ({"train__precision": "bf16"}, {}),
    "fp16": ({"train__precision": "fp16"}, {}),
    "average": ({"train__ema_decay": 0.9}, {}),
    "frozen": ({"train__freeze": ["0.*", "1.*"]}, {}),
    "channels last": ({"train__channels_last": True}, {}),
    "clipped": ({"train__grad_clip_norm": 0.5}, {}),
    "steps per epoch": ({"train__steps_per_epoch": 5, "train__epochs": 4, "checkpoint__every_epochs": 1}, {}),
    "smoothed": ({}, {"label_smoothing": 0.1}),
    "mixup": ({}, {"mixup": 0.4}),
    "cutmix": ({}, {"cutmix": 1.0}),
    "both": ({"train__ema_decay": 0.9}, {"mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1}),
    "own step": ({}, {"task": CustomTrainingStep}),
    "overflow": ({"train__precision": "fp16"}, {"task": SteepLoss}),
    "warm-up": ({"schedule": WARM_UP}, {}),
}


def job_of(name: str, folder: Path, data: Path) -> Job:
    fields, args = FEATURES[name]
    args = dict(args)
    task = args.pop("task", ImageClassification)(**CNN, **args)
    return make_job(folder, data, task=task, every=4, **fields)


@pytest.fixture(scope="module")
def plain_digest(worker_pool: WorkerPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    job = job_of("plain", tmp_path_factory.mktemp("plain") / "run", data)
    return worker_pool.train_new_run(job, 2, cache_windows).commit.params_digest


QUICK_FEATURES = ("own step",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_FEATURES else pytest.mark.rest) for name in FEATURES]
)
def test_a_feature_is_bit_identical_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, name: str, plain_digest: str
) -> None:
    job = job_of(name, tmp_path / "run", data)
    alone = train_and_resume(worker_pool, job)
    assert len(alone.steps) == job.total_steps
    # A norm that overflowed is recorded as null, since JSON has no infinity.
    overflowed = [step[3] for step in alone.steps].count(None)
    assert (overflowed > 4) == (name == "overflow"), (
        "the scale does not overflow beyond the checkpoint of the resume, or it does without reason"
    )
    if name not in ("plain", "channels last"):
        assert alone.commit.params_digest != plain_digest, "the feature has no effect"


# --- half precision


def state_of(job: Job) -> TrainingState:
    set_up_torch(job.config, CPU)
    state = TrainingState(job.config, job.task, CPU, job.total_steps)
    state.step = 0
    return state


def run_steps(job: Job, state: TrainingState, store: Path, steps: int) -> list[float]:
    """Runs some steps on one worker; returns their gradient norms."""
    with LocalMembership(World(0, 1, job.plan.logical_workers), store).generation(0, False) as (world, _):
        step = build_step(job, state, world, CPU)
        feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
        rows = job.plan.rows_of_step
        return [
            step.run(Cursor.at(i, job.plan.steps_per_epoch), feed.next(), sum(rows(i)), Flags(0)).grad_norm
            for i in range(steps)
        ]


def test_an_overflow_halves_the_scale_and_changes_nothing_else(data: Path, tmp_path: Path) -> None:
    job = job_of("fp16", tmp_path / "run", data)
    state = state_of(job)
    assert state.scale is not None
    before = params_digest(state.model.state_dict())
    state.scale.value = 2.0**40
    [norm] = run_steps(job, state, tmp_path / "store", 1)
    assert not math.isfinite(norm)
    assert state.scale.value == 2.0**39
    assert params_digest(state.model.state_dict()) == before, "parameters or batch-norm statistics changed"
    assert state.step == 1
    state.step = 0
    state.scale.value = 1024.0
    [norm] = run_steps(job, state, tmp_path / "store", 1)
    assert math.isfinite(norm)
    assert params_digest(state.model.state_dict()) != before
    assert state.scale.value == 1024.0


def test_the_scale_doubles_after_2000_finite_steps_and_survives_a_resume() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale.update(True)
    loaded = LossScale()
    loaded.load(scale.state())
    assert scale.value == loaded.value == FIRST_SCALE
    loaded.update(True)
    assert loaded.value == 2 * FIRST_SCALE
    loaded.update(False)
    assert loaded.value == FIRST_SCALE
    assert FIRST_SCALE == 2.0**16


def test_a_loss_that_is_not_finite_is_not_taken_for_an_overflow(data: Path, tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "run",
        data,
        logical_workers=4,
        batch=12,
        task=TinyImages(bad_rows=tuple(range(97))),
        train__precision="fp16",
    )
    with pytest.raises(NonFiniteError):
        run_steps(job, state_of(job), tmp_path / "store", 1)


def test_half_precision_is_close_to_full_precision(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    full = worker_pool.train_new_run(job_of("plain", tmp_path / "a", data), 1, cache_windows)
    half = worker_pool.train_new_run(job_of("fp16", tmp_path / "b", data), 1, cache_windows)
    for theirs, ours in zip(full.steps[:6], half.steps[:6], strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=0.02)


# --- the average


def test_a_snapshot_has_the_average_and_training_keeps_the_parameters(data: Path, tmp_path: Path) -> None:
    job = job_of("average", tmp_path / "run", data)
    state = state_of(job)
    expected = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for step in range(3):
        run_steps(job, state, tmp_path / "store", 1)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in state.model.named_parameters():
            expected[name].lerp_(p.detach(), 1 - decay)
        state.step = step + 1
    trained = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    snapshot = state.snapshot()
    with state.eval_model() as model:
        evaluated = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, value in expected.items():
        assert torch.equal(snapshot.model[name], value)
        assert torch.equal(evaluated[name], value)
        assert torch.equal(snapshot.extra_state["parameters"][name], trained[name])
        assert torch.equal(dict(state.model.named_parameters())[name], trained[name])
    other = state_of(job)
    other.load(snapshot)
    assert params_digest(other.snapshot().model) == params_digest(snapshot.model)
    assert params_digest(dict(other.model.named_parameters())) == params_digest(trained)


# --- freezing


def test_frozen_layers_stay_and_other_layers_are_updated(data: Path, tmp_path: Path) -> None:
    job = job_of("frozen", tmp_path / "run", data)
    state = state_of(job)
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    # An evaluation must not unfreeze anything.
    with state.eval_model():
        pass
    run_steps(job, state, tmp_path / "store", 3)
    changed = {name for name, value in state.model.state_dict().items() if not torch.equal(value, before[name])}
    assert not any(name.startswith(("0.", "1.")) for name in changed), (
        "a frozen layer or its batch-norm statistics changed"
    )
    assert {"3.weight", "4.running_mean", "9.weight", "9.bias"} <= changed


@pytest.mark.parametrize(
    ("patterns", "message"),
    [(["head.*"], "'head.*', which matches no parameter; the model has 0.weight"), (["*"], "nothing")],
)
def test_freezing_no_parameter_or_all_parameters_is_refused(
    data: Path, tmp_path: Path, patterns: list[str], message: str
) -> None:
    job = make_job(tmp_path / "run", data, logical_workers=1, batch=8, train__freeze=patterns)
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        TrainingState(job.config, job.task, CPU, 10)


def test_batch_norm_without_parameters_is_not_frozen_by_the_name_of_another() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert freeze_parameters(model, ["0.*", "2.*"]) == [model[2]]


# --- channels last


class ThreeChannels(ImageClassification):
    """A task with three channels; with one channel both memory formats are the same."""

    def build_model(self) -> nn.Module:
        return small_cnn(3, CLASSES, channels=4)

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        return {**batch, "image": batch["image"].repeat(1, 3, 1, 1)}


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_model_gets_images_with_their_channels_last(data: Path, tmp_path: Path, channels_last: bool) -> None:
    job = make_job(tmp_path / "run", data, task=ThreeChannels(), train__channels_last=channels_last)
    state, images = state_of(job), []
    state.model.register_forward_pre_hook(lambda _, args: images.append(args[0]))
    run_steps(job, state, tmp_path / "store", 2)
    assert [x.is_contiguous(memory_format=torch.channels_last) for x in images] == [channels_last] * 8
    assert all(p.is_contiguous() for p in state.model.parameters()), (
        "a parameter is not contiguous; fused optimizers read its gradient in the wrong layout"
    )


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["ddp", "central_storage", "fsdp", "local_sgd"])
def test_channels_last_changes_only_rounding(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, strategy: str
) -> None:
    """Values would differ if a parameter had another layout than its gradient or its moments."""
    fields: dict[str, Any] = {
        "task": ImageClassification(model_args={"channels": 4, "dropout": 0.0}),
        "train__strategy": strategy,
    }
    jobs = (make_job(tmp_path / "run", data, **fields, train__channels_last=last) for last in (False, True))
    plain, last = (worker_pool.train_new_run(job, 2, cache_windows) for job in jobs)
    assert [step[1] for step in last.steps] == pytest.approx([step[1] for step in plain.steps], rel=1e-3)


# --- epochs with a number of steps


def test_an_epoch_of_some_steps_continues_where_the_last_one_ended(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = job_of("steps per epoch", tmp_path / "run", data)
    assert (job.plan.steps_per_epoch, job.total_steps, job.passes) == (9, 20, 3)
    run = worker_pool.train_new_run(job, 2, cache_windows)
    passes = [step[0] for step in run.steps]
    assert passes == [0] * 9 + [1] * 9 + [2] * 2
    assert sum(sum(step[4]) for step in run.steps[:9]) == 97, "a pass does not use every row once"


# --- soft targets


def test_smoothed_targets_sum_to_one() -> None:
    target = smooth_targets(torch.tensor([0, 2]), 4, 0.2)
    assert target.tolist() == [pytest.approx([0.85, 0.05, 0.05, 0.05]), pytest.approx([0.05, 0.05, 0.85, 0.05])]


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_images_and_targets_are_mixed_in_the_same_proportion(mixup: float, cutmix: float) -> None:
    rows = 200
    keys = torch.arange(rows, dtype=torch.int64) * 7919
    originals = torch.zeros(rows, 1, 8, 8)
    # Each image has another colour than the one before.
    originals[::2] = 1.0
    target = torch.eye(2)[torch.arange(rows) % 2]
    images, mixed = mix_images(originals, target, keys, mixup, cutmix)
    assert torch.allclose(mixed.sum(1), torch.ones(rows))
    brightness = images.mean((1, 2, 3))
    assert torch.allclose(brightness, mixed[:, 0], atol=1e-5), (
        "the brightness of an image is not the share of the bright class"
    )
    assert 0.1 < mixed.std() < 0.6
    again, _ = mix_images(originals, target, keys, mixup, cutmix)
    assert torch.equal(images, again)
    pasted = ((images == 0) | (images == 1)).flatten(1).all(1)
    assert pasted.all() if not mixup else (~pasted).any()
    if mixup and cutmix:
        assert 0.2 < pasted.float().mean() < 0.8


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_shares_of_mixtures_follow_the_beta_distribution_and_depend_on_the_row_alone(alpha: float) -> None:
    keys = torch.arange(50_000, dtype=torch.int64) * 7919
    shares = draw_beta(keys, alpha)
    assert kstest(shares.numpy(), beta(alpha, alpha).cdf).pvalue > 0.01
    for first in range(8):
        assert torch.equal(draw_beta(keys[first : first + 7], alpha), shares[first : first + 7])


# --- compiled


# Compiling takes half a minute.
@pytest.mark.rest
def test_a_compiled_model_is_bit_identical_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"task": ImageClassification(**CNN), "train__max_steps": 9, "checkpoint__every_steps": 4}
    job = make_job(tmp_path / "run", data, train__compile=True, **fields)
    alone = train_and_resume(worker_pool, job, (1, 2), ends=(2, 7), resumed=1)
    plain = worker_pool.train_new_run(make_job(tmp_path / "plain", data, **fields), 1, cache_windows)
    assert plain.commit.params_digest != alone.commit.params_digest, "the model was not compiled"


@pytest.mark.rest
def test_every_size_of_a_micro_batch_is_compiled(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's default limit is 8 sizes; a size above it runs eagerly, with other results, depending on the order."""
    from torch._dynamo.testing import CompileCounter

    counter, sizes = CompileCounter(), range(2, 15)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    job = make_job(
        tmp_path / "run", data, logical_workers=1, batch=16, task=ImageClassification(**CNN), train__compile=True
    )
    state = state_of(job)
    passes = Passes(job.config, job.task, CPU, state.model)
    for size in sizes:
        passes.losses_of({"image": torch.zeros(size, 1, 8, 8), "label": torch.zeros(size, dtype=torch.int64)}, size)
    assert counter.frame_count == len(sizes)


def test_a_missing_compiler_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    # An earlier test may have cached a compiler.
    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    job = make_job(tmp_path / "run", data, logical_workers=1, batch=8, train__compile=True)
    state = state_of(job)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        build_step(job, state, World(0, 1, 1), CPU)


# --- in the calling process


def test_the_strategy_single_uses_the_first_gpu(data: Path, tmp_path: Path) -> None:
    """Without a GPU, PyTorch raises an error for the first one."""
    fields = {"train__strategy": "single", "scaling__gpus_per_worker": 1, "train__max_steps": 1}
    job = make_job(tmp_path / "run", data, logical_workers=1, batch=8, **fields)
    if torch.cuda.is_available():
        train_in_process(job, SingleProcessMembership(1, lambda: False), Hooks())
        assert read_trained_run(job).commit.environment["device"].startswith("cuda")
    else:
        with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA driver|not compiled with CUDA"):
            train_in_process(job, SingleProcessMembership(1, lambda: False), Hooks())
