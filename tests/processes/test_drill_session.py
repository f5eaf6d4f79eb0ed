"""A drill goes through its scenarios, with runs that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ray_app import load_config
from ray_app.cli.drill import DrillSection, drilled
from ray_app.config.config import Config
from ray_app.drill import session
from ray_app.drill.certificate import Start, Trace
from ray_app.drill.ground import Disturbance, Ended
from ray_app.drill.session import SCENARIOS
from ray_app.errors import ConfigError
from ray_app.record.files import read_json
from tests.support.drilled import SUMMARY
from tests.support.places import ROOT


@pytest.fixture
def short_drill(digits: Path, tmp_path: Path) -> Config:
    paths = {"data__path": str(digits / "train"), "data__eval_path": str(digits / "eval"), "run__storage_path": str(tmp_path / "runs")}
    return drilled(load_config(ROOT / "conf" / "digits.yaml", **paths), DrillSection(max_steps=40), own=True)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0}, nodes=list))
    monkeypatch.setattr(session, "most_resources", lambda: None)
    monkeypatch.setattr(session, "facts", dict)
    monkeypatch.setattr(session.Drill, "_undisturbed", lambda self: (Trace("d", 8, {1: (1.0, [1, 1], [5, 6])}), Start(1.0, 2)))


@pytest.mark.usefixtures("no_ray")
def test_what_is_around_a_scenario_is_there_until_it_is_judged(short_drill: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def around() -> Iterator[dict[str, Any]]:
        said.append("begins")
        yield {"tracking__uri": "http://there"}
        said.append("ends")

    def runs(config: Config, *_: Any) -> Any:
        said.append(config.tracking.uri or "")
        return SimpleNamespace(
            status="finished", path=Path(config.run.storage_path) / "around", summary=SUMMARY | {"world_sizes": [[0, 2]]}
        )

    def confirm(run: Ended) -> list[str]:
        said.append("judged")
        return ["nothing happened"]

    monkeypatch.setitem(SCENARIOS, "around", lambda ground: Disturbance([1], [], confirm, around=around))
    monkeypatch.setattr(session, "run_training", runs)
    drill = session.Drill(short_drill, short_drill, ["around"], 0, 60.0, None, Console(file=StringIO()))
    drill.go()
    assert said == ["begins", "http://there", "judged", "ends"]
    assert read_json(drill.certificate)["scenarios"][0]["reason"] == "it did not happen: nothing happened"


@pytest.mark.usefixtures("no_ray")
def test_a_run_that_takes_longer_than_its_limit_has_failed_and_the_drill_ends_there(
    short_drill: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever that run still does would disturb the next."""

    def hangs(config: Config, console: Console, faults: Any, observe: Callable[[Any], None]) -> None:
        while True:
            observe(None)

    monkeypatch.setattr(session, "run_training", hangs)
    said = StringIO()
    drill = session.Drill(short_drill, short_drill, ["kill", "kill_two"], 0, 0.25, None, Console(file=said, width=200))
    assert drill.go() == 1
    [found] = read_json(drill.certificate)["scenarios"]
    assert (found["outcome"], found["reason"]) == ("failed", "The run 'kill' did not end within drill.limit_s = 0.25 s.")
    assert "(1 failed, 1 not reached)" in said.getvalue()


@pytest.mark.usefixtures("no_ray")
def test_a_cluster_that_scales_from_zero_is_waited_for(short_drill: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 0.0}, nodes=list))
    monkeypatch.setattr(session, "most_resources", lambda: {"CPU": 8.0})
    assert session.Drill(short_drill, short_drill, ["kill"], 0, 60.0, None, Console(quiet=True))._workers == 2
    monkeypatch.setattr(session, "most_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ConfigError, match="the cluster grows to at most 2 CPU"):
        session.Drill(short_drill, short_drill, ["kill"], 0, 60.0, None, Console(quiet=True))
