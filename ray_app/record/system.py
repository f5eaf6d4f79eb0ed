"""How busy the nodes were: one file per look at all of them, written by the driver, in an order that its name tells."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from ray_app.record.files import Location, names, put_json, read_all_json
from ray_app.record.paths import RunPaths
from ray_app.record.schema import known_fields, understood, versioned


@dataclass(frozen=True)
class Look:
    """What one look found.

    Args:
        step: Finished steps of the run at that time.
        time_s: When, seconds since 1970 (UTC).
        nodes: For each node that answered, the values by name: `cpu_percent`, `memory_percent`, `memory_gb`, `gpu0_percent`,
            `gpu0_memory_gb`, ...
    """

    step: int
    time_s: float
    nodes: dict[str, dict[str, float]]


def put_look(paths: RunPaths, fence: int, number: int, look: Look) -> None:
    """Records a look.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        number: Number of the look in this start.
        look: What was found.

    Raises:
        OSError: The storage refused.
    """
    put_json(paths.system / f"{fence:06d}-{number:09d}.json", versioned(asdict(look)))


def read_looks(paths: RunPaths, after: str, known: Collection[str] = ()) -> dict[str, Look]:
    """The looks after one, by their names and in their order.

    Args:
        paths: The run.
        after: Name of the last look that is not wanted; empty: all are.
        known: Names of others that are not.
    """
    wanted = sorted(name for name in names(paths.system) if name > after and name not in known)
    files = [paths.system / name for name in wanted]
    return {name: _look(file, value) for name, file, value in zip(wanted, files, read_all_json(files), strict=True)}


def _look(file: Location, value: Any) -> Look:
    with understood(file, value):
        return known_fields(Look, value)
