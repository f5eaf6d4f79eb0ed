"""Whole runs on a real Ray cluster: neither the number of workers nor their failures change the result."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from ray_app import run_training
from ray_app.checkpoint.format import params_digest
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.variables import DEFAULT_EXPERIMENT
from ray_app.data.disk_cache import INDEX
from ray_app.driver.run import Faults
from ray_app.errors import BudgetSpentError, ConfigError, RunExistsError
from ray_app.runlog.history import read_steps
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks, Job
from tests.support.cluster import record_of
from tests.support.injector import Kill, KillEvaluator
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")
ShortRun = Callable[..., Config]


def assert_tracked_once(config: Config, summary: dict[str, Any], steps: int) -> None:
    """Asserts that there is one finished MLflow run, with one point for each recorded step."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(default_tracking_uri(config))
    [experiment] = [e for e in client.search_experiments() if e.name == DEFAULT_EXPERIMENT]
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (summary["mlflow_run_id"], "FINISHED")
    points = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(point.step for point in points) == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("workers", "cache"),
    [(1, "none"), (2, "none"), pytest.param(3, "memory", marks=pytest.mark.guarantee), (4, "disk")],
)
def test_results_are_bit_identical_for_any_number_of_workers(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path, workers: int, cache: str
) -> None:
    more = {"data__cache_dir": str(tmp_path / "cache")} if cache == "disk" else {}
    config = make_short_config(scaling__min_workers=workers, scaling__max_workers=workers, data__cache=cache, **more)
    summary = run_training(config).summary
    assert summary["status"] == "finished"
    assert summary["world_sizes"] == [[0, workers]]
    assert summary["params_digest"] == reference_run["params_digest"]
    assert record_of(tmp_path / "runs" / "run") == reference_run["record"]
    assert summary["rows"] == reference_run["rows"] == sum(sum(rows) for _, _, rows, _ in reference_run["record"])
    if cache == "disk":
        [index] = (tmp_path / "cache").glob(f"*/{INDEX}")
        assert np.fromfile(index, np.uint64).all(), "a row is not cached after the first epoch"


@pytest.mark.parametrize(
    "shared", [{"data__cache": "memory"}, {"evaluate__where": "workers", "data__cache": "disk"}], ids=str
)
def test_decoded_data_larger_than_the_object_stores_is_refused(
    make_short_config: ShortRun, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: dict[str, str]
) -> None:
    nodes = [node | {"Resources": node["Resources"] | {"object_store_memory": 2000.0}} for node in ray.nodes()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with pytest.raises(
        ConfigError, match=r"data\.cache: memory, evaluate\.where: workers\) needs 0\.\d MB .* has 0\.0 MB"
    ):
        run_training(make_short_config(data__eval_path=str(digits / "eval"), **shared))
    assert not (tmp_path / "runs").exists(), "the refused run wrote files"


def test_a_killed_worker_does_not_change_the_result(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    kill = Kill(str(tmp_path / "killed"), step=13, rank=1)
    config = make_short_config(
        scaling__min_workers=2, scaling__max_workers=2, tracking__enabled=True, tracking__every_steps=1
    )
    summary = run_training(config, faults=Faults(train=Hooks(after_step=kill))).summary
    assert kill.num_fired == 1
    assert summary["restarts"]["failures"] == 1
    assert_tracked_once(config, summary, steps=30)
    assert summary["redone_steps"] == 0
    assert [0 < recovery_s < 60 for recovery_s in summary["recovery_s"]] == [True]
    assert summary["params_digest"] == reference_run["params_digest"]
    assert record_of(tmp_path / "runs" / "run") == reference_run["record"]


def test_restarting_a_finished_run_repairs_a_damaged_last_checkpoint(make_short_config: ShortRun) -> None:
    config = make_short_config(train__strategy="single", scaling__min_workers=1, scaling__max_workers=1)
    finished = run_training(config)
    paths = RunPaths(finished.path)
    model = paths.checkpoint(30, 1) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:100])
    again = run_training(config)
    [fallback] = read_events(paths, "fallback")
    assert fallback.details["checkpoint"] == "step-00000030-0001"
    assert "has 100 bytes" in fallback.details["reason"]
    assert again.status == "finished"
    assert again.summary["params_digest"] == finished.summary["params_digest"]
    assert (paths.checkpoint(30, 2) / "model.safetensors").stat().st_size > 100


def test_another_configuration_under_the_same_name_is_refused(make_short_config: ShortRun, tmp_path: Path) -> None:
    run_training(make_short_config(train__max_steps=2))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    with pytest.raises(RunExistsError, match=r"\+ seed: 5"):
        run_training(make_short_config(train__max_steps=2, seed=5))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


@pytest.mark.rest
def test_a_killed_evaluator_does_not_change_the_result(
    make_short_config: ShortRun, reference_run: dict[str, Any], digits: Path, tmp_path: Path
) -> None:
    kill = KillEvaluator(str(tmp_path / "killed"), step=16)
    config = make_short_config(
        scaling__min_workers=2, scaling__max_workers=2, data__eval_path=str(digits / "eval"), checkpoint__keep_last=2
    )
    result = run_training(config, faults=Faults(before_evaluation=kill))
    assert Path(kill.proof).exists()
    assert result.summary["params_digest"] == reference_run["params_digest"]
    evaluated = Counter(e.details["step"] for e in read_events(RunPaths(result.path), "evaluated"))
    assert evaluated == Counter([8, 16, 24, 30])
    assert [e.step for e in result.evaluations()] == [8, 16, 24, 30]
    assert result.summary["restarts"]["failures"] == 0
    assert params_digest(dict(result.load_model("newest").state_dict())) == reference_run["params_digest"]


def test_the_failure_budget_ends_a_run(make_short_config: ShortRun, tmp_path: Path) -> None:
    kill = Kill(str(tmp_path / "killed"), step=3, rank=0)
    config = make_short_config(failure__max_failures=0, scaling__min_workers=1, scaling__max_workers=1)
    with pytest.raises(BudgetSpentError, match=r"failure\.max_failures allows 0"):
        run_training(config, faults=Faults(train=Hooks(after_step=kill)))
    assert kill.num_fired == 1


def test_no_process_trains_on_after_the_driver_abandons_a_run(make_short_config: ShortRun) -> None:
    """A second Ctrl+C abandons a run; the cluster and the driver's process with the controller live on."""

    alive = set[str]()

    def interrupt(job: Job) -> None:
        if read_steps(job.paths).records:
            alive.update(a["ActorClassName"] for a in ray._private.state.actors().values() if a["State"] == "ALIVE")
            raise KeyboardInterrupt

    result = run_training(make_short_config(train__max_steps=20_000), observe=interrupt)
    assert result.status == "interrupted"
    assert "RayTrainWorker" in alive
    assert not {"ElasticController", "TrainController", "SynchronizationActor"} & alive, (
        "processes that every start would wait for stay alive"
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "fit"]
    wait_until(
        lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"],
        "the workers' CPUs were not free",
    )
