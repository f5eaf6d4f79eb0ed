"""The Prometheus metrics of speed and goodput, computed from one sample a second, agree with those of the run log."""

import pytest

from ray_app.runlog.history import goodput
from ray_app.runlog.journal import StepRecord
from ray_app.watch.metrics import RunMetrics, Speed

ROWS, STEP_S = 16, 0.1


class Course:
    """A run that is sampled once a second; its clock differs from the driver's."""

    def __init__(self) -> None:
        self.speed = Speed(ROWS)
        self.now_s = 0.0
        self.step = 0
        self.records, self.repeated = list[StepRecord](), list[StepRecord]()
        self._sampled_s = 0.0
        self._generation = 0
        self._workers = 0

    def form(self, workers: int, after_s: float, back_to: int | None = None) -> None:
        """Lets no worker step for `after_s`, then forms a generation that continues at step `back_to`, if given."""
        self._pass(after_s)
        self._generation, self._workers = self._generation + 1, workers
        self.step = self.step if back_to is None else back_to

    def go(self, steps: int, each_s: float = STEP_S) -> None:
        for _ in range(steps):
            self._pass(each_s)
            self.step += 1
            # The clock of rank 0 is ahead.
            since_s = 5000 + self.now_s
            record = StepRecord(
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
            (self.repeated if self.step <= len(self.records) else self.records).append(record)
            self._newest = record

    def _pass(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._sampled_s + 1 <= end_s:
            self._sampled_s += 1
            if self.step:
                self.speed.look(self._newest, self._sampled_s)
        self.now_s = end_s

    @property
    def goodput_of_record(self) -> float:
        """The goodput that the step records give."""
        value = goodput(self.records, self.repeated)
        assert value is not None
        return value


def test_sampled_goodput_agrees_with_the_step_records() -> None:
    course = Course()
    course.form(2, 5.0)
    course.go(300)
    assert course.speed.goodput == course.goodput_of_record == 1.0
    # All workers wait.
    course.form(2, 20.0)
    course.go(300)
    assert course.speed.goodput == pytest.approx(course.goodput_of_record, abs=0.02)
    assert course.goodput_of_record == pytest.approx(0.75, abs=0.01)
    course.form(1, 0.5)
    # Half as many workers are half as fast.
    course.go(100, 2 * STEP_S)
    assert course.speed.goodput == pytest.approx(course.goodput_of_record, abs=0.02)
    # All workers were lost, and 200 steps are repeated.
    course.form(2, 3.0, back_to=course.step - 200)
    course.go(400)
    assert course.speed.goodput == pytest.approx(course.goodput_of_record, abs=0.02)
    assert course.goodput_of_record < 0.65


def test_goodput_of_a_growing_run_is_measured_against_its_maximum_of_workers() -> None:
    course = Course()
    course.form(1, 1.0)
    course.go(100, 2 * STEP_S)
    course.form(2, 0.5)
    course.go(300)
    assert course.speed.goodput == pytest.approx(course.goodput_of_record, abs=0.02)
    assert course.goodput_of_record < 0.85


def test_goodput_and_speed_fall_while_no_worker_steps() -> None:
    course = Course()
    course.form(2, 1.0)
    course.go(100)
    assert course.speed.rows_per_s == pytest.approx(ROWS / STEP_S)
    course.form(2, 30.0)
    assert course.speed.goodput == pytest.approx(0.25, abs=0.03)
    assert course.speed.rows_per_s == pytest.approx(ROWS / 30, rel=0.05)
    course.go(20)
    assert course.speed.rows_per_s == pytest.approx(ROWS / STEP_S)


def test_steps_longer_than_the_sampling_interval_have_a_constant_speed() -> None:
    course = Course()
    course.form(2, 1.0)
    course.go(4, 7.0)
    for _ in range(4):
        course.go(1, 7.0)
        assert course.speed.rows_per_s == pytest.approx(ROWS / 7)


def test_before_the_second_sample_goodput_and_speed_are_none() -> None:
    course = Course()
    course.form(2, 0.0)
    course.go(15)
    assert (course.speed.goodput, course.speed.rows_per_s) == (None, None)


def test_without_ray_setting_a_metric_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    RunMetrics("run").set("steps", 1)
    assert not caplog.records
