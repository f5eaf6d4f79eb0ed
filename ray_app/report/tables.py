"""The tables of a report: budgets, counters, where the time went, what happened, and the comparison with an earlier run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ray_app.record.progress.history import count, counted_word, recoveries, restarts
from ray_app.report.axes import seconds
from ray_app.report.facts import Facts
from ray_app.report.figures import described
from ray_app.report.series import starts_of
from ray_app.report.story import slow_now

_ORDINARY = ("checkpointed", "evaluated", "left", "workers")
_MOST_HAPPENINGS, _MOST_CHARS = 300, 8000


@dataclass(frozen=True)
class BudgetLine:
    """What may go wrong, and what did.

    Args:
        name: What.
        used: In the newest start.
        allowed: Per start; None: any number.
        ever: In all starts.
    """

    name: str
    used: int
    allowed: int | None
    ever: int

    @property
    def part(self) -> float:
        """Of the budget, at most 1."""
        return min(1.0, self.used / self.allowed) if self.allowed else float(self.allowed == 0 and self.used > 0)


def budgets(facts: Facts) -> list[BudgetLine]:
    """The ledger: failures and preemptions against what is allowed in one start."""
    limits, starts = facts.config.failure, starts_of(facts.events)
    this = [event for event in facts.events if starts and event.fence == starts[-1].fence]
    made = []
    for name, kind, most in (("failures", "failed", limits.max_failures), ("preemptions", "preempted", limits.max_preemptions)):
        made.append(BudgetLine(name, count(this, kind), most if most >= 0 else None, count(facts.events, kind)))
    return made


def counters(facts: Facts) -> list[tuple[str, str, str]]:
    """What has no budget, over all starts: name, number and a note."""
    events, happened = facts.events, restarts(facts.events)
    waits = recoveries(events, facts.in_time)
    back = ", ".join(seconds(wait) for wait in waits[:12]) + (f" and {len(waits) - 12} more" if len(waits) > 12 else "")
    return [
        ("steps done again", f"{len(facts.repeated):,}", "finished before, and lost with the workers"),
        ("recoveries", f"{len(waits):,}", f"seconds from a loss to the next finished step: {back}" if waits else ""),
        ("resizes", f"{count(events, 'resized'):,}", ""),
        ("workers replaced", f"{count(events, 'replaced'):,}", "after failures"),
        ("failures of the storage", f"{happened['storage']:,}", "charged to no budget"),
        ("driver restarts", f"{happened['driver']:,}", ""),
        ("checkpoints", f"{count(events, 'checkpointed'):,}", "committed"),
        ("checkpoint writes", f"{count(events, 'write_retried'):,}", f"retried; {count(events, 'write_failed'):,} failed for good"),
        ("fallbacks", f"{count(events, 'fallback'):,}", "checkpoints passed over as damaged"),
        ("evaluations", f"{len(facts.evaluations):,}", f"{count(events, 'evaluation_skipped'):,} skipped"),
        *health(facts),
    ]


def health(facts: Facts) -> list[tuple[str, str, str]]:
    """What is known of workers that are slow or compute wrongly: name, number and a note; nothing where there is nothing to tell."""
    found, slow = list[tuple[str, str, str]](), slow_now(facts.events)
    if slow:
        found.append(("slow workers now", f"{len(slow)}", "; ".join(described(event) for event in slow.values())))
    if facts.course.replayed:
        wrong = counted_word(count(facts.events, "lied"), "worker")
        found.append(("shares computed twice", f"{facts.course.replayed:,}", f"{wrong} found to compute wrongly"))
    return found


def time_parts(facts: Facts) -> list[tuple[str, str, float]]:
    """Where the time since the first step went: tone, name, part of it; the parts add up to 1. Empty without a goodput."""
    part, records = facts.goodput, facts.in_time
    if part is None:
        return []
    wall_s = records[-1].time_s - facts.records[0].time_s
    redone = sum(record.step_ms for record in facts.repeated) / 1e3 / wall_s
    still = sum(max(0.0, b.time_s - a.time_s - b.step_ms / 1e3) for a, b in pairwise(records)) / wall_s
    redone = min(redone, 1 - part)
    still = min(still, 1 - part - redone)
    slower = 1 - part - redone - still
    return [
        ("green", "steps that counted, at the undisturbed speed", part),
        ("orange", "steps on fewer workers, or slower ones", slower),
        ("purple", "nobody stepped: recovery, new starts", still),
        ("red", "steps done again", redone),
    ]


def happenings(facts: Facts) -> list[tuple[str, str, str]]:
    """Everything that is not ordinary: the run's time, the kind, and words. At most the newest 300."""
    told = [event for event in facts.events if event.kind not in _ORDINARY]
    return [
        (seconds(facts.clock.at(event.time_s)), event.kind.replace("_", " "), described(event)[:_MOST_CHARS])
        for event in told[-_MOST_HAPPENINGS:]
    ]


def comparison(facts: Facts) -> list[tuple[str, str, str]]:
    """This run and the best earlier one: what, here, there. Empty if there is none."""
    earlier = facts.earlier
    if earlier is None:
        return []
    theirs, best = earlier.summary, facts.best
    digest = facts.digest
    same = " (equal)" if digest and digest == theirs.get("params_digest") else ""
    wall_s = (theirs.get("timing") or {}).get("wall_s")
    return [
        (
            f"best {facts.metric}",
            f"{best.metrics[facts.metric]:.4f} at step {best.step:,}" if best else "-",
            f"{earlier.value:.4f} at step {earlier.step:,}",
        ),
        ("parameters", _short(digest) + same, _short(theirs.get("params_digest"))),
        ("steps", f"{facts.records[-1].step if facts.records else 0:,}", _text(theirs.get("steps"))),
        ("rows", f"{facts.rows:,}", _text(theirs.get("rows"))),
        ("wall time", seconds(facts.wall_s), seconds(wall_s) if isinstance(wall_s, (int, float)) else "-"),
        ("goodput", _percent(facts.goodput), _percent(theirs.get("goodput"))),
        ("workers", sizes_text(facts.sizes), sizes_text(theirs.get("world_sizes"))),
    ]


def _short(digest: Any) -> str:
    return str(digest)[:12] if digest else "-"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, (int, float)) else "-"


def sizes_text(sizes: Any) -> str:
    """`2 → 1 → 2`, shortened in the middle."""
    try:
        shown = [str(int(workers)) for _, workers in sizes]
    except (TypeError, ValueError):
        return "-"
    return " → ".join(shown if len(shown) <= 12 else [*shown[:6], "…", *shown[-5:]]) or "-"
