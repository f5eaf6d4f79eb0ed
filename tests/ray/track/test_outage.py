"""Real runs while the MLflow server is frozen, killed, failing, silent or absent: no step waits, and each point arrives
once, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_app import run_training
from ray_app.cli.track import main as track
from ray_app.config.config import Config
from ray_app.driver import run as run_module
from ray_app.driver.run import Faults
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.journal import StepRecord, read_records
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import read_json
from ray_app.train.job import Hooks, Job
from tests.support.injector import HoldSteps
from tests.support.mlflow_server import ERROR_500, BrokenServer, MlflowServer, metric_history, mlflow_runs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS, PHASE = 60, 10
_REQUEST_S = 6.0
"""Timeout of a call to MLflow; a step takes some ten milliseconds, even on a busy machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{_REQUEST_S:g}")


def records_of(paths: RunPaths) -> dict[int, StepRecord]:
    records, _ = read_records(paths)
    return dict(sorted(records.items()))


def assert_all_sent(paths: RunPaths, uri: str, status: str = "FINISHED") -> Any:
    """Asserts that MLflow has each point of the run's own record exactly once, with its time, in order."""
    [run] = mlflow_runs(uri, paths.name)
    assert run.info.status == status
    run_id, records = run.info.run_id, records_of(paths)
    for metric in ("loss", "lr", "grad_norm", "step_ms", "data_wait_ms", "rows_per_s", "workers", "restarts"):
        assert [(step, at) for step, at, _ in metric_history(uri, run_id, metric)] == [
            (n, int(r.time_s * 1e3)) for n, r in records.items()
        ]
    assert [value for _, _, value in metric_history(uri, run_id, "step_ms")] == [r.step_ms for r in records.values()]
    evaluations = read_evaluations(paths)
    evaluation_points = metric_history(uri, run_id, "eval_accuracy") if evaluations else []
    assert evaluation_points == [(e.step, int(e.time_s * 1e3), e.metrics["accuracy"]) for e in evaluations]
    sent = {name for name in run.data.metrics if not name.startswith("eval_")}
    assert sent - {"imbalance"} == {
        "loss",
        "lr",
        "grad_norm",
        "step_ms",
        "data_wait_ms",
        "rows_per_s",
        "workers",
        "restarts",
    }
    imbalances = [(n, r.imbalance) for n, r in records.items() if r.imbalance is not None]
    assert [(step, value) for step, _, value in metric_history(uri, run_id, "imbalance")] == imbalances
    return run


class Outages:
    """Changes the state of the server between the phases, called by the driver when it observes the run."""

    def __init__(self, folder: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture) -> None:
        self.folder = folder
        self.server = server
        self.caplog = caplog
        self.next = 1
        self.stub: BrokenServer | None = None
        self.requests: list[int] = []
        self.num_warnings = 0

    def __call__(self, job: Job) -> None:
        if self.next * PHASE in records_of(job.paths) and self.next * PHASE < STEPS:
            getattr(self, f"after_{self.next}")(job)
            (self.folder / str(self.next * PHASE)).touch()
            self.next += 1

    def after_1(self, job: Job) -> None:
        wait_until(lambda: (read_json(job.paths.tracking) or {}).get("sent_step") == PHASE)
        self.server.freeze()

    def after_2(self, job: Job) -> None:
        wait_until(lambda: "training continues" in self.caplog.text)
        self.server.thaw()
        wait_until(lambda: read_json(job.paths.tracking)["sent_step"] == 2 * PHASE)
        # On a busy machine, answers can time out, so there may be several warnings.
        self.num_warnings = self.caplog.text.count("training continues")
        self.server.kill()

    def after_3(self, job: Job) -> None:
        wait_until(lambda: self.caplog.text.count("training continues") > self.num_warnings)
        self.stub = BrokenServer(self.server.port, ERROR_500)

    def after_4(self, job: Job) -> None:
        self.replace_stub(None)

    def after_5(self, job: Job) -> None:
        self.replace_stub(False)
        assert read_json(job.paths.tracking)["sent_step"] == 2 * PHASE
        self.server.start()

    def replace_stub(self, answer: bytes | bool | None) -> None:
        stub = self.stub
        assert stub is not None
        wait_until(lambda: stub.num_requests > 0)
        self.requests.append(stub.num_requests)
        stub.close()
        self.stub = None if answer is False else BrokenServer(self.server.port, answer)


@pytest.mark.rest
def test_outages_delay_no_step_and_lose_or_double_no_point(
    make_short_config: Callable[..., Config],
    digits: Path,
    tmp_path: Path,
    server: MlflowServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_short_config(
        tracking__enabled=True,
        tracking__uri=server.uri,
        tracking__every_steps=1,
        train__epochs=3,
        train__max_steps=STEPS,
        data__eval_path=str(digits / "eval"),
    )
    outages = Outages(tmp_path, server, caplog)
    summary = run_training(
        config, faults=Faults(train=Hooks(after_step=HoldSteps(str(tmp_path), PHASE, STEPS))), observe=outages
    ).summary
    assert outages.next * PHASE == STEPS
    assert len(outages.requests) == 2
    paths = RunPaths(tmp_path / "runs" / "run")
    run = assert_all_sent(paths, server.uri)
    assert summary["mlflow_run_id"] == run.info.run_id
    # Steps after a gate have waited for the test.
    step_times_ms = [r.step_ms for n, r in records_of(paths).items() if n > 1 and n % PHASE != 1]
    assert max(step_times_ms) < 1e3 * _REQUEST_S, "a step waited for a call to MLflow"
    assert_inputs(run, config)


def assert_inputs(run: Any, config: Config) -> None:
    data_sets = {
        next(t.value for t in i.tags if t.key == "mlflow.data.context"): i.dataset for i in run.inputs.dataset_inputs
    }
    assert data_sets.keys() == {"training", "evaluation"}
    whole = run.data.tags["ray_app.manifest_digest"]
    assert data_sets["training"].digest == whole[:36]
    assert f'"manifest_digest": "{whole}"' in data_sets["training"].profile
    assert '"num_rows": 1438' in data_sets["training"].profile
    assert '"num_rows": 359' in data_sets["evaluation"].profile
    assert config.data.path in data_sets["training"].source


def test_a_run_without_mlflow_is_replayed_later(
    make_short_config: Callable[..., Config],
    tmp_path: Path,
    server: MlflowServer,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "_TRACKING_END_S", 0.5)
    absent = MlflowServer(tmp_path)
    fields = {"tracking__enabled": True, "tracking__every_steps": 1, "run__name": "absent"}
    result = run_training(make_short_config(**fields, tracking__uri=absent.uri, tracking__experiment="first"))
    assert result.status == "finished"
    assert result.summary["mlflow_run_id"] is None
    [command] = re.findall(r"ray-app track --replay (\S+)", caplog.text)
    assert command == str(tmp_path / "runs" / "absent")

    assert track(["--replay", command]) == 1
    assert f"MLflow at {absent.uri} did not accept the whole record" in capsys.readouterr().err
    assert track(["--replay", str(tmp_path)]) == 2
    assert "is not the directory of a started run" in capsys.readouterr().err

    paths = RunPaths(tmp_path / "runs" / "absent")
    assert track(["--replay", command, "--uri", server.uri, "--experiment", "second"]) == 0
    assert "Sent 30 points, 0 of them evaluations" in capsys.readouterr().out
    run = assert_all_sent(paths, server.uri)
    assert read_json(paths.summary)["mlflow_run_id"] == run.info.run_id
    assert track(["--replay", command]) == 0, "a replay must use the last server"
    assert "Sent 0 points" in capsys.readouterr().out
    assert_all_sent(paths, server.uri)
    assert read_json(paths.summary)["restarts"]["driver"] == 0
    from mlflow.tracking import MlflowClient

    assert MlflowClient(server.uri).get_experiment(run.info.experiment_id).name == "second"
    assert {a.path for a in MlflowClient(server.uri).list_artifacts(run.info.run_id)} >= {"config.yaml", "summary.json"}
