"""Where things are in the folder that an ingest writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ray_app.record.files import Location

RECORDS = "_pieces"
"""Folder of the records in the folder that is written."""

RUNS = "_runs"
"""Folder of the rows of pieces that are yet to be mixed."""

SCRATCH = ".writing-"
"""Beginning of the names of folders for files that are being written."""


def side_folder(folder: Location, side: str) -> Location:
    """Where a data set goes: a folder of its own, or the folder itself for the side ""."""
    return folder / side if side else folder


def scratch(folder: Location) -> tempfile.TemporaryDirectory[str]:
    """A folder for files that are being written, on the disk where they are to stay if it is one."""
    return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder if isinstance(folder, Path) else None)
