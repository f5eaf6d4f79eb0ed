"""The disk cache yields the same rows as reading, verifies its content, is shared by readers, and is bounded."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_app.data import disk_cache as disk_cache_module
from ray_app.data.disk_cache import INDEX, DiskCache, cache_key, cached_fetch, open_cache
from ray_app.data.disk_cache import ROWS as STORED
from ray_app.data.reader import fetch_in_process
from ray_app.storage.files import put_atomic
from ray_app.storage.object_stores import ObjectPath
from ray_app.testing import DieAfter, WorkerPool, read_trained_run, stream_windows
from ray_app.train.job import Hooks, Job
from tests.support.bad_rows import BAD_ROWS, BadRowImages, job_of
from tests.support.bit_identity import train_on_workers
from tests.support.disk_caches import (
    CountingFetch,
    TinyTexts,
    assert_equal_to_uncached,
    cached_job,
    epoch_of,
    open_job_cache,
)
from tests.support.local_world import TinyImages, disk_cached, make_job, write_images
from tests.support.s3_server import S3Server
from tests.support.users import ROOT_ONLY

ROWS = [[50, 1], [46]]
FEW_GB = 8e-6
"""A limit within which some of the 97 rows fit, which have many small batches."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data", ROWS)


@pytest.fixture(params=[TinyImages])
def job(tmp_path: Path, data: Path, request: pytest.FixtureRequest) -> Job:
    return cached_job(tmp_path, data, request.param())


BOTH = pytest.mark.parametrize("job", [TinyImages, TinyTexts], indirect=True)


@BOTH
def test_the_first_epoch_fills_the_cache_and_later_epochs_read_nothing(job: Job) -> None:
    cache, counting = open_job_cache(job), CountingFetch()
    fetch = cache.around(counting)
    assert_equal_to_uncached(job, 0, epoch_of(job, 0, fetch))
    assert counting.rows == job.plan.manifest.num_rows, "the first epoch does not decode each row once"
    for epoch in (1, 2):
        assert_equal_to_uncached(job, epoch, epoch_of(job, epoch, fetch))
    assert counting.rows == job.plan.manifest.num_rows
    cache.close()


@BOTH
def test_workers_of_a_node_and_later_runs_share_the_cache(job: Job) -> None:
    caches, counting = [open_job_cache(job) for _ in range(2)], CountingFetch()
    for cache, assigned in zip(caches, (range(2), range(2, 4)), strict=True):
        assert_equal_to_uncached(job, 0, epoch_of(job, 0, cache.around(counting), assigned), assigned)
    assert counting.rows == job.plan.manifest.num_rows
    for cache, assigned in zip(caches, (range(2), range(2, 4)), strict=True):
        assert_equal_to_uncached(job, 1, epoch_of(job, 1, cache.around(counting), assigned), assigned)
        cache.close()
    again = open_job_cache(job)
    assert_equal_to_uncached(job, 0, epoch_of(job, 0, again.around(counting)))
    assert counting.rows == job.plan.manifest.num_rows, "a row was read again"
    again.close()


def swap_rows(index: bytearray) -> None:
    index[8 * 9 : 8 * 10], index[8 * 60 : 8 * 61] = index[8 * 60 : 8 * 61], index[8 * 9 : 8 * 10]


FAULTS: dict[str, tuple[str, Callable[[bytearray], Any]]] = {
    "flipped bit": (STORED, lambda content: content.__setitem__(3000, content[3000] ^ 1)),
    "lost writes": (STORED, lambda content: content.__setitem__(slice(4096, 8192), bytes(4096))),
    "cut off": (STORED, lambda content: content.__delitem__(slice(6000, None))),
    "a size": (STORED, lambda content: content.__setitem__(slice(16, 24), b"\xff" * 8)),
    "a smaller size": (STORED, lambda content: content.__setitem__(slice(16, 24), bytes(8))),
    "swapped rows": (INDEX, swap_rows),
    "a place": (INDEX, lambda content: content.__setitem__(8 * 20 + 1, content[8 * 20 + 1] ^ 1)),
    "a place below 0": (INDEX, lambda content: content.__setitem__(8 * 20 + 7, 255)),
    "lost places": (INDEX, lambda content: content.__setitem__(slice(8 * 30, 8 * 50), bytes(160))),
    "what is taken": (INDEX, lambda content: content.__setitem__(slice(0, 8), bytes(8))),
    "too much is taken": (INDEX, lambda content: content.__setitem__(4, 127)),
}


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_the_disk_corrupted_are_read_again(job: Job, fault: str) -> None:
    cache, counting = open_job_cache(job), CountingFetch()
    epoch_of(job, 0, cache.around(counting))
    [folder] = Path(str(job.config.data.cache_dir)).glob("*/")
    name, change = FAULTS[fault]
    content = bytearray((folder / name).read_bytes())
    before = bytes(content)
    change(content)
    assert content != before
    (folder / name).write_bytes(content)
    for epoch in (1, 2, 3):
        assert_equal_to_uncached(job, epoch, epoch_of(job, epoch, cache.around(counting)))
    if fault not in ("cut off", "too much is taken"):
        fresh = CountingFetch()
        assert_equal_to_uncached(job, 4, epoch_of(job, 4, cache.around(fresh)))
        assert fresh.rows == 0, "rows that were read again are not cached again"
    cache.close()


def test_the_cache_keeps_bad_rows_as_bad_rows(tmp_path: Path, data: Path) -> None:
    job = job_of(tmp_path / "run", data, BadRowImages(), data__cache="disk", data__cache_dir=str(tmp_path / "cache"))
    cache, counting = open_job_cache(job), CountingFetch()
    for epoch in (0, 1):
        batches = epoch_of(job, epoch, cache.around(counting))
        assert_equal_to_uncached(job, epoch, batches)
        assert sorted(row for batch in batches for row in batch.bad) == list(BAD_ROWS)
    assert counting.rows == job.plan.manifest.num_rows
    cache.close()


# --- keys


def test_the_cache_key_depends_on_data_settings_and_code(
    job: Job, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cache_key(job.source, "")}

    def is_new(source: Any, settings: str = "") -> bool:
        key = cache_key(source, settings)
        is_unknown = key not in keys
        keys.add(key)
        return is_unknown

    assert not is_new(job.source)
    assert is_new(job.source, "other")
    other = replace(job.source.reader, decode=BadRowImages().decode)
    assert is_new(replace(job.source, reader=other))
    changed = tmp_path / "application"
    shutil.copytree(disk_cache_module._APPLICATION, changed)
    monkeypatch.setattr(disk_cache_module, "_APPLICATION", changed)
    assert not is_new(job.source)
    for name in ("task/images.py", "data/bad_rows.py", "data/arrays.py", "task/image.py"):
        (changed / name).write_text((changed / name).read_text() + "\n# another version")
        assert is_new(job.source), name
    module = tmp_path / "changing.py"
    for text in ("def decode(rows):\n    return rows\n", "def decode(rows):\n    return dict(rows)\n"):
        module.write_text(text)
        space: dict[str, Any] = {}
        exec(compile(text, str(module), "exec"), space)
        assert is_new(replace(job.source, reader=replace(job.source.reader, decode=space["decode"])))
    part = data / "part-1.parquet"
    os.utime(part, ns=(1, 1))
    assert is_new(job.source), "a rewritten file has the old key"


def test_data_on_s3_is_cached_until_an_object_changes(
    job: Job, data: Path, s3_folder: ObjectPath, s3_server: S3Server
) -> None:
    def upload() -> None:
        for path in data.iterdir():
            put_atomic(s3_folder / path.name, path.read_bytes())

    upload()
    remote_job = replace(job, data_root=str(s3_folder))
    for epoch in range(2):
        fetch = cached_fetch(fetch_in_process, remote_job.source, "", job.config.data.cache_dir, 1.0)
        s3_server.reset()
        assert_equal_to_uncached(job, epoch, epoch_of(remote_job, epoch, fetch))
        assert bool(s3_server.requests(r"GET .*\.parquet")) is (epoch == 0)
    key = cache_key(remote_job.source, "")
    upload()
    assert cache_key(remote_job.source, "") == key, "the same content, written again, has another key"
    put_atomic(s3_folder / "part-1.parquet", (data / "part-1.parquet").read_bytes()[::-1])
    assert cache_key(remote_job.source, "") != key, "other content of the same size has the old key"


# --- bounds


def size_of(job: Job) -> int:
    """Returns the bytes of all caches."""
    return sum(f.stat().st_size for f in Path(str(job.config.data.cache_dir)).rglob("*") if f.is_file())


def test_a_small_limit_caches_some_rows(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    cache, counting = open_job_cache(job, FEW_GB), CountingFetch()
    assert "holds about 64 of 97 rows within data.cache_gb" in caplog.text
    for epoch in range(3):
        assert_equal_to_uncached(job, epoch, epoch_of(job, epoch, cache.around(counting)))
    assert "accepts no more rows" in caplog.text
    assert 97 < counting.rows < 2.5 * 97, "the cache holds fewer rows than it has capacity for"
    assert size_of(job) <= FEW_GB * 1e9
    cache.close()


def test_a_cache_has_capacity_for_all_rows_and_a_place_in_the_index_for_each(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache_module, "_MIN_CAPACITY", 0)
    cache = open_job_cache(job)
    row_bytes = 32 + sum(spec.row_bytes for spec in job.source.fields.values())
    assert size_of(job) == round(1.25 * 97 * row_bytes) + 8 * (1 + 97)
    cache.close()


@pytest.mark.rest
def test_the_capacity_follows_the_limit_of_the_only_open_handle(job: Job) -> None:
    def read_with(gb: float) -> tuple[int, int]:
        """Returns the number of rows read in an epoch, and the bytes of the cache after it."""
        cache, counting = open_job_cache(job, gb), CountingFetch()
        assert_equal_to_uncached(job, 0, epoch_of(job, 0, cache.around(counting)))
        cache.close()
        return counting.rows, size_of(job)

    few, all_bytes = round(FEW_GB * 1e9), (1 << 20) + 98 * 8
    assert read_with(FEW_GB) == (97, few)
    rows, size = read_with(1.0)
    assert (rows < 97, size) == (True, all_bytes), "a larger limit lost cached rows"
    assert read_with(1.0) == (0, all_bytes)
    other = open_job_cache(job)
    assert read_with(FEW_GB) == (0, all_bytes), "the cache shrank while another handle was open"
    other.close()
    for _ in range(2):
        rows, size = read_with(FEW_GB)
        assert (0 < rows < 97, size) == (True, few)


def test_the_oldest_unused_caches_are_evicted_and_open_ones_stay(job: Job) -> None:
    root, gb = Path(str(job.config.data.cache_dir)), 2.5 * 2**20 / 1e9

    def open_as(settings: str) -> DiskCache:
        return open_cache(job.source, settings, str(root), gb)

    def existing() -> set[str]:
        return {name for name in ("a", "b", "c", "d") if (root / cache_key(job.source, name) / INDEX).exists()}

    open_as("a").close()
    used = open_as("b")
    os.utime(root / cache_key(job.source, "b"), (1, 1))
    assert existing() == {"a", "b"}
    open_as("c").close()
    assert existing() == {"b", "c"}, "b was evicted although it is open"
    used.close()
    open_as("d").close()
    assert existing() == {"c", "d"}


def test_foreign_files_in_the_cache_folder_are_kept(job: Job) -> None:
    """`data.cache_dir` may be a folder with other files, which stay even if the capacity is exhausted."""
    root = Path(str(job.config.data.cache_dir))
    foreign = [
        root / "thesis" / "chapter.tex",
        root / ("a" * 32) / "notes.txt",
        root / ("b" * 31) / INDEX,
        root / "file",
    ]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"not to be lost")
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / INDEX).write_bytes(b"")
    (root / ("c" * 32)).symlink_to(root / "elsewhere")
    open_cache(job.source, "a", str(root), 1.0).close()
    open_cache(job.source, "b", str(root), 1e-6).close()
    assert not (root / cache_key(job.source, "a")).exists(), "the old cache was not evicted"
    assert all(file.read_bytes() == b"not to be lost" for file in foreign)
    assert (root / ("c" * 32) / INDEX).exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with capacity for some of 2000 rows."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.rest
@pytest.mark.parametrize(
    "ray_threshold",
    [pytest.param("0.875", id="a share must stay free"), pytest.param("1.0", id="to the last byte")],
)
def test_rows_that_a_full_disk_cannot_hold_are_read_in_every_epoch(
    tmp_path: Path,
    small_disk: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ray_threshold: str,
) -> None:
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", ray_threshold)
    folder = write_images(tmp_path / "data", [[50] * 40])
    fields = {"data__cache": "disk", "data__cache_dir": str(small_disk)}
    job = make_job(tmp_path / "run", folder, logical_workers=4, batch=200, task=TinyImages(), **fields)
    cache, counting = open_job_cache(job), CountingFetch()
    for epoch in range(2):
        assert_equal_to_uncached(job, epoch, epoch_of(job, epoch, cache.around(counting)))
    assert caplog.text.count("accepts no more rows") == 1
    assert 2000 < counting.rows < 4000, "the rows that fit are not cached"
    assert (os.statvfs(small_disk).f_bfree > 0) == (ray_threshold != "1.0")
    cache.close()


@ROOT_ONLY
@pytest.mark.parametrize("is_configured", [True, False])
def test_a_cache_of_another_user_is_not_used(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_configured: bool
) -> None:
    """A configured folder may belong to another user, like a mounted one in a container; only the caches in it must
    belong to the user.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = tmp_path / "given" if is_configured else tmp_path / f"ray_app-{os.getuid()}"
    root.mkdir(parents=True)
    os.chown(root, 12345, 12345)
    cache_dir = str(root) if is_configured else None
    if is_configured:
        open_cache(job.source, "", cache_dir, 1.0).close()
        os.chown(root / cache_key(job.source, ""), 12345, 12345)
    assert cached_fetch(fetch_in_process, job.source, "", cache_dir, 1.0) is fetch_in_process
    assert "the owner is another user" in caplog.text


def test_every_user_has_a_default_folder(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_cache(job.source, "", None, 1.0).close()
    cache = tmp_path / f"ray_app-{os.getuid()}" / "cache" / cache_key(job.source, "")
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in cache.iterdir()} == {INDEX: 0o600, STORED: 0o600}


def test_without_a_usable_folder_there_is_no_cache(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert cached_fetch(fetch_in_process, job.source, "", str(tmp_path / "file" / "cache"), 1.0) is fetch_in_process
    assert "This node has no disk cache" in caplog.text


# --- training


@pytest.mark.rest
@BOTH
def test_training_with_the_cache_is_bit_identical_also_after_a_kill(worker_pool: WorkerPool, job: Job) -> None:
    uncached = worker_pool.train_new_run(job, 2, stream_windows)
    # The cache is cold for the first size and warm for the second.
    train_on_workers(worker_pool, job, (1, 3), uncached, (disk_cached,))
    cold = replace(
        job, config=job.config.replace(data__cache_dir=str(job.config.data.cache_dir) + "-2", checkpoint__every_steps=3)
    )
    outcomes = worker_pool.train(cold, 2, Hooks(after_step=DieAfter(4, killed=1)), disk_cached)
    assert all(outcome.error is not None for outcome in outcomes)
    worker_pool.train_to_end(cold, 3, disk_cached)
    assert read_trained_run(cold).digests == uncached.digests
