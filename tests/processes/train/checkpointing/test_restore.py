"""A run resumes from each of its checkpoints on another number of workers, with all strategies and all caches."""

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
from tests.support.server_world import ServerWorld

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "single": {},
    "central_storage": {"train__ema_decay": 0.9},
    "local_sgd": DILOCO,
    "fsdp": {},
    "parameter_server": {"train__servers": 2},
}
CACHES: dict[str, OpenWindows] = {"none": stream_windows, "memory": cache_windows, "disk": disk_cached}


def resume_from_checkpoints(pool: WorkerPool, folder: Path, strategy: str, cache: str, stride: int = 1) -> list[int]:
    """Trains once with all checkpoints kept and resumes from every `stride`-th one; returns the steps of these."""
    data = write_images(folder / "data", [[50, 1], [46]])
    every = STRATEGIES[strategy].get("train__local_steps", 1)
    fields = {"checkpoint__keep_last": 100, "train__strategy": strategy, **STRATEGIES[strategy]}
    if cache == "disk":
        fields |= {"data__cache": "disk", "data__cache_dir": str(folder / "cache")}
    whole = make_job(folder / "whole", data, task=TinyImages(), every=every, **fields)

    def train(job: Job, size: int) -> None:
        if strategy == "parameter_server":
            ServerWorld(job, size, CACHES[cache]).run()
        else:
            pool.train_to_end(job, 1 if strategy == "single" else size, CACHES[cache])

    train(whole, 2)
    commits, resumed_steps = CheckpointStore(whole.paths).commits(), []
    assert [c.step for c in commits] == list(range(every, whole.total_steps + 1, every)), (
        "a step that can have a checkpoint has none"
    )
    for commit in commits[:-1:stride]:
        job = dataclasses.replace(whole, run_root=str(folder / f"from-{commit.step}"), fence=2)
        shutil.copytree(whole.run_root, job.run_root)
        for later in commits:
            if later.step > commit.step:
                shutil.rmtree(str(job.paths.checkpoint(later.step, later.fence)))
        # The number of workers is 1 or 3; the first run had 2.
        train(job, 1 + 2 * (commit.step % 2))
        assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [commit.step]
        assert rows_of(job) == rows_of(whole)
        assert read_trained_run(job).digests == read_trained_run(whole).digests, f"from step {commit.step}"
        assert read_trained_run(job).steps == read_trained_run(whole).steps, f"from step {commit.step}"
        resumed_steps.append(commit.step)
        shutil.rmtree(job.run_root)
    return resumed_steps


@pytest.mark.rest
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_resumes_from_every_step(worker_pool: WorkerPool, tmp_path: Path, strategy: str, cache: str) -> None:
    resumed_steps = resume_from_checkpoints(worker_pool, tmp_path, strategy, cache)
    every = STRATEGIES[strategy].get("train__local_steps", 1)
    assert resumed_steps == list(range(every, 18, every)), "a resume is missing; the run has two epochs of nine steps"


@pytest.mark.parametrize(
    ("strategy", "cache"), [("ddp", "none"), pytest.param("parameter_server", "memory", marks=pytest.mark.rest)]
)
def test_a_run_resumes_from_some_steps(worker_pool: WorkerPool, tmp_path: Path, strategy: str, cache: str) -> None:
    assert resume_from_checkpoints(worker_pool, tmp_path, strategy, cache, stride=6) == [1, 7, 13]


@pytest.mark.rest
def test_reader_threads_keep_the_run_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_images(tmp_path / "data", [[50, 1], [46], [200]])
    decode, readers = TinyImages.decode, set[str]()

    def record_reader(task: TinyImages, rows: dict[str, Any]) -> dict[str, Any]:
        readers.add(threading.current_thread().name.partition("_")[0])
        return decode(task, rows)

    monkeypatch.setattr(TinyImages, "decode", record_reader)
    results = []
    for name, reader_settings in {
        "0": {},
        "3": {"data__reader_threads": 3},
        "disk": {"data__reader_threads": 2, "data__cache": "disk"},
    }.items():
        fields = {
            "train__strategy": "single",
            "train__epochs": 2,
            "data__read_task_mb": 0.002,
            "data__shuffle_window_rows": 24,
            **reader_settings,
        }
        if name == "disk":
            fields["data__cache_dir"] = str(tmp_path / "cache")
        job = make_job(tmp_path / name, data, task=TinyImages(), **fields)
        readers.clear()
        train_in_process(job, SingleProcessMembership(4, lambda: False), Hooks())
        assert ("reader" in readers) == (name != "0"), readers
        results.append((read_trained_run(job).digests, read_trained_run(job).steps))
    assert results[1:] == [results[0]] * 2
