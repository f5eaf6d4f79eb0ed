"""`train.strategy: single`: the loop in the calling process, for debugging with a breakpoint, with the bits that workers would give."""

from __future__ import annotations

import torch

from ray_app.data.feed.streamed import StreamedWindows
from ray_app.data.feed.windows import CachedWindows, Windows
from ray_app.data.read.slices import fetch_here
from ray_app.data.read.threads import by_threads
from ray_app.data.read.whole import load_all
from ray_app.plan.cursor import Cursor
from ray_app.task.environment import given_back
from ray_app.train.group.alone import Alone
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job
from ray_app.train.loop import train


def train_here(job: Job, membership: Alone, hooks: Hooks) -> None:
    """Trains in this process; blocks until the run ends or is to stop. An error ends it: nobody starts it again.

    Args:
        job: What to train.
        membership: Of this process.
        hooks: For fault tests.
    """
    device = torch.device("cuda", 0) if job.config.scaling.gpus_per_worker else torch.device("cpu")
    evaluation = job.evaluation
    load = (lambda: load_all(fetch_here, evaluation).arrays) if job.workers_evaluate and evaluation is not None else None
    with given_back():
        train(job, membership, _open_windows, device, hooks, load_evaluation=load)


def _open_windows(job: Job, cursor: Cursor, played: range) -> Windows:
    source, data = job.source, job.config.data
    if data.cache == "memory":
        return CachedWindows(load_all(fetch_here, source))
    fetch = job.through_cache(by_threads(data.reader_threads, fetch_here))
    return StreamedWindows(job.plan, cursor, played, job.passes, fetch, source, data.prefetch_windows)
