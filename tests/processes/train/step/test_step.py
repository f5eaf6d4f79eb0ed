"""One training step: errors that all ranks raise alike, state that stays unchanged, and state that changes."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ray_app.checkpoint.format import pack, params_digest, unpack
from ray_app.config.config import Config
from ray_app.config.import_paths import OptimizerSpec
from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError, NonFiniteError, TaskError
from ray_app.plan.order import Cursor
from ray_app.reduction.world import World
from ray_app.task.base import Batch
from ray_app.task.environment import set_up_torch
from ray_app.testing import RankResult, WorkerPool, cache_windows
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Job
from ray_app.train.membership import Flags
from ray_app.train.state.state import TrainingState, seed_step
from ray_app.train.step.micro_batch import ReplicaBuffers, allow_single_values
from ray_app.train.step.step_stats import StepResult
from tests.support.local_world import CPU, LocalMembership, TinyImages, feed_of, make_job

ROWS = [[50, 1], [46]]
"""97 rows: with L = 4 and batches of 12 the last step has rows (1, 0, 0, 0)."""

WARM_UP = {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"start_factor": 0.1, "total_iters": 4}}
COSINE = {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 8}}
STEPS = {"class_path": "torch.optim.lr_scheduler.MultiStepLR", "init_args": {"milestones": [2, 4], "gamma": 0.5}}


def falling(step: int) -> float:
    """Returns the factor of a `LambdaLR` schedule."""
    return 1 / (1 + step)


@dataclass(frozen=True)
class StepsResult:
    """The results of some steps on one rank.

    Args:
        results: The results of the finished steps.
        error: The error of the last step.
        before: Digests of parameters and optimizer before the last step.
        after: Digests of parameters and optimizer after the last step.
    """

    results: list[StepResult]
    error: Exception | None
    before: dict[str, Any]
    after: dict[str, Any]


def run_steps(rank: int, store: Path, job: Job, size: int, steps: int) -> StepsResult:
    """Runs the first steps of a run on one rank, until one raises."""
    set_up_torch(job.config, CPU)
    state = TrainingState(job.config, job.task, CPU, 100)
    state.step = 0
    plan, results = job.plan, []
    with LocalMembership(World(rank, size, plan.logical_workers), store).generation(0, False) as (world, _):
        step = build_step(job, state, world, CPU)
        feed = feed_of(plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
        with closing(step):
            for i in range(steps):
                before = digests(state)
                try:
                    results.append(
                        step.run(
                            Cursor.at(i, plan.steps_per_epoch), feed.next(), sum(plan.rows_of_step(i)), flags=Flags(0)
                        )
                    )
                except Exception as error:
                    return StepsResult(results, error, before, digests(state))
    return StepsResult(results, None, before, digests(state))


def digests(state: TrainingState) -> dict[str, Any]:
    """Returns digests of parameters and optimizer, and the step; statistics of batch-norm are left out."""
    moments = {
        f"{i} {name}": value
        for i, moments_of_parameter in state.optimizer.state.items()
        for name, value in moments_of_parameter.items()
    }
    return {
        "parameters": params_digest(dict(state.model.named_parameters())),
        "optimizer": params_digest({str(i): value for i, value in enumerate(moments.values())}),
        "step": state.step,
    }


def position_in(job: Job, logical_worker: int, step: int) -> int:
    """Returns a row that a logical worker gets in a step of the first epoch."""
    return int(job.plan.epoch(0).rows_at(logical_worker, step)[-1])


def bad_job(folder: Path, data: Path, cells: list[tuple[int, int]], value: float, **fields: Any) -> Job:
    """Returns a job with a loss that is not finite for one row of each (logical worker, step) in `cells`."""
    job = make_job(folder, data, task=TinyImages(), **fields)
    bad = tuple(position_in(job, *cell) for cell in cells)
    return make_job(folder, data, task=TinyImages(bad_rows=bad, bad_value=value), **fields)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, pytest.param(-math.inf, marks=pytest.mark.rest), 0.0], ids="loss {}".format
)
def test_a_loss_or_gradient_that_is_not_finite_stops_every_rank_before_the_update(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, size: int, value: float
) -> None:
    """A loss of 0 stands for a finite loss with a gradient that is not finite."""
    job = bad_job(tmp_path / "run", data, [(2, 1)], value)
    ranks = worker_pool.run(size, run_steps, job, size, 3)
    rows = [position_in(job, 2, 1)]
    for rank in ranks:
        assert len(rank.results) == 1, "not exactly the step before the bad one succeeded"
        assert isinstance(rank.error, NonFiniteError)
        assert rank.before == rank.after, "the failed step changed parameters or optimizer"
        assert str(rank.error) == str(ranks[0].error)
    message = str(ranks[0].error)
    assert "Epoch 0, step 1 of the epoch" in message
    assert f"logical worker 2, rows at manifest positions {rows}" in message
    assert message.count("logical worker") == 1, "the message names other logical workers"
    assert "lower the learning rate" in message


class Pairs(TinyImages):
    """Its loss refuses a single row; the loss is finite, and its gradient is not."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        losses = super().loss(outputs, batch)
        if len(losses) < 2:
            raise ValueError("a pair is needed")
        return losses + (losses - losses).sqrt()


def test_a_task_that_refuses_single_rows_gets_a_non_finite_error(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """The search for the bad row raises no other error."""
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=12, task=Pairs())
    [rank] = worker_pool.run(1, run_steps, job, 1, 1)
    assert isinstance(rank.error, NonFiniteError), rank.error


def test_the_error_names_every_logical_worker_with_a_bad_row(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = bad_job(tmp_path / "run", data, [(0, 0), (3, 0)], math.nan)
    [message] = {str(rank.error) for rank in worker_pool.run(3, run_steps, job, 3, 1)}
    for v in (0, 3):
        assert f"logical worker {v}, rows at manifest positions {[position_in(job, v, 0)]}" in message


def test_infinities_of_both_signs_raise_the_same_error(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """The sum of both infinities is NaN, which must not raise another error."""
    job = make_job(tmp_path / "run", data, task=BothInfinities())
    for rank in worker_pool.run(2, run_steps, job, 2, 1):
        assert isinstance(rank.error, NonFiniteError), rank.error
        assert rank.before == rank.after


class BothInfinities(TinyImages):
    """The loss of a row is plus or minus infinity; with 12 rows there are both in every step."""

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(outputs, batch) * torch.where(batch["id"] % 2 == 0, math.inf, -math.inf)[:1]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_of_the_wrong_shape_is_refused(worker_pool: WorkerPool, data: Path, tmp_path: Path, size: int) -> None:
    job = make_job(tmp_path / "run", data, task=TinyImages(loss_shape="mean"))
    for rank in worker_pool.run(size, run_steps, job, size, 1):
        assert isinstance(rank.error, ConfigError)
        assert str(rank.error).startswith("TinyImages.loss returned shape () for 3 rows; it must return one value per")
        assert rank.before == rank.after


def test_clipping_bounds_the_gradient_that_the_optimizer_gets(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}
    norms, distances = [], []
    for clip in (None, 0.01):
        job = make_job(
            tmp_path / "run",
            data,
            logical_workers=4,
            batch=12,
            task=TinyImages(),
            optimizer=sgd,
            train__grad_clip_norm=clip,
        )
        [(norm, distance)] = worker_pool.run(1, norm_and_distance_of_one_step, job)
        norms.append(norm)
        distances.append(distance)
    assert norms[0] == norms[1] > 0.1, "the reported norm is not the one before clipping"
    assert distances == pytest.approx([norms[0], 0.01], rel=1e-3)


def norm_and_distance_of_one_step(rank: int, store: Path, job: Job) -> tuple[float, float]:
    """Returns the gradient norm of a step and the distance that the parameters moved."""
    set_up_torch(job.config, CPU)
    state = TrainingState(job.config, job.task, CPU, 100)
    state.step = 0
    world = World(rank, 1, job.plan.logical_workers)
    before = [p.detach().clone() for p in state.model.parameters()]
    feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
    result = build_step(job, state, world, CPU).run(Cursor(), feed.next(), 12, flags=Flags(0))
    after = list(state.model.parameters())
    return result.grad_norm, math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(after, before, strict=True)))


def test_a_step_equals_that_of_plain_torch(data: Path, tmp_path: Path) -> None:
    """With dropout off and no batch-norm, logical workers give the mean gradient of the global batch."""
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    job = make_job(tmp_path / "run", data, task=DeterministicModel(), optimizer=sgd)
    outcome = run_steps(0, tmp_path, job, 1, 9)
    state = TrainingState(job.config, job.task, CPU, 100)
    arrays = cache_windows(job, Cursor(), range(4))
    feed = feed_of(job.plan, Cursor(), range(4), arrays)
    for i in range(9):
        batches = feed.next()
        rows = {name: torch.cat([b.fields[name] for b in batches]) for name in ("image", "label", "id")}
        loss = job.task.loss(job.task.forward(state.model, rows), rows).mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        assert outcome.results[i].loss == pytest.approx(loss.item(), rel=1e-5)
        assert outcome.results[i].rows == [b.rows for b in batches] == job.plan.rows_of_step(i)
    norm = torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters() if p.grad is not None])
    assert outcome.results[-1].grad_norm == pytest.approx(norm.item(), rel=1e-4)


class DeterministicModel(TinyImages):
    """A model without anything random."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def batch_norms() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.BatchNorm1d(3)).train()


def test_batch_norm_over_one_value_uses_and_keeps_the_running_statistics() -> None:
    model = batch_norms()
    # After this forward, the statistics differ from the initial ones.
    model(torch.randn(8, 6) * 3 + 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    row = torch.randn(1, 6)
    with allow_single_values(model):
        outputs = model(row)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), (
        "the running statistics changed"
    )
    assert all(layer.training for layer in model.modules())
    assert torch.equal(outputs, model.eval()(row))


def test_batch_norm_over_several_values_stays_in_training_mode() -> None:
    for model, rows in (
        (batch_norms(), torch.randn(2, 6)),
        (nn.Sequential(nn.BatchNorm2d(3)), torch.randn(1, 3, 2, 2)),
    ):
        twin = nn.Sequential(*model)
        twin.load_state_dict(model.state_dict())
        statistics = [b.clone() for b in model.buffers()]
        with allow_single_values(model):
            outputs = model(rows)
        assert not torch.equal(statistics[0], next(model.buffers())), "the running statistics did not change"
        assert torch.equal(outputs, model.train()(rows)), "the outputs differ from those in training mode"


def test_batch_norm_is_in_training_mode_again_after_an_error() -> None:
    model = batch_norms()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), allow_single_values(model):
        nn.Sequential(model[1], nn.Linear(7, 1))(torch.randn(1, 6))
    assert all(layer.training for layer in model.modules())
    with pytest.raises(ValueError, match="more than 1 value"):
        # Batch-norm raises again, since no hook is left.
        model(torch.randn(1, 6))


class ComplexModel(nn.Module):
    """A model with complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.factors = nn.Parameter(torch.ones(12, dtype=torch.complex64))
        self.last = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last((self.first(images.flatten(1)) * self.factors).abs())


class ComplexTask(TinyImages):
    def build_model(self) -> nn.Module:
        return ComplexModel()


def test_complex_parameters_are_bit_identical_on_any_workers(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    jobs = [make_job(tmp_path / str(size), data, logical_workers=3, batch=12, task=ComplexTask()) for size in (1, 3)]
    assert worker_pool.train_new_run(jobs[0], 1).digests == worker_pool.train_new_run(jobs[1], 3).digests


class CheckpointedModel(nn.Module):
    """A model that computes the forward of its batch-norm again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(checkpoint(self.norm, self.first(images.flatten(1)), use_reentrant=False))


class CheckpointedTask(TinyImages):
    def build_model(self) -> nn.Module:
        return CheckpointedModel()


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local_sgd"])
def test_checkpointed_batch_norm_of_one_row_is_bit_identical_on_any_workers(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, strategy: str
) -> None:
    fields = {"train__strategy": strategy} | ({"train__local_steps": 2} if strategy == "local_sgd" else {})
    digests_by_size = []
    for size in (1, 3):
        job = make_job(tmp_path / str(size), data, logical_workers=3, batch=3, task=CheckpointedTask(), **fields)
        assert job.plan.rows_of_step(0) == [1, 1, 1]
        digests_by_size.append(worker_pool.train_new_run(job, size).digests)
    assert digests_by_size[0] == digests_by_size[1]


def test_a_step_keeps_the_buffers_of_logical_worker_0() -> None:
    model = nn.BatchNorm1d(2)
    buffers = ReplicaBuffers(model, World(0, 1, 3))
    expected, start = nn.BatchNorm1d(2), [b.clone() for b in model.buffers()]
    buffers.begin()
    for v in range(3):
        rows = torch.full((4, 2), float(v)) + torch.eye(4, 2)
        model(rows)
        if v == 0:
            expected(rows)
        buffers.end_logical_worker(v)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), start, strict=True)), (
            "the next logical worker does not start from the buffers of the step's start"
        )
    buffers.launch()
    buffers.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), expected.buffers(), strict=True))


def test_random_numbers_depend_on_seed_epoch_step_and_logical_worker() -> None:
    def draw(*coordinates: int) -> float:
        seed_step(*coordinates, CPU)  # type: ignore[call-arg]
        return float(torch.rand(()))

    all_coordinates = [
        (seed, epoch, step, v) for seed in range(2) for epoch in range(2) for step in range(2) for v in range(2)
    ]
    assert len({draw(*coordinates) for coordinates in all_coordinates}) == len(all_coordinates)
    assert draw(*all_coordinates[3]) == draw(*all_coordinates[3])


@pytest.mark.parametrize(
    "schedule",
    [
        ("StepLR", {"step_size": 3, "gamma": 0.5}),
        ("MultiStepLR", {"milestones": [2, 5, 5], "gamma": 0.5}),
        ("CosineAnnealingLR", {"T_max": 7}),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 12}),
        ("SequentialLR", {"schedulers": [WARM_UP, COSINE], "milestones": [4]}),
        ("SequentialLR", {"schedulers": [WARM_UP, STEPS], "milestones": [5]}),
        ("ChainedScheduler", {"schedulers": [WARM_UP, {**COSINE, "init_args": {"T_max": 20}}]}),
        ("LambdaLR", {"lr_lambda": f"{__name__}.falling"}),
        ("CosineAnnealingWarmRestarts", {"T_0": 3}),
        ("LinearLR", {"total_iters": 5}),
    ],
    ids=lambda s: s[0],
)
@pytest.mark.parametrize(
    "optimizer", [("Adam", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"amsgrad": True})]
)
def test_schedule_and_optimizer_resume_from_a_checkpoint(
    schedule: tuple[str, dict[str, Any]], optimizer: tuple[str, dict[str, Any]]
) -> None:
    config = Config(
        optimizer=OptimizerSpec(f"torch.optim.{optimizer[0]}", optimizer[1]),
        schedule=ClassSpec(f"torch.optim.lr_scheduler.{schedule[0]}", schedule[1]),
    )

    def advance(state: TrainingState, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates.append(state.lr)
            for i, p in enumerate(state.model.parameters()):
                p.grad = torch.full_like(p, math.sin(state.step + i))
            state.optimizer_step()
        return rates

    def make_state() -> TrainingState:
        state = TrainingState(config, OneLayer(), CPU, 100)
        state.step = 0
        return state

    undisturbed = make_state()
    rates = advance(undisturbed, 11)
    assert len(set(rates)) > 2
    for steps_done in (0, 1, 4, 10):
        first, second = make_state(), TrainingState(config, TASK, CPU, 100)
        first_rates = advance(first, steps_done)
        second.load(unpack(pack(first.snapshot())))
        assert second.step == steps_done
        assert first_rates + advance(second, 11 - steps_done) == rates
        assert params_digest(second.model.state_dict()) == params_digest(undisturbed.model.state_dict())


def rates_of(name: str, args: dict[str, Any], steps: int) -> list[float]:
    """Returns the learning rates of a run of `steps` steps that begins with 0.1."""
    schedule = ClassSpec(f"torch.optim.lr_scheduler.{name}", args)
    state = TrainingState(
        Config(optimizer=OptimizerSpec("torch.optim.SGD", {"lr": 0.1}), schedule=schedule), TASK, CPU, steps
    )
    rates = []
    for _ in range(steps):
        rates.append(state.lr)
        state.optimizer.step()
        state.advance_schedule()
    return rates


def test_a_sequential_schedule_is_a_linear_warm_up_and_then_a_cosine() -> None:
    rates = rates_of("SequentialLR", {"schedulers": [WARM_UP, COSINE], "milestones": [4]}, 12)
    assert rates[:4] == pytest.approx([0.01 + 0.09 * i / 4 for i in range(4)])
    assert rates[4:] == pytest.approx([0.05 * (1 + math.cos(math.pi * i / 8)) for i in range(8)])


def test_a_schedule_calls_the_function_at_an_import_path() -> None:
    assert rates_of("LambdaLR", {"lr_lambda": f"{__name__}.falling"}, 5) == [0.1 * falling(i) for i in range(5)]


def test_a_schedule_defaults_to_the_length_of_the_run() -> None:
    def step_of_lowest_rate(args: dict[str, Any]) -> int:
        rates = rates_of("OneCycleLR", {"max_lr": 0.1, **args}, 30)
        return rates.index(min(rates))

    assert step_of_lowest_rate({}) == 29
    with pytest.raises(ValueError, match="Tried to step 13 times"):
        step_of_lowest_rate({"epochs": 3, "steps_per_epoch": 4})


class OneLayer(TinyImages):
    def build_model(self) -> nn.Module:
        return nn.Linear(3, 2)


TASK = OneLayer()


@pytest.mark.rest
@pytest.mark.parametrize(
    "fields", [{}, {"train__strategy": "local_sgd", "train__local_steps": 2}], ids=["step", "local step"]
)
def test_step_and_reducer_are_freed_after_their_generation(data: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    job = make_job(tmp_path / "run", data, **fields, checkpoint__every_epochs=None)
    set_up_torch(job.config, CPU)
    state = build_state(job.config, job.task, CPU, 100)
    state.step = 0

    def run_generation() -> list[weakref.ref[Any]]:
        with LocalMembership(World(0, 1, 4), tmp_path / "store").generation(0, False) as (world, _):
            step = build_step(job, state, world, CPU, lambda phase: None)
            feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
            with closing(step), closing(feed):
                step.run(Cursor(), feed.next(), sum(job.plan.rows_of_step(0)), Flags(0))
        return [weakref.ref(step), weakref.ref(step.reducer)]

    references = run_generation()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_snapshot_has_its_own_memory() -> None:
    state = TrainingState(Config(), TASK, CPU, 100)
    state.step = 0
    snapshot = state.snapshot()
    before = params_digest(snapshot.model)
    for p in state.model.parameters():
        p.grad = torch.ones_like(p)
    state.optimizer_step()
    assert params_digest(snapshot.model) == before != params_digest(state.model.state_dict())


@pytest.mark.parametrize("highest", [0, 2])
def test_ranks_adopt_the_state_of_the_highest_step(worker_pool: WorkerPool, highest: int) -> None:
    outcomes: list[RankResult] = worker_pool.call(3, share_highest_state, highest)
    assert [o.error for o in outcomes] == [None] * 3
    assert len({o.value for o in outcomes}) == 1
    assert outcomes[0].value[0] == 5


def never() -> None:
    raise AssertionError("there is a state, nothing is to be restored")


def share_highest_state(rank: int, store: Path, highest: int) -> tuple[int, str, float]:
    """Shares the state of the rank at step 5; the others are behind or have no state."""
    state = TrainingState(Config(seed=rank), TASK, CPU, 100)
    if rank != 1:
        state.step = 5 if rank == highest else 4
        for _ in range(state.step):
            for p in state.model.parameters():
                p.grad = torch.ones_like(p)
            state.optimizer.step()
    with LocalMembership(World(rank, 3, 3), store).generation(0, False) as (world, _):
        state.backend.share(world, never)
    return (
        state.step,
        params_digest(state.model.state_dict()),
        float(next(iter(state.optimizer.state.values()))["step"]),
    )


def test_a_snapshot_can_reuse_the_memory_of_an_old_one() -> None:
    state = TrainingState(Config(), TASK, CPU, 100)
    for p in state.model.parameters():
        p.grad = torch.ones_like(p)
    first = state.snapshot()
    state.optimizer.step()
    second = state.snapshot(first)
    fresh = state.snapshot()
    assert params_digest(second.model) == params_digest(fresh.model) == params_digest(state.model.state_dict())
    assert pack(second) == pack(fresh)
    assert all(second.model[name].data_ptr() == first.model[name].data_ptr() for name in first.model)
    assert all(fresh.model[name].data_ptr() != first.model[name].data_ptr() for name in first.model)


class FailsLater(TinyImages):
    """Raises in the second micro-batch, after the first one has changed the batch-norm statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        self.passes += 1
        if self.passes == 2:
            raise ValueError("of the task")
        return super().loss(outputs, batch)


def test_an_error_of_the_task_restores_the_buffers(data: Path, tmp_path: Path) -> None:
    """In a broken group such an error may be caused by a lost peer, and then the step is repeated."""
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=12, task=FailsLater())
    state, world = build_state(job.config, job.task, CPU, 1), World(0, 1, 2)
    before = {name: values.clone() for name, values in state.model.named_buffers()}
    windows = cache_windows(job, Cursor(), world.assigned)
    feed = feed_of(job.plan, Cursor(), world.assigned, windows)
    step = build_step(job, state, world, CPU, lambda phase: None)
    with closing(step), pytest.raises(TaskError, match="of the task"):
        step.run(Cursor(), feed.next(), job.plan.global_rows(0), Flags(0))
    assert before
    assert all(torch.equal(values, before[name]) for name, values in state.model.named_buffers())
