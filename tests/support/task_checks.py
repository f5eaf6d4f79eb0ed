"""What tests of tasks expect of `check_task`."""

from __future__ import annotations

from ray_app import TaskCheck

TOPICS = ("one row", "randomness", "training", "workers", "resume", "evaluation", "export")


def levels(check: TaskCheck, but: str = "") -> dict[str, str]:
    """The level of each check that runs the task, and of any other that found something wrong."""
    return {
        finding.topic: finding.level
        for finding in check.findings
        if finding.topic != but and (finding.topic in TOPICS or finding.level in ("failed", "refused"))
    }


def all_ok(but: str = "") -> dict[str, str]:
    """What `levels` returns if nothing is wrong."""
    return {topic: "ok" for topic in TOPICS if topic != but}
