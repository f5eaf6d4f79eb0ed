"""The report at the end of a run."""

from __future__ import annotations

import logging
import shlex

from ray_app.record.paths import RunPaths
from ray_app.report.facts import Facts, read_facts
from ray_app.report.page import write_report

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
        command = shlex.join(["ray-app", "report", "--run", str(paths.root)])
        logger.warning("The report could not be made: %s: %s; %s tries again.", type(error).__name__, error, command)
    return facts
