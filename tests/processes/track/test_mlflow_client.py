"""The tracker with real MLflow: each point arrives once, in order and exactly as recorded, after any failure of MLflow
or the driver.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ray_app.config.config import Config, default_tracking_uri, digest
from ray_app.config.variables import DEFAULT_EXPERIMENT
from ray_app.errors import ConfigError
from ray_app.runlog.evaluations import evaluated_steps, evaluator_names, read_evaluations
from ray_app.runlog.journal import Event, put_event
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import put_json, read_json
from ray_app.track.mlflow_client import RUN_EVALUATOR, Backlog, DataSet, OpenRun, SentState, connect
from ray_app.track.tracker import Tracker, check_available, make_run_tags
from tests.support.mlflow_server import MlflowServer, make_database
from tests.support.recorded_run import BASE_S, EVERY, History, RecordedRun
from tests.support.waiting import wait_until


def client_of(run: RecordedRun) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=default_tracking_uri(run.config))


def only_mlflow_run(run: RecordedRun) -> Any:
    client = client_of(run)
    experiment = client.get_experiment_by_name(DEFAULT_EXPERIMENT)
    (mlflow_run,) = [r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == run.paths.name]
    return mlflow_run


def histories(run: RecordedRun, run_id: str) -> dict[str, History]:
    """Returns every point in MLflow as (step, time, value), in the order in which a reader gets them."""
    client = client_of(run)
    names = client.get_run(run_id).data.metrics
    return {name: [(m.step, m.timestamp, m.value) for m in client.get_metric_history(run_id, name)] for name in names}


def assert_tracked(run: RecordedRun, last: int, status: str) -> None:
    mlflow_run = only_mlflow_run(run)
    assert mlflow_run.info.status == status
    points_of, expected = histories(run, mlflow_run.info.run_id), run.expected_points(last)
    assert points_of.keys() == expected.keys()
    for name, points in expected.items():
        assert repr(sorted(points_of[name])) == repr([(step, at, float(value)) for step, at, value in points]), name
        assert [step for step, _, _ in points_of[name]] == [step for step, _, _ in points], name


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture
def run(tmp_path: Path, store: str) -> RecordedRun:
    return RecordedRun(tmp_path / f"run-{tmp_path.name}", store)


@pytest.mark.rest
def test_runs_that_start_at_once_create_one_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    program = (
        "import sys; import mlflow.store.tracking.sqlalchemy_store; from ray_app.track.mlflow_client import connect\n"
        "print('ready', flush=True); sys.stdin.readline(); connect(sys.argv[1]).create_experiment(sys.argv[2])"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, uri, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0, 0]
    assert {experiment.name for experiment in connect(uri).search_experiments()} == {"Default", "a", "b"}


def test_a_run_is_tracked_from_start_to_end(run: RecordedRun) -> None:
    tracker = run.tracker({"kind": "test", "from": "http://me:secret@git/x"})
    put_event(run.paths, "failed", 1, number=1)
    run.record(1, 44, flush_s=0.02, losses={13: math.nan})
    run.evaluate(20)
    wait_until(lambda: (read_json(run.paths.tracking) or {}).get("sent_step") == 40)
    assert tracker.run_id == read_json(run.paths.tracking)["run_id"]
    run.record(45, 57)
    run.evaluate(57, accuracy=math.nan)
    run.paths.summary.write_text('{"status": "finished"}')
    run.paths.report.write_text("<!DOCTYPE html>")
    assert tracker.close("FINISHED", 20)
    assert tracker.close("FINISHED", 20)
    assert_tracked(run, 57, "FINISHED")
    assert_described(run)


def test_a_run_takes_the_mlflow_run_of_the_environment_or_becomes_its_child(
    run: RecordedRun, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(store)
    experiment_id = client.create_experiment(f"env-{tmp_path.name}")
    env_id, open_id = (client.create_run(experiment_id).info.run_id for _ in range(2))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
    monkeypatch.setenv("MLFLOW_RUN_ID", env_id)
    others = [RecordedRun(tmp_path / name, store) for name in ("second", "third", "fourth")]
    run_ids = []
    for recorded, open_run in zip(
        (run, *others),
        (
            OpenRun.find(store),
            *(OpenRun(a, b, experiment_id) for a, b in ((env_id, None), ("gone", open_id), (None, None))),
        ),
        strict=True,
    ):
        tracker = Tracker(recorded.paths, recorded.config, {}, open_run=open_run)
        tracker.start()
        assert tracker.close("FINISHED", 20)
        run_ids.append(tracker.run_id)
    assert run_ids[0] == env_id
    mlflow_runs = [client.get_run(run_id) for run_id in run_ids]
    assert [one.data.tags.get("mlflow.parentRunId") for one in mlflow_runs] == [None, env_id, open_id, None]
    assert {one.info.experiment_id for one in mlflow_runs} == {experiment_id}
    # The next driver has another environment.
    again = run.tracker()
    assert again.close("FINISHED", 20)
    assert again.run_id == env_id


def assert_described(run: RecordedRun) -> None:
    mlflow_run, client = only_mlflow_run(run), client_of(run)
    data = mlflow_run.data
    assert data.params["scaling.max_workers"] == "2"
    assert data.params["task.init_args.source"] == "s3://***@bucket/x"
    assert data.params["task.init_args.token"] == "***"
    assert data.tags["kind"] == "test"
    assert data.tags["from"] == "http://***@git/x"
    assert data.tags["ray_app.run_root"] == str(run.paths.root)
    assert [f.path for f in client.list_artifacts(mlflow_run.info.run_id)] == [
        "config.yaml",
        "evaluations",
        "report.html",
        "summary.json",
    ]
    assert "secret" not in Path(client.download_artifacts(mlflow_run.info.run_id, "config.yaml")).read_text()


def test_each_evaluator_has_its_own_metrics(run: RecordedRun) -> None:
    run.record(1, 20)
    run.evaluate(10)
    run.evaluate(10, "robust")
    older = {"run_uuid": "abc", "evaluations": [10]}
    put_json(run.paths.tracking, older)
    tracker = run.tracker()
    wait_until(lambda: read_json(run.paths.tracking)["evaluations"] == {"": [10], "robust": [10]})
    run.evaluate(20, "robust", accuracy=0.5)
    run.evaluate(20, "fair")
    assert evaluator_names(run.paths) == ["fair", "robust"]
    assert evaluated_steps(run.paths, "robust") == {10, 20} != evaluated_steps(run.paths)
    assert [e.step for e in read_evaluations(run.paths, "robust")] == [10, 20]
    assert tracker.close("FINISHED", 20)
    # The older cursor states that MLflow has this evaluation.
    del run.evaluations[0]
    assert_tracked(run, 20, "FINISHED")


def test_a_late_tracker_adds_missing_entries_and_changes_none(run: RecordedRun) -> None:
    run.record(1, 12)
    assert run.tracker({"commit": "a"}).close("FAILED", 20)
    run.record(13, 20)
    for path in ("s3://me:secret@bucket/digits/train", "/moved/digits/train"):
        data = DataSet("training", path, "d" * 64, 5)
        late = Tracker(
            run.paths,
            run.config.replace(scaling__max_workers=1),
            {"commit": "b", "more": "c"},
            EVERY,
            [data],
            is_over=True,
        )
        late.send_all("KILLED")
    assert (late.sent_points, late.sent_evaluations) == (0, 0)
    assert_tracked(run, 20, "KILLED")
    mlflow_run = only_mlflow_run(run)
    assert (
        mlflow_run.data.tags["commit"],
        mlflow_run.data.tags["more"],
        mlflow_run.data.params["scaling.max_workers"],
    ) == ("a", "c", "2")
    assert not [name for name in mlflow_run.data.tags if "resumed_with" in name]
    [logged] = mlflow_run.inputs.dataset_inputs
    assert (logged.dataset.name, logged.dataset.digest) == ("digits/train", "d" * 36)
    assert (logged.dataset.source, json.loads(logged.dataset.profile)) == (
        '{"uri": "s3://***@bucket/digits/train"}',
        {"num_rows": 5, "manifest_digest": "d" * 64},
    )


def test_the_newest_evaluation_of_each_evaluator_is_an_artifact(run: RecordedRun) -> None:
    run.record(1, 20)
    run.evaluate(10)
    run.evaluate(20)
    run.evaluate(10, "robust")
    (run.paths.root / "report.html").write_text("<p>http://me:secret@host</p>")
    assert run.tracker().close("FINISHED", 20)
    client, mlflow_run = client_of(run), only_mlflow_run(run)
    assert [f.path for f in client.list_artifacts(mlflow_run.info.run_id, "evaluations")] == [
        "evaluations/robust",
        "evaluations/step-00000020.json",
    ]
    assert [f.path for f in client.list_artifacts(mlflow_run.info.run_id, "evaluations/robust")] == [
        "evaluations/robust/step-00000010.json"
    ]
    assert (
        Path(client.download_artifacts(mlflow_run.info.run_id, "report.html")).read_text() == "<p>http://***@host</p>"
    )


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_an_unfinished_block_of_steps_is_sent_after_the_resume(run: RecordedRun, status: Any) -> None:
    run.record(1, 14)
    assert run.tracker().close(status, 20)
    assert_tracked(run, 10, status)
    run.record(15, 25)
    assert run.tracker().close("FINISHED", 20)
    assert_tracked(run, 25, "FINISHED")


def test_the_next_driver_continues_the_same_run(run: RecordedRun) -> None:
    first = run.tracker({"commit": "a"})
    run.record(1, 35)
    run.evaluate(30)
    assert first.close("FAILED", 20)
    put_event(run.paths, "failed", 1, number=1)
    second = run.tracker({"commit": "b"}, scaling__max_workers=1)
    run.record(21, 60, fence=2)
    wait_until(lambda: read_json(run.paths.tracking)["sent_step"] == 60)
    mlflow_run = only_mlflow_run(run)
    assert mlflow_run.info.run_id == first.run_id == second.run_id
    assert mlflow_run.info.status == "RUNNING"
    assert second.close("FINISHED", 20)
    assert_tracked(run, 60, "FINISHED")
    third = run.tracker({"commit": "b"})
    assert third.close("FINISHED", 20)
    assert_tracked(run, 60, "FINISHED")
    data = only_mlflow_run(run).data
    assert (data.params["scaling.max_workers"], data.tags["ray_app.resumed_with.scaling.max_workers"]) == ("2", "2")
    assert (data.tags["commit"], data.tags["ray_app.resumed_with.commit"]) == ("a", "b")


def test_a_crash_before_the_cursor_is_stored_doubles_no_point(run: RecordedRun) -> None:
    run.record(1, 20, losses={3: math.nan})
    assert run.tracker().close("FAILED", 20)
    older = read_json(run.paths.tracking)
    run.record(16, 1100, fence=2)
    run.evaluate(20)
    assert run.tracker().close("FAILED", 20)
    assert_tracked(run, 1100, "FAILED")
    put_json(run.paths.tracking, older)
    assert run.tracker().close("FAILED", 20)
    assert_tracked(run, 1100, "FAILED")
    put_json(run.paths.tracking, {"run_uuid": older["run_uuid"]})
    last = run.tracker()
    assert last.close("FINISHED", 20)
    assert last.run_id == older["run_id"]
    assert_tracked(run, 1100, "FINISHED")


@pytest.mark.rest
def test_a_run_deleted_in_mlflow_is_sent_completely_to_a_new_one(
    run: RecordedRun, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = run.tracker()
    run.record(1, 20)
    wait_until(lambda: (read_json(run.paths.tracking) or {}).get("sent_step") == 20)
    old = tracker.run_id
    client_of(run).delete_run(old)
    run.record(21, 30)
    wait_until(lambda: tracker.run_id != old)
    assert tracker.close("FINISHED", 20)
    assert "lacks the run" in caplog.text
    assert_tracked(run, 30, "FINISHED")


@pytest.mark.rest
def test_the_default_database_is_in_the_storage_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    run = RecordedRun(tmp_path / "not yet" / "first", "")
    run.config = run.config.replace(tracking__uri=None)
    run.record(1, 10)
    assert run.tracker().close("FINISHED", 30)
    assert (tmp_path / "not yet" / "mlflow.db").is_file()
    assert_tracked(run, 10, "FINISHED")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "INFO" not in capfd.readouterr().err


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path)
    yield server
    server.kill()


@pytest.mark.rest
def test_outages_of_a_server_neither_lose_nor_double_points(
    server: MlflowServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RecordedRun(tmp_path / "run", server.uri.replace("//", "//user:secret@"))
    run.record(1, 35, losses={5: math.nan})
    run.evaluate(20)
    absent = run.tracker()
    assert not absent.close("FAILED", 1.5)
    assert "metrics after step 0 (recorded: up to 35)" in caplog.text
    assert "evaluations of the steps 20" in caplog.text
    assert str(run.paths.root) in caplog.text

    server.start()
    tracker = run.tracker()
    run.record(36, 48, fence=2)
    wait_until(lambda: read_json(run.paths.tracking)["sent_step"] == 40)
    server.kill()
    caplog.clear()
    run.record(41, 3333, fence=3)
    wait_until(lambda: "training continues" in caplog.text)
    run.evaluate(3000)
    server.start()
    wait_until(lambda: read_json(run.paths.tracking)["sent_step"] == 3330)
    wait_until(lambda: "accepts the record again" in caplog.text)
    run.record(3334, 3345, fence=3)
    assert tracker.close("FINISHED", 20)
    assert_tracked(run, 3345, "FINISHED")
    mlflow_run = only_mlflow_run(run)
    assert [f.path for f in client_of(run).list_artifacts(mlflow_run.info.run_id)] == ["config.yaml", "evaluations"]
    assert (
        "secret"
        not in caplog.text + str(mlflow_run.data.params) + str(mlflow_run.data.tags) + run.paths.tracking.read_text()
    )


def test_an_unresponsive_server_does_not_delay_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends while the request that creates the MLflow run still waits for an answer."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        run = RecordedRun(tmp_path / "run", f"http://127.0.0.1:{silent.getsockname()[1]}")
        run.record(1, 10)
        tracker = run.tracker()
        began = time.monotonic()
        assert not tracker.close("KILLED", 1.0)
        assert time.monotonic() - began < 60
        assert tracker.run_id is None
    assert "its status KILLED" in caplog.text


def test_missing_steps_of_a_killed_writer_do_not_block_later_steps(run: RecordedRun) -> None:
    backlog = Backlog(run.paths, EVERY)
    run.record(1, 7)
    run.record(9, 300)
    backlog.read(SentState())
    assert not list(backlog.points(SentState(), finished=False))
    run.record(301, 650)
    backlog.read(SentState())
    steps = [point.step for point in backlog.points(SentState(), finished=False)]
    assert steps == list(range(10, 651, 10))
    backlog.sent(SentState(640))
    assert [point.step for point in backlog.points(SentState(640), finished=False)] == [650]


def test_a_transiently_unreadable_record_is_read_again(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record(1, 10)
    run.record(11, 20)
    backlog = Backlog(run.paths, EVERY)
    read, failures = Path.read_bytes, iter([None, OSError("away")])

    def read_bytes(path: Path) -> bytes:
        if (error := next(failures, None)) is not None:
            raise error
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(OSError, match="away"):
        backlog.read(SentState())
    backlog.read(SentState())
    assert [point.step for point in backlog.points(SentState(), finished=False)] == [10, 20]


def test_transiently_unreadable_evaluations_and_events_are_read_again(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    backlog, read = Backlog(run.paths, EVERY), Path.read_bytes
    run.record(1, 10)
    run.evaluate(10)
    put_json(run.paths.events / "1-failed-1.json", asdict(Event("failed", BASE_S, 1, {})))
    for unreadable in (run.paths.evaluations, run.paths.events):

        def read_bytes(path: Path, unreadable: Path = unreadable) -> bytes:
            if path.parent == unreadable:
                raise OSError("away")
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        with pytest.raises(OSError, match="away"):
            backlog.read(SentState())
    monkeypatch.setattr(Path, "read_bytes", read)
    backlog.read(SentState())
    block, evaluation = backlog.points(SentState(), finished=True)
    assert (evaluation.step, evaluation.evaluator) == (10, RUN_EVALUATOR)
    assert (block.step, block.metrics["restarts"]) == (10, 1)


@pytest.mark.parametrize(
    "uri",
    [
        "mlruns",
        "file:///tmp/mlruns",
        "ftp://host/x",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:////what?/mlflow.db",
        "sqlite:////what?a=b/mlflow.db",
        "sqlite:////a%20b/mlflow.db",
        "http:///x",
        "htp://u:secret@h",
    ],
)
def test_bad_uris_are_refused(uri: str) -> None:
    config = Config().replace(tracking__uri=uri)
    with pytest.raises(ConfigError, match=r"tracking\.uri is .*sqlite:////folder/mlflow\.db") as caught:
        check_available(config)
    assert "secret" not in str(caught.value)
    check_available(config.replace(tracking__enabled=False))


@pytest.mark.parametrize(
    "uri",
    [
        *(None, "http://localhost:5000", "postgresql+psycopg2://user:pw@host/db"),
        *("sqlite:///mlflow.db", "sqlite:////a#b/50% of it/mlflow.db?timeout=60"),
    ],
)
def test_good_uris_are_accepted(uri: str | None) -> None:
    check_available(Config().replace(tracking__uri=uri))


def test_without_mlflow_only_tracking_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match='pip install \\"PATH_TO_RAY_APP\\[tracking\\]\\", or set tracking\\.enabled'):
        check_available(Config())
    check_available(Config().replace(tracking__enabled=False))


def test_importing_the_tracker_does_not_import_mlflow() -> None:
    code = "import sys, ray_app.track.tracker; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tags_name_commit_versions_and_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = make_run_tags(RunPaths(tmp_path), Config(), "abc")
    assert tags["ray_app.config_digest"] == digest(Config(), "abc")
    assert tags["ray_app.manifest_digest"] == "abc"
    assert tags["ray_app.version.torch"].startswith("2.")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "mlflow.source.git.commit" not in make_run_tags(RunPaths(tmp_path), Config(), "abc")


def test_credentials_are_redacted() -> None:
    text = json.dumps({"a": "s3://u:p@ss@h/x?api_token=t&b=1", "b": "https://host/a@b", "c": "sqlite:////x@y/m.db"})
    assert redact(text) == text.replace("u:p@ss", "***").replace("token=t", "token=***")
