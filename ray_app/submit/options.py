"""The section `submit` of the command, the transfer of the configuration to the cluster, and the resubmission of jobs.

`judge` decides whether a job that has ended is submitted again.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.config.config import Config
from ray_app.config.rules import NonNegativeInt, check_fields, refuse
from ray_app.config.variables import SAME_ORDER
from ray_app.errors import ConfigError
from ray_app.retry import Retry
from ray_app.runlog.redaction import HIDDEN, redact_value, register_secrets

_STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
"""Ray's variable with the seconds that `ray job stop` gives a run for a last checkpoint; Ray's own default is 3."""
_INDEXES = {"--index-url", "-i", "--no-index"}
"""Options of pip without which it asks the public index, where a stranger can register the name."""


@dataclass(frozen=True)
class SubmitSection:
    """How a run is submitted as a Ray job.

    Args:
        address: Address of the cluster's job server, `http://HEAD:8265`. Default: `RAY_API_SERVER_ADDRESS`,
            `RAY_ADDRESS`, or the cluster of this machine, as for `ray job submit`.
        working_dir: Folder that is uploaded and in which the job runs. Your own modules are imported from there.
        ray_app: How the nodes get this application. `send`: the local installation is uploaded with the job.
            `installed`: the nodes have the same version, for instance in their image. Other values are arguments of
            `pip install` on the nodes: the path of a wheel that every node sees, or `ray_app==0.3.0 --index-url
            https://INDEX` with your index.
        env: Names of environment variables, separated by commas, that the job receives with their local values. All
            users of the cluster can read the values; variables of the cluster's nodes are safer.
        python: Command of the cluster's Python.
        dry_run: Runs the local checks and shows the job's command, without submitting it.
        follow: Shows the job's output until it ends, and submits it again after an interruption or the loss of its
            driver. Otherwise the command only submits the job.
        retries: Largest number of further submissions of a run that was interrupted or lost its driver.
    """

    address: str | None = None
    working_dir: str = "."
    ray_app: str = "send"
    env: str | None = None
    python: str = "python"
    dry_run: bool = False
    follow: bool = True
    retries: NonNegativeInt = 3

    def check(self) -> None:
        """Raises `ConfigError` for a value out of its range, and a working directory that does not exist."""
        problems = check_fields(self, "submit.")
        if not Path(self.working_dir).is_dir():
            problems.append(
                f"submit.working_dir is {self.working_dir!r}, which is not a folder; name the folder with your"
                " configuration and modules."
            )
        package, *options = self._pip_arguments()
        named = package not in ("send", "installed") and "/" not in package
        if named and not _INDEXES & {option.partition("=")[0] for option in options}:
            problems.append(
                f"submit.ray_app is {self.ray_app!r}, which pip would look for in the public index, but this name is"
                " not ours there; give a wheel's path, or your index: 'ray_app==0.3.0 --index-url https://INDEX'."
            )
        folder = Path(self.working_dir).resolve()
        if folder == Path(folder.anchor) or folder in (home := Path(os.path.expanduser("~")).resolve(), *home.parents):
            problems.append(
                f"submit.working_dir is {self.working_dir!r}, {folder}, which is or contains your home folder: its keys"
                " and histories would be readable by all users of the cluster. Name the folder of the project, with"
                " your configuration and modules."
            )
        refuse(problems, "submission")

    def runtime_env(self) -> dict[str, Any]:
        """Returns the part of the jobs' runtime environment that gives the nodes the application."""
        if self.ray_app == "send":
            return {"py_modules": [str(Path(__file__).resolve().parents[1])]}
        package, *options = self._pip_arguments()
        return {} if package == "installed" else {"pip": {"packages": [package], "pip_install_options": options}}

    def _pip_arguments(self) -> list[str]:
        """Returns the package, which may be a path with blanks, and the options after a name."""
        is_path = "/" in self.ray_app.partition(" ")[0]
        return [self.ray_app] if is_path else shlex.split(self.ray_app) or [""]

    def environment(self, values: dict[str, str]) -> dict[str, str]:
        """Returns the environment variables of the job, `RAY_JOB_STOP_WAIT_TIME_S` among them.

        Args:
            values: The environment variables of this process.

        Raises:
            ConfigError: A variable in `submit.env` is not set in this process.
        """
        names = split(self.env)
        missing = [name for name in names if name not in values]
        if missing:
            raise ConfigError(
                f"submit.env names {', '.join(missing)}, which is not set here. Set the variable, or remove its name."
            )
        return _STOP_WAIT | SAME_ORDER | {name: values[name] for name in names}

    def command(self, target: list[str], config: Config, sections: Mapping[str, Any] | None = None) -> str:
        """Returns the shell command of a job; with `exec`, Ray sees a signal that ends the driver.

        Args:
            target: The command, as arguments of Python.
            sections: More sections than those of a run, by name.
        """
        fields = {**non_default_fields(config), **(sections or {})}
        return shlex.join(["exec", self.python, *target, "--config", json.dumps(fields)])


def split(text: str | None) -> list[str]:
    """Returns the parts of a text that are separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def non_default_fields(config: Config) -> dict[str, Any]:
    """Returns the fields without those at their default, as nested dictionaries that `load_config` reads."""
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


def check_no_secrets(config: Config) -> None:
    """Raises `ConfigError` for a configuration with secrets: all users of the cluster can read a job's command."""
    values = config.to_dict()
    register_secrets(values)
    if names := ", ".join(_changed(values, redact_value(values))):
        raise ConfigError(
            f"the configuration holds a secret ({names}), which all users could read in the job's command. Remove it"
            " and set an environment variable instead: on the cluster's nodes, or here with its name in submit.env."
        )


def _changed(before: Any, after: Any, name: str = "") -> list[str]:
    """Returns the dotted names of the values that redaction changes."""
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = ((key, value, after.get(key, HIDDEN)) for key, value in before.items())
        return [part for key, one, other in pairs for part in _changed(one, other, f"{name}.{key}".lstrip("."))]
    return [] if before == after or (isinstance(before, list | tuple) and list(before) == list(after)) else [name]


SUBMISSION_BACKOFF = Retry(5.0, max_pause_s=300.0)
"""The pauses before further submissions of a run."""
_SHELL_SIGNALS = 128
_NOT_STARTED = "the cluster has no such command; name its Python with submit.python"
_FINAL_CODES = {1: "the run failed", 2: "the run was refused", 126: _NOT_STARTED, 127: _NOT_STARTED}
_FINAL_ERRORS = {"RUNTIME_ENV_SETUP_FAILURE": 2}
"""Errors of the job itself, by Ray's names, that would occur again, with the exit code of the command."""


@dataclass(frozen=True)
class EndedJob:
    """How a job ended.

    Args:
        status: Ray's status `SUCCEEDED`, `FAILED` or `STOPPED`, or `UNKNOWN`: the cluster does not know it any more.
        exit_code: Exit code of the driver, or minus the signal that ended it; None if Ray did not see it end.
        message: Ray's message about the end.
        error_type: Ray's name for the kind of failure.
    """

    status: str
    exit_code: int | None = None
    message: str = ""
    error_type: str | None = None


@dataclass(frozen=True)
class AfterTry:
    """The decision whether to submit a job that has ended `again`, the command's exit code if not, and the reason."""

    again: bool
    exit_code: int
    reason: str


def judge(ended: EndedJob, done: int, retries: int) -> AfterTry:
    """Decides whether a run is submitted again after `done` submissions; `retries` are allowed after the first.

    Exit code 1 is final: the run has used up its own budget of failures, or failed for a permanent reason.
    """
    if ended.status == "SUCCEEDED":
        return AfterTry(False, 0, "done")
    if ended.status == "STOPPED":
        return AfterTry(False, 75, "the job was stopped by a user; submitting the same run.name again continues it")
    if ended.error_type in _FINAL_ERRORS:
        reason = f"the cluster could not set the job up: {ended.message}"
        return AfterTry(False, _FINAL_ERRORS[ended.error_type], reason)
    loss, exit_code = _loss(ended)
    if loss is None:
        reason = _FINAL_CODES.get(exit_code, f"the driver ended with exit code {ended.exit_code}")
        return AfterTry(False, exit_code, reason)
    if done > retries:
        return AfterTry(False, exit_code, f"{loss}; all {retries + 1} tries are used (submit.retries is {retries})")
    return AfterTry(True, exit_code, loss)


def _loss(ended: EndedJob) -> tuple[str | None, int]:
    """Returns why another submission helps, or None, and the exit code if there is no other submission."""
    code = ended.exit_code
    if code == 75:
        return "the run was interrupted", 75
    if code is None:
        message = ended.message or "the cluster no longer knows the job"
        return f"the driver was lost ({message.splitlines()[0][:200]})", 1
    number = -code if code < 0 else code - _SHELL_SIGNALS
    if number in signal.valid_signals():
        return f"the driver was lost (killed by signal {int(number)})", 1
    return None, code
