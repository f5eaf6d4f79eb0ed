"""The evaluator actor, which watches the checkpoint store, scores committed checkpoints, and writes a file per step.

It shares only the run directory with the trainer, so neither waits for the other. A pin in that directory names the
checkpoints that it still needs, and an evaluation is written once, by the first evaluator that finishes it. If the
cluster outlives the driver, so does the evaluator: when the driver is gone it evaluates what is committed, has the end
of the run recorded, and ends itself.

With `evaluate.workers` above 1 the evaluator has further actors (`ScoringPool`), and all score parts of the data
set. The parts consist of chunks that do not depend on the number of actors, so the metrics are bit-identical.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from torch import Tensor

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.data.ray_tasks import MAX_DEATHS, fetch_auto, process_died_error
from ray_app.data.reader import Fetch, fetch_in_process, load_all
from ray_app.devices import HOST, assigned_device, kind_of
from ray_app.errors import DamagedError, DataError, RunHeldError, is_refusal, unwrap_app_error
from ray_app.evaluate.job import EvaluationJob, last_evaluated, pending_commits
from ray_app.process import keep_freed_memory
from ray_app.runlog.evaluations import Evaluation, evaluated_steps, put_evaluation
from ray_app.runlog.journal import PendingEvents, put_event, read_events
from ray_app.runlog.lease import LIFE_S, LeaseWatch, is_taken_over
from ray_app.runlog.output import Output
from ray_app.runlog.redaction import register_run_secrets
from ray_app.storage.files import poll_interval_s
from ray_app.task import environment
from ray_app.task.metrics import Chunk, combine, score
from ray_app.task.ragged import Arrays

logger = logging.getLogger(__name__)

_NAMESPACE = "ray_app"
PIN_LIFE_S = 1500.0
"""Seconds that a pin outlives the evaluator, by the evaluator's clock.

They are the ten minutes in which Ray restarts the evaluator, and the quarter of an hour by which clocks may differ.
"""
_MAX_RETRY_S = 10.0
_CHECKS_PER_LEASE = 10
"""Checks of the driver's lease during the time for which a lease is valid."""
_START_S = 30.0
"""Seconds for which the first evaluation waits for the actors of a `ScoringPool`; it begins without the others."""
_PARTS_PER_ACTOR = 8
"""Parts of the data set for each actor of a `ScoringPool`, so that a fast actor scores more than a slow one."""


class Evaluator:
    """Follows the checkpoints of one run until it is stopped. An actor, see `start_evaluator`.

    Args:
        fetch: Runs the read tasks.
        before_evaluation: Called before each evaluation, for fault tests.
        when_orphaned: Called with the run's directory when the driver is gone and everything is evaluated, and again if
            it raises `RunHeldError` or `OSError`. Without it the driver is not watched, and the evaluator ends with the
            driver.

    Attributes:
        stopped: Is set when the evaluator ends.
        driver: The state of the driver's lease, as `LeaseWatch.poll` returns it.
    """

    def __init__(
        self,
        job: EvaluationJob,
        fetch: Fetch = fetch_auto,
        before_evaluation: Callable[[Commit], None] | None = None,
        when_orphaned: Callable[[str], object] | None = None,
    ) -> None:
        self._job, self._fetch = job, fetch
        self._before_evaluation, self._when_orphaned = before_evaluation, when_orphaned
        register_run_secrets(job.paths.config)
        self._store = CheckpointStore(job.paths)
        self._pending_events = PendingEvents(job.paths)
        self.stopped = threading.Event()
        self.driver = "held"
        self._error: DataError | str | None = None
        self._is_start_recorded = False
        self._actor, name = _this_actor(), job.name or "evaluator"
        self._output: Output | None = None
        if self._actor is not None:
            self._output = Output(job.paths, job.fence, f"{name}-{os.getpid()}", lambda: name)
            keep_freed_memory()
        self._pool = ScoringPool(job, job.section.workers - 1, job.fence) if job.section.workers > 1 else None
        self._scorer = _Scorer(job)
        self._arrays: Arrays | None = None
        self._done_step = last_evaluated(evaluated_steps(job.paths, job.name))
        loops = [self._follow, self._renew, *([self._watch] if when_orphaned else [])]
        self._threads = [threading.Thread(target=loop, name=loop.__name__, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def error(self) -> DataError | str | None:
        """Returns why the evaluator has failed, as an error if the data is the cause; None while it works."""
        return self._error

    def stop(self) -> None:
        """Ends the evaluator after the present evaluation."""
        self.stopped.set()
        for thread in self._threads:
            thread.join()
        self._pending_events.flush()
        if self._output is not None:
            self._output.close()

    def _record_start(self, commit: Commit) -> None:
        """Records once that this process evaluates, before its first evaluation.

        A process that dies while it waits has not died at a checkpoint.

        Args:
            commit: The next checkpoint.

        Raises:
            ProcessDiedError: Several processes before it died at the same checkpoint; a lost node does not count.
        """
        if self._actor is None or self._is_start_recorded:
            return
        job, context = self._job, ray.get_runtime_context()
        earlier = [
            e
            for e in read_events(job.paths, "evaluator_started")
            if (e.fence, e.details["by"]) == (job.fence, job.evaluator_id)
        ]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        facts = {
            "by": job.evaluator_id,
            "node": context.get_node_id(),
            "pid": os.getpid(),
            "after_step": self._done_step,
        }
        self._is_start_recorded = put_event(job.paths, "evaluator_started", job.fence, **facts)
        if count_deaths_in_a_row([e.details for e in earlier], self._done_step, alive) >= MAX_DEATHS:
            reader, rows = job.data.reader, job.data.manifest.num_rows
            raise process_died_error(
                f"while it evaluated the checkpoint after step {commit.step} on {rows:,} rows of {reader.root}"
            )

    def _follow(self) -> None:
        self._scorer.use_device()
        poll_s = wait_s = poll_interval_s(self._job.paths.root)
        while not self.stopped.is_set():
            try:
                if self.driver == "superseded":
                    return self._leave()
                self._pending_events.flush()
                # After a failure only the end of the driver is waited for.
                waiting = pending_commits(self._job) if self._error is None else []
                if waiting:
                    self._record_start(waiting[0])
                    self._put_pin(waiting[0].step - 1)
                    self._evaluate(waiting[0], len(waiting) - 1)
                    wait_s = 0.0
                elif self.driver == "over":
                    return self._end_of_driver()
                else:
                    wait_s = poll_s
            # The driver lives after all, or another process closes the run at this moment.
            except RunHeldError as error:
                logger.warning("The evaluator continues: %s", error)
                wait_s = LIFE_S / _CHECKS_PER_LEASE
            # The storage or the cluster may fail for a while.
            except (OSError, ray.exceptions.RayError) as error:
                logger.warning("The evaluator tries again: %s", error)
                wait_s = min(_MAX_RETRY_S, 2 * max(wait_s, poll_s))
            except Exception as error:
                logger.exception("The evaluator gives up")
                cause, wait_s = unwrap_app_error(error), poll_s
                self._error = (
                    cause if isinstance(cause, DataError) and is_refusal(cause) else f"{type(cause).__name__}: {cause}"
                )
            self.stopped.wait(wait_s)
        return None

    def _renew(self) -> None:
        """Keeps the pin alive, however long one evaluation takes."""
        while not self.stopped.wait(PIN_LIFE_S / 25):
            try:
                self._put_pin(self._done_step)
            except OSError as error:
                logger.warning("The evaluator's pin could not be renewed, trying again: %s", error)

    def _watch(self) -> None:
        """Watches whether the driver that started this evaluator lives, also after it seemed to be gone."""
        job, observer = self._job, LeaseWatch(self._job.paths, self._job.fence)
        while not self.stopped.wait(LIFE_S / _CHECKS_PER_LEASE):
            try:
                lease_state = observer.poll()
                if lease_state == "superseded" and not is_taken_over(job.paths, job.fence):
                    lease_state = "over"
            except OSError as error:
                logger.warning("The driver's lease could not be read, trying again: %s", error)
                continue
            self.driver = lease_state

    def _end_of_driver(self) -> None:
        assert self._when_orphaned is not None
        try:
            self._when_orphaned(self._job.run_root)
        # The caller tries again, since these errors may pass.
        except (RunHeldError, OSError):
            raise
        except Exception:
            logger.exception("The run could not be closed")
        self._leave()

    def _leave(self) -> None:
        """Ends this actor for good, because no other process ends a detached actor."""
        self.stopped.set()
        if self._output is not None:
            self._output.close()
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)

    def _put_pin(self, done_step: int) -> None:
        """Pins the checkpoints that are still needed, which are those after `done_step`."""
        self._done_step = done_step
        self._store.put_pin(self._job.evaluator_id, self._job.make_pin(done_step, time.time() + PIN_LIFE_S))

    def _evaluate(self, commit: Commit, behind: int) -> None:
        job, started_s = self._job, time.perf_counter()
        if self._before_evaluation is not None:
            self._before_evaluation(commit)
        try:
            state = self._store.load_model(commit)
            self._scorer.load(state)
        except DamagedError as error:
            self._record_skipped(commit, str(error))
            self._store.mark_bad(commit, str(error))
            return
        # Retention has removed the checkpoint meanwhile.
        except FileNotFoundError:
            return
        if self._arrays is None:
            self._arrays = load_all(self._fetch, job.data).arrays
            if self._pool is not None:
                self._arrays = self._pool.share(self._arrays)
        manifest, score_part = job.data.manifest, partial(self._scorer.score, self._arrays)
        chunks = score_part(0, 1) if self._pool is None else self._pool.score(state, score_part)
        scores = combine(job.task, chunks)
        # A driver that waits for this evaluation may end this process as soon as it is recorded.
        if self._output is not None:
            self._output.copy()
        now_s = time.time()
        evaluation = Evaluation(
            step=commit.step,
            epoch=commit.epoch,
            params_digest=commit.params_digest,
            rows=manifest.num_rows,
            duration_s=time.perf_counter() - started_s,
            time_s=now_s,
            data_digest=manifest.digest,
            behind=behind,
            lag_s=now_s - commit.time_s,
            **scores.record(job.task.classes),
        )
        if put_evaluation(job.paths, evaluation, job.name):
            details = {"by": job.name} if job.name else {}
            put_event(
                job.paths,
                "evaluated",
                job.fence,
                step=commit.step,
                metrics=evaluation.metrics,
                duration_s=evaluation.duration_s,
                **details,
            )

    def _record_skipped(self, commit: Commit, reason: str) -> None:
        details = {"by": self._job.name} if self._job.name else {}
        self._pending_events.put("evaluation_skipped", self._job.fence, step=commit.step, reason=reason, **details)


class _Scorer:
    """Scores parts of the evaluation data with the model of a checkpoint, on the device of this process.

    Args:
        job: What is evaluated.
    """

    def __init__(self, job: EvaluationJob) -> None:
        self._job = job
        environment.set_threads_and_kernels(job.section.threads, job.deterministic)
        self._device = assigned_device(ray.get_gpu_ids()) if job.section.num_gpus else HOST
        self.use_device()
        self._model = job.task.build_model().to(self._device)

    def use_device(self) -> None:
        """Selects the device for the calling thread, which otherwise uses the first GPU."""
        kind_of(self._device).use(self._device)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads the parameters and buffers of a checkpoint."""
        self._model.load_state_dict(state)

    def score(self, arrays: Arrays, part: int, parts: int) -> Iterator[Chunk]:
        """Scores every `parts`-th chunk of the data, see `score`; a failed device ends the process of an actor."""
        job, manifest = self._job, self._job.data.manifest
        where, fixed = (job.section.batch_size, self._device, part, parts), job.section.fixed_batches
        try:
            yield from score(
                job.task, self._model, arrays, *where, fixed=fixed, manifest=manifest, precision=job.precision
            )
        except Exception as error:
            if (fault := environment.find_device_fault(error)) is None or _this_actor() is None:
                raise
            put_event(job.paths, "device_fault", job.fence, name=fault.node, device=fault.device, reason=str(fault))
            # Ray starts another process for the actor.
            os._exit(1)


class _ScoringActor:
    """Scores parts of the evaluation data for another process. An actor of a `ScoringPool`.

    Args:
        job: What is evaluated.
        fence: The fence under which its output is added to the run's; None if it is not.
    """

    def __init__(self, job: EvaluationJob, fence: int | None) -> None:
        register_run_secrets(job.paths.config)
        name = job.name or "evaluator"
        self._output: Output | None = None
        if fence is not None:
            self._output = Output(job.paths, fence, f"{name}-{os.getpid()}", lambda: name)
        keep_freed_memory()
        self._scorer = _Scorer(job)
        self._state_number: int | None = None

    def started(self) -> None:
        """Returns once the actor has started."""

    def score(
        self, state_number: int, states: list[ray.ObjectRef], arrays: Arrays, part: int, parts: int
    ) -> list[Chunk]:
        """Scores a part of the data.

        Args:
            state_number: The number of the model state; a state is loaded once.
            states: A reference to the model state.
            arrays: Every decoded field.
            part, parts: See `score`.
        """
        self._scorer.use_device()
        if state_number != self._state_number:
            self._scorer.load(ray.get(states[0]))
            self._state_number = state_number
        chunks = list(self._scorer.score(arrays, part, parts))
        if self._output is not None:
            self._output.copy()
        return chunks


def score_parts(
    actors: Sequence[Callable[[int], ray.ObjectRef]],
    parts: int,
    score_part: Callable[[int], Iterable[Chunk]] | None = None,
) -> list[Chunk]:
    """Scores the parts of a data set in actors and, with `score_part`, in this process; returns the chunks of all.

    The part of an actor that fails is scored by another one. Each actor has two parts, so that none waits for this
    process.

    Args:
        actors: For each actor the function that lets it score a part.
        parts: Number of parts.
        score_part: Scores a part here.

    Raises:
        ray.exceptions.RayError: All actors failed, and this process does not score.
        RayAppError: The data or user code is to blame.
    """
    waiting, idle = list(range(parts)), [*actors, *actors]
    chunks: list[Chunk] = []
    running: dict[ray.ObjectRef, tuple[Callable[[int], ray.ObjectRef], int]] = {}
    while waiting or running:
        while waiting and idle:
            submit, part = idle.pop(0), waiting.pop()
            running[submit(part)] = submit, part
        scores_here = score_part is not None and bool(waiting)
        if score_part is not None and waiting:
            chunks += score_part(waiting.pop())
        elif not running:
            raise ray.exceptions.RayError("all actors of the evaluation have failed")
        done, _ = ray.wait([*running], timeout=0 if scores_here else None) if running else ([], [])
        for reference in done:
            submit, part = running.pop(reference)
            try:
                chunks += ray.get(reference)
                idle.append(submit)
            except ray.exceptions.RayTaskError as error:
                raise unwrap_app_error(error) from error
            except ray.exceptions.RayError as error:
                logger.warning("An actor of the evaluation failed, other actors score its part: %s", error)
                waiting.append(part)
    return chunks


class ScoringPool:
    """Actors that score a data set together, each with the resources of an evaluator.

    Args:
        job: What is evaluated.
        size: Number of actors.
        fence: See `_ScoringActor`.
    """

    def __init__(self, job: EvaluationJob, size: int, fence: int | None = None) -> None:
        options = _actor_options(job) | {"max_restarts": -1}
        actors = [ray.remote(_ScoringActor).options(**options).remote(job, fence) for _ in range(size)]
        self._starting = {actor.started.remote(): actor for actor in actors}
        self._actors: list[ActorHandle] = []
        self._arrays: ray.ObjectRef | None = None
        self._state_number = 0
        self._wait_s = _START_S

    def share(self, arrays: Arrays) -> Arrays:
        """Puts the data into Ray's object store, of which each node maps one copy, and returns that copy."""
        self._arrays = ray.put(arrays)
        return cast(Arrays, ray.get(self._arrays))

    def score(
        self, state: Mapping[str, Tensor], score_part: Callable[[int, int], Iterable[Chunk]] | None = None
    ) -> list[Chunk]:
        """Scores the shared data with a model state; returns the chunks in any order.

        The scoring begins with the actors that have started; the first call waits some seconds for all.

        Args:
            state: Parameters and buffers.
            score_part: Scores a part in this process as well, with the same arguments as `score`.

        Raises what `score_parts` raises.
        """
        self._add_started(0 if score_part is not None else 1)
        self._state_number += 1
        number, states = self._state_number, [ray.put(dict(state))]
        parts = _PARTS_PER_ACTOR * (len(self._actors) + (score_part is not None))

        def submit(actor: ActorHandle, part: int) -> ray.ObjectRef:
            return actor.score.remote(number, states, self._arrays, part, parts)

        actors = [partial(submit, actor) for actor in self._actors]
        return score_parts(actors, parts, None if score_part is None else lambda part: score_part(part, parts))

    def end(self) -> None:
        """Ends the actors."""
        for actor in (*self._actors, *self._starting.values()):
            ray.kill(actor, no_restart=True)

    def _add_started(self, min_actors: int) -> None:
        """Adds the actors that have started since the last call; waits for at least `min_actors` in all."""
        if not self._starting:
            return
        started, _ = ray.wait([*self._starting], num_returns=len(self._starting), timeout=self._wait_s)
        if len(started) + len(self._actors) < min_actors:
            started, _ = ray.wait([*self._starting], num_returns=min_actors)
        self._wait_s = 0.0
        self._actors += [self._starting.pop(reference) for reference in started]
        if self._starting:
            logger.warning(
                "%d actors of the evaluation wait for capacity in the cluster; %d score.",
                len(self._starting),
                len(self._actors),
            )


def score_on_actors(job: EvaluationJob, state: Mapping[str, Tensor]) -> list[Chunk]:
    """Scores a model state on a data set on `evaluate.workers` actors alone, see `ScoringPool.score`."""
    pool = ScoringPool(job, job.section.workers)
    try:
        pool.share(load_all(fetch_in_process, job.data).arrays)
        return pool.score(state)
    finally:
        pool.end()


def count_deaths_in_a_row(starts: Sequence[Mapping[str, Any]], done_step: int, alive: Collection[str]) -> int:
    """Returns how many processes of an evaluator died since its last evaluation, on nodes that still live.

    Args:
        starts: Of each process that has ended, in their order: `node`, and `after_step`, the step that had been
            evaluated last when it started.
        done_step: The step that was evaluated last.
        alive: Ids of the live nodes.
    """
    deaths = 0
    for start in reversed(starts):
        deaths += start["node"] in alive
        # This process evaluated `done_step` and died after it, so earlier deaths do not count.
        if start["after_step"] != done_step:
            break
    return deaths


def _this_actor() -> ActorHandle | None:
    """Returns a handle of the actor that this code runs in; None outside of an actor."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return ray.get_runtime_context().current_actor


class EvaluatorHandle:
    """The evaluator actor, as other processes use it.

    Args:
        actor: Ray's handle of the actor.
    """

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    def failure(self, timeout_s: float) -> DataError | str | None:
        """Returns why the evaluator has failed for good, see `Evaluator.error`; None while it works.

        Raises:
            TimeoutError: It does not answer in time, because it waits for capacity or restarts.
            ray.exceptions.RayError: It cannot be asked now.
        """
        try:
            failure: DataError | str | None = ray.get(self._actor.error.remote(), timeout=timeout_s)
        except ray.exceptions.ActorDiedError as error:
            # Ray has no restarts left for the actor.
            return str(error)
        return failure

    def end(self) -> None:
        """Ends the actor for good."""
        ray.kill(self._actor, no_restart=True)


def start_evaluator(
    job: EvaluationJob,
    before_evaluation: Callable[[Commit], None] | None = None,
    when_orphaned: Callable[[str], object] | None = None,
) -> EvaluatorHandle:
    """Pins the checkpoints, starts the evaluator actor with its resources, and returns its handle.

    Ray restarts the actor whenever it dies; an unfinished evaluation is then repeated. It fails for good after three
    deaths at one checkpoint. With `when_orphaned` it outlives the driver.
    """
    done = last_evaluated(evaluated_steps(job.paths, job.name))
    CheckpointStore(job.paths).put_pin(job.evaluator_id, job.make_pin(done, time.time() + PIN_LIFE_S))
    options = _actor_options(job) | {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 4}
    if when_orphaned is not None:
        options |= {"lifetime": "detached", "name": job.actor_name, "namespace": _NAMESPACE}
    actor = ray.remote(Evaluator).options(**options).remote(job, fetch_auto, before_evaluation, when_orphaned)
    return EvaluatorHandle(actor)


def _actor_options(job: EvaluationJob) -> dict[str, Any]:
    """Returns Ray's options for what an actor of the evaluation reserves, and on which nodes."""
    labels = {"label_selector": job.label_selector} if job.label_selector else {}
    return {"num_cpus": job.section.num_cpus, "num_gpus": job.section.num_gpus, **labels}
