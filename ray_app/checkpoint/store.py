"""The checkpoint store: a directory per step and fence, its files, and `COMMIT.json` last.

A directory without a valid `COMMIT.json` does not exist. Loading verifies the digest of every file, takes the newest step and its
highest fence, and walks back over bad ones, marking those whose bytes have changed. Nothing is moved, appended to, or replaced before it is
committed. A writer that a later start has taken the run over from commits nothing; should both happen at the same moment, the commit is
still one that the run can go on from, under its own fence.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from ray_app.checkpoint.commit import COMMIT, NAME, Commit, key_of, parsed, sealed
from ray_app.checkpoint.format import Snapshot, unpack
from ray_app.checkpoint.put import put_if_absent
from ray_app.checkpoint.retention import Hold, removable
from ray_app.errors import CheckpointError, DamagedError, LeaseLostError
from ray_app.record.files import (
    Content,
    Location,
    listing,
    names,
    put_json,
    read_all,
    read_all_json,
    read_json,
    remove_temporary,
    remove_tree,
)
from ray_app.record.lease import refuse_if_lost
from ray_app.record.paths import RunPaths

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

        Two workers may write the same checkpoint at once, one that leaves its node and the next rank 0. So a file is put where there is
        none, and what is there stays until it is committed or given up: whoever is first commits, and the other finds that done.

        Raises:
            LeaseLostError: A later start has taken the run over; nothing was committed, and what was written is removed.
            OSError: The storage refused; nothing was committed. Whole files stay for another try, `discard` gives up.
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
                raise OSError(f"{folder / name} was left damaged, or by steps that were done differently before; it is removed")
        refuse_if_lost(self._paths, commit.fence)
        _refuse_if_gone(folder, files.keys())
        is_ours = put_json(folder / COMMIT, sealed(asdict(commit) | {"files": digests}), if_absent=True)
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
                found.append(parsed(name, data))
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
                raise CheckpointError(f"{folder.name}/{COMMIT} names the file {name!r}, which cannot be one of the checkpoint's own")
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

        Args:
            on_fallback: Told of every checkpoint that is passed over, whoever marked it. One that is damaged is marked and not looked at
                again; one whose content is refused stays as it is, since another version may read it.
            above: A step; checkpoints up to it count as if they were not there, and are not read.

        Raises:
            CheckpointError: There are checkpoints, but not one can be used; nothing is deleted.
            MemoryError: There is no room for it here.
            OSError: The storage does not answer.
        """
        refused = []
        for name, files in sorted(self._folders().items(), key=lambda item: key_of(item[0]), reverse=True):
            if COMMIT not in files or key_of(name)[0] <= above:
                continue
            try:
                if _BAD in files:
                    raise CheckpointError(str(read_json(files[_BAD])["reason"]))
                commit = parsed(name, files[COMMIT].read_bytes())
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
            put_json(self._paths.checkpoint(commit.step, commit.fence) / SUSPECT, {"reason": reason, "time_s": time.time()}, if_absent=True)
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
            if COMMIT not in files and key_of(name)[1] < fence:
                remove_tree(self._paths.checkpoints / name)

    def retain(
        self, keep_last: int, best: list[int], holds: Sequence[Hold] = (), before: Callable[[list[int]], None] | None = None
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
        gone = removable([c.step for c in commits], keep_last, best, [*holds, *self.holds()], time.time())
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
        found = read_all_json(listing(self._paths.holds).values(), missing=b"null")  # a follower may be done just now
        return [Hold(**value) for value in found if value]

    def hold(self, follower: str, hold: Hold) -> None:
        """Says for a follower what it still needs."""
        put_json(self._paths.holds / f"{follower}.json", asdict(hold))

    def release(self, follower: str) -> None:
        """Says for a follower that it needs nothing any more."""
        (self._paths.holds / f"{follower}.json").unlink(missing_ok=True)

    def _folders(self, temporary: bool = False) -> _Folders:
        """What there is; with `temporary` what writers that were stopped in the middle have left. On S3 that is one request."""
        found: _Folders = {}
        for path, file in listing(self._paths.checkpoints, temporary=temporary).items():
            folder, _, name = path.rpartition("/")
            if NAME.fullmatch(folder):
                found.setdefault(folder, {})[name] = file
        return found


class _GoneError(OSError):
    """Files of a checkpoint that is being written are no longer there."""


def _refuse_if_gone(folder: Location, wanted: Iterable[str]) -> None:
    if gone := set(wanted) - set(names(folder)):
        raise _GoneError(f"Somebody has removed {sorted(gone)} from {folder} meanwhile")


def _mark_bad(folder: Location, reason: str) -> None:
    try:
        put_json(folder / _BAD, {"reason": reason, "time_s": time.time()}, if_absent=True)
    except OSError as error:
        logger.warning("%s could not be marked as bad and will be looked at again: %s", folder, error)
