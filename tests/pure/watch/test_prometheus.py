"""Speed and goodput as a run's metrics have them: from looks once a second, and the same as those of its whole
record.
"""

from __future__ import annotations

import pytest

from ray_app.runlog.history import goodput
from ray_app.runlog.journal import StepRecord
from ray_app.watch.prometheus import RunMetrics, Speed

ROWS, STEP_S = 16, 0.1


class Course:
    """A run that is looked at every second; its clock is not the driver's."""

    def __init__(self) -> None:
        self.pace, self.now_s, self.step = Speed(ROWS), 0.0, 0
        self.records, self.repeated = list[StepRecord](), list[StepRecord]()
        self._looked_s, self._generation, self._workers = 0.0, 0, 0

    def form(self, workers: int, after_s: float, back_to: int | None = None) -> None:
        """Nobody steps for a while, then so many workers do, from that step on."""
        self._pass(after_s)
        self._generation, self._workers = self._generation + 1, workers
        self.step = self.step if back_to is None else back_to

    def go(self, steps: int, each_s: float = STEP_S) -> None:
        for _ in range(steps):
            self._pass(each_s)
            self.step += 1
            since_s = 5000 + self.now_s  # the clock of rank 0
            made = StepRecord(
                self.step,
                0,
                since_s,
                1.0,
                0.1,
                1.0,
                each_s * 1e3,
                0.0,
                self._workers,
                [8, 8],
                [1, 2],
                f"1.{self._generation}",
            )
            (self.repeated if self.step <= len(self.records) else self.records).append(made)
            self._newest = made

    def _pass(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._looked_s + 1 <= end_s:
            self._looked_s += 1
            if self.step:
                self.pace.look(self._newest, self._looked_s)
        self.now_s = end_s

    @property
    def whole(self) -> float:
        """What the record says."""
        found = goodput(self.records, self.repeated)
        assert found is not None
        return found


def test_goodput_is_that_of_the_record() -> None:
    course = Course()
    course.form(2, 5.0)
    course.go(300)
    assert course.pace.goodput == course.whole == 1.0
    course.form(2, 20.0)  # all wait
    course.go(300)
    assert course.pace.goodput == pytest.approx(course.whole, abs=0.02)
    assert course.whole == pytest.approx(0.75, abs=0.01)
    course.form(1, 0.5)
    course.go(100, 2 * STEP_S)  # half as many workers, half as fast
    assert course.pace.goodput == pytest.approx(course.whole, abs=0.02)
    course.form(2, 3.0, back_to=course.step - 200)  # all were lost
    course.go(400)
    assert course.pace.goodput == pytest.approx(course.whole, abs=0.02)
    assert course.whole < 0.65


def test_goodput_of_a_run_that_grows_is_by_the_most_workers() -> None:
    course = Course()
    course.form(1, 1.0)
    course.go(100, 2 * STEP_S)
    course.form(2, 0.5)
    course.go(300)
    assert course.pace.goodput == pytest.approx(course.whole, abs=0.02)
    assert course.whole < 0.85


def test_goodput_and_speed_fall_while_nobody_steps() -> None:
    course = Course()
    course.form(2, 1.0)
    course.go(100)
    assert course.pace.rows_per_s == pytest.approx(ROWS / STEP_S)
    course.form(2, 30.0)
    assert course.pace.goodput == pytest.approx(0.25, abs=0.03)
    assert course.pace.rows_per_s == pytest.approx(ROWS / 30, rel=0.05)
    course.go(20)
    assert course.pace.rows_per_s == pytest.approx(ROWS / STEP_S)


def test_slow_steps_have_one_speed() -> None:
    course = Course()
    course.form(2, 1.0)
    course.go(4, 7.0)
    for _ in range(4):
        course.go(1, 7.0)
        assert course.pace.rows_per_s == pytest.approx(ROWS / 7)


def test_before_the_second_look_nothing_is_known() -> None:
    course = Course()
    course.form(2, 0.0)
    course.go(15)
    assert (course.pace.goodput, course.pace.rows_per_s) == (None, None)


def test_without_ray_nothing_is_set(caplog: pytest.LogCaptureFixture) -> None:
    RunMetrics("run").set("steps", 1)
    assert not caplog.records
