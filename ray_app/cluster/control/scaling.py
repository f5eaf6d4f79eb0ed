"""How many workers a run should have now: one pure function, and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Sizing:
    """A decision.

    Args:
        workers: How many workers there should be.
        reason: Why, for the record.
    """

    workers: int
    reason: str


def sizing(
    now: int, possible: int, logical_workers: int, min_workers: int, max_workers: int, since_change_s: float, dwell_s: float
) -> Sizing:
    """How many workers a run should have.

    More workers pay only if the one that plays the most logical workers plays fewer of them. A group does not shrink by decision:
    workers whose nodes go away leave or are lost, and the others go on.

    Args:
        now: Workers that train.
        possible: Workers that the cluster has room for, those of now included; nodes that are about to go away do not count.
        logical_workers: L.
        min_workers: Fewest to train with.
        max_workers: Most.
        since_change_s: Seconds since the number of workers changed.
        dwell_s: Fewest seconds between two changes that are not urgent.
    """
    target = min(possible, max_workers)
    if target <= now:
        return Sizing(now, "no room for more" if now < max_workers else "as many as configured")
    if now < min_workers:
        return Sizing(target, f"below scaling.min_workers = {min_workers}") if target >= min_workers else Sizing(now, "not room for enough")
    before, after = ceil(logical_workers / now), ceil(logical_workers / target)
    if after == before:
        return Sizing(now, f"{target} workers would be as slow as {now}: one of them would still play {before} logical workers")
    if since_change_s < dwell_s:
        return Sizing(now, f"the last change was {since_change_s:.0f} s ago, scaling.resize_check_s is {dwell_s:g}")
    return Sizing(target, f"a worker would play {after} logical workers instead of {before}")
