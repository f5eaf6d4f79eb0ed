"""The promise for one job: runs are equal, bit for bit, on any number of workers and after an end and a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from ray_app.runlog.journal import read_events
from ray_app.testing import (
    DieAfter,
    Hooks,
    KilledError,
    TrainedRun,
    WorkerPool,
    cache_windows,
    read_trained_run,
    stream_windows,
)
from ray_app.train.job import Job, OpenWindows

WINDOWS = (cache_windows, stream_windows)


def assert_bit_identical(actual: TrainedRun, expected: TrainedRun) -> None:
    """Asserts that all steps and the final state are bit-identical."""
    assert actual.steps == expected.steps
    assert actual.digests == expected.digests


def train_on_workers(
    pool: WorkerPool,
    job: Job,
    sizes: Sequence[int],
    expected: TrainedRun | None = None,
    windows: Sequence[OpenWindows] = WINDOWS,
) -> TrainedRun:
    """Returns the run on the first of some numbers of workers; those on the others have to equal it.

    Args:
        pool: The workers.
        job: What to train.
        sizes: The numbers of workers.
        expected: A run that all have to equal; None for the first of them.
        windows: How rows reach the step, in turn.
    """
    runs = [pool.train_new_run(job, size, opener) for size, opener in zip(sizes, cycle(windows), strict=False)]
    for run in runs:
        assert_bit_identical(run, expected or runs[0])
    return runs[0]


def train_and_resume(
    pool: WorkerPool,
    job: Job,
    sizes: Sequence[int] = (1, 3),
    ends: tuple[int, int] = (3, 7),
    resumed: int = 2,
    killed: int | None = None,
    expected: TrainedRun | None = None,
    windows: Sequence[OpenWindows] = WINDOWS,
) -> TrainedRun:
    """Does what `train_on_workers` does, and checks that a run that ends and resumes in `job.run_root` is equal, too.

    Args:
        ends: The number of workers of the run that ends, and the step after which it does.
        resumed: The number of workers that continue it.
        killed: The rank that is killed by a signal; None: all ranks end by an error.
    """
    first = train_on_workers(pool, job, sizes, expected, windows)
    size, step = ends
    outcomes = pool.train(job, size, Hooks(after_step=DieAfter(step, killed)), windows[0])
    assert any(isinstance(outcome.error, KilledError) for outcome in outcomes), "no worker has ended"
    pool.train_to_end(replace(job, fence=1 if killed is None else 2), resumed, windows[-1])
    newest = max(filter(job.is_checkpoint_due, range(1, step + 1)))
    assert [event.details["step"] for event in read_events(job.paths, "resumed")] == [newest]
    assert_bit_identical(read_trained_run(job), first)
    return first
