"""Studies on a real Ray cluster: slots, kills and continuations change neither a decision nor a parameter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import ray

from ray_app import run_study, run_training
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.variables import DEFAULT_EXPERIMENT
from ray_app.driver.parsing import parse
from ray_app.errors import ConfigError, RunExistsError
from ray_app.models.registry import champion_of
from ray_app.retrain.options import RetrainSection
from ray_app.retrain.retraining import retrain
from ray_app.retrain.rounds import RetrainPaths, read_audit_entries
from ray_app.storage.files import read_json
from ray_app.tune.options import TuneSection
from ray_app.tune.record import StudyPaths, read_record
from ray_app.tune.study import Study, StudyFailedError
from tests.support.mlflow_server import make_database
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")
MakeConfig = Callable[..., Config]

TUNE = {
    "space": {
        "schedule.init_args.max_lr": {"log_uniform": [1.0e-4, 1.0e-1]},
        "train.grad_clip_norm": {"choice": [None, 1.0]},
    },
    "trials": 4,
    "scheduler": {"kind": "halving", "eta": 2, "min_epochs": 1},
}


@pytest.fixture
def make_config(make_short_config: MakeConfig, digits: Path) -> MakeConfig:
    """Makes the configuration of a study of runs of four epochs."""

    def make(**fields: Any) -> Config:
        defaults = {
            "data__eval_path": str(digits / "eval"),
            "train__epochs": 4,
            "train__max_steps": None,
            "checkpoint__every_steps": None,
            "checkpoint__every_epochs": 1,
            "run__name": None,
        }
        return make_short_config(**(defaults | fields))

    return make


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The decisions of the first undisturbed study, with which all others are compared."""
    return {}


@pytest.fixture
def expected(make_config: MakeConfig, reference: dict[str, Any]) -> Any:
    """The decisions of the study with two slots."""
    if not reference:
        study = run_study(make_config(), {**TUNE, "name": "reference", "slots": 2})
        reference.update(decisions=study.record.decisions, winner=study.winner, study=study)
    return reference["decisions"]


def test_the_winner_has_the_parameters_of_a_straight_run(
    make_config: MakeConfig, expected: Any, reference: dict[str, Any]
) -> None:
    study: Study = reference["study"]
    assert study.winner is not None
    assert study.winner.rung == 2
    assert [sum(p[1] == rung for p in expected[1]) for rung in (1, 2)] == [2, 1]
    fields = {name.replace(".", "__"): value for name, value in study.settings.items()}
    config = make_config(run__name="straight", scaling__logical_workers=4, evaluate__half="selection")
    straight = run_training(config.replace(**fields))
    assert straight.summary["world_sizes"] == [[0, 2]]
    result = study.result
    assert result.summary["status"] == "finished"
    assert result.summary["params_digest"] == straight.summary["params_digest"]
    assert result.summary["metrics"] == straight.summary["metrics"]
    assert study.value == result.summary["best"]["value"]
    assert study.record.end is not None
    assert study.record.end["report"] == straight.evaluate(half="report")["accuracy"]
    assert [row["trial"] for row in study.trials] == ["0000", "0001", "0002", "0003"]
    # A trial that only pauses writes no page.
    pages = [paths.report.exists() for number in range(4) for paths in StudyPaths(study.path).runs(number, None)]
    assert pages == [number == study.winner.trial for number in range(4)]


@pytest.mark.parametrize("slots", [1, 4])
def test_decisions_do_not_depend_on_the_number_of_slots(
    make_config: MakeConfig, expected: Any, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trials that are left get more workers at once, although they are short.
    monkeypatch.setattr("ray_app.tune.study._GROW_S", 0.0)
    study = run_study(make_config(), {**TUNE, "slots": slots})
    assert study.record.decisions == expected
    assert {result.workers for result in study.record.results} == ({1} if slots == 1 else {1, 2})


def test_a_killed_driver_and_a_killed_slot_change_nothing(
    make_config: MakeConfig, expected: Any, tmp_path: Path
) -> None:
    config = make_config(run__ray_address=ray.get_runtime_context().gcs_address)
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    (tmp_path / "tune.yaml").write_text(str({"tune": {**TUNE, "slots": 2}}).replace("None", "null"))
    arguments = ["tune", "--config", str(file), "--config", str(tmp_path / "tune.yaml")]
    paths = StudyPaths.of(config, TuneSection())
    driver = subprocess.Popen([sys.executable, "-m", "ray_app", *arguments], cwd=ROOT)
    try:
        wait_until(lambda: (record := read_record(paths)) is not None and len(record.results) >= 1, 120)
    finally:
        driver.kill()
        driver.wait()
    first = read_record(paths)
    assert first is not None
    assert len(first.results) < 7
    killed = list[int]()
    stopped = threading.Event()

    def kill_slot() -> None:
        while not killed and not stopped.wait(0.02):
            for number in range(4):
                [run] = paths.runs(number, None)
                for lease in sorted((Path(str(run.root)) / "fences").glob("*.json"))[-1:]:
                    holder = read_json(lease) or {}
                    # The process of a slot is no child of this one.
                    if not holder.get("released", True) and holder["holder"]["pid"] not in (os.getpid(), driver.pid):
                        killed.append(holder["holder"]["pid"])
                        os.kill(killed[0], signal.SIGKILL)
                        return

    thread = threading.Thread(target=kill_slot)
    thread.start()
    try:
        study = run_study(make_config(), {**TUNE, "slots": 2})
    finally:
        stopped.set()
        thread.join()
    assert killed
    assert study.record.decisions == expected


def test_a_trial_that_fails_is_recorded_and_more_trials_can_follow(make_config: MakeConfig) -> None:
    space = {"task.init_args.model": {"choice": ["small_cnn", "no_such_model"]}}
    tune = {"space": space, "sampler": "grid", "scheduler": {"min_epochs": 2, "eta": 2}, "slots": 2}
    config = make_config(train__epochs=2)
    study = run_study(config, {**tune, "trials": 1})
    assert [row["trial"] for row in study.trials] == ["0000"]
    study = run_study(config, {**tune, "trials": 8})
    [failed] = [result for result in study.record.results if result.has_failed]
    assert (failed.trial, failed.value) == (1, None)
    assert "no_such_model" in str(failed.reason)
    assert study.winner is not None
    assert study.winner.trial == 0
    with pytest.raises(StudyFailedError, match="No trial of the study"):
        run_study(config, {**tune, "name": "spent", "budget": {"hours": 1e-9}})
    with pytest.raises(ConfigError, match="has begun 2 trials already"):
        run_study(config, {**tune, "trials": 1})
    with pytest.raises(RunExistsError, match=r"tune\.scheduler\.eta"):
        run_study(config, {**tune, "scheduler": {"min_epochs": 2, "eta": 3}})


def test_a_study_ends_if_the_first_trials_fail_alike(make_config: MakeConfig) -> None:
    space = {"task.init_args.model": {"choice": ["no_such_model"]}}
    with pytest.raises(StudyFailedError, match=r"The first 2 trials failed with the same error: .*no_such_model"):
        run_study(make_config(), {"space": space, "trials": 2, "slots": 2})


def test_a_setting_of_another_type_is_refused_before_anything_is_written(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refusal:
        run_study(
            make_config(),
            {
                "space": {
                    "data.global_batch_size": {"uniform": [8, 64]},
                    "train.precision": {"choice": ["fp32", "fp12"]},
                    "optimizer.init_args.rate": {"uniform": [0, 1]},
                }
            },
        )
    for text in ("data.global_batch_size, and 8.0 is refused", "'fp12' is refused", "has no argument 'rate'"):
        assert text in str(refusal.value)
    assert not (tmp_path / "runs" / "study").exists()


def test_a_study_is_a_run_of_mlflow_with_a_child_for_each_trial(make_config: MakeConfig, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    config = make_config(train__epochs=1, tracking__enabled=True, tracking__registered_model="digits")
    make_database(Path(config.run.storage_path) / "mlflow.db")
    tune = {"space": {"train.grad_clip_norm": {"choice": [1.0, 2.0]}}, "sampler": "grid", "trials": 2, "slots": 2}
    study = run_study(config, {**tune, "name": "tracked", "register": True})
    client = MlflowClient(default_tracking_uri(config))
    [experiment] = [e for e in client.search_experiments() if e.name == DEFAULT_EXPERIMENT]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["0000 grad_clip_norm 1.0", "0001 grad_clip_norm 2.0", "tracked"]
    parent = runs.pop("tracked")
    assert study.record.end is not None
    expected = {"best_accuracy": study.value, "report_accuracy": study.record.end["report"], "trials": 2.0}
    assert parent.data.metrics == expected
    for run in runs.values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
        assert run.data.metrics["eval_accuracy"] > 0.1
    version = client.get_model_version("digits", "1")
    assert version.tags["ray_app.study_trials"] == "2"
    assert version.tags["ray_app.study"] == str(study.path)
    assert version.tags["ray_app.params_digest"] == study.record.end["params_digest"]
    assert champion_of(client, "digits") == "1"

    # The same study again registers nothing, and the winner of another one is compared with the champion.
    run_study(config, {**tune, "name": "tracked", "register": True})
    worse = config.replace(optimizer__init_args={"lr": 1.0e-6}, schedule=None)
    run_study(worse, {**tune, "name": "worse", "register": True})
    assert champion_of(client, "digits") == "1"
    refused = client.get_model_version("digits", "2")
    assert "the winner of the study worse, the best of 2 trials" in refused.tags["ray_app.trained_because"]
    audit = read_audit_entries(RetrainPaths.of(config))
    assert [(entry["what"], entry["version"]) for entry in audit] == [("promoted", "1"), ("gate refused", "2")]
    # The rows of the gate are those by which nothing was chosen.
    assert audit[0]["figures"]["challenger"] == study.record.end["report"]

    # Retraining continues from there, with the settings of the winner.
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    best = parse(["--config", str(file), "--config", str(study.path / "winner.yaml")], "retrain", False)
    assert best.train.grad_clip_norm == study.settings["train.grad_clip_norm"]
    outcome = retrain(best, RetrainSection())
    assert (outcome.kind, outcome.reason) == ("nothing", "the data is the training data of champion version 1")


def test_a_trial_is_the_mean_over_folds(make_config: MakeConfig) -> None:
    config = make_config(data__eval_path=None, train__epochs=1)
    tune = {"space": {"train.grad_clip_norm": {"choice": [1.0, 2.0]}}, "sampler": "grid", "trials": 2, "slots": 4}
    study = run_study(config, {**tune, "name": "folds", "folds": 2})
    for result in study.record.results:
        runs = [read_json(paths.summary) for paths in StudyPaths(study.path).runs(result.trial, 2)]
        assert list(result.scores) == [summary["best"]["value"] for summary in runs]
        assert result.value == fmean(result.scores)
        assert [summary["rows"] for summary in runs] == [719, 719]
    assert len(study.record.parts) == 4
    assert study.trials[0]["fold 1"] == study.record.newest_results()[0].scores[1]
