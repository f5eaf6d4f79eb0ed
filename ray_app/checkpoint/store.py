"""The checkpoint store: a directory per step and fence, its files, and `COMMIT.json` last.

A directory without a valid `COMMIT.json` does not exist. Loading verifies the digest of every file, takes the newest
step and its highest fence, and walks back over bad ones, marking those whose bytes have changed. Nothing is moved,
appended to, or replaced before it is committed. A writer that a later start has taken the run over from commits
nothing; should both happen at the same moment, the commit is still one that the run can go on from, under its own
fence.

Files of a checkpoint, put where there are none: two workers may write the same checkpoint at once.

What `COMMIT.json` says, which makes a folder a checkpoint; a digest of its own finds any change of it.

Which checkpoints may go: one pure function.
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


class _Measured:
    """A file to write to, which knows the digest and the length of what was written.

    Args:
        file: Where it goes; None: it is only measured.
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


def put_if_absent(place: Location, content: Content) -> dict[str, Any] | None:
    """Writes a file unless there is one; returns its digest and size, or None if it is there with another content.

    Of a file written here they are taken from what was to be written, not from what the storage has made of it.
    """
    measured: list[_Measured] = []

    def write(file: IO[bytes] | None) -> None:
        measured.append(_Measured(file))
        measured[-1].write(content) if isinstance(content, bytes) else content(cast(IO[bytes], measured[-1]))

    if not place.exists() and put_atomic(place, write, if_absent=True):
        return measured[-1].facts()
    write(None)
    if _facts_of(place) == measured[-1].facts():
        return measured[-1].facts()
    found = place.read_bytes()
    return _facts(found) if place.name == TRAINING and has_same_values(found, render_content(content)) else None


def _facts_of(place: Location) -> dict[str, Any]:
    if not isinstance(place, Path):
        return _facts(place.read_bytes())
    with place.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _facts(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


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


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `COMMIT.json` with a digest of their own, so that a change of any of them is found."""
    return values | {"sha256": _digest(values)}


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parse_commit(name: str, data: bytes) -> Commit:
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
    if (commit.step, commit.fence) != parse_folder_name(name):
        raise DamagedError(
            f"{COMMIT} is damaged: it is the one of step {commit.step} and fence {commit.fence}, not of {name}"
        )
    return commit


def parse_folder_name(name: str) -> tuple[int, int]:
    """Step and fence of a checkpoint's folder."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


ALL = 1_000_000_000


@dataclass(frozen=True)
class Hold:
    """What a follower (an evaluator) still needs: the newest checkpoints after `done_step`, until it expires.

    Args:
        done_step: Newest step that it is done with.
        expires_s: When the hold ends unless it is renewed, seconds since 1970 (UTC).
        most: How many it keeps alive at most; older ones go, and are recorded as skipped.
        evaluator: Name of the evaluator; None: the run's own.
    """

    done_step: int
    expires_s: float
    most: int = 32
    evaluator: str | None = None


def removable_steps(
    steps: Iterable[int], keep_last: int, best: Iterable[int], holds: Iterable[Hold], now_s: float
) -> set[int]:
    """Steps of the checkpoints that nobody needs.

    Args:
        steps: Steps of all intact checkpoints.
        keep_last: Newest ones to keep; at least one always stays.
        best: Steps to keep besides.
        holds: What the followers say; expired ones do not count.
        now_s: Seconds since 1970 (UTC).
    """
    ordered = sorted(set(steps))
    kept = set(ordered[-max(1, keep_last) :]) | set(best)
    for hold in holds:
        if hold.expires_s > now_s:
            kept |= set([step for step in ordered if step > hold.done_step][-hold.most :])
    return set(ordered) - kept


def skipped_evaluations(gone: Iterable[int], holds: Iterable[Hold], now_s: float) -> set[tuple[int, str | None]]:
    """The removed checkpoints that an evaluator was still waiting for, each with its name; the run's own has none.

    A named one counts while its hold lives; the run's own waits also when it finds no room or is being started again.
    """
    waiting = [hold for hold in holds if hold.evaluator is None or hold.expires_s > now_s]
    return {(step, hold.evaluator) for hold in waiting for step in gone if step > hold.done_step}


logger = logging.getLogger(__name__)

_BAD = "BAD.json"
SUSPECT = "SUSPECT.json"
_FILE = re.compile(r"\w[\w.-]*")

_Folders = dict[str, dict[str, Location]]
"""The files of every checkpoint folder by their names, by the folder's name."""


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

    def write(self, files: Mapping[str, Content], commit: Commit) -> Location:
        """Writes and commits a checkpoint; one that is committed already is left alone, unless it is marked bad.

        Two workers may write the same checkpoint at once, one that leaves its node and the next rank 0. So a file is
        put where there is none, and what is there stays until it is committed or given up: whoever is first commits,
        and the other finds that done.

        Raises: LeaseLostError: A later start has taken the run over; nothing was committed, and what was written is
            removed. OSError: The storage refused; nothing was committed. Whole files stay for another try, `discard`
            gives up.
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
        with suppress(OSError):
            remove_temporary(folder)  # of a writer that was killed, or comes too late
        return folder

    def _put_all(self, folder: Location, files: Mapping[str, Content], commit: Commit) -> None:
        digests = {}
        for name, content in files.items():
            digests[name] = put_if_absent(folder / name, content)
            if digests[name] is None:
                self.discard(commit)
                raise OSError(
                    f"{folder / name} was left damaged, or by steps that were done differently before; it is removed"
                )
        check_lease(self._paths, commit.fence)
        _refuse_if_gone(folder, files.keys())
        is_ours = put_json(folder / COMMIT, seal(asdict(commit) | {"files": digests}), if_absent=True)
        try:
            _refuse_if_gone(folder, files.keys())  # by who gives up, and had not seen the commit yet
        except _GoneError:  # a storage that does not answer says nothing
            if is_ours:
                (folder / COMMIT).unlink(missing_ok=True)
            raise

    def discard(self, commit: Commit) -> None:
        """Removes what failed writes left of a checkpoint, unless it was committed after all.

        Raises:
            OSError: The storage does not answer.
        """
        folder = self._paths.checkpoint(commit.step, commit.fence)
        if not (folder / COMMIT).exists():
            remove_tree(folder)

    def commits(self) -> list[Commit]:
        """Every committed checkpoint that is not marked bad, by step and then fence."""
        good = {name: files[COMMIT] for name, files in self._folders().items() if COMMIT in files and _BAD not in files}
        found: list[Commit] = []
        for name, data in zip(good, read_all(good.values(), missing=b""), strict=True):
            with suppress(CheckpointError):
                found.append(parse_commit(name, data))
        return sorted(found, key=lambda c: (c.step, c.fence))

    def load(self, commit: Commit) -> dict[str, bytes]:
        """The files of a checkpoint, verified.

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
        """The newest checkpoint that is intact, or None if none was ever committed.

        Args: on_fallback: Told of every checkpoint that is passed over, whoever marked it. One that is damaged is
            marked and not looked at
                again; one whose content is refused stays as it is, since another version may read it.
            above: A step; checkpoints up to it count as if they were not there, and are not read.

        Raises:
            CheckpointError: There are checkpoints, but not one can be used; nothing is deleted.
            MemoryError: There is no room for it here.
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
        """Marks the checkpoints of more finished steps, to which a worker that computes wrongly may have contributed.

        They are used as others are.

        Returns:
            Their steps.

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
        """Marks a checkpoint so that nobody looks at it again; its files stay."""
        _mark_bad(self._paths.checkpoint(commit.step, commit.fence), reason)

    def clean(self, fence: int) -> None:
        """Removes leftovers of earlier starts that were never committed.

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
        """Removes checkpoints that nobody needs any more; the newest intact ones stay.

        Args:
            keep_last: Newest checkpoints to keep.
            best: Steps of the best ones, which stay too.
            holds: Holds that are respected besides those of now.
            before: Told of the steps to remove before anything is removed.

        Returns:
            Steps of the removed ones.
        """
        commits = self.commits()
        gone = removable_steps([c.step for c in commits], keep_last, best, [*holds, *self.holds()], time.time())
        if before is not None:
            before(sorted(gone))
        for commit in commits:
            if commit.step in gone:
                folder = self._paths.checkpoint(commit.step, commit.fence)
                (folder / COMMIT).unlink(missing_ok=True)
                remove_tree(folder)
        return sorted(gone)

    def holds(self) -> list[Hold]:
        """What the followers of this run say."""
        found = read_all_json(list_tree(self._paths.holds).values(), missing=b"null")  # a follower may be done just now
        return [Hold(**value) for value in found if value]

    def hold(self, follower: str, hold: Hold) -> None:
        """Says for a follower what it still needs."""
        put_json(self._paths.holds / f"{follower}.json", asdict(hold))

    def release(self, follower: str) -> None:
        """Says for a follower that it needs nothing any more."""
        (self._paths.holds / f"{follower}.json").unlink(missing_ok=True)

    def _folders(self, temporary: bool = False) -> _Folders:
        """What there is; with `temporary` what writers that were stopped in the middle have left. On S3 that is one
        request.
        """
        found: _Folders = {}
        for path, file in list_tree(self._paths.checkpoints, temporary=temporary).items():
            folder, _, name = path.rpartition("/")
            if NAME.fullmatch(folder):
                found.setdefault(folder, {})[name] = file
        return found


class _GoneError(OSError):
    """Files of a checkpoint that is being written are no longer there."""


def _refuse_if_gone(folder: Location, wanted: Iterable[str]) -> None:
    if gone := set(wanted) - set(list_files(folder)):
        raise _GoneError(f"Somebody has removed {sorted(gone)} from {folder} meanwhile")


def _mark_bad(folder: Location, reason: str) -> None:
    try:
        put_json(folder / _BAD, {"reason": reason, "time_s": time.time()}, if_absent=True)
    except OSError as error:
        logger.warning("%s could not be marked as bad and will be looked at again: %s", folder, error)
