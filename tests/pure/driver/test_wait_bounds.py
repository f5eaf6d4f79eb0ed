"""The driver waits a limited time for a run to end, and does not end it while a worker makes progress."""

from __future__ import annotations

from typing import Any

import pytest

from ray_app.driver.run import END_LIMIT_S, STOP_LIMIT_S, WaitLimits
from ray_app.train.membership import RendezvousStatus

LIVE = {"a", "b"}


def status(step: int = 5, live: set[str] = LIVE) -> RendezvousStatus:
    return RendezvousStatus(live, set(), {}, len(live), step, None, None, True, 60.0)


def message_after(
    bounds: WaitLimits, seconds: float, rendezvous_status: RendezvousStatus | None, phases: Any
) -> str | None:
    bounds.check(100.0, rendezvous_status, phases)
    return bounds.check(100.0 + seconds, rendezvous_status, phases)


@pytest.mark.parametrize(
    ("rendezvous_status", "phases", "message"),
    [
        (None, [], "the rendezvous has not answered"),
        (status(), ["data", "reduction"], "a worker has waited for data"),
        (status(live=set()), [], "there has been no worker, but the controller has not ended"),
        (status(), [], "the workers have not formed a group"),
    ],
)
def test_a_stopping_run_without_progress_is_ended_after_the_limit(
    rendezvous_status: RendezvousStatus | None, phases: list[str], message: str
) -> None:
    assert message_after(WaitLimits(9), STOP_LIMIT_S - 1, rendezvous_status, phases) is None
    assert message_after(WaitLimits(9), STOP_LIMIT_S, rendezvous_status, phases) == f"{message} for {STOP_LIMIT_S:g} s"


@pytest.mark.parametrize("phase", ["compute", "reduction", "saving", "evaluate"])
def test_a_run_with_a_worker_that_makes_progress_is_not_ended(phase: str) -> None:
    assert message_after(WaitLimits(9), 1000.0, status(), [phase, "reduction"]) is None


def test_a_finished_step_restarts_the_limit() -> None:
    bounds = WaitLimits(9)
    bounds.check(0.0, status(5), ["data"])
    assert bounds.check(STOP_LIMIT_S, status(6), ["data"]) is None
    assert bounds.check(2 * STOP_LIMIT_S, status(6), ["data"])


def test_a_controller_that_does_not_end_after_the_last_step_is_ended() -> None:
    assert message_after(WaitLimits(9), END_LIMIT_S, status(9, live=set()), None) == (
        "all steps are done and all workers have exited, but Ray Train's controller has not ended for 60 s"
    )
    assert message_after(WaitLimits(9), 1000.0, status(9), None) is None, (
        "the run was ended while workers write the last checkpoint"
    )
    assert message_after(WaitLimits(9), 1000.0, status(8, live=set()), None) is None, (
        "the run was ended while replacement workers start"
    )
    assert message_after(WaitLimits(9), 1000.0, None, None) is None, (
        "the run was ended although it was not asked to stop"
    )
