"""How the runs of a storage ended: an empty file for each, whose name says it, so that one listing tells of a thousand
runs.

It is a hint beside `summary.json`, which is put first. Whoever is stopped in between leaves none, or that of an earlier
end: of a run without one the summary is read, and none is believed that the summary does not confirm.
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
_SAYS_NONE = ValueError, KeyError, TypeError, AttributeError
"""What reading a summary raises that says no end, such as that of a run that ended before its first event."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Args:
        run: Its name.
        ended_s: When, seconds since 1970 (UTC).
        metric: Which one its best value is of, see `key_of`; empty if it did not finish, or was not evaluated.
        value: That value; NaN without.
    """

    run: str
    ended_s: float
    metric: str = ""
    value: float = math.nan

    @property
    def name(self) -> str:
        """Of its file; names of runs have no comma."""
        return f"{self.run},{self.ended_s!r},{self.metric},{self.value!r}"

    @classmethod
    def named(cls, name: str) -> RunEnd:
        """The end that a file's name says.

        Raises:
            ValueError: It says none.
        """
        run, ended_s, metric, value = name.split(",")
        return cls(run, float(ended_s), metric, float(value))

    @classmethod
    def of(cls, run: str, summary: Any) -> RunEnd:
        """The end that a `summary.json` says.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: It says none.
        """
        ended_s, best = float(summary["ended_s"]), summary["best"]
        if summary["status"] not in ("finished", "stopped_early") or best is None or best["value"] is None:
            return cls(run, ended_s)
        return cls(run, ended_s, metric_key(best["metric"]), float(best["value"]))


def metric_key(metric: str) -> str:
    """What stands for a metric, however long its name is."""
    return hashlib.sha256(metric.encode()).hexdigest()[:12]


def put_summary(paths: RunPaths, summary: dict[str, Any]) -> None:
    """Writes a run's `summary.json`, and what it says of the end where the runs beside it look for it.

    Raises:
        OSError: The storage refuses the summary.
    """
    put_json(paths.summary, summary)
    try:
        end = RunEnd.of(paths.name, summary)
        folder = _put(paths.root.parent, end)
        for name in list_files(folder):
            if name.startswith(f"{paths.name},") and name != end.name:
                (folder / name).unlink(missing_ok=True)
    except (OSError, *_SAYS_NONE) as error:
        logger.debug("The end of %s is not listed: %s", paths.name, error)


def read_ends(storage: Location) -> list[RunEnd]:
    """The ends of all runs in a folder; reads summaries only of those that are not listed, and lists them.

    Raises:
        OSError: The storage does not answer.
    """
    listed: dict[str, RunEnd] = {}
    for name in list_files(storage / _FOLDER):
        try:
            end = RunEnd.named(name)
        except ValueError:
            continue
        if end.run not in listed or listed[end.run].ended_s <= end.ended_s:
            listed[end.run] = end
    runs = [name for name in list_folders(storage) if not name.startswith(".")]
    unlisted = [name for name in runs if name not in listed]
    for run, data in zip(
        unlisted, read_all((RunPaths(storage / run).summary for run in unlisted), missing=b"", denied=b""), strict=True
    ):
        try:
            listed[run] = RunEnd.of(run, json.loads(data))
            _put(storage, listed[run])
        except (OSError, *_SAYS_NONE) as error:
            logger.debug("%s is not listed: %s", run, error)
    return [listed[run] for run in runs if run in listed]


def _put(storage: Location, end: RunEnd) -> Location:
    put_atomic(storage / _FOLDER / end.name, b"")
    return storage / _FOLDER
