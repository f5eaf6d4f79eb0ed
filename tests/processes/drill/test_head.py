"""The drill kills the head's GCS; the evidence must show that steps continued without it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray_app.drill.node_scenarios import confirm_head_loss, head
from ray_app.runlog.journal import put_event
from ray_app.runlog.lease import LeaseHolder
from tests.support.drill_scenarios import evidence_of_dead_process, make_result, make_step_record, scenario_context


def test_losing_the_head_counts_only_if_steps_continued(tmp_path: Path) -> None:
    assert head(scenario_context(tmp_path)) == "the drill kills the head only of a cluster that it started"
    evidence: dict[str, Any] = {
        "head_killed": {"time_s": 102.5, "step": 2, "head": evidence_of_dead_process()},
        "head_back": {"time_s": 105.5, "step": 5, "head": asdict(LeaseHolder.here())},
    }
    run = make_result(tmp_path / "run", evidence, [make_step_record(n) for n in range(1, 7)])
    put_event(run.paths, "started", 1)
    assert confirm_head_loss(run) == ["no worker joined after the head was back"]
    put_event(run.paths, "replaced", 1, before=1, after=2, step=5, reason="")
    assert confirm_head_loss(run) == []
    evidence["head_killed"]["head"] = asdict(LeaseHolder.here())
    evidence["head_back"]["step"] = 6
    put_event(run.paths, "started", 2)
    assert confirm_head_loss(run) == [
        "the killed head still lives",
        "the head is the same as before",
        "only the steps [3, 4, 5] were finished without a head",
        "the run was started 2 times",
    ]
