"""The version that every file of the record carries, and reading what another version wrote."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

SCHEMA_VERSION = 1
"""Of evaluations, events, looks and segments of metrics; files without one are of version 1. A field that is added with a default is no new
version; one is due when what is there changes its meaning."""

T = TypeVar("T")


def versioned(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file, with the version that they are written in."""
    return {**values, "schema_version": SCHEMA_VERSION}


def known_fields(kind: type[T], values: dict[str, Any]) -> T:
    """Makes a dataclass from the values of a file; what a newer version adds is left out, what an older one lacks has its default.

    Raises:
        TypeError: A field that has no default is missing, or it holds no fields at all.
    """
    if not isinstance(values, dict):
        raise TypeError(f"it should hold fields by name, it holds {type(values).__name__}")
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
