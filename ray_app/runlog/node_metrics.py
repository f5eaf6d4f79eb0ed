"""How busy the nodes were: one file per sample of all nodes, written by the driver and ordered by name.

Consecutive samples are joined in one file with the name of the last one, and only then their files are removed. A
sample that is in two files, because a process was stopped in between, counts once. Errors are those of `journal`.
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
    """One sample of all nodes.

    Args:
        step: Number of finished steps of the run at that time.
        time_s: Time of the sample, seconds since 1970 (UTC).
        nodes: For each node that answered, the values by name: `cpu_percent`, `memory_gb`, `gpu0_percent`, ...; for
            more than 16 nodes see `summarize_nodes`.
    """

    step: int
    time_s: float
    nodes: dict[str, dict[str, float]]


MAX_NODES = 16
"""A sample has the values of each node up to this number of nodes, and a summary of more."""


def summarize_nodes(nodes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the minimum (`least`), mean and maximum (`most`) of each value; few nodes stay as they are."""
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


def put_sample(paths: RunPaths, fence: int, number: int, sample: NodeSample) -> None:
    """Records a sample with its number in this start."""
    put_json(paths.system / f"{fence:06d}-{number:09d}.json", add_version(asdict(sample)))


def read_samples(paths: RunPaths, after: str, exclude: Collection[str] = ()) -> dict[str, NodeSample]:
    """Returns the samples after the one with a name (empty: all), without those in `exclude`, by name and in order."""
    before: set[str] = set()
    while True:
        files = [name for name in list_files(paths.system) if (last := _last(name)) > after and last not in exclude]
        contents = _read(paths, files, before)
        before = {name for name, samples in zip(files, contents, strict=True) if not samples}
        # Files that are gone were joined meanwhile; then the folder has to be listed again.
        if not before:
            chosen = {
                name: sample
                for samples in contents
                for name, sample in samples.items()
                if name > after and name not in exclude
            }
            return dict(sorted(chosen.items()))


def join_samples(paths: RunPaths, fence: int, full_bytes: int = FULL_BYTES) -> None:
    """Joins the samples of this start and of earlier ones, if many files are smaller than `full_bytes`."""
    small = sorted(name for name in list_files(paths.system) if not name.endswith(_FULL) and int(name[:6]) <= fence)
    if len(small) < MAX_SMALL_FILES:
        return
    contents = _read(paths, small)
    # If a file is gone, another process joins the same ones.
    if not all(contents):
        return
    samples = {name: asdict(sample) for content in contents for name, sample in content.items()}
    data = to_json(add_version({"looks": samples})).encode()
    joined = small[-1].replace(".json", _FULL) if len(data) >= full_bytes else small[-1]
    put_atomic(paths.system / joined, data)
    # The newest file goes first: a reader that misses one of its listing then misses all files after it as well.
    for name in reversed(small):
        if name != joined:
            (paths.system / name).unlink(missing_ok=True)


def _last(name: str) -> str:
    """Returns the name of the last sample in a file."""
    return name.replace(_FULL, ".json")


def _read(paths: RunPaths, files: list[str], before: Collection[str] = ()) -> list[dict[str, NodeSample]]:
    """Returns the samples in each of some files by name; none for a file that is gone.

    A file that was empty `before` and is listed again is not gone but damaged.
    """
    locations = [paths.system / name for name in files]
    contents = zip(locations, read_all(locations, missing=b""), strict=True)
    return [_parse_samples(file, data) if data or file.name in before else {} for file, data in contents]


def _parse_samples(file: Location, data: bytes) -> dict[str, NodeSample]:
    values = None
    with translate_format_errors(file, values):
        values = json.loads(data)
    with translate_format_errors(file, values):
        joined = values.get("looks", {file.name: values})
        return {name: from_known_fields(NodeSample, sample) for name, sample in joined.items()}
