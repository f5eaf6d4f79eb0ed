"""Everything that can be refused before a run takes a slot: here first, then by a small job on the cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.runlog.redaction import is_secret_name, redact
from ray_app.submit.on_cluster import Report, versions
from ray_app.submit.options import SubmitSection, refuse_secrets, split
from ray_app.submit.package import data_in, packed, size_of
from ray_app.submit.server import JobServer, LostContactError
from ray_app.watch.terminal import Finding, has_refusal, run_check

_MUST_AGREE = ("python", "ray", "ray_app")
_SHOWN_LINES = 15


@dataclass(frozen=True)
class Preflight:
    """What came of it.

    Args:
        findings: Line by line.
        server: The cluster's job server; None if it cannot be reached.
        runtime_env: What the run's jobs get.
        report: What the cluster said; None if it was not asked.
    """

    findings: list[Finding]
    server: JobServer | None
    runtime_env: dict[str, Any]
    report: Report | None


def preflight(config: Config, section: SubmitSection, tell: Callable[[str], None]) -> Preflight:
    """Looks at a run before it is submitted.

    Args:
        config: The run, with its name.
        section: How it is to be submitted.
        tell: Takes what it is doing.
    """
    package = packed(config, section)
    found = [
        run_check("configuration", partial(_loads, config)),
        run_check("package", partial(size_of, package, section)),
    ]
    runtime_env: dict[str, Any] = {
        "working_dir": str(package.folder),
        "excludes": package.excludes,
    } | section.runtime_env()
    found += _environment(section, runtime_env)
    can_ask = not has_refusal(found)
    found += [*data_in(package, config), *absolute_storage(config)]
    server: list[JobServer] = []
    found.append(run_check("cluster", partial(_connect, section, server)))
    if not can_ask or not server:
        found.append(
            Finding("warning", "the rest", "was not looked at from the cluster, because of what is refused above.")
        )
        return Preflight(found, server[0] if server else None, runtime_env, None)
    tell(f"Asking the cluster at {server[0].address} ...")
    try:
        report = _ask(server[0], config, section, runtime_env)
    except (ConfigError, LostContactError) as error:
        return Preflight([*found, Finding("refused", "cluster", str(error))], server[0], runtime_env, None)
    known = {one.topic for one in found if one.level == "refused"}
    found += [one for one in report.findings if one.topic not in known]
    return Preflight([*found, *agreement(versions(), report.versions)], server[0], runtime_env, report)


def _loads(config: Config) -> str:
    refuse_secrets(config)
    return "loads here."


def _environment(section: SubmitSection, runtime_env: dict[str, Any]) -> list[Finding]:
    names = split(section.env)

    def made() -> str:
        runtime_env["env_vars"] = section.environment(dict(os.environ))
        return f"{', '.join(names)} will be set as here."

    found = run_check("environment", made)
    secret = [name for name in names if is_secret_name(name)]
    if found.level == "ok" and secret:
        text = (
            f"who may see the cluster's jobs can read {', '.join(secret)}; variables of the cluster's own nodes stay"
            f" there."
        )
        return [Finding("warning", "environment", text)]
    return [found] if names else []


def absolute_storage(config: Config) -> list[Finding]:
    """A relative `run.storage_path` is refused; in a job it would lie in Ray's copy of the working directory."""
    path = config.run.storage_path
    if "://" in path or Path(path).is_absolute():
        return []
    text = (
        f"run.storage_path is {path!r}, relative: in a job that is a copy of the working directory, which Ray removes"
        f" and other nodes do"
        " not see. Give an absolute folder that all nodes share, --run.storage_path /shared/runs, or"
        " s3://bucket/prefix."
    )
    return [Finding("refused", "storage", text)]


def _connect(section: SubmitSection, server: list[JobServer]) -> str:
    server.append(JobServer(section.address, section.lost_contact_s))
    return f"{server[0].address} takes jobs."


def _ask(server: JobServer, config: Config, section: SubmitSection, runtime_env: dict[str, Any]) -> Report:
    """Runs the small job.

    Raises:
        ConfigError: It did not work.
        LostContactError: The cluster does not answer any more.
    """
    command = section.command(["-m", "ray_app.submit.on_cluster"], config)
    lines: list[str] = []
    job_id = server.submit(
        f"{config.run.name}-preflight", command, runtime_env, {"ray_app_preflight": str(config.run.name)}
    )
    ended = server.follow(job_id, lines.append, lambda _: None)
    output = "".join(lines)
    report = Report.from_output(output)
    if report is None:
        tail = "\n".join((output or ended.message).splitlines()[-_SHOWN_LINES:])
        raise ConfigError(
            f"the job {job_id} that was to look at the cluster ended as {ended.status} (exit code {ended.exit_code})"
            f" without an answer."
            f" Are the application's libraries installed for {section.python!r} there (submit.python)? ray_app itself"
            f" has to be, too,"
            f" unless submit.ray_app ({section.ray_app!r}) is 'send'. The end of its output:\n" + redact(tail)
        )
    return report


def agreement(here: dict[str, str], there: dict[str, str]) -> list[Finding]:
    """Compares versions of the client with those of the cluster.

    Args:
        here: As `on_cluster.versions` tells.
        there: The same on the head node.
    """
    found = []
    for name in _MUST_AGREE:
        mine, theirs = _release(name, here), _release(name, there)
        if mine != theirs:
            text = (
                f"{name} is {mine} here and {theirs} on the cluster; use the same, for instance by the cluster's image."
            )
            text += " Or let the one from here go along: --submit.ray_app send." if name == "ray_app" else ""
            found.append(Finding("refused", "versions", text))
    other = [
        f"{n} {here[n]} (cluster: {there.get(n)})" for n in here if n not in _MUST_AGREE and here[n] != there.get(n)
    ]
    if other:
        text = (
            f"not those of the cluster: {', '.join(other)}. The cluster's count; other versions of torch can give other"
            f" bits."
        )
        found.append(Finding("warning", "versions", text))
    same = f"Python {here['python']}, Ray {here['ray']}, torch {here['torch']}, and the others agree."
    return found or [Finding("ok", "versions", same)]


def _release(name: str, versions: dict[str, str]) -> str:
    """The part of a version that must agree: of Python only the first two numbers."""
    version = versions.get(name, "unknown")
    return ".".join(version.split(".")[:2]) if name == "python" else version
