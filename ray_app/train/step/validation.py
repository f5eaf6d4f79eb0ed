"""Evaluation by the training workers themselves at every planned checkpoint.

Every row is evaluated once; each rank evaluates its share of the chunks of rows. A run that resumes from a planned
checkpoint evaluates it first, if that was not done before: whatever stopped the run, no evaluation is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ray_app.checkpoint.format import params_digest
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World, gather
from ray_app.runlog.evaluations import Evaluation, evaluated_steps, put_evaluation
from ray_app.runlog.journal import put_event
from ray_app.task.metrics import combine, score
from ray_app.task.ragged import Arrays
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState

logger = logging.getLogger(__name__)

_ATTEMPTS, _FIRST_PAUSE_S = 6, 0.5


class Validation:
    """Evaluates the state of a worker together with the other workers.

    Args:
        job: The run, with `job.evaluation`.
        state: The training state.
        load: Returns the decoded evaluation data, each field of shape (rows, ...).
        device: Device to compute on.
        moved: Called after every chunk, to report progress to the step watchdog.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        load: Callable[[], Arrays],
        device: torch.device,
        moved: Callable[[], None],
    ) -> None:
        self._job, self._state, self._load, self._device, self._moved = job, state, load, device, moved
        self._arrays: Arrays | None = None
        self._pending_events: list[tuple[int, str]] = []

    def run(self, world: World) -> None:
        """Evaluates the present state, unless that was done before; a collective of all ranks.

        Raises:
            PeerLostError: A peer left meanwhile; the next generation evaluates again.
        """
        self.put_pending_events()
        job, step, began = self._job, self._state.step, time.perf_counter()
        assert job.evaluation is not None
        if gather(world.rank == 0 and self._is_done(step), world)[0]:
            return
        arrays = self._arrays = self._arrays if self._arrays is not None else self._load()
        size, local_chunks = job.config.evaluate.batch_size, []
        with self._state.eval_model() as model:
            digest = params_digest(model.state_dict())
            manifest = job.evaluation.manifest
            for chunk in score(job.task, model, arrays, size, self._device, world.rank, world.size, manifest=manifest):
                local_chunks.append(chunk)
                self._moved()
        # The parameters may have been received on the device, where a broken collective leaves garbage.
        if world.check_device_errors is not None:
            world.check_device_errors()
        chunks_by_rank = gather(local_chunks, world)
        if world.rank != 0:
            return
        scores = combine(job.task, (chunk for of_rank in chunks_by_rank for chunk in of_rank))
        evaluation = Evaluation(
            step=step,
            epoch=Cursor.at(step, job.plan.steps_per_epoch).epoch,
            params_digest=digest,
            rows=manifest.num_rows,
            duration_s=time.perf_counter() - began,
            time_s=time.time(),
            data_digest=manifest.digest,
            **scores.record(job.task.classes),
        )
        self._put(evaluation)

    def put_pending_events(self) -> None:
        """Records the evaluations that could not be written, as soon as the storage accepts that.

        Early stopping waits for these events.
        """
        while self._pending_events:
            step, reason = self._pending_events[0]
            if not put_event(self._job.paths, "evaluation_skipped", self._job.fence, step=step, reason=reason):
                return
            self._pending_events.pop(0)

    def _is_done(self, step: int) -> bool:
        try:
            return step in evaluated_steps(self._job.paths)
        except OSError as error:
            # The state is then evaluated again; an evaluation that is on storage already stays.
            logger.warning("The evaluations could not be listed: %s", error)
            return False

    def _put(self, evaluation: Evaluation) -> None:
        """Writes an evaluation, with as many attempts as a checkpoint; if all fail, training continues without it."""
        paths, fence, reason = self._job.paths, self._job.fence, ""
        for attempt in range(_ATTEMPTS):
            try:
                if put_evaluation(paths, evaluation):
                    details = {"metrics": evaluation.metrics, "duration_s": evaluation.duration_s}
                    put_event(paths, "evaluated", fence, step=evaluation.step, **details)
                return
            except OSError as error:
                reason = f"{type(error).__name__}: {error}"
                logger.warning(
                    "The evaluation of step %d, attempt %d of %d to write it failed: %s",
                    evaluation.step,
                    attempt + 1,
                    _ATTEMPTS,
                    reason,
                )
            self._moved()
            time.sleep(_FIRST_PAUSE_S * 2**attempt)
        self._pending_events.append((evaluation.step, reason))
        self.put_pending_events()
