"""One training run from start to summary: checks, cluster, actors, training, evaluation, record.

`run_training` is the function for users. `open_run` does what can fail before anything is written, and claims the run;
`Run.run` trains and records how the run ended. Ray Train's work runs in a thread (`driver/train_thread.py`), because
the main thread is for signals and the console.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import ray
from rich.console import Console

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.cluster.ray_private import Node, nodes_with_labels, ray_job
from ray_app.cluster.rendezvous.actor import RendezvousHandle
from ray_app.cluster.resources import (
    check_object_stores,
    check_window_memory,
    cluster,
    cluster_capacity,
    evaluator_gpus,
    keep_connection,
    shared_bytes,
    wanted_cpus,
    workers_in,
    workers_that_fit,
)
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.variables import NO_PROXY
from ray_app.driver.finalize import RunStatus, newest_commit, report_end, summarize, to_mlflow_status
from ray_app.driver.interventions import Answers, find_intervener
from ray_app.driver.model_export import REGISTRABLE, try_to_register
from ray_app.driver.result import Result
from ray_app.driver.services import EvaluatorClient, load_observers, make_tracker
from ray_app.driver.single import exclusive_process, train_single
from ray_app.errors import LeaseLostError, SilentActorError, unwrap_app_error
from ray_app.preflight.prepare import Prepared, check_storage, claim, prepare
from ray_app.process import import_in_background, set_variables, stop_at_signals
from ray_app.retry import Retry
from ray_app.runlog.history import counted_word
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.lease import Lease, acquire_lease
from ray_app.runlog.output import TextConsole
from ray_app.runlog.redaction import redact
from ray_app.storage.files import poll_interval_s, poll_pause_s, put_json
from ray_app.task.interventions import Intervener
from ray_app.track.mlflow_client import SHORT_TIMEOUTS, OpenRun
from ray_app.track.tracker import EventFileWriter, Tracker, check_available
from ray_app.train.checkpointing.restore import record_fallback
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags, Phase, RendezvousStatus
from ray_app.version import __version__
from ray_app.watch.metrics import RunMetrics
from ray_app.watch.observers import Observers
from ray_app.watch.terminal import RunConsole, SafeConsole, print_end

logger = logging.getLogger(__name__)

T = TypeVar("T")
Observe = Callable[[Job], None]
"""Called in the driver a few times a second while workers train; an exception ends the run."""

STOP_LIMIT_S = 15.0
"""Seconds for which a run that is to stop waits for the same thing."""
END_LIMIT_S = 60.0
"""Seconds for which the driver waits for the controller after all workers have left."""
_CHECK_S = 0.25
_REPLY_TIMEOUT_S = 5.0
_RECORD_RETRY = Retry(1.0, factor=1.0, deadline_s=30.0)
_TRACKING_END_S = 60.0
_TRACKING_STOP_S = 15.0
"""Seconds that the tracking server has at the end of a stopped run; `ray job stop` kills jobs after 60 s."""
_CHANGED_ENVIRONMENT = (
    "Warning: from step {step} on, the environment differs, so the parameters may not be bit-identical to an"
    " undisturbed run's: {before}, now {now}."
)


@dataclass(frozen=True)
class Faults:
    """Hooks with which fault tests and drills disturb a run.

    Args:
        train: Called in every worker.
        before_evaluation: Called in the evaluator before each evaluation.
    """

    train: Hooks = field(default_factory=Hooks)
    before_evaluation: Callable[[Commit], None] | None = None


class StartTimer:
    """Measures the seconds of each part of a start; without its time (s since 1970) the first one is left out."""

    def __init__(self, since_s: float | None) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = since_s

    def end(self, part: str) -> None:
        """Ends a part and begins the next."""
        now = time.time()
        if self._since_s is not None:
            self.seconds[part] = now - self._since_s
        self._since_s = now


def run_training(
    config: Config,
    console: Console | None = None,
    faults: Faults = Faults(),
    observe: Observe | None = None,
    intervene: Intervener | None = None,
) -> Result:
    """Trains, evaluates and records one run; starting the same run name again continues it.

    Args:
        config: From `load_config`.
        console: Where progress is shown; by default standard output.
        observe: See `Observe`.
        intervene: May change the run between two epochs; by default as the task says.

    Returns:
        The summary, and methods to load models and read metrics. Its status is `interrupted` after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: The configuration is refused; nothing was started or written.
        DataError: The data is refused, and nothing was started or written; or a row in mid-run cannot be used.
        RayAppError: The run failed; `summary.json` is written, starting again continues it.
    """
    with open_run(config, console or TextConsole(), faults, intervene=intervene) as run:
        return run.run(observe)


@contextmanager
def open_run(
    config: Config,
    console: Console,
    faults: Faults = Faults(),
    background: bool = False,
    since_s: float | None = None,
    intervene: Intervener | None = None,
    pause_epochs: int | None = None,
) -> Iterator[Run]:
    """Checks all that can be checked before anything is written, connects to the cluster and claims the run.

    Raises what `run_training` raises.

    Args:
        background: Leaves signals and progress to the foreground, such as a notebook.
        since_s: When the command was entered, in seconds since 1970; None without a command.
        intervene: May change the run between two epochs; None: as the task says.
        pause_epochs: Epochs of the run after which this start ends as `interrupted`; None: it goes on to the end.
    """
    timer = StartTimer(since_s)
    timer.end("command")
    if config.tracking.enabled:
        check_available(config)
    check_storage(config)
    load_observers(config)
    # The connection with which `prepare` asks a joined cluster for its size serves the run as well.
    with keep_connection():
        prepared = prepare(config, pause_epochs)
        # The number of workers and of their GPUs is known now.
        config = prepared.job.config
        intervene = find_intervener(prepared.job, intervene)
        timer.end("preparation")
        if config.train.strategy_traits.has_workers:
            import_in_background("ray_app.driver.train_thread")
        interrupted = threading.Event()
        signals = nullcontext() if background else stop_at_signals(interrupted)
        # The signal handlers come last, because `ray.init` installs its own.
        with (
            exclusive_process(config, background),
            set_variables(**dict.fromkeys((*SHORT_TIMEOUTS, *NO_PROXY))),
            cluster(config) as is_own_cluster,
            signals,
        ):
            timer.end("cluster")
            capacity = cluster_capacity()
            max_workers = workers_that_fit(config, capacity)
            check_window_memory(prepared.job, max_workers, capacity.nodes)
            if needed_bytes := shared_bytes(prepared.job):
                check_object_stores(needed_bytes, capacity.nodes)
            if prepared.reading_rates is not None:
                # One CPU for reading is among the wanted ones.
                cpus = capacity.resources.get("CPU", 0.0) - wanted_cpus(config, max_workers) + 1
                shortage = prepared.reading_rates.find_shortage(max_workers, cpus)
                prepared = replace(prepared, warnings=(*prepared.warnings, *shortage))
            with acquire_lease(prepared.job.paths) as lease:
                prepared = claim(prepared, lease.fence)
                safe_console = SafeConsole(console)
                console_failed = partial(put_event, prepared.job.paths, "console_failed", lease.fence)
                safe_console.report_to(lambda reason: console_failed(reason=reason))
                print_start(safe_console, prepared, max_workers)
                if prepared.changed_data:
                    put_event(prepared.job.paths, "data_changed", lease.fence, changed=list(prepared.changed_data))
                if prepared.changed_code:
                    put_event(prepared.job.paths, "code_changed", lease.fence, changed=list(prepared.changed_code))
                quiet_console = SafeConsole(TextConsole(quiet=True, force_jupyter=False))
                timer.end("claim")
                consoles = safe_console, quiet_console if background else safe_console
                start_s = timer.seconds
                yield Run(
                    prepared, lease, max_workers, consoles, faults, is_own_cluster, interrupted, start_s, intervene
                )


class Run:
    """One start of a run, made by `open_run`.

    Args:
        max_workers: Maximum number of workers that fit into the cluster.
        consoles: The console for messages, and that for the progress of the steps.
        is_own_cluster: Whether the driver started the cluster, which then ends with it.
        interrupted: Set when the run is to stop.
        start_s: Seconds of each part of the start.
        intervene: May change the run between two epochs; None: nothing does.
    """

    def __init__(
        self,
        prepared: Prepared,
        lease: Lease,
        max_workers: int,
        consoles: tuple[SafeConsole, SafeConsole],
        faults: Faults,
        is_own_cluster: bool,
        interrupted: threading.Event,
        start_s: dict[str, float],
        intervene: Intervener | None = None,
    ) -> None:
        self.job = replace(prepared.job, is_intervened=intervene is not None)
        self._answers = Answers(self.job, intervene) if intervene is not None else None
        self._config = prepared.job.config
        self._evaluation_job, self._constant_scores = prepared.evaluation_job, dict(prepared.constant_scores)
        self._start_s = start_s
        self._max_workers = max_workers
        self._console, self._progress = consoles
        self._faults = faults
        self._is_own_cluster = is_own_cluster
        self._stops_early, self._is_evaluated = False, True
        self._interrupted = interrupted
        self._error: BaseException | None = None
        self._lease = lease
        lease.on_lost(self._interrupted.set)
        # A program opens an MLflow run in its own thread.
        is_tracked = self._config.tracking.enabled
        self._mlflow_run = OpenRun.find(default_tracking_uri(self._config)) if is_tracked else OpenRun()

    def stop(self) -> None:
        """Asks the run to end after the present step, with a checkpoint; from any thread."""
        self._interrupted.set()

    def run(self, observe: Observe | None = None) -> Result:
        """Trains to the end; see `run_training`."""
        job = self.job
        facts = {
            "max_workers": self._max_workers,
            "total_steps": job.total_steps,
            "version": __version__,
            "phases": self._start_s,
            "metric": job.best_metric,
            "mode": job.best_mode,
            "constant": self._constant_scores,
            "ray_job": ray_job(),
        }
        put_event(job.paths, "started", job.fence, **facts)
        tracker = make_tracker(job, self._console, self._mlflow_run)
        board = EventFileWriter(job.paths, job.config) if job.config.tracking.tensorboard else None
        observers = Observers(job, load_observers(job.config))
        recorders = [recorder for recorder in (tracker, board) if recorder is not None]
        for recorder in recorders:
            recorder.start()
        try:
            with observers.watching(), ExitStack() as stack:
                CheckpointStore(job.paths).clean(job.fence)
                evaluator = stack.enter_context(
                    EvaluatorClient(self._evaluation_job, not self._is_own_cluster, self._faults.before_evaluation)
                )
                if not self._is_trained_and_intact() and not self._interrupted.is_set():
                    if self._config.train.strategy_traits.has_workers:
                        self._train(stack, evaluator, observe)
                    else:
                        train_single(
                            job, self._stops, self._progress, evaluator.list_pending, self._faults.train, self._answers
                        )
                # The evaluation counts as incomplete until `finish` returns, also if it is interrupted.
                self._is_evaluated = False
                self._is_evaluated = evaluator.finish(
                    lambda: self._interrupted.is_set() or self._poll_early_stop(), self._console
                )
        except KeyboardInterrupt:
            self._interrupted.set()
        except Exception as error:
            self._error = self._error or unwrap_app_error(error)
        except BaseException:
            # The process ends, or the code that watches over it has abandoned this run.
            for recorder in recorders:
                recorder.abandon()
            raise
        return self._end(tracker, board, observers)

    def _end(self, tracker: Tracker | None, board: EventFileWriter | None, observers: Observers) -> Result:
        """Records how the run ended, in all places; nothing is written if it belongs to another driver by now."""
        job = self.job
        self._error = self._lease.lost or self._error
        try:
            if isinstance(self._error, LeaseLostError):
                raise self._error
            status = _retry(self._status)
            _retry(lambda: self._put_end(status))
            summary = _retry(lambda: _put_new_summary(job, status))
        except (LeaseLostError, OSError) as error:
            # The next start records how this one ended.
            for recorder in (tracker, board):
                if recorder is not None:
                    recorder.abandon()
            raise self._error or error from error
        logger.info("Run %s has ended at step %s: %s.", job.paths.name, summary.get("steps"), status)
        facts = None if job.pause_step is not None and status == "interrupted" else report_end(job.paths)
        if board is not None:
            board.close(to_mlflow_status(status), _TRACKING_STOP_S)
        if tracker is not None:
            tracker.close(to_mlflow_status(status), _TRACKING_STOP_S if self._interrupted.is_set() else _TRACKING_END_S)
            if status in REGISTRABLE and self._config.tracking.registered_model is not None:
                try_to_register(job)
            # Only now the ids of the run and its model in MLflow are known, so the summary is written again.
            try:
                summary = _retry(lambda: _put_new_summary(job, status))
            except OSError as error:
                logger.warning("summary.json lacks the run's ID in MLflow: %s", error)
        observers.ended(status, summary)
        tracking_uri = redact(default_tracking_uri(self._config)) if tracker is not None else None
        with self._console.guarded():
            for event in read_events(job.paths, "environment_changed"):
                if event.fence == job.fence:
                    self._console.print(_CHANGED_ENVIRONMENT.format(**event.details))
            print_end(self._console, job, summary, facts, tracking_uri)
        if self._error is not None:
            raise self._error
        return Result(job.paths.root, summary, job.task)

    def _put_end(self, status: RunStatus) -> None:
        # The event `failed` is a failure of workers, after which the run may go on.
        kind = "run_failed" if status == "failed" else status
        if not put_event(self.job.paths, kind, self.job.fence, reason=str(self._error) if self._error else None):
            raise OSError(f"the end of the run could not be recorded in {self.job.paths.root}")

    def _is_trained(self, last_step: int) -> bool:
        newest = newest_commit(self.job)
        return (newest is not None and newest.step >= last_step) or self._poll_early_stop()

    def _is_trained_and_intact(self) -> bool:
        """Returns whether there is nothing to train, and verifies the newest checkpoint, which no restore does then."""
        if not self._is_trained(self.job.last_step):
            return False
        store = CheckpointStore(self.job.paths)
        store.load_newest(partial(record_fallback, self.job), read=store.open_verified)
        return self._is_trained(self.job.last_step)

    def _poll_early_stop(self) -> bool:
        """Reads the evaluations until they have ended training, and returns whether they have."""
        try:
            self._stops_early = self._stops_early or self.job.early_stop() is not None
        except OSError as error:
            # The storage may fail for a while; the next call reads again.
            logger.warning("The evaluations could not be read, trying again: %s", error)
        return self._stops_early

    def _train(self, stack: ExitStack, evaluator: EvaluatorClient, observe: Observe | None) -> None:
        """Trains in another thread, and shows progress and passes on a stop in this one."""
        # This imports Ray Train and Ray Data, which takes as long as the start of the cluster that it overlaps with.
        from ray_app.driver.train_thread import TrainThread, start_actors

        job = self.job
        worker_args = start_actors(stack, job, self._faults.train)
        rendezvous = RendezvousHandle(worker_args.rendezvous, _REPLY_TIMEOUT_S)
        max_workers, metrics = self._config.scaling.worker_limit, RunMetrics(job.paths.name)
        console = RunConsole(job, max_workers, self._progress, evaluator.list_pending, metrics)
        with console as run_console, TrainThread(worker_args, self._max_workers) as thread:
            is_stop_printed = False
            next_poll_s = time.monotonic()
            limits = WaitLimits(job.last_step)
            while thread.is_alive():
                if (began_s := time.monotonic()) >= next_poll_s:
                    self._poll_early_stop()
                    next_poll_s = began_s + poll_pause_s(poll_interval_s(job.paths.root), time.monotonic() - began_s)
                phases = None
                if self._interrupted.is_set() or self._stops_early:
                    if not is_stop_printed:
                        why = "The evaluations end the training early, stopping" if self._stops_early else "Stopping"
                        self._console.print(f"{why} after this step, with a checkpoint ...")
                    is_stop_printed = True
                    # The flag is sent at every turn, because the rendezvous may have been restarted and lost it.
                    _answer(lambda: rendezvous.raise_flags(Flags.STOP))
                    phases = [heartbeat.phase for heartbeat in _answer(rendezvous.workers) or []]
                status = _answer(rendezvous.status)
                run_console.show_status(status)
                if exceeded := limits.check(time.monotonic(), status, phases):
                    put_event(job.paths, "workers_abandoned", job.fence, reason=exceeded)
                    self._console.print(
                        f"The workers are ended at once: {exceeded}. Steps since the newest checkpoint are lost."
                    )
                    break
                if self._answers is not None:
                    self._answers.poll()
                if observe is not None:
                    observe(job)
                thread.join(_CHECK_S)
            self._error = thread.error
            run_console.show_last()

    def _stops(self, reads_evaluations: bool) -> bool:
        """Returns whether to stop after this step; reading the evaluations (`reads_evaluations`) takes a moment."""
        return self._interrupted.is_set() or (self._poll_early_stop() if reads_evaluations else self._stops_early)

    def _status(self) -> RunStatus:
        if self._error is not None:
            return "failed"
        if self._poll_early_stop():
            return "stopped_early"
        # Without all evaluations it is not known whether the run would have stopped early.
        is_undecided = not self._is_evaluated and (
            self._interrupted.is_set() or self._config.evaluate.patience is not None
        )
        return "finished" if self._is_trained(self.job.total_steps) and not is_undecided else "interrupted"


def _put_new_summary(job: Job, status: RunStatus) -> dict[str, Any]:
    summary = summarize(job, status)
    put_json(job.paths.summary, summary)
    return summary


def _answer(call: Callable[[], T]) -> T | None:
    """Returns the rendezvous' answer; None if it does not answer in time, such as without free CPUs."""
    try:
        return call()
    except SilentActorError:
        return None


def _retry(work: Callable[[], T]) -> T:
    """Returns the result of a function, which is called again for half a minute while the storage fails."""
    return _RECORD_RETRY.call(work, OSError, "Recording the end of the run")


class WaitLimits:
    """Decides when to stop waiting for workers that are to end, or for the controller after they have ended.

    A worker that computes, writes a checkpoint or reduces gradients has no limit here: the step watchdog covers it.
    """

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._step, self._since_s = -1, 0.0
        self._reason = ""

    def check(self, now_s: float, status: RendezvousStatus | None, phases: Collection[Phase] | None) -> str | None:
        """Returns the limit that is exceeded, as a message; None if none is.

        Args:
            now_s: The time, by any clock that does not jump.
            status: The rendezvous' status; None if it does not reply.
            phases: The phases of the workers if the run is to stop; otherwise None.
        """
        reason = self._waits_for(status, phases)
        limit_s = END_LIMIT_S if phases is None else STOP_LIMIT_S
        step = status.step if status is not None else self._step
        if reason != self._reason or step != self._step:
            self._reason = reason
            self._step, self._since_s = step, now_s
        return f"{reason} for {limit_s:g} s" if reason and now_s - self._since_s >= limit_s else None

    def _waits_for(self, status: RendezvousStatus | None, phases: Collection[Phase] | None) -> str:
        """Returns what the run waits for; an empty text if there is no limit for it."""
        has_workers = status is None or bool(status.live or status.draining)
        if phases is None:
            has_ended = status is not None and status.step >= self._last_step and not has_workers
            reason = "all steps are done and all workers have exited, but Ray Train's controller has not ended"
            return reason if has_ended else ""
        if status is None:
            return "the rendezvous has not answered"
        if "data" in phases:
            return "a worker has waited for data"
        if not has_workers:
            return "there has been no worker, but the controller has not ended"
        return "" if phases else "the workers have not formed a group"


def print_start(console: SafeConsole, prepared: Prepared, max_workers: int) -> None:
    """Prints the run that starts, its data, its warnings and the `max_workers` workers that fit into the cluster."""
    job, config = prepared.job, prepared.job.config
    verb = "Continuing" if prepared.resumes else "Starting"
    console.print(redact(f"{verb} run {job.paths.name} in {job.paths.root}"))
    if (submission := ray_job()) is not None and submission["page"] is not None:
        submission_id = f" ({submission['submission_id']})" if submission["submission_id"] else ""
        console.print(f"Ray job {submission['job_id']}{submission_id}: {submission['page']}")
    warnings = list[str]()
    if "_ray_pkg_" in str(job.paths.root):
        warnings.append(
            "the run is stored inside the job's copy of the working directory, which Ray removes; set run.storage_path"
            " to a folder that all nodes share."
        )
    if prepared.changed_code:
        warnings.append(
            f"{job.paths.name} continues with different code or defaults: {', '.join(prepared.changed_code)}. Its"
            " result will match neither version; run.changed: refuse does not start such a run."
        )
    if prepared.changed_data:
        warnings.append(
            f"the data of {job.paths.name} changed since its last start: {'; '.join(prepared.changed_data)}. Its result"
            " and its evaluations will mix both; run.changed: refuse does not start such a run."
        )
    branch = [redact(f"{prepared.branch}.")] if prepared.branch is not None else []
    before, after = ((f"Warning: {text}" for text in texts) for texts in (warnings, prepared.warnings))
    for line in [*branch, *before, *prepared.columns, *after]:
        console.print(line)
    passes = ""
    if job.steps_per_epoch != job.plan.steps_per_epoch:
        passes = f" (a pass over the data has {job.plan.steps_per_epoch:,})"
    console.print(
        f"{job.plan.manifest.num_rows:,} rows, {job.steps_per_epoch:,} steps of {job.plan.global_batch_size} rows per"
        f" epoch{passes}, {counted_word(config.train.epochs, 'epoch')}; {_workers_text(config, max_workers)},"
        f" arithmetic of {job.plan.logical_workers}"
    )
    if (uses := job.plan.describe_uses(config.data.sources)) is not None:
        console.print(uses)
    nodes = ray.nodes() if ray.is_initialized() else []
    if use := describe_use(config, max_workers, nodes):
        console.print(use)
    if len({node["NodeManagerAddress"] for node in nodes if node["Alive"]}) > 1:
        console.print(
            "With Ray's defaults, a host that is cut off counts as alive for about a minute; docs/failures.md says how"
            " to shorten this."
        )


def _workers_text(config: Config, max_workers: int) -> str:
    """Returns where the run trains, such as `up to 4 workers and 1 standby`."""
    scaling = config.scaling
    amount = scaling.worker_gpus
    devices = "a GPU" if amount == 1 else f"{amount:g} GPU"
    if not config.train.strategy_traits.has_workers:
        return f"in this process{' on a GPU' if amount else ''}"
    capped = ""
    if max_workers < scaling.worker_limit:
        capped = f" (of {scaling.max_workers} configured; no more fit now)"
    standbys = f" and {scaling.standby_workers} standby" if scaling.standby_workers else ""
    return f"up to {max_workers} workers{capped}{standbys}{f', each with {devices}' if amount else ''}"


def describe_use(config: Config, workers: int, nodes: list[Node]) -> str | None:
    """Returns what the run reserves of the cluster, and what stays idle; None without a cluster.

    GPUs and CPUs are those of the nodes on which workers may run.

    Args:
        config: The run's configuration.
        workers: The largest number of workers.
        nodes: As `ray.nodes()` returns them.
    """
    scaling, alive = config.scaling, [node for node in nodes if node["Alive"]]
    labeled = nodes_with_labels(nodes, scaling.label_selector)
    if not labeled:
        return None
    processes = workers + scaling.standby_workers if config.train.strategy_traits.has_workers else 0
    reserved = {"GPU": processes * scaling.worker_gpus + evaluator_gpus(config), "CPU": wanted_cpus(config, processes)}
    used, idle = [], []
    for name, number in reserved.items():
        if not (total := sum(node["Resources"].get(name, 0.0) for node in labeled)):
            continue
        used.append(f"{min(number, total):g} of {total:g} {name}s")
        if (unused := int(total - number + 1e-6)) > 0:
            idle.append(f"{unused} {name}{'s' if unused > 1 else ''}")
    fitting = [node for node in labeled if workers_in(node["Resources"], scaling) >= 1]
    if processes and len(fitting) < len(alive):
        names = ", ".join(str(node["NodeManagerAddress"]) for node in alive if node not in fitting)
        idle.append(f"nodes on which no worker fits (of {len(alive)}): {names}")
    text = f"The run uses at most {' and '.join(used)} of the cluster{'; idle: ' * bool(idle)}{', '.join(idle)}."
    if not any("GPU" in part for part in idle):
        return text
    advice = "Raise scaling.max_workers (all: as many as fit) to use them."
    if not scaling.worker_gpus:
        advice = "The run computes on CPUs; set scaling.gpus_per_worker to 1 to train on GPUs."
    return f"Warning: {text} {advice}"
