"""The section `submit` of the command, and how the configuration travels to the cluster."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.record.redact import HIDDEN, guard, redacted

_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"


@dataclass(frozen=True)
class SubmitSection:
    """How the run is submitted as a Ray job.

    Args:
        address: Of the cluster's job server, `http://HEAD:8265`. Not given: `RAY_API_SERVER_ADDRESS`, `RAY_ADDRESS`, or the cluster of this
            machine, as `ray job submit` has it.
        working_dir: Folder that is uploaded and in which the job runs; modules of your own are found from there.
        ray_app: How the nodes get this application: `send`: the one that is used here goes along with the job; `installed`: they have the
            same version, for instance in their image; anything else is what pip installs on them: the path of a wheel that every node
            sees, or `ray_app==0.1.0` from an index that has it.
        exclude: Further patterns of what is not uploaded, as in `.gitignore`, separated by commas.
        max_package_mb: Most megabytes (2^20 bytes) of the upload; Ray's own limit is 512.
        env: Names of environment variables that the job gets with the values that they have here, separated by commas. Who may see the
            cluster's jobs can read them; better are variables of the cluster's own nodes.
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
        low = [f"submit.{name} is {value}; it must be at least {limit}." for name, (value, limit) in values.items() if not value >= limit]
        if low:
            raise ConfigError("\n".join(low))
        if not Path(self.working_dir).is_dir():
            raise ConfigError(
                f"submit.working_dir is {self.working_dir!r}, which is no folder; name the one with your configuration and modules."
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
            raise ConfigError(f"submit.env names {', '.join(missing)}, not set here. Set the variable, or leave its name out.")
        return {name: values[name] for name in names} | {_STOP_WAIT: str(self.stop_wait_s)}

    def command(self, target: list[str], config: Config) -> str:
        """The shell command of a job; `exec`, so that a signal that ends the driver is seen by Ray."""
        return shlex.join(["exec", self.python, *target, "--config", json.dumps(given(config))])


def split(text: str | None) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def given(config: Config) -> dict[str, Any]:
    """The fields that are not at their default, as nested dictionaries; `load_config` makes the same configuration of them."""
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
    if guard(values):
        places = ", ".join(_changed(values, redacted(values)))
        raise ConfigError(
            f"the configuration holds a secret ({places}), which would stand in the job's command for all to read. Leave it out and set"
            " an environment variable instead: on the cluster's nodes, or here with its name in submit.env."
        )


def _changed(before: Any, after: Any, name: str = "") -> list[str]:
    """Dotted names of the values that redaction changes."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [found for key in before for found in _changed(before[key], after.get(key, HIDDEN), f"{name}.{key}".lstrip("."))]
    return [] if before == after or (isinstance(before, list | tuple) and list(before) == list(after)) else [name]
