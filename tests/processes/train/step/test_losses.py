"""Losses with weights and metrics are means over the weight of the global batch, for all strategies and world sizes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app import Losses, reduce
from ray_app.checkpoint.format import params_digest
from ray_app.errors import ConfigError, NonFiniteError
from ray_app.plan.order import Cursor
from ray_app.reduction.world import World
from ray_app.runlog.journal import read_records
from ray_app.task.base import Batch
from ray_app.task.environment import set_up_torch
from ray_app.task.metrics import combine, score
from ray_app.testing import TrainedRun, WorkerPool, cache_windows, digest_tensors, read_trained_run
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Job
from ray_app.train.membership import Flags
from ray_app.train.state.state import TrainingState
from tests.support import server_world
from tests.support.bit_identity import train_and_resume, train_on_workers
from tests.support.local_world import CPU, TinyImages, feed_of, make_job
from tests.support.pages import blocks
from tests.support.paths import ROOT

ROWS = [[50, 1], [46]]
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}


class Tokens(TinyImages):
    """Rows of 0 to 6 parts that all have the loss of the row; the metric is the share of correct parts.

    Args:
        weighs: `by id`: a row has 0 to 6 parts; `nothing`: no row counts; `none`: losses have no weights.
        odd: Manifest positions of rows that come with another metric.
    """

    def __init__(
        self, weighs: str = "by id", odd: tuple[int, ...] = (), plainly: bool = False, bad_rows: tuple[int, ...] = ()
    ) -> None:
        super().__init__(bad_rows=bad_rows)
        self.weighs = weighs
        self.odd = odd
        self.plainly = plainly

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5)) if self.plainly else super().build_model()

    def loss(self, outputs: Tensor, batch: Batch) -> Losses:
        losses, right = super().loss(outputs, batch), (outputs.argmax(1) == batch["label"])
        if self.weighs == "none":
            return Losses(losses, metrics={"right": right})
        parts = torch.zeros_like(batch["id"]) if self.weighs == "nothing" else batch["id"] % 7
        name = "wrong" if torch.isin(batch["id"], torch.tensor(self.odd, dtype=torch.int64)).any() else "right"
        return Losses(losses * parts, parts, {name: right * parts})


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "clipped": {"train__grad_clip_norm": 0.3},
    "fp16": {"train__precision": "fp16"},
    "central_storage": {"train__strategy": "central_storage"},
    "local_sgd": {"train__strategy": "local_sgd", "train__local_steps": 3, "checkpoint__every_steps": 3},
    "one bad row": {"data__on_bad_row": "skip"},
}


def job_of(folder: Path, data: Path, task: TinyImages | None = None, **fields: Any) -> Job:
    return make_job(folder, data, task=task or Tokens(), every=4, **fields)


@pytest.mark.rest
@pytest.mark.parametrize("name", STRATEGIES)
def test_weighted_losses_are_bit_identical_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    job = job_of(tmp_path / "run", data, **STRATEGIES[name])
    alone = train_and_resume(worker_pool, job, (1, 2, 4))
    assert alone.steps[0][6] == sum(position % 7 for v in range(4) for position in job.plan.epoch(0).rows_at(v, 0)), (
        "the recorded weight is not the sum over the rows"
    )
    unweighted = worker_pool.train_new_run(
        job_of(tmp_path / "other", data, task=Tokens("none"), **STRATEGIES[name]), 1, cache_windows
    )
    assert unweighted.commit.params_digest != alone.commit.params_digest, "the weights have no effect"


def test_metrics_without_weights_keep_the_run_bit_identical(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    with_metrics = worker_pool.train_new_run(job_of(tmp_path / "one", data, task=Tokens("none")), 2, cache_windows)
    without_metrics = worker_pool.train_new_run(job_of(tmp_path / "two", data, task=TinyImages()), 2, cache_windows)
    assert with_metrics.digests == without_metrics.digests
    assert [step[:6] for step in with_metrics.steps] == without_metrics.steps


def run_steps(job: Job, steps: int) -> tuple[TrainingState, list[Any]]:
    """Runs the first steps of a run on one worker; returns the state and the results."""
    set_up_torch(job.config, CPU)
    state = build_state(job.config, job.task, CPU, 100)
    state.step = 0
    world = World(0, 1, 4)
    step = build_step(job, state, world, CPU, lambda phase: None)
    feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
    rows = job.plan.rows_of_step
    return state, [
        step.run(Cursor.at(i, job.plan.steps_per_epoch), feed.next(), sum(rows(i)), Flags(0)) for i in range(steps)
    ]


def test_a_step_with_weights_equals_that_of_plain_torch(data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data, task=Tokens(plainly=True), optimizer=SGD)
    state, results = run_steps(job, 9)
    twin = TrainingState(job.config, job.task, CPU, 100)
    feed = feed_of(job.plan, Cursor(), range(4), cache_windows(job, Cursor(), range(4)))
    for result in results:
        batches = feed.next()
        rows = {name: torch.cat([b.fields[name] for b in batches]) for name in ("image", "label", "id")}
        outputs, parts = job.task.forward(twin.model, rows), rows["id"] % 7
        loss = (functional.cross_entropy(outputs, rows["label"], reduction="none") * parts).sum() / parts.sum()
        twin.optimizer.zero_grad()
        loss.backward()
        twin.optimizer.step()
        right = ((outputs.argmax(1) == rows["label"]) * parts).sum() / parts.sum()
        assert (result.loss, result.metrics["right"]) == pytest.approx((loss.item(), right.item()), rel=1e-5)
        assert result.weight == parts.sum()
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.model.parameters() if p.grad is not None])
    assert results[-1].grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for ours, theirs in zip(state.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_rows_without_weight_change_no_parameter(data: Path, tmp_path: Path, strategy: str) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}}
    local = {"train__local_steps": 2} if strategy == "local_sgd" else {}
    job = job_of(tmp_path / "run", data, task=Tokens("nothing"), schedule=schedule, train__strategy=strategy, **local)
    state, results = run_steps(job, 4)
    first, _ = run_steps(job, 0)
    before, after = digest_tensors(first.snapshot()), digest_tensors(state.snapshot())
    names = [name for name, _ in state.model.named_parameters()]
    assert {name: after["model"][name] for name in names} == {name: before["model"][name] for name in names}
    assert after["optimizer"]["state"] == {}
    assert (state.step, state.lr) == (4, pytest.approx(0.01 * 0.1**4)), "the schedule stopped"
    assert [(r.loss, r.weight, r.metrics) for r in results] == [(0.0, 0.0, {})] * 4


@pytest.mark.rest
def test_parameter_servers_are_bit_identical_to_ddp(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    fields = {"train__grad_clip_norm": 0.3, "optimizer": SGD}
    ddp = worker_pool.train_new_run(job_of(tmp_path / "ddp", data, **fields), 2, cache_windows)
    job = job_of(tmp_path / "servers", data, train__strategy="parameter_server", train__servers=2, **fields)
    server_world.ServerWorld(job, 3).run()
    served = read_trained_run(job)
    assert (served.digests, served.steps) == (ddp.digests, ddp.steps)


def test_parameter_servers_skip_the_update_of_rows_without_weight(data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data, task=Tokens("nothing"), train__strategy="parameter_server", train__max_steps=4)
    server_world.ServerWorld(job, 2).run()
    initial = TrainingState(job.config, job.task, CPU, 100).snapshot()
    trained = read_trained_run(job).snapshot
    assert all(
        torch.equal(trained.model[name], value)
        for name, value in initial.model.items()
        if name.endswith(("weight", "bias"))
    )
    assert trained.optimizer["state"] == {}


@pytest.mark.parametrize("weighs", ["by id", "nothing"])
def test_with_staleness_each_logical_worker_weights_its_own_rows(data: Path, tmp_path: Path, weighs: str) -> None:
    """The mean of the only logical worker is the mean of the step, so plain SGD gives the values of `ddp`."""
    fields = {"task": Tokens(weighs, plainly=True), "optimizer": SGD, "train__max_steps": 6}
    job = make_job(
        tmp_path / "run",
        data,
        logical_workers=1,
        batch=12,
        train__strategy="parameter_server",
        train__staleness=1,
        **fields,
    )
    server_world.ServerWorld(job, 1).run()
    state = build_state(job.config.replace(train__strategy="ddp"), job.task, CPU, 100)
    state.step, world = 0, World(0, 1, 1)
    step = build_step(job, state, world, CPU)
    feed = feed_of(job.plan, Cursor(), world.assigned, cache_windows(job, Cursor(), world.assigned))
    for i in range(6):
        step.run(Cursor.at(i, 9), feed.next(), sum(job.plan.rows_of_step(i)), Flags(0))
    for name, value in read_trained_run(job).snapshot.model.items():
        assert torch.allclose(value, state.model.state_dict()[name], atol=1e-6)


@pytest.mark.rest
def test_fsdp_with_weights_is_bit_identical_to_ddp(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    def run(strategy: str) -> TrainedRun:
        fields = {"task": Tokens(plainly=True), "optimizer": SGD, "train__strategy": strategy}
        return worker_pool.train_new_run(job_of(tmp_path / strategy, data, **fields), 2, cache_windows)

    ours, theirs = run("fsdp"), run("ddp")
    assert (ours.steps, ours.digests) == (theirs.steps, theirs.digests)


@pytest.mark.parametrize("size", [1, 2])
def test_different_metrics_within_a_step_are_refused(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, size: int
) -> None:
    job = job_of(tmp_path / "run", data)
    odd = tuple(int(row) for row in job.plan.epoch(0).rows_at(3, 0))
    job = job_of(tmp_path / "run", data, task=Tokens(odd=odd))
    outcomes = worker_pool.train(job, size, windows=cache_windows)
    message = "have other metrics than the losses of other rows: right and wrong. Return the same names for every batch"
    assert all(isinstance(o.error, ConfigError) and message in str(o.error) for o in outcomes), outcomes


def test_different_metrics_in_a_later_step_are_refused(data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data)
    odd = tuple(int(row) for row in job.plan.epoch(0).rows_at(1, 2))
    with pytest.raises(ConfigError, match="right and wrong"):
        run_steps(job_of(tmp_path / "run", data, task=Tokens(odd=odd)), 3)


def test_rows_that_give_nan_are_named(data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data)
    bad = next(int(row) for row in job.plan.epoch(0).rows_at(2, 0) if row % 7)
    with pytest.raises(NonFiniteError, match=r"from logical worker 2, rows"):
        run_steps(job_of(tmp_path / "run", data, task=Tokens(bad_rows=(bad,))), 1)


class InvalidLosses(TinyImages):
    """Returns losses that are refused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def loss(self, outputs: Tensor, batch: Batch) -> Any:
        values = super().loss(outputs, batch)
        return {
            "weights": Losses(values, torch.ones(())),
            "negative": Losses(values, -torch.ones_like(values)),
            "metric": Losses(values, None, {"right": values.mean()}),
            "number": Losses(values, None, {"right": 0.5}),
            "taken": Losses(values, None, {"lr": values}),
            "name": Losses(values, None, {"eval_right": values}),
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("weights", "InvalidLosses.loss returned 'weights' of shape \\(\\) for 3 rows; it must return one value per"),
        ("negative", r"weights whose sum over 3 rows is -3.0; each must be a number of at least 0"),
        ("metric", r"'right' of shape \(\) for 3 rows"),
        ("number", r"'right' of shape float for 3 rows"),
        ("taken", r"a metric 'lr'; use letters.*and none of data_wait_ms, grad_norm, imbalance, loss, lr"),
        ("name", r"a metric 'eval_right'"),
    ],
)
def test_losses_without_one_value_per_row_are_refused(data: Path, tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_steps(job_of(tmp_path / "run", data, task=InvalidLosses(kind)), 1)


class Page(Tokens):
    """A task with sentences of up to six tokens and the loss of docs/own-task.md."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().forward(model, batch)[:, :, None].expand(-1, -1, 6)

    def loss(self, outputs: Tensor, batch: Batch) -> Losses:
        is_token = torch.arange(6) < (batch["id"] % 7)[:, None]
        names: dict[str, Any] = {}
        exec(next(b.text for b in blocks(ROOT / "docs" / "own-task.md") if "cross_entropy" in b.text), names)
        return names["loss"](self, outputs, {"target": torch.where(is_token, batch["label"][:, None], -100)})


def test_the_loss_of_the_documentation_counts_tokens(data: Path, tmp_path: Path) -> None:
    _, ours = run_steps(job_of(tmp_path / "run", data), 4)
    _, theirs = run_steps(job_of(tmp_path / "run", data, task=Page()), 4)
    for result, documented in zip(ours, theirs, strict=True):
        assert result.weights == documented.weights
        assert (result.loss, result.metrics["right"]) == pytest.approx(
            (documented.loss, documented.metrics["accuracy"]), rel=1e-5
        )
        assert documented.metrics["largest_output"] > 0


class Reduced(TinyImages):
    """Calls `ray_app.reduce` in its loss.

    Args:
        late: Manifest positions of rows; a micro-batch with one of them has another value to reduce.
    """

    def __init__(self, late: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.late = late

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        losses = super().loss(outputs, batch)
        assert isinstance(losses, Tensor)
        reduce("ids", batch["id"].sum(), "sum")
        reduce("mean id", batch["id"].double().mean(), "mean")
        reduce("largest id", batch["id"].max(), "max")
        reduce("loss sum", losses.sum(), "sum")
        reduce("odd", float(batch["id"][0] % 2 or -0.5), "max")
        if torch.isin(batch["id"], torch.tensor(self.late, dtype=torch.int64)).any():
            reduce("late", 1, "sum")
        return losses


@pytest.mark.rest
@pytest.mark.parametrize("name", STRATEGIES)
def test_reduced_values_are_bit_identical_on_any_workers(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    """The rows of the last step of an epoch are those of one logical worker, and the others contribute nothing."""
    job = job_of(tmp_path / "run", data, task=Reduced(), **STRATEGIES[name])
    alone = train_on_workers(worker_pool, job, (1, 2, 4))
    without = worker_pool.train_new_run(
        job_of(tmp_path / "other", data, task=TinyImages(), **STRATEGIES[name]), 2, cache_windows
    )
    assert without.digests == alone.digests, "reduced values changed the parameters"
    records, _ = read_records(job.paths)
    steps = job.plan.steps_per_epoch
    for step, record in records.items():
        epoch = job.plan.epoch((step - 1) // steps)
        ids = [epoch.rows_at(v, (step - 1) % steps) for v in range(4)]
        ids = [positions for positions in ids if len(positions)]
        expected = {
            "ids": sum(float(positions.sum()) for positions in ids),
            "mean id": sum(positions.mean() for positions in ids) / len(ids),
            "largest id": max(float(positions.max()) for positions in ids),
            "odd": max(float(positions[0] % 2 or -0.5) for positions in ids),
        }
        assert {name: record.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-15)
        assert record.metrics["loss sum"] == pytest.approx(record.loss * sum(record.rows), rel=1e-6)


def test_parameter_servers_record_reduced_values(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    ddp = worker_pool.train_new_run(job_of(tmp_path / "ddp", data, task=Reduced(), optimizer=SGD), 2, cache_windows)
    job = job_of(tmp_path / "servers", data, task=Reduced(), train__strategy="parameter_server", optimizer=SGD)
    server_world.ServerWorld(job, 2).run()
    assert read_trained_run(job).steps == ddp.steps


def test_values_that_are_reduced_in_some_micro_batches_only_are_refused(data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data)
    late = tuple(int(row) for row in job.plan.epoch(0).rows_at(1, 2))
    with pytest.raises(ConfigError, match=r"id, late, loss sum, mean id, odd and .*id, loss sum, mean id, odd"):
        run_steps(job_of(tmp_path / "run", data, task=Reduced(late)), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", 1.0, "min"), r"ray_app.reduce\('a', ...\) got the reduction 'min'; use one of sum, mean, max"),
        (("lr", 1.0, "sum"), r"got a metric 'lr'; use letters"),
        (("sum:a", 1.0, "sum"), r"got a metric 'sum:a'; use letters"),
        (("a", torch.ones(3), "sum"), r"got torch.float32 of shape \(3,\); pass one real number"),
        (("a", 1j, "sum"), r"got torch.complex64 of shape \(\)"),
        (("ids", 1, "sum"), r"'ids', ...\) is the second call with this name"),
        (("right", 1, "sum"), r"returns the metrics right, but ray_app.reduce is called with the same names"),
    ],
)
def test_values_that_cannot_be_reduced_are_refused(
    data: Path, tmp_path: Path, arguments: tuple[Any, ...], message: str
) -> None:
    class Refused(Tokens):
        def loss(self, outputs: Tensor, batch: Batch) -> Losses:
            reduce("ids", 1, "max")
            reduce(*arguments)
            return super().loss(outputs, batch)

    with pytest.raises(ConfigError, match=message):
        run_steps(job_of(tmp_path / "run", data, task=Refused()), 1)


def test_a_reduced_nan_is_recorded_and_calls_outside_of_a_step_have_no_effect(data: Path, tmp_path: Path) -> None:
    class Undefined(TinyImages):
        def augment(self, batch: Batch, keys: Tensor) -> Batch:
            reduce("augmented", 1, "sum")
            return super().augment(batch, keys)

        def loss(self, outputs: Tensor, batch: Batch) -> Any:
            reduce("undefined", torch.tensor([float("nan")]) if 0 in batch["id"] else 1.0, "max")
            return super().loss(outputs, batch)

    job = job_of(tmp_path / "run", data, task=Undefined())
    _, results = run_steps(job, 9)
    assert [*results[0].metrics] == ["undefined"]
    assert sum(math.isnan(result.metrics["undefined"]) for result in results) == 1
    list(score(job.task, job.task.build_model(), batch_arrays(), 4, CPU, chunk_rows=12))


def test_classifications_record_training_accuracy_when_it_is_enabled(data: Path, tmp_path: Path) -> None:
    from ray_app.task.image import ImageClassification

    args = {"model_args": {"channels": 4}}
    digests = set()
    for is_enabled in (False, True):
        state, results = run_steps(
            job_of(tmp_path / "run", data, task=ImageClassification(**args, train_accuracy=is_enabled)), 3
        )
        digests.add(params_digest(state.model.state_dict()))
        assert [list(result.metrics) for result in results] == [["accuracy"] if is_enabled else []] * 3
    assert len(digests) == 1


def batch_arrays() -> dict[str, Any]:
    """Returns 50 random rows of `TinyImages`."""
    random = torch.Generator().manual_seed(0)
    return {
        "image": torch.randint(0, 255, (50, 1, 8, 8), generator=random).numpy(),
        "label": torch.randint(0, 5, (50,), generator=random).numpy(),
        "id": torch.arange(50).numpy(),
    }


def test_an_evaluation_weights_its_mean_like_training(data: Path, tmp_path: Path) -> None:
    task = job_of(tmp_path / "run", data, task=Tokens(plainly=True)).task
    model, arrays = task.build_model(), batch_arrays()
    chunks = list(score(task, model, arrays, 4, CPU, chunk_rows=12))
    batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
    losses = functional.cross_entropy(task.forward(model, batch), batch["label"], reduction="none")
    losses, parts = losses.detach(), batch["id"] % 7
    assert combine(task, chunks).values["loss"] == pytest.approx(float((losses * parts).sum() / parts.sum()), rel=1e-5)


def test_step_records_have_weight_and_metrics_only_for_weighted_losses(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "run", data, train__max_steps=4)
    worker_pool.train_to_end(job, 2, cache_windows)
    records, _ = read_records(job.paths)
    assert all(record.over == record.weight > 0 and 0 <= record.metrics["right"] <= 1 for record in records.values())
    unweighted = replace(job, run_root=str(tmp_path / "bare"), task=TinyImages().from_settings(vars(job.task)))
    worker_pool.train_to_end(unweighted, 2, cache_windows)
    [segment, *_] = sorted(unweighted.paths.metrics.glob("*.json"))
    assert not json.loads(segment.read_bytes()).keys() & {"weight", "metrics"}
