"""The command `ray-app submit`: checks a run, submits it as a Ray job, shows its output, and submits it again."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from ray_app.config.config import Config
from ray_app.config.variables import tracking_of_job
from ray_app.driver.parsing import parse_with_sections
from ray_app.errors import ConfigError, DataError, is_refusal
from ray_app.preflight.inputs import make_run_name
from ray_app.runlog.output import TextConsole, without_colors
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import to_location
from ray_app.submit.options import SUBMISSION_BACKOFF, SubmitSection, judge
from ray_app.submit.preflight import preflight
from ray_app.submit.server import JobServer, LostContactError
from ray_app.watch.terminal import has_refusal, print_findings

_DESCRIPTION = "Submits a run to a Ray cluster as a job, which runs checks before it trains."
_INTERRUPTED = 130


@dataclass
class Submission:
    """Submits a checked run, and again after an interruption or the loss of its driver.

    Args:
        job_id: The id of the present job, as long as it may run.
    """

    config: Config
    section: SubmitSection
    server: JobServer
    runtime_env: dict[str, Any]
    console: Console
    job_id: str | None = None

    @property
    def _command(self) -> str:
        return self.section.command(["-m", "ray_app", "train"], self.config)

    @property
    def _directory(self) -> str:
        return redact(str(RunPaths(to_location(self.config.run.storage_path) / str(self.config.run.name)).root))

    def describe(self) -> None:
        """Shows what would be submitted."""
        self._say(f"Nothing was submitted. The job of run {self.config.run.name} in {self._directory} would be:")
        self._say(f"  {self._command}")

    def submit(self, number: int) -> str:
        """Submits the job with this number (from 1), shows how to follow and to stop it, and returns its id."""
        name = str(self.config.run.name)
        job_metadata = {
            "job_name": name,
            "ray_app_run": name,
            "ray_app_directory": self._directory,
            "ray_app_try": str(number),
        }
        self.job_id = job_id = self.server.submit(name, self._command, self.runtime_env, job_metadata)
        self._say(f"Submitted run {name} as job {job_id} (try {number} of {self.section.retries + 1}).")
        if number == 1:
            self._say(self._how(job_id))
        return job_id

    def supervise(self) -> int:
        """Submits and follows the run, and submits it again while that helps; returns the driver's exit code."""
        try:
            return self._supervise()
        except KeyboardInterrupt:
            goes_on = (
                f"The job {self.job_id} continues.\n{self._how(self.job_id)}"
                if self.job_id
                else "No job of the run is left."
            )
            self._say(
                f"\n{goes_on}\nThe run is not submitted again; to continue it, use the same command with --run.name"
                f" {self.config.run.name}."
            )
            raise

    def _supervise(self) -> int:
        number = 1
        # Not `Retry.call`: `judge` decides from the end of the job, which is no error, whether it is submitted again.
        while True:
            job_id = self.submit(number)
            ended = self.server.follow(job_id, self._print, self._say)
            self.job_id = None
            after = judge(ended, number, self.section.retries)
            if not after.again:
                self._say(f"Job {job_id} ended as {ended.status}: {after.reason}. Exit code {after.exit_code}.")
                return after.exit_code
            pause_s = SUBMISSION_BACKOFF.pause_s(number)
            number += 1
            self._say(f"try {number} of {self.section.retries + 1} in {pause_s:g} s: {after.reason}")
            time.sleep(pause_s)

    def _how(self, job_id: str) -> str:
        at = f"--address {self.server.address} {job_id}"
        return f"  follow: ray job logs --follow {at}\n  stop:   ray job stop {at}"

    def _print(self, piece: str) -> None:
        sys.stdout.write(redact(without_colors(piece)))
        sys.stdout.flush()

    def _say(self, text: str) -> None:
        self.console.print(redact(text), markup=False, highlight=False, soft_wrap=True)


def _submit(arguments: list[str] | None, prog: str, console: Console) -> int:
    """Checks and submits the run, and returns the exit code."""
    config, sections = parse_with_sections(arguments, {"submit": SubmitSection}, prog, description=_DESCRIPTION)
    section: SubmitSection = sections["submit"]
    section.check()
    config = config if config.run.name else config.replace(run__name=make_run_name())
    # The job has the environment of the cluster.
    config = replace(config, tracking=tracking_of_job(config.tracking))
    result = preflight(config, section)
    print_findings(console, result.findings)
    if has_refusal(result.findings):
        print("The run is refused; no job was started.", file=sys.stderr)
        return 2
    assert result.server is not None
    submission = Submission(config, section, result.server, result.runtime_env, console)
    if section.dry_run:
        submission.describe()
        return 0
    if section.follow:
        return submission.supervise()
    submission.submit(1)
    return 0


def main(arguments: list[str] | None = None, prog: str = "ray-app submit") -> int:
    """Runs `ray-app submit`; returns the exit code of the run's driver, 2 if the checks refuse the run.

    It returns 1 if the cluster does not answer any more, and 130 after Ctrl-C, which does not stop the job.
    """
    try:
        return _submit(arguments, prog, TextConsole(file=sys.stdout))
    except (ConfigError, DataError) as error:
        print(redact(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 2 if is_refusal(error) else 1
    except LostContactError as error:
        print(redact(f"{error}. The job may still run; ray job list shows it."), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
