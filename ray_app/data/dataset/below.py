"""The files of data below a folder: what counts as data, and what must not be taken for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ray_app.data.dataset.files import Place, reading, relative
from ray_app.errors import DataError

_OF_THE_DISK = "lost+found"
"""A folder that some file systems have at their top, for root alone."""
_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}


def _is_hidden(name: str) -> bool:
    """Whether no data is under a name: `.name`, and `_name`, as Spark and others call what is not finished or their own.

    `_name=value` is a folder of the rows with a value.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def files_below(folder: Place, suffix: str) -> list[Place]:
    """All files below a folder whose name ends so, sorted by path; neither hidden ones nor those in hidden folders. Links are followed.

    Raises:
        DataError: A folder on a disk may not be listed, links lead to a file in two ways, or there is a table with a log of its own.
        StorageError: S3 does not answer.
    """
    if isinstance(folder, Path):
        found: dict[str, Place] = {relative(place, folder): place for place in _once(_walk(folder, frozenset()), suffix)}
    else:
        with reading(folder):
            found = dict(folder.listing())
        for name in found:
            _refuse_table(folder, *name.split("/"))
    return [found[name] for name in sorted(found) if name.endswith(suffix) and not any(map(_is_hidden, name.split("/")))]


def _refuse_table(folder: Place, *parts: str) -> None:
    """Refuses what a log says about rows in other files: those that it has dropped are still in the files.

    Args:
        folder: Where it is.
        parts: Names of folders, one below the other, and of a file or folder in the last one.
    """
    kinds = [_LOGS[part] for part in parts if part in _LOGS]
    if parts[-2:-1] == ("metadata",) and parts[-1].endswith(".metadata.json"):
        kinds.append("Apache Iceberg")
    if kinds:
        raise DataError(
            f"{folder} is a table of {kinds[0]} ({'/'.join(parts)}), whose log says which rows of its files count. Write the rows that do"
            " as plain Parquet, such as with deltalake, pyiceberg or Spark, and give that folder."
        )


def _once(found: Iterable[tuple[Path, Path]], suffix: str) -> Iterator[Path]:
    """Those of the files whose name ends so; refuses what is reached in two ways, whose rows would count twice."""
    seen: dict[Path, Path] = {}
    for place, real in found:
        if place.name.endswith(suffix):
            if other := seen.get(real):
                one, two = sorted((place, other))
                raise DataError(f"{one} and {two} are the same file by a link, so its rows would be there twice. Remove the link.")
            seen[real] = place
            yield place


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[tuple[Path, Path]]:
    """The visible files below a folder, and where each really is; a link to a folder that it is in leads nowhere."""
    real = folder.resolve()
    if real in above:
        return
    try:
        everything = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError as error:
        raise DataError(f"{folder} may not be listed, so it is not known what is in it. Allow it, or give a folder beside it.") from error
    for entry in everything:
        _refuse_table(folder, folder.name, entry.name)
    for entry in everything:
        if _is_hidden(entry.name) or entry.name == _OF_THE_DISK:
            continue
        if entry.is_dir():
            yield from _walk(folder / entry.name, above | {real})
        elif entry.is_file():
            place = folder / entry.name
            yield place, place.resolve() if entry.is_symlink() else place if real == folder else real / entry.name
