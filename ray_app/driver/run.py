"""Ray Train's work in a thread; the main thread is for signals and the console.

What the start of a run spends its time on.

The actors that the workers of a run share, on the driver's node: they live as long as it trains.

What tests and drills may put into a run.

One training run from start to summary: refusals, cluster, actors, training, evaluation, record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import ray
from rich.console import Console

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.cluster.ray_private import Node, evaluator_gpus, max_resources, nodes_with_labels, ray_job
from ray_app.cluster.resources import (
    check_object_stores,
    check_window_memory,
    cluster,
    import_in_background,
    shared_bytes,
    workers_that_fit,
)
from ray_app.config.config import Config, default_tracking_uri
from ray_app.driver.finalize import Status, mlflow_status, newest_commit, report_end, summarize
from ray_app.driver.model_export import REGISTRABLE, try_to_register
from ray_app.driver.result import Result
from ray_app.driver.services import (
    EvaluatorClient,
    load_observers,
    make_board,
    make_metrics,
    make_observers,
    make_sampler,
    make_tracker,
)
from ray_app.driver.signals import stop_at_signals
from ray_app.driver.single import exclusive_process, train_single
from ray_app.errors import LeaseLostError, unwrap_app_error
from ray_app.preflight.prepare import Prepared, check_storage, claim, prepare
from ray_app.process import set_variables
from ray_app.runlog.endings import put_summary
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.lease import Lease, acquire_lease
from ray_app.runlog.redaction import redact
from ray_app.storage.files import poll_interval_s
from ray_app.track.mlflow_client import IMPATIENT
from ray_app.track.tensorboard import Board, check_board
from ray_app.track.tracker import Tracker, check_available
from ray_app.train.checkpointing.restore import record_fallback
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags, Phase, RendezvousStatus
from ray_app.train.membership import RendezvousStatus as Gathering
from ray_app.version import __version__
from ray_app.watch.observers import Observers
from ray_app.watch.terminal import RunConsole, SafeConsole, print_end


class Phases:
    """Seconds of each phase, one after the other.

    Args:
        since_s: When the first began, seconds since 1970; None: that is not known, and it is left out.
    """

    def __init__(self, since_s: float | None) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = since_s

    def end(self, phase: str) -> None:
        """A phase ends, and the next begins."""
        now = time.time()
        if self._since_s is not None:
            self.seconds[phase] = now - self._since_s
        self._since_s = now


@dataclass(frozen=True)
class Faults:
    """Where fault tests can make something happen; users have no need of it.

    Args:
        train: In every worker.
        before_evaluation: In the evaluator, before each evaluation.
    """

    train: Hooks = field(default_factory=Hooks)
    before_evaluation: Callable[[Commit], None] | None = None


Observe = Callable[[Job], None]
"""Called in the driver, a few times a second while workers train; what it raises ends the run."""


logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_S, _END_S, _END_PAUSE_S, _ANSWER_S = 0.25, 30.0, 1.0, 5.0
_TRACKING_END_S, _TRACKING_STOP_S = (
    60.0,
    15.0,
)  # who stops a run kills it soon: `ray job stop` after 60 s as ray-app submit has it


def run_training(
    config: Config, console: Console | None = None, faults: Faults = Faults(), observe: Observe | None = None
) -> Result:
    """Trains, evaluates and records one run; starting the same run name again continues it.

    Args:
        config: From `load_config`.
        console: Where progress is shown; not given: standard output.
        faults: For tests.
        observe: See `Observe`.

    Returns:
        The summary, and methods to load models and read metrics. Its status is `interrupted` after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: The configuration is refused; nothing was started or written.
        DataError: The data is refused, likewise; or a row met in mid-run cannot be used.
        RayAppError: The run failed; `summary.json` is written, starting again continues it.
    """
    with open_run(config, console or Console(), faults) as run:
        return run.go(observe)


@contextmanager
def open_run(
    config: Config, console: Console, faults: Faults = Faults(), background: bool = False, since_s: float | None = None
) -> Iterator[Run]:
    """Refuses what can be refused before anything is written, then connects to the cluster and claims the run; see
    `run_training`.

    Args:
        config: The run.
        console, faults: See `run_training`.
        background: Leaves signals, and showing the steps, to whoever is in front.
        since_s: When the command was typed, seconds since 1970, if there was one.
    """
    phases = Phases(since_s)
    phases.end("command")
    if config.tracking.enabled:
        check_available(config)
    check_board(config)
    check_storage(config)
    load_observers(config)
    prepared = prepare(config)
    phases.end("preparation")
    if config.train.strategy != "single":
        import_in_background("ray_app.driver.run")
    interrupted = threading.Event()
    listening = nullcontext() if background else stop_at_signals(interrupted)
    alone = exclusive_process(config, background)
    with (
        alone,
        set_variables(**dict.fromkeys(IMPATIENT)),
        cluster(config) as is_own,
        listening,
    ):  # `ray.init` puts handlers of its own in place
        phases.end("cluster")
        there = (ray.cluster_resources(), ray.nodes(), max_resources()) if ray.is_initialized() else ({}, [], None)
        max_workers = workers_that_fit(config, *there)
        check_window_memory(prepared.job, 1 if config.train.strategy == "single" else max_workers, there[1])
        if needed := shared_bytes(prepared.job):
            check_object_stores(needed, there[1])
        with acquire_lease(prepared.job.paths) as lease:
            prepared = claim(prepared, lease.fence)
            safe = SafeConsole(console)
            safe.report_to(partial(_put_console_failed, prepared.job))
            print_start(safe, prepared, max_workers)
            if prepared.changed_data:
                put_event(prepared.job.paths, "data_changed", lease.fence, changed=list(prepared.changed_data))
            if prepared.changed:
                put_event(prepared.job.paths, "code_changed", lease.fence, changed=list(prepared.changed))
            progress = SafeConsole(Console(quiet=True, force_jupyter=False)) if background else safe
            phases.end("claim")
            yield Run(prepared, lease, max_workers, safe, faults, is_own, interrupted, progress, phases.seconds)


class Run:
    """The parts of one start of a run and how they end; made by `opened`."""

    def __init__(
        self,
        prepared: Prepared,
        lease: Lease,
        max_workers: int,
        console: SafeConsole,
        faults: Faults,
        own_cluster: bool,
        interrupted: threading.Event,
        progress: SafeConsole,
        phases: dict[str, float],
    ) -> None:
        self.job, self._evaluation, self._phases = prepared.job, prepared.evaluation, phases
        self._config = prepared.job.config
        self._max_workers, self._console, self._faults, self._own_cluster = max_workers, console, faults, own_cluster
        self._progress = progress
        self._stops_early, self._is_evaluated = False, True
        self._interrupted = interrupted
        self._error: BaseException | None = None
        self._sampler = make_sampler(self.job)
        self._lease = lease
        lease.on_lost(self._interrupted.set)

    def stop(self) -> None:
        """Asks it to end after the step at hand, with a checkpoint; from any thread."""
        self._interrupted.set()

    def go(self, observe: Observe | None = None) -> Result:
        """Trains to the end; see `run_training`."""
        job = self.job
        facts = {
            "max_workers": self._max_workers,
            "total_steps": job.total_steps,
            "version": __version__,
            "phases": self._phases,
        }
        facts |= {"metric": job.best_metric, "mode": job.best_mode, "ray_job": ray_job()}
        put_event(job.paths, "started", job.fence, **facts)
        tracker, board, observers = make_tracker(job, self._console), make_board(job), make_observers(job)
        for recording in (tracker, board):
            if recording is not None:
                recording.start()
        try:
            with observers.watching(), ExitStack() as stack:
                CheckpointStore(job.paths).clean(job.fence)
                if self._sampler is not None:
                    stack.enter_context(self._sampler)
                following = stack.enter_context(
                    EvaluatorClient(self._evaluation, not self._own_cluster, self._faults.before_evaluation)
                )
                if not self._is_over_and_intact() and not self._interrupted.is_set():
                    if self._config.train.strategy == "single":
                        train_single(
                            job, self._stops, self._sampler, self._progress, following.waiting, self._faults.train
                        )
                    else:
                        self._train(stack, following, observe)
                self._is_evaluated = False  # also if it is interrupted
                self._is_evaluated = following.finish(
                    lambda: self._interrupted.is_set() or self._is_over(), self._console
                )
        except KeyboardInterrupt:
            self._interrupted.set()
        except Exception as error:
            self._error = self._error or unwrap_app_error(error)
        except BaseException:  # the process ends, or who watches over it has given this run up
            for recording in (tracker, board):
                if recording is not None:
                    recording.abandon()
            raise
        return self._end(tracker, board, observers)

    def _end(self, tracker: Tracker | None, board: Board | None, observers: Observers) -> Result:
        """Says, in all places, what came of the run; nothing at all if it belongs to another driver by now."""
        job = self.job
        self._error = self._lease.lost or self._error
        try:
            if isinstance(self._error, LeaseLostError):
                raise self._error
            status = _patiently(self._status)
            _patiently(lambda: self._put_end(status))
            summary = _patiently(lambda: self._put_summary(status))
        except (LeaseLostError, OSError) as error:  # the next start says how it ended
            for recording in (tracker, board):
                if recording is not None:
                    recording.abandon()
            raise self._error or error from error
        facts = report_end(job.paths)
        if board is not None:
            board.close(mlflow_status(status) == "FINISHED", _TRACKING_STOP_S)
        if tracker is not None:
            tracker.close(mlflow_status(status), _TRACKING_STOP_S if self._interrupted.is_set() else _TRACKING_END_S)
            if status in REGISTRABLE and self._config.tracking.registered_model is not None:
                try_to_register(job)
            try:  # with what MLflow calls the run and its model
                summary = _patiently(lambda: self._put_summary(status))
            except OSError as error:
                logger.warning("summary.json has not what MLflow calls the run: %s", error)
        observers.ended(status, summary)
        tracking_uri = redact(default_tracking_uri(self._config)) if tracker is not None else None
        with self._console.guarded():
            warn_of_changed_environment(self._console, job)
            print_end(self._console, job, summary, facts, tracking_uri)
        if self._error is not None:
            raise self._error
        return Result(job.paths.root, summary, job.task)

    def _put_end(self, status: Status) -> None:
        kind = "run_failed" if status == "failed" else status  # `failed` is a failure of the workers
        if not put_event(self.job.paths, kind, self.job.fence, reason=str(self._error) if self._error else None):
            raise OSError(f"the end of the run could not be recorded in {self.job.paths.root}")

    def _put_summary(self, status: Status) -> dict[str, Any]:
        summary = summarize(self.job, status)
        put_summary(self.job.paths, summary)
        return summary

    def _is_complete(self) -> bool:
        newest = newest_commit(self.job)
        return (newest is not None and newest.step >= self.job.total_steps) or self._is_over()

    def _is_over_and_intact(self) -> bool:
        """Whether there is nothing to train, and the newest checkpoint is what was committed: nobody else would
        look.
        """
        if not self._is_complete():
            return False
        CheckpointStore(self.job.paths).load_newest(partial(record_fallback, self.job))
        return self._is_complete()

    def _is_over(self) -> bool:
        """Whether the evaluations say that training is over; looks again until they do."""
        try:
            self._stops_early = self._stops_early or self.job.early_stop() is not None
        except OSError as error:  # a passing outage of the storage
            logger.warning("The evaluations could not be read, will try again: %s", error)
        return self._stops_early

    def _train(self, stack: ExitStack, following: EvaluatorClient, observe: Observe | None) -> None:
        """Trains beside the main thread, which is for signals and the console."""

        # This imports Ray Train and Ray Data, which takes as long as the start of the cluster that it is beside.
        from ray_app.driver.train_thread import TrainThread, start_actors

        job, start = self.job, start_actors(stack, self.job, self._faults.train)
        rendezvous = start.rendezvous
        console = RunConsole(
            job, self._config.scaling.worker_limit, self._progress, following.waiting, make_metrics(job)
        )
        with console as shown, TrainThread(start, self._max_workers) as fitting:
            told, looked_s, bounds = False, time.monotonic(), WaitLimits(job.total_steps)
            while fitting.is_alive():
                if time.monotonic() - looked_s > poll_interval_s(job.paths.root):
                    looked_s = time.monotonic()
                    self._is_over()
                phases = None
                if self._interrupted.is_set() or self._stops_early:
                    if not told:
                        why = "The evaluations say that training is over, stopping" if self._stops_early else "Stopping"
                        self._console.print(f"{why} after this step, with a checkpoint ...")
                    told = True
                    _answer(
                        rendezvous.raise_flags.remote(Flags.STOP)
                    )  # again and again: the rendezvous may have been started anew
                    phases = [beat.phase for beat in _answer(rendezvous.workers.remote()) or []]
                seen = _answer(rendezvous.status.remote())
                self._show(shown, seen)
                if gives_up := bounds.look(time.monotonic(), seen, phases):
                    put_event(job.paths, "workers_given_up", job.fence, reason=gives_up)
                    self._console.print(
                        f"The workers are ended as they are: {gives_up}. Steps since the newest checkpoint are lost."
                    )
                    break
                if observe is not None:
                    observe(job)
                fitting.join(_LOOK_S)
            self._error = fitting.error
            shown.show_last()

    def _show(self, shown: RunConsole, seen: Gathering | None) -> None:
        if seen is None:
            return shown.show(None, "waiting for the rendezvous to answer ...", waits=True)
        if self._sampler is not None and seen.record is not None:
            self._sampler.step = seen.record.step
        return shown.show(seen.record, seen.waiting or "waiting for the workers to start ...", seen.waiting is not None)

    def _stops(self, looks: bool) -> bool:
        """Whether to stop after the step at hand.

        Args:
            looks: Whether to read what the evaluations say, which takes a moment.
        """
        return self._interrupted.is_set() or (self._is_over() if looks else self._stops_early)

    def _status(self) -> Status:
        if self._error is not None:
            return "failed"
        if self._is_over():
            return "stopped_early"
        undecided = not self._is_evaluated and (
            self._interrupted.is_set() or self._config.evaluate.patience is not None
        )
        return "finished" if self._is_complete() and not undecided else "interrupted"


def _answer(asked: ray.ObjectRef) -> Any:
    """What the rendezvous answers; None if it does not for some seconds, on a machine that is overloaded, or out of
    descriptors.
    """
    try:
        return ray.get(asked, timeout=_ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        return None


def _put_console_failed(job: Job, reason: str) -> None:
    put_event(job.paths, "console_failed", job.fence, reason=reason)


def _patiently(work: Callable[[], T]) -> T:
    """Does it again while the storage does not answer, for half a minute."""
    deadline_s = time.monotonic() + _END_S
    while True:
        try:
            return work()
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise
            logger.warning("How the run ended could not be recorded, will try again: %s", error)
            time.sleep(_END_PAUSE_S)


STOP_LIMIT_S, END_LIMIT_S = 15.0, 60.0


class WaitLimits:
    """Says when it is no use to wait any longer for workers that are to end, or for the controller after they have.

    A worker that computes, writes a checkpoint or exchanges gradients is not given up here: the step watchdog looks
    after it.

    Args:
        total_steps: Steps of the run.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._step, self._reason, self._since_s = -1, "", 0.0

    def look(self, now_s: float, seen: RendezvousStatus | None, phases: Collection[Phase] | None) -> str | None:
        """Takes how the run is now.

        Args:
            now_s: When that is, by any clock that does not jump.
            seen: What the rendezvous says; None: it does not answer.
            phases: What the workers do, if the run is to stop.

        Returns:
            Why nothing more is waited for; None while something is.
        """
        reason, limit_s = self._waits_for(seen, phases)
        step = seen.step if seen is not None else self._step
        if reason != self._reason or step != self._step:
            self._reason, self._step, self._since_s = reason, step, now_s
        return f"{reason} for {limit_s:g} s" if reason and now_s - self._since_s >= limit_s else None

    def _waits_for(self, seen: RendezvousStatus | None, phases: Collection[Phase] | None) -> tuple[str, float]:
        if phases is None:
            is_done = seen is not None and seen.step >= self._total_steps and not seen.live and not seen.leaving
            return (
                "all steps are done, all workers have left, and Ray Train's controller has not ended" if is_done else ""
            ), END_LIMIT_S
        if seen is None:
            return "the rendezvous has not answered", STOP_LIMIT_S
        if "data" in phases:
            return "a worker has waited for data", STOP_LIMIT_S
        if not seen.live and not seen.leaving:
            return "there has been no worker, and the controller has not ended", STOP_LIMIT_S
        if not phases:
            return "the workers have formed no group", STOP_LIMIT_S
        return "", STOP_LIMIT_S


_MIX = (
    "Warning: from step {step} on the environment is another, so the bits may differ from an undisturbed run: {before},"
    " now {now}."
)


def print_start(console: SafeConsole, prepared: Prepared, max_workers: int) -> None:
    """Says what is about to run, and where.

    Args:
        console: Where to say it.
        prepared: The run.
        max_workers: As many as fit into the cluster.
    """
    job, config = prepared.job, prepared.job.config
    verb = "Continuing" if prepared.resumes else "Starting"
    console.print(redact(f"{verb} run {job.paths.name} in {job.paths.root}"))
    if (here := ray_job()) is not None and here["page"] is not None:
        named = f" ({here['submission_id']})" if here["submission_id"] else ""
        console.print(f"Ray job {here['job_id']}{named}: {here['page']}")
    if "_ray_pkg_" in str(job.paths.root):
        console.print(
            "Warning: this run is stored inside the job's own copy of the working directory, which Ray removes; set"
            " run.storage_path to a"
            " folder that all nodes share."
        )
    if prepared.changed:
        console.print(
            f"Warning: {job.paths.name} goes on with other code than at its last start: {', '.join(prepared.changed)}."
            f" Its result will"
            " be that of neither; run.changed_code: refuse does not start such a run.",
        )
    if prepared.changed_data:
        console.print(
            f"Warning: the data of {job.paths.name} was changed since its last start:"
            f" {'; '.join(prepared.changed_data)}. Its result and"
            " its evaluations will be of both; run.changed_data: refuse does not start such a run.",
        )
    for line in prepared.data:
        console.print(line)
    for doubt in prepared.warnings:
        console.print(f"Warning: {doubt}")
    passes = (
        f" (a pass over the data has {job.plan.steps_per_epoch:,})"
        if job.steps_per_epoch != job.plan.steps_per_epoch
        else ""
    )
    capped = (
        f" (of {config.scaling.max_workers} asked for, as many as fit now)"
        if max_workers < config.scaling.worker_limit
        else ""
    )
    spares = f" and {config.scaling.standby_workers} spare" if config.scaling.standby_workers else ""
    where = "in this process" if config.train.strategy == "single" else f"up to {max_workers} workers{capped}{spares}"
    console.print(
        f"{job.plan.manifest.num_rows:,} rows, {job.steps_per_epoch:,} steps of {job.plan.global_batch_size} rows per"
        f" epoch{passes},"
        f" {config.train.epochs} epochs; {where}, arithmetic of {job.plan.logical_workers}",
    )
    if (classes := job.plan.classes) is not None:
        console.print(
            f"balanced: in each pass every one of {len(classes.totals)} classes is used {classes.totals.max():,} times"
        )
    nodes = ray.nodes() if ray.is_initialized() else []
    if idle := idle_gpus(config, max_workers, nodes):
        console.print(f"Warning: {idle}")
    if len({node["NodeManagerAddress"] for node in nodes if node["Alive"]}) > 1:
        console.print(
            "A host that is cut off counts as there for about a minute with Ray's defaults; docs/failures.md says how"
            " to shorten it."
        )


def idle_gpus(config: Config, workers: int, nodes: list[Node]) -> str | None:
    """What to say of GPUs of the cluster that neither these workers nor the evaluator use; None where there are
    none.
    """
    scaling = config.scaling
    has = sum(node["Resources"].get("GPU", 0.0) for node in nodes_with_labels(nodes, scaling.label_selector))
    idle = int(has - (workers + scaling.standby_workers) * scaling.gpus_per_worker - evaluator_gpus(config))
    if idle < 1:
        return None
    advice = "Raise scaling.max_workers (all: as many as fit), or leave them to others."
    if not scaling.gpus_per_worker:
        advice = "This run computes on CPUs; set scaling.gpus_per_worker to 1 to train on GPUs."
    return f"{idle} of the {has:g} GPUs of the cluster are not used by this run. {advice}"


def warn_of_changed_environment(console: SafeConsole, job: Job) -> None:
    """Warns of every change of the environment during this start."""
    for event in read_events(job.paths, "environment_changed"):
        if event.fence == job.fence:
            console.print(_MIX.format(**event.details))
