"""Evaluation by the training workers themselves at every planned checkpoint (`evaluate.where: workers`).

The rows are cut into chunks, and each rank evaluates its part of the chunks, so every row is evaluated once. A run that
resumes from a planned checkpoint first evaluates it if that was not done before, so no evaluation is lost if the run
stops between a checkpoint and its evaluation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain

import torch

from ray_app.checkpoint.format import params_digest
from ray_app.data.reader import Decoded, RowSource
from ray_app.plan.order import Cursor
from ray_app.reduction.messages import gather
from ray_app.reduction.peer_errors import check_device_errors
from ray_app.reduction.world import World
from ray_app.retry import Retry
from ray_app.runlog.evaluations import Evaluation, evaluated_steps, put_evaluation
from ray_app.runlog.journal import PendingEvents, put_event
from ray_app.task.metrics import combine, score
from ray_app.task.precision import Precision
from ray_app.task.ragged import Arrays
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState

logger = logging.getLogger(__name__)

_RETRY = Retry(0.5, attempts=6)
"""The attempts to write an evaluation; the numbers are those of checkpoints."""


class WorkerEvaluation:
    """Evaluates the training state, which is the same on all workers, by all workers together.

    Args:
        job: The run, with `job.eval_source`.
        state: The training state.
        load: Decodes the evaluation data; called at the first evaluation.
        device: Device to compute on.
        report_progress: Called after every chunk and every failed write, to report progress to the step watchdog.

    Attributes:
        pending_events: The events of the evaluations that could not be written.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        load: Callable[[RowSource], Decoded],
        device: torch.device,
        report_progress: Callable[[], None],
    ) -> None:
        self._job = job
        self._state = state
        self._load = load
        self._device = device
        self._report_progress = report_progress
        self._arrays: Arrays | None = None
        self.pending_events = PendingEvents(job.paths)

    def run(self, world: World) -> None:
        """Evaluates the present state, unless its evaluation is on storage; a collective of all ranks.

        Rank 0 writes the evaluation.

        Raises:
            PeerLostError: A peer left meanwhile; the next generation evaluates again.
        """
        self.pending_events.flush()
        job = self._job
        step = self._state.step
        began = time.perf_counter()
        assert job.eval_source is not None
        if gather(world.rank == 0 and self._is_done(step), world)[0]:
            return
        if self._arrays is None:
            self._arrays = self._load(job.eval_source).arrays
        section, manifest = job.config.evaluate, job.eval_source.manifest
        local_chunks = []
        with self._state.eval_model() as model:
            self._state.backend.broadcast_parameters(self._state.average is not None)
            digest = params_digest(model.state_dict()) if world.rank == 0 else ""
            for chunk in score(
                job.task,
                model,
                self._arrays,
                section.batch_size,
                self._device,
                world.rank,
                world.size,
                fixed=section.fixed_batches,
                manifest=manifest,
                precision=Precision.of(job.config.train),
            ):
                local_chunks.append(chunk)
                self._report_progress()
        # The parameters may have been received on the device, where a broken collective leaves garbage.
        if world.has_device_collectives:
            check_device_errors()
        chunks_by_rank = gather(local_chunks, world)
        if world.rank != 0:
            return
        scores = combine(job.task, chain.from_iterable(chunks_by_rank))
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

    def _is_done(self, step: int) -> bool:
        """Returns whether the evaluation of a step is on storage; False if the storage does not answer."""
        try:
            return step in evaluated_steps(self._job.paths)
        except OSError as error:
            # The state is then perhaps evaluated twice; of two evaluations of a step the first one stays on storage.
            logger.warning("The evaluations could not be listed: %s", error)
            return False

    def _put(self, evaluation: Evaluation) -> None:
        """Writes an evaluation and its event; if all attempts fail, training continues without them."""
        paths = self._job.paths
        fence = self._job.fence
        step = evaluation.step
        try:
            is_new = _RETRY.call(
                lambda: put_evaluation(paths, evaluation),
                OSError,
                f"Writing the evaluation of step {step}",
                lambda _: self._report_progress(),
            )
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
            self.pending_events.put("evaluation_skipped", fence, step=step, reason=reason)
            return
        if is_new:
            details = {"metrics": evaluation.metrics, "duration_s": evaluation.duration_s}
            put_event(paths, "evaluated", fence, step=step, **details)
