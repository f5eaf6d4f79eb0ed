"""When a run is submitted again: a pure decision, and the waiting before it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_MOST_WAIT_S = 300.0
_SHELL_SIGNALS = 128
_NOT_STARTED = "the cluster has no such command; name its Python by submit.python"
_FINAL_CODES = {1: "the run failed", 2: "the run was refused", 126: _NOT_STARTED, 127: _NOT_STARTED}
_FINAL_ERRORS = {"RUNTIME_ENV_SETUP_FAILURE": 2}
"""Kinds of failure of the job itself that another try meets again, with the exit code that they give."""


@dataclass(frozen=True)
class EndedJob:
    """How a job ended.

    Args:
        status: `SUCCEEDED`, `FAILED` or `STOPPED`, as Ray calls it, or `UNKNOWN`: the cluster does not know the job any more.
        exit_code: Of the driver; negative: minus the signal that ended it; None: it was not seen to end.
        message: What Ray says about it.
        error_type: Ray's name for the kind of failure.
    """

    status: str
    exit_code: int | None = None
    message: str = ""
    error_type: str | None = None


@dataclass(frozen=True)
class AfterTry:
    """What follows from how a job ended.

    Args:
        again: Whether to submit once more.
        exit_code: What the command returns if not.
        reason: Why.
    """

    again: bool
    exit_code: int
    reason: str


def judge(ended: EndedJob, done: int, retries: int) -> AfterTry:
    """Says whether a run whose job has ended is submitted again.

    Exit code 1 is final: the run has spent its own budget of failures, or failed for a reason that stays.

    Args:
        ended: How the job ended.
        done: Submissions so far.
        retries: Submissions allowed after the first.
    """
    code = ended.exit_code
    if ended.status == "SUCCEEDED":
        return AfterTry(False, 0, "done")
    if ended.status == "STOPPED":
        return AfterTry(False, 75, "somebody stopped the job; submitting the same run.name again continues it")
    if ended.error_type in _FINAL_ERRORS:
        return AfterTry(False, _FINAL_ERRORS[ended.error_type], f"the cluster could not set the job up: {ended.message}")
    reason, exit_code = _loss(ended)
    if reason is None:
        return AfterTry(False, exit_code, _FINAL_CODES.get(exit_code, f"the driver ended with exit code {code}"))
    if done > retries:
        return AfterTry(False, exit_code, f"{reason}; no try is left of {retries + 1} (submit.retries is {retries})")
    return AfterTry(True, exit_code, reason)


def _loss(ended: EndedJob) -> tuple[str | None, int]:
    """Why another try helps, or None; and the exit code where there is none."""
    code = ended.exit_code
    if code == 75:
        return "the run was interrupted", 75
    if code is None:
        return f"the driver was lost ({(ended.message or 'the cluster does not know the job any more').splitlines()[0][:200]})", 1
    number = -code if code < 0 else code - _SHELL_SIGNALS
    if number in signal.valid_signals():
        return f"the driver was lost (killed by signal {int(number)})", 1
    return None, code


def wait_s(done: int, backoff_s: float) -> float:
    """Seconds to wait before the next submission.

    Args:
        done: Submissions so far, at least one.
        backoff_s: Seconds after the first.
    """
    return float(min(_MOST_WAIT_S, backoff_s * 2 ** (done - 1)))
