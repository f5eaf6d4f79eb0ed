"""Which checkpoints may go: one pure function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALL = 1_000_000_000


@dataclass(frozen=True)
class Hold:
    """What a follower (an evaluator) still needs: the newest checkpoints after `done_step`, until it expires.

    Args:
        done_step: Newest step that it is done with.
        expires_s: When the hold ends unless it is renewed, seconds since 1970 (UTC).
        most: How many it keeps alive at most; older ones go, and are recorded as skipped.
        evaluator: Name of the evaluator; None: the run's own.
    """

    done_step: int
    expires_s: float
    most: int = 32
    evaluator: str | None = None


def removable(steps: Iterable[int], keep_last: int, best: Iterable[int], holds: Iterable[Hold], now_s: float) -> set[int]:
    """Steps of the checkpoints that nobody needs.

    Args:
        steps: Steps of all intact checkpoints.
        keep_last: Newest ones to keep; at least one always stays.
        best: Steps to keep besides.
        holds: What the followers say; expired ones do not count.
        now_s: Seconds since 1970 (UTC).
    """
    ordered = sorted(set(steps))
    kept = set(ordered[-max(1, keep_last) :]) | set(best)
    for hold in holds:
        if hold.expires_s > now_s:
            kept |= set([step for step in ordered if step > hold.done_step][-hold.most :])
    return set(ordered) - kept


def skipped(gone: Iterable[int], holds: Iterable[Hold], now_s: float) -> set[tuple[int, str | None]]:
    """The removed checkpoints that an evaluator was still waiting for, each with its name; the run's own has none.

    A named one counts while its hold lives; the run's own waits also when it finds no room or is being started again.
    """
    waiting = [hold for hold in holds if hold.evaluator is None or hold.expires_s > now_s]
    return {(step, hold.evaluator) for hold in waiting for step in gone if step > hold.done_step}
