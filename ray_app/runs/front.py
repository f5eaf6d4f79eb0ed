"""Training in the calling thread (`train.strategy: single`), while another thread shows how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console

from ray_app.checkpoint.commit import Commit
from ray_app.record.files import poll_s
from ray_app.runs.recorders import make_metrics
from ray_app.train.group.alone import Alone
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job
from ray_app.train.single import train_here
from ray_app.watch.console import RunConsole
from ray_app.watch.sampler import NodeSampler

_LOOK_S = 0.25


def train_in_front(
    job: Job,
    stops: Callable[[bool], bool],
    sampler: NodeSampler | None,
    console: Console,
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
    alone = Alone(job.plan.logical_workers, lambda: stops(False))
    plain = Console(file=console.file, force_terminal=False, force_jupyter=False, quiet=console.quiet)
    ended = threading.Event()

    def watch() -> None:
        looked_s = 0.0
        with RunConsole(job, 1, plain, waiting, make_metrics(job)) as shown:
            while not ended.wait(_LOOK_S):
                if time.monotonic() - looked_s > poll_s(job.paths.root):
                    looked_s = time.monotonic()
                    stops(True)
                if sampler is not None and alone.newest is not None:
                    sampler.step = alone.newest.step
                shown.show(alone.newest, "reading the first rows ...")
            shown.show_last()

    watcher = threading.Thread(target=watch, name="console", daemon=True)
    watcher.start()
    try:
        train_here(job, alone, hooks)
    finally:
        ended.set()
        watcher.join()
