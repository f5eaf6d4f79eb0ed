"""Evaluation and training on real Ray: early stopping, evaluation by the workers, concurrent and late evaluation."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ray_app import run_training
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.driver import services
from ray_app.driver.run import Faults, open_run
from ray_app.errors import EvaluationError
from ray_app.runlog.evaluations import Evaluation, read_evaluations
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import read_json
from ray_app.train.job import Hooks
from tests.support.injector import DelayEvaluation, DelayUntilEvent, HoldEvaluations, Kill, KillAtPhase
from tests.support.waiting import wait_until


@pytest.fixture
def evaluated_run(digits: Path, make_short_config: Callable[..., Config]) -> Callable[..., Config]:
    def make(**fields: Any) -> Config:
        return make_short_config(
            **{"data__eval_path": str(digits / "eval"), "checkpoint__every_steps": 4, "checkpoint__keep_last": 2}
            | fields
        )

    return make


def outcome_of(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        name: summary[name] for name in ("status", "steps", "rows", "params_digest", "best", "stopped_early", "metrics")
    }


def test_the_result_of_early_stopping_depends_on_neither_lag_nor_workers(
    ray_cluster: None, evaluated_run: Callable[..., Config], tmp_path: Path
) -> None:
    judged = {
        "evaluate__patience": 2,
        "evaluate__min_delta": 0.5,
        "evaluate__metric": "accuracy",
        "train__epochs": 6,
        "train__max_steps": 100,
    }
    proof = tmp_path / "killed"
    waits = DelayUntilEvent(str(tmp_path / "runs" / "at-once"), "evaluated", {"step": 12}, after=13, each_s=60)
    runs = {
        "at once": (
            evaluated_run(run__name="at-once", scaling__max_workers=1, **judged),
            Faults(train=Hooks(after_step=waits)),
        ),
        "late": (
            evaluated_run(run__name="late", **judged),
            Faults(before_evaluation=DelayEvaluation(str(tmp_path / "runs" / "late"), 100)),
        ),
        "killed": (evaluated_run(run__name="killed", **judged), Faults(train=Hooks(after_step=Kill(str(proof), 6, 0)))),
    }
    results = {name: run_training(config, faults=faults) for name, (config, faults) in runs.items()}
    expected = outcome_of(results["at once"].summary)
    assert expected["status"] == "stopped_early"
    assert expected["stopped_early"] is not None
    assert expected["steps"] == expected["stopped_early"]["step"] < 40
    for name, result in results.items():
        assert outcome_of(result.summary) == expected, name
        best = result.best_checkpoint
        assert best is not None
        assert int(best.name.split("-")[1]) == expected["stopped_early"]["best_step"], (
            "the result must be the best checkpoint"
        )
    newest = {name: CheckpointStore(RunPaths(result.path)).commits()[-1].step for name, result in results.items()}
    assert newest["at once"] < 80 < newest["late"] == 100, "training must run ahead of a late evaluation, to its end"
    assert proof.with_name("killed-0").exists()
    again = run_training(runs["late"][0])
    assert outcome_of(again.summary) == expected, "a start of the stopped run must not train"
    assert [e.fence for e in read_events(RunPaths(again.path), "formed")] == [1]


def comparable_values(evaluations: list[Evaluation]) -> list[tuple[Any, ...]]:
    return [
        (e.step, e.epoch, e.params_digest, e.metrics, e.tables, e.rows, e.data_digest, e.examples) for e in evaluations
    ]


def test_evaluations_of_workers_and_evaluator_are_bit_identical(
    ray_cluster: None, evaluated_run: Callable[..., Config], tmp_path: Path
) -> None:
    """The run has two ends of epochs: step 23, and its end at step 30. The two workers get data that is too big for one
    read task.
    """
    every = {"checkpoint__every_steps": None, "checkpoint__every_epochs": 1, "evaluate__batch_size": 16}
    proofs = KillAtPhase(str(tmp_path / "killed"), "evaluate", 1, 23)
    runs = {
        "actor": (evaluated_run(run__name="actor", **every), Faults()),
        "one worker": (
            evaluated_run(run__name="one", evaluate__where="workers", scaling__max_workers=1, **every),
            Faults(),
        ),
        "two workers": (
            evaluated_run(
                run__name="two", evaluate__where="workers", scaling__min_workers=2, data__read_task_mb=0.02, **every
            ),
            Faults(train=Hooks(at=proofs)),
        ),
    }
    results = {name: run_training(config, faults=faults) for name, (config, faults) in runs.items()}
    expected = comparable_values(read_evaluations(RunPaths(results["actor"].path)))
    assert [step for step, *_ in expected] == [23, 30]
    for name, result in results.items():
        assert comparable_values(read_evaluations(RunPaths(result.path))) == expected, name
        assert result.summary["params_digest"] == results["actor"].summary["params_digest"], name
    assert proofs.num_fired == 1
    [first, *_] = read_evaluations(RunPaths(results["actor"].path))
    assert first.rows == sum(map(sum, first.tables["confusion_matrix"]))
    assert len(first.tables["recall"]) == len(first.classes) == 10
    assert first.examples, "there must be wrong digits after one epoch"
    assert first.examples[0]["image"].startswith("data:image/png;base64,")


@pytest.mark.parametrize("ends", ["it is stopped", "the time is up"])
def test_a_run_without_its_last_evaluations_is_not_finished(
    ray_cluster: None, evaluated_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The missing evaluations may find that an earlier checkpoint is the best; the next start runs them."""
    fields = {} if ends == "it is stopped" else {"evaluate__patience": 5}
    monkeypatch.setattr(services, "_DRAIN_TIMEOUT_S", 60.0 if not fields else 0.5)
    config, go_on = evaluated_run(**fields), tmp_path / "go-on"
    store = CheckpointStore(RunPaths(tmp_path / "runs" / "run"))
    with (
        open_run(
            config, Console(file=StringIO()), Faults(before_evaluation=HoldEvaluations(str(go_on))), background=True
        ) as run,
        ThreadPoolExecutor(1) as pool,
    ):
        result = pool.submit(run.run)
        if not fields:
            wait_until(lambda: any(commit.step == 30 for commit in store.commits()), "the last step is not there")
            run.stop()
        summary = result.result(120).summary
    assert (summary["status"], summary["steps"]) == ("interrupted", 30)
    assert read_evaluations(RunPaths(tmp_path / "runs" / "run")) == []
    go_on.touch()
    monkeypatch.setattr(services, "_DRAIN_TIMEOUT_S", 60.0)
    again = run_training(config)
    assert (again.summary["status"], again.summary["params_digest"]) == ("finished", summary["params_digest"])
    assert read_evaluations(RunPaths(again.path))[-1].step == 30
    with open_run(config, Console(file=StringIO()), background=True) as run:
        run.stop()
        assert run.run().summary["status"] == "finished", "a run without remaining work must be finished"


def test_a_run_with_a_failed_evaluator_raises_its_error(
    ray_cluster: None, evaluated_run: Callable[..., Config], tmp_path: Path
) -> None:
    task = {"class_path": "tests.support.late_mistake.LateMistake", "init_args": {"pixel_max": 16.0}}
    with pytest.raises(EvaluationError, match=r"ray-app evaluate --run") as caught:
        run_training(evaluated_run(task=task, train__max_steps=8), Console(file=StringIO()))
    assert "KeyError: 'labels' (late_mistake.py, line " in str(caught.value)
    assert "in update" in str(caught.value)
    summary = read_json(RunPaths(tmp_path / "runs" / "run").summary)
    assert (summary["status"], summary["steps"]) == ("failed", 8)
