"""The checkpoint store: a directory per step and fence, with the files of a checkpoint, and `COMMIT.json` last.

A directory without a valid `COMMIT.json` is not a checkpoint. Loading takes the checkpoint with the highest step and,
of several of this step, the one with the highest fence, and verifies the digest of every file. It skips a checkpoint
that it cannot use and takes the next one; a checkpoint with changed bytes is marked bad.

Two workers may write the same checkpoint at the same time: one that leaves its node, and the next rank 0. So every
attempt has files of its own. The first one takes the plain names by `WRITER.json`; those of each other one begin with a
prefix, which `COMMIT.json` has. Only these two files are put if they are absent, and no file is replaced.

The ranks of a sharded state write one checkpoint together, in parts. They agree on the prefix before; each of them puts
its files and then a small file with their digests (`part_file`), and one of them commits when it has read all of these.

A writer checks right before the commit that no later start of the driver has taken the run over, and otherwise commits
nothing. A start that takes the run over between this check and the commit does no harm: the checkpoint is intact, its
directory has the fence of its writer, and a run can be resumed from it like from any other.

All methods raise `OSError` while the storage does not answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Literal, TypeVar, cast

from torch import Tensor

from ray_app.checkpoint.format import (
    Snapshot,
    is_model_file,
    open_snapshot,
    open_tensors,
    params_digest,
    unpack,
    unpack_model,
)
from ray_app.checkpoint.retention import Pin, removable_steps
from ray_app.config.config import digest_json
from ray_app.errors import CheckpointError, DamagedError, LeaseLostError
from ray_app.runlog.lease import check_lease
from ray_app.runlog.paths import RunPaths
from ray_app.storage.data_files import open_data_file
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
)

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 3
"""The version of the fields of `COMMIT.json`; a checkpoint of an unknown version is refused."""
PARTS_VERSION = 4
"""The version of a checkpoint in parts, which older versions of this package cannot read."""
_READ_VERSIONS = (2, SCHEMA_VERSION, PARTS_VERSION)
"""Versions that are read; version 2 has no `Commit.prefix`."""
COMMIT = "COMMIT.json"
"""The file that makes a directory a checkpoint; it is written last."""
SUSPECT = "SUSPECT.json"
"""The file that marks a checkpoint to which a corrupt rank may have contributed, see `CheckpointStore.mark_suspect`."""
WRITER = "WRITER.json"
"""The file by which the first attempt to write a checkpoint takes the plain names of the files."""
_BAD = "BAD.json"
"""The file that marks a checkpoint that is not read again."""
NAME = re.compile(r"step-(\d{8,})-(\d{4,})")
"""The name of a checkpoint's directory: step and fence, see `RunPaths.checkpoint`."""
_BLOCK_BYTES = 16 << 20
"""The number of bytes of a file that are read at a time to verify it."""
T = TypeVar("T")
_FILE = re.compile(r"\w[\w.-]*")
"""The names that a file of a checkpoint may have; a name with a slash would lead out of its directory."""


class _HashingFile:
    """A file to write to that computes the digest and the size of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        self._sha.update(data)
        self._size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def digest_and_size(self) -> dict[str, Any]:
        """Returns the digest and the size of what was written so far, in the form of `Commit.files`."""
        return {"sha256": self._sha.hexdigest(), "bytes": self._size}


def _put_hashed(path: Location, content: Content) -> dict[str, Any]:
    """Writes a file; returns the digest and the size of the content, since the storage may damage the file."""
    hashing_files: list[_HashingFile] = []

    def write(file: IO[bytes]) -> None:
        hashing_files.append(_HashingFile(file))
        if isinstance(content, bytes):
            hashing_files[0].write(content)
        else:
            content(cast(IO[bytes], hashing_files[0]))

    put_atomic(path, write)
    return hashing_files[0].digest_and_size()


@dataclass(frozen=True)
class Commit:
    """The contents of `COMMIT.json`, which makes a directory a checkpoint.

    Args:
        step: Number of finished steps of the run.
        fence: Number of the driver's start that wrote the checkpoint.
        epoch: Epoch of the next step, from 0.
        epoch_step: Number of finished steps in that epoch, which is the index of the next step in it.
        why: `cadence` for a planned checkpoint, `extra` for one before a stop or a resize, `branch` for the copy of
            another run's from which the run continues.
        logical_workers: L.
        params_digest: Digest of the parameters and persistent buffers.
        environment: What else every bit of the parameters depends on: torch build, instruction set, device.
        time_s: Time at which the successful attempt to write the checkpoint began, seconds since 1970 (UTC).
        files: For each other file by name its SHA-256 (`sha256`) and its size (`bytes`).
        prefix: The beginning of the names of these files in the directory; empty for the plain names.
    """

    step: int
    fence: int
    epoch: int
    epoch_step: int
    why: Literal["cadence", "extra", "branch"]
    config_digest: str
    manifest_digest: str
    logical_workers: int
    params_digest: str
    environment: dict[str, str]
    time_s: float
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    prefix: str = ""
    schema_version: int = SCHEMA_VERSION


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of `COMMIT.json` together with a digest of them, by which any later change is detected."""
    return values | {"sha256": digest_json(values)}


def parse_commit(name: str, data: bytes) -> Commit:
    """Returns the verified commit in the `COMMIT.json` of the checkpoint's directory of a name.

    Raises:
        DamagedError: The content differs from what was committed, or belongs to another checkpoint.
        CheckpointError: The checkpoint has another schema version.
    """
    try:
        values: dict[str, Any] = dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{COMMIT} is damaged: {error}") from error
    version = values.get("schema_version")
    if version not in _READ_VERSIONS:
        raise CheckpointError(
            f"{COMMIT} has schema version {version}; this version reads {PARTS_VERSION}. Use the version that wrote it"
        )
    digest = values.pop("sha256", None)
    if digest != digest_json(values):
        raise DamagedError(f"{COMMIT} is damaged: it differs from its commit (SHA-256)")
    commit = Commit(**values)
    if (commit.step, commit.fence) != parse_folder_name(name):
        raise DamagedError(
            f"{COMMIT} is damaged: it belongs to step {commit.step} and fence {commit.fence}, not to {name}"
        )
    return commit


def parse_folder_name(name: str) -> tuple[int, int]:
    """Returns the step and the fence in the name of a checkpoint's directory, which must match `NAME`."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


def part_file(commit: Commit, index: int, count: int) -> str:
    """Returns the name of the file with the digests of a part's files, or with the error of its writer."""
    return f"{commit.prefix}PART-{index + 1:05d}-of-{count:05d}.json"


_Folders = dict[str, dict[str, Location]]
"""The files of each checkpoint directory: by the name of the directory, and then by the name of the file."""


@dataclass(frozen=True)
class Fallback:
    """A checkpoint that loading has skipped, by the name of its directory, and the reason."""

    name: str
    reason: str


class CheckpointStore:
    """The checkpoints of one run, and the pins of its evaluators."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def write(self, files: Mapping[str, Content], commit: Commit) -> Location:
        """Writes and commits a checkpoint; returns its directory.

        A checkpoint that is committed already stays as it is, unless it is marked bad. Of two workers that write the
        same checkpoint the first one commits, and the other one has nothing left to do.

        Args:
            files: The contents of the files by name.
            commit: Describes the checkpoint; its `files` are filled in.

        Raises:
            LeaseLostError: A later start has taken the run over; nothing was committed, and the written files are
                removed.
            OSError: The storage refused; nothing was committed. The written files are removed as far as the storage
                permits it; `discard` removes the rest.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        if (folder / _BAD).exists():
            (folder / COMMIT).unlink(missing_ok=True)
            remove_tree(folder)
        if (folder / COMMIT).exists():
            return folder
        attempt = uuid.uuid4().hex[:12]
        try:
            is_first = put_json(folder / WRITER, {"attempt": attempt}, if_absent=True)
            self._put_all(folder, files, replace(commit, prefix="" if is_first else f"{attempt}-"))
        except LeaseLostError:
            with suppress(OSError):
                self.discard(commit)
            raise
        except OSError:
            # If another worker has committed the checkpoint, this worker's error does not matter.
            if not (folder / COMMIT).exists():
                raise
        # A writer that was killed, or that was slower than another one, may have left files.
        with suppress(OSError, CheckpointError):
            _remove_leftovers(folder)
        return folder

    def _put_all(self, folder: Location, files: Mapping[str, Content], commit: Commit) -> None:
        """Puts all files and then `COMMIT.json`, and checks that no other process has removed files meanwhile."""
        names = [f"{commit.prefix}{name}" for name in files]
        try:
            digests = {name: _put_hashed(folder / f"{commit.prefix}{name}", files[name]) for name in files}
            check_lease(self._paths, commit.fence)
            _check_files_exist(folder, names)
        except OSError:
            with suppress(OSError):
                for name in names:
                    (folder / name).unlink(missing_ok=True)
            raise
        # After an error the files stay, since the commit may have been written.
        self._put_commit(folder, replace(commit, files=digests))

    def _put_commit(self, folder: Location, commit: Commit) -> None:
        """Puts `COMMIT.json` if there is none; withdraws it if another process has removed files meanwhile."""
        names = [f"{commit.prefix}{name}" for name in commit.files]
        if not put_json(folder / COMMIT, seal(asdict(commit)), if_absent=True):
            return
        # Another writer that gives up may have removed files without seeing this commit, which is then withdrawn. It is
        # not withdrawn if the storage fails to list the files, since they may be there.
        try:
            _check_files_exist(folder, names)
        except _FilesRemovedError:
            (folder / COMMIT).unlink(missing_ok=True)
            raise

    def write_part(self, files: Mapping[str, Content], commit: Commit, index: int, count: int) -> None:
        """Writes the files of one part of a checkpoint, and last the file with their digests.

        Args:
            files: The contents of the files by name.
            commit: Describes the checkpoint; its prefix is the same for all parts and belongs to no other attempt.
            index: Index of the part.
            count: Number of parts.

        Raises:
            OSError: The storage refused.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        digests = {name: _put_hashed(folder / f"{commit.prefix}{name}", content) for name, content in files.items()}
        put_json(folder / part_file(commit, index, count), digests)

    def fail_part(self, commit: Commit, index: int, count: int, error: str) -> None:
        """Declares that a part cannot be written, so that no other rank waits for it."""
        folder = self._paths.checkpoint(commit.step, commit.fence)
        put_json(folder / part_file(commit, index, count), {"error": error})

    def commit_parts(self, commit: Commit, count: int, before_commit: Callable[[Commit], None]) -> bool:
        """Commits a checkpoint of which all parts are written; returns False if a part is not written yet.

        The digest of the parameters is computed from the written files, tensor by tensor.

        Args:
            commit: Describes the checkpoint; its files, the digest of the parameters and the time are filled in.
            count: Number of parts.
            before_commit: Called with the checkpoint before the commit.

        Raises:
            CheckpointError: A part could not be written, or differs from the others.
            LeaseLostError: A later start has taken the run over; nothing was committed.
            OSError: The storage refused.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        parts = read_all_json([folder / part_file(commit, i, count) for i in range(count)], missing=b"null")
        if errors := [part["error"] for part in parts if part and "error" in part]:
            raise CheckpointError(f"a part of the checkpoint could not be written: {errors[0]}")
        if None in parts:
            return False
        files = {name: entry for part in parts for name, entry in part.items()}
        commit = replace(commit, files=files, time_s=time.time())
        commit = replace(
            commit, params_digest=params_digest(open_tensors(self._open_files(commit, is_model_file).values()))
        )
        before_commit(commit)
        check_lease(self._paths, commit.fence)
        _check_files_exist(folder, [f"{commit.prefix}{name}" for name in files])
        is_bad = (folder / _BAD).exists()
        if is_bad:
            (folder / COMMIT).unlink(missing_ok=True)
        self._put_commit(folder, commit)
        if is_bad:
            (folder / _BAD).unlink(missing_ok=True)
        # Earlier attempts may have left files, and the digests of the parts are in the commit.
        with suppress(OSError, CheckpointError):
            _remove_leftovers(folder)
        return True

    def discard(self, commit: Commit) -> None:
        """Removes the files that failed writes have left of a checkpoint, unless it was committed after all.

        `WRITER.json` stays, so that no other attempt takes the plain names while the first one may still write. Of a
        checkpoint in parts only the files of this attempt are removed, since other ranks may make another one.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        if not (folder / COMMIT).exists():
            others = [name for name in list_files(folder) if not name.startswith(commit.prefix)]
            _remove_files(folder, {WRITER, *others})

    def commits(self) -> list[Commit]:
        """Returns all committed checkpoints that are neither bad, damaged nor of another version, by step and fence."""
        commit_files = {
            name: files[COMMIT] for name, files in self._folders().items() if COMMIT in files and _BAD not in files
        }
        commits: list[Commit] = []
        # A checkpoint may be removed between the listing and the reading; an empty file is not a commit.
        for name, data in zip(commit_files, read_all(commit_files.values(), missing=b""), strict=True):
            with suppress(CheckpointError):
                commits.append(parse_commit(name, data))
        return sorted(commits, key=lambda c: (c.step, c.fence))

    def load(self, commit: Commit, is_wanted: Callable[[str], bool] = lambda name: True) -> dict[str, bytes]:
        """Returns the verified contents of a checkpoint's files by name.

        Args:
            commit: The checkpoint.
            is_wanted: Returns for the name of a file whether to load it.

        Raises:
            DamagedError: A file is missing, cut short or changed.
            CheckpointError: The name of a file would lead out of the checkpoint's directory.
            FileNotFoundError: The whole checkpoint was removed meanwhile.
        """
        files = {}
        for name in filter(is_wanted, commit.files):
            files[name] = data = self._access(commit, name, lambda path: path.read_bytes())
            _check_file(commit, name, len(data), hashlib.sha256(data).hexdigest())
        return files

    def load_model(self, commit: Commit) -> dict[str, Tensor]:
        """Returns the parameters and persistent buffers of a checkpoint by name; verifies all its files, see `load`."""
        self.verify(commit, lambda name: not is_model_file(name))
        return unpack_model(self.load(commit, is_model_file))

    def verify(self, commit: Commit, is_wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Verifies files of a checkpoint without the memory for one, see `load`."""
        for name in filter(is_wanted, commit.files):
            size, sha = 0, hashlib.sha256()
            with self._access(commit, name, open_data_file) as file:
                while block := file.read(_BLOCK_BYTES):
                    size += len(block)
                    sha.update(block)
            _check_file(commit, name, size, sha.hexdigest())

    def open_verified(self, commit: Commit) -> Snapshot:
        """Verifies a checkpoint; returns it with tensors that are read when they are needed, see `open_snapshot`."""
        self.verify(commit)
        return self.open(commit)

    def open(self, commit: Commit) -> Snapshot:
        """Returns a checkpoint that is verified already, see `open_verified`."""
        return open_snapshot(self._open_files(commit, lambda name: True))

    def _open_files(self, commit: Commit, is_wanted: Callable[[str], bool]) -> dict[str, IO[bytes]]:
        return {name: self._access(commit, name, open_data_file) for name in commit.files if is_wanted(name)}

    def _access(self, commit: Commit, name: str, access: Callable[[Location], T]) -> T:
        """Returns the result of a function for a file of a checkpoint; for errors see `load`."""
        folder, stored = self._paths.checkpoint(commit.step, commit.fence), f"{commit.prefix}{name}"
        if not _FILE.fullmatch(stored):
            raise CheckpointError(
                f"{folder.name}/{COMMIT} names the file {stored!r}, which cannot belong to the checkpoint"
            )
        try:
            return access(folder / stored)
        except FileNotFoundError as error:
            if not (folder / COMMIT).exists():
                raise
            raise DamagedError(f"{folder.name}/{name} is missing") from error

    def load_newest(
        self,
        on_fallback: Callable[[Fallback], None],
        above: int = -1,
        read: Callable[[Commit], Snapshot] | None = None,
    ) -> tuple[Commit, Snapshot] | None:
        """Returns the newest intact checkpoint after the step `above`, or None if none was committed after it.

        Args:
            on_fallback: Called for every checkpoint that is skipped, even if it was marked bad before. A damaged
                checkpoint is marked bad and not read again. One with content that this version refuses is not marked,
                since another version may read it.
            above: The step; checkpoints up to it are ignored and not read.
            read: Verifies and reads a checkpoint; None loads it as a whole.

        Raises:
            CheckpointError: There are checkpoints, but none can be used; nothing is deleted.
            MemoryError: There is not enough memory for the checkpoint.
        """
        refused = []
        for name, files in sorted(self._folders().items(), key=lambda item: parse_folder_name(item[0]), reverse=True):
            if COMMIT not in files or parse_folder_name(name)[0] <= above:
                continue
            try:
                if _BAD in files:
                    raise CheckpointError(str(read_json(files[_BAD])["reason"]))
                commit = parse_commit(name, files[COMMIT].read_bytes())
                snapshot = read(commit) if read is not None else unpack(self.load(commit))
                if snapshot.step != commit.step:
                    raise CheckpointError(f"the file holds the state of step {snapshot.step}")
                return commit, snapshot
            except CheckpointError as error:
                refused.append(f"{name}: {error}")
                if isinstance(error, DamagedError):
                    _mark_bad(self._paths.checkpoints / name, str(error))
                on_fallback(Fallback(name, str(error)))
        if refused:
            raise CheckpointError(
                f"No checkpoint of {self._paths.root} can be restored:\n"
                + "\n".join(f"  - {line}" for line in refused)
                + "\nNothing was deleted. Restore one of them from a backup, or start a run with another run.name."
            )
        return None

    def mark_suspect(self, after: int, reason: str) -> list[int]:
        """Marks the checkpoints after a step, which stay in use, as those of a corrupt rank; returns their steps."""
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
        """Removes the uncommitted checkpoints of starts before that with this fence."""
        # A directory with temporary and other files is in both listings; the second one shows whether it is committed.
        for name, files in (self._folders(temporary=True) | self._folders()).items():
            if COMMIT not in files and parse_folder_name(name)[1] < fence:
                remove_tree(self._paths.checkpoints / name)

    def retain(
        self,
        keep_last: int,
        best: list[int],
        pins: Sequence[Pin] = (),
        before: Callable[[list[int]], None] | None = None,
    ) -> list[int]:
        """Removes the checkpoints that are no longer needed; returns their steps.

        Args:
            keep_last: Number of newest intact checkpoints to keep.
            best: Steps of the best checkpoints, which are kept as well.
            pins: Pins that the caller read earlier; they count in addition to those that exist now.
            before: Called with the steps to remove, before the first one is removed.
        """
        commits = self.commits()
        removed = removable_steps([c.step for c in commits], keep_last, best, [*pins, *self.read_pins()], time.time())
        if before is not None:
            before(sorted(removed))
        for commit in commits:
            if commit.step in removed:
                folder = self._paths.checkpoint(commit.step, commit.fence)
                # Without its commit a checkpoint of which only some files are removed is not taken for a damaged one.
                (folder / COMMIT).unlink(missing_ok=True)
                remove_tree(folder)
        return sorted(removed)

    def read_pins(self) -> list[Pin]:
        """Returns the pins of all evaluators of this run."""
        # An evaluator may remove its pin between the listing and the reading.
        values = read_all_json(list_tree(self._paths.pins).values(), missing=b"null")
        return [Pin(**value) for value in values if value]

    def put_pin(self, evaluator_id: str, pin: Pin) -> None:
        """Writes or renews the pin of an evaluator."""
        put_json(self._paths.pins / f"{evaluator_id}.json", asdict(pin))

    def remove_pin(self, evaluator_id: str) -> None:
        """Removes the pin of an evaluator, if there is one."""
        (self._paths.pins / f"{evaluator_id}.json").unlink(missing_ok=True)

    def _folders(self, temporary: bool = False) -> _Folders:
        """Returns the files of all checkpoint directories, by one listing of a bucket.

        Args:
            temporary: Whether to return the temporary files instead, which a writer leaves that is stopped in the
                middle.
        """
        folders: _Folders = {}
        for path, file in list_tree(self._paths.checkpoints, temporary=temporary).items():
            folder, _, name = path.rpartition("/")
            if NAME.fullmatch(folder):
                folders.setdefault(folder, {})[name] = file
        return folders


def _check_file(commit: Commit, name: str, size: int, sha256: str) -> None:
    """Raises `DamagedError` if a file has another size or digest than was committed."""
    file, committed = f"step-{commit.step:08d}-{commit.fence:04d}/{name}", commit.files[name]
    if size != committed["bytes"]:
        raise DamagedError(f"{file} has {size} bytes, but {committed['bytes']} were committed")
    if sha256 != committed["sha256"]:
        raise DamagedError(f"{file} differs from its commit (SHA-256)")


class _FilesRemovedError(OSError):
    """Another process has removed files of a checkpoint that is being written."""


def _check_files_exist(folder: Location, expected: Iterable[str]) -> None:
    """Raises `_FilesRemovedError` if another process has removed files of a checkpoint."""
    if missing := set(expected) - set(list_files(folder)):
        raise _FilesRemovedError(f"Another process has removed {sorted(missing)} from {folder} meanwhile")


def _remove_leftovers(folder: Location) -> None:
    """Removes the files in the directory of a checkpoint that other attempts to write it have left."""
    commit = parse_commit(folder.name, (folder / COMMIT).read_bytes())
    kept = {COMMIT, WRITER, SUSPECT, _BAD, *(f"{commit.prefix}{name}" for name in commit.files)}
    _remove_files(folder, kept)


def _remove_files(folder: Location, kept: set[str]) -> None:
    """Removes the files in a directory, temporary ones included, except the `kept` ones."""
    for name in set(list_files(folder)) - kept:
        (folder / name).unlink(missing_ok=True)
    remove_temporary(folder)


def _mark_bad(folder: Location, reason: str) -> None:
    """Marks a checkpoint as bad, so that it is not read again; a failure is logged and raises nothing."""
    try:
        put_json(folder / _BAD, {"reason": reason, "time_s": time.time()}, if_absent=True)
    except OSError as error:
        logger.warning("%s could not be marked as bad, and is read again: %s", folder, error)
