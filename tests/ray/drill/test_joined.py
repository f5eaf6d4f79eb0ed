"""A drill on a cluster that it joins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from ray_app.cli.drill import main
from ray_app.drill.faults import Kill
from ray_app.drill.scenario import Scenario, ScenarioContext
from ray_app.drill.session import SCENARIOS
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks
from tests.support.drill_scenarios import drill_arguments


@pytest.mark.usefixtures("ray_cluster")
def test_a_drill_on_a_joined_cluster_touches_no_node(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drill leaves scenarios of nodes out, and a fault that does not happen has failed."""

    def never_happens(ground: ScenarioContext) -> Scenario:
        """Makes a scenario that never happens, since no run has that many steps."""
        never = Kill(ground.evidence, ["killed-0"], step=10**6, ranks=[0])
        return Scenario([10**6], ["killed-0"], lambda run: [], Faults(train=Hooks(after_step=never)))

    monkeypatch.setitem(SCENARIOS, "quiet", never_happens)
    assert (
        main(
            [*drill_arguments(digits, tmp_path / "out", scenarios="node,quiet", max_steps=20), "--data.eval_path=null"]
        )
        == 1
    )
    assert ray.is_initialized()
    assert "FAILED: the fault did not happen: the evidence 'killed-0' is missing" in capsys.readouterr().out
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    node, unconfirmed = certificate["scenarios"]
    assert (node["outcome"], unconfirmed["outcome"]) == ("left out", "failed")
    assert "only in a cluster that it started" in node["reason"]
    assert unconfirmed["params_digest"] == certificate["undisturbed"]["params_digest"]
    assert main(drill_arguments(digits, tmp_path / "out", scenarios="quiet", max_steps=20)) == 2
    assert "has the certificate of another drill" in capsys.readouterr().err
    assert main(drill_arguments(digits, tmp_path / "other", scenarios="node,grow", max_steps=20)) == 2
    assert "No scenario is possible" in capsys.readouterr().err
