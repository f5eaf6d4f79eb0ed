"""The checkpoint store: a directory per step and fence, with the files of a checkpoint, and `COMMIT.json` last.

A directory without a valid `COMMIT.json` does not count. Loading verifies the digest of every file, takes the newest
step and its highest fence, and falls back past bad checkpoints; those with changed bytes are marked. No file is moved,
appended to, or replaced before the commit, and two workers may write the same checkpoint at once: a file is put only if
it is absent. A writer commits nothing if a later start has taken its run over. If both happen at the same moment, the
run can be resumed from that commit, too, which has the fence of its writer. `removable_steps` decides which checkpoints
are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

from ray_app.checkpoint.format import TRAINING, Snapshot, has_same_values, unpack
from ray_app.errors import CheckpointError, DamagedError, LeaseLostError
from ray_app.runlog.lease import check_lease
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import (
    Content,
    Location,
    list_files,
    list_tree,
    put_atomic,
    put_json,
    read_all,
    read_all_json,
    read_json,
    remove_temporary,
    remove_tree,
    render_content,
)


class _HashingFile:
    """A file to write to that computes the digest and the size of its content.

    Args:
        file: The file to write to; None only computes.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file, self._sha, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        self._sha.update(data)
        self.size += len(data)
        return self._file.write(data) if self._file is not None else len(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def facts(self) -> dict[str, Any]:
        return {"sha256": self._sha.hexdigest(), "bytes": self.size}


def put_if_absent(path: Location, content: Content) -> dict[str, Any] | None:
    """Writes a file unless it exists; returns its digest and size, or None if it exists with another content.

    The digest is computed from the content that is to be written, not from the file that the storage returns.
    """
    measured: list[_HashingFile] = []

    def write(file: IO[bytes] | None) -> None:
        measured.append(_HashingFile(file))
        measured[-1].write(content) if isinstance(content, bytes) else content(cast(IO[bytes], measured[-1]))

    if not path.exists() and put_atomic(path, write, if_absent=True):
        return measured[-1].facts()
    write(None)
    if _facts_of(path) == measured[-1].facts():
        return measured[-1].facts()
    stored = path.read_bytes()
    # Two workers may write `training.pt` with equal values in different bytes.
    return _facts(stored) if path.name == TRAINING and has_same_values(stored, render_content(content)) else None


def _facts_of(path: Location) -> dict[str, Any]:
    """Returns digest and size of a file."""
    if not isinstance(path, Path):
        return _facts(path.read_bytes())
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _facts(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


SCHEMA_VERSION = 1
COMMIT = "COMMIT.json"
NAME = re.compile(r"step-(\d{8,})-(\d{4,})")


@dataclass(frozen=True)
class Commit:
    """The contents of `COMMIT.json`, which makes a folder a checkpoint.

    Args:
        step: Number of finished steps of the run.
        fence: Number of the driver's start that wrote it.
        epoch: Epoch of the next step.
        epoch_step: The next step, counted in its epoch.
        why: `cadence` for a planned checkpoint, `extra` for one before a stop or a resize.
        config_digest: Digest of the run's configuration.
        manifest_digest: Digest of the run's data.
        logical_workers: L.
        params_digest: Digest of the parameters and persistent buffers.
        environment: What else the parameters depend on, bit for bit: torch build, instruction set, device.
        time_s: Time of the commit, seconds since 1970 (UTC).
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


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of `COMMIT.json` with a digest over them, by which any change is detected."""
    return values | {"sha256": _digest(values)}


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parse_commit(name: str, data: bytes) -> Commit:
    """Returns the commit in a `COMMIT.json`.

    Args:
        name: Name of the checkpoint's folder.
        data: Content of the file.

    Raises:
        DamagedError: The file differs from the one that was committed.
        CheckpointError: Another version of this application has committed the checkpoint.
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
    if (commit.step, commit.fence) != parse_folder_name(name):
        raise DamagedError(
            f"{COMMIT} is damaged: it is the one of step {commit.step} and fence {commit.fence}, not of {name}"
        )
    return commit


def parse_folder_name(name: str) -> tuple[int, int]:
    """Returns the step and the fence in the name of a checkpoint's folder."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


ALL = 1_000_000_000
"""`Hold.most` of a reader that needs every checkpoint; the file of a hold has a number."""


@dataclass(frozen=True)
class Hold:
    """A declaration of a reader (an evaluator) that it still needs the newest checkpoints after `done_step`.

    Args:
        done_step: The newest step that the reader has finished.
        expires_s: Time at which the hold ends unless it is renewed, seconds since 1970 (UTC).
        most: The maximum number of checkpoints that it keeps; older ones are removed and recorded as skipped.
        evaluator: Name of the evaluator; None is the run's own evaluator.
    """

    done_step: int
    expires_s: float
    most: int = 32
    evaluator: str | None = None


def removable_steps(
    steps: Iterable[int], keep_last: int, best: Iterable[int], holds: Iterable[Hold], now_s: float
) -> set[int]:
    """Returns the steps of the checkpoints that can be removed.

    Args:
        steps: Steps of all intact checkpoints.
        keep_last: Number of newest checkpoints to keep; at least one always stays.
        best: Other steps to keep.
        holds: The holds of the readers; expired ones do not count.
        now_s: The time, seconds since 1970 (UTC).
    """
    ordered = sorted(set(steps))
    kept = set(ordered[-max(1, keep_last) :]) | set(best)
    for hold in holds:
        if hold.expires_s > now_s:
            kept |= set([step for step in ordered if step > hold.done_step][-hold.most :])
    return set(ordered) - kept


def skipped_evaluations(removed: Iterable[int], holds: Iterable[Hold], now_s: float) -> set[tuple[int, str | None]]:
    """Returns the removed steps that an evaluator still waited for, with the evaluator's name (None: the run's own).

    A named evaluator counts until its hold expires. The run's own evaluator counts always, since it may be waiting for
    capacity or restarting.
    """
    waiting = [hold for hold in holds if hold.evaluator is None or hold.expires_s > now_s]
    return {(step, hold.evaluator) for hold in waiting for step in removed if step > hold.done_step}


logger = logging.getLogger(__name__)

_BAD = "BAD.json"
SUSPECT = "SUSPECT.json"
_FILE = re.compile(r"\w[\w.-]*")

_Folders = dict[str, dict[str, Location]]
"""For each checkpoint folder, by its name, its files by their names."""


@dataclass(frozen=True)
class Fallback:
    """A checkpoint that loading has skipped, and the reason."""

    name: str
    reason: str


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def write(self, files: Mapping[str, Content], commit: Commit) -> Location:
        """Writes and commits a checkpoint; returns its folder.

        A checkpoint that is committed already stays as it is, unless it is marked bad. Two workers may write the same
        checkpoint at once: one that leaves its node, and the next rank 0. So a file is put only if it is absent, and
        stays until the checkpoint is committed or discarded; the first worker commits, and the other one has nothing
        left to do.

        Raises:
            LeaseLostError: A later start has taken the run over; nothing was committed, and the written files are
                removed.
            OSError: The storage refused; nothing was committed. Whole files stay for another attempt; `discard` removes
                them.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        if (folder / _BAD).exists():
            (folder / COMMIT).unlink(missing_ok=True)
            remove_tree(folder)
        if (folder / COMMIT).exists():
            return folder
        try:
            self._put_all(folder, files, commit)
        except LeaseLostError:
            with suppress(OSError):
                self.discard(commit)
            raise
        except OSError:
            if not (folder / COMMIT).exists():
                raise
        # A writer that was killed, or that was slower than this one, may have left temporary files.
        with suppress(OSError):
            remove_temporary(folder)
        return folder

    def _put_all(self, folder: Location, files: Mapping[str, Content], commit: Commit) -> None:
        """Puts all files and then `COMMIT.json`, and checks that no other writer has discarded files meanwhile."""
        digests = {}
        for name, content in files.items():
            digests[name] = put_if_absent(folder / name, content)
            if digests[name] is None:
                self.discard(commit)
                raise OSError(
                    f"{folder / name} was left damaged, or by steps that were done differently before; it is removed"
                )
        check_lease(self._paths, commit.fence)
        _check_files_exist(folder, files.keys())
        is_ours = put_json(folder / COMMIT, seal(asdict(commit) | {"files": digests}), if_absent=True)
        # A writer that gives up may have removed files before it saw the commit. Only their absence counts: an error of
        # the storage says nothing about them.
        try:
            _check_files_exist(folder, files.keys())
        except _FilesRemovedError:
            if is_ours:
                (folder / COMMIT).unlink(missing_ok=True)
            raise

    def discard(self, commit: Commit) -> None:
        """Removes the files that failed writes have left of a checkpoint, unless it was committed after all.

        Raises:
            OSError: The storage does not answer.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        if not (folder / COMMIT).exists():
            remove_tree(folder)

    def commits(self) -> list[Commit]:
        """Returns all committed checkpoints that are not marked bad, by step and then fence."""
        intact = {
            name: files[COMMIT] for name, files in self._folders().items() if COMMIT in files and _BAD not in files
        }
        commits: list[Commit] = []
        for name, data in zip(intact, read_all(intact.values(), missing=b""), strict=True):
            with suppress(CheckpointError):
                commits.append(parse_commit(name, data))
        return sorted(commits, key=lambda c: (c.step, c.fence))

    def load(self, commit: Commit) -> dict[str, bytes]:
        """Returns the verified contents of a checkpoint's files by name.

        Raises:
            DamagedError: A file is missing, cut short or changed.
            CheckpointError: A file is not in the checkpoint's folder.
            FileNotFoundError: The whole checkpoint was removed meanwhile.
            OSError: The storage does not answer; the checkpoint may be intact.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        files = {}
        for name, facts in commit.files.items():
            if not _FILE.fullmatch(name):
                raise CheckpointError(
                    f"{folder.name}/{COMMIT} names the file {name!r}, which cannot be one of the checkpoint's own"
                )
            try:
                data = (folder / name).read_bytes()
            except FileNotFoundError as error:
                if not (folder / COMMIT).exists():
                    raise
                raise DamagedError(f"{folder.name}/{name} is missing") from error
            if len(data) != facts["bytes"]:
                raise DamagedError(f"{folder.name}/{name} has {len(data)} bytes, {facts['bytes']} were committed")
            if hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise DamagedError(f"{folder.name}/{name} differs from what was committed (SHA-256)")
            files[name] = data
        return files

    def load_newest(self, on_fallback: Callable[[Fallback], None], above: int = -1) -> tuple[Commit, Snapshot] | None:
        """Returns the newest intact checkpoint, or None if none was ever committed.

        Args:
            on_fallback: Called for every checkpoint that is skipped, also if it was marked before. A damaged checkpoint
                is marked and not read again; one with refused content stays as it is, since another version may read
                it.
            above: Checkpoints up to this step are ignored and not read.

        Raises:
            CheckpointError: There are checkpoints, but none can be used; nothing is deleted.
            MemoryError: There is not enough memory for the checkpoint.
            OSError: The storage does not answer.
        """
        refused = []
        for name, files in sorted(self._folders().items(), key=lambda item: parse_folder_name(item[0]), reverse=True):
            if COMMIT not in files or parse_folder_name(name)[0] <= above:
                continue
            try:
                if _BAD in files:
                    raise CheckpointError(str(read_json(files[_BAD])["reason"]))
                commit = parse_commit(name, files[COMMIT].read_bytes())
                snapshot = unpack(self.load(commit))
                if snapshot.step != commit.step:
                    raise CheckpointError(f"it holds the state of step {snapshot.step}")
                return commit, snapshot
            except CheckpointError as error:
                refused.append(f"{name}: {error}")
                if isinstance(error, DamagedError):
                    _mark_bad(self._paths.checkpoints / name, str(error))
                on_fallback(Fallback(name, str(error)))
        if refused:
            raise CheckpointError(
                f"No checkpoint of {self._paths.root} can be returned to:\n"
                + "\n".join(f"  - {line}" for line in refused)
                + "\nNothing was deleted. Restore one of them from a backup, or start a run with another run.name."
            )
        return None

    def mark_suspect(self, after: int, reason: str) -> list[int]:
        """Marks the checkpoints after a step, to which a corrupt rank may have contributed; returns their steps.

        They are still used like others.

        Raises:
            OSError: The storage does not answer.
        """
        commits = [commit for commit in self.commits() if commit.step > after]
        for commit in commits:
            put_json(
                self._paths.checkpoint(commit.step, commit.fence) / SUSPECT,
                {"reason": reason, "time_s": time.time()},
                if_absent=True,
            )
        return [commit.step for commit in commits]

    def mark_bad(self, commit: Commit, reason: str) -> None:
        """Marks a checkpoint so that it is not read again; its files stay."""
        _mark_bad(self._paths.checkpoint(commit.step, commit.fence), reason)

    def clean(self, fence: int) -> None:
        """Removes the uncommitted checkpoints of earlier starts.

        Raises:
            OSError: The storage does not answer.
        """
        for name, files in (self._folders(temporary=True) | self._folders()).items():
            if COMMIT not in files and parse_folder_name(name)[1] < fence:
                remove_tree(self._paths.checkpoints / name)

    def retain(
        self,
        keep_last: int,
        best: list[int],
        holds: Sequence[Hold] = (),
        before: Callable[[list[int]], None] | None = None,
    ) -> list[int]:
        """Removes the checkpoints that are not needed any more; returns their steps.

        Args:
            keep_last: Number of newest intact checkpoints to keep.
            best: Steps of the best checkpoints, which are kept as well.
            holds: Holds that count besides the present ones.
            before: Called with the steps to remove, before the first one is removed.
        """
        commits = self.commits()
        removed = removable_steps([c.step for c in commits], keep_last, best, [*holds, *self.holds()], time.time())
        if before is not None:
            before(sorted(removed))
        for commit in commits:
            if commit.step in removed:
                folder = self._paths.checkpoint(commit.step, commit.fence)
                (folder / COMMIT).unlink(missing_ok=True)
                remove_tree(folder)
        return sorted(removed)

    def holds(self) -> list[Hold]:
        """Returns the holds of all readers of this run."""
        # A reader may remove its hold between the listing and the reading.
        values = read_all_json(list_tree(self._paths.holds).values(), missing=b"null")
        return [Hold(**value) for value in values if value]

    def hold(self, follower: str, hold: Hold) -> None:
        """Writes or renews the hold of a reader."""
        put_json(self._paths.holds / f"{follower}.json", asdict(hold))

    def release(self, follower: str) -> None:
        """Removes the hold of a reader."""
        (self._paths.holds / f"{follower}.json").unlink(missing_ok=True)

    def _folders(self, temporary: bool = False) -> _Folders:
        """Returns the files of all checkpoint folders, by one request on S3.

        Args:
            temporary: Return the temporary files instead, which writers leave that are stopped in the middle.
        """
        folders: _Folders = {}
        for path, file in list_tree(self._paths.checkpoints, temporary=temporary).items():
            folder, _, name = path.rpartition("/")
            if NAME.fullmatch(folder):
                folders.setdefault(folder, {})[name] = file
        return folders


class _FilesRemovedError(OSError):
    """Another process has removed files of a checkpoint that is being written."""


def _check_files_exist(folder: Location, expected: Iterable[str]) -> None:
    if missing := set(expected) - set(list_files(folder)):
        raise _FilesRemovedError(f"Another process has removed {sorted(missing)} from {folder} meanwhile")


def _mark_bad(folder: Location, reason: str) -> None:
    """Marks a folder as bad, as far as the storage permits it."""
    try:
        put_json(folder / _BAD, {"reason": reason, "time_s": time.time()}, if_absent=True)
    except OSError as error:
        logger.warning("%s could not be marked as bad and will be read again: %s", folder, error)
