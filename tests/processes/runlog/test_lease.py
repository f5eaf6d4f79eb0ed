"""The writer's lease: two drivers never write one run, and one that died holds nobody up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ray_app.checkpoint.format import pack
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.sections import CheckpointSection
from ray_app.errors import LeaseLostError, RunHeldError
from ray_app.runlog import lease as lease_module
from ray_app.runlog.journal import read_events
from ray_app.runlog.lease import (
    Lease,
    LeaseHolder,
    LeaseRecord,
    LeaseWatch,
    acquire_lease,
    newest_fence,
    remove_old_fences,
)
from ray_app.runlog.paths import RunPaths
from ray_app.storage import files as files_module
from ray_app.storage.files import put_json, read_json
from ray_app.train.checkpointing.writer import CheckpointWriter
from tests.support.checkpoints import commit_of, snapshot_of
from tests.support.places import ROOT
from tests.support.waiting import until

HERE = LeaseHolder.here()
AWAY = LeaseHolder("node-7", "another machine", HERE.pid, HERE.pid_ticks)


@pytest.fixture(params=["local", "s3"])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> RunPaths:
    return RunPaths((tmp_path if request.param == "local" else request.getfixturevalue("s3_folder")) / "run")


HOLDER = """
import sys, time
from ray_app.storage.files import to_location
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.paths import RunPaths
with acquire_lease(RunPaths(to_location(sys.argv[1])), float(sys.argv[2])) as lease:
    print(lease.fence, flush=True)
    while lease.lost is None:
        time.sleep(0.02)
    print(lease.lost, flush=True)
"""


class Driver:
    """Another process that holds the lease until it is killed or finds it lost."""

    def __init__(self, paths: RunPaths, life_s: float) -> None:
        command = [sys.executable, "-c", HOLDER, str(paths.root), str(life_s)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.fence = int(self.process.stdout.readline())

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def send(self, number: int) -> None:
        self.process.send_signal(number)


@pytest.fixture
def driver(paths: RunPaths) -> Iterator[Callable[[float], Driver]]:
    made: list[Driver] = []

    def start(life_s: float) -> Driver:
        made.append(Driver(paths, life_s))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


# --- what an observer can say


@pytest.mark.parametrize(
    ("holder", "age_s", "released", "state"),
    [
        (HERE, 10, False, "held"),
        (HERE, 31, False, "unclear"),
        (HERE, 10, True, "free"),
        (replace(HERE, pid=2**22 + 1), 10, False, "free"),
        (replace(HERE, pid_ticks=1), 10, False, "free"),
        (AWAY, 10, False, "unclear"),
        (AWAY, -500, False, "unclear"),
        (AWAY, 500, False, "unclear"),
        (AWAY, 1000, False, "free"),
        (AWAY, 10, True, "free"),
    ],
)
def test_the_state_of_a_lease(holder: LeaseHolder, age_s: float, released: bool, state: str) -> None:
    assert LeaseRecord(holder, 0.0, 5000.0, 30.0, released).state(HERE, 5000.0 + age_s) == state


# --- real processes


def test_a_second_driver_is_refused_while_the_first_lives(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(3.0)
    began = time.monotonic()
    while time.monotonic() < began + 4.0:  # more than a life
        with pytest.raises(RunHeldError) as caught:
            acquire_lease(paths)
    for text in (
        f"The run 'run' is being written by process {first.process.pid} on",
        "UTC; its lease lasts until",
        "another run.name",
    ):
        assert text in str(caught.value)
    assert newest_fence(paths) == first.fence == 1


def test_a_killed_driver_is_followed_at_once(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(600.0)
    first.send(signal.SIGKILL)
    first.process.wait()
    began = time.monotonic()
    with acquire_lease(paths) as lease:
        assert lease.fence == 2
    assert time.monotonic() - began < 60, "it waits for the lease to expire"
    with acquire_lease(paths) as lease:
        assert lease.fence == 3, "a released lease holds nobody up"


def test_a_dead_driver_that_nobody_has_reaped_is_dead(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(600.0)
    first.send(signal.SIGKILL)
    until(lambda: " Z " in Path(f"/proc/{first.process.pid}/stat").read_text(), "it does not die")
    with acquire_lease(paths) as lease:
        assert lease.fence == 2


def test_a_driver_that_stood_still_finds_its_lease_lost(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(1.0)
    first.send(signal.SIGSTOP)
    leases: list[Lease] = []

    def expired() -> bool:
        try:
            leases.append(acquire_lease(paths))
        except RunHeldError:
            return False
        return True

    until(expired, "the lease does not expire")
    try:
        first.send(signal.SIGCONT)
        said = first.says()
        assert f"The run 'run' was taken over by its start number 2 (process {HERE.pid} on" in said
        assert "this one, number 1, must not write it any more" in said
        first.process.wait(30)
        assert leases[0].lost is None
        assert read_json(paths.fence(1))["released"] is False
    finally:
        leases[0].release()


def test_one_of_many_gets_it(paths: RunPaths) -> None:
    start, got, refused = threading.Barrier(4), [], []

    def try_it() -> None:
        start.wait()
        try:
            got.append(acquire_lease(paths))
        except RunHeldError:
            refused.append(1)

    threads = [threading.Thread(target=try_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lease.fence for lease in got] == [1]
    assert len(refused) == 3
    got[0].release()


# --- another machine, whose clock is not trusted


def put_lease(paths: RunPaths, renewed_s: float, released: bool = False, life_s: float = 1.0) -> None:
    put_json(paths.fence(1), asdict(LeaseRecord(AWAY, 0.0, renewed_s, life_s, released)))


@pytest.mark.parametrize("clock_s", [-500.0, pytest.param(0.0, marks=pytest.mark.rest), 500.0])
def test_another_machines_lease_is_taken_over_when_it_is_not_renewed(paths: RunPaths, clock_s: float) -> None:
    put_lease(paths, time.time() + clock_s)
    began = time.monotonic()
    with acquire_lease(paths) as lease:
        assert lease.fence == 2
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("clock_s", [-500.0, 500.0])
@pytest.mark.parametrize("released", [False, True])
def test_another_machines_lease_is_watched(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, clock_s: float, released: bool
) -> None:
    """It is renewed, or released, after the first look."""
    put_lease(paths, time.time() + clock_s, life_s=3.0)
    poll = LeaseWatch.poll

    def poll_and_renew(observer: LeaseWatch) -> str:
        seen.append(poll(observer))
        if len(seen) == 1:
            put_lease(paths, time.time() + clock_s + 0.3, released, 3.0)
        return seen[-1]

    seen: list[str] = []
    monkeypatch.setattr(LeaseWatch, "poll", poll_and_renew)
    if released:
        acquire_lease(paths).release()
    else:
        with pytest.raises(RunHeldError, match="on node-7"):
            acquire_lease(paths)
    assert seen == ["unclear", "over" if released else "held"]
    assert newest_fence(paths) == 1 + released


@pytest.mark.parametrize("holder", [pytest.param(HERE, marks=pytest.mark.rest), AWAY], ids=["here", "away"])
def test_who_could_not_renew_while_nobody_could_look_is_watched_again(
    paths: RunPaths, holder: LeaseHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    life_s = 0.4
    put_json(paths.fence(1), asdict(LeaseRecord(holder, 0.0, time.time(), life_s)))
    observer = LeaseWatch(paths, 1)
    assert observer.poll() in ("held", "unclear")
    ends_s = time.monotonic() + 3 * life_s

    def fail(*_: Any) -> None:
        raise OSError("503")

    with monkeypatch.context() as broken:
        broken.setattr(lease_module, "list_files", fail)
        while time.monotonic() < ends_s:
            with pytest.raises(OSError, match="503"):
                observer.poll()
    assert observer.poll() == "unclear", "it had no time to renew"
    put_json(paths.fence(1), asdict(LeaseRecord(holder, 0.0, time.time(), 60.0)))
    assert observer.poll() == "held"


def test_a_driver_that_lives_is_watched_before_its_lease_counts_as_lost(paths: RunPaths) -> None:
    """Its clock was set, or its machine slept."""
    put_json(paths.fence(1), asdict(LeaseRecord(HERE, 0.0, time.time() - 40.0, 0.5)))
    observer, began_s = LeaseWatch(paths, 1), time.monotonic()
    assert observer.poll() == "unclear"
    until(lambda: observer.poll() == "over", "it is never followed")
    assert time.monotonic() - began_s >= 0.5


# --- while it is held


def test_a_lease_outlives_a_storage_that_fails_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, failed = RunPaths(tmp_path / "run"), threading.Event()

    def fail(*_: Any) -> None:
        failed.set()
        raise OSError("disk full")

    with acquire_lease(paths, life_s=0.6) as lease:
        with monkeypatch.context() as broken:
            broken.setattr(files_module.os, "fsync", fail)
            assert failed.wait(10)
        before = read_json(paths.fence(1))
        until(lambda: read_json(paths.fence(1)) != before, "it is not renewed any more")
        assert lease.lost is None


def test_who_lost_the_lease_commits_nothing(paths: RunPaths) -> None:
    store, told = CheckpointStore(paths), threading.Event()
    lease = acquire_lease(paths, life_s=0.6)
    lease.on_lost(told.set)
    store.write(pack(snapshot_of(1)), commit_of(1, lease.fence))
    put_json(paths.fence(2), asdict(LeaseRecord(AWAY, 0.0, time.time(), 30.0)))
    saver = CheckpointWriter(paths, CheckpointSection(), list)
    saver.save(lambda: snapshot_of(2), commit_of(2, lease.fence))
    saver.wait()
    with pytest.raises(LeaseLostError, match=r"taken over by its start number 2 .* on node-7"):
        saver.raise_if_lost()
    with pytest.raises(LeaseLostError):
        saver.check()
    with pytest.raises(LeaseLostError):
        saver.save(lambda: pytest.fail("it goes on copying"), commit_of(3, lease.fence))
    assert [c.step for c in store.commits()] == [1]
    assert [e.kind for e in read_events(paths)] == [], "it tries again"
    store.write(pack(snapshot_of(2)), commit_of(2, fence=2))
    assert [(c.step, c.fence) for c in store.commits()] == [(1, 1), (2, 2)]
    assert told.wait(10)
    assert isinstance(lease.lost, LeaseLostError)
    lease.release()
    assert read_json(paths.fence(1))["released"] is False


def test_a_lease_lost_between_the_files_and_the_marker(tmp_path: Path) -> None:
    """Another start takes over while a big checkpoint is being written."""
    paths = RunPaths(tmp_path / "run")
    store, files = CheckpointStore(paths), pack(snapshot_of(1))

    class Files(dict[str, bytes]):
        def items(self) -> Any:
            yield from files.items()
            put_json(paths.fence(2), asdict(LeaseRecord(AWAY, 0.0, time.time(), 30.0)))

    put_json(paths.fence(1), asdict(LeaseRecord(HERE, 0.0, time.time(), 30.0)))
    with pytest.raises(LeaseLostError):
        store.write(Files(), commit_of(1))
    assert store.commits() == []
    assert not paths.checkpoint(1, 1).exists(), "half a checkpoint stays"


def test_a_copy_beside_the_fences_is_none_and_files_of_starts_long_before_go(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    for number in (1, 2, 149, 150):
        put_json(paths.fence(number), {})
    (paths.fences / "0001 (copy).json").write_text("{}")
    assert newest_fence(paths) == 150
    remove_old_fences(paths, 150)
    assert sorted(file.name for file in paths.fences.iterdir()) == ["0001 (copy).json", "0149.json", "0150.json"]
