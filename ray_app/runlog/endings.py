"""How the runs of a storage ended: one empty file per run with the result in its name, so that one listing is enough.

The file is a hint beside `summary.json`, which is written first. A process that is stopped in between leaves no file,
or that of an earlier end. So the summary of a run without a file is read, and a result counts only if the summary
confirms it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from typing import Any

from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, list_files, list_folders, put_atomic, put_json, read_all

logger = logging.getLogger(__name__)

_FOLDER = ".ends"
_NO_END_ERRORS = ValueError, KeyError, TypeError, AttributeError
"""The errors for a summary without an end, such as that of a run that ended before its first event."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Args:
        ended_s: Time of the end, seconds since 1970 (UTC).
        metric: `metric_key` of the metric that decides; empty if the run did not finish, or was not evaluated.
        value: The best value of that metric; NaN without one.
    """

    run: str
    ended_s: float
    metric: str = ""
    value: float = math.nan

    @property
    def name(self) -> str:
        """The name of the file; names of runs have no comma."""
        return f"{self.run},{self.ended_s!r},{self.metric},{self.value!r}"

    @classmethod
    def from_name(cls, name: str) -> RunEnd:
        """Returns the end that the name of a file contains; raises `ValueError` if it contains none."""
        run, ended_s, metric, value = name.split(",")
        return cls(run, float(ended_s), metric, float(value))

    @classmethod
    def from_summary(cls, run: str, summary: Any) -> RunEnd:
        """Returns the end that a `summary.json` contains; raises one of `_NO_END_ERRORS` if it contains none."""
        ended_s, best = float(summary["ended_s"]), summary["best"]
        if summary["status"] not in ("finished", "stopped_early") or best is None or best["value"] is None:
            return cls(run, ended_s)
        return cls(run, ended_s, metric_key(best["metric"]), float(best["value"]))


def metric_key(metric: str) -> str:
    """Returns a short key for a metric with a name of any length."""
    return hashlib.sha256(metric.encode()).hexdigest()[:12]


def put_summary(paths: RunPaths, summary: dict[str, Any]) -> None:
    """Writes a run's `summary.json`, and the file with its end in the folder of all runs; only the summary may fail."""
    put_json(paths.summary, summary)
    try:
        end = RunEnd.from_summary(paths.name, summary)
        folder = _put(paths.root.parent, end)
        for name in list_files(folder):
            if name.startswith(f"{paths.name},") and name != end.name:
                (folder / name).unlink(missing_ok=True)
    except (OSError, *_NO_END_ERRORS) as error:
        logger.debug("The end of %s is not listed: %s", paths.name, error)


def read_ends(storage: Location) -> list[RunEnd]:
    """Returns the ends of all runs in a folder; a file that is missing is made from the summary of its run."""
    listed: dict[str, RunEnd] = {}
    for name in list_files(storage / _FOLDER):
        try:
            end = RunEnd.from_name(name)
        except ValueError:
            continue
        if end.run not in listed or listed[end.run].ended_s <= end.ended_s:
            listed[end.run] = end
    runs = [name for name in list_folders(storage) if not name.startswith(".")]
    unlisted = [name for name in runs if name not in listed]
    summaries = read_all((RunPaths(storage / run).summary for run in unlisted), missing=b"", denied=b"")
    for run, data in zip(unlisted, summaries, strict=True):
        try:
            listed[run] = RunEnd.from_summary(run, json.loads(data))
            _put(storage, listed[run])
        except (OSError, *_NO_END_ERRORS) as error:
            logger.debug("%s is not listed: %s", run, error)
    return [listed[run] for run in runs if run in listed]


def _put(storage: Location, end: RunEnd) -> Location:
    """Writes the file for the end of a run; returns the folder of these files."""
    put_atomic(storage / _FOLDER / end.name, b"")
    return storage / _FOLDER
