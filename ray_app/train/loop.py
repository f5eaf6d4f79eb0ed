"""The training loop of one worker: one generation after the other, from the first step of the run to the last."""

from __future__ import annotations

import gc
import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ray_app.data.feed import Feed
from ray_app.devices import kind_of
from ray_app.errors import PeerLostError, PreemptedError, TaskError
from ray_app.plan.order import Cursor
from ray_app.reduction.messages import gather
from ray_app.reduction.peer_errors import translate_peer_errors
from ray_app.reduction.world import World
from ray_app.retry import Retry
from ray_app.runlog.journal import put_event
from ray_app.storage.files import poll_interval_s, put_atomic
from ray_app.task import environment
from ray_app.task.interventions import Intervention
from ray_app.task.user_code import user_code
from ray_app.train.build import build_state, build_step
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.checkpointing.restore import restore_state
from ray_app.train.checkpointing.step_log import BadRows, StepLog
from ray_app.train.context import WorkerContext
from ray_app.train.interventions import put_question, read_intervention
from ray_app.train.job import Job
from ray_app.train.membership import DrainedError, Flags, GenerationInfo, Phase
from ray_app.train.state.parameters import check_parameter_layout
from ray_app.train.state.state import NO_STATE
from ray_app.train.step.sdc import ComparedWorkers, SdcMonitor
from ray_app.train.step.step_stats import StepResult, StepTimer
from ray_app.train.step.worker_evaluation import WorkerEvaluation
from ray_app.train.stragglers import StragglerReporter

logger = logging.getLogger(__name__)

_POLLS_PER_INTERVAL = 10
"""Number of times that an answer is looked for while other files are looked for once: all workers wait for it."""
_RETRY = Retry(1.0, factor=1.0, deadline_s=600.0)
MAX_BROKEN_GENERATIONS = 10
"""Number of generations that may break in a row without a finished step.

If one more breaks, this worker fails, because then a lost peer is unlikely to be the cause.
"""


def train(context: WorkerContext) -> bool:
    """Trains until the last step, until the driver asks to stop, or until this worker is drained.

    Returns:
        Whether the run is over; False if this worker has exited and the others continue.

    Raises:
        PeerLostError: Another worker left, and this membership cannot form another generation.
        PreemptedError: All workers have to leave their nodes.
        RayAppError: An error that a restart cannot fix.
    """
    environment.set_up_torch(context.job.config, context.device)
    with closing(_Worker(context)) as worker, _gc_frozen():
        return worker.run()


class _Worker:
    """Runs the generations of one worker, with the parts that outlive them: state, data feed, step log, monitors."""

    def __init__(self, context: WorkerContext) -> None:
        job, device = context.job, context.device
        self._job, self._device = job, device
        membership = self._membership = context.membership
        self._hooks = context.hooks
        self._ask, self._ends_epoch = context.ask, context.ends_epoch
        self._sender = context.sender or SnapshotSender([])
        self._state = build_state(job.config, job.task, device, job.total_steps)
        check_parameter_layout(self._state.model, job.parameters)
        self._step_log = StepLog(job, self._state, membership, self._sender, device, context.hooks)
        self._feed = Feed(job.plan, partial(context.open_windows, job), device)
        load, report = context.load_evaluation, membership.report_progress
        has_evaluation = job.workers_evaluate and job.eval_source is not None
        self._evaluation = WorkerEvaluation(job, self._state, load, device, report) if has_evaluation else None
        self._bad_rows = BadRows(job)
        self._profile = StepProfile(job, device) if job.config.train.profile_steps is not None else None
        self._sdc_monitor = SdcMonitor(job, self._state, device)
        self._rank = 0
        # With local SGD `TrainingState.step` stays that of the last average, while this counts every step.
        self._finished_steps = 0
        self._has_stepped = False
        if context.hooks.built is not None:
            context.hooks.built(self._state.model)

    def run(self) -> bool:
        """Runs one generation after the other, until the run ends or this worker leaves.

        Returns:
            Whether the run is over.

        Raises:
            PeerLostError: Too many generations in a row broke without a finished step, or the membership cannot form
                another one.
            PreemptedError: All workers have to leave their nodes, or this one before it has a state.
            TaskError: User code failed; the message names the rank and the rows.
        """
        outage = _Outage()
        while True:
            flags, is_run_over = Flags(0), False
            self._free_device()
            try:
                joined = self._membership.generation(self._state.step, outage.since_s is not None)
                with joined as (world, generation), self._state.backend.bind(world) as world, translate_peer_errors():
                    self._begin_generation(world, generation, outage.since_s)
                    flags = self._run_generation(world)
                    is_run_over = not flags & Flags.REFORM
                    if is_run_over:
                        self._step_log.wait_for_parts(world)
                    else:
                        self._state.backend.end_generation(self._membership.is_draining())
                outage.since_s = None
            except PeerLostError as error:
                # With local SGD the steps since the last average are repeated, so only `state.step` shows progress.
                if outage.add_break(self._state.step) > MAX_BROKEN_GENERATIONS or not self._membership.recovers:
                    raise
                logger.warning("Generation broken at step %d, forming another: %s", self._finished_steps, error)
                continue
            except TaskError as error:
                rows = self._job.plan.manifest.describe_rows(error.positions) if error.positions else ""
                raise error.with_context(
                    f"rank {self._rank} after step {self._finished_steps}", rows
                ) from error.__cause__
            except DrainedError:
                # The check below ends this worker; if the reason to drain is gone by then, it waits again.
                pass
            # The end of the run is checked before the end of this worker: a worker that is draining when the run is
            # over must still report a last checkpoint that failed.
            if is_run_over:
                self._step_log.wait_for_commit()
                return True
            if self._membership.is_draining():
                self._exit_drained(flags)
                return False

    def _free_device(self) -> None:
        """Frees what the last generation has left on the device; raises the error of a device that has failed.

        A failed device fails the collectives, too, which looks like a lost peer. The others would wait for this worker
        while their next process group forms.
        """
        # Errors, optimizers with schedules and sharded models form reference cycles, which would stay allocated while
        # the next generation allocates the same again. Only objects created after `_gc_frozen` are examined, which
        # takes milliseconds.
        gc.collect()
        kind = kind_of(self._device)
        kind.check(self._device)
        # The buffers of the next process group are not in memory that torch keeps for itself.
        kind.free_cache()

    def close(self) -> None:
        """Frees the resources of this worker and writes what is still pending."""
        # The stack calls all of these, the last one first, also if one of them fails.
        with ExitStack() as stack:
            stack.callback(self._finish_task)
            stack.callback(self._step_log.close)
            if self._evaluation is not None:
                stack.callback(self._evaluation.pending_events.flush)
            stack.callback(self._feed.close)
            if self._profile is not None:
                stack.callback(self._profile.end, self._finished_steps)
            self._enter("done")

    def _finish_task(self) -> None:
        with user_code(lambda: "Task.finish after the training"):
            self._job.task.finish(self._state.model)

    def _begin_generation(self, world: World, generation: GenerationInfo, broken_since_s: float | None) -> None:
        """Gives all ranks the same state and the same step records, and writes the event `formed`; a collective.

        Args:
            world: The workers of the generation.
            generation: The generation.
            broken_since_s: See `_Outage.since_s`.
        """
        self._rank = world.rank
        self._enter("forming")
        self._step_log.share_records(world)
        self._step_log.commit_left_parts(world, broken_since_s is not None)
        job, state = self._job, self._state
        divergent_ranks = state.backend.share(
            world,
            lambda: restore_state(job, state, self._step_log, self._sender, self._device, world),
            was_broken=broken_since_s is not None,
        )
        if world.rank in divergent_ranks:
            self._step_log.discard_copies()
        self._step_log.begin_generation(world, generation.number)
        self._sdc_monitor.mark_checkpoints(world, self._step_log.suspect)
        if world.rank == 0:
            number = generation.number
            details = {"lost_s": broken_since_s} if broken_since_s is not None else {}
            put_event(job.paths, "formed", job.fence, generation=number, workers=world.size, step=state.step, **details)
            if divergent_ranks:
                put_event(
                    job.paths, "params_diverged", job.fence, generation=number, ranks=divergent_ranks, step=state.step
                )

    def _run_generation(self, world: World) -> Flags:
        """Runs the steps of one generation; returns the flags that ended it: without `REFORM` the run is over."""
        straggler_reporter = StragglerReporter(self._job, world, self._device)
        compared_workers = self._sdc_monitor.gather_workers(world)
        # A state that was restored or received may be that of a checkpoint without its evaluation.
        self._evaluate(world)
        if self._intervene(world):
            return Flags.STOP
        while not isinstance(end := self._run_steps(world, straggler_reporter, compared_workers), Flags):
            world = replace(world, assignment=end)
            straggler_reporter.begin(world)
        straggler_reporter.end()
        return end

    def _run_steps(
        self, world: World, straggler_reporter: StragglerReporter, compared_workers: ComparedWorkers | None
    ) -> Flags | tuple[range, ...]:
        """Runs steps with one assignment of logical workers, until the generation ends or the assignment changes.

        Returns:
            The flags that ended the generation, no flag after the last step; or the new assignment.
        """
        job = self._job
        state = self._state
        plan, cursor = job.plan, Cursor.at(state.step, job.plan.steps_per_epoch)
        self._finished_steps = state.step
        # The times are for straggler detection, which compares workers with each other.
        timer = StepTimer(self._device) if world.size > 1 else None
        with closing(build_step(job, state, world, self._device, self._enter, timer, compared_workers)) as step:
            if self._finished_steps < job.last_step:
                self._enter("data")
                self._feed.seek(cursor, world.assigned)
            while self._finished_steps < job.last_step:
                self._enter("data")
                # The learning rate is read before the step, because the step advances the schedule.
                wait_before_s, lr = self._feed.wait_s, step.lr
                batches = self._feed.next()
                self._bad_rows.note(batches)
                self._enter("compute")
                if self._profile is not None:
                    self._profile.before(world.rank, self._finished_steps + 1)
                data_wait_s = self._feed.wait_s - wait_before_s
                if timer is not None:
                    timer.data_wait_s = data_wait_s
                result = step.run(cursor, batches, plan.global_rows(cursor.step), self._membership.flags())
                self._finished_steps += 1
                if not self._has_stepped:
                    self._record_memory(world)
                if self._profile is not None:
                    self._profile.after(self._finished_steps)
                self._step_log.record_step(
                    cursor,
                    self._finished_steps,
                    result,
                    lr,
                    data_wait_s,
                    stragglers=straggler_reporter,
                )
                cursor = cursor.next(plan.steps_per_epoch)
                if world.size > 1:
                    straggler_reporter.add(self._finished_steps, result.times)
                self._sdc_monitor.compare_parameters(world, self._finished_steps)
                # With local SGD the logical workers train on their own until the next average, and only the average
                # moves `state`: until then there is nothing to save or evaluate, and no flag takes effect.
                if state.step < self._finished_steps:
                    self._call_after_step(world)
                    continue
                if self._intervene(world, self._ends_epoch is not None and self._ends_epoch()):
                    result = result._replace(flags=result.flags | Flags.STOP)
                self._save_if_due(cursor, result)
                self._call_after_step(world)
                self._evaluate(world)
                # An operation on flags takes ten times as long as the test for any flag.
                if result.flags and (flags := self._ending_flags(result.flags)):
                    return flags
                assignment = straggler_reporter.proposed_assignment
                if assignment is not None and self._finished_steps < job.last_step:
                    return assignment
        return Flags(0)

    def _ending_flags(self, flags: Flags) -> Flags:
        """Returns the flags that end the generation after a step, of those that the ranks agreed on."""
        if flags & Flags.STOP:
            return Flags.STOP
        return flags if flags & Flags.REFORM and self._state.step < self._job.last_step else Flags(0)

    def _record_memory(self, world: World) -> None:
        """Writes the event `device_memory` after the first step of this worker, if it is rank 0."""
        self._has_stepped = True
        if world.rank == 0 and (memory := kind_of(self._device).memory(self._device)) is not None:
            gb, of_gb = (round(size / 1e9, 1) for size in memory)
            name = environment.device_label(self._device)
            details = {"step": self._finished_steps, "device": name, "gb": gb, "of_gb": of_gb}
            put_event(self._job.paths, "device_memory", self._job.fence, **details)

    def _save_if_due(self, cursor: Cursor, result: StepResult) -> None:
        """Makes the checkpoint and the snapshot that are due after a step; a collective then.

        Args:
            cursor: Position of the next step in the data.
            result: The result of the step; its flags `STOP` and `SAVE` ask for a checkpoint that is not planned.
        """
        is_planned = self._job.is_checkpoint_due(self._state.step)
        is_snapshot_due = self._job.is_snapshot_due(self._state.step)
        is_requested = bool(result.flags and result.flags & (Flags.STOP | Flags.SAVE))
        if is_planned or is_requested or is_snapshot_due:
            self._state.backend.collect()
        if is_planned or is_requested:
            self._step_log.checkpoint(cursor, "cadence" if is_planned else "extra")
        if is_snapshot_due:
            self._step_log.snapshot()

    def _call_after_step(self, world: World) -> None:
        if self._hooks.after_step is not None:
            self._hooks.after_step(world.rank, self._finished_steps)

    def _evaluate(self, world: World, ends_epoch: bool = False) -> None:
        """Evaluates the state if the workers evaluate, and a checkpoint is planned at its step or the epoch ends early.

        It is a collective. The initial state has no checkpoint and is not evaluated.
        """
        if self._evaluation is None or not self._state.step:
            return
        if not ends_epoch and not self._job.is_checkpoint_due(self._state.step):
            return
        self._enter("evaluate")
        self._evaluation.run(world)
        self._step_log.skip_time()

    def _intervene(self, world: World, ends_epoch: bool = False) -> bool:
        """Lets the driver intervene at the start of the run or the end of an epoch; a collective then.

        The checkpoint of the step is made afterwards, so that it has what the driver has changed.

        Args:
            world: The workers of the generation.
            ends_epoch: Whether the epoch ends before its last step.

        Returns:
            Whether training is over.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        job, state = self._job, self._state
        if not job.is_intervened or (state.step % job.steps_per_epoch and not ends_epoch):
            return False
        self._evaluate(world, ends_epoch)
        self._enter("evaluate")
        change = gather(self._answered() if world.rank == 0 else None, world)[0]
        assert change is not None
        state.apply(change)
        self._step_log.skip_time()
        return bool(change.stops)

    def _answered(self) -> Intervention:
        """Returns the intervention of the present step, for which the driver is asked unless it is on storage."""
        paths, step = self._job.paths, self._state.step
        if (change := read_intervention(paths, step)) is not None and not self._is_outdated(change):
            return change
        _RETRY.call(
            self._put_question,
            OSError,
            f"Writing the model of step {step} for callbacks",
            lambda _: self._membership.report_progress(),
        )
        self._ask(step)
        never = threading.Event()
        while (change := read_intervention(paths, step)) is None or self._is_outdated(change):
            never.wait(poll_interval_s(paths.root) / _POLLS_PER_INTERVAL)
            self._membership.report_progress()
        return change

    def _put_question(self) -> None:
        """Writes what the driver needs for its intervention: the records of the steps, and the model."""
        self._step_log.flush()
        put_question(self._job.paths, self._state.step, self._state.master.state_dict())

    def _is_outdated(self, change: Intervention) -> bool:
        """Returns whether an intervention took the present step for the end of a run that has more epochs now."""
        return change.is_last and not change.stops and self._state.step < self._job.total_steps

    def _exit_drained(self, flags: Flags) -> None:
        """Saves the state of this worker, which exits because it is drained, if `has_to_save_on_exit`.

        Args:
            flags: The flags that ended its last generation; none if it has waited for another one since then.

        Raises:
            PreemptedError: All workers have to leave, or this one has no state yet.
        """
        current_flags = self._membership.flags()
        if self._state.step == NO_STATE:
            raise PreemptedError("This worker has to leave its node before it has received a state.")
        if has_to_save_on_exit(flags, current_flags, self._rank):
            cursor = Cursor.at(self._state.step, self._job.plan.steps_per_epoch)
            self._step_log.checkpoint(cursor, "extra", alone=True)
        if (flags | current_flags) & Flags.SAVE:
            raise PreemptedError(
                f"All workers have to leave their nodes after step {self._state.step}; a checkpoint was written."
            )

    def _enter(self, phase: Phase) -> None:
        """Reports the phase that this worker begins to the membership and to the hook."""
        self._membership.enter(phase)
        if self._hooks.at is not None:
            self._hooks.at(phase, self._rank, self._state.step)


def has_to_save_on_exit(agreed: Flags, current: Flags, rank: int) -> bool:
    """Returns whether a worker that leaves its node has to make a checkpoint of the state.

    If all ranks agreed on `SAVE` in their last step, rank 0 makes it. Otherwise each worker that has received the flag
    since then makes it, because no worker knows whether another one has received the flag.

    Args:
        agreed: The flags that ended the worker's last generation.
        current: The flags that the worker has received now.
        rank: The worker's rank in that generation.
    """
    return rank == 0 if agreed & Flags.SAVE else bool(current & Flags.SAVE)


class StepProfile:
    """Traces the steps that `train.profile_steps` gives; if the trace cannot be written, the run continues without it.

    Args:
        job: The run, with `train.profile_steps`.
        device: Device that computes.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        # The first and the last step to trace, from 1.
        self._first, self._last = job.config.train.profile_steps or (0, 0)
        self._activities = [torch.profiler.ProfilerActivity.CPU, *kind_of(device).profiler_activities]
        self._running: torch.profiler.profile | None = None

    def before(self, rank: int, step: int) -> None:
        """Starts the trace if this is rank 0 and the step is one to trace.

        A rank that becomes rank 0 between the first and the last step starts then.

        Args:
            rank: This rank.
            step: Number of the step that begins, from 1.
        """
        if rank == 0 and self._running is None and self._first <= step <= self._last:
            self._first = step
            self._running = torch.profiler.profile(activities=self._activities)
            self._running.__enter__()

    def after(self, step: int) -> None:
        """Ends the trace after the last step to trace; `step` is the number of the step that is done."""
        if step >= self._last:
            self.end(step)

    def end(self, step: int) -> None:
        """Ends the trace and writes it, if it has started; `step` is the number of the last finished step."""
        running, self._running = self._running, None
        if running is None:
            return
        name = f"steps-{self._first:08d}-{step:08d}.json.gz"
        try:
            running.__exit__(None, None, None)
            with tempfile.TemporaryDirectory(prefix="ray_app-profile-") as folder:
                running.export_chrome_trace(f"{folder}/{name}")
                put_atomic(self._job.paths.profile / name, (Path(folder) / name).read_bytes())
        except Exception as error:
            logger.warning("The trace of steps %d to %d could not be written: %s", self._first, step, error)
            return
        put_event(self._job.paths, "profiled", self._job.fence, step=step, first=self._first, file=f"profile/{name}")


class _Outage:
    """The generations that broke in a row at the same step.

    Attributes:
        since_s: When the first of them broke, in seconds since 1970 (UTC); None once a generation has ended as planned.
    """

    def __init__(self) -> None:
        self.since_s: float | None = None
        self._step: int | None = None
        self._breaks = 0

    def add_break(self, step: int) -> int:
        """Adds a generation that broke after `step` finished steps; returns how many have broken at this step."""
        self._breaks = self._breaks + 1 if step == self._step else 1
        self._step = step
        if self._breaks == 1 or self.since_s is None:
            self.since_s = time.time()
        return self._breaks


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Exempts all objects that exist now from Python's garbage collection inside the block.

    They live as long as the run: imported modules, model and data structures.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
