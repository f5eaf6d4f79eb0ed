"""Names of many files at once: a folder, a pattern with braces or `*`, or a single file."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from ray_app.data.dataset.files import File, files_in, find, is_folder, place_of
from ray_app.errors import DataError

_BRACES = re.compile(r"\{([^{}]*)\}")
MAX_NAMES = 1_000_000
"""Names that a pattern may stand for; more are a slip, and would fill the memory."""


def expanded(pattern: str) -> list[str]:
    """A pattern with braces as the names that it stands for: `x{08..11}` and `x{a,b}`, also several of them.

    Raises:
        DataError: They are more than `MAX_NAMES`.
    """
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    span = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", found[1])
    choices = found[1].split(",")
    if span and int(span[2]) - int(span[1]) >= MAX_NAMES:
        raise DataError(f"{pattern}: {found[0]} stands for more than {MAX_NAMES} names, which are allowed. Correct the pattern.")
    if span:
        choices = [f"{number:0{len(span[1])}d}" for number in range(int(span[1]), int(span[2]) + 1)]
    return [name for choice in choices for name in expanded(pattern[: found.start()] + choice + pattern[found.end() :])]


def matching(pattern: str, is_one: Callable[[str], bool], kind: str) -> list[File]:
    """The files of a folder or of a pattern, sorted by name, or in the order of its braces; or the one file.

    Args:
        pattern: A folder, a file, or either with `*` in its last part, or with `{000..012}` or `{a,b}`.
        is_one: Whether a file of a folder is one of them, by its name.
        kind: What they are, for messages.

    Raises:
        DataError: There is none, or a name that is spelled out is neither file nor folder.
    """
    found = [file for name in expanded(pattern) for file in _of_name(name, is_one, kind)]
    if not found:
        raise DataError(
            f"{pattern}: no {kind}; expected a folder with such files, one of them, or a pattern such as DIR/train-{{000..012}} or"
            " DIR/train-* (in quotes)."
        )
    return found


def _of_name(name: str, is_one: Callable[[str], bool], kind: str) -> list[File]:
    place = place_of(name)
    if "*" in place.name:
        folder = place.parent
        return [file for file in files_in(folder) if fnmatchcase(file.place.name, place.name)] if is_folder(folder) else []
    if is_folder(place):
        return [file for file in files_in(place) if is_one(file.place.name)]
    if file := find(place):
        return [file]
    raise DataError(f"{name}: no such file or folder; expected {kind}s. Correct the name or the pattern.")
