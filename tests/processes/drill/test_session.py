"""A drill goes through its scenarios, with runs that are none."""

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

from ray_app import load_config
from ray_app.cli.drill import DrillSection, make_drill_config
from ray_app.cluster.resources import ClusterCapacity
from ray_app.config.config import Config
from ray_app.drill import session
from ray_app.drill.certificate import RunStart, Trace
from ray_app.drill.scenario import Scenario, ScenarioResult
from ray_app.drill.session import SCENARIOS
from ray_app.errors import ConfigError
from ray_app.storage.files import read_json
from tests.support.drilled import SUMMARY
from tests.support.places import ROOT


@pytest.fixture
def short_drill(digits: Path, tmp_path: Path) -> Config:
    paths = {
        "data__path": str(digits / "train"),
        "data__eval_path": str(digits / "eval"),
        "run__storage_path": str(tmp_path / "runs"),
    }
    return make_drill_config(
        load_config(ROOT / "conf" / "digits.yaml", **paths), DrillSection(max_steps=40), starts_cluster=True
    )


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "cluster_capacity", lambda: ClusterCapacity({"CPU": 8.0}))
    monkeypatch.setattr(session, "describe_environment", dict)
    monkeypatch.setattr(
        session.Drill, "_run_undisturbed", lambda self: (Trace("d", 8, {1: (1.0, [1, 1], [5, 6])}), RunStart(1.0, 2))
    )


@pytest.mark.usefixtures("no_ray")
def test_what_is_around_a_scenario_is_there_until_it_is_judged(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextmanager
    def around() -> Iterator[dict[str, Any]]:
        said.append("begins")
        yield {"tracking__uri": "http://there"}
        said.append("ends")

    def runs(config: Config, *_: Any) -> Any:
        said.append(config.tracking.uri or "")
        return SimpleNamespace(
            status="finished",
            path=Path(config.run.storage_path) / "around",
            summary=SUMMARY | {"world_sizes": [[0, 2]]},
        )

    def confirm(run: ScenarioResult) -> list[str]:
        said.append("judged")
        return ["nothing happened"]

    monkeypatch.setitem(SCENARIOS, "around", lambda ground: Scenario([1], [], confirm, setup=around))
    monkeypatch.setattr(session, "run_training", runs)
    drill = session.Drill(short_drill, short_drill, ["around"], 0, 60.0, None, Console(file=StringIO()), lambda: None)
    drill.run()
    assert said == ["begins", "http://there", "judged", "ends"]
    assert read_json(drill.certificate)["scenarios"][0]["reason"] == "it did not happen: nothing happened"


def hangs(config: Config, console: Console, faults: Any, observe: Callable[[Any], None]) -> None:
    """A run that tries again for ever, whatever it meets."""
    while True:
        with suppress(Exception):
            observe(None)
            time.sleep(0.01)


def fails(config: Config, *_: Any) -> None:
    raise OSError("something is away")


@pytest.mark.rest
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (hangs, "The scenario 'kill' did not end within 0.25 s (drill.limit_s bounds scenarios)."),
        (fails, "OSError: something is away"),
    ],
)
def test_a_drill_goes_on_after_a_scenario_that_does_not_come_to_its_end(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch, run: Callable[..., None], reason: str
) -> None:
    renewed = list[str]()
    monkeypatch.setattr(session, "run_training", run)
    said = StringIO()
    names = ["kill", "rendezvous"]
    drill = session.Drill(
        short_drill,
        short_drill,
        names,
        0,
        0.25,
        None,
        Console(file=said, width=200),
        lambda: renewed.append("another cluster"),
    )
    assert drill.run() == 1
    certificate = read_json(drill.certificate)
    assert [(found["scenario"], found["outcome"]) for found in certificate["scenarios"]] == [
        ("kill", "failed"),
        ("rendezvous", "failed"),
    ]
    assert certificate["scenarios"][0]["reason"] == reason
    assert renewed == ["another cluster"], "what a scenario leaves is cleared away before the next"
    assert certificate["complete"]
    assert "(2 failed)" in said.getvalue()


@pytest.mark.usefixtures("no_ray")
def test_a_scenario_that_fails_leaves_the_next_one_as_it_would_be(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(config: Config, *_: Any) -> Any:
        if config.run.name == "first":
            raise RuntimeError("lost")
        return SimpleNamespace(
            status="finished",
            path=Path(config.run.storage_path) / "second",
            summary=SUMMARY | {"world_sizes": [[0, 2]]},
        )

    for name in ("first", "second"):
        monkeypatch.setitem(SCENARIOS, name, lambda ground: Scenario([1], [], lambda run: ["nothing happened"]))
    monkeypatch.setattr(session, "run_training", runs)
    drill = session.Drill(
        short_drill, short_drill, ["first", "second"], 0, 60.0, None, Console(quiet=True), lambda: None
    )
    assert drill.run() == 1
    reasons = [found["reason"] for found in read_json(drill.certificate)["scenarios"]]
    assert reasons == ["RuntimeError: lost", "it did not happen: nothing happened"]


@pytest.mark.usefixtures("no_ray")
def test_a_drill_without_a_cluster_ends_and_says_how_far_it_came(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise ConnectionError("no head")

    monkeypatch.setattr(session, "run_training", fails)
    drill = session.Drill(short_drill, short_drill, ["kill", "rendezvous"], 0, 60.0, None, Console(quiet=True), lost)
    with pytest.raises(RuntimeError, match="no cluster for the next scenario: ConnectionError: no head"):
        drill.run()
    [found] = read_json(drill.certificate)["scenarios"]
    assert (found["scenario"], found["reason"]) == ("kill", "OSError: something is away")
    assert not read_json(drill.certificate)["complete"]


@pytest.mark.rest
@pytest.mark.usefixtures("no_ray")
def test_a_cluster_that_scales_from_zero_is_waited_for(short_drill: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = ClusterCapacity({"CPU": 0.0}, max_resources={"CPU": 8.0})
    monkeypatch.setattr(session, "cluster_capacity", lambda: capacity)
    assert (
        session.Drill(short_drill, short_drill, ["kill"], 0, 60.0, None, Console(quiet=True), lambda: None)._workers
        == 2
    )
    capacity = ClusterCapacity({"CPU": 0.0}, max_resources={"CPU": 2.0})
    with pytest.raises(ConfigError, match="the cluster grows to at most 2 CPU"):
        session.Drill(short_drill, short_drill, ["kill"], 0, 60.0, None, Console(quiet=True), lambda: None)
