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
    """Runs the command `ray-app check`.

    Returns:
        Exit code: 0 if no check failed, 1 if one failed, 2 if the configuration or the data is refused.
    """
    failed: list[bool] = []

    def work() -> None:
        config, _ = parse_with_sections(arguments, {}, prog, description=_DESCRIPTION)
        check = check_task(config)
        print_findings(Console(), list(check.findings))
        failed.append(not check.ok)

    return exit_code(work, "The check could not be made") or int(any(failed))
