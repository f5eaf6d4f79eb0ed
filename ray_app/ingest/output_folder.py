"""Where things are in the folder that an ingest writes.

The folder that `ingest` makes: is it there already, from the same options and files; if not, where to write, and how it
becomes one.

On a disk everything is written into a folder beside the target, which gets its name by one rename at the end. S3 has no
rename: there the target itself is written, and `_ingest.json` in each data set says that it is not complete until its
`dataset.json` is there. Either way what an interrupted ingest has finished is found again by the next one of the same
options and files.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ray_app.data.dataset import UNFINISHED_MARKER
from ray_app.errors import ConfigError
from ray_app.ingest.options import IngestOptions
from ray_app.storage.data_files import find_file
from ray_app.storage.files import Location, list_files, list_folders, put_json, read_json, remove_temporary, remove_tree
from ray_app.storage.object_stores import S3Path

RECORDS = "_pieces"
"""Folder of the records in the folder that is written."""

RUNS = "_runs"
"""Folder of the rows of pieces that are yet to be mixed."""

SCRATCH = ".writing-"
"""Beginning of the names of folders for files that are being written."""


def side_folder(folder: Location, side: str) -> Location:
    """Where a data set goes: a folder of its own, or the folder itself for the side ""."""
    return folder / side if side else folder


def make_scratch(folder: Location) -> tempfile.TemporaryDirectory[str]:
    """A folder for files that are being written, on the disk where they are to stay if it is one."""
    return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder if isinstance(folder, Path) else None)


def load_existing(out: Location, made_from: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The content of each `dataset.json` in `out`, by data set, if all was made from the same; None where `out` can be
    written.

    Raises:
        ConfigError: Something else is there.
    """
    if isinstance(out, Path) and out.exists() and not out.is_dir():
        raise _taken(out, "is a file")
    inner = sorted(list_folders(out))
    if not list_files(out) and not inner:
        return None
    described = {side: read_json(side_folder(out, side) / "dataset.json") for side in ["", *inner]}
    parts = {side: value for side, value in described.items() if value is not None}
    if _is_resumable(out, inner, parts, made_from):
        return None
    if reason := _difference(out, parts, made_from):
        raise _taken(out, reason)
    return parts


def _taken(out: Location, reason: str) -> ConfigError:
    return ConfigError(
        f"out {str(out)!r} is not empty and {reason}. Nothing was written: give another folder or remove it."
    )


def _is_resumable(out: Location, inner: list[str], parts: dict[str, Any], made_from: dict[str, Any]) -> bool:
    """Whether an ingest of the same was interrupted there: on S3, where it writes into the target."""
    if isinstance(out, Path):
        return False
    begun = [read_json(side_folder(out, side) / UNFINISHED_MARKER) for side in ["", *inner] if side not in parts]
    return json.loads(json.dumps(made_from)) in begun


def _difference(out: Location, parts: dict[str, Any], made_from: dict[str, Any]) -> str:
    """Why the data sets found in `out` are not what would be made; "" where they are."""
    if not parts:
        return "holds no data set (no dataset.json)"
    now, defaults = made_from["options"], {option.name: option.default for option in fields(IngestOptions)}
    for name, part in parts.items():
        if sorted(parts) != part.get("parts"):
            return f"holds {sorted(parts)} of the data sets {part.get('parts')}"
        before = part["made_from"]["options"]
        changed = [
            f"{key} {before[key]!r}, now {now[key]!r}"
            for key in now
            if before.setdefault(key, defaults[key]) != now[key]
        ]
        if changed:
            return "was made with other options: " + ", ".join(changed)
        if part["made_from"]["source_digest"] != made_from["source_digest"]:
            return "its source has changed since (names, sizes or times of the files)"
        for shard in part["shards"]:
            path = side_folder(out, name) / shard["path"]
            file = find_file(path)
            if file is None or file.size != shard["bytes"]:
                return f"its shard {path} is missing or of another size"
    return ""


@contextmanager
def work_folder(out: Location, made_from: dict[str, Any], sides: list[str]) -> Iterator[Location]:
    """The folder to write into, with what an interrupted ingest of the same has finished; one process at a time has it
    on a disk.

    Args:
        out: The target.
        made_from: What decides the output.
        sides: Names of the data sets that will be in it.
    """
    if isinstance(out, S3Path):
        for side in sides:
            put_json(side_folder(out, side) / UNFINISHED_MARKER, made_from)
        yield out
        return
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    prefix = f"{out.name}.partial-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(glob.escape(prefix) + "*"):
        if left.name != prefix + key:
            _remove_unless_used(left)
    folder = out.parent / (prefix + key)
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        yield folder
    with suppress(OSError):  # made in vain, where another process had just given it its name
        folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process of this machine writes there; a process that ends, however it does, gives it
    free.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _remove_unless_used(folder: Path) -> None:
    """Removes what an ingest of the same target with other options or files has left."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(opened)


def discard(folder: Location) -> None:
    """Removes what was written: the options or what is in the source are refused, so nothing of it can be used."""
    remove_tree(folder)


def finish_output(folder: Location, out: Location, sides: list[str]) -> None:
    """Makes the written folder the target; each data set in it has its `dataset.json`."""
    remove_tree(folder / RECORDS)
    remove_tree(folder / RUNS)
    remove_temporary(folder)
    if isinstance(folder, Path):
        for left in folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(left)
        folder.rename(str(out))
        return
    for side in sides:
        (side_folder(folder, side) / UNFINISHED_MARKER).unlink()
