"""Two workers write the same checkpoint at once: one that leaves its node and the next rank 0. One checkpoint comes of
it, intact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from ray_app.checkpoint import store as put_module
from ray_app.checkpoint import store as store_module
from ray_app.checkpoint.format import MODEL, TRAINING, Snapshot, has_same_values, pack
from ray_app.checkpoint.store import COMMIT, CheckpointStore, Commit, seal
from ray_app.config.sections import CheckpointSection
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage import object_stores
from ray_app.storage.files import Content, Location, list_tree, put_atomic, put_json, render_content
from ray_app.train.checkpointing import writer as saver_module
from ray_app.train.checkpointing.writer import CheckpointWriter
from tests.support.checkpoints import commit_of, snapshot_of
from tests.support.waiting import until

VALUES = 3 << 19
"""Of a model of 6 MiB, which S3 takes in parts here."""


@pytest.fixture(params=["local", "s3"])
def paths(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setattr(object_stores, "PART_BYTES", 5 << 20)
    return RunPaths((tmp_path if request.param == "local" else request.getfixturevalue("s3_folder")) / "run")


class Stops:
    """Stops each writer in the middle of one of its files, until it may go on; both are called `old` and `new`.

    Args:
        at: For each writer, the name of the file.
    """

    def __init__(self, at: dict[str, str]) -> None:
        self._at, self._writers = dict(at), dict[int, str]()
        self.reached, self.may_go = ({name: threading.Event() for name in ("old", "new")} for _ in range(2))

    def begins(self, writer: str) -> None:
        """Says that this thread is a writer."""
        self._writers[threading.get_ident()] = writer

    def pass_by(self, place: Location) -> None:
        """Waits if this writer is to stop at this file, and has not yet."""
        writer = self._writers.get(threading.get_ident())
        if writer is not None and self._at.get(writer) == place.name:
            del self._at[writer]
            self.reached[writer].set()
            assert self.may_go[writer].wait(60)

    def put_atomic(self, place: Location, content: Content, **options: Any) -> bool:
        def write(file: IO[bytes]) -> None:
            data = render_content(content)
            file.write(data[: len(data) // 2])
            self.pass_by(place)
            file.write(data[len(data) // 2 :])

        return put_atomic(place, write, **options)

    def put_json(self, place: Location, value: Any, **options: Any) -> bool:
        self.pass_by(place)
        return put_json(place, value, **options)


@pytest.fixture
def stops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stops]:
    made = Stops(request.param)
    monkeypatch.setattr(put_module, "put_atomic", made.put_atomic)
    monkeypatch.setattr(store_module, "put_json", made.put_json)
    monkeypatch.setattr(saver_module, "_FIRST_PAUSE_S", 0.001)
    yield made
    for event in made.may_go.values():
        event.set()


def begin(writer: str, paths: RunPaths, stops: Stops) -> CheckpointWriter:
    """Begins to write step 20; of the two the files differ in what is not the model, but not in what they say."""
    saver = CheckpointWriter(paths, CheckpointSection(), list, lambda _: stops.begins(writer))
    saver.save(lambda: replace(snapshot_of(20, VALUES), schedule=SAME[writer]), commit_of(20))
    return saver


SAME = {"old": {"one": "a text", "other": "a text"}, "new": {"one": "a text", "other": "".join("a text")}}
"""Pickle writes a text that is there twice as one object or as two."""


def test_the_files_of_the_two_differ_but_not_in_what_they_say() -> None:
    one, other = (pack(replace(snapshot_of(20), schedule=SAME[writer]))[TRAINING] for writer in SAME)
    assert one != other
    assert has_same_values(one, other)
    assert not has_same_values(
        one, pack(replace(snapshot_of(20), schedule={"one": "a text", "other": "b text"}))[TRAINING]
    )
    assert not has_same_values(one, one[:-30])
    for values in ({"a": float("nan")}, {"a": [1, (2.0, None)]}, {"a": torch.tensor([float("nan")])}):
        more = [pack(replace(snapshot_of(20), extra_state=values))[TRAINING] for _ in range(2)]
        assert has_same_values(*more)
    assert not has_same_values(
        *(pack(replace(snapshot_of(20), extra_state={"a": value}))[TRAINING] for value in (1, True))
    )


FILES = (MODEL, TRAINING, COMMIT)


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param({"old": one, "new": other}, marks=() if one == other else pytest.mark.rest)
        for one in FILES
        for other in FILES
    ],
    ids=str,
    indirect=True,
)
@pytest.mark.parametrize("first", ["old", pytest.param("new", marks=pytest.mark.rest)])
def test_two_that_are_stopped_anywhere_leave_one_intact_checkpoint(paths: RunPaths, stops: Stops, first: str) -> None:
    savers = {}
    for writer in ("old", "new"):
        savers[writer] = begin(writer, paths, stops)
        stopped = stops.reached[writer]
        until(
            lambda stopped=stopped: stopped.is_set() or read_events(paths, "checkpointed"),
            "it neither gets there nor past it",
        )
    for writer in sorted(savers, key=lambda name: name != first):
        stops.may_go[writer].set()
        savers[writer].check()
        assert_intact(paths)
    assert {e.kind for e in read_events(paths)} == {"checkpointed"}, "one has failed because of the other"


def assert_intact(paths: RunPaths) -> None:
    found = CheckpointStore(paths).load_newest(lambda fallback: pytest.fail(str(fallback)))
    assert found is not None
    assert found[0].step == 20
    assert set(list_tree(paths.checkpoint(20, 1))) == set(FILES)
    assert list_tree(paths.checkpoint(20, 1), temporary=True) == {}, "parts stay"


def test_a_writer_that_gives_up_before_the_other_commits_leaves_no_empty_commit(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = CheckpointStore(paths), pack(snapshot_of(20))
    folder = paths.checkpoint(20, 1)

    def overtaken(place: Location, value: Any, **options: Any) -> bool:
        (folder / MODEL).unlink()  # it had looked for the commit before this
        return put_json(place, value, **options)

    monkeypatch.setattr(store_module, "put_json", overtaken)
    with pytest.raises(OSError, match=r"Another process has removed \['model.safetensors'\]"):
        store.write(files, commit_of(20))
    assert store.commits() == []
    monkeypatch.undo()
    store.write(files, commit_of(20))
    assert_intact(paths)


@pytest.mark.parametrize("is_gone", [False, True])
def test_who_finds_the_other_one_done_leaves_its_commit_alone(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """The other has told of it, and what is older may be gone by then; neither a listing that fails nor one that lacks
    a file undoes it.
    """
    folder, real = paths.checkpoint(20, 1), store_module.list_files
    asked: list[Location] = []

    def overtaken(place: Location, value: Any, **options: Any) -> bool:
        earlier = {name: said for name, said in value.items() if name != "sha256"} | {"time_s": -1.0}
        assert put_json(place, seal(earlier), **options)
        monkeypatch.setattr(store_module, "list_files", unanswered)
        return put_json(place, value, **options)

    def unanswered(place: Location) -> list[str]:
        asked.append(place)
        if not is_gone:
            raise OSError("SlowDown")
        return [name for name in real(place) if name != MODEL]

    monkeypatch.setattr(store_module, "put_json", overtaken)
    assert CheckpointStore(paths).write(pack(snapshot_of(20)), commit_of(20)) == folder
    assert asked == [folder], "nothing happened"
    monkeypatch.undo()
    assert_intact(paths)


@pytest.mark.parametrize("stops", [{"new": TRAINING}], indirect=True)
def test_one_that_gives_up_does_not_make_the_other_fail(
    paths: RunPaths, stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes what it holds for its own, and the other writes that again."""
    monkeypatch.setattr(saver_module, "_ATTEMPTS", 2)

    def refused(_: Commit) -> None:
        raise OSError("Stale file handle")

    new = begin("new", paths, stops)
    assert stops.reached["new"].wait(60)
    old = CheckpointWriter(paths, CheckpointSection(), list, refused)
    old.save(lambda: snapshot_of(20, VALUES), commit_of(20))
    old.wait()
    assert not (paths.checkpoint(20, 1) / MODEL).exists()
    stops.may_go["new"].set()
    new.check()
    assert_intact(paths)


def write(paths: RunPaths, snapshot: Snapshot) -> None:
    CheckpointStore(paths).write(pack(snapshot), commit_of(20))


@pytest.mark.parametrize("left", [[MODEL], [MODEL, TRAINING]], ids=len)
def test_what_a_killed_writer_left_is_used_if_it_is_of_the_same_steps(paths: RunPaths, left: list[str]) -> None:
    for name in left:
        put_atomic(paths.checkpoint(20, 1) / name, pack(replace(snapshot_of(20), schedule=SAME["old"]))[name])
    write(paths, replace(snapshot_of(20), schedule=SAME["new"]))
    assert_intact(paths)
    for name in left:
        put_atomic(paths.checkpoint(20, 2) / name, pack(snapshot_of(20))[name])
    other = replace(snapshot_of(20), model={"weight": snapshot_of(21).model["weight"]})
    with pytest.raises(OSError, match="it is damaged, or an earlier attempt wrote it"):
        CheckpointStore(paths).write(pack(other), commit_of(20, 2))
    CheckpointStore(paths).write(pack(other), commit_of(20, 2))
    found = CheckpointStore(paths).load_newest(lambda fallback: pytest.fail(str(fallback)))
    assert found is not None
    assert (found[0].fence, found[1].model["weight"][0]) == (2, 21.0)


@pytest.mark.parametrize("model_too", [True, False])
@pytest.mark.parametrize("damaged", [True, False])
def test_what_a_killed_writer_left_of_the_training_is_not_used_unseen(
    paths: RunPaths, model_too: bool, damaged: bool
) -> None:
    """One that the storage has damaged, or one of other steps whose model is gone."""
    folder, files = paths.checkpoint(20, 1), pack(snapshot_of(20))
    content = bytearray(
        pack(replace(snapshot_of(20), optimizer=snapshot_of(20 if damaged else 21).optimizer))[TRAINING]
    )
    if damaged:
        place = content.index(snapshot_of(20).optimizer["state"][0]["m"].numpy().tobytes())
        content[place + 2] ^= 1
    put_atomic(folder / TRAINING, bytes(content))
    if model_too:
        put_atomic(folder / MODEL, files[MODEL])
    with pytest.raises(OSError, match="it is damaged, or an earlier attempt wrote it"):
        CheckpointStore(paths).write(files, commit_of(20))
    CheckpointStore(paths).write(files, commit_of(20))
    assert_intact(paths)
    found = CheckpointStore(paths).load_newest(lambda fallback: pytest.fail(str(fallback)))
    assert found is not None
    assert found[1].optimizer["state"][0]["m"].tolist() == [20.0, 20.0, 20.0]


def test_a_big_file_is_put_where_there_is_none(paths: RunPaths) -> None:
    place, big = paths.root / "big", bytes(11 << 20)
    assert put_atomic(place, big, if_absent=True)
    assert not put_atomic(place, b"x" + big, if_absent=True)
    assert place.read_bytes() == big
    assert list_tree(paths.root, temporary=True) == {}, "parts stay"
