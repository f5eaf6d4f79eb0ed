"""What the record says of a run's course: world sizes, disturbances, recoveries, goodput. Pure functions of step
records and events.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

from ray_app.config.sections import FailureSection
from ray_app.runlog.journal import Event, StepRecord

SETTLING_S = 3.0
"""Seconds after a change of the workers whose steps do not count as undisturbed."""


def world_sizes(records: Iterable[StepRecord]) -> list[list[int]]:
    """`[from_step, workers]` for every stretch of steps with one number of workers; steps count from 0."""
    stretches: list[list[int]] = []
    for record in records:
        if not stretches or stretches[-1][1] != record.workers:
            stretches.append([record.step - 1, record.workers])
    return stretches


def restarts(events: list[Event]) -> dict[str, int]:
    """How often the workers or the driver were started again, by cause; a start of a run that had finished before is no
    restart.
    """
    ended = {event.fence for event in events if event.kind in ("finished", "stopped_early")}
    starts = [event.fence for event in events if event.kind == "started"]
    return {
        "failures": count(events, "failed"),
        "preemptions": count(events, "preempted"),
        "storage": count(events, "storage_failed"),
        "resizes": count(events, "resized"),
        "driver": sum(fence not in ended for fence in starts[:-1]),
    }


def start(events: list[Event], records: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of each phase of the newest start that made a step, in their order: from the command, where there was
    one.
    """
    newest = max((record.time_s for record in records), default=0.0)
    begun = next((event for event in reversed(events) if event.kind == "started" and event.time_s <= newest), None)
    if begun is None:
        return {}
    first_s = min(record.time_s for record in records if record.time_s >= begun.time_s)
    before = [event for event in events if begun.time_s <= event.time_s <= first_s]
    phases, since = dict(begun.details.get("phases", {})), begun.time_s
    for kind, phase in (("workers", "workers"), ("formed", "forming")):
        for event in before:
            if event.kind == kind and event.time_s >= since:
                phases[phase], since = event.time_s - since, event.time_s
                break
    phases["first step"] = first_s - since
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}


def recoveries(events: list[Event], records: Iterable[StepRecord]) -> list[float]:
    """Seconds from each loss of workers, when the others (or, without others, the controller) noticed it, to the next
    finished step.
    """
    times = array("d", sorted(record.time_s for record in records))
    noticed = [
        e.time_s for e in events if e.kind in ("failed", "preempted", "storage_failed") and not e.details["left"]
    ]
    noticed += [e.details["lost_s"] for e in events if e.kind == "formed" and "lost_s" in e.details]
    return [round(times[next_] - t, 3) for t in sorted(noticed) if (next_ := bisect_right(times, t)) < len(times)]


def means(records: Sequence[StepRecord]) -> dict[str, float]:
    """The loss and the task's own metrics over some steps, at least one; each step counts by what its own means are
    over.
    """
    found = dict[str, float]()
    for name in dict.fromkeys(["loss", *(name for record in records for name in record.metrics)]):
        values = [
            (r.loss if name == "loss" else r.metrics[name], r.over)
            for r in records
            if name == "loss" or name in r.metrics
        ]
        over = sum(weight for _, weight in values)
        found[name] = sum(value * weight for value, weight in values) / over if over else math.nan
    return found


def goodput(records: Sequence[StepRecord], repeated: Sequence[StepRecord]) -> float | None:
    """Rows that counted x undisturbed time per row / wall time since the first step; 1 means that nothing was lost,
    None: too few steps.

    Args:
        records: The steps that counted, in order.
        repeated: Those that were done again.
    """
    if len(records) < 2:
        return None
    wall_s = max(r.time_s for r in chain(records, repeated)) - records[0].time_s
    rows = sum(sum(r.rows) for r in records[1:])
    return round(min(1.0, rows * undisturbed_row_s(records) / wall_s), 4) if wall_s > 0 else None


def undisturbed_row_s(records: Sequence[StepRecord]) -> float:
    """Seconds per row in the stretches of steps on the most workers that the run had, without the first 3 s of each
    stretch.

    A stretch ends where the generation or the number of workers changes. It is the time of all these steps over all
    their rows, a mean, so checkpoints and waiting for data count as normal work. A run with no such steps, because it
    is so short, takes all on the most workers.

    Args:
        records: At least two steps, in order; the first only sets the clock.
    """
    full = max(r.workers for r in records[1:])
    start, began_s = None, 0.0
    settled_ms = settled_rows = all_ms = all_rows = 0.0
    for number, record in enumerate(records):
        if start != (record.generation, record.workers):
            start, began_s = (record.generation, record.workers), record.time_s
        if record.workers != full:
            continue
        if number:
            all_ms, all_rows = all_ms + record.step_ms, all_rows + sum(record.rows)
        if record.time_s > began_s + SETTLING_S:
            settled_ms, settled_rows = settled_ms + record.step_ms, settled_rows + sum(record.rows)
    ms, rows = (settled_ms, settled_rows) if settled_rows else (all_ms, all_rows)
    return ms / 1e3 / max(1, rows)


def disturbances(events: list[Event], limits: FailureSection) -> str:
    """What went wrong in all starts, in words: `1 of 5 failures, 3 of unlimited preemptions, 1 failure of the storage,
    2 resizes`.

    Args:
        events: The run's.
        limits: The budgets.
    """
    happened = restarts(events)
    parts = []
    for name, most in (("failures", limits.max_failures), ("preemptions", limits.max_preemptions)):
        if happened[name]:
            parts.append(f"{happened[name]} of {most if most >= 0 else 'unlimited'} {name}")
    if happened["storage"]:
        parts.append(f"{counted_word(happened['storage'], 'failure')} of the storage")
    if happened["resizes"]:
        parts.append(counted_word(happened["resizes"], "resize"))
    if happened["driver"]:
        parts.append(counted_word(happened["driver"], "driver restart"))
    return ", ".join(parts)


def count(events: Iterable[Event], kind: str) -> int:
    """How many events are of a kind."""
    return sum(event.kind == kind for event in events)


def counted_word(number: int, name: str) -> str:
    """`1 resize`, `2 resizes`."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"
