"""Lightning modules: bit-identical training, values that their steps log, and refused modules."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torchmetrics.functional import classification

from ray_app import check_task, load_config
from ray_app.config.config import Config
from ray_app.config.import_paths import TASK_OPTIMIZER
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import prepare
from ray_app.task.lightning import LightningTask
from ray_app.task.metrics import combine, score
from ray_app.testing import WorkerPool, read_trained_run
from ray_app.train.job import Job
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import CPU, make_job
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.task_checks import all_ok, levels

MODULES = "tests.support.lightning_modules."
MODULE_OPTIMIZER: dict[str, Any] = {"optimizer": {"class_path": TASK_OPTIMIZER}}


def task_of(module: str = "Good", **init_args: Any) -> LightningTask:
    module_spec = {"class_path": MODULES + module, "init_args": init_args}
    return LightningTask(
        module_spec, {"images": "image", "labels": "label"} if module == "PlainModule" else ["image", "label"], "label"
    )


def job_of(folder: Path, data: Path, task: LightningTask, **fields: Any) -> Job:
    return make_job(
        folder, data, logical_workers=4, batch=12, task=task, **(MODULE_OPTIMIZER | {"train__epochs": 2} | fields)
    )


def test_a_module_trains_bit_identically_on_any_workers_after_a_kill_and_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "one", data, task_of(), checkpoint__every_epochs=None, checkpoint__every_steps=3)
    one = train_and_resume(worker_pool, job, (1, 2), ends=(2, 5), resumed=1, killed=1)
    assert one.snapshot.optimizer["param_groups"][0]["momentum"] == 0.9
    assert [step[2] for step in one.steps[:4]] == [0.1, 0.1, 0.1, 0.05], "the module's schedule moves after every step"
    assert job.plan.steps_per_epoch == 9


@pytest.mark.rest
def test_a_value_logged_in_a_step_is_the_mean_over_rows_of_all_workers(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "run", data, task_of(), train__max_steps=9)
    worker_pool.train_to_end(job, 3)
    steps = read_trained_run(job).steps
    logged, rows = [dict(step[-1]) for step in steps], [sum(step[4]) for step in steps]
    assert [set(value) for value in logged] == [{"train.accuracy"}] * 9
    assert rows == [12] * 8 + [1]
    correct = [value["train.accuracy"] * count for value, count in zip(logged, rows, strict=True)]
    assert all(math.isclose(value, round(value), abs_tol=1e-5) for value in correct), (
        "a mean over rows times the number of rows must be a whole number"
    )
    assert 0 < sum(correct) < sum(rows)


def test_the_optimizer_of_the_configuration_replaces_the_modules(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    adam = {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}}
    trained = worker_pool.train_new_run(job_of(tmp_path / "run", data, task_of(), train__epochs=1, **adam), 2)
    assert "betas" in trained.snapshot.optimizer["param_groups"][0]
    assert [step[2] for step in trained.steps] == [0.01] * 9


def test_a_module_without_an_optimizer_trains_with_the_configured_one(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    adam = {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}}
    assert not task_of("PlainModule").has_own_optimizer
    job = job_of(tmp_path / "run", data, task_of("PlainModule"), train__epochs=1, **adam)
    assert worker_pool.train_new_run(job, 1).digests == worker_pool.train_new_run(job, 3).digests


def test_an_evaluation_is_the_mean_over_rows_of_logged_values(data: Path, tmp_path: Path) -> None:
    task = job_of(tmp_path / "run", data, task_of(variant="counts rows")).task
    torch.manual_seed(0)
    model = task.build_model()
    images, labels = torch.rand(25, 1, 8, 8), torch.arange(25) % 5
    arrays = {"image": (images * 255).byte().numpy(), "label": labels.numpy()}
    alone = combine(task, score(task, model, arrays, 10, CPU))
    shared = [chunk for part in (1, 0) for chunk in score(task, model, arrays, 10, CPU, part, 2)]
    assert combine(task, shared) == alone
    right = (model.eval()((images * 255).byte().float() / 255).argmax(1) == labels).float().mean().item()
    assert alone.values.keys() == {"accuracy", "rows", "loss"}
    assert math.isclose(alone.values["accuracy"], right, abs_tol=1e-6)
    assert not model.accuracy.update_called, "the metric of the module must not accumulate from step to step"
    assert alone.values["rows"] == (10 * 10 + 10 * 10 + 5 * 5) / 25


@pytest.mark.parametrize(
    ("logging", "names"),
    [
        ("object", {"auroc", "f1"}),
        ("called, then the object", {"auroc", "f1"}),
        ("what calling returns", {"auroc", "f1"}),
        ("what compute returns", {"auroc", "f1"}),
        ("collection", {"of_auroc", "of_f1"}),
        ("what a collection returns", {"of_auroc", "of_f1"}),
        ("in a dictionary", {"auroc"}),
        ("composed", {"auroc"}),
    ],
)
def test_metrics_of_a_module_cover_all_rows_for_any_batch_size(logging: str, names: set[str]) -> None:
    task = LightningTask(
        {"class_path": MODULES + "Measuring", "init_args": {"logging": logging}}, ["image", "label"], "label"
    )
    task.kinds = {"image": "image", "label": "integer"}
    torch.manual_seed(0)
    model = task.build_model().eval()
    images, labels = torch.rand(13, 1, 8, 8), torch.arange(13) % 4
    arrays = {"image": (images * 255).byte().numpy(), "label": labels.numpy()}
    scores, target = model((images * 255).byte().float() / 255), (labels > 1).long()
    auroc, f1 = (
        float(metric(scores, target)) for metric in (classification.binary_auroc, classification.binary_f1_score)
    )
    expected = {name: f1 if name.endswith("f1") else 1 - auroc if logging == "composed" else auroc for name in names}
    for size in (13, 5, 1):
        values = combine(task, score(task, model, arrays, size, CPU)).values
        assert values == pytest.approx({**expected, "loss": values["loss"]}, abs=1e-6)
        shared = [chunk for part in (2, 0, 1) for chunk in score(task, model, arrays, size, CPU, part, 3)]
        assert combine(task, shared).values == values


@pytest.mark.parametrize("logging", ["of functions", "root"])
def test_a_logged_value_that_is_no_mean_over_rows_is_refused(logging: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a mean over rows.*self\.log\(name, self\.metric\)"):
        prepare(config_of(data, tmp_path, "Measuring", logging=logging))


def test_a_module_that_logs_metrics_is_not_refused(data: Path, tmp_path: Path) -> None:
    assert prepare(config_of(data, tmp_path, "Measuring", logging="object")).warnings == ()


def test_a_mean_metric_as_the_loss_is_the_mean_over_its_weights(data: Path, tmp_path: Path) -> None:
    assert prepare(config_of(data, tmp_path, "TokenMeanLoss")).warnings == ()
    task = LightningTask({"class_path": MODULES + "TokenMeanLoss"}, ["image", "label"], "label")
    task.kinds = {"image": "image", "label": "integer"}
    model = task.build_model().eval()
    images, labels = torch.rand(25, 1, 8, 8), torch.arange(25) % 4
    arrays = {"image": (images * 255).byte().numpy(), "label": labels.numpy()}
    squares = model((images * 255).byte().float() / 255).square()
    expected = float(squares[torch.arange(64) < labels[:, None]].mean().detach())
    # Batches of one row include batches without any token.
    for size in (25, 10, 1):
        values = combine(task, score(task, model, arrays, size, CPU)).values
        assert values == pytest.approx({"loss": expected, "val_loss": expected}, rel=1e-6)


def test_a_metric_logged_in_training_is_computed_per_micro_batch(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "run", data, task_of(variant="logs an object"), train__max_steps=2)
    worker_pool.train_to_end(job, 2)
    for step in read_trained_run(job).steps:
        logged = dict(step[-1])
        assert logged["train.object"] == pytest.approx(logged["train.accuracy"])


@pytest.mark.parametrize("variant", ["alone", "in a list"])
def test_every_form_of_a_single_optimizer_is_accepted(variant: str) -> None:
    task = task_of(variant=variant)
    optimizer, schedule = task.configure_optimizers(task.build_model())
    assert (type(optimizer), schedule) == (torch.optim.SGD, None)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("returns nothing", "Good.training_step returned no loss"),
        ("returns rows", '"training_step\'s loss" is a Tensor of shape (2,); return one number'),
        ("asks", "training_step asks the trainer for current_epoch, but there is no trainer"),
        ("asks", "lightning_modules.py, line"),
        ("counts", "training_step uses batch_idx"),
        ("sums", "is logged with reduce_fx"),
        ("has no validation loss", "validation_step has no loss; return it, or log it as val_loss"),
        ("manual", "sets automatic_optimization to False"),
        ("by epoch", "returned StepLR, interval 'epoch'; a schedule here"),
        ("asks for steps", "configure_optimizers asks the trainer for estimated_stepping_batches"),
        ("every second step", "returned StepLR, interval 'step', frequency 2 (leave it out: let the schedule count"),
        ("by a loss", "returned ReduceLROnPlateau, interval 'epoch', monitor 'val_loss', a value that no step has"),
        ("by a loss every step", "returned ReduceLROnPlateau, interval 'step', monitor 'val_loss', a value that no"),
        ("by a value", "returned StepLR, interval 'step', monitor None, a value that no step has"),
        ("misspells the schedule", "a dictionary with lr_schedule; its fields are optimizer, lr_scheduler, monitor"),
        ("misspells the interval", "a dictionary with intervall; its fields are scheduler, interval, frequency"),
        ("lacks the schedule", "a schedule without scheduler"),
        ("several", "returned 2 optimizers and 0 schedulers"),
        ("counts rows", "'rows', as the evaluation of LightningTask computes it, is not a mean over rows: for a batch"),
    ],
)
def test_unsupported_steps_and_optimizers_are_refused_at_start(
    variant: str, message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(data, tmp_path, "Good", variant=variant))
    assert message in str(caught.value)


def test_a_random_evaluation_value_is_accepted_with_a_warning(data: Path, tmp_path: Path) -> None:
    warnings = [
        warning
        for warning in prepare(config_of(data, tmp_path, "Good", variant="draws")).warnings
        if "the same rows are evaluated again" in warning
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith("'noise', as the evaluation of LightningTask computes it, changes")


@pytest.mark.parametrize(
    ("module", "fields", "message"),
    [
        ("Hooked", {}, "Hooked has on_train_epoch_end, optimizer_step, which only Lightning's trainer calls"),
        ("plain", {}, "creates a Flatten; it must create a module with training_step"),
        ("PlainModule", {}, "has no validation_step, but data.eval_path is set"),
        ("Good", {"train__strategy": "local_sgd"}, "but train.strategy local_sgd needs several"),
    ],
)
def test_unsupported_modules_are_refused(
    module: str, fields: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(data, tmp_path, module, fields))
    assert message in str(caught.value)


def config_of(
    data: Path, tmp_path: Path, module: str, fields: dict[str, Any] | None = None, **init_args: Any
) -> Config:
    batch = {"images": "image", "labels": "label"} if module == "PlainModule" else ["image", "label"]
    task = {"module": {"class_path": MODULES + module, "init_args": init_args}, "batch": batch, "target": "label"}
    return load_config(
        task={"class_path": "ray_app.task.lightning.LightningTask", "init_args": task},
        data__path=str(data),
        data__eval_path=str(data),
        run__storage_path=str(tmp_path / "runs"),
        **(fields or {}),
    )


@pytest.mark.rest
def test_the_lightning_page_trains_on_any_workers_resumes_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = (
        block.text for block in blocks(ROOT / "docs" / "lightning.md") if block.language in ("python", "yaml")
    )
    assert len(code.splitlines() + text.splitlines()) < 60
    (tmp_path / "net.py").write_text(code)
    shutil.copytree(ROOT / "datasets", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    fields = {name: yaml.safe_load(text)[name] for name in ("task", "data", "scaling", "train")}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(fields))
    config = load_config("train.yaml")
    assert prepare(config).job.config.optimizer.class_path == TASK_OPTIMIZER
    check = check_task(config)
    assert levels(check) == all_ok(), str(check)
