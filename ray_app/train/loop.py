"""The training loop of one worker: generation after generation, from the first step to the last."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from ray_app.data.feed import Feed
from ray_app.errors import PeerLostError, PreemptedError, TaskError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World, translate_peer_errors
from ray_app.runlog.journal import put_event
from ray_app.task import device as environment
from ray_app.task.ragged import Arrays
from ray_app.task.user_code import user_code
from ray_app.train.build import build_state, build_step
from ray_app.train.checkpointing.restore import restore_state
from ray_app.train.checkpointing.snapshots import SnapshotSender
from ray_app.train.checkpointing.step_log import BadRows, StepLog
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.membership import Flags, GenerationInfo, LeavingError, Membership, Phase
from ray_app.train.sdc_monitor import SdcMonitor
from ray_app.train.state.state import NO_STATE
from ray_app.train.step.sdc import SdcChecker
from ray_app.train.step.timing import StepProfile
from ray_app.train.step.validation import Validation
from ray_app.train.stragglers import StragglerReporter

logger = logging.getLogger(__name__)

_MOST_BROKEN = 10
"""Generations that may break one after the other without a finished step; more is no matter of lost peers."""


def train(
    job: Job,
    membership: Membership,
    open_windows: OpenWindows,
    device: torch.device,
    hooks: Hooks = Hooks(),
    sender: SnapshotSender | None = None,
    load_evaluation: Callable[[], Arrays] | None = None,
) -> None:
    """Trains until the last step, or until the driver asks to stop, or until this worker has to leave its node.

    Args:
        job: What to train.
        membership: The other workers.
        open_windows: Where the data comes from.
        device: Where to compute.
        hooks: For fault tests.
        sender: Where snapshots go and come from.
        load_evaluation: Returns what the workers evaluate on at every planned checkpoint; with `job.evaluation`.

    Raises:
        PeerLostError: Another worker left, and this membership cannot form another generation.
        PreemptedError: All workers have to leave their nodes.
        RayAppError: Something that starting again cannot mend.
    """
    environment.set_up_torch(job.config, device)
    worker = _Worker(job, membership, open_windows, device, hooks, sender or SnapshotSender([]), load_evaluation)
    with closing(worker), _settled():
        worker.work()


class _Worker:
    """What lives through all generations of a worker."""

    def __init__(
        self,
        job: Job,
        membership: Membership,
        open_windows: OpenWindows,
        device: torch.device,
        hooks: Hooks,
        sender: SnapshotSender,
        load_evaluation: Callable[[], Arrays] | None,
    ) -> None:
        self._job, self._membership, self._device, self._hooks, self._sender = job, membership, device, hooks, sender
        self._state = build_state(job.config, job.task, device, job.total_steps)
        self._recorder = StepLog(job, self._state, membership, sender, device, hooks)
        self._feed = Feed(job.plan, lambda cursor, played: open_windows(job, cursor, played), device)
        self._validation = (
            Validation(job, self._state, load_evaluation, device, membership.moved)
            if load_evaluation is not None
            else None
        )
        self._bad_rows = BadRows(job)
        self._profile = StepProfile(job, device) if job.config.train.profile_steps is not None else None
        self._trust = SdcMonitor(job, self._state, device)
        self._rank = self._done = 0
        if hooks.built is not None:
            hooks.built(self._state.model)

    def work(self) -> None:
        """Steps in one generation after the other."""
        lost_s: float | None = None
        broken, broken_at = 0, -1
        while True:
            flags = Flags.REFORM
            # Errors, optimizers with schedules and sharded models are in circles: what the last generation has left on
            # the device would stay while the next one makes the same again. Only what was made since `_settled` is
            # looked through: it takes milliseconds.
            gc.collect()
            try:
                joined = self._membership.generation(self._state.step, lost_s is not None)
                with joined as (met, formed), self._state.bind(met) as world, translate_peer_errors():
                    self._begin(world, formed, lost_s)
                    flags = self._run(world, formed.hosts)
                lost_s = None
            except PeerLostError as error:
                broken = broken + 1 if self._done == broken_at else 0
                broken_at = self._done
                if not self._membership.recovers or broken == _MOST_BROKEN:
                    raise
                lost_s = lost_s if broken and lost_s else time.time()
                logger.warning("Generation broken at step %d, forming another: %s", self._done, error)
                continue
            except TaskError as error:
                rows = self._job.plan.manifest.describe_rows(error.positions) if error.positions else ""
                raise error.with_context(f"rank {self._rank} after step {self._done}", rows) from error.__cause__
            except LeavingError:
                pass
            if self._membership.is_leaving():
                return self._leave(flags)
            if not flags & Flags.REFORM:
                return self._recorder.check()

    def close(self) -> None:
        """Frees what it holds, and writes what is left."""
        self._enter("done")
        if self._profile is not None:
            self._profile.end(self._done)
        self._feed.close()
        if self._validation is not None:
            self._validation.tell()
        self._recorder.close()
        with user_code(lambda: "what comes after the training"):
            self._job.task.finish(self._state.model)

    def _begin(self, world: World, formed: GenerationInfo, lost_s: float | None) -> None:
        """Makes all ranks equal at the start of a generation."""
        self._rank = world.rank
        self._enter("forming")
        self._recorder.collect(world)
        job, state = self._job, self._state
        odd = state.share(
            world, lambda: restore_state(job, state, self._recorder, self._sender, self._device), lost_s is not None
        )
        self._recorder.align(world, formed.number)
        self._trust.mark(world, self._recorder)
        if world.rank == 0:
            details = {"lost_s": lost_s} if lost_s is not None else {}
            put_event(
                job.paths, "formed", job.fence, generation=formed.number, workers=world.size, step=state.step, **details
            )
            if odd:
                put_event(job.paths, "params_diverged", job.fence, generation=formed.number, ranks=odd, step=state.step)

    def _run(self, world: World, hosts: tuple[str, ...]) -> Flags:
        """The steps of one generation; returns the flags that ended it."""
        pacing, replays = StragglerReporter(self._job, world, hosts, self._device), self._trust.replays(world)
        self._evaluate(world)
        while True:
            flags = self._steps(world, pacing, replays)
            if (shares := pacing.shares) is None or flags:
                pacing.end()
                return flags
            world = replace(world, assignment=shares)
            pacing.begin(world)

    def _steps(self, world: World, pacing: StragglerReporter, replays: SdcChecker | None) -> Flags:
        """Steps until the generation ends, or logical workers are to move."""
        job, state, recorder, membership = self._job, self._state, self._recorder, self._membership
        plan, cursor = job.plan, Cursor.at(state.step, job.plan.steps_per_epoch)
        feed, done = self._feed, state.step
        self._done = done
        with closing(build_step(job, state, world, self._device, self._enter)) as step:
            step.replay(replays)
            if done < job.total_steps:
                self._enter("data")
                feed.play(cursor, world.assigned)
            while done < job.total_steps:
                self._enter("data")
                waited, lr = feed.wait_s, step.lr
                batches = feed.next()
                self._bad_rows.note(batches)
                self._enter("compute")
                if self._profile is not None:
                    self._profile.before(world.rank, done + 1)
                step.waited_s = feed.wait_s - waited
                result = step.run(cursor, batches, plan.global_rows(cursor.step), membership.flags())
                done, cursor = done + 1, cursor.next(plan.steps_per_epoch)
                self._done = done
                if self._profile is not None:
                    self._profile.after(done)
                recorder.finished(
                    Cursor.at(done - 1, plan.steps_per_epoch), done, result, lr, step.waited_s, pacing=pacing
                )
                if world.size > 1:
                    pacing.add(done, result.spent)
                self._trust.compare(world, done)
                if state.step < done:  # the logical workers are on their own until the next average
                    self._after_step(world, done)
                    continue
                if job.is_checkpoint_due(state.step):
                    recorder.checkpoint(cursor, "cadence")
                elif result.flags & (Flags.STOP | Flags.SAVE):
                    recorder.checkpoint(cursor, "extra")
                if job.is_snapshot_due(state.step):
                    recorder.snapshot()
                self._after_step(world, done)
                self._evaluate(world)
                if result.flags & Flags.STOP:
                    return Flags.STOP
                if result.flags & Flags.REFORM and state.step < job.total_steps:
                    return result.flags
                if pacing.shares is not None:
                    break
        return Flags(0)

    def _after_step(self, world: World, done: int) -> None:
        if self._hooks.after_step is not None:
            self._hooks.after_step(world.rank, done)

    def _evaluate(self, world: World) -> None:
        """At a checkpoint of the cadence, if the workers are to evaluate; a collective."""
        if self._validation is None or not self._state.step or not self._job.is_checkpoint_due(self._state.step):
            return
        self._enter("evaluate")
        self._validation.run(world)
        self._recorder.skip_time()

    def _leave(self, flags: Flags) -> None:
        """Ends, because the node is about to go away."""
        ordered = self._membership.flags()
        if self._state.step == NO_STATE:
            raise PreemptedError("This worker has to leave its node before it got a state to train.")
        if has_to_save_on_exit(flags, ordered, self._rank):
            self._recorder.checkpoint(Cursor.at(self._state.step, self._job.plan.steps_per_epoch), "extra", alone=True)
        if (flags | ordered) & Flags.SAVE:
            raise PreemptedError(
                f"All workers have to leave their nodes after step {self._state.step}; a checkpoint was made."
            )

    def _enter(self, phase: Phase) -> None:
        self._membership.enter(phase)
        if self._hooks.at is not None:
            self._hooks.at(phase, self._rank, self._state.step)


def has_to_save_on_exit(agreed: Flags, ordered: Flags, rank: int) -> bool:
    """Whether a worker that leaves has to save the state: where all agreed on it rank 0, otherwise whoever is told so
    only now.

    Args:
        agreed: What ended its last generation.
        ordered: What it is told now.
        rank: Of that generation.
    """
    return rank == 0 if agreed & Flags.SAVE else bool(ordered & Flags.SAVE)


@contextmanager
def _settled() -> Iterator[None]:
    """Tells Python's garbage collector not to look again and again through what lives as long as the run."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
