"""What an evaluator evaluates, and in which order.

The evaluator actor: watches the store, evaluates what is committed, and writes one file per step.

It shares nothing with the trainer but the run directory, so neither can hold the other up: it says in a hold what it
still needs, and an evaluation is written once, whoever gets to it first. Where the cluster outlives the driver it does,
too: when the driver is gone it finishes what is committed, has the run's end recorded, and ends itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
import torch

from ray_app.checkpoint.format import unpack_model
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.data.local_readers import load_all
from ray_app.data.memory_cache import fetch_auto
from ray_app.data.process_deaths import MAX_DEATHS, process_died_error
from ray_app.data.reader import Fetch
from ray_app.errors import DamagedError, DataError, RunHeldError, is_refusal, unwrap_app_error
from ray_app.evaluate.job import EvaluationJob, choose, last_evaluated, pause_s, pending
from ray_app.process import keep_freed_memory
from ray_app.runlog.evaluations import Evaluation, evaluated_steps, put_evaluation
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.lease import LIFE_S, LeaseWatch, is_taken_over
from ray_app.runlog.output import Output
from ray_app.runlog.redaction import register_run_secrets
from ray_app.storage.files import poll_interval_s
from ray_app.task import device
from ray_app.task.metrics import combine, score
from ray_app.task.ragged import Arrays

logger = logging.getLogger(__name__)

_NAMESPACE = "ray_app"
HOLD_S = 1500.0
"""Seconds that a hold outlives the evaluator, by its own clock: ten minutes for Ray to start it again, and the quarter
of an hour that clocks may be apart.
"""
_LONGEST_PAUSE_S = 10.0
_LOOKS_PER_LEASE = 10


class Evaluator:
    """Follows the checkpoints of one run until it is stopped. An actor, see `start_evaluator`.

    Args:
        job: What to evaluate on, and how.
        fetch: How read tasks run.
        before_evaluation: For fault tests: called before each evaluation.
        when_orphaned: Called with the run's directory when the driver is gone and everything is evaluated, and again if
            it raises RunHeldError or OSError; not given: the driver is not watched, and the evaluator ends with it.
    """

    def __init__(
        self,
        job: EvaluationJob,
        fetch: Fetch = fetch_auto,
        before_evaluation: Callable[[Commit], None] | None = None,
        when_orphaned: Callable[[str], object] | None = None,
    ) -> None:
        self._job, self._fetch, self._before, self._when_orphaned = job, fetch, before_evaluation, when_orphaned
        register_run_secrets(job.paths.config)
        self._store = CheckpointStore(job.paths)
        self._stopped, self._hurry = threading.Event(), threading.Event()
        self._driver = "held"
        self._error: DataError | str | None = None
        self._is_noted = False
        self._itself, name = _this_actor(), job.name or "evaluator"
        self._output = (
            Output(job.paths, job.fence, f"{name}-{os.getpid()}", lambda: name) if self._itself is not None else None
        )
        if self._itself is not None:
            keep_freed_memory()
        device.pin(job.section.threads, job.deterministic)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._device = device.gpu_of(ray.get_gpu_ids(), visible) if job.section.num_gpus else torch.device("cpu")
        device.use_device(self._device)
        self._model = job.task.build_model().to(self._device)
        self._arrays: Arrays | None = None
        self._done_step = last_evaluated(evaluated_steps(job.paths, job.name))
        runs = [self._follow, self._renew, *([self._watch] if when_orphaned else [])]
        self._threads = [threading.Thread(target=run, name=run.__name__, daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def error(self) -> DataError | str | None:
        """Why the evaluator gave up, if it did; an error where the data is to blame."""
        return self._error

    def hurry(self) -> None:
        """Pauses no more between evaluations: nobody trains any longer, and somebody waits."""
        self._hurry.set()

    def stop(self) -> None:
        """Ends after the evaluation at hand."""
        self._stopped.set()
        self._hurry.set()
        for thread in self._threads:
            thread.join()
        if self._output is not None:
            self._output.close()

    def _note_life(self, commit: Commit) -> None:
        """Records once that this process evaluates, before its first evaluation: a process that dies while it waits
        dies of no checkpoint.

        Args:
            commit: The checkpoint that is next.

        Raises:
            ProcessDiedError: Several processes before it died of the same checkpoint; a lost node does not count.
        """
        if self._itself is None or self._is_noted:
            return
        job, context = self._job, ray.get_runtime_context()
        earlier = [
            e
            for e in read_events(job.paths, "evaluator_started")
            if (e.fence, e.details["by"]) == (job.fence, job.follower)
        ]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        facts = {"by": job.follower, "node": context.get_node_id(), "pid": os.getpid(), "after_step": self._done_step}
        self._is_noted = put_event(job.paths, "evaluator_started", job.fence, **facts)
        if deaths_in_a_row([e.details for e in earlier], self._done_step, alive) >= MAX_DEATHS:
            reader, rows = job.data.reader, job.data.manifest.num_rows
            raise process_died_error(
                f"while it evaluated the checkpoint after step {commit.step} on {rows:,} rows of {reader.root}"
            )

    def _follow(self) -> None:
        device.use_device(self._device)  # a new thread begins on the first GPU
        look_s = wait_s = poll_interval_s(self._job.paths.root)
        while not self._stopped.is_set():
            try:
                if self._driver == "superseded":
                    return self._leave()
                waiting = pending(self._job) if self._error is None else []
                if waiting:
                    wait_s, duration_s = 0.0, self._evaluate_next(waiting)
                    self._hurry.wait(pause_s(duration_s, self._share(), self._job.section.budget))
                elif self._driver == "over":
                    return self._end_of_driver()
                else:
                    wait_s = look_s
            except RunHeldError as error:  # the driver lives after all, or somebody else closes the run at this moment
                logger.warning("The evaluator goes on: %s", error)
                wait_s = LIFE_S / _LOOKS_PER_LEASE
            except (OSError, ray.exceptions.RayError) as error:  # storage or cluster; may pass
                logger.warning("The evaluator will try again: %s", error)
                wait_s = min(_LONGEST_PAUSE_S, 2 * max(wait_s, look_s))
            except Exception as error:  # only the end of the driver is waited for now
                logger.exception("The evaluator gives up")
                cause, wait_s = unwrap_app_error(error), look_s
                self._error = (
                    cause if isinstance(cause, DataError) and is_refusal(cause) else f"{type(cause).__name__}: {cause}"
                )
            self._stopped.wait(wait_s)
        return None

    def _renew(self) -> None:
        """Keeps the hold alive, however long one evaluation takes."""
        while not self._stopped.wait(HOLD_S / 25):
            try:
                self._hold(self._done_step)
            except OSError as error:
                logger.warning("The evaluator's hold could not be renewed, will try again: %s", error)

    def _watch(self) -> None:
        """Looks whether the driver that started this evaluator still lives, also after it seemed to be gone."""
        job, observer = self._job, LeaseWatch(self._job.paths, self._job.fence)
        while not self._stopped.wait(LIFE_S / _LOOKS_PER_LEASE):
            try:
                seen = observer.poll()
                if seen == "superseded" and not is_taken_over(job.paths, job.fence):
                    seen = "over"
            except OSError as error:
                logger.warning("The driver's lease could not be read, will try again: %s", error)
                continue
            if seen in ("over", "superseded"):
                self._hurry.set()
            elif self._driver == "over":
                self._hurry.clear()
            self._driver = seen

    def _end_of_driver(self) -> None:
        assert self._when_orphaned is not None
        try:
            self._when_orphaned(self._job.run_root)
        except (RunHeldError, OSError):
            raise  # may pass
        except Exception:
            logger.exception("The run could not be closed")
        self._leave()

    def _leave(self) -> None:
        """Ends this actor for good: a detached actor has nobody else to end it."""
        self._stopped.set()
        if self._output is not None:
            self._output.close()
        if self._itself is not None:
            ray.kill(self._itself, no_restart=True)

    def _share(self) -> float:
        """Share of the cluster that this evaluator reserves."""
        section = self._job.section
        if section.budget >= 1:
            return 0.0
        cluster = ray.cluster_resources() if ray.is_initialized() else {"CPU": float(os.cpu_count() or 1)}
        kind, own = ("GPU", section.num_gpus) if section.num_gpus else ("CPU", max(section.num_cpus, section.threads))
        return min(1.0, own / max(cluster.get(kind, own), 1e-9))

    def _hold(self, done_step: int) -> None:
        """Says which checkpoints are still needed: those after `done_step`."""
        self._done_step = done_step
        self._store.hold(self._job.follower, self._job.hold(done_step, time.time() + HOLD_S))

    def _evaluate_next(self, waiting: list[Commit]) -> float:
        """Evaluates one checkpoint; returns the seconds that it took."""
        began = time.perf_counter()
        commit, passed = choose(waiting, self._job.section.every)
        self._note_life(commit)
        self._hold(commit.step - 1)
        for older in passed:
            self._skipped(older, f"a newer one was there, step {commit.step}")
        self._evaluate(commit, len(waiting) - len(passed) - 1)
        return time.perf_counter() - began

    def _evaluate(self, commit: Commit, behind: int) -> None:
        job, began = self._job, time.perf_counter()
        if self._before is not None:
            self._before(commit)
        try:
            self._model.load_state_dict(unpack_model(self._store.load(commit)))
        except DamagedError as error:
            self._skipped(commit, str(error))
            self._store.mark_bad(commit, str(error))
            return
        except FileNotFoundError:
            return  # retention removed it meanwhile
        if self._arrays is None:
            self._arrays = load_all(self._fetch, job.data).arrays
        manifest = job.data.manifest
        scores = combine(
            job.task,
            score(job.task, self._model, self._arrays, job.section.batch_size, self._device, manifest=manifest),
        )
        if self._output is not None:
            self._output.copy()  # who waits for this evaluation may end this process
        now_s = time.time()
        made = Evaluation(
            step=commit.step,
            epoch=commit.epoch,
            params_digest=commit.params_digest,
            rows=manifest.num_rows,
            duration_s=time.perf_counter() - began,
            time_s=now_s,
            data_digest=manifest.digest,
            behind=behind,
            lag_s=now_s - commit.time_s,
            **scores.record(job.task.classes),
        )
        if put_evaluation(job.paths, made, job.name):
            details = {"by": job.name} if job.name else {}
            put_event(
                job.paths,
                "evaluated",
                job.fence,
                step=commit.step,
                metrics=made.metrics,
                duration_s=made.duration_s,
                **details,
            )

    def _skipped(self, commit: Commit, reason: str) -> None:
        details = {"by": self._job.name} if self._job.name else {}
        put_event(self._job.paths, "evaluation_skipped", self._job.fence, step=commit.step, reason=reason, **details)


def deaths_in_a_row(lives: Sequence[Mapping[str, Any]], done_step: int, alive: Collection[str]) -> int:
    """How many processes of an evaluator died since its last evaluation, on nodes that still live.

    Args:
        lives: `node` and `after_step`, the step that was evaluated last, of each process that has ended, in their
            order.
        done_step: The step that was evaluated last.
        alive: Ids of the nodes that live.
    """
    deaths = 0
    for life in reversed(lives):
        deaths += life["node"] in alive
        if life["after_step"] != done_step:  # it evaluated that step, and died after it
            break
    return deaths


def _this_actor() -> Any | None:
    """A handle to the actor that this runs in; None outside of Ray."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return ray.get_runtime_context().current_actor


def start_evaluator(
    job: EvaluationJob,
    before_evaluation: Callable[[Commit], None] | None = None,
    when_orphaned: Callable[[str], object] | None = None,
) -> Any:
    """Holds the checkpoints, starts the actor with its own resources, and returns its handle.

    Ray starts it again whenever it dies; what it had not finished is then evaluated anew. It gives up after three
    deaths at one checkpoint.

    Args:
        job: What to evaluate on, and how.
        before_evaluation: For fault tests.
        when_orphaned: See `Evaluator`; with it the actor outlives the driver.
    """
    done = last_evaluated(evaluated_steps(job.paths, job.name))
    CheckpointStore(job.paths).hold(job.follower, job.hold(done, time.time() + HOLD_S))
    options: dict[str, Any] = {
        "num_cpus": job.section.num_cpus,
        "num_gpus": job.section.num_gpus,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 4,
    }
    if job.section.label_selector:
        options["label_selector"] = job.section.label_selector
    if when_orphaned is not None:
        options |= {"lifetime": "detached", "name": job.actor_name, "namespace": _NAMESPACE}
    return ray.remote(Evaluator).options(**options).remote(job, fetch_auto, before_evaluation, when_orphaned)
