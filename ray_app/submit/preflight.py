"""The checks before a run is submitted: first on this machine, then by a small job on the cluster."""

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
from ray_app.submit.options import SubmitSection, check_no_secrets, split
from ray_app.submit.package import check_size, check_uploaded_data, list_job_files
from ray_app.submit.server import JobServer, LostContactError
from ray_app.watch.terminal import Finding, has_refusal, run_check

_MUST_AGREE = ("python", "ray", "ray_app")
_OUTPUT_LINES = 15


@dataclass(frozen=True)
class Preflight:
    """The result of the checks before submission.

    Args:
        findings: One finding per line of output.
        server: The cluster's job server; None if it cannot be reached.
        runtime_env: The runtime environment of the run's jobs.
        report: The report of the job on the cluster; None if it did not run.
    """

    findings: list[Finding]
    server: JobServer | None
    runtime_env: dict[str, Any]
    report: Report | None


def preflight(config: Config, section: SubmitSection, tell: Callable[[str], None]) -> Preflight:
    """Checks a run before it is submitted and returns the findings.

    Args:
        config: The configuration, with the name of the run.
        section: How the run is to be submitted.
        tell: Shows a line about the progress.
    """
    package = list_job_files(config, section)
    findings = [
        run_check("configuration", partial(_check_config, config)),
        run_check("package", partial(check_size, package, section)),
    ]
    runtime_env: dict[str, Any] = {
        "working_dir": str(package.folder),
        "excludes": package.excludes,
    } | section.runtime_env()
    findings += _check_environment(section, runtime_env)
    can_run_job = not has_refusal(findings)
    findings += [*check_uploaded_data(package, config), *check_absolute_storage(config)]
    server: list[JobServer] = []
    findings.append(run_check("cluster", partial(_connect, section, server)))
    if not can_run_job or not server:
        findings.append(
            Finding("warning", "the rest", "was not looked at from the cluster, because of what is refused above.")
        )
        return Preflight(findings, server[0] if server else None, runtime_env, None)
    tell(f"Asking the cluster at {server[0].address} ...")
    try:
        report = _run_on_cluster(server[0], config, section, runtime_env)
    except (ConfigError, LostContactError) as error:
        return Preflight([*findings, Finding("refused", "cluster", str(error))], server[0], runtime_env, None)
    refused_topics = {finding.topic for finding in findings if finding.level == "refused"}
    findings += [finding for finding in report.findings if finding.topic not in refused_topics]
    return Preflight([*findings, *compare_versions(versions(), report.versions)], server[0], runtime_env, report)


def _check_config(config: Config) -> str:
    """Checks that the configuration has no secrets."""
    check_no_secrets(config)
    return "loads here."


def _check_environment(section: SubmitSection, runtime_env: dict[str, Any]) -> list[Finding]:
    """Adds the environment variables to the runtime environment, and returns a finding if there are any."""
    names = split(section.env)

    def set_variables() -> str:
        runtime_env["env_vars"] = section.environment(dict(os.environ))
        return f"{', '.join(names)} will be set as here."

    finding = run_check("environment", set_variables)
    secret = [name for name in names if is_secret_name(name)]
    if finding.level == "ok" and secret:
        text = (
            f"all users of the cluster can read {', '.join(secret)}; variables of the cluster's own nodes stay there."
        )
        return [Finding("warning", "environment", text)]
    return [finding] if names else []


def check_absolute_storage(config: Config) -> list[Finding]:
    """Refuses a relative `run.storage_path`, which in a job would be in Ray's copy of the working directory."""
    path = config.run.storage_path
    if "://" in path or Path(path).is_absolute():
        return []
    text = (
        f"run.storage_path is {path!r}, relative: in a job that is a copy of the working directory, which Ray removes"
        " and other nodes do not see. Give an absolute folder that all nodes share, --run.storage_path /shared/runs,"
        " or a prefix in a bucket."
    )
    return [Finding("refused", "storage", text)]


def _connect(section: SubmitSection, server: list[JobServer]) -> str:
    """Connects to the job server, appends it to `server`, and returns a sentence."""
    server.append(JobServer(section.address, section.lost_contact_s))
    return f"{server[0].address} takes jobs."


def _run_on_cluster(server: JobServer, config: Config, section: SubmitSection, runtime_env: dict[str, Any]) -> Report:
    """Runs the job that checks the run from the cluster, and returns its report.

    Raises:
        ConfigError: The job ended without a report.
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
        tail = "\n".join((output or ended.message).splitlines()[-_OUTPUT_LINES:])
        raise ConfigError(
            f"the job {job_id} that was to look at the cluster ended as {ended.status} (exit code {ended.exit_code})"
            f" without an answer. Are the application's libraries installed for {section.python!r} there"
            " (submit.python)? ray_app itself has to be, too,"
            f" unless submit.ray_app ({section.ray_app!r}) is 'send'. The end of its output:\n" + redact(tail)
        )
    return report


def compare_versions(client: dict[str, str], head: dict[str, str]) -> list[Finding]:
    """Compares versions of this machine with those of the cluster, and returns findings.

    Args:
        client: Result of `on_cluster.versions` on this machine.
        head: Result of `on_cluster.versions` on the head node.
    """
    findings = []
    for name in _MUST_AGREE:
        client_version, head_version = _release(name, client), _release(name, head)
        if client_version != head_version:
            text = (
                f"{name} is {client_version} here and {head_version} on the cluster; use the same, for instance by the"
                " cluster's image."
            )
            text += " Or let the one from here go along: --submit.ray_app send." if name == "ray_app" else ""
            findings.append(Finding("refused", "versions", text))
    other = [
        f"{n} {client[n]} (cluster: {head.get(n)})" for n in client if n not in _MUST_AGREE and client[n] != head.get(n)
    ]
    if other:
        text = (
            f"not those of the cluster: {', '.join(other)}. The cluster's count; other versions of torch can give other"
            f" bits."
        )
        findings.append(Finding("warning", "versions", text))
    same = f"Python {client['python']}, Ray {client['ray']}, torch {client['torch']}, and the others agree."
    return findings or [Finding("ok", "versions", same)]


def _release(name: str, versions: dict[str, str]) -> str:
    """Returns the part of a version that must agree: for Python the first two numbers."""
    version = versions.get(name, "unknown")
    return ".".join(version.split(".")[:2]) if name == "python" else version
