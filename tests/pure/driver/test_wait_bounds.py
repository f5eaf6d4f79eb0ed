"""A run that is to end is not waited for without an end, and never given up while a worker gets on."""

from __future__ import annotations

from typing import Any

import pytest

from ray_app.driver.run import END_LIMIT_S, STOP_LIMIT_S, WaitLimits
from ray_app.train.membership import RendezvousStatus

LIVE = {"a", "b"}


def status(step: int = 5, live: set[str] = LIVE) -> RendezvousStatus:
    return RendezvousStatus(live, set(), {}, len(live), step, None, None, True, 60.0)


def after(bounds: WaitLimits, seconds: float, seen: RendezvousStatus | None, phases: Any) -> str | None:
    bounds.check(100.0, seen, phases)
    return bounds.check(100.0 + seconds, seen, phases)


@pytest.mark.parametrize(
    ("seen", "phases", "said"),
    [
        (None, [], "the rendezvous has not answered"),
        (status(), ["data", "reduction"], "a worker has waited for data"),
        (status(live=set()), [], "there has been no worker, and the controller has not ended"),
        (status(), [], "the workers have formed no group"),
    ],
)
def test_a_run_that_is_to_stop_and_waits_is_given_up(
    seen: RendezvousStatus | None, phases: list[str], said: str
) -> None:
    assert after(WaitLimits(9), STOP_LIMIT_S - 1, seen, phases) is None
    assert after(WaitLimits(9), STOP_LIMIT_S, seen, phases) == f"{said} for {STOP_LIMIT_S:g} s"


@pytest.mark.parametrize("phase", ["compute", "reduction", "saving", "evaluate"])
def test_a_worker_that_gets_on_is_not_given_up(phase: str) -> None:
    assert after(WaitLimits(9), 1000.0, status(), [phase, "reduction"]) is None


def test_a_step_that_is_finished_begins_the_time_anew() -> None:
    bounds = WaitLimits(9)
    bounds.check(0.0, status(5), ["data"])
    assert bounds.check(STOP_LIMIT_S, status(6), ["data"]) is None
    assert bounds.check(2 * STOP_LIMIT_S, status(6), ["data"])


def test_a_controller_that_does_not_end_after_the_last_step_is_given_up() -> None:
    assert after(WaitLimits(9), END_LIMIT_S, status(9, live=set()), None) == (
        "all steps are done, all workers have left, and Ray Train's controller has not ended for 60 s"
    )
    assert after(WaitLimits(9), 1000.0, status(9), None) is None, "workers write the last checkpoint"
    assert after(WaitLimits(9), 1000.0, status(8, live=set()), None) is None, "others are on their way"
    assert after(WaitLimits(9), 1000.0, None, None) is None, "nobody asked the run to stop"
