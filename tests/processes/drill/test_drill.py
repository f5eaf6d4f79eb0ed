"""The drill: comparison of runs, evidence of faults, and refused configurations."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ray_app.cli.drill import DrillSection, choose_scenarios, main, make_drill_config
from ray_app.config.config import Config
from ray_app.drill import process_scenarios
from ray_app.drill.certificate import (
    RunStart,
    Trace,
    assess_scenario,
    collect_measurements,
    compare_restart,
    find_difference,
    find_start_after,
    make_results_table,
    subtract_waits,
    summarize_results,
)
from ray_app.drill.faults import DelayPlan, Evidence, Freeze, Kill, KillJoiningWorker, Slow
from ray_app.drill.process_scenarios import evaluator, kill
from ray_app.drill.scenario import Scenario, ScenarioResult, kill_stopped_processes
from ray_app.drill.session import SCENARIOS
from ray_app.errors import ConfigError
from ray_app.runlog.journal import put_event
from ray_app.runlog.lease import LeaseHolder
from ray_app.runlog.paths import RunPaths
from tests.support.drill_scenarios import (
    evidence_of_dead_process,
    make_step_record,
    scenario_context,
    write_records,
)
from tests.support.jobs import digits_config
from tests.support.paths import ROOT

SUMMARY = {
    **{"status": "finished", "params_digest": "d", "rows": 8, "world_sizes": [[0, 2]], "redone_steps": 0},
    "recovery_s": [0.1],
}
record = partial(make_step_record, loss=1.0)


def trace(**fields: Any) -> Trace:
    return Trace(
        **({"digest": "d", "rows": 8, "steps": {step: (1.0, [1, 1], [5, 6]) for step in (1, 2, 3, 4)}} | fields)
    )


@pytest.fixture
def dead_process() -> dict[str, Any]:
    """The entry of an ended process in the evidence."""
    return evidence_of_dead_process()


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Scenario, RunPaths]:
    """A kill at step 2, and the records of a run that equal `trace()`."""
    scenario = kill(replace(scenario_context(tmp_path), total_steps=6, steps_per_epoch=3, checkpoint_every=1))
    assert isinstance(scenario, Scenario)
    return scenario, write_records(tmp_path / "kill", [record(step) for step in (1, 2, 3, 4)])


def ended(paths: RunPaths, process: dict[str, Any] | None, **summary: Any) -> ScenarioResult:
    """Returns a result with a kill at 101.9 s, just before rank 0 finished that step."""
    evidence = {"killed-0": {"time_s": 101.9, "step": 2, "rank": 0, "process": process}} if process else {}
    return ScenarioResult(paths, SUMMARY | summary, evidence)


def test_a_confirmed_scenario_with_the_same_parameters_is_equal(
    killed: tuple[Scenario, RunPaths], dead_process: dict[str, Any]
) -> None:
    scenario, paths = killed
    put_event(paths, "failed", 1, errors={})
    assert assess_scenario(scenario, ended(paths, dead_process), trace()) == ("equal", None)
    assert assess_scenario(scenario, ended(paths, dead_process), trace(digest="other"))[0] == "different"
    assert collect_measurements(scenario, ended(paths, dead_process))["next_step_s"] == [1.1]


def test_a_scenario_without_evidence_has_failed(
    killed: tuple[Scenario, RunPaths], dead_process: dict[str, Any]
) -> None:
    scenario, paths = killed
    assert assess_scenario(scenario, ended(paths, None), trace()) == (
        "failed",
        "the fault did not happen: the evidence 'killed-0' is missing",
    )
    outcome, reason = assess_scenario(scenario, ended(paths, asdict(LeaseHolder.here())), trace())
    assert (outcome, reason) == (
        "failed",
        "the fault did not happen: the process of killed-0 still lives; the run has no record of a failure",
    )
    assert assess_scenario(scenario, ended(paths, dead_process), trace())[0] == "failed", (
        "a kill that the run did not record counts as failed"
    )
    put_event(paths, "failed", 1, errors={})
    assert assess_scenario(scenario, ended(paths, dead_process, status="interrupted"), trace()) == (
        "failed",
        "the run ended as interrupted",
    )


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (trace(), None),
        (trace(digest="x"), "the parameters differ after the same rows and losses"),
        (trace(rows=7), "the run used 7 rows instead of 8"),
        (trace(steps=trace().steps | {3: (1.0, [1, 1], [5, 7])}), "from step 3 on, the rows differ"),
        (trace(steps=trace().steps | {2: (1.5, [1, 1], [5, 6])}), "from step 2 on, the losses differ on the same rows"),
        (trace(steps=trace().steps | {5: (1.0, [1, 1], [5, 6])}), "step 5 is recorded in only one of the runs"),
    ],
)
def test_the_first_difference_of_two_runs_is_reported(other: Trace, difference: str | None) -> None:
    assert find_difference(trace(), other) == difference


@pytest.mark.parametrize(
    ("next_s", "workers", "row_text"),
    [
        (109.0, 2, "back after 0.60 of a first start, on 2 of 2 workers"),
        (116.5, 1, "back after 1.35 of a first start, more than 1.3, on 1 of 2 workers"),
    ],
)
def test_a_restart_after_a_killed_driver_is_compared_with_a_first_start(
    tmp_path: Path, next_s: float, workers: int, row_text: str
) -> None:
    first = find_start_after(write_records(tmp_path / "undisturbed", [record(1), record(2)]), 91.0)
    assert first == RunStart(10.0, 2)
    again = [
        record(3, time_s=next_s, workers=workers, generation="2.1"),
        record(4, time_s=next_s + 1, generation="2.1"),
    ]
    paths = write_records(tmp_path / "driver", [record(1), record(2), record(3), *again])
    run = ScenarioResult(
        paths, SUMMARY, {"held": {"time_s": 102.5, "step": 3}, "driver_killed": {"time_s": 103.0, "step": 3}}
    )
    entry = compare_restart(run, first)
    assert entry["restart"] == {
        "first": {"seconds": 10.0, "workers": 2},
        "again": {"seconds": next_s - 103.0, "workers": workers},
        "ratio": round((next_s - 103.0) / 10, 2),
        "bar": 1.3,
    }
    console = Console(file=StringIO(), width=200)
    console.print(make_results_table([{"scenario": "driver", "outcome": "equal", "reason": None, **entry}]))
    assert f"equal: {row_text}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert compare_restart(ScenarioResult(paths, SUMMARY, {"killed-0": {"time_s": 103.0, "step": 3}}), first) == {}


def test_waits_of_the_drill_itself_do_not_count() -> None:
    records = [record(1), record(2), record(3, time_s=113.0, step_ms=11_000.0), record(4, time_s=114.0)]
    assert subtract_waits(records, {2: 10.0}) == [record(step) for step in (1, 2, 3, 4)]
    reformed = [replace(r, step_ms=5.0) if r.step == 3 else r for r in records]
    assert [r.step_ms for r in subtract_waits(reformed, {2: 10.0})][2] == 5.0, (
        "the wait was before the step's generation"
    )


def test_a_fault_leaves_one_piece_of_evidence_per_victim(tmp_path: Path) -> None:
    evidence = Evidence(str(tmp_path))
    assert evidence.claim(["a", "b"], rank=1)
    assert evidence.claim(["a", "b"], rank=2)
    assert not evidence.claim(["a", "b"], rank=3)
    assert {name: entry["rank"] for name, entry in evidence.all().items()} == {"a": 1, "b": 2}
    assert evidence.all()["a"]["process"] == asdict(LeaseHolder.here())
    # Both kills have happened, so this call kills no process.
    Kill(evidence, ["a", "b"], step=3, ranks=[0])(0, 3)


def test_only_a_worker_that_joins_after_the_first_kill_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: struck.append(number))
    evidence = Evidence(str(tmp_path))
    early, other = (KillJoiningWorker(evidence, "killed-1", "killed-0") for _ in range(2))
    early("forming", 0, 0)
    other("data", 1, 4)
    evidence.put("killed-0", step=4)
    for hook in (early, other):
        hook("forming", 0, 4)
    assert not struck
    joining = KillJoiningWorker(evidence, "killed-1", "killed-0")
    joining("forming", 0, 0)
    assert struck == [signal.SIGKILL]
    assert evidence.has("killed-1")
    KillJoiningWorker(evidence, "killed-1", "killed-0")("forming", 0, 0)
    assert struck == [signal.SIGKILL], "a second joining worker was killed"


def test_the_drill_waits_for_the_address_of_the_new_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports, killed = iter([1, 1, 1, 2]), list[str]()
    fake = SimpleNamespace(get_actor=lambda name: name, kill=lambda actor, no_restart: killed.append(actor))
    monkeypatch.setattr(process_scenarios, "ray", fake)
    monkeypatch.setattr(process_scenarios, "address_of_actor", lambda name: ("host", next(ports)))
    scenario = process_scenarios.rendezvous(scenario_context(tmp_path))
    assert isinstance(scenario, Scenario)
    assert scenario.observe is not None
    evidence = Evidence(str(tmp_path / "evidence"))
    evidence.put("held", step=3)
    scenario.observe(SimpleNamespace(rendezvous="its name"))
    entry = evidence.get("rendezvous_killed")
    assert entry is not None
    assert (killed, entry["before"], entry["after"]) == (["its name"], ["host", 1], ["host", 2])


def test_a_slow_worker_wastes_a_multiple_of_its_time(tmp_path: Path) -> None:
    evidence = Evidence(str(tmp_path))
    hook, other = Slow(evidence, "slow", 3, 5, 1, 3.0), Slow(evidence, "slow", 3, 5, 1, 3.0)
    for step in range(1, 8):
        other(0, step)
        busy_s = time.monotonic() + 0.01
        while time.monotonic() < busy_s:
            pass
        hook(1, step)
    entry = evidence.get("slow")
    assert entry is not None
    assert (entry["rank"], entry["step"]) == (1, 3)
    assert entry["seconds"] >= 2 * 2 * 0.01


def test_a_frozen_worker_says_so_in_its_evidence_and_goes_on(tmp_path: Path) -> None:
    evidence = Evidence(str(tmp_path))
    process = multiprocessing.get_context("fork").Process(target=Freeze(evidence, "silent", 3, 1, 0.3), args=(1, 3))
    process.start()
    process.join()
    entry = evidence.get("silent")
    assert entry is not None
    assert (process.exitcode, entry["stopped"]) == (0, True)


def test_what_a_scenario_has_stopped_is_ended_and_nothing_else(tmp_path: Path) -> None:
    evidence = Evidence(str(tmp_path))

    def stop() -> None:
        evidence.put("silent", stopped=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    # An entry of this process, which goes on.
    evidence.put("killed-0")
    process = multiprocessing.get_context("fork").Process(target=stop)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, os.WUNTRACED)
    kill_stopped_processes(evidence)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def test_the_limit_of_a_delay_plan_holds_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is another process from step 5 on, which does that step again."""
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    plans = [DelayPlan(Evidence(str(tmp_path)), 4, 8, range(2, 3), 10.0) for _ in range(2)]
    for step in range(1, 6):
        plans[0](0, step)
    for step in range(5, 10):
        plans[1](0, step)
    assert slept_s == [2.0, 2.0, *[1.5] * 4]
    assert Evidence(str(tmp_path)).all() == {"paced-4": {"pauses": {"4": 2.0, "5": 3.5, "6": 1.5, "7": 1.5, "8": 1.5}}}


def test_the_verdict_counts_scenarios_left_out_and_not_reached() -> None:
    results = [{"outcome": outcome} for outcome in ("equal", "left out", "failed")]
    assert summarize_results(results, "abc", 4) == (
        "1 of 3 scenarios ended with the parameters of the undisturbed run: sha256 abc (1 failed, 1 left out, 1 not"
        " reached)"
    )


def test_scenarios_are_chosen_by_name() -> None:
    assert choose_scenarios(DrillSection()) == list(SCENARIOS)
    assert choose_scenarios(DrillSection(scenarios="grow, kill,grow,shrink")) == ["grow", "kill", "shrink"]
    with pytest.raises(ConfigError, match=r"'nod' is not a scenario\. The scenarios are kill, kill_twice, .*driver"):
        choose_scenarios(DrillSection(scenarios="kill,nod"))


def test_the_help_and_the_page_name_all_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert f"The scenarios are {', '.join(SCENARIOS)}." in " ".join(capsys.readouterr().out.split())
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(SCENARIOS)


@pytest.fixture
def make_config(digits: Path, tmp_path: Path) -> Callable[..., Config]:
    return partial(digits_config, digits, tmp_path / "runs")


def test_the_drill_changes_only_fields_without_effect_on_parameters(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(scaling__max_workers=4, scaling__logical_workers=4)
    drilled = make_drill_config(config, DrillSection(max_steps=40), starts_cluster=True)
    assert drilled.replace(train__max_steps=None).train == config.train
    assert (drilled.task, drilled.optimizer, drilled.schedule, drilled.data, drilled.seed) == (
        config.task,
        config.optimizer,
        config.schedule,
        config.data,
        config.seed,
    )
    assert drilled.checkpoint.every_steps == 5
    assert Path(drilled.run.storage_path).parent == tmp_path / "drills"
    assert (
        make_drill_config(make_config(evaluate__patience=2), DrillSection(), starts_cluster=True).evaluate.patience
        is None
    )
    with pytest.raises(ConfigError, match=r"would have 19 steps; a drill needs 20\. Raise drill\.max_steps"):
        make_drill_config(config, DrillSection(max_steps=19), starts_cluster=True)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"train__reduction": "overlapped"}, "train.reduction is 'overlapped', which does not give bit-identical"),
        ({"train__strategy": "parameter_server", "train__staleness": 2}, "train.staleness is 2, which does not"),
        ({"train__strategy": "single"}, "train.strategy is single: its only worker is the driver"),
    ],
)
def test_the_drill_refuses_runs_that_are_not_bit_identical(
    make_config: Callable[..., Config], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_drill_config(make_config(**fields), DrillSection(), starts_cluster=True)


def test_there_is_no_evaluator_to_kill_when_workers_evaluate(tmp_path: Path) -> None:
    context = scenario_context(tmp_path, evaluate__where="workers")
    assert evaluator(context) == "there is no evaluator with evaluate.where workers"
