"""A drill runs its scenarios; the runs are stubs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ray_app.cli.drill import DrillSection, make_drill_config
from ray_app.cluster.resources import ClusterCapacity
from ray_app.config.config import Config
from ray_app.drill import session
from ray_app.drill.certificate import RunStart, Trace
from ray_app.drill.scenario import Scenario, ScenarioResult
from ray_app.drill.session import SCENARIOS
from ray_app.errors import ConfigError
from ray_app.storage.files import read_json
from tests.support.drill_scenarios import SUMMARY
from tests.support.jobs import digits_config


@pytest.fixture
def short_drill(digits: Path, tmp_path: Path) -> Config:
    config = digits_config(digits, tmp_path / "runs")
    return make_drill_config(config, DrillSection(max_steps=40), starts_cluster=True)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "cluster_capacity", lambda: ClusterCapacity({"CPU": 8.0}))
    monkeypatch.setattr(session, "describe_environment", dict)
    monkeypatch.setattr(
        session.Drill, "_run_undisturbed", lambda self: (Trace("d", 8, {1: (1.0, [1, 1], [5, 6])}), RunStart(1.0, 2))
    )


@pytest.mark.usefixtures("no_ray")
def test_the_setup_of_a_scenario_lasts_until_its_confirmation(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    @contextmanager
    def set_up() -> Iterator[dict[str, Any]]:
        calls.append("begins")
        yield {"tracking__uri": "http://there"}
        calls.append("ends")

    def run_training(config: Config, *_: Any) -> Any:
        calls.append(config.tracking.uri or "")
        return SimpleNamespace(
            status="finished",
            path=Path(config.run.storage_path) / "around",
            summary=SUMMARY | {"world_sizes": [[0, 2]]},
        )

    def confirm(run: ScenarioResult) -> list[str]:
        calls.append("judged")
        return ["nothing happened"]

    monkeypatch.setitem(SCENARIOS, "around", lambda ground: Scenario([1], [], confirm, setup=set_up))
    monkeypatch.setattr(session, "run_training", run_training)
    drill = session.Drill(short_drill, short_drill, ["around"], 0, 60.0, None, Console(file=StringIO()), lambda: None)
    drill.run()
    assert calls == ["begins", "http://there", "judged", "ends"]
    assert read_json(drill.certificate)["scenarios"][0]["reason"] == "the fault did not happen: nothing happened"


def hang(config: Config, console: Console, faults: Any, observe: Callable[[Any], None]) -> None:
    """A run that retries forever after any error."""
    while True:
        with suppress(Exception):
            observe(None)
            time.sleep(0.01)


def fail(config: Config, *_: Any) -> None:
    raise OSError("something is away")


@pytest.mark.rest
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (hang, "The scenario 'kill' did not end within 0.25 s (drill.limit_s bounds scenarios)."),
        (fail, "OSError: something is away"),
    ],
)
def test_a_drill_continues_after_a_scenario_that_fails_or_hangs(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch, run: Callable[..., None], reason: str
) -> None:
    renewed = list[str]()
    monkeypatch.setattr(session, "run_training", run)
    output = StringIO()
    names = ["kill", "rendezvous"]
    drill = session.Drill(
        short_drill,
        short_drill,
        names,
        0,
        0.25,
        None,
        Console(file=output, width=200),
        lambda: renewed.append("another cluster"),
    )
    assert drill.run() == 1
    certificate = read_json(drill.certificate)
    assert [(result["scenario"], result["outcome"]) for result in certificate["scenarios"]] == [
        ("kill", "failed"),
        ("rendezvous", "failed"),
    ]
    assert certificate["scenarios"][0]["reason"] == reason
    assert renewed == ["another cluster"], "the cluster must be replaced before the next scenario"
    assert certificate["complete"]
    assert "(2 failed)" in output.getvalue()


@pytest.mark.usefixtures("no_ray")
def test_a_failed_scenario_does_not_affect_the_next_one(short_drill: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_training(config: Config, *_: Any) -> Any:
        if config.run.name == "first":
            raise RuntimeError("lost")
        return SimpleNamespace(
            status="finished",
            path=Path(config.run.storage_path) / "second",
            summary=SUMMARY | {"world_sizes": [[0, 2]]},
        )

    for name in ("first", "second"):
        monkeypatch.setitem(SCENARIOS, name, lambda ground: Scenario([1], [], lambda run: ["nothing happened"]))
    monkeypatch.setattr(session, "run_training", run_training)
    drill = session.Drill(
        short_drill, short_drill, ["first", "second"], 0, 60.0, None, Console(quiet=True), lambda: None
    )
    assert drill.run() == 1
    reasons = [result["reason"] for result in read_json(drill.certificate)["scenarios"]]
    assert reasons == ["RuntimeError: lost", "the fault did not happen: nothing happened"]


@pytest.mark.usefixtures("no_ray")
def test_a_drill_that_lost_its_cluster_leaves_a_partial_certificate(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_connect() -> None:
        raise ConnectionError("no head")

    monkeypatch.setattr(session, "run_training", fail)
    drill = session.Drill(
        short_drill, short_drill, ["kill", "rendezvous"], 0, 60.0, None, Console(quiet=True), fail_to_connect
    )
    with pytest.raises(RuntimeError, match="no cluster for the next scenario: ConnectionError: no head"):
        drill.run()
    [result] = read_json(drill.certificate)["scenarios"]
    assert (result["scenario"], result["reason"]) == ("kill", "OSError: something is away")
    assert not read_json(drill.certificate)["complete"]


@pytest.mark.rest
@pytest.mark.usefixtures("no_ray")
def test_a_drill_plans_with_the_maximal_size_of_an_autoscaled_cluster(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = ClusterCapacity({"CPU": 0.0}, max_resources={"CPU": 8.0})
    monkeypatch.setattr(session, "cluster_capacity", lambda: capacity)
    assert (
        session.Drill(short_drill, short_drill, ["kill"], 0, 60.0, None, Console(quiet=True), lambda: None)._workers
        == 2
    )
    capacity = ClusterCapacity({"CPU": 0.0}, max_resources={"CPU": 2.0})
    with pytest.raises(ConfigError, match="the cluster grows to at most 2 CPU"):
        session.Drill(short_drill, short_drill, ["kill"], 0, 60.0, None, Console(quiet=True), lambda: None)
