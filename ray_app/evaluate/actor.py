"""The evaluator actor: watches the store, evaluates what is committed, and writes one file per step.

It shares nothing with the trainer but the run directory, so neither can hold the other up: it says in a hold what it still needs, and
an evaluation is written once, whoever gets to it first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import ray
import torch

from ray_app.checkpoint.format import unpack_model
from ray_app.checkpoint.retention import Hold
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config import EvaluateSection
from ray_app.data.columns import ArraySpec
from ray_app.data.source import Fetch, Reader, fetch_ray, load_all, rows_per_task
from ray_app.errors import CheckpointError
from ray_app.plan.manifest import Manifest
from ray_app.record.evaluations import Evaluation, evaluated_steps, put_evaluation
from ray_app.record.files import location, poll_s
from ray_app.record.journal import put_event
from ray_app.record.paths import RunPaths
from ray_app.task.base import Task

logger = logging.getLogger(__name__)

FOLLOWER = "evaluator"
HOLD_S = 300.0
"""Seconds that a hold outlives the evaluator; long enough for Ray to start it again."""
_LONGEST_PAUSE_S = 10.0
_METRIC_ROWS = 8192


@dataclass(frozen=True)
class EvaluationJob:
    """What an evaluator needs to know.

    Args:
        section: How to follow.
        task: The prepared task.
        run_root: The run's directory.
        fence: Number of the driver's start.
        data_root: Folder that the manifest's paths are relative to.
        manifest: The evaluation data.
        fields: What a decoded row looks like.
        read_task_mb: Most decoded megabytes of one read task.
    """

    section: EvaluateSection
    task: Task
    run_root: str
    fence: int
    data_root: str
    manifest: Manifest
    fields: dict[str, ArraySpec]
    read_task_mb: float

    @property
    def paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(location(self.run_root))


def pending(job: EvaluationJob) -> list[Commit]:
    """The checkpoints that wait for an evaluation, oldest first; with `every: latest` at most the newest."""
    done = evaluated_steps(job.paths)
    waiting = {c.step: c for c in CheckpointStore(job.paths).commits() if c.step not in done}
    ordered = [waiting[step] for step in sorted(waiting)]
    if job.section.every == "latest":
        return [c for c in ordered[-1:] if c.step > max(done, default=-1)]
    return ordered


def _last_evaluated(paths: RunPaths) -> int:
    return max(evaluated_steps(paths), default=-1)


def evaluate(job: EvaluationJob, model: torch.nn.Module, arrays: dict[str, npt.NDArray], device: torch.device) -> dict[str, float]:
    """Evaluates a model on all rows.

    Args:
        job: Task and batch size.
        model: The model, on the device.
        arrays: Every decoded field, each (rows, ...).
        device: Where to compute.

    Returns:
        The task's metrics and the mean loss.
    """
    from torchmetrics import MeanMetric

    task, size = job.task, job.section.batch_size
    metrics = task.metrics().to(device)
    losses = MeanMetric().to(device)
    fields = {name: torch.from_numpy(values) for name, values in arrays.items()}
    model.eval()
    with torch.inference_mode():
        for low in range(0, job.manifest.num_rows, size):
            batch = {name: values[low : low + size].to(device) for name, values in fields.items()}
            outputs = task.forward(model, batch)
            losses.update(task.loss(outputs, batch))
            task.update(metrics, outputs, batch)
    values = metrics.compute() | {"loss": losses.compute()}
    return {name: float(value) for name, value in values.items() if torch.as_tensor(value).numel() == 1}


class Evaluator:
    """Follows the checkpoints of one run until it is stopped. An actor, see `start_evaluator`.

    Args:
        job: What to evaluate on, and how.
        fetch: How read tasks run.
        before_evaluation: For fault tests: called before each evaluation.
    """

    def __init__(self, job: EvaluationJob, fetch: Fetch = fetch_ray, before_evaluation: Callable[[Commit], None] | None = None) -> None:
        self._job, self._fetch, self._before = job, fetch, before_evaluation
        self._store = CheckpointStore(job.paths)
        self._stopped = threading.Event()
        self._error: str | None = None
        torch.set_num_threads(job.section.threads)
        self._device = torch.device("cuda" if job.section.num_gpus else "cpu")
        self._model = job.task.build_model().to(self._device)
        self._arrays: dict[str, npt.NDArray] | None = None
        self._done_step = _last_evaluated(job.paths)
        self._threads = [threading.Thread(target=run, name=run.__name__, daemon=True) for run in (self._follow, self._renew)]
        for thread in self._threads:
            thread.start()

    def error(self) -> str | None:
        """Why the evaluator gave up, if it did."""
        return self._error

    def stop(self) -> None:
        """Ends after the evaluation at hand."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _follow(self) -> None:
        look_s = poll_s(self._job.paths.root)
        pause_s = look_s
        while not self._stopped.is_set():
            try:
                waiting = pending(self._job)
                if waiting:
                    self._hold(waiting[0].step - 1)
                    self._evaluate(waiting[0])
                pause_s = 0.0 if waiting else look_s
            except (OSError, ray.exceptions.RayError) as error:  # storage or cluster; may pass
                logger.warning("The evaluator will try again: %s", error)
                pause_s = min(_LONGEST_PAUSE_S, 2 * max(pause_s, look_s))
            except Exception as error:
                logger.exception("The evaluator gives up")
                self._error = f"{type(error).__name__}: {error}"
                return
            self._stopped.wait(pause_s)

    def _renew(self) -> None:
        """Keeps the hold alive, however long one evaluation takes."""
        while not self._stopped.wait(HOLD_S / 5):
            try:
                self._hold(self._done_step)
            except OSError as error:
                logger.warning("The evaluator's hold could not be renewed, will try again: %s", error)

    def _hold(self, done_step: int) -> None:
        """Says which checkpoints are still needed: those after `done_step`."""
        self._done_step = done_step
        self._store.hold(FOLLOWER, Hold(done_step, time.time() + HOLD_S))

    def _evaluate(self, commit: Commit) -> None:
        job, began = self._job, time.perf_counter()
        if self._before is not None:
            self._before(commit)
        try:
            self._model.load_state_dict(unpack_model(self._store.load(commit)))
        except CheckpointError as error:
            put_event(job.paths, "evaluation_skipped", job.fence, step=commit.step, reason=str(error))
            self._store.mark_bad(commit, str(error))
            return
        except FileNotFoundError:
            return  # retention removed it meanwhile
        if self._arrays is None:
            reader = Reader(job.data_root, job.task.columns(), job.task.decode)
            self._arrays = load_all(self._fetch, reader, job.manifest, job.fields, rows_per_task(job.fields, job.read_task_mb))
        metrics = evaluate(job, self._model, self._arrays, self._device)
        duration_s = time.perf_counter() - began
        made = Evaluation(commit.step, commit.epoch, commit.params_digest, metrics, job.manifest.num_rows, duration_s, time.time())
        if put_evaluation(job.paths, made):
            put_event(job.paths, "evaluated", job.fence, step=commit.step, metrics=metrics, duration_s=duration_s)


def start_evaluator(job: EvaluationJob, before_evaluation: Callable[[Commit], None] | None = None) -> Any:
    """Holds the checkpoints, starts the named actor with its own resources, and returns its handle.

    Ray starts it again whenever it dies; what it had not finished is then evaluated anew.
    """
    CheckpointStore(job.paths).hold(FOLLOWER, Hold(_last_evaluated(job.paths), time.time() + HOLD_S))
    options = {"num_cpus": job.section.num_cpus, "num_gpus": job.section.num_gpus, "max_restarts": -1, "max_task_retries": -1}
    name = f"evaluator-{job.paths.name}-{job.fence}"
    return ray.remote(Evaluator).options(name=name, max_concurrency=4, **options).remote(job, fetch_ray, before_evaluation)
