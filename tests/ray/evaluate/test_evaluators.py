"""Independent evaluators: one that outlives its driver, one of a later job, and several concurrent ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_app import run_training
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.evaluate import main
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.sections import EvaluateSection
from ray_app.errors import ConfigError
from ray_app.evaluate.evaluator import score_on_actors
from ray_app.evaluate.job import EvaluationJob
from ray_app.runlog.evaluations import evaluated_steps, read_evaluations
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.task.metrics import combine
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

DRIVER = """
import sys
from ray_app import run_training
from ray_app.config.config import from_yaml
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks
from tests.support.injector import DelayUntilFile, HoldEvaluations
hooks = Hooks(after_step=DelayUntilFile(sys.argv[2], step=20))
faults = Faults(train=hooks, before_evaluation=HoldEvaluations(sys.argv[3]))
run_training(from_yaml(open(sys.argv[1]).read()), faults=faults)
"""


@contextmanager
def driving(config: Config, folder: Path, go_on: Path, gate: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a driver process on the session's cluster; its training waits at step 20, its evaluator before each
    evaluation.
    """
    path = folder / "config.yaml"
    path.write_text(config.to_yaml())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(path), str(go_on), str(gate)], cwd=ROOT, env=environment
    )
    try:
        yield driver
    finally:
        if driver.poll() is None:
            driver.kill()
        driver.wait(30)


def has_committed(paths: RunPaths, step: int) -> Callable[[], bool]:
    return lambda: any(e.details["step"] == step for e in read_events(paths, "checkpointed"))


def test_the_evaluator_outlives_its_driver_and_closes_the_run(
    ray_cluster: None,
    make_short_config: Callable[..., Config],
    digits: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from mlflow.tracking import MlflowClient

    config = make_short_config(data__eval_path=str(digits / "eval"), tracking__enabled=True, tracking__every_steps=1)
    paths, gate = RunPaths(tmp_path / "runs" / "run"), tmp_path / "gate"
    with driving(config, tmp_path, tmp_path / "never", gate) as driver:
        wait_until(has_committed(paths, 16))
        os.kill(driver.pid, signal.SIGKILL)
        assert driver.wait(20) == -signal.SIGKILL
    assert evaluated_steps(paths) == set()
    assert not paths.summary.exists()
    gate.touch()
    wait_until(paths.summary.exists)
    assert evaluated_steps(paths) == {8, 16}
    [lost] = read_events(paths, "driver_lost")
    assert (lost.details["status"], lost.details["step"]) == ("interrupted", 16)
    client = MlflowClient(default_tracking_uri(config))

    def mlflow_run() -> Any:
        run_id = json.loads(paths.summary.read_text())["mlflow_run_id"]
        return client.get_run(run_id) if run_id else None

    wait_until(lambda: (run := mlflow_run()) is not None and run.info.status == "KILLED")
    history = client.get_metric_history(mlflow_run().info.run_id, "eval_accuracy")
    assert [(m.step, m.value) for m in history] == [(e.step, e.metrics["accuracy"]) for e in read_evaluations(paths)]

    def is_gone() -> bool:
        named = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return not [name for name in named if name.startswith("evaluator-run-") and name.endswith(f"-{lost.fence}")]

    wait_until(is_gone)


def test_a_named_evaluator_of_another_job_follows_a_run(
    ray_cluster: None,
    make_short_config: Callable[..., Config],
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlflow.tracking import MlflowClient

    config = make_short_config(tracking__enabled=True, tracking__every_steps=1)
    paths, go_on = RunPaths(tmp_path / "runs" / "run"), tmp_path / "go-on"
    arguments = ["--run", str(paths.root), "--name", "fresh", "--data", str(digits / "eval"), "--num_cpus", "0.5"]
    with driving(config, tmp_path, go_on, tmp_path / "never") as driver:
        wait_until(has_committed(paths, 16))
        assert main(arguments) == 0
        assert evaluated_steps(paths, "fresh") == {8, 16}, (
            "the committed checkpoints of a running run must be evaluated"
        )
        assert driver.poll() is None
        go_on.touch()
        assert main([*arguments, "--follow"]) == 0
        assert driver.wait(60) == 0
    assert evaluated_steps(paths, "fresh") == {8, 16, 24, 30}
    assert evaluated_steps(paths) == set()
    assert "step 30: accuracy" in capsys.readouterr().out
    run_id = json.loads(paths.summary.read_text())["mlflow_run_id"]
    points = MlflowClient(default_tracking_uri(config)).get_metric_history(run_id, "eval_fresh_accuracy")
    assert sorted(m.step for m in points) == [8, 16, 24, 30], "each point must arrive once, from either process"
    assert list(paths.pins.iterdir()) == [], "a pin of the evaluator stays"


class DiesOnce(TinyImages):
    """Ends the process that first evaluates.

    Args:
        mark: A file that does not exist before.
    """

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def update(self, metrics: Any, outputs: Any, batch: Any) -> None:
        if not Path(self.mark).exists():
            Path(self.mark).touch(exist_ok=False)
            os._exit(1)
        super().update(metrics, outputs, batch)


def test_the_scores_are_the_same_if_one_of_the_actors_dies(ray_cluster: None, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[300, 11]])
    train_job = make_job(tmp_path / "run", data, logical_workers=1, batch=8, task=DiesOnce(str(tmp_path / "died")))
    section = EvaluateSection(batch_size=7, workers=2, num_cpus=0.5)
    job = EvaluationJob(section, train_job.task, train_job.run_root, 1, train_job.source)
    model = job.task.build_model()
    chunks = score_on_actors(job, model.state_dict())
    assert (tmp_path / "died").exists(), "no actor has died"
    alone = score_on_actors(replace(job, section=replace(section, workers=1)), model.state_dict())
    assert sorted(c.low for c in chunks) == sorted(c.low for c in alone)
    assert combine(job.task, chunks) == combine(job.task, alone)


def test_evaluating_an_ended_run_equals_its_own_evaluator(
    ray_cluster: None,
    make_short_config: Callable[..., Config],
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = run_training(make_short_config(data__eval_path=str(digits / "eval")))
    paths = RunPaths(result.path)
    evaluations = read_evaluations(paths)
    assert main(["--run", str(result.path), "--name", "again", "--data", str(digits / "eval")]) == 0
    again = read_evaluations(paths, "again")
    assert [(e.step, e.metrics, e.tables, e.data_digest) for e in again] == [
        (e.step, e.metrics, e.tables, e.data_digest) for e in evaluations
    ]
    assert {c.step for c in CheckpointStore(paths).commits()} == {8, 16, 24, 30}
    capsys.readouterr()
    several = ["--name", "several", "--data", str(digits / "eval"), "--workers", "3", "--num_cpus", "0.5"]
    assert main(["--run", str(result.path), *several]) == 0
    assert [(e.step, e.metrics, e.tables) for e in read_evaluations(paths, "several")] == [
        (e.step, e.metrics, e.tables) for e in evaluations
    ]
    together = result.evaluate(str(digits / "eval"), "newest", workers=2)
    assert together == evaluations[-1].metrics
    # The threads of this process may add in another order than the one thread of an actor.
    assert result.evaluate(str(digits / "eval"), "newest") == pytest.approx(together, rel=1e-6)
    with pytest.raises(ConfigError, match=r"evaluate.workers is 0; it must be at least 1"):
        result.evaluate(str(digits / "eval"), workers=0)
    for arguments, expected in (
        (["--run", str(tmp_path / "nothing")], "is not the directory of a started run"),
        (["--run", str(result.path), "--data", str(digits / "eval")], "set a --name"),
        (["--run", str(result.path), "--name", "a/b"], "use letters"),
        (["--run", str(result.path), "--num_gpus", "1"], "1 GPU, which no node has"),
        (["--run", str(result.path), "--name", "new", "--data", str(tmp_path / "nothing")], "nothing"),
    ):
        assert main(arguments) == 2
        assert expected in capsys.readouterr().err
