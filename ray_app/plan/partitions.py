"""Columns that are in the names of folders: `key=value`, as Hive, Spark, pandas and Arrow write them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import unquote

from ray_app.errors import DataError

PartitionType = Literal["int64", "double", "string"]
Value = int | float | str | None
_MISSING = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)


def partition_texts(path: str) -> dict[str, str | None]:
    """The keys and values in the folders of a file's path, relative to its data set; None is a missing value.

    Raises:
        DataError: A key stands in the path twice.
    """
    if "=" not in path:
        return {}
    found: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        key, separator, value = folder.partition("=")
        if not separator or not key:
            continue
        name = unquote(key)
        if name in found:
            raise DataError(f"{path} has two folders of the column {name!r}; a column has one value for a file. Rename one of them.")
        found[name] = None if value in ("", _MISSING) else unquote(value)
    return found


def partition_types(paths: Sequence[str]) -> dict[str, PartitionType]:
    """The partition columns of a data set, in the order of its folders, each in the narrowest type that holds all its values.

    Args:
        paths: All files, relative to the data set.

    Raises:
        DataError: The files have different keys.
    """
    values: dict[str, set[str | None]] = {}
    keys: tuple[str, ...] | None = None
    folder_before = None
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder == folder_before:
            continue
        folder_before, found = folder, partition_texts(path)
        if keys is None:
            keys = tuple(found)
        elif set(keys) != set(found):
            raise DataError(
                f"{paths[0]} has the partition columns {', '.join(keys) or 'none'}, {path} has {', '.join(found) or 'none'}; all files of a"
                " data set have the same. Move the files apart, or into folders key=value of the same keys."
            )
        for key, value in found.items():
            values.setdefault(key, set()).add(value)
    return {key: _type_of(some) for key, some in values.items()}


def partition_value(text: str | None, kind: PartitionType) -> Value:
    """A value of a partition column."""
    if text is None or kind == "string":
        return text
    return int(text) if kind == "int64" else float(text)


def _type_of(values: Iterable[str | None]) -> PartitionType:
    known = [value for value in values if value is not None]
    if known and all(map(_INTEGER.fullmatch, known)):
        # Digits beyond 64 bits are names: as a fraction two of them could become one.
        return "int64" if all(-(2**63) <= int(value) < 2**63 for value in known) else "string"
    if known and all(_NUMBER.fullmatch(value) and math.isfinite(float(value)) for value in known):
        return "double"
    return "string"
