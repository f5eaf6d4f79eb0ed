"""`check_task`, of which `ray-app check` prints the findings: all checks before a run, on the CPU and without Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from ray_app.config.config import Config
from ray_app.errors import BadRowError, RayAppError, TaskError, is_refusal
from ray_app.preflight.checks import CHECKS, Check
from ray_app.preflight.context import PreflightContext
from ray_app.runlog.redaction import redact
from ray_app.watch.terminal import Finding, has_refusal


@dataclass(frozen=True)
class TaskCheck:
    """The findings of `check_task`.

    Args:
        findings: At least one finding for each check; the level is `ok`, `warning`, `failed` or `refused`.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Returns whether a run would start and keep its guarantees."""
        return all(finding.level in ("ok", "warning") for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Returns the exit code of `ray-app check`: 2 if the run is refused, 1 if a check failed, otherwise 0."""
        return 2 if has_refusal(list(self.findings)) else int(not self.ok)

    def __str__(self) -> str:
        return "\n".join(f"{finding.level:<8} {finding.topic}: {redact(finding.text)}" for finding in self.findings)


def check_task(config: Config) -> TaskCheck:
    """Runs some rows through everything that a run does with a task, on the CPU and without Ray, and returns findings.

    The checks are those of a start; and decoding, training on one worker and on four, a resume in the middle,
    evaluation and export. They also look for random numbers that come neither from torch's generators nor from the
    keys. All processes and files of the check are gone when it returns. A test of a project can be
    `check = check_task(load_config("train.yaml")); assert check.ok, check`.

    Args:
        config: A configuration, for example from `load_config`. Its `run` section does not matter.

    Returns:
        The findings of all checks, also if the configuration or the data is refused.
    """
    return TaskCheck(tuple(iter_findings(config)))


def iter_findings(config: Config) -> Iterator[Finding]:
    """Yields the findings of `check_task` as the checks end."""
    # The strategy `single` has no workers.
    strategy = "ddp" if config.train.strategy == "single" else config.train.strategy
    refused, untried = list[str](), list[str]()
    with closing(PreflightContext(config.replace(run__name=None, train__strategy=strategy))) as context:
        for check in CHECKS:
            if refused and (not check.at_start or not {*refused, *untried}.isdisjoint(check.needs)):
                untried.append(check.name)
                continue
            start_s = time.monotonic()
            try:
                outcome = check.execute(context)
            except RayAppError as error:
                refused.append(check.name)
                yield _describe_error(check, error, time.monotonic() - start_s)
                continue
            if outcome is not None:
                seconds = time.monotonic() - start_s if outcome.seconds is None else outcome.seconds
                yield Finding(outcome.level, check.name, outcome.text or check.message, seconds)
                yield from (Finding("warning", check.name, text) for text in outcome.warnings)
    if untried:
        yield Finding("warning", "the rest", f"{len(untried)} more were not made: they need what is refused above.")


def _describe_error(check: Check, error: RayAppError, seconds: float) -> Finding:
    """Returns the finding of a check that raised an error: errors of the task's code and of rows are failures."""
    if isinstance(error, BadRowError):
        return Finding("failed", check.name, f"{error}. Fix Task.decode, or the row.", seconds)
    is_task_error = isinstance(error.__cause__, TaskError) or not is_refusal(error)
    return Finding("failed" if is_task_error else "refused", check.name, str(error), seconds)
