"""The drill kills its MLflow server; the evidence must show the outage, and that no point is lost or doubled."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_app.drill import tracking
from ray_app.drill.scenario import ScenarioResult
from tests.support.drill_scenarios import make_result, make_step_record, scenario_context
from tests.support.mlflow_server import make_database


def outage(tmp_path: Path, **back: Any) -> ScenarioResult:
    """Returns a result with a server outage from before step 3 to after step 5."""
    evidence = {
        "server_killed": {"time_s": 102.5, "step": 2},
        "server_back": {"time_s": 105.5, "step": 5, "before": {"answers": False, "sent_step": 2} | back},
    }
    return make_result(tmp_path / "run", evidence, [make_step_record(n) for n in range(1, 7)])


@pytest.fixture
def served(tmp_path: Path) -> tuple[str, Any, str]:
    from mlflow.tracking import MlflowClient

    uri = make_database(tmp_path / "mlflow.db")
    client = MlflowClient(uri)
    return uri, client, client.create_run("0", run_name="run").info.run_id


def log(client: Any, run_id: str, steps: range) -> None:
    for n in steps:
        step_record = make_step_record(n)
        for name, value in (("loss", step_record.loss), ("step_ms", step_record.step_ms), ("workers", 2.0)):
            client.log_metric(run_id, name, value, int(step_record.time_s * 1e3), n)


@pytest.mark.rest
def test_an_mlflow_outage_counts_only_if_every_point_is_stored_once(
    tmp_path: Path, served: tuple[str, Any, str]
) -> None:
    uri, client, run_id = served
    run = outage(tmp_path)
    run = replace(run, summary=run.summary | {"mlflow_run_id": run_id})
    log(client, run_id, range(1, 6))
    [status, *lost] = tracking.confirm_outage(run, uri)
    assert status == "MLflow has the run as RUNNING"
    assert [re.split(" MLflow has |; ", problem)[1] for problem in lost] == [
        "5 points, 5 of them different, instead of the 6 recorded"
    ] * 3
    log(client, run_id, range(6, 7))
    client.set_terminated(run_id)
    assert tracking.confirm_outage(run, uri) == []
    client.log_metric(run_id, "loss", make_step_record(6).loss, int(make_step_record(6).time_s * 1e3) + 1, 6)
    [message] = tracking.confirm_outage(run, uri)
    assert message.startswith("of loss MLflow has 7 points, 7 of them different, instead of the 6 recorded; the first")
    assert message.endswith("recorded is None")
    client.create_run("0", run_name="run")
    assert tracking.confirm_outage(run, uri) == ["MLflow has 2 runs of this name"]


def test_an_mlflow_outage_counts_only_if_steps_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_compare_points", lambda *_: [])
    assert tracking.confirm_outage(outage(tmp_path), "") == []
    answered = outage(tmp_path, answers=True, sent_step=4)
    assert tracking.confirm_outage(answered, "") == [
        "the server answered while it was down",
        "step 4 was sent while the server was down",
    ]
    answered.evidence["server_back"]["step"] = 6
    assert "only the steps [3, 4, 5] were finished while the server was down" in tracking.confirm_outage(answered, "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        tracking.mlflow(scenario_context(tmp_path))
        == 'mlflow is not installed: pip install "PATH_TO_RAY_APP[tracking]"'
    )
