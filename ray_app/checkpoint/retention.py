"""Chooses the checkpoints of a run that stay: the newest, the best, and the pinned ones of evaluators."""

from collections.abc import Iterable
from dataclasses import dataclass

ALL_CHECKPOINTS = 1_000_000_000
"""The `Pin.max_checkpoints` of an evaluator that needs every checkpoint. It is a number, since JSON has no infinity."""


@dataclass(frozen=True)
class Pin:
    """The declaration of an evaluator that it still needs the newest checkpoints after `done_step`.

    Args:
        expires_s: Time at which the pin ends unless it is renewed, seconds since 1970 (UTC).
        max_checkpoints: The maximum number of checkpoints that the pin keeps, at least 1. Older ones are removed, and
            their evaluations are recorded as skipped.
        evaluator: Name of the evaluator; None is the run's own evaluator.
    """

    done_step: int
    expires_s: float
    max_checkpoints: int = 32
    evaluator: str | None = None


def removable_steps(
    steps: Iterable[int], keep_last: int, best: Iterable[int], pins: Iterable[Pin], now_s: float
) -> set[int]:
    """Returns the steps of the checkpoints that can be removed.

    The newest `keep_last` of the intact checkpoints (at least one), the `best` ones, and those of pins that have not
    expired at `now_s` stay.
    """
    ordered = sorted(set(steps))
    kept = set(ordered[-max(1, keep_last) :]) | set(best)
    for pin in pins:
        if pin.expires_s > now_s:
            kept |= set([step for step in ordered if step > pin.done_step][-pin.max_checkpoints :])
    return set(ordered) - kept


def skipped_evaluations(removed: Iterable[int], pins: Iterable[Pin], now_s: float) -> set[tuple[int, str | None]]:
    """Returns the removed steps that an evaluator has not evaluated, with its name (None is the run's own evaluator).

    A named evaluator counts until its pin expires, the run's own one always, since it may wait for capacity.
    """
    waiting = [pin for pin in pins if pin.evaluator is None or pin.expires_s > now_s]
    return {(step, pin.evaluator) for pin in waiting for step in removed if step > pin.done_step}
