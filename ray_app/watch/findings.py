"""What a preflight or a check of a task found, line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from ray_app.errors import ConfigError, DataError
from ray_app.record.redact import redact

Level = Literal["ok", "warning", "refused", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of it.

    Args:
        level: `refused`: the run would not work, and nothing is started. `failed`: it would start, and not keep what is promised.
        topic: What was looked at, in a word or two.
        text: What was found, and what to do about it.
    """

    level: Level
    topic: str
    text: str


def look(topic: str, see: Callable[[], str | Finding]) -> Finding:
    """Looks at one thing.

    Args:
        topic: What it is.
        see: Returns what is well, or a finding of another level.

    Returns:
        The finding; an error is a refusal, since the run would meet it, too.
    """
    try:
        found = see()
    except (ConfigError, DataError) as error:
        return Finding("refused", topic, str(error))
    except Exception as error:
        return Finding("refused", topic, f"{type(error).__name__}: {error}")
    return found if isinstance(found, Finding) else Finding("ok", topic, found)


def refused(findings: list[Finding]) -> bool:
    """Whether any of them is a refusal."""
    return any(finding.level == "refused" for finding in findings)


def show(console: Console, findings: list[Finding]) -> None:
    """Prints them, further lines of a text below its first."""
    width = max((len(finding.topic) for finding in findings), default=0)
    for finding in findings:
        start = f"{finding.level:<8} {finding.topic:<{width}}  "
        text = redact(finding.text).replace("\n", "\n" + " " * len(start))
        console.print(start + text, markup=False, highlight=False, soft_wrap=True)
