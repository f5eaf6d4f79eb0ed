"""The command `jobs/report.py`, and the report at the end of a run."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ray_app.errors import RayAppError
from ray_app.pipeline.cli import importable_from_here
from ray_app.pipeline.closing import close_orphan
from ray_app.pipeline.ending import exit_code
from ray_app.record.files import location, put_atomic
from ray_app.record.paths import RunPaths
from ray_app.record.redact import redact
from ray_app.report.facts import Facts, read_facts
from ray_app.report.page import render, write_report

logger = logging.getLogger(__name__)


def report_end(paths: RunPaths) -> Facts | None:
    """Makes the report of a run that ended; a failure to do so is a warning and nothing more.

    Returns:
        What was read of the run, for the console; None if it could not be read.
    """
    facts = None
    try:
        facts = read_facts(paths)
        write_report(paths, facts)
    except Exception as error:
        logger.warning(
            "The report could not be made: %s: %s; jobs/report.py --run %s tries again.", type(error).__name__, error, paths.root
        )
    return facts


def _is_closed(paths: RunPaths) -> bool:
    """Says what became of a run whose driver is gone, if that can be done here."""
    importable_from_here()
    try:
        return close_orphan(str(paths.root))
    except (RayAppError, OSError) as error:
        logger.warning("The run could not be closed: %s", redact(str(error)))
        return False


def main(arguments: list[str] | None = None) -> int:
    """The command `jobs/report.py`.

    Returns:
        Exit code: see `exit_code`.
    """
    parser = argparse.ArgumentParser(prog="jobs/report.py", description="Makes the report of a run, also of one that runs or failed.")
    parser.add_argument("--run", required=True, help="directory of the run, <run.storage_path>/<run.name>, on a disk or s3://bucket/prefix")
    parser.add_argument("--out", help="file to write instead of report.html in the run's directory")
    options = parser.parse_args(arguments)

    def work() -> None:
        paths = RunPaths(location(options.run))
        facts = read_facts(paths)
        if facts.status == "vanished" and facts.events and _is_closed(paths):
            facts = read_facts(paths)
        out = Path(options.out).resolve() if options.out else paths.report
        put_atomic(out, render(facts).encode())
        print(f"{paths.name}: {facts.status}; {facts.story}")
        print(out)

    return exit_code(work, "The report could not be made")
