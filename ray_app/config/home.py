"""The home folder in paths: what a shell makes of `~` where it reads a path itself, and nobody makes of it in a file."""

from __future__ import annotations

import os
from typing import Any

_SQLITE = "sqlite:///"


def expand_home(value: Any) -> Any:
    """A value of a configuration with `~/...` and `~user/...` replaced by the home folder, also inside lists and mappings.

    A lone `~` stays: in arguments of a class it may be any text, and a path of it is expanded where it is opened.
    """
    if isinstance(value, dict):
        return {name: expand_home(one) for name, one in value.items()}
    if isinstance(value, list):
        return [expand_home(one) for one in value]
    if not isinstance(value, str):
        return value
    if value.startswith(f"{_SQLITE}~/"):
        return _SQLITE + os.path.expanduser(value.removeprefix(_SQLITE))
    return os.path.expanduser(value) if value.startswith("~") and "/" in value else value
