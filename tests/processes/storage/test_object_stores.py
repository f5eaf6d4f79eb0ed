"""The run directory on object stores (for S3: moto's server, with faults) has the same guarantees as on a disk."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.checkpoint.format import MODEL, pack
from ray_app.checkpoint.retention import Pin
from ray_app.checkpoint.store import WRITER, CheckpointStore, Fallback
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.sections import CheckpointSection
from ray_app.data import dataset as dataset_module
from ray_app.data.dataset import open_dataset
from ray_app.data.folds import open_evaluation_data
from ray_app.data.probes import decode_first_row
from ray_app.errors import CheckpointError, ConfigError, RunHeldError
from ray_app.retrain.profile import profile_dataset
from ray_app.retrain.rounds import read_delivery
from ray_app.retry import Retry
from ray_app.runlog.evaluations import Evaluation, evaluated_steps, put_evaluation, read_evaluations
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.paths import RunPaths
from ray_app.storage import object_stores
from ray_app.storage.data_files import is_within
from ray_app.storage.files import (
    Location,
    list_files,
    list_folders,
    list_tree,
    put_atomic,
    put_json,
    read_json,
    remove_tree,
    to_location,
)
from ray_app.storage.object_stores import ObjectPath
from ray_app.train.checkpointing import persistence as writer_module
from ray_app.train.checkpointing.persistence import CheckpointWriter
from tests.support.checkpoints import commit_of, make_store_of_three, snapshot_of
from tests.support.paths import ROOT
from tests.support.s3_server import S3Server
from tests.support.waiting import wait_until

MIB = 1 << 20


@pytest.fixture(params=["local", "s3", "gs", "az"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return tmp_path / "folder" if request.param == "local" else request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # S3 takes no smaller parts.
    monkeypatch.setattr(object_stores, "PART_BYTES", 5 * MIB)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes clients wait for one second only."""
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.001, attempts=6))
    monkeypatch.setattr(object_stores, "_TIMEOUT_S", 1)


# --- files, on a disk and on S3


def test_files_behave_the_same_on_a_disk_and_on_object_stores(folder: Location) -> None:
    assert list_files(folder) == []
    assert list_tree(folder) == {}
    assert read_json(folder / "a.json") is None
    assert not (folder / "a.json").exists()
    with pytest.raises(FileNotFoundError):
        (folder / "a.json").read_bytes()
    assert put_json(folder / "a.json", {"b": 1})
    assert put_atomic(folder / "sub" / "c", b"2", if_absent=True)
    assert not put_atomic(folder / "sub" / "c", b"3", if_absent=True)
    assert put_atomic(folder / "empty", b"")
    assert read_json(folder / "a.json") == {"b": 1}
    assert (folder / "sub" / "c").read_bytes() == b"2"
    assert sorted(list_files(folder)) == ["a.json", "empty"] + (["sub"] if isinstance(folder, Path) else [])
    files = list_tree(folder)
    assert list(files) == ["a.json", "empty", "sub/c"]
    assert files["sub/c"].name == "c"
    assert (files["sub/c"].parent, (folder / "sub").parent) == (folder / "sub", folder)
    assert (list_folders(folder), list_folders(folder / "sub"), list_folders(folder / "none")) == (["sub"], [], [])
    assert [location.read_bytes() for location in files.values()][1:] == [b"", b"2"]
    assert put_atomic(folder / "sub" / "c", b"4")
    assert list_tree(folder)["sub/c"].read_bytes() == b"4", "an old version is cached"
    (folder / "empty").unlink()
    (folder / "empty").unlink(missing_ok=True)
    remove_tree(folder / "sub")
    assert list(list_tree(folder)) == ["a.json"]
    assert pickle.loads(pickle.dumps(folder)) == folder == to_location(str(folder))


def test_folders_of_keys_and_values_are_columns_of_data(folder: Location) -> None:
    missing = "kind=ü/year=__HIVE_DEFAULT_PARTITION__"
    for name, x in {"kind=a b/year=2023": 1.0, "kind=a%2Fb/year=2024": 2.0, missing: 3.0}.items():
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"x": [x] * 2}), sink)
        put_atomic(folder / name / "a.parquet", sink.getvalue().to_pybytes())
    dataset = open_dataset(str(folder))
    assert dataset.manifest.rules.partitions == {"kind": "string", "year": "int64"}
    assert (dataset.facts.columns["year"].nulls, dataset.facts.columns["kind"].nulls) == (2, 0)
    columns = ["x", "kind", "year"]
    first = decode_first_row(
        dataset, columns, lambda rows: {"x": rows["x"], "year": rows["year"], "length": np.char.str_len(rows["kind"])}
    )
    assert {name: values.tolist() for name, values in first.items()} == {"x": [1.0], "year": [2023], "length": [3]}


def test_a_path_or_uri_names_a_location() -> None:
    assert to_location("runs") == Path("runs").resolve()
    assert to_location("s3://bucket/") / "run" == ObjectPath("s3", "bucket", "run")
    location = to_location("s3://bucket/a/b/?region=eu-west-1&endpoint_override=host:9000&scheme=http") / "run"
    assert str(location) == "s3://bucket/a/b/run?region=eu-west-1&endpoint_override=host:9000&scheme=http"
    assert (location.name, to_location(str(location))) == ("run", location)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://bucket/x", "uses ftp://; allowed are folders that all nodes see, and s3://bucket/prefix, gs://"),
        ("s3://bucket/a//b", "is not a location on s3:"),
        ("s3:///x", "is not a location on s3:"),
        ("s3://bucket/x?endpoint=host", "'endpoint' is unknown. Write s3://bucket/prefix, with ?endpoint_override"),
        ("s3://key:secret@bucket/x", "must not hold credentials"),
    ],
)
def test_an_invalid_uri_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_location(text)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value).replace("SECRET", "")


def test_a_run_on_s3_needs_a_tracking_uri() -> None:
    config = Config().replace(run__storage_path="s3://bucket/runs")
    with pytest.raises(ConfigError, match=r"Set tracking\.uri to an MLflow server"):
        default_tracking_uri(config)
    assert default_tracking_uri(config.replace(tracking__uri="http://host:5000")) == "http://host:5000"


def test_a_missing_bucket_is_an_error_and_not_a_missing_file(s3_folder: ObjectPath) -> None:
    location = replace(s3_folder, bucket="nothing-here") / "config.yaml"
    with pytest.raises(OSError, match="NoSuchBucket") as caught:
        location.read_bytes()
    assert not isinstance(caught.value, FileNotFoundError)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), OSError)


@pytest.mark.rest
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("repeats", [1, 2 * MIB], ids=["small", "large"])
def test_one_of_two_racing_writers_wins(folder: Location, repeats: int) -> None:
    """One writer wins even if S3 takes the content in parts."""
    for i in range(20 if repeats == 1 else 4):
        location = folder / str(i)
        start, won = threading.Barrier(2), []

        def write(
            name: str, location: Location = location, start: threading.Barrier = start, won: list[str] = won
        ) -> None:
            start.wait()
            if put_atomic(location, name.encode() * repeats, if_absent=True):
                won.append(name)

        threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert location.read_bytes() == won[0].encode() * repeats


# --- failed requests


@pytest.mark.parametrize("status", [500, 503])
def test_a_transient_server_error_is_retried(s3_server: S3Server, s3_folder: ObjectPath, status: int) -> None:
    s3_server.fail(f"PUT .*{s3_folder.key}", times=2, status=status)
    assert put_atomic(s3_folder / "a", b"1")
    s3_server.fail(f"GET .*{s3_folder.key}", times=2, status=status)
    assert (s3_folder / "a").read_bytes() == b"1"
    assert len(s3_server.requests("PUT|GET")) == 6, "the faults did not happen"


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.rest
def test_a_request_that_times_out_is_retried(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    s3_server.fail("PUT", delay_s=3)
    assert put_atomic(s3_folder / "a", b"1")
    assert len(s3_server.requests("PUT")) >= 2
    s3_server.fail("PUT", delay_s=3, times=-1)
    with pytest.raises(OSError, match=r"does not answer .*time-out"):
        put_atomic(s3_folder / "a", b"2")
    assert (s3_folder / "a").read_bytes() == b"1"


def test_a_conditional_put_with_a_lost_answer_succeeds(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    s3_server.fail("PUT", done=True)
    assert put_atomic(s3_folder / "fence", b"mine", if_absent=True)
    assert len(s3_server.requests("PUT")) == 2
    assert not put_atomic(s3_folder / "fence", b"another's", if_absent=True)


def test_a_conflicting_conditional_put_is_retried(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    s3_server.fail("PUT", times=2, status=409)
    assert put_atomic(s3_folder / "fence", b"mine", if_absent=True)
    s3_server.fail("PUT", times=2, status=409)
    assert not put_atomic(s3_folder / "fence", b"another's", if_absent=True)
    assert len(s3_server.requests("PUT")) == 4


@pytest.mark.usefixtures("short_timeouts")
def test_a_conditional_put_without_an_answer_is_retried(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    s3_server.fail("PUT", delay_s=3, status=0)
    assert put_atomic(s3_folder / "fence", b"mine", if_absent=True)
    assert len(s3_server.requests("PUT")) == 2


def test_a_truncated_answer_is_requested_again(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    put_atomic(s3_folder / "a", b"12345678")
    s3_server.fail("GET .*/a$", times=2, cut=True)
    assert (s3_folder / "a").read_bytes() == b"12345678"
    assert len(s3_server.requests("GET .*/a$")) == 3, "the faults did not happen"


@pytest.mark.rest
@pytest.mark.usefixtures("small_parts")
def test_a_big_file_is_uploaded_in_parts_with_bounded_memory(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    data = os.urandom(60 * MIB + 1)
    assert list_tree(s3_folder) == {}, "the folder must be empty; listing it opens the store before memory is measured"
    tracemalloc.start()
    put_atomic(s3_folder / "big", data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 30 * MIB, "the upload buffered more than a few parts of 5 MiB"
    assert (s3_folder / "big").read_bytes() == data
    assert len(s3_server.requests("PUT .*partNumber")) == 13


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("broken", ["PUT .*partNumber=2", "POST .*uploadId"])
def test_a_failed_upload_leaves_the_old_object(s3_server: S3Server, s3_folder: ObjectPath, broken: str) -> None:
    put_atomic(s3_folder / "big", b"old")
    s3_server.fail(broken, times=-1)
    with pytest.raises(OSError, match="503"):
        put_atomic(s3_folder / "big", bytes(11 * MIB))
    assert (s3_folder / "big").read_bytes() == b"old"
    assert s3_server.requests("DELETE .*uploadId"), "temporary parts stay"


# --- checkpoints


def load(store: CheckpointStore) -> tuple[int, list[Fallback]]:
    fallbacks: list[Fallback] = []
    loaded = store.load_newest(fallbacks.append)
    assert loaded is not None
    return loaded[1].step, fallbacks


@pytest.fixture
def paths(request: pytest.FixtureRequest, s3_folder: ObjectPath) -> RunPaths:
    """A run on S3, or on another store that the test requests."""
    scheme = getattr(request, "param", "s3")
    return RunPaths((s3_folder if scheme == "s3" else request.getfixturevalue(f"{scheme}_folder")) / "run")


EACH_STORE = pytest.mark.parametrize("paths", ["s3", "gs", "az"], indirect=True)


@pytest.fixture
def store(paths: RunPaths) -> CheckpointStore:
    return make_store_of_three(paths)


@EACH_STORE
def test_damaged_checkpoints_are_detected_and_skipped(store: CheckpointStore, paths: RunPaths) -> None:
    location = paths.checkpoint(3, 1) / MODEL
    data = bytearray(location.read_bytes())
    data[-1] ^= 1
    put_atomic(location, bytes(data))
    step, [fallback] = load(store)
    assert (step, fallback.name) == (2, "step-00000003-0001")
    assert "differs from its commit (SHA-256)" in fallback.reason
    assert [c.step for c in store.commits()] == [1, 2]
    assert load(store) == (2, [fallback]), "the fallback must be reported again, since the first reader may have died"
    (paths.checkpoint(2, 1) / MODEL).unlink()
    assert load(store)[0] == 1
    marker = paths.checkpoint(1, 1) / "COMMIT.json"
    put_atomic(marker, marker.read_bytes().replace(b'"step": 1', b'"step": 0'))
    with pytest.raises(CheckpointError, match="Nothing was deleted"):
        load(store)
    store.write(pack(snapshot_of(3)), commit_of(3))
    assert load(store) == (3, [])


def test_retention_removes_the_marker_first(store: CheckpointStore, paths: RunPaths, s3_server: S3Server) -> None:
    store.put_pin("evaluator", Pin(2, time.time() + 60))
    store.write(pack(snapshot_of(4)), commit_of(4))
    s3_server.reset()
    assert store.retain(keep_last=1, best=[1]) == [2]
    first, second = s3_server.requests(r"DELETE|POST .*\?delete")
    assert re.findall(r"step-\S+", first) == ["step-00000002-0001/COMMIT.json"]
    assert len(re.findall(r"step-00000002-0001/\S+", second)) == 3
    assert list(list_tree(paths.checkpoint(2, 1))) == []
    assert [c.step for c in store.commits()] == [1, 3, 4]


def test_the_last_valid_checkpoint_stays_when_newer_ones_are_bad(store: CheckpointStore) -> None:
    for step in (2, 3):
        store.mark_bad(commit_of(step), "test")
    assert store.retain(keep_last=1, best=[]) == []
    step, fallbacks = load(store)
    assert (step, [fallback.reason for fallback in fallbacks]) == (1, ["test", "test"])


def test_reading_known_commits_costs_one_listing(store: CheckpointStore, s3_server: S3Server) -> None:
    assert len(store.commits()) == 3
    s3_server.reset()
    assert len(store.commits()) == 3
    [request] = s3_server.requests()
    assert "list-type=2" in request, "commits that were read before must be cached by their version"


def test_a_whole_bucket_is_a_location(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    put_atomic(s3_folder / "a" / "x", b"1")
    whole = s3_server.path("")
    assert f"{s3_folder.key}/a/x" in list_tree(whole)
    assert s3_folder.key in list_folders(whole)
    assert is_within(s3_folder, whole)
    assert not is_within(whole, s3_folder)


def test_a_folder_object_of_a_console_is_not_a_file(s3_server: S3Server, s3_folder: ObjectPath) -> None:
    """Consoles put an empty object with the folder's name and a trailing slash."""
    paths = RunPaths(s3_folder / "run")
    for folder in (paths.root, paths.fences, paths.pins, paths.root / "sub"):
        s3_server.make_folder_object(folder)
    assert list_files(paths.root) == list_files(paths.fences) == []
    with acquire_lease(paths) as lease:
        assert lease.fence == 1
        CheckpointStore(paths).put_pin("evaluator", Pin(1, 2.0))
        assert len(CheckpointStore(paths).read_pins()) == 1
    remove_tree(paths.root)
    assert list_tree(paths.root) == {}


@EACH_STORE
def test_a_run_has_one_writer(paths: RunPaths) -> None:
    with acquire_lease(paths) as lease:
        assert lease.fence == 1
        with pytest.raises(RunHeldError):
            acquire_lease(paths)
    with acquire_lease(paths) as lease:
        assert lease.fence == 2


@EACH_STORE
def test_uncommitted_files_are_removed_by_a_later_start(store: CheckpointStore, paths: RunPaths) -> None:
    put_atomic(paths.checkpoint(4, 1) / MODEL, b"half")
    store.clean(fence=2)
    assert list_tree(paths.checkpoint(4, 1)) == {}
    assert store.retain(keep_last=1, best=[]) == [1, 2]
    assert load(store) == (3, [])


@EACH_STORE
def test_evaluations_and_events_are_stored_and_read(paths: RunPaths) -> None:
    evaluation = Evaluation(8, 0, "digest", {"accuracy": 0.5}, 10, 0.1, 1.0)
    assert read_evaluations(paths) == []
    assert put_evaluation(paths, evaluation)
    assert not put_evaluation(paths, replace(evaluation, rows=11))
    assert read_evaluations(paths) == [evaluation]
    assert evaluated_steps(paths) == {8}
    for kind in ("started", "checkpointed", "failed"):
        put_event(paths, kind, 1)
    assert [e.kind for e in read_events(paths)] == ["started", "checkpointed", "failed"]
    assert [e.kind for e in read_events(paths, "checkpointed")] == ["checkpointed"]


SCRIPT = """
import sys
from ray_app.checkpoint.store import CheckpointStore
from ray_app.storage import object_stores
from ray_app.storage.files import to_location
from ray_app.runlog.paths import RunPaths
from tests.support.checkpoints import commit_of, snapshot_of
from ray_app.checkpoint.format import pack
object_stores.PART_BYTES = 5 << 20
CheckpointStore(RunPaths(to_location(sys.argv[1]))).write(pack(snapshot_of(4, 3 << 20)), commit_of(4))
"""


@pytest.mark.rest
@pytest.mark.parametrize("at", ["model.safetensors.*partNumber=2", "training.pt", "COMMIT.json"])
def test_a_writer_killed_midway_commits_nothing(
    store: CheckpointStore, paths: RunPaths, s3_server: S3Server, at: str
) -> None:
    at = f"PUT .*step-00000004.*{at}"
    s3_server.fail(at, times=-1, delay_s=60)
    writer = subprocess.Popen([sys.executable, "-c", SCRIPT, str(paths.root)], cwd=ROOT)
    try:
        wait_until(lambda: s3_server.requests(at), "the writer does not reach the request")
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert load(store) == (3, [])
    assert [c.step for c in store.commits()] == [1, 2, 3]
    left = list_tree(paths.checkpoint(4, 1))
    assert left
    store.clean(fence=1)
    assert list_tree(paths.checkpoint(4, 1)) == left, "files that the writer may still write were removed"
    store.clean(fence=2)
    assert list_tree(paths.checkpoint(4, 1)) == {}
    assert load(store) == (3, [])


@pytest.mark.usefixtures("short_timeouts")
def test_an_outage_fails_one_checkpoint_and_not_the_next(
    paths: RunPaths, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.5, attempts=2))
    writer = CheckpointWriter(paths, CheckpointSection(), list)
    # A client makes three attempts.
    s3_server.fail("PUT .*step-00000001.*training.pt", times=3)
    writer.save(lambda: snapshot_of(1), commit_of(1))
    writer.wait()
    s3_server.fail(r"PUT .*step-00000002.*training.pt|POST .*\?delete|DELETE|PUT .*/events/", times=-1)
    writer.save(lambda: snapshot_of(2), commit_of(2))
    with pytest.raises(CheckpointError, match="503"):
        writer.wait_for_commit()
    assert [c.step for c in CheckpointStore(paths).commits()] == [1]
    assert sorted(name[-len(MODEL) :] for name in list_tree(paths.checkpoint(2, 1))) == [WRITER, MODEL, MODEL], (
        "the incomplete checkpoint was removed although deleting fails"
    )
    s3_server.reset()
    writer.save(lambda: snapshot_of(3), commit_of(3))
    writer.wait_for_commit()
    assert [c.step for c in CheckpointStore(paths).commits()] == [1, 3]
    assert [(e.kind, e.details["step"]) for e in read_events(paths)] == [
        ("checkpointed", 1), ("write_retried", 1), ("checkpointed", 3), ("write_failed", 2),
    ]  # fmt: skip
    assert list(list_tree(paths.checkpoint(2, 1))) == [WRITER], "the incomplete checkpoint stays"


def test_retraining_reads_data_on_s3_like_data_on_a_disk(
    s3_folder: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests, the profile, and the rows that choose the checkpoint equal those of the same files on a disk."""
    for kind in ("train", "eval"):
        (tmp_path / kind).mkdir()
        for name in ("a", "b"):
            table = pa.table({"x": [float(ord(name) + i) for i in range(40)], "label": [i % 2 for i in range(40)]})
            pq.write_table(table, tmp_path / kind / f"{name}.parquet", row_group_size=20)
            put_atomic(s3_folder / kind / f"{name}.parquet", (tmp_path / kind / f"{name}.parquet").read_bytes())
    results = []
    for root in (tmp_path, s3_folder):
        config = Config().replace(data__path=str(root / "train"), data__eval_path=str(root / "eval"))
        files = read_delivery(config, tmp_path / "memory" / str(len(results)))
        dataset = open_dataset(config.data.path)
        half = open_evaluation_data(config.replace(evaluate__half="selection")).manifest
        results.append((files, profile_dataset(dataset, ["x", "label"], "label")[0], half.digest))
    assert results[0] == results[1]
    read: list[str] = []
    monkeypatch.setattr(dataset_module, "sha256", lambda file: read.append(str(file)))
    assert read_delivery(config, tmp_path / "memory" / "1") == results[0][0]
    assert not read, "unchanged files were hashed again"
