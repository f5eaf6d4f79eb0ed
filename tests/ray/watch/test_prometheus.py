"""The metrics of a run on Ray's own endpoint, and the dashboard in deploy/ that shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ray_app import load_config, run_training
from ray_app.driver.run import Faults
from ray_app.runlog.journal import newest_record
from ray_app.train.job import Hooks, Job
from ray_app.watch.metrics import METRICS, RunMetrics
from tests.support.injector import HoldEvaluations, HoldSteps, KillAtPhase
from tests.support.paths import ROOT
from tests.support.prometheus import exported_metrics, find_prometheus, start_prometheus

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "runs.json").read_text())
RUN = "a-run"
EVERY, LAST = 2, 10
MetricValues = dict[tuple[str, str], float]


def panel_queries() -> dict[str, str]:
    """Returns the queries of the panels by title, for the run alone."""
    return {
        panel["title"]: target["expr"].replace("$run", RUN)
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


class GateOpener:
    """Opens each gate when the agent exports its step, which the console measures with the speed."""

    def __init__(self, folder: Path, evaluate: Path) -> None:
        self._folder = folder
        self._evaluate = evaluate
        self._step, self.num_workers = EVERY, 0
        self.metrics: MetricValues = {}

    def __call__(self, job: Job) -> None:
        newest = newest_record(job.paths)
        if newest is None or newest.step != self._step:
            return
        self.metrics, self.num_workers = exported_metrics(job.paths.name), newest.workers
        if self.metrics.get(("ray_app_steps", "")) != self._step:
            return
        if self._step == LAST:
            self._evaluate.touch()
        (self._folder / str(self._step)).touch()
        self._step += EVERY


@pytest.fixture(scope="module")
def metrics(ray_cluster: None, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> MetricValues:
    """Metrics that the agent exports while a run waits at a step after a kill of a worker, and its evaluator waits."""
    folder = tmp_path_factory.mktemp("metrics")
    gates, evaluate = folder / "gates", folder / "evaluate"
    gates.mkdir()
    config = load_config(ROOT / "conf" / "digits.yaml").replace(
        data__path=str(digits / "train"),
        data__eval_path=str(digits / "eval"),
        train__max_steps=LAST + 2,
        checkpoint__every_steps=4,
        scaling__min_workers=2,
        scaling__max_workers=2,
        run__storage_path=str(folder / "runs"),
        run__name=RUN,
        tracking__enabled=False,
    )
    kill = KillAtPhase(str(folder / "killed"), "compute", 1, 5)
    opener = GateOpener(gates, evaluate)
    hooks = Hooks(after_step=HoldSteps(str(gates), EVERY, LAST + 1), at=kill)
    result = run_training(config, faults=Faults(hooks, HoldEvaluations(str(evaluate))), observe=opener)
    assert (result.status, kill.num_fired) == ("finished", 1)
    # A replacement of the killed worker may be among them by then.
    assert opener.metrics["ray_app_workers", ""] == opener.num_workers
    return opener.metrics


def test_the_agent_exports_the_metrics_of_a_run(metrics: MetricValues) -> None:
    assert {name.removeprefix("ray_app_") for name, _ in metrics} == set(METRICS)
    assert {cause for _, cause in metrics if cause} == {"failures", "preemptions", "storage", "resizes", "driver"}
    assert (metrics["ray_app_steps", ""], metrics["ray_app_restarts", "failures"]) == (LAST, 1)
    assert 0 < metrics["ray_app_goodput", ""] <= 1
    assert metrics["ray_app_rows_per_second", ""] > 0
    assert metrics["ray_app_evaluator_lag_seconds", ""] > 0


def test_every_panel_queries_exported_metrics(metrics: MetricValues) -> None:
    names = {name for expression in panel_queries().values() for name in re.findall(r"\bray_app_\w+", expression)}
    assert names == {name for name, _ in metrics}
    [run] = [variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "run"]
    assert run["definition"] == "label_values(ray_app_steps, run)"


def test_prometheus_answers_every_panel(metrics: MetricValues, tmp_path: Path) -> None:
    # This process exports the metrics as long as it lives.
    del metrics
    program = find_prometheus()
    if program is None:
        pytest.skip("Prometheus is not installed (apt-get install prometheus): the panels' queries were not asked")
    with start_prometheus(program, tmp_path) as server:
        assert server.get("label/run/values", **{"match[]": "ray_app_steps"}) == [RUN]
        for title, expression in panel_queries().items():
            answers = server.query(expression)
            assert {series["metric"]["run"] for series in answers} == {RUN}, title
            assert len(answers) == (5 if "cause" in expression else 1), title


def test_a_metric_that_ray_refuses_is_logged_once(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    metrics = RunMetrics("refused")
    value: Any = "many"
    for _ in range(2):
        metrics.set("steps", value)
    assert [record.message for record in caplog.records] == [
        "Ray does not accept metrics of the run: TypeError: value must be int or float, got <class 'str'>."
    ]
