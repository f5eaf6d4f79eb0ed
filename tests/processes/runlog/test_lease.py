"""The writer's lease: two drivers never write one run, and a dead driver does not block a start."""

from __future__ import annotations

import os
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
from ray_app.checkpoint.store import WRITER, CheckpointStore
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
from ray_app.storage.files import put_json, read_json
from ray_app.train.checkpointing.persistence import CheckpointWriter
from tests.support.checkpoints import commit_of, snapshot_of
from tests.support.paths import ROOT
from tests.support.quick_cases import only_quick
from tests.support.waiting import wait_until

LOCAL_HOLDER = LeaseHolder.here()
REMOTE_HOLDER = LeaseHolder("node-7", "another machine", LOCAL_HOLDER.pid, LOCAL_HOLDER.pid_ticks)


@pytest.fixture(params=only_quick(["local", "s3"], "local"))
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
    """Another process that holds the lease until it is killed or loses the lease."""

    def __init__(self, paths: RunPaths, life_s: float) -> None:
        command = [sys.executable, "-c", HOLDER, str(paths.root), str(life_s)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.fence = int(self.process.stdout.readline())

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def send(self, number: int) -> None:
        self.process.send_signal(number)


@pytest.fixture
def driver(paths: RunPaths) -> Iterator[Callable[[float], Driver]]:
    drivers: list[Driver] = []

    def start(life_s: float) -> Driver:
        drivers.append(Driver(paths, life_s))
        return drivers[-1]

    yield start
    for one in drivers:
        one.process.kill()
        one.process.wait()


# --- the state of a lease


@pytest.mark.parametrize(
    ("holder", "age_s", "released", "state"),
    [
        (LOCAL_HOLDER, 10, False, "held"),
        (LOCAL_HOLDER, 31, False, "unclear"),
        (LOCAL_HOLDER, 10, True, "free"),
        (replace(LOCAL_HOLDER, pid=2**22 + 1), 10, False, "free"),
        (replace(LOCAL_HOLDER, pid_ticks=1), 10, False, "free"),
        (REMOTE_HOLDER, 10, False, "unclear"),
        (REMOTE_HOLDER, -500, False, "unclear"),
        (REMOTE_HOLDER, 500, False, "unclear"),
        (REMOTE_HOLDER, 1000, False, "free"),
        (REMOTE_HOLDER, 10, True, "free"),
    ],
)
def test_the_state_of_a_lease_follows_from_holder_and_age(
    holder: LeaseHolder, age_s: float, released: bool, state: str
) -> None:
    assert LeaseRecord(holder, 0.0, 5000.0, 30.0, released).state(LOCAL_HOLDER, 5000.0 + age_s) == state


# --- real processes


def test_a_second_driver_is_refused_while_the_first_lives(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(3.0)
    began = time.monotonic()
    # The lease expires unless it is renewed in this time.
    while time.monotonic() < began + 4.0:
        with pytest.raises(RunHeldError) as caught:
            acquire_lease(paths)
    for text in (
        f"The run 'run' is being written by process {first.process.pid} on",
        "UTC; its lease lasts until",
        "another run.name",
    ):
        assert text in str(caught.value)
    assert newest_fence(paths) == first.fence == 1


def test_the_lease_of_a_killed_driver_is_taken_over_at_once(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(600.0)
    first.send(signal.SIGKILL)
    first.process.wait()
    began = time.monotonic()
    with acquire_lease(paths) as lease:
        assert lease.fence == 2
    assert time.monotonic() - began < 60, "the start waited for the lease to expire"
    with acquire_lease(paths) as lease:
        assert lease.fence == 3, "a released lease must not block a start"


def test_the_lease_of_a_zombie_driver_is_taken_over(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(600.0)
    first.send(signal.SIGKILL)
    wait_until(lambda: " Z " in Path(f"/proc/{first.process.pid}/stat").read_text(), "the driver did not die")
    with acquire_lease(paths) as lease:
        assert lease.fence == 2


@pytest.mark.rest
def test_a_frozen_driver_loses_its_lease(paths: RunPaths, driver: Callable[[float], Driver]) -> None:
    first = driver(1.0)
    first.send(signal.SIGSTOP)
    leases: list[Lease] = []

    def expired() -> bool:
        try:
            leases.append(acquire_lease(paths))
        except RunHeldError:
            return False
        return True

    wait_until(expired, "the lease does not expire")
    try:
        first.send(signal.SIGCONT)
        message = first.read_line()
        assert f"The run 'run' was taken over by its start number 2 (process {LOCAL_HOLDER.pid} on" in message
        assert "this start, number 1, may no longer write it" in message
        first.process.wait(30)
        assert leases[0].lost is None
        assert read_json(paths.fence(1))["released"] is False
    finally:
        leases[0].release()


def test_one_of_several_concurrent_starts_acquires_the_lease(paths: RunPaths) -> None:
    start = threading.Barrier(4)
    leases, refused = [], []

    def acquire() -> None:
        start.wait()
        try:
            leases.append(acquire_lease(paths))
        except RunHeldError:
            refused.append(1)

    threads = [threading.Thread(target=acquire) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lease.fence for lease in leases] == [1]
    assert len(refused) == 3
    leases[0].release()


# --- another machine with an unknown clock


def put_lease(paths: RunPaths, renewed_s: float, released: bool = False, life_s: float = 1.0) -> None:
    put_json(paths.fence(1), asdict(LeaseRecord(REMOTE_HOLDER, 0.0, renewed_s, life_s, released)))


@pytest.mark.rest
@pytest.mark.parametrize("clock_s", [-500.0, 0.0, 500.0])
def test_an_unrenewed_lease_of_another_machine_is_taken_over(paths: RunPaths, clock_s: float) -> None:
    put_lease(paths, time.time() + clock_s)
    began = time.monotonic()
    with acquire_lease(paths) as lease:
        assert lease.fence == 2
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("clock_s", [-500.0, 500.0])
@pytest.mark.parametrize("released", [False, True])
def test_a_lease_of_another_machine_is_watched_for_a_renewal(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, clock_s: float, released: bool
) -> None:
    """The lease is renewed, or released, after the first poll."""
    put_lease(paths, time.time() + clock_s, life_s=3.0)
    poll = LeaseWatch.poll

    def poll_and_renew(observer: LeaseWatch) -> str:
        states.append(poll(observer))
        if len(states) == 1:
            put_lease(paths, time.time() + clock_s + 0.3, released, 3.0)
        return states[-1]

    states: list[str] = []
    monkeypatch.setattr(LeaseWatch, "poll", poll_and_renew)
    if released:
        acquire_lease(paths).release()
    else:
        with pytest.raises(RunHeldError, match="on node-7"):
            acquire_lease(paths)
    assert states == ["unclear", "over" if released else "held"]
    assert newest_fence(paths) == 1 + released


@pytest.mark.rest
@pytest.mark.parametrize("holder", [LOCAL_HOLDER, REMOTE_HOLDER], ids=["here", "away"])
def test_watching_restarts_after_a_storage_outage(
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
    assert observer.poll() == "unclear", "the holder had no time to renew the lease"
    put_json(paths.fence(1), asdict(LeaseRecord(holder, 0.0, time.time(), 60.0)))
    assert observer.poll() == "held"


def test_a_living_driver_with_an_expired_lease_is_watched_first(paths: RunPaths) -> None:
    """The lease can expire because the clock was set, or because the machine slept."""
    put_json(paths.fence(1), asdict(LeaseRecord(LOCAL_HOLDER, 0.0, time.time() - 40.0, 0.5)))
    observer, began_s = LeaseWatch(paths, 1), time.monotonic()
    assert observer.poll() == "unclear"
    wait_until(lambda: observer.poll() == "over", "the lease was never taken over")
    assert time.monotonic() - began_s >= 0.5


# --- while it is held


def test_a_lease_survives_a_transient_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, failed = RunPaths(tmp_path / "run"), threading.Event()

    def fail(*_: Any) -> None:
        failed.set()
        raise OSError("disk full")

    with acquire_lease(paths, life_s=0.6) as lease:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            assert failed.wait(10)
        before = read_json(paths.fence(1))
        wait_until(lambda: read_json(paths.fence(1)) != before, "the lease was not renewed after the storage error")
        assert lease.lost is None


def test_a_writer_without_the_lease_commits_nothing(paths: RunPaths) -> None:
    store, lost = CheckpointStore(paths), threading.Event()
    lease = acquire_lease(paths, life_s=0.6)
    lease.on_lost(lost.set)
    store.write(pack(snapshot_of(1)), commit_of(1, lease.fence))
    put_json(paths.fence(2), asdict(LeaseRecord(REMOTE_HOLDER, 0.0, time.time(), 30.0)))
    writer = CheckpointWriter(paths, CheckpointSection(), list)
    writer.save(lambda: snapshot_of(2), commit_of(2, lease.fence))
    writer.wait()
    with pytest.raises(LeaseLostError, match=r"taken over by its start number 2 .* on node-7"):
        writer.raise_if_lost()
    with pytest.raises(LeaseLostError):
        writer.wait_for_commit()
    with pytest.raises(LeaseLostError):
        writer.save(lambda: pytest.fail("it goes on copying"), commit_of(3, lease.fence))
    assert [c.step for c in store.commits()] == [1]
    assert [e.kind for e in read_events(paths)] == [], "the writer retried without the lease"
    store.write(pack(snapshot_of(2)), commit_of(2, fence=2))
    assert [(c.step, c.fence) for c in store.commits()] == [(1, 1), (2, 2)]
    assert lost.wait(10)
    assert isinstance(lease.lost, LeaseLostError)
    lease.release()
    assert read_json(paths.fence(1))["released"] is False


def test_a_lease_lost_before_the_commit_marker_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Another start takes over while a big checkpoint is being written."""
    paths = RunPaths(tmp_path / "run")
    store, files = CheckpointStore(paths), pack(snapshot_of(1))

    class Files(dict[str, bytes]):
        def __getitem__(self, name: str) -> bytes:
            if name == list(self)[-1]:
                put_json(paths.fence(2), asdict(LeaseRecord(REMOTE_HOLDER, 0.0, time.time(), 30.0)))
            return super().__getitem__(name)

    put_json(paths.fence(1), asdict(LeaseRecord(LOCAL_HOLDER, 0.0, time.time(), 30.0)))
    with pytest.raises(LeaseLostError):
        store.write(Files(files), commit_of(1))
    assert store.commits() == []
    assert [file.name for file in paths.checkpoint(1, 1).iterdir()] == [WRITER], "an incomplete checkpoint stays"


def test_only_fence_files_count_and_old_ones_are_removed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    for number in (1, 2, 149, 150):
        put_json(paths.fence(number), {})
    (paths.fences / "0001 (copy).json").write_text("{}")
    assert newest_fence(paths) == 150
    remove_old_fences(paths, 150)
    assert sorted(file.name for file in paths.fences.iterdir()) == ["0001 (copy).json", "0149.json", "0150.json"]
