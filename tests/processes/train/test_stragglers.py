"""A straggler among several workers is reported, logical workers move away, and training stays bit-identical."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch import Tensor

from ray_app.errors import ConfigError
from ray_app.reduction.world import World
from ray_app.runlog.history import read_steps
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.task.base import Batch
from ray_app.testing import TrainedRun, WorkerPool, cache_windows, read_trained_run, stream_windows
from ray_app.train.job import OpenWindows
from ray_app.train.stragglers import StragglerReporter
from tests.support.local_world import CPU, TinyImages, make_job, write_images

L = 16
STEPS = 70
UNIT_S = 0.004


class SlowLoss(TinyImages):
    """Sleeps in its loss; the first process that computes one sleeps three times as long.

    Args:
        folder: Folder that the processes share; empty for no straggler.
    """

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.folder, self.unit_s = folder, 0.0

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        if self.folder and not self.unit_s:
            try:
                os.close(os.open(f"{self.folder}/slow", os.O_CREAT | os.O_EXCL))
                Path(self.folder, "pid").write_text(str(os.getpid()))
                self.unit_s = 3 * UNIT_S
            except FileExistsError:
                self.unit_s = UNIT_S
        time.sleep(self.unit_s)
        return super().loss(outputs, batch)


def train_with_straggler(
    pool: WorkerPool, folder: Path, data: Path, workers: int, windows: OpenWindows, balance: str, slow: bool
) -> tuple[TrainedRun, RunPaths]:
    meet = folder / "meet"
    meet.mkdir(parents=True)
    fields = {
        "train__max_steps": STEPS,
        "train__epochs": 30,
        "scaling__load_balancing": balance,
        "data__shuffle_window_rows": 64,
    }
    job = make_job(
        folder / "run", data, logical_workers=L, batch=32, task=SlowLoss(str(meet) if slow else ""), **fields
    )
    for outcome in pool.train(job, workers, windows=windows):
        assert outcome.error is None, outcome.trace
    return read_trained_run(job), job.paths


@pytest.mark.rest
@pytest.mark.parametrize("windows", [cache_windows, stream_windows])
def test_logical_workers_move_away_from_a_straggler_bit_identically(
    worker_pool: WorkerPool, tmp_path: Path, windows: OpenWindows
) -> None:
    data = write_images(tmp_path / "data", [[160]])
    alone, _ = train_with_straggler(worker_pool, tmp_path / "alone", data, 1, windows, "none", slow=False)
    moved, paths = train_with_straggler(worker_pool, tmp_path / "moved", data, 3, windows, "speed", slow=True)
    assert moved.commit.params_digest == alone.commit.params_digest
    assert moved.steps == alone.steps
    [first, *_] = read_events(paths, "rebalanced")
    assert first.details["before"] == [5, 5, 6]
    assert min(first.details["after"]) < 5  # The straggler gave at least one away; how many depends on the machine.
    assert sum(first.details["after"]) == L


@pytest.mark.rest
def test_the_time_that_a_straggler_costs_is_recorded(worker_pool: WorkerPool, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[160]])
    _, paths = train_with_straggler(worker_pool, tmp_path / "run", data, 3, cache_windows, "none", slow=True)
    assert not read_events(paths, "rebalanced")
    [detected] = read_events(paths, "straggler_detected")
    rank = detected.details["rank"]
    assert detected.details["pid"] == int((tmp_path / "run" / "meet" / "pid").read_text())
    assert detected.details["cause"] == "compute"
    [breakdown] = read_events(paths, "time_breakdown")
    by_rank = {worker["rank"]: worker for worker in breakdown.details["workers"]}
    assert max(by_rank, key=lambda other: by_rank[other]["compute"]) == rank
    assert all(times["waits"] > 0.3 for other, times in by_rank.items() if other != rank)
    newest = read_steps(paths).records[-1]
    assert newest.imbalance is not None
    assert newest.imbalance > 1.3


@pytest.mark.parametrize("field", ["train__strategy=fsdp", "train__strategy=local_sgd", "train__reduction=overlapped"])
def test_load_balancing_is_refused_where_logical_workers_cannot_move(tmp_path: Path, field: str) -> None:
    data = write_images(tmp_path / "data", [[16]])
    with pytest.raises(ConfigError, match=r"scaling\.load_balancing is speed .*ddp or central_storage and exact only"):
        make_job(
            tmp_path / "run",
            data,
            logical_workers=4,
            batch=8,
            scaling__load_balancing="speed",
            **dict([field.split("=")]),
        )


@pytest.mark.parametrize("reduction", ["exact", "overlapped"])
def test_straggler_detection_is_off_with_fsdp(tmp_path: Path, reduction: str) -> None:
    """Workers of `fsdp` wait for each other while they compute, so their times show no straggler."""
    data = write_images(tmp_path / "data", [[16]])
    job = make_job(
        tmp_path / "run", data, logical_workers=4, batch=8, train__strategy="fsdp", train__reduction=reduction
    )
    assert StragglerReporter(job, World(0, 2, 4), CPU)._detector is None
    ddp = make_job(tmp_path / "run", data, logical_workers=4, batch=8)
    assert StragglerReporter(ddp, World(0, 2, 4), CPU)._detector is not None
