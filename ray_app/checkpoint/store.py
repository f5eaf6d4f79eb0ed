"""The checkpoint store: a directory per step and fence, its files, and `COMMIT.json` last.

A directory without a valid `COMMIT.json` does not exist. Loading verifies the digest of every file, takes the newest step and its
highest fence, and walks back over bad ones, marking them. Nothing is moved or appended to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ray_app.checkpoint.format import Snapshot, unpack
from ray_app.checkpoint.retention import Hold, removable
from ray_app.errors import CheckpointError
from ray_app.record.files import put_atomic, put_json, read_json
from ray_app.record.paths import RunPaths

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_COMMIT, _BAD = "COMMIT.json", "BAD.json"
_NAME = re.compile(r"step-(\d{8,})-(\d{4,})")


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


@dataclass(frozen=True)
class Fallback:
    """A checkpoint that was passed over while loading, and why."""

    name: str
    reason: str


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def write(self, files: dict[str, bytes], commit: Commit) -> Path:
        """Writes and commits a checkpoint; one that is committed already is left alone, unless it is marked bad.

        Raises:
            OSError: The storage refused; nothing was committed.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        if (folder / _COMMIT).exists() and not (folder / _BAD).exists():
            return folder
        (folder / _COMMIT).unlink(missing_ok=True)
        digests = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
        for name, data in files.items():
            put_atomic(folder / name, data)
        (folder / _BAD).unlink(missing_ok=True)
        put_json(folder / _COMMIT, asdict(commit) | {"files": digests})
        return folder

    def commits(self) -> list[Commit]:
        """Every committed checkpoint that is not marked bad, by step and then fence."""
        found = [self._commit(folder) for folder in self._folders() if not (folder / _BAD).exists()]
        return sorted((c for c in found if isinstance(c, Commit)), key=lambda c: (c.step, c.fence))

    def load(self, commit: Commit) -> dict[str, bytes]:
        """The files of a checkpoint, verified.

        Raises:
            CheckpointError: A file is missing, cut short or changed.
            FileNotFoundError: The whole checkpoint was removed meanwhile.
            OSError: The storage does not answer; the checkpoint may be intact.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        files = {}
        for name, facts in commit.files.items():
            try:
                data = (folder / name).read_bytes()
            except FileNotFoundError as error:
                if not (folder / _COMMIT).exists():
                    raise
                raise CheckpointError(f"{folder.name}/{name} is missing") from error
            if len(data) != facts["bytes"]:
                raise CheckpointError(f"{folder.name}/{name} has {len(data)} bytes, {facts['bytes']} were committed")
            if hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise CheckpointError(f"{folder.name}/{name} differs from what was committed (SHA-256)")
            files[name] = data
        return files

    def load_newest(self, on_fallback: Callable[[Fallback], None]) -> tuple[Commit, Snapshot] | None:
        """The newest checkpoint that is intact, or None if none was ever committed.

        Args:
            on_fallback: Told of every checkpoint that was passed over; it is marked and not looked at again.

        Raises:
            CheckpointError: There are checkpoints, but not one is intact; nothing is deleted.
        """
        refused = []
        for folder in sorted(self._folders(), key=_key, reverse=True):
            if not (folder / _COMMIT).exists():
                continue
            commit = self._commit(folder)
            try:
                if isinstance(commit, str):
                    raise CheckpointError(commit)
                if (folder / _BAD).exists():
                    raise CheckpointError(str(read_json(folder / _BAD)["reason"]))
                return commit, unpack(self.load(commit))
            except CheckpointError as error:
                refused.append(f"{folder.name}: {error}")
                if _mark_bad(folder, str(error)):
                    on_fallback(Fallback(folder.name, str(error)))
        if refused:
            raise CheckpointError(
                f"No checkpoint of {self._paths.root} can be returned to:\n"
                + "\n".join(f"  - {line}" for line in refused)
                + "\nNothing was deleted. Restore one of them from a backup, or start a run with another run.name."
            )
        return None

    def mark_bad(self, commit: Commit, reason: str) -> None:
        """Marks a checkpoint so that nobody looks at it again; its files stay."""
        _mark_bad(self._paths.checkpoint(commit.step, commit.fence), reason)

    def clean(self, fence: int) -> None:
        """Removes leftovers of earlier starts that were never committed."""
        for folder in self._folders():
            if not (folder / _COMMIT).exists() and _key(folder)[1] < fence:
                shutil.rmtree(folder, ignore_errors=True)

    def retain(self, keep_last: int, best: list[int]) -> list[int]:
        """Removes checkpoints that nobody needs any more; the newest intact ones stay.

        Args:
            keep_last: Newest checkpoints to keep.
            best: Steps of the best ones, which stay too.

        Returns:
            Steps of the removed ones.
        """
        commits = self.commits()
        gone = removable([c.step for c in commits], keep_last, best, self.holds(), time.time())
        for commit in commits:
            if commit.step in gone:
                folder = self._paths.checkpoint(commit.step, commit.fence)
                (folder / _COMMIT).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
        return sorted(gone)

    def holds(self) -> list[Hold]:
        """What the followers of this run say."""
        if not self._paths.holds.is_dir():
            return []
        return [Hold(**json.loads(path.read_bytes())) for path in sorted(self._paths.holds.glob("*.json"))]

    def hold(self, follower: str, hold: Hold) -> None:
        """Says for a follower what it still needs."""
        put_json(self._paths.holds / f"{follower}.json", asdict(hold))

    def _folders(self) -> list[Path]:
        if not self._paths.checkpoints.is_dir():
            return []
        return [path for path in self._paths.checkpoints.iterdir() if _NAME.fullmatch(path.name)]

    def _commit(self, folder: Path) -> Commit | str:
        """The commit of a folder, or why it has none."""
        try:
            values = read_json(folder / _COMMIT)
            if values is None:
                return "not committed"
            commit = Commit(**values)
        except (ValueError, TypeError) as error:
            return f"{_COMMIT} is damaged: {error}"
        if commit.schema_version != SCHEMA_VERSION:
            return f"{_COMMIT} has schema version {commit.schema_version}; this version reads {SCHEMA_VERSION}"
        if (commit.step, commit.fence) != _key(folder) or not _is_complete(commit.files):
            return f"{_COMMIT} is damaged: it does not describe the files of {folder.name}"
        return commit


def _key(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _is_complete(files: Any) -> bool:
    """Whether digest and size of at least one file are there, and of every one."""
    known = isinstance(files, dict) and all(isinstance(facts, dict) and {"sha256", "bytes"} <= facts.keys() for facts in files.values())
    return known and bool(files)


def _mark_bad(folder: Path, reason: str) -> bool:
    """Marks a folder as bad; returns whether it was not marked before."""
    return put_json(folder / _BAD, {"reason": reason, "time_s": time.time()}, if_absent=True)
