"""The training loop of one worker: one generation after the other, from the first step of the run to the last."""

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
from ray_app.train.step.step_stats import StepResult
from ray_app.train.step.timing import StepProfile
from ray_app.train.step.validation import Validation
from ray_app.train.stragglers import StragglerReporter

logger = logging.getLogger(__name__)

_MAX_BROKEN_GENERATIONS = 10
"""Generations that may break in a row without finishing a step; after more, lost peers are not the cause."""


def train(
    job: Job,
    membership: Membership,
    open_windows: OpenWindows,
    device: torch.device,
    hooks: Hooks = Hooks(),
    sender: SnapshotSender | None = None,
    load_evaluation: Callable[[], Arrays] | None = None,
) -> None:
    """Trains until the last step, until the driver asks to stop, or until this worker has to leave its node.

    Args:
        job: The run to train.
        membership: Forms generations with the other workers.
        open_windows: Opens the training data.
        device: Device to compute on.
        hooks: Callbacks for fault tests.
        sender: Sends snapshots to the snapshot actors and fetches the newest.
        load_evaluation: Loads the evaluation data, with `job.evaluation`; the workers then evaluate at every planned
            checkpoint.

    Raises:
        PeerLostError: Another worker left, and this membership cannot form another generation.
        PreemptedError: All workers have to leave their nodes.
        RayAppError: An error that a restart cannot fix.
    """
    environment.set_up_torch(job.config, device)
    worker = _Worker(job, membership, open_windows, device, hooks, sender or SnapshotSender([]), load_evaluation)
    with closing(worker), _gc_frozen():
        worker.run()


class _Worker:
    """The parts of a worker that outlive its generations: state, data feed, step log, monitors."""

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
        self._step_log = StepLog(job, self._state, membership, sender, device, hooks)
        self._feed = Feed(job.plan, lambda cursor, assigned: open_windows(job, cursor, assigned), device)
        self._validation = (
            Validation(job, self._state, load_evaluation, device, membership.moved)
            if load_evaluation is not None
            else None
        )
        self._bad_rows = BadRows(job)
        self._profile = StepProfile(job, device) if job.config.train.profile_steps is not None else None
        self._sdc_monitor = SdcMonitor(job, self._state, device)
        self._rank = 0
        self._finished_steps = 0
        if hooks.built is not None:
            hooks.built(self._state.model)

    def run(self) -> None:
        """Runs one generation after the other, until the run ends or this worker leaves.

        Raises:
            PeerLostError: Too many generations in a row broke without a finished step, or the membership forms no more.
            PreemptedError: This worker has to leave its node.
            TaskError: User code failed, with the rank and the rows.
        """
        lost_s: float | None = None
        broken_generations = 0
        broken_at_step = -1
        while True:
            flags = Flags.REFORM
            # Errors, optimizers with schedules and sharded models form reference cycles: what the last generation left
            # on the device would stay allocated while the next one allocates the same again. Only objects created
            # after `_gc_frozen` are examined, which takes milliseconds.
            gc.collect()
            try:
                joined = self._membership.generation(self._state.step, lost_s is not None)
                with joined as (members, generation), self._state.bind(members) as world, translate_peer_errors():
                    self._begin_generation(world, generation, lost_s)
                    flags = self._run_generation(world, generation.hosts)
                lost_s = None
            except PeerLostError as error:
                broken_generations = broken_generations + 1 if self._finished_steps == broken_at_step else 0
                broken_at_step = self._finished_steps
                if not self._membership.recovers or broken_generations == _MAX_BROKEN_GENERATIONS:
                    raise
                lost_s = lost_s if broken_generations and lost_s else time.time()
                logger.warning("Generation broken at step %d, forming another: %s", self._finished_steps, error)
                continue
            except TaskError as error:
                rows = self._job.plan.manifest.describe_rows(error.positions) if error.positions else ""
                raise error.with_context(
                    f"rank {self._rank} after step {self._finished_steps}", rows
                ) from error.__cause__
            except LeavingError:
                pass
            if self._membership.is_leaving():
                return self._leave(flags)
            if not flags & Flags.REFORM:
                return self._step_log.check()

    def close(self) -> None:
        """Frees the resources of this worker and writes what is still pending."""
        self._enter("done")
        if self._profile is not None:
            self._profile.end(self._finished_steps)
        self._feed.close()
        if self._validation is not None:
            self._validation.put_pending_events()
        self._step_log.close()
        with user_code(lambda: "what comes after the training"):
            self._job.task.finish(self._state.model)

    def _begin_generation(self, world: World, generation: GenerationInfo, lost_s: float | None) -> None:
        """Gives all ranks the same state and records at the start of a generation; a collective.

        Args:
            lost_s: Time at which the last generation broke, seconds since the epoch; None if it did not.
        """
        self._rank = world.rank
        self._enter("forming")
        self._step_log.collect(world)
        job, state = self._job, self._state
        divergent_ranks = state.share(
            world, lambda: restore_state(job, state, self._step_log, self._sender, self._device), lost_s is not None
        )
        self._step_log.align(world, generation.number)
        self._sdc_monitor.mark_checkpoints(world, self._step_log)
        if world.rank == 0:
            number, details = generation.number, {"lost_s": lost_s} if lost_s is not None else {}
            put_event(job.paths, "formed", job.fence, generation=number, workers=world.size, step=state.step, **details)
            if divergent_ranks:
                put_event(
                    job.paths, "params_diverged", job.fence, generation=number, ranks=divergent_ranks, step=state.step
                )

    def _run_generation(self, world: World, hosts: tuple[str, ...]) -> Flags:
        """Runs the steps of one generation; returns the flags that ended it."""
        stragglers = StragglerReporter(self._job, world, hosts, self._device)
        sdc_checker = self._sdc_monitor.make_checker(world)
        self._evaluate(world)
        while True:
            flags = self._run_steps(world, stragglers, sdc_checker)
            if (shares := stragglers.shares) is None or flags:
                stragglers.end()
                return flags
            world = replace(world, assignment=shares)
            stragglers.begin(world)

    def _run_steps(self, world: World, stragglers: StragglerReporter, sdc_checker: SdcChecker | None) -> Flags:
        """Runs steps until the generation ends or logical workers move between ranks.

        Returns:
            The flags that ended the generation; no flag if logical workers move or the run is complete.
        """
        job, state, membership = self._job, self._state, self._membership
        plan, cursor = job.plan, Cursor.at(state.step, job.plan.steps_per_epoch)
        feed, finished_steps = self._feed, state.step
        self._finished_steps = finished_steps
        with closing(build_step(job, state, world, self._device, self._enter)) as step:
            step.use_sdc_checker(sdc_checker)
            if finished_steps < job.total_steps:
                self._enter("data")
                feed.seek(cursor, world.assigned)
            while finished_steps < job.total_steps:
                self._enter("data")
                wait_before_s, lr = feed.wait_s, step.lr
                batches = feed.next()
                self._bad_rows.note(batches)
                self._enter("compute")
                if self._profile is not None:
                    self._profile.before(world.rank, finished_steps + 1)
                step.data_wait_s = feed.wait_s - wait_before_s
                result = step.run(cursor, batches, plan.global_rows(cursor.step), membership.flags())
                finished_steps, cursor = finished_steps + 1, cursor.next(plan.steps_per_epoch)
                self._finished_steps = finished_steps
                if self._profile is not None:
                    self._profile.after(finished_steps)
                self._step_log.record_step(
                    Cursor.at(finished_steps - 1, plan.steps_per_epoch),
                    finished_steps,
                    result,
                    lr,
                    step.data_wait_s,
                    stragglers=stragglers,
                )
                if world.size > 1:
                    stragglers.add(finished_steps, result.times)
                self._sdc_monitor.compare_parameters(world, finished_steps)
                # With local SGD the logical workers train on their own until the next average, which alone moves
                # `state`: until then there is nothing to save or evaluate, and no flag takes effect.
                if state.step < finished_steps:
                    self._call_after_step(world, finished_steps)
                    continue
                self._save_if_due(cursor, result)
                self._call_after_step(world, finished_steps)
                self._evaluate(world)
                if result.flags & Flags.STOP:
                    return Flags.STOP
                if result.flags & Flags.REFORM and state.step < job.total_steps:
                    return result.flags
                if stragglers.shares is not None:
                    break
        return Flags(0)

    def _save_if_due(self, cursor: Cursor, result: StepResult) -> None:
        """Makes the checkpoint and the snapshot that are due after a step; `cursor` is that of the next step."""
        if self._job.is_checkpoint_due(self._state.step):
            self._step_log.checkpoint(cursor, "cadence")
        elif result.flags & (Flags.STOP | Flags.SAVE):
            self._step_log.checkpoint(cursor, "extra")
        if self._job.is_snapshot_due(self._state.step):
            self._step_log.snapshot()

    def _call_after_step(self, world: World, finished_steps: int) -> None:
        if self._hooks.after_step is not None:
            self._hooks.after_step(world.rank, finished_steps)

    def _evaluate(self, world: World) -> None:
        """Evaluates the state if the workers evaluate and a planned checkpoint is due at its step; a collective."""
        if self._validation is None or not self._state.step or not self._job.is_checkpoint_due(self._state.step):
            return
        self._enter("evaluate")
        self._validation.run(world)
        self._step_log.skip_time()

    def _leave(self, flags: Flags) -> None:
        """Saves the state if that is this worker's task, and ends, because the node is about to go away.

        Raises:
            PreemptedError: All workers have to leave, or this one has no state yet.
        """
        current_flags = self._membership.flags()
        if self._state.step == NO_STATE:
            raise PreemptedError("This worker has to leave its node before it got a state to train.")
        if has_to_save_on_exit(flags, current_flags, self._rank):
            cursor = Cursor.at(self._state.step, self._job.plan.steps_per_epoch)
            self._step_log.checkpoint(cursor, "extra", alone=True)
        if (flags | current_flags) & Flags.SAVE:
            raise PreemptedError(
                f"All workers have to leave their nodes after step {self._state.step}; a checkpoint was made."
            )

    def _enter(self, phase: Phase) -> None:
        """Reports the phase that this worker begins to the membership and to the hook."""
        self._membership.enter(phase)
        if self._hooks.at is not None:
            self._hooks.at(phase, self._rank, self._state.step)


def has_to_save_on_exit(agreed: Flags, current: Flags, rank: int) -> bool:
    """Returns whether a worker that leaves has to save the state.

    If all ranks agreed on `SAVE` in their last step, rank 0 saves. Otherwise every worker saves that has received the
    flag since, because none of them knows whether another one will.

    Args:
        agreed: The flags that ended the worker's last generation.
        current: The flags that the worker has received now.
        rank: The worker's rank in that generation.
    """
    return rank == 0 if agreed & Flags.SAVE else bool(current & Flags.SAVE)


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Exempts the objects that live as long as the run from Python's garbage collection inside the block."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
