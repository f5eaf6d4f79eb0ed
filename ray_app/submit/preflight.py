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
        report: The report of the job on the cluster; None if it did not run.
    """

    findings: list[Finding]
    server: JobServer | None
    runtime_env: dict[str, Any]
    report: Report | None


def preflight(config: Config, section: SubmitSection, tell: Callable[[str], None]) -> Preflight:
    """Checks a run that has a name before it is submitted, and returns the findings; `tell` shows the progress."""

    def check_config() -> str:
        check_no_secrets(config)
        return "loads here."

    def connect() -> str:
        server.append(JobServer(section.address, section.lost_contact_s))
        return f"{server[0].address} takes jobs."

    package = list_job_files(config, section)
    findings = [run_check("configuration", check_config), run_check("package", partial(check_size, package, section))]
    runtime_env: dict[str, Any] = {"working_dir": str(package.folder), "excludes": package.excludes}
    runtime_env |= section.runtime_env()
    findings += _check_environment(section, runtime_env)
    can_run_job = not has_refusal(findings)
    findings += [*check_uploaded_data(package, config), *check_absolute_storage(config)]
    server: list[JobServer] = []
    findings.append(run_check("cluster", connect))
    if not can_run_job or not server:
        text = "was not looked at from the cluster, because of what is refused above."
        findings.append(Finding("warning", "the rest", text))
        return Preflight(findings, server[0] if server else None, runtime_env, None)
    tell(f"Asking the cluster at {server[0].address} ...")
    try:
        report = _run_on_cluster(server[0], config, section, runtime_env)
    except (ConfigError, LostContactError) as error:
        return Preflight([*findings, Finding("refused", "cluster", str(error))], server[0], runtime_env, None)
    refused_topics = {finding.topic for finding in findings if finding.level == "refused"}
    findings += [finding for finding in report.findings if finding.topic not in refused_topics]
    return Preflight([*findings, *compare_versions(versions(), report.versions)], server[0], runtime_env, report)


def _check_environment(section: SubmitSection, runtime_env: dict[str, Any]) -> list[Finding]:
    """Adds the environment variables to the runtime environment, and returns a finding if there are any."""
    names = split(section.env)

    def set_variables() -> str | Finding:
        runtime_env["env_vars"] = section.environment(dict(os.environ))
        if secret := [name for name in names if is_secret_name(name)]:
            text = f"all users of the cluster can read {', '.join(secret)}; variables of the cluster's own nodes stay"
            return Finding("warning", "environment", f"{text} there.")
        return f"{', '.join(names)} will be set as here."

    finding = run_check("environment", set_variables)
    return [finding] if names else []


def check_absolute_storage(config: Config) -> list[Finding]:
    """Refuses a relative `run.storage_path`, which in a job would be in Ray's copy of the working directory."""
    path = config.run.storage_path
    if "://" in path or Path(path).is_absolute():
        return []
    text = (
        f"run.storage_path is {path!r}, relative: in a job that is a copy of the working directory, which Ray removes"
        " and other nodes do not see. Give an absolute folder that all nodes share, --run.storage_path /shared/runs,"
        " or s3://bucket/prefix."
    )
    return [Finding("refused", "storage", text)]


def _run_on_cluster(server: JobServer, config: Config, section: SubmitSection, runtime_env: dict[str, Any]) -> Report:
    """Runs the job that checks the run from the cluster, and returns its report."""
    command = section.command(["-m", "ray_app.submit.on_cluster"], config)
    lines: list[str] = []
    name = str(config.run.name)
    job_id = server.submit(f"{name}-preflight", command, runtime_env, {"ray_app_preflight": name})
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
    """Compares the `versions` of this machine with those of the head node, and returns findings."""
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
    other = {name: client[name] for name in client if name not in _MUST_AGREE and client[name] != head.get(name)}
    if other:
        listed = ", ".join(f"{name} {version} (cluster: {head.get(name)})" for name, version in other.items())
        text = f"not those of the cluster: {listed}. The cluster's count; other versions of torch can give other bits."
        findings.append(Finding("warning", "versions", text))
    same = f"Python {client['python']}, Ray {client['ray']}, torch {client['torch']}, and the others agree."
    return findings or [Finding("ok", "versions", same)]


def _release(name: str, versions: dict[str, str]) -> str:
    """Returns the part of a version that must agree: for Python the first two numbers."""
    version = versions.get(name, "unknown")
    return ".".join(version.split(".")[:2]) if name == "python" else version
