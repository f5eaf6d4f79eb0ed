"""The command `ray-app check`: makes all checks of a configuration, in seconds and without a cluster."""

from __future__ import annotations

from ray_app.cli.main import exit_code
from ray_app.driver.parsing import parse_with_sections
from ray_app.preflight.checks import CHECKS
from ray_app.preflight.prepare import TaskCheck, iter_findings
from ray_app.runlog.output import TextConsole
from ray_app.watch.terminal import print_timed_finding

_DESCRIPTION = (
    "Runs every part of a training on some rows of a configuration's data, in about"
    f" {sum(check.cost_s for check in CHECKS):.0f} s for a small model, and leaves no files behind."
)
_NAME_WIDTH = max(len(check.name) for check in CHECKS)


def main(arguments: list[str] | None = None, prog: str = "ray-app check") -> int:
    """Runs the command `ray-app check`.

    Returns:
        Exit code: 0 if no check failed, 1 if one failed, 2 if the configuration or the data is refused.
    """
    checks = list[TaskCheck]()

    def work() -> None:
        config, _ = parse_with_sections(arguments, {}, prog, description=_DESCRIPTION)
        console = TextConsole()
        findings = []
        for finding in iter_findings(config):
            findings.append(finding)
            print_timed_finding(console, finding, _NAME_WIDTH)
        checks.append(TaskCheck(tuple(findings)))

    return exit_code(work, "The check could not run") or checks[0].exit_code
