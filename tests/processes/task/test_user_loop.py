"""A training loop in user code: it is bit-identical after any kill, and misuse is refused with an explanation."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ray_app import check_task, load_config, run_training
from ray_app.config.import_paths import TASK_OPTIMIZER
from ray_app.errors import ConfigError, TaskError
from ray_app.preflight.changes import read_code_versions
from ray_app.preflight.prepare import prepare
from ray_app.task.user_loop import LoopTask
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Job
from tests.support.bit_identity import train_and_resume
from tests.support.campaign import Campaign
from tests.support.local_world import make_job
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.task_checks import all_ok, levels

SCRIPTS = "tests.support.loop_scripts."


def arguments(evaluate: str = "loss_and_accuracy", **settings: Any) -> dict[str, Any]:
    named = {"train": SCRIPTS + "train", "settings": settings, "evaluate": SCRIPTS + evaluate}
    return {**named, "module": {"class_path": SCRIPTS + "net"}, "rows": ["image", "label"], "target": "label"}


def job_of(folder: Path, data: Path, variant: str = "", log_file: Path | None = None, **fields: Any) -> Job:
    task = LoopTask(**arguments(variant=variant, log_file=str(log_file) if log_file else None))
    fields = {"optimizer": {"class_path": TASK_OPTIMIZER}, "train__epochs": 2, **fields}
    return make_job(folder, data, task=task, **fields)


def test_a_loop_trains_bit_identically_on_any_workers_after_a_kill_and_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    log_file = tmp_path / "log"
    job = job_of(tmp_path / "one", data, log_file=log_file, checkpoint__every_epochs=None, checkpoint__every_steps=3)
    one = train_and_resume(worker_pool, job, (1, 2), ends=(2, 5), resumed=1, killed=1)
    assert log_file.read_text() == "after the loop\n" * (1 + 2 + 1), "the script does not go on after its loop"
    assert [step[2] for step in one.steps[:4]] == [0.1, 0.1, 0.1, 0.05], "the script's schedule moves after every step"
    assert [dict(step[-1]).keys() for step in one.steps] == [{"accuracy"}] * 18


@pytest.mark.rest
def test_survivors_continue_in_their_loops_after_kills_in_any_phase(data: Path, tmp_path: Path) -> None:
    fields = {"train__epochs": 8, "checkpoint__every_epochs": None, "checkpoint__every_steps": 3}
    undisturbed = job_of(tmp_path / "undisturbed", data, **fields)
    Campaign(tmp_path / "none", 0, undisturbed, 3, cache_windows).run(0)
    disturbed = job_of(tmp_path / "disturbed", data, **fields)
    campaign = Campaign(tmp_path / "groups", 3, disturbed, 3, cache_windows)
    campaign.run(12)
    assert campaign.deaths.total() >= 6, "too few workers were killed"
    assert (read_trained_run(disturbed).digests, read_trained_run(disturbed).steps) == (
        read_trained_run(undisturbed).digests,
        read_trained_run(undisturbed).steps,
    )


@pytest.mark.parametrize("variant", ["one for each", "as losses"])
def test_per_row_losses_are_accepted(variant: str, worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data, variant, train__epochs=1)
    assert worker_pool.train_new_run(job, 1).digests == worker_pool.train_new_run(job, 3).digests


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("breaks", "the script left `for step in loop` before it ended"),
        ("leaves the rows", "the script left the rows of a step before their end"),
        pytest.param("adds twice", "step.add was called twice", marks=pytest.mark.rest),
        ("never moves", "called optimizer.step 0 times"),
        pytest.param("moves twice", "called optimizer.step 2 times", marks=pytest.mark.rest),
        pytest.param("moves the schedule", "the script advanced the kept schedule", marks=pytest.mark.rest),
    ],
)
def test_a_misused_loop_ends_the_run_with_an_explanation(
    variant: str, message: str, worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    [ended] = worker_pool.train(job_of(tmp_path / "run", data, variant), 1)
    assert isinstance(ended.error, TaskError)
    assert message in str(ended.error)


def test_the_script_runs_in_the_configured_precision(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    worker_pool.train_to_end(
        job_of(tmp_path / "half", data, "needs bf16", train__max_steps=2, train__precision="bf16"), 2
    )
    [ended] = worker_pool.train(job_of(tmp_path / "full", data, "needs bf16", train__max_steps=2), 1)
    assert "in another precision" in str(ended.error)


def test_an_optimizer_of_the_configuration_is_refused(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    [ended] = worker_pool.train(job_of(tmp_path / "run", data, optimizer={"class_path": "torch.optim.Adam"}), 1)
    assert isinstance(ended.error, ConfigError)
    assert "but the configuration has a Adam" in str(ended.error)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (arguments(variant="keeps nothing"), "the script keeps no optimizer; call loop.keep(optimizer)"),
        (arguments(variant="has no loop"), "the script has no `for step in loop`"),
        (arguments(variant="adds nothing"), "without step.add(loss) for its rows"),
        (arguments(variant="breaks", rows=1), "unexpected keyword argument 'rows'"),
        (arguments("without_loss"), "without_loss returned accuracy, without loss"),
        ({**arguments(), "evaluate": None}, "task.init_args.evaluate is not"),
        ({**arguments(), "target": "depth"}, "name its columns"),
    ],
)
def test_mistakes_in_the_script_are_refused_at_start(
    changed: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    before = threading.active_count()
    config = load_config(
        task={"class_path": "ray_app.task.user_loop.LoopTask", "init_args": changed},
        data__path=str(data),
        data__eval_path=str(data),
        run__storage_path=str(tmp_path / "runs"),
    )
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    assert message in str(caught.value)
    assert threading.active_count() == before, "a loop still waits"


@pytest.mark.parametrize(
    ("variant", "num_warnings"), [("", 0), ("one for each", 0), ("as losses", 0), ("a loss between rows", 1)]
)
def test_a_loss_that_is_no_mean_over_rows_is_a_warning_at_start(
    variant: str, num_warnings: int, data: Path, tmp_path: Path
) -> None:
    config = load_config(
        task={"class_path": "ray_app.task.user_loop.LoopTask", "init_args": arguments(variant=variant)},
        data__path=str(data),
        scaling__max_workers=2,
        run__storage_path=str(tmp_path / "runs"),
    )
    warnings = [warning for warning in prepare(config).warnings if "is not a mean over rows" in warning]
    assert len(warnings) == num_warnings, warnings
    assert all(
        warning.startswith("The loss that the step of LoopTask returns is not a mean over rows") for warning in warnings
    )


@pytest.mark.rest
def test_the_loop_page_trains_on_any_workers_resumes_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {block.argument: block.text for block in blocks(ROOT / "docs" / "loop.md") if block.mark == "file"}
    code, text = files["script.py"], files["train.yaml"]
    assert len(code.splitlines() + text.splitlines()) < 60
    (tmp_path / "script.py").write_text(code)
    (tmp_path / "train.yaml").write_text(text)
    shutil.copytree(ROOT / "datasets", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config("train.yaml")
    assert read_code_versions(
        config.replace(task__init_args={**config.task.init_args, "module": {"class_path": "torch.nn.Flatten"}})
    ).files.keys() == {"script"}, "the file of the functions must be part of the code versions"
    check = check_task(config)
    assert levels(check) == all_ok(), str(check)


@pytest.mark.rest
@pytest.mark.parametrize("page", ["loop", "lightning"])
def test_a_run_of_the_page_resumes_in_mid_epoch(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(ROOT / "docs" / f"{page}.md"):
        if block.mark == "file":
            (tmp_path / block.argument).write_text(block.text)
    shutil.copytree(ROOT / "datasets", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    fields = {
        "train__strategy": "single",
        "scaling__logical_workers": 2,
        "evaluate__where": "workers",
        "tracking__enabled": False,
    }

    def digest(name: str, steps: int) -> str:
        return run_training(load_config("train.yaml", run__name=name, train__max_steps=steps, **fields)).summary[
            "params_digest"
        ]

    threads = threading.active_count()
    first = digest("parts", 30)
    whole = digest("whole", 46)
    assert digest("parts", 46) == whole != first
    assert prepare(load_config("train.yaml", **fields)).job.plan.steps_per_epoch == 23
    assert threading.active_count() == threads, "a loop still waits"
