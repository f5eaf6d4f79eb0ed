"""The training loop of one worker, from joining a generation to the last step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from ray_app.checkpoint.store import CheckpointStore, Commit, Fallback
from ray_app.data.feed import Feed, Windows
from ray_app.plan.cursor import Cursor
from ray_app.record.evaluations import ranked, read_evaluations
from ray_app.record.journal import MetricsWriter, StepRecord, put_event
from ray_app.strategy.base import World
from ray_app.strategy.build import build_strategy
from ray_app.train import environment
from ray_app.train.job import Job
from ray_app.train.membership import Membership
from ray_app.train.saver import Saver
from ray_app.train.state import NOTHING, TrainingState
from ray_app.train.step import STOP, Step, StepResult

OpenWindows = Callable[[Job, Cursor, range], Windows]
"""Opens the data at a cursor for the logical workers to play."""


@dataclass(frozen=True)
class Hooks:
    """Where a test can make something happen; users have no need of it.

    Args:
        after_step: Called with (rank, finished steps) after each step.
        before_commit: Called before each commit in the saver's thread.
    """

    after_step: Callable[[int, int], None] | None = None
    before_commit: Callable[[Commit], None] | None = None


def train(job: Job, membership: Membership, open_windows: OpenWindows, device: torch.device, hooks: Hooks = Hooks()) -> None:
    """Trains until the last step, or until the driver asks to stop.

    Args:
        job: What to train.
        membership: The other workers.
        open_windows: Where the data comes from.
        device: Where to compute.
        hooks: For fault tests.

    Raises:
        PeerLostError: Another worker left; Ray Train starts the workers again from the newest checkpoint.
        RayAppError: Something that starting again cannot mend.
    """
    environment.set_up_torch(job.config, device)
    state = TrainingState(job.config, job.task, device, job.total_steps)
    with membership.generation() as world:
        if world.rank == 0:
            _restore(job, state, world, device)
        state.share(world)
        with closing(_Recorder(job, world, state, membership, device, hooks)) as recorder:
            _run(job, world, state, membership, open_windows, recorder, device, hooks)


def _restore(job: Job, state: TrainingState, world: World, device: torch.device) -> None:
    """Gives rank 0 the newest intact checkpoint, or the state of step 0."""
    fallbacks: list[Fallback] = []

    def passed_over(fallback: Fallback) -> None:
        fallbacks.append(fallback)
        put_event(job.paths, "fallback", job.fence, checkpoint=fallback.name, reason=fallback.reason)

    found = CheckpointStore(job.paths).load_newest(passed_over)
    if found is None:
        state.step = 0
        return
    commit, snapshot = found
    state.load(snapshot)
    put_event(job.paths, "resumed", job.fence, step=state.step, workers=world.size, checkpoint_fence=commit.fence)
    now = environment.describe(device)
    if now != commit.environment:
        put_event(job.paths, "environment_changed", job.fence, step=state.step, before=commit.environment, now=now)


def _run(
    job: Job,
    world: World,
    state: TrainingState,
    membership: Membership,
    open_windows: OpenWindows,
    recorder: _Recorder,
    device: torch.device,
    hooks: Hooks,
) -> None:
    """The steps of one generation."""
    assert state.step != NOTHING
    plan, cursor = job.plan, Cursor.at(state.step, job.plan.steps_per_epoch)
    strategy = build_strategy(job.config.train, state.model, world)
    step = Step(job.config, job.task, state, strategy, world, device)
    with _settled(), closing(strategy), closing(Feed(plan, cursor, world.played, open_windows(job, cursor, world.played), device)) as feed:
        while state.step < job.total_steps:
            waited, lr = feed.wait_s, state.lr
            batches = feed.next()
            result = step.run(cursor, batches, plan.global_rows(cursor.step), membership.flags())
            recorder.finished(cursor, result, lr, feed.wait_s - waited)
            cursor = cursor.next(plan.steps_per_epoch)
            stop = bool(result.flags & STOP)
            if job.is_checkpoint_due(state.step):
                recorder.checkpoint(cursor, "cadence")
            elif stop:
                recorder.checkpoint(cursor, "extra")
            if hooks.after_step is not None:
                hooks.after_step(world.rank, state.step)
            if stop:
                break
    recorder.check()


@contextmanager
def _settled() -> Iterator[None]:
    """Tells Python's garbage collector not to look again and again through what lives as long as the run."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Recorder:
    """What rank 0 writes while it trains: metrics, progress, checkpoints. On other ranks it does nothing."""

    def __init__(self, job: Job, world: World, state: TrainingState, membership: Membership, device: torch.device, hooks: Hooks) -> None:
        self._job, self._world, self._state, self._membership = job, world, state, membership
        self._environment = environment.describe(device)
        self._active = world.rank == 0
        self._previous_s = time.perf_counter()
        if self._active:
            self._metrics = MetricsWriter(job.paths, job.fence)
            self._saver = Saver(job.paths, job.config.checkpoint, self._best_steps, hooks.before_commit)

    def finished(self, cursor: Cursor, result: StepResult, lr: float, wait_s: float) -> None:
        """Records a finished step."""
        if not self._active:
            return
        now = time.perf_counter()
        record = StepRecord(
            step=self._state.step,
            epoch=cursor.epoch,
            time_s=time.time(),
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            step_ms=(now - self._previous_s) * 1e3,
            data_wait_ms=wait_s * 1e3,
            workers=self._world.size,
            rows=result.rows,
            row_hash=result.row_hash,
        )
        self._previous_s = now
        self._metrics.add(record)
        self._membership.report(record)

    def checkpoint(self, cursor: Cursor, why: Literal["cadence", "extra"]) -> None:
        """Makes a checkpoint of the state of now; `cursor` is the next step."""
        if not self._active:
            return
        job, step = self._job, self._state.step
        commit = Commit(
            step=step,
            fence=job.fence,
            epoch=cursor.epoch,
            epoch_step=cursor.step,
            why=why,
            config_digest=job.config_digest,
            manifest_digest=job.plan.manifest.digest,
            logical_workers=job.plan.logical_workers,
            params_digest="",
            environment=self._environment,
            time_s=0.0,
        )
        self._metrics.flush()
        self._saver.save(self._state.snapshot, commit)

    def _best_steps(self) -> list[int]:
        best = ranked(read_evaluations(self._job.paths), self._job.best_metric, self._job.best_mode)
        return [e.step for e in best[: self._job.config.checkpoint.keep_best]]

    def check(self) -> None:
        """Raises if the last checkpoint, which is the run's result, could not be written."""
        if self._active:
            self._saver.check()

    def close(self) -> None:
        """Writes what is left."""
        if not self._active:
            return
        self._saver.wait()
        self._metrics.close()
        stalls = [s * 1e3 for s in self._saver.stall_s]
        put_event(self._job.paths, "left", self._job.fence, step=self._state.step, stalls_ms=stalls)
