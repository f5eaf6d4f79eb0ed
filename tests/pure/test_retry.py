"""Retries: their number, the length of pauses, and the errors that end them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ray_app import retry
from ray_app.retry import Retry


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses = list[float]()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(retry, "time", fake)
    return fake


def make_failing(*errors: Exception) -> Callable[[], str]:
    """Returns a function that raises these errors, one per call, and then succeeds."""
    errors_left = list(errors)

    def work() -> str:
        if errors_left:
            raise errors_left.pop(0)
        return "done"

    return work


def test_pauses_grow_up_to_a_maximum_and_none_follows_the_last_attempt(clock: Clock) -> None:
    plan = Retry(0.5, max_pause_s=3.0, attempts=6)
    assert plan.call(make_failing(*[OSError("503")] * 5), OSError, "The write") == "done"
    assert clock.pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    clock.pauses.clear()
    with pytest.raises(OSError, match="the last"):
        plan.call(make_failing(*[OSError("503")] * 5, OSError("the last")), OSError, "The write")
    assert len(clock.pauses) == 5
    assert plan.pause_s(10**6) == 3.0, "the pause of a late attempt overflows"


def test_a_deadline_ends_the_attempts(clock: Clock) -> None:
    calls = list[float]()

    def work() -> None:
        calls.append(clock.now_s)
        raise OSError("503")

    with pytest.raises(OSError, match="503"):
        Retry(1.0, factor=1.0, deadline_s=3.0).call(work, OSError, "The write")
    assert calls == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_jitter_shortens_pauses(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "random", random.Random(1))
    Retry(1.0, factor=1.0, jitter=0.5).call(make_failing(*[OSError("503")] * 100), OSError, "The write")
    assert 0.5 <= min(clock.pauses) < 0.55
    assert 0.95 < max(clock.pauses) <= 1.0


def test_only_the_named_errors_are_retried(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="wrong"):
        Retry(1.0).call(make_failing(OSError("503"), ValueError("wrong")), OSError, "The write")

    def refuse(error: Exception) -> None:
        refused_errors.append(error)
        if "404" in str(error):
            raise LookupError("gone") from error

    refused_errors = list[Any]()
    caplog.clear()
    with pytest.raises(LookupError, match="gone"):
        Retry(1.0, attempts=9).call(make_failing(OSError("503"), OSError("404")), OSError, "The write", refuse)
    assert [str(error) for error in refused_errors] == ["503", "404"]
    assert caplog.messages == ["The write: attempt 1 of 9 failed, next try in 1.0 s: OSError: 503"]


def test_the_last_failure_is_logged_as_such(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="503"):
        Retry(1.0, attempts=1).call(make_failing(OSError("503")), OSError, "The write")
    assert caplog.messages == ["The write: attempt 1 of 1 failed: OSError: 503"]
