"""The step watchdog counts a generation as stalled when no step finishes within a limit."""

import pytest

from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import StepWatchdog


def record_of(step: int, step_s: float) -> StepRecord:
    return StepRecord(step, 0, float(step), 0.5, 0.1, 1.0, 1e3 * step_s, 0.0, 1, [4], [0], "1.1")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("step_s", "limit_s"),
    [(0.1, 60.0), (1.2, 60.0), (2.0, 100.0), (60.0, 3000.0)],
)
def test_the_default_limit_is_50_median_steps_or_a_minute_if_that_is_longer(step_s: float, limit_s: float) -> None:
    clock = Clock()
    watchdog = StepWatchdog(None, clock)
    watchdog.begin(0)
    assert watchdog.limit_s == 5 * 600, (
        "without a measured step, the limit of the first step of a generation should be five times the initial one"
    )
    for step in range(1, 12):
        # Two slow steps do not change the median.
        watchdog.note_step(step, record_of(step, step_s if step < 10 else 1000 * step_s))
    assert watchdog.limit_s == limit_s
    clock.now += limit_s - 0.1
    assert watchdog.count_stalls(clock.now) == 0
    clock.now += 0.2
    assert [watchdog.count_stalls(clock.now), watchdog.count_stalls(clock.now)] == [1, 0]
    clock.now += limit_s + 0.1
    assert watchdog.count_stalls(clock.now) == 2
    watchdog.begin(11)
    assert watchdog.limit_s == 5 * limit_s


def test_a_configured_limit_is_five_times_as_long_for_the_first_step() -> None:
    watchdog = StepWatchdog(30.0, Clock())
    watchdog.begin(4)
    assert watchdog.limit_s == 150.0
    watchdog.note_step(5, None)
    assert watchdog.limit_s == 30.0


def test_a_step_record_that_heartbeats_repeat_counts_once() -> None:
    watchdog = StepWatchdog(None, Clock())
    watchdog.begin(0)
    for step, step_s, heartbeats in ((1, 2.0, 1), (2, 2.0, 1), (3, 40.0, 100)):
        for _ in range(heartbeats):
            watchdog.note_step(step, record_of(step, step_s))
    assert watchdog.limit_s == 100.0
