"""Training in the calling process and thread (`train.strategy: single`), for debugging with breakpoints.

Another thread shows progress. The result is bit-identical to that of workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ray import cloudpickle

from ray_app.checkpoint.store import Commit
from ray_app.config.config import Config
from ray_app.data.reader import Decoded, RowSource, fetch_in_process
from ray_app.devices import HOST, accelerator
from ray_app.driver.interventions import Answers
from ray_app.errors import ConfigError
from ray_app.storage.files import poll_interval_s
from ray_app.task.environment import restore_process_state
from ray_app.train.context import WorkerContext, load_in_process
from ray_app.train.job import Hooks, Job, WindowSource
from ray_app.train.loop import train
from ray_app.train.membership import SingleProcessMembership
from ray_app.watch.metrics import RunMetrics
from ray_app.watch.terminal import RunConsole, SafeConsole


def train_in_process(
    job: Job, membership: SingleProcessMembership, hooks: Hooks, answers: Answers | None = None
) -> None:
    """Trains in this process; blocks until the run ends or is to stop. An error ends the run, without a retry.

    Args:
        answers: Lets code intervene between two epochs.
    """
    device = accelerator().device(0) if job.config.scaling.worker_gpus else HOST
    load_rows = load_in_process if job.pause_step is None else load_for_trials
    read_cache = (lambda: load_rows(job.source)) if job.config.data.cache == "memory" else None
    windows = WindowSource(fetch_in_process, read_cache)
    with restore_process_state():
        context = WorkerContext(job, membership, windows, device, hooks, load_evaluation=load_rows)
        if answers is not None:
            context = replace(context, ask=answers.answer, ends_epoch=lambda: answers.at_batch(membership.newest))
        train(context)


_rows = dict[bytes, Decoded]()
"""The decoded rows that a trial of a study leaves to the next one in this process, by their pickled source."""
_MAX_SOURCES = 2


def load_for_trials(source: RowSource) -> Decoded:
    """Returns the decoded rows of a data set, from an earlier trial in this process if they are the same."""
    key = cloudpickle.dumps(source)
    rows = _rows.pop(key, None)
    # The memory of the older ones is freed first.
    while rows is None and len(_rows) >= _MAX_SOURCES:
        del _rows[next(iter(_rows))]
    _rows[key] = load_in_process(source) if rows is None else rows
    return _rows[key]


_CHECK_S = 0.25
_process_lock = threading.Lock()
"""Held by the run that trains in this process."""


@contextmanager
def exclusive_process(config: Config, background: bool) -> Iterator[None]:
    """Reserves this process and its generators for a run that trains in it; raises `ConfigError` if others may draw."""
    if config.train.strategy_traits.has_workers:
        yield
        return
    if background:
        raise ConfigError(
            "train.strategy single trains in this process, but start_training lets your cells run at the same time and"
            " draw from the same random generators: the result would depend on them. Use run_training, or another"
            " strategy, which trains in other processes."
        )
    if not _process_lock.acquire(blocking=False):
        raise ConfigError(
            "A run with train.strategy single trains in this process already, and two runs would draw from the same"
            " random generators. Wait until it ends, or use another strategy, which trains in other processes."
        )
    try:
        yield
    finally:
        _process_lock.release()


def train_single(
    job: Job,
    stops: Callable[[bool], bool],
    console: SafeConsole,
    list_pending: Callable[[], list[Commit]],
    hooks: Hooks,
    answers: Answers | None,
) -> None:
    """Trains in this thread and shows progress in another, as plain lines, which leave the terminal to a debugger.

    Args:
        stops: Returns whether to stop; its argument says whether to read the evaluations for that.
        list_pending: Returns the checkpoints that wait for the evaluator.
        answers: Lets code intervene between two epochs; None: nothing does.
    """
    membership = SingleProcessMembership(job.plan.logical_workers, lambda: stops(False))
    plain_console = console.as_plain()
    ended = threading.Event()

    def watch() -> None:
        polled_s = 0.0
        with RunConsole(job, 1, plain_console, list_pending, RunMetrics(job.paths.name)) as run_console:
            while not ended.wait(_CHECK_S):
                if time.monotonic() - polled_s > poll_interval_s(job.paths.root):
                    polled_s = time.monotonic()
                    stops(True)
                run_console.show(membership.newest, "reading the first rows ...")
            run_console.show_last()

    watcher = threading.Thread(target=watch, name="console", daemon=True)
    watcher.start()
    try:
        if answers is not None:
            answers.resume()
        train_in_process(job, membership, hooks, answers)
    finally:
        ended.set()
        watcher.join()
