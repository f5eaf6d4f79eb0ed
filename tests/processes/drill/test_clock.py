"""The drill shifts the clock of a process: all of its code sees the shift, and records with it count as evidence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ray_app.drill import process_scenarios
from ray_app.drill.certificate import collect_measurements
from ray_app.drill.scenario import Scenario
from tests.support.drill_scenarios import make_result, make_step_record

CLOCKS = """
import ctypes, datetime, threading, time
from ray_app.drill import process_scenarios
libc, over = ctypes.CDLL(None), threading.Event()
def ask():
    while not over.is_set():
        time.time(), time.monotonic(), datetime.datetime.now()
def seen():
    pair = (ctypes.c_long * 2)()
    libc.gettimeofday(pair, None)
    coarse = time.clock_gettime(5)
    return [time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp(), libc.time(None), pair[0], coarse]
threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
before, steady = time.time(), time.monotonic()
for offset in (7200, -10800, 0):
    process_scenarios.shift_clock(offset)
    took = time.monotonic() - steady
    assert took < 600, took
    off = [each - before - took - offset for each in seen()]
    assert max(map(abs, off)) < 10, (offset, off)
over.set()
"""


@pytest.mark.rest
def test_a_clock_jump_reaches_all_code_of_the_process() -> None:
    if reason := process_scenarios.find_clock_obstacle():
        print(reason)
        pytest.skip(reason)
    done = subprocess.run([sys.executable, "-c", CLOCKS], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_measurements_correct_records_of_a_shifted_clock(tmp_path: Path) -> None:
    hour = 3600
    evidence = {
        f"clock-{i}": {"time_s": 100.5 + n, "step": n, "clock_s": off}
        for i, (n, off) in enumerate([(2, hour), (4, -hour), (6, 0)])
    }
    off_s = {3: hour, 4: hour, 5: -hour, 6: -hour}
    records = [make_step_record(n, time_s=100.0 + n + off_s.get(n, 0)) for n in range(1, 9)]
    run = make_result(tmp_path / "run", evidence, records)
    assert process_scenarios.confirm_clock_jumps(run) == ["there is no report of the run"]
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
