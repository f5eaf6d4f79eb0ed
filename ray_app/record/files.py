"""The one primitive for everything small: a file is there whole or not at all."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any


def put_atomic(path: Path, data: bytes, *, if_absent: bool = False) -> bool:
    """Writes `data` to `path` so that every reader sees the old file, the new one, or none.

    Args:
        path: Where to; its folder is made.
        data: The whole content.
        if_absent: Leave a file that is there already.

    Returns:
        Whether it was written; False only with `if_absent`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not if_absent:
            os.replace(temporary, path)
            return True
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


def put_json(path: Path, value: Any, *, if_absent: bool = False) -> bool:
    """`put_atomic` of JSON; NaN and infinity are written as JavaScript writes them."""
    return put_atomic(path, json.dumps(value, indent=1).encode(), if_absent=if_absent)


def read_json(path: Path) -> Any:
    """The JSON value of a file, or None if there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
