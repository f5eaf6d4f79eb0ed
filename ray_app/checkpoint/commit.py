"""What `COMMIT.json` says, which makes a folder a checkpoint; a digest of its own finds any change of it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_app.errors import CheckpointError, DamagedError

SCHEMA_VERSION = 1
COMMIT = "COMMIT.json"
NAME = re.compile(r"step-(\d{8,})-(\d{4,})")


@dataclass(frozen=True)
class Commit:
    """What `COMMIT.json` says of a checkpoint.

    Args:
        step: Finished steps of the run.
        fence: Number of the driver's start that wrote it.
        epoch: Epoch of the next step.
        epoch_step: The next step, counted in its epoch.
        why: `cadence` for the planned ones, `extra` for those made for a stop or a resize.
        config_digest: Digest of the run's configuration.
        manifest_digest: Digest of the run's data.
        logical_workers: L.
        params_digest: Digest of the parameters and persistent buffers.
        environment: What the bits depend on besides: torch build, instruction set, device.
        time_s: When it was committed, seconds since 1970 (UTC).
        files: SHA-256 and size of every file.
        schema_version: Version of this layout.
    """

    step: int
    fence: int
    epoch: int
    epoch_step: int
    why: Literal["cadence", "extra"]
    config_digest: str
    manifest_digest: str
    logical_workers: int
    params_digest: str
    environment: dict[str, str]
    time_s: float
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `COMMIT.json` with a digest of their own, so that a change of any of them is found."""
    return values | {"sha256": _digest(values)}


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parsed(name: str, data: bytes) -> Commit:
    """The commit in a `COMMIT.json`.

    Args:
        name: The checkpoint's folder.
        data: Content of the file.

    Raises:
        DamagedError: It is not what was committed.
        CheckpointError: Another version of this application has committed it.
    """
    try:
        values: dict[str, Any] = dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{COMMIT} is damaged: {error}") from error
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{COMMIT} has schema version {version}; this version reads {SCHEMA_VERSION}")
    digest = values.pop("sha256", None)
    if digest != _digest(values):
        raise DamagedError(f"{COMMIT} is damaged: it differs from what was committed (SHA-256)")
    commit = Commit(**values)
    if (commit.step, commit.fence) != key_of(name):
        raise DamagedError(f"{COMMIT} is damaged: it is the one of step {commit.step} and fence {commit.fence}, not of {name}")
    return commit


def key_of(name: str) -> tuple[int, int]:
    """Step and fence of a checkpoint's folder."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])
