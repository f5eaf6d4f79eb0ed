"""Two workers write the same checkpoint at once, the worker that leaves its node and the next rank 0. They leave one
intact checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from ray_app.checkpoint import store as store_module
from ray_app.checkpoint.format import MODEL, TRAINING, pack
from ray_app.checkpoint.store import COMMIT, WRITER, CheckpointStore, Commit, seal
from ray_app.config.sections import CheckpointSection
from ray_app.retry import Retry
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage import object_stores
from ray_app.storage.files import Content, Location, list_tree, put_atomic, put_json, read_json, render_content
from ray_app.train.checkpointing import persistence as writer_module
from ray_app.train.checkpointing.persistence import CheckpointWriter
from tests.support.checkpoints import commit_of, snapshot_of
from tests.support.waiting import wait_until

VALUES = 3 << 19
"""Number of values of a model of 6 MiB, which is uploaded to S3 in parts here."""


@pytest.fixture(
    params=["local", "s3", *(pytest.param(scheme, marks=pytest.mark.rest) for scheme in ("gs", "az"))], ids=str
)
def paths(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setattr(object_stores, "PART_BYTES", 5 << 20)
    return RunPaths(
        (tmp_path if request.param == "local" else request.getfixturevalue(f"{request.param}_folder")) / "run"
    )


class Stops:
    """Stops each of the writers `old` and `new` in the middle of one of its files, until it may continue.

    Args:
        at: For each writer, the name of the file.
    """

    def __init__(self, at: dict[str, str]) -> None:
        self._at, self._writers = dict(at), dict[int, str]()
        self.reached, self.may_go = ({name: threading.Event() for name in ("old", "new")} for _ in range(2))

    def register(self, writer: str) -> None:
        """Registers the calling thread as a writer."""
        self._writers[threading.get_ident()] = writer

    def wait_at(self, path: Location) -> None:
        """Waits if this writer is to stop at this file and has not stopped yet."""
        writer = self._writers.get(threading.get_ident())
        if writer is not None and path.name.endswith(self._at.get(writer, "/")):
            del self._at[writer]
            self.reached[writer].set()
            assert self.may_go[writer].wait(60)

    def put_atomic(self, path: Location, content: Content, **options: Any) -> bool:
        def write(file: IO[bytes]) -> None:
            data = render_content(content)
            file.write(data[: len(data) // 2])
            self.wait_at(path)
            file.write(data[len(data) // 2 :])

        return put_atomic(path, write, **options)

    def put_json(self, path: Location, value: Any, **options: Any) -> bool:
        self.wait_at(path)
        return put_json(path, value, **options)


@pytest.fixture
def stops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stops]:
    stops = Stops(request.param)
    monkeypatch.setattr(store_module, "put_atomic", stops.put_atomic)
    monkeypatch.setattr(store_module, "put_json", stops.put_json)
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.001, attempts=6))
    yield stops
    for event in stops.may_go.values():
        event.set()


def begin(writer: str, paths: RunPaths, stops: Stops) -> CheckpointWriter:
    """Begins to write step 20; the training files of both writers differ in bytes."""
    checkpoint_writer = CheckpointWriter(paths, CheckpointSection(), list, lambda _: stops.register(writer))
    checkpoint_writer.save(lambda: replace(snapshot_of(20, VALUES), schedule={"of": writer}), commit_of(20))
    return checkpoint_writer


FILES = (MODEL, TRAINING, COMMIT)


@pytest.mark.rest
@pytest.mark.parametrize(
    "stops",
    [*({"old": one, "new": other} for one in FILES for other in FILES), {"old": WRITER, "new": WRITER}],
    ids=str,
    indirect=True,
)
@pytest.mark.parametrize("first", ["old", "new"])
def test_two_writers_stopped_anywhere_leave_one_intact_checkpoint(paths: RunPaths, stops: Stops, first: str) -> None:
    checkpoint_writers = {}
    for writer in ("old", "new"):
        checkpoint_writers[writer] = begin(writer, paths, stops)
        stopped = stops.reached[writer]
        wait_until(
            lambda stopped=stopped: stopped.is_set() or read_events(paths, "checkpointed"),
            "the writer neither stops at the file nor completes the checkpoint",
        )
    for writer in sorted(checkpoint_writers, key=lambda name: name != first):
        stops.may_go[writer].set()
        checkpoint_writers[writer].wait_for_commit()
        assert_intact(paths)
    assert {e.kind for e in read_events(paths)} == {"checkpointed"}, "a writer failed because of the other"


def assert_intact(paths: RunPaths) -> None:
    loaded = CheckpointStore(paths).load_newest(lambda fallback: pytest.fail(str(fallback)))
    assert loaded is not None
    assert loaded[0].step == 20
    names = {f"{loaded[0].prefix}{name}" for name in (MODEL, TRAINING)}
    assert set(list_tree(paths.checkpoint(20, 1))) == names | {COMMIT, WRITER}
    assert list_tree(paths.checkpoint(20, 1), temporary=True) == {}, "temporary files stay"


def test_a_writer_that_gives_up_before_the_other_commits_leaves_no_empty_commit(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = CheckpointStore(paths), pack(snapshot_of(20))
    folder = paths.checkpoint(20, 1)

    def overtaken(path: Location, value: Any, **options: Any) -> bool:
        # The writer that gives up found no commit, so it removes the files.
        if path.name == COMMIT:
            (folder / MODEL).unlink()
        return put_json(path, value, **options)

    monkeypatch.setattr(store_module, "put_json", overtaken)
    with pytest.raises(OSError, match=r"Another process has removed \['model.safetensors'\]"):
        store.write(files, commit_of(20))
    assert store.commits() == []
    monkeypatch.undo()
    store.write(files, commit_of(20))
    assert_intact(paths)


def test_a_writer_leaves_the_commit_of_a_faster_writer_alone(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other writer has reported its checkpoint, and older ones may be gone by then."""
    folder, files = paths.checkpoint(20, 1), pack(snapshot_of(20))

    def overtaken(path: Location, value: Any, **options: Any) -> bool:
        if path.name == COMMIT:
            monkeypatch.undo()
            CheckpointStore(paths).write(files, commit_of(20))
        return put_json(path, value, **options)

    monkeypatch.setattr(store_module, "put_json", overtaken)
    assert CheckpointStore(paths).write(files, commit_of(20)) == folder
    assert_intact(paths)
    assert CheckpointStore(paths).commits()[0].prefix, "the slower writer has committed"


@pytest.mark.rest
@pytest.mark.parametrize("stops", [{"new": TRAINING}], indirect=True)
def test_a_failing_writer_does_not_make_the_other_fail(
    paths: RunPaths, stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing writer removes the files that it takes for its own, and the other writes them again."""
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.5, attempts=2))

    def refused(_: Commit) -> None:
        raise OSError("Stale file handle")

    new = begin("new", paths, stops)
    assert stops.reached["new"].wait(60)
    old = CheckpointWriter(paths, CheckpointSection(), list, refused)
    old.save(lambda: snapshot_of(20, VALUES), commit_of(20))
    old.wait()
    assert not (paths.checkpoint(20, 1) / MODEL).exists()
    stops.may_go["new"].set()
    new.wait_for_commit()
    assert_intact(paths)


@pytest.mark.parametrize("left", [[], [MODEL], [MODEL, TRAINING]], ids=len)
def test_files_of_a_killed_writer_are_not_used(paths: RunPaths, left: list[str]) -> None:
    """The storage may have damaged such a file, or a writer of another step has left it."""
    folder, files = paths.checkpoint(20, 1), pack(snapshot_of(20))
    put_json(folder / WRITER, {"attempt": "killed"})
    for name in left:
        put_atomic(folder / name, files[name][:-1])
    CheckpointStore(paths).write(files, commit_of(20))
    assert_intact(paths)


def test_a_checkpoint_of_version_2_is_read(paths: RunPaths) -> None:
    folder = CheckpointStore(paths).write(pack(snapshot_of(20)), commit_of(20))
    values = read_json(folder / COMMIT) | {"schema_version": 2}
    put_json(folder / COMMIT, seal({name: value for name, value in values.items() if name not in ("prefix", "sha256")}))
    assert_intact(paths)
