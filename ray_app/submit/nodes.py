"""Whether every node of the cluster reads the data and shares the storage, by a task without a slot on each."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.data.dataset.files import find, is_folder, place_of
from ray_app.errors import ConfigError, DataError
from ray_app.record.files import Location, location, put_atomic
from ray_app.watch.findings import Finding

logger = logging.getLogger(__name__)

_ANSWER_S = 90.0
_COPY_MARKS = ("_ray_pkg_", "runtime_resources")
_SHARED = "Give a folder that is mounted on every node under the same path, or s3://bucket/prefix."


def storage(path: str, data: list[str]) -> Finding:
    """Whether the storage can be written, and every other node sees what is written there and reads the data.

    Args:
        path: `run.storage_path`.
        data: Folders or files of the training and the evaluation data, absolute or on S3.

    Raises:
        ConfigError: The storage cannot be used.
    """
    place = location(path)
    if isinstance(place, Path) and any(mark in str(place) for mark in _COPY_MARKS):
        raise ConfigError(
            f"run.storage_path is {path!r}, which is {place} in the job: Ray removes that copy of the working directory when the job has"
            f" ended, and other nodes do not see it. {_SHARED}"
        )
    made = _missing_parents(place)
    probe = place / f".preflight-{uuid.uuid4().hex}"
    try:
        put_atomic(probe, probe.name.encode())
    except OSError as error:
        raise ConfigError(f"run.storage_path {path} cannot be written from the head node: {error}. {_SHARED}") from error
    try:
        return _seen_elsewhere(path, probe, data)
    finally:
        _remove(probe, made)


def _seen_elsewhere(path: str, probe: Location, data: list[str]) -> Finding:
    here = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here}
    look = ray.remote(num_cpus=0, max_retries=0)(_trouble)
    asked: dict[Any, str] = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(str(probe), data): name
        for node, name in others.items()
    }
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    troubles = [f"{asked[answer]}: {found}" for answer in answered if (found := _answer(answer))]
    if troubles:
        raise ConfigError("other nodes cannot work with it: " + "; ".join(troubles) + f". {_SHARED}")
    if silent:
        names = ", ".join(asked[answer] for answer in silent)
        text = f"{path} can be written, but {names} did not say within {_ANSWER_S:g} s whether it is seen there."
        return Finding("warning", "storage", text)
    seen = f"is seen on the {len(others)} other nodes" if others else "the cluster has one node"
    return Finding("ok", "storage", f"{path} can be written; {seen}.")


def _answer(answer: Any) -> str | None:
    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        return f"could not be asked ({type(error).__name__})"


def _trouble(probe: str, data: list[str]) -> str | None:
    """What is wrong on the node that this runs on; None: nothing."""
    place = location(probe)
    try:
        if place.read_bytes() != place.name.encode():
            return f"{place} holds something else here"
    except OSError as error:
        return f"a file that the head node wrote is not there ({error})"
    own = location(f"{probe}-{uuid.uuid4().hex}")
    try:
        put_atomic(own, b"")
        own.unlink(missing_ok=True)
    except OSError as error:
        return f"the storage cannot be written ({error})"
    try:
        missing = [path for path in data if not (find(place_of(path)) or is_folder(place_of(path)))]
    except DataError as error:
        return f"{error}"
    return f"data is not there: {', '.join(missing)}" if missing else None


def _missing_parents(place: Location) -> list[Path]:
    """The folders that writing will make, the innermost first."""
    return [folder for folder in (place, *place.parents) if not folder.exists()] if isinstance(place, Path) else []


def _remove(probe: Location, made: list[Path]) -> None:
    try:
        probe.unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()
    except OSError as error:  # somebody uses the folder by now
        logger.info("Left behind by the preflight: %s", error)
