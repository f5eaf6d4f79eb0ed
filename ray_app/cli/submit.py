"""The command `ray-app submit`: checks a run or study, submits it as a Ray job, shows its output, submits it again."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console

from ray_app.config.config import Config
from ray_app.config.variables import tracking_of_job
from ray_app.driver.parsing import parse_with_sections
from ray_app.errors import ConfigError, DataError, is_refusal
from ray_app.preflight.inputs import make_run_name
from ray_app.retrain.options import RetrainSection
from ray_app.runlog.output import TextConsole, without_colors
from ray_app.runlog.redaction import redact
from ray_app.storage.files import to_location
from ray_app.submit.options import SUBMISSION_BACKOFF, SubmitSection, judge
from ray_app.submit.preflight import preflight
from ray_app.submit.server import JobServer, LostContactError
from ray_app.tune.options import TuneSection
from ray_app.tune.options import check_section as check_study
from ray_app.watch.terminal import has_refusal, print_findings

_DESCRIPTION = (
    "Submits a run, or with `tune` as the first argument a study, to a Ray cluster as a job, which checks it first."
)
_INTERRUPTED = 130


@dataclass
class Submission:
    """Submits a checked run or study, and again after an interruption or the loss of its driver.

    Args:
        sections: The sections of a study; none for a run.
        job_id: The id of the present job, as long as it may run.
    """

    config: Config
    section: SubmitSection
    server: JobServer
    runtime_env: dict[str, Any]
    console: Console
    sections: Mapping[str, Any] = field(default_factory=dict)
    job_id: str | None = None

    @property
    def _kind(self) -> str:
        return "study" if self.sections else "run"

    @property
    def _name(self) -> str:
        return str(self.sections["tune"].name if self.sections else self.config.run.name)

    @property
    def _command(self) -> str:
        sections = {name: asdict(section) for name, section in self.sections.items()}
        return self.section.command(["-m", "ray_app", "tune" if sections else "train"], self.config, sections)

    @property
    def _directory(self) -> str:
        return redact(str(to_location(self.config.run.storage_path) / self._name))

    def describe(self) -> None:
        """Shows what would be submitted."""
        self._say(f"Nothing was submitted. The job of {self._kind} {self._name} in {self._directory} would be:")
        self._say(f"  {self._command}")

    def submit(self, number: int) -> str:
        """Submits the job with this number (from 1), shows how to follow and to stop it, and returns its id."""
        name = self._name
        job_metadata = {
            "job_name": name,
            f"ray_app_{self._kind}": name,
            "ray_app_directory": self._directory,
            "ray_app_try": str(number),
        }
        self.job_id = job_id = self.server.submit(name, self._command, self.runtime_env, job_metadata)
        self._say(f"Submitted {self._kind} {name} as job {job_id} (try {number} of {self.section.retries + 1}).")
        if number == 1:
            self._say(self._how(job_id))
        return job_id

    def supervise(self) -> int:
        """Submits and follows the job, and submits it again while that helps; returns the driver's exit code."""
        try:
            return self._supervise()
        except KeyboardInterrupt:
            goes_on = (
                f"The job {self.job_id} continues.\n{self._how(self.job_id)}"
                if self.job_id
                else f"No job of the {self._kind} is left."
            )
            option = "" if self.sections else f" with --run.name {self._name}"
            self._say(
                f"\n{goes_on}\nThe {self._kind} is not submitted again; to continue it, use the same command{option}."
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
    """Checks and submits the run or study, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_study = arguments[:1] == ["tune"]
    kinds = {"submit": SubmitSection} | ({"tune": TuneSection, "retrain": RetrainSection} if is_study else {})
    config, sections = parse_with_sections(arguments[is_study:], kinds, prog, description=_DESCRIPTION)
    section: SubmitSection = sections.pop("submit")
    section.check()
    if is_study:
        check_study(config, sections["tune"], sections["retrain"])
    else:
        config = config if config.run.name else config.replace(run__name=make_run_name())
    # The job has the environment of the cluster.
    config = replace(config, tracking=tracking_of_job(config.tracking))
    result = preflight(config, section)
    print_findings(console, result.findings)
    if has_refusal(result.findings):
        print(f"The {'study' if is_study else 'run'} is refused; no job was started.", file=sys.stderr)
        return 2
    assert result.server is not None
    submission = Submission(config, section, result.server, result.runtime_env, console, sections)
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
