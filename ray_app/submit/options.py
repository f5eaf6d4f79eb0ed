"""The section `submit` of the command, and how the configuration travels to the cluster.

When a run is submitted again: a pure decision, and the waiting before it.
"""

from __future__ import annotations

import json
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.runlog.redaction import HIDDEN, redact_value, register_secrets

_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"


@dataclass(frozen=True)
class SubmitSection:
    """How the run is submitted as a Ray job.

    Args:
        address: Of the cluster's job server, `http://HEAD:8265`. Not given: `RAY_API_SERVER_ADDRESS`, `RAY_ADDRESS`, or
            the cluster of this machine, as `ray job submit` has it.
        working_dir: Folder that is uploaded and in which the job runs; modules of your own are found from there.
        ray_app: How the nodes get this application: `send`: the one that is used here goes along with the job;
            `installed`: they have the same version, for instance in their image; anything else is what pip installs on
            them: the path of a wheel that every node sees, or `ray_app==0.2.0` from an index that has it.
        exclude: Further patterns of what is not uploaded, as in `.gitignore`, separated by commas.
        max_package_mb: Most megabytes (2^20 bytes) of the upload; Ray's own limit is 512.
        env: Names of environment variables that the job gets with the values that they have here, separated by commas.
            Who may see the cluster's jobs can read them; better are variables of the cluster's own nodes.
        python: Command of the cluster's Python.
        dry_run: Looks at everything, says what would run, and submits nothing.
        follow: Shows the job's output until it ends, and submits it again where that helps; otherwise only submits.
        retries: Submissions after the first, for a run that was interrupted or lost its driver.
        backoff_s: Seconds before the first of them; twice as many before each next one, at most 300.
        stop_wait_s: Seconds that `ray job stop` gives the run for a last checkpoint.
        lost_contact_s: Seconds without an answer of the cluster after which it is not waited for any more.
    """

    address: str | None = None
    working_dir: str = "."
    ray_app: str = "send"
    exclude: str | None = None
    max_package_mb: float = 512.0
    env: str | None = None
    python: str = "python"
    dry_run: bool = False
    follow: bool = True
    retries: int = 3
    backoff_s: float = 5.0
    stop_wait_s: int = 60
    lost_contact_s: float = 300.0

    def check(self) -> None:
        """Refuses values that make no sense.

        Raises:
            ConfigError: There are some.
        """
        least = {"retries": 0, "backoff_s": 0, "stop_wait_s": 1, "lost_contact_s": 1, "max_package_mb": 0}
        values = {name: (getattr(self, name), limit) for name, limit in least.items()}
        low = [
            f"submit.{name} is {value}; it must be at least {limit}."
            for name, (value, limit) in values.items()
            if not value >= limit
        ]
        if low:
            raise ConfigError("\n".join(low))
        if not Path(self.working_dir).is_dir():
            raise ConfigError(
                f"submit.working_dir is {self.working_dir!r}, which is no folder; name the one with your configuration"
                f" and modules."
            )

    def runtime_env(self) -> dict[str, Any]:
        """The part of the jobs' runtime environment by which the nodes get the application."""
        if self.ray_app == "send":
            return {"py_modules": [str(Path(__file__).resolve().parents[1])]}
        return {} if self.ray_app == "installed" else {"pip": [self.ray_app]}

    def environment(self, values: dict[str, str]) -> dict[str, str]:
        """The variables that the job gets.

        Args:
            values: The environment here.

        Raises:
            ConfigError: One that was asked for is not set here.
        """
        names = split(self.env)
        missing = [name for name in names if name not in values]
        if missing:
            raise ConfigError(
                f"submit.env names {', '.join(missing)}, not set here. Set the variable, or leave its name out."
            )
        return {name: values[name] for name in names} | {_STOP_WAIT: str(self.stop_wait_s)}

    def command(self, target: list[str], config: Config) -> str:
        """The shell command of a job; `exec`, so that a signal that ends the driver is seen by Ray."""
        return shlex.join(["exec", self.python, *target, "--config", json.dumps(given(config))])


def split(text: str | None) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def given(config: Config) -> dict[str, Any]:
    """The fields that are not at their default, as nested dictionaries; `load_config` makes the same configuration of
    them.
    """
    return _without_defaults(config.to_dict(), Config().to_dict())


def _without_defaults(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults[name]
        if value == default:
            continue
        nested = isinstance(value, dict) and isinstance(default, dict) and "class_path" not in value
        kept[name] = _without_defaults(value, default) if nested else value
    return kept


def refuse_secrets(config: Config) -> None:
    """A job's command and package can be read by whoever sees the cluster's jobs, so secrets are not in them.

    Raises:
        ConfigError: The configuration holds some.
    """
    values = config.to_dict()
    if register_secrets(values):
        places = ", ".join(_changed(values, redact_value(values)))
        raise ConfigError(
            f"the configuration holds a secret ({places}), which would stand in the job's command for all to read."
            f" Leave it out and set"
            " an environment variable instead: on the cluster's nodes, or here with its name in submit.env."
        )


def _changed(before: Any, after: Any, name: str = "") -> list[str]:
    """Dotted names of the values that redaction changes."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            found
            for key in before
            for found in _changed(before[key], after.get(key, HIDDEN), f"{name}.{key}".lstrip("."))
        ]
    return [] if before == after or (isinstance(before, list | tuple) and list(before) == list(after)) else [name]


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
        status: `SUCCEEDED`, `FAILED` or `STOPPED`, as Ray calls it, or `UNKNOWN`: the cluster does not know the job any
            more.
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
        return AfterTry(
            False, _FINAL_ERRORS[ended.error_type], f"the cluster could not set the job up: {ended.message}"
        )
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
        return (
            f"the driver was lost"
            f" ({(ended.message or 'the cluster does not know the job any more').splitlines()[0][:200]})",
            1,
        )
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
