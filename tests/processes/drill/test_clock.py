"""The drill shifts the clock of a process, and records with the shifted clock count as evidence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ray_app.drill import process_scenarios
from ray_app.drill.certificate import collect_measurements
from ray_app.drill.scenario import Scenario
from tests.support.drill_scenarios import make_result, make_step_record


def test_a_clock_jump_shifts_the_wall_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))
    before_s, steady_s = time.time(), time.monotonic()
    for offset_s in (7200, -10800, 0):
        process_scenarios.shift_clock(offset_s)
        assert (time.time(), time.time_ns() / 1e9) == (pytest.approx(before_s + offset_s, abs=60),) * 2
    assert time.monotonic() - steady_s < 60


def test_measurements_correct_records_of_a_shifted_clock(tmp_path: Path) -> None:
    hour = 3600
    evidence = {
        f"clock-{i}": {"time_s": 100.5 + n, "step": n, "clock_s": off}
        for i, (n, off) in enumerate([(2, hour), (4, -hour), (6, 0)])
    }
    off_s = {3: hour, 4: hour, 5: -hour, 6: -hour}
    records = [make_step_record(n, time_s=100.0 + n + off_s.get(n, 0)) for n in range(1, 9)]
    run = make_result(tmp_path / "run", evidence, records)
    assert process_scenarios.confirm_clock_jumps(run) == ["the run has no report"]
    run.paths.report.touch()
    assert process_scenarios.confirm_clock_jumps(run) == []
    measurements = collect_measurements(Scenario([2, 4, 6], [*evidence], process_scenarios.confirm_clock_jumps), run)
    assert measurements["next_step_s"] == [0.5, 0.5, 0.5]
    assert measurements["goodput"] == pytest.approx(1.0, abs=0.2)
    right = make_result(tmp_path / "right", evidence, [make_step_record(n) for n in range(1, 9)])
    right.paths.report.touch()
    assert process_scenarios.confirm_clock_jumps(right) == [
        "steps after 2 were not recorded by a clock that is 3600 s wrong",
        "steps after 4 were not recorded by a clock that is -3600 s wrong",
    ]
