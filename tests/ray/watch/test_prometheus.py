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
from ray_app.watch.prometheus import METRICS, RunMetrics
from tests.support.injector import Gate, Gates, KillAt
from tests.support.places import ROOT
from tests.support.prometheus import find_prometheus, prometheus, shown

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "runs.json").read_text())
RUN, EVERY, LAST = "a-run", 2, 10
_LOOKS = 6
"""A second and a half of the driver's looks, one of which is the console's."""
Shown = dict[tuple[str, str], float]


def asked() -> dict[str, str]:
    """What the panels ask for, by title, of the run alone."""
    return {
        panel["title"]: target["expr"].replace("$run", RUN)
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


class Opener:
    """Opens each gate when the console has looked at the run before it, and the last one when the agent shows that."""

    def __init__(self, folder: Path, evaluate: Path) -> None:
        self._folder, self._evaluate, self._step, self._calls = folder, evaluate, EVERY, 0
        self.seen: Shown = {}

    def __call__(self, job: Job) -> None:
        newest = newest_record(job.paths)
        self._calls = self._calls + 1 if newest is not None and newest.step == self._step else 0
        if self._calls < _LOOKS:
            return
        if self._step == LAST:
            self.seen = shown(job.paths.name)
            if self.seen.get(("ray_app_steps", "")) != LAST:
                return
            self._evaluate.touch()
        (self._folder / str(self._step)).touch()
        self._step += EVERY


@pytest.fixture(scope="module")
def during(ray_cluster: None, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What the agent shows of a run that stands at a step, whose worker was killed before, and whose evaluator is held
    up.
    """
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
    kill = KillAt(str(folder / "killed"), "compute", 1, 5)
    opener = Opener(gates, evaluate)
    hooks = Hooks(after_step=Gates(str(gates), EVERY, LAST + 1), at=kill)
    result = run_training(config, faults=Faults(hooks, Gate(str(evaluate))), observe=opener)
    assert (result.status, kill.happened) == ("finished", 1)
    return opener.seen


def test_the_agent_shows_how_a_run_gets_on(during: Shown) -> None:
    assert {name.removeprefix("ray_app_") for name, _ in during} == set(METRICS)
    assert {cause for _, cause in during if cause} == {"failures", "preemptions", "storage", "resizes", "driver"}
    assert (during["ray_app_steps", ""], during["ray_app_workers", ""], during["ray_app_restarts", "failures"]) == (
        LAST,
        1,
        1,
    )
    assert 0 < during["ray_app_goodput", ""] <= 1
    assert during["ray_app_rows_per_second", ""] > 0
    assert during["ray_app_evaluator_lag_seconds", ""] > 0


def test_every_panel_asks_for_what_the_agent_shows(during: Shown) -> None:
    names = {name for expression in asked().values() for name in re.findall(r"\bray_app_\w+", expression)}
    assert names == {name for name, _ in during}
    [run] = [variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "run"]
    assert run["definition"] == "label_values(ray_app_steps, run)"


def test_prometheus_answers_every_panel(during: Shown, tmp_path: Path) -> None:
    del during  # this process shows them as long as it lives
    program = find_prometheus()
    if program is None:
        pytest.skip("Prometheus is not installed (apt-get install prometheus): the panels' queries were not asked")
    with prometheus(program, tmp_path) as server:
        assert server.get("label/run/values", **{"match[]": "ray_app_steps"}) == [RUN]
        for title, expression in asked().items():
            answers = server.query(expression)
            assert {series["metric"]["run"] for series in answers} == {RUN}, title
            assert len(answers) == (5 if "cause" in expression else 1), title


def test_what_ray_refuses_is_said_once_and_harms_nothing(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    metrics = RunMetrics("refused")
    value: Any = "many"
    for _ in range(2):
        metrics.set("steps", value)
    assert [record.message for record in caplog.records] == [
        "Ray takes no metrics of the run: TypeError: value must be int or float, got <class 'str'>."
    ]
