"""The command `ray-app report`: the page about a run, whatever state it is in."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ray_app.cli.main import exit_code
from ray_app.driver.finalize import close_orphan
from ray_app.driver.parsing import add_current_folder_to_path
from ray_app.errors import RayAppError
from ray_app.report.facts import read_facts
from ray_app.report.html import render
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import put_atomic, to_location

logger = logging.getLogger(__name__)


def _close(paths: RunPaths) -> bool:
    """Closes a run that has lost its driver; returns whether that was possible on this machine."""
    add_current_folder_to_path()
    try:
        return close_orphan(str(paths.root))
    except (RayAppError, OSError) as error:
        logger.warning("The run could not be closed: %s", redact(str(error)))
        return False


def main(arguments: list[str] | None = None, prog: str = "ray-app report") -> int:
    """Runs the command `ray-app report`.

    Returns:
        Exit code: see `exit_code`.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Writes the report of a run that runs, has ended or has failed."
    )
    parser.add_argument(
        "--run", required=True, help="directory of the run, <run.storage_path>/<run.name>, on a disk or in a bucket"
    )
    parser.add_argument("--out", help="file to write instead of report.html in the run's directory")
    options = parser.parse_args(arguments)

    def work() -> None:
        paths = RunPaths(to_location(options.run))
        facts = read_facts(paths)
        if facts.status == "vanished" and facts.events and _close(paths):
            facts = read_facts(paths)
        out = Path(options.out).expanduser().resolve() if options.out else paths.report
        put_atomic(out, render(facts).encode())
        print(redact(f"{paths.name}: {facts.status}; {facts.story}\n{out}"))

    return exit_code(work, "The report could not be written")
