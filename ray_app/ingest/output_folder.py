"""The output folder of an ingest: its layout, the check of an existing one, and the folder that the ingest writes into.

On a disk an ingest writes everything into a folder beside the target, which one rename turns into the target at the
end. S3 has no rename: there the ingest writes the target itself, and `_ingest.json` marks each data set as incomplete
until its `_dataset.json` is written. In both cases the next ingest with the same options and files finds what an
interrupted one has finished.
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

from ray_app.data.dataset import UNFINISHED_MARKER, read_description
from ray_app.errors import ConfigError
from ray_app.ingest.options import IngestOptions
from ray_app.storage.data_files import find_file
from ray_app.storage.files import Location, list_files, list_folders, put_json, read_json, remove_temporary, remove_tree

RECORDS = "_pieces"
"""Sub-folder with the records of the finished input splits and buckets."""

HASHES = "_hashes"
"""Sub-folder with the hashes of the rows of the input splits."""

RUNS = "_runs"
"""Sub-folder with the rows of input splits that are not shuffled yet."""

REFUSED = "_refused.jsonl"
"""File in a data set with the rows that were left out."""

SCRATCH = ".writing-"
"""Prefix of the names of folders for files that are being written."""


def side_folder(folder: Location, side: str) -> Location:
    """Returns the folder of a data set: a sub-folder, or the folder itself for the side ""."""
    return folder / side if side else folder


def make_scratch(folder: Location) -> tempfile.TemporaryDirectory[str]:
    """Creates a folder for files that are being written, on the target's disk unless the target is in a bucket."""
    return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder if isinstance(folder, Path) else None)


def has_files(folder: Location, described: list[dict[str, Any]]) -> bool:
    """Returns whether a folder has files of the described paths and sizes."""
    stored = [(find_file(folder / file["path"]), file["bytes"]) for file in described]
    return all(file is not None and file.size == size for file, size in stored)


def load_existing(
    out: Location, made_from: dict[str, Any], is_addition: bool = False
) -> dict[str, dict[str, Any]] | None:
    """Returns the content of each `_dataset.json` in `out` by data set; None if `out` can be written.

    Raises ConfigError unless all data sets in `out` were made from `made_from` (with `is_addition` from other files, or
    with other classes), and DataError if `read_description` refuses a `_dataset.json`.
    """
    if isinstance(out, Path) and out.exists() and not out.is_dir():
        raise _occupied_error(out, "is a file")
    inner = sorted(list_folders(out))
    if not list_files(out) and not inner:
        return None
    described = {side: read_description(side_folder(out, side)) for side in ["", *inner]}
    parts = {side: value for side, value in described.items() if value is not None}
    if _is_resumable(out, inner, parts, made_from):
        return None
    if reason := _difference(out, parts, made_from, is_addition):
        raise _occupied_error(out, reason)
    return parts


def _occupied_error(out: Location, reason: str) -> ConfigError:
    return ConfigError(
        f"out {str(out)!r} is not empty and {reason}. No files were written: name another folder or remove this one."
    )


def _is_resumable(out: Location, inner: list[str], parts: dict[str, Any], made_from: dict[str, Any]) -> bool:
    """Returns whether the same ingest was interrupted in `out`; only on S3 it writes into the target."""
    if isinstance(out, Path):
        return False
    begun = [read_json(side_folder(out, side) / UNFINISHED_MARKER) for side in ["", *inner] if side not in parts]
    return json.loads(json.dumps(made_from)) in begun


def _difference(out: Location, parts: dict[str, Any], made_from: dict[str, Any], is_addition: bool) -> str:
    """Returns the reason why the data sets in `out` are not what this ingest would make; "" if they are."""
    if not parts:
        return "holds no data set (no _dataset.json)"
    now, defaults = made_from["options"], {option.name: option.default for option in fields(IngestOptions)}
    for name, part in parts.items():
        if sorted(parts) != part.get("parts"):
            return f"holds {sorted(parts)} of the data sets {part.get('parts')}"
        before = part["made_from"]["options"]
        before = {key: before.get(key, defaults[key]) for key in now}
        compared = [key for key in now if not (is_addition and key == "classes")]
        changed = [f"{key} {before[key]!r}, now {now[key]!r}" for key in compared if before[key] != now[key]]
        if changed:
            return "was written with other options: " + ", ".join(changed)
        if not is_addition and part["made_from"]["source_digest"] != made_from["source_digest"]:
            return "its source has changed since (names, sizes or times of the files); append=true adds new files"
        for shard in part["shards"]:
            if not has_files(side_folder(out, name), [shard]):
                return f"its shard {side_folder(out, name) / shard['path']} is missing or of another size"
    return ""


@contextmanager
def work_folder(out: Location, made_from: dict[str, Any], sides: list[str]) -> Iterator[Location]:
    """Opens the folder to write into, with what an interrupted ingest of `made_from` has finished.

    On a disk one process at a time has the folder, and folders that other options or files have left are removed.
    """
    if not isinstance(out, Path):
        for side in sides:
            put_json(side_folder(out, side) / UNFINISHED_MARKER, made_from)
        yield out
        return
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    prefix = f"{out.name}.partial-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for other in out.parent.glob(glob.escape(prefix) + "*"):
        if other.name != prefix + key:
            _remove_unless_used(other)
    folder = out.parent / (prefix + key)
    folder.mkdir(exist_ok=True)
    with locked(folder):
        yield folder
    # The folder is empty here if another process had renamed it to the target before this one created it again.
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def locked(folder: Location) -> Iterator[None]:
    """Holds the lock of a folder on a disk against other processes of this machine; the end of one releases it."""
    if not isinstance(folder, Path):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_unless_used(folder: Path) -> None:
    """Removes a folder that an ingest of the same target with other options or files has left."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def remove_work(folder: Location) -> None:
    """Removes what only an unfinished ingest needs."""
    for name in (RECORDS, RUNS, HASHES):
        remove_tree(folder / name)
    remove_temporary(folder)
    if isinstance(folder, Path):
        for scratch in folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(scratch)


def finish_output(folder: Location, out: Location, sides: list[str]) -> None:
    """Turns the written folder into the target; each data set in it has its `_dataset.json`."""
    remove_work(folder)
    if isinstance(folder, Path):
        folder.rename(str(out))
        return
    for side in sides:
        (side_folder(folder, side) / UNFINISHED_MARKER).unlink()
