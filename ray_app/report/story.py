"""What happened to the cluster, in one line."""

from __future__ import annotations

from ray_app.config.sections import FailureSection
from ray_app.record.progress.history import counted_word, disturbances, recoveries, world_sizes
from ray_app.record.progress.journal import Event
from ray_app.record.progress.steps import Course
from ray_app.report.axes import seconds

_MOST_SIZES = 8


def slow_now(events: list[Event]) -> dict[int, Event]:
    """Of the newest set of workers those that keep the others waiting, by rank, with what was said of them."""
    found = dict[int, Event]()
    for event in events:
        if event.kind == "formed":
            found.clear()
        elif event.kind == "slowed":
            found[event.details["rank"]] = event
        elif event.kind == "kept_up":
            found.pop(event.details["rank"], None)
    return found


def what_happened(events: list[Event], course: Course, limits: FailureSection) -> str:
    """One line: disturbances against their budgets, numbers of workers, steps done again, and seconds until the next step.

    Args:
        events: The run's, in the order of time.
        course: Its steps.
        limits: The budgets.
    """
    happened = disturbances(events, limits)
    parts = [happened or "nothing went wrong"]
    sizes = [workers for _, workers in world_sizes(course.records)]
    if len(sizes) == 1:
        parts.append(f"{counted_word(sizes[0], 'worker')} throughout")
    elif len(sizes) > _MOST_SIZES:
        parts.append(f"{len(sizes) - 1} changes between {min(sizes)} and {counted_word(max(sizes), 'worker')}")
    elif sizes:
        parts.append(f"workers {' → '.join(map(str, sizes))}")
    if course.repeated:
        parts.append(f"{counted_word(len(course.repeated), 'step')} redone")
    elif happened:
        parts.append("nothing lost: 0 steps redone")
    waits = recoveries(events, course.in_time)
    if waits:
        low, high = seconds(min(waits)), seconds(max(waits))
        parts.append(f"back after {low}" if low == high else f"back after {low} to {high}")
    return "; ".join(parts)
