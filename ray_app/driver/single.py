"""`train.strategy: single`: the loop in the calling process, for debugging with a breakpoint, with the bits that
workers would give.

Training in the calling thread (`train.strategy: single`), while another thread shows how far it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ray_app.checkpoint.store import Commit
from ray_app.config.config import Config
from ray_app.data.local_readers import choose_fetch, load_all
from ray_app.data.prefetch import StreamedWindows
from ray_app.data.reader import fetch_in_process
from ray_app.data.windows import CachedWindows, Windows
from ray_app.driver.services import make_metrics
from ray_app.errors import ConfigError
from ray_app.plan.order import Cursor
from ray_app.storage.files import poll_interval_s
from ray_app.task.device import restore_process_state
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import train
from ray_app.train.membership import SingleProcessMembership
from ray_app.watch.node_sampler import NodeSampler
from ray_app.watch.terminal import RunConsole, SafeConsole


def train_in_process(job: Job, membership: SingleProcessMembership, hooks: Hooks) -> None:
    """Trains in this process; blocks until the run ends or is to stop. An error ends it: nobody starts it again.

    Args:
        job: What to train.
        membership: Of this process.
        hooks: For fault tests.
    """
    device = torch.device("cuda", 0) if job.config.scaling.gpus_per_worker else torch.device("cpu")
    evaluation = job.evaluation
    load = (
        (lambda: load_all(fetch_in_process, evaluation).arrays)
        if job.workers_evaluate and evaluation is not None
        else None
    )
    with restore_process_state():
        train(job, membership, _open_windows, device, hooks, load_evaluation=load)


def _open_windows(job: Job, cursor: Cursor, played: range) -> Windows:
    source, data = job.source, job.config.data
    if data.cache == "memory":
        return CachedWindows(load_all(fetch_in_process, source))
    fetch = job.through_cache(choose_fetch(data.reader_threads, fetch_in_process))
    return StreamedWindows(job.plan, cursor, played, job.passes, fetch, source, data.prefetch_windows)


_LOOK_S = 0.25
_here = threading.Lock()
"""Held by the run that trains in this process."""


@contextmanager
def exclusive_process(config: Config, background: bool) -> Iterator[None]:
    """The time of a run, if it trains in this process: nothing else may draw from torch's generators meanwhile, which
    are the process's.

    Args:
        config: The run.
        background: Whether other code of the user's runs beside it.

    Raises:
        ConfigError: Something else would.
    """
    if config.train.strategy != "single":
        yield
        return
    if background:
        raise ConfigError(
            "train.strategy single trains in this process, and start_training lets your cells run meanwhile, whose"
            " random numbers come from"
            " the same generators: the result would depend on them. Use run_training, or another strategy, which trains"
            " in other processes."
        )
    if not _here.acquire(blocking=False):
        raise ConfigError(
            "A run with train.strategy single trains in this process already, and two would draw from the same random"
            " numbers. Let it end,"
            " or use another strategy, which trains in other processes."
        )
    try:
        yield
    finally:
        _here.release()


def train_single(
    job: Job,
    stops: Callable[[bool], bool],
    sampler: NodeSampler | None,
    console: SafeConsole,
    waiting: Callable[[], list[Commit]],
    hooks: Hooks,
) -> None:
    """Trains in this thread, where a debugger has the terminal for itself: progress is plain lines.

    Args:
        job: What to train.
        stops: Whether to stop; its argument says whether to look at storage for that.
        sampler: Told how far the run is.
        console: Where progress is shown.
        waiting: Returns the checkpoints that wait for the evaluator.
        hooks: For fault tests.
    """
    alone = SingleProcessMembership(job.plan.logical_workers, lambda: stops(False))
    plain = console.as_plain()
    ended = threading.Event()

    def watch() -> None:
        looked_s = 0.0
        with RunConsole(job, 1, plain, waiting, make_metrics(job)) as shown:
            while not ended.wait(_LOOK_S):
                if time.monotonic() - looked_s > poll_interval_s(job.paths.root):
                    looked_s = time.monotonic()
                    stops(True)
                if sampler is not None and alone.newest is not None:
                    sampler.step = alone.newest.step
                shown.show(alone.newest, "reading the first rows ...")
            shown.show_last()

    watcher = threading.Thread(target=watch, name="console", daemon=True)
    watcher.start()
    try:
        train_in_process(job, alone, hooks)
    finally:
        ended.set()
        watcher.join()
