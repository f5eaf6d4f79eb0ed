"""Parameters by patterns of their names, `*` for any text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from ray_app.errors import ConfigError

_MOST_NAMED, _MOST_NEAR = 12, 3


def matching(names: Iterable[str], pattern: str, field: str) -> list[str]:
    """The names that a pattern matches.

    Args:
        names: Of a model's parameters.
        pattern: What a configuration says.
        field: Where it says so.

    Raises:
        ConfigError: It matches none.
    """
    known = list(names)
    found = [name for name in known if fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, known, _MOST_NEAR, cutoff=0.4)
        hint = f" The nearest: {', '.join(near)}." if near else ""
        raise ConfigError(f"{field} names {pattern!r}, which matches no parameter; the model has {some(known)}.{hint}")
    return found


def some(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
