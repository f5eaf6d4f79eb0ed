"""The folder that `ingest` makes: is it there already, from the same options and files; if not, it appears whole or not at all."""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray_app.errors import ConfigError


def existing(out: Path, made_from: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The content of each `dataset.json` in `out`, by data set, if all was made from the same; None where `out` is free.

    Raises:
        ConfigError: Something else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    files = sorted([*out.glob("dataset.json"), *out.glob("*/dataset.json")]) if out.is_dir() else []
    parts = {path.parent.relative_to(out).as_posix().strip("."): json.loads(path.read_text()) for path in files}
    if reason := _difference(out, parts, made_from):
        raise ConfigError(f"out {str(out)!r} is not empty and {reason}. Nothing was written: give another folder or remove it.")
    return parts


def _difference(out: Path, parts: dict[str, Any], made_from: dict[str, Any]) -> str:
    """Why the data sets found in `out` are not what would be made; "" where they are."""
    if not parts:
        return "holds no data set (no dataset.json)"
    now = made_from["options"]
    for name, part in parts.items():
        if sorted(parts) != part.get("parts"):
            return f"holds {sorted(parts)} of the data sets {part.get('parts')}"
        before = part["made_from"]["options"]
        changed = [f"{key} {before.get(key)!r}, now {now[key]!r}" for key in now if before.get(key) != now[key]]
        if changed:
            return "was made with other options: " + ", ".join(changed)
        if part["made_from"]["source_digest"] != made_from["source_digest"]:
            return "its source has changed since (names, sizes or times of the files)"
        for shard in part["shards"]:
            path = out / name / shard["path"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                return f"its shard {path} is missing or of another size"
    return ""


@contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into, removed at the end if it was not renamed; clears what dead processes left."""
    prefix = f"{out.name}.partial-{socket.gethostname()}-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(glob.escape(prefix) + "*"):
        if not _is_running(left.name.removeprefix(prefix)):
            shutil.rmtree(left, ignore_errors=True)
    partial = out.parent / f"{prefix}{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_running(pid: str) -> bool:
    """Whether another process of this machine has that id."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return int(pid) != os.getpid()
