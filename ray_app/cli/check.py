"""The command `ray-app check`: checks a task on some rows, in seconds and without a cluster."""

from __future__ import annotations

from rich.console import Console

from ray_app.cli.main import exit_code
from ray_app.driver.parsing import parse_with_sections
from ray_app.preflight.check import check_task
from ray_app.watch.terminal import print_findings

_DESCRIPTION = (
    "Takes some rows of a configuration's data through everything that a run does with the task; nothing is left"
    " behind."
)


def main(arguments: list[str] | None = None, prog: str = "ray-app check") -> int:
    """Runs `ray-app check`; returns 0 if no check failed, 1 if one did, 2 if configuration or data are refused."""

    def work() -> int:
        config, _ = parse_with_sections(arguments, {}, prog, description=_DESCRIPTION)
        check = check_task(config)
        print_findings(Console(), list(check.findings))
        return int(not check.ok)

    return exit_code(work, "The check could not be made")
