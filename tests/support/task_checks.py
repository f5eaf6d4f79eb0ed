"""The results of `check_task` that tests of tasks expect."""

from ray_app import TaskCheck

TOPICS = ("one row", "randomness", "training", "workers", "resume", "evaluation", "export")


def levels(check: TaskCheck, without: str = "") -> dict[str, str]:
    """Returns the level of each check that runs the task, and of each other one that failed."""
    return {
        finding.topic: finding.level
        for finding in check.findings
        if finding.topic != without and (finding.topic in TOPICS or finding.level in ("failed", "refused"))
    }


def all_ok(without: str = "") -> dict[str, str]:
    """Returns what `levels` returns for a correct task."""
    return {topic: "ok" for topic in TOPICS if topic != without}
