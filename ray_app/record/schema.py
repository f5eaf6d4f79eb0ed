"""The version that every file of the record carries, and reading what another version wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ray_app.errors import ConfigError
from ray_app.record.files import Location
from ray_app.version import __version__

SCHEMA_VERSION = 1
"""Of evaluations, events, looks and segments of metrics; files without one are of version 1. A field that is added with a default is no new
version; one is due when what is there changes its meaning."""

T = TypeVar("T")


@contextmanager
def understood(place: Location, values: Any) -> Iterator[None]:
    """Makes errors about what a file holds name the file, and say what to do.

    Args:
        place: The file.
        values: What it holds.

    Raises:
        ConfigError: It is of a newer version, or damaged.
    """
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        version = values.get("schema_version", 1) if isinstance(values, dict) else 1
        if isinstance(version, int) and version > SCHEMA_VERSION:
            why = f"is of schema version {version}; this version of ray_app ({__version__}) reads up to {SCHEMA_VERSION}. Use the version"
            raise ConfigError(f"{place} {why} that wrote it, or a newer one ({error}).") from error
        raise ConfigError(f"{place} is damaged: {error}. Restore it from a backup, or remove it: what stands in it is lost.") from error


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
