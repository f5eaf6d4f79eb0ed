"""How busy the nodes were: one file per look at all of them, written by the driver, in an order that its name tells.

Looks that follow each other are joined in one file, named as the last of them, and only then their files are removed; a
look that is in two files because somebody was stopped in between counts once.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from statistics import fmean

from ray_app.runlog.journal import FULL_BYTES, MAX_SMALL_FILES
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields, translate_format_errors
from ray_app.storage.files import Location, list_files, put_atomic, put_json, read_all, to_json

_FULL = "-full.json"


@dataclass(frozen=True)
class NodeSample:
    """What one look found.

    Args:
        step: Finished steps of the run at that time.
        time_s: When, seconds since 1970 (UTC).
        nodes: For each node that answered, the values by name: `cpu_percent`, `memory_percent`, `memory_gb`,
            `gpu0_percent`, `gpu0_memory_gb`, ...; of more than 16 nodes see `together`.
    """

    step: int
    time_s: float
    nodes: dict[str, dict[str, float]]


MAX_NODES = 16
"""Nodes of which each has values of its own in a look; of more there is what they have together."""


def summarize_nodes(nodes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The values of many nodes as the `least`, the `mean` and the `most` of each; those of few nodes as they are."""
    if len(nodes) <= MAX_NODES:
        return nodes
    columns: dict[str, list[float]] = {}
    for values in nodes.values():
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return {
        "least": {name: min(column) for name, column in columns.items()},
        "mean": {name: fmean(column) for name, column in columns.items()},
        "most": {name: max(column) for name, column in columns.items()},
        "all": {"nodes": len(nodes)},
    }


def put_sample(paths: RunPaths, fence: int, number: int, look: NodeSample) -> None:
    """Records a look.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        number: Number of the look in this start.
        look: What was found.

    Raises:
        OSError: The storage refused.
    """
    put_json(paths.system / f"{fence:06d}-{number:09d}.json", add_version(asdict(look)))


def read_samples(paths: RunPaths, after: str, known: Collection[str] = ()) -> dict[str, NodeSample]:
    """The looks after one, by their names and in their order.

    Args:
        paths: The run.
        after: Name of the last look that is not wanted; empty: all are.
        known: Names of others that are not.

    Raises:
        ConfigError: A file is damaged, or of a newer version.
        OSError: The storage does not answer.
    """
    before: set[str] = set()
    while True:
        files = [name for name in list_files(paths.system) if (last := _last(name)) > after and last not in known]
        contents = _read(paths, files, before)
        before = {name for name, looks in zip(files, contents, strict=True) if not looks}
        if not before:  # else some were joined meanwhile
            found = {
                name: look for looks in contents for name, look in looks.items() if name > after and name not in known
            }
            return dict(sorted(found.items()))


def join_samples(paths: RunPaths, fence: int, full_bytes: int = FULL_BYTES) -> None:
    """Joins the looks of this start of the driver and those before it, if many files of them are not full.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        full_bytes: A file of so many bytes is joined no more.

    Raises:
        ConfigError: A file is damaged, or of a newer version; all are left as they are.
        OSError: The storage does not answer.
    """
    small = sorted(name for name in list_files(paths.system) if not name.endswith(_FULL) and int(name[:6]) <= fence)
    if len(small) < MAX_SMALL_FILES:
        return
    contents = _read(paths, small)
    if not all(contents):
        return  # somebody else joins them
    looks = {name: asdict(look) for content in contents for name, look in content.items()}
    data = to_json(add_version({"looks": looks})).encode()
    joined = small[-1].replace(".json", _FULL) if len(data) >= full_bytes else small[-1]
    put_atomic(paths.system / joined, data)
    for name in reversed(small):  # so that whoever lists them meanwhile and misses one finds that all after it are gone
        if name != joined:
            (paths.system / name).unlink(missing_ok=True)


def _last(name: str) -> str:
    """The name of the last look in a file."""
    return name.replace(_FULL, ".json")


def _read(paths: RunPaths, files: list[str], before: Collection[str] = ()) -> list[dict[str, NodeSample]]:
    """The looks in files, by their names; none in one that is gone, but one that was so `before` and is listed again is
    damaged.
    """
    places = [paths.system / name for name in files]
    contents = zip(places, read_all(places, missing=b""), strict=True)
    return [_looks(place, data) if data or place.name in before else {} for place, data in contents]


def _looks(file: Location, data: bytes) -> dict[str, NodeSample]:
    values = None
    with translate_format_errors(file, values):
        values = json.loads(data)
    with translate_format_errors(file, values):
        joined = values.get("looks", {file.name: values})
        return {name: from_known_fields(NodeSample, look) for name, look in joined.items()}
