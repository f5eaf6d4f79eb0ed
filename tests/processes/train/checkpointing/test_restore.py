"""Every step of a run is one that can be gone on from, on another number of workers, with every strategy and every
cache.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ray_app.checkpoint.store import CheckpointStore
from ray_app.driver.single import train_in_process
from ray_app.runlog.journal import read_events
from ray_app.testing import WorkerPool, cache_windows, read_trained_run, stream_windows
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.membership import SingleProcessMembership
from tests.support.campaign import DILOCO, rows_of
from tests.support.local_world import TinyImages, disk_cached, make_job, write_images
from tests.support.server_world import World

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "single": {},
    "central_storage": {"train__ema_decay": 0.9},
    "local_sgd": DILOCO,
    "fsdp": {},
    "parameter_server": {"train__servers": 2},
}
CACHES: dict[str, OpenWindows] = {"none": stream_windows, "memory": cache_windows, "disk": disk_cached}


def restored_at_every_step(pool: WorkerPool, folder: Path, strategy: str, cache: str, stride: int = 1) -> list[int]:
    """Trains once, keeping every checkpoint, and goes on from each; returns from which."""
    data = write_images(folder / "data", [[50, 1], [46]])
    every = STRATEGIES[strategy].get("train__local_steps", 1)
    fields = {"checkpoint__every_epochs": None, "checkpoint__every_steps": every, "checkpoint__keep_last": 100}
    fields |= {"train__strategy": strategy, "train__epochs": 2, **STRATEGIES[strategy]}
    if cache == "disk":
        fields |= {"data__cache": "disk", "data__cache_dir": str(folder / "cache")}
    whole = make_job(folder / "whole", data, logical_workers=4, batch=12, task=TinyImages(), **fields)

    def go(job: Job, size: int) -> None:
        if strategy == "parameter_server":
            World(job, size, CACHES[cache]).run()
        else:
            pool.train_to_end(job, 1 if strategy == "single" else size, CACHES[cache])

    go(whole, 2)
    commits, tried = CheckpointStore(whole.paths).commits(), []
    assert [c.step for c in commits] == list(range(every, whole.total_steps + 1, every)), (
        "a checkpoint at every step that can have one"
    )
    for commit in commits[:-1:stride]:
        job = dataclasses.replace(whole, run_root=str(folder / f"from-{commit.step}"), fence=2)
        shutil.copytree(whole.run_root, job.run_root)
        for later in commits:
            if later.step > commit.step:
                shutil.rmtree(str(job.paths.checkpoint(later.step, later.fence)))
        go(job, 1 + 2 * (commit.step % 2))  # 1 or 3
        assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [commit.step]
        assert rows_of(job) == rows_of(whole)
        assert read_trained_run(job).digests == read_trained_run(whole).digests, f"from step {commit.step}"
        assert read_trained_run(job).steps == read_trained_run(whole).steps, f"from step {commit.step}"
        tried.append(commit.step)
        shutil.rmtree(job.run_root)
    return tried


@pytest.mark.rest
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_goes_on_from_every_step(pool: WorkerPool, tmp_path: Path, strategy: str, cache: str) -> None:
    tried = restored_at_every_step(pool, tmp_path, strategy, cache)
    every = STRATEGIES[strategy].get("train__local_steps", 1)
    assert tried == list(range(every, 18, every)), "two epochs of nine steps"


@pytest.mark.parametrize(("strategy", "cache"), [("ddp", "none"), ("parameter_server", "memory")])
def test_a_run_goes_on_from_some_steps(pool: WorkerPool, tmp_path: Path, strategy: str, cache: str) -> None:
    assert restored_at_every_step(pool, tmp_path, strategy, cache, stride=6) == [1, 7, 13]


def test_threads_that_read_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, decode, readers = write_images(tmp_path / "data", [[50, 1], [46], [200]]), TinyImages.decode, set[str]()

    def noted(task: TinyImages, rows: dict[str, Any]) -> dict[str, Any]:
        readers.add(threading.current_thread().name.partition("_")[0])
        return decode(task, rows)

    monkeypatch.setattr(TinyImages, "decode", noted)
    bits = []
    for name, more in {
        "0": {},
        "3": {"data__reader_threads": 3},
        "disk": {"data__reader_threads": 2, "data__cache": "disk"},
    }.items():
        fields = {
            "train__strategy": "single",
            "train__epochs": 2,
            "data__read_task_mb": 0.002,
            "data__shuffle_window_rows": 24,
            **more,
        }
        if name == "disk":
            fields["data__cache_dir"] = str(tmp_path / "cache")
        job = make_job(tmp_path / name, data, logical_workers=4, batch=12, task=TinyImages(), **fields)
        readers.clear()
        train_in_process(job, SingleProcessMembership(4, lambda: False), Hooks())
        assert ("reader" in readers) == (name != "0"), readers
        bits.append((read_trained_run(job).digests, read_trained_run(job).steps))
    assert bits[1:] == [bits[0]] * 2
