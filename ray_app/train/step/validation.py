"""Evaluation by the training workers themselves, together, at every planned checkpoint: every row once, each its share
of the chunks.

A run that goes on from such a checkpoint evaluates it first, if that was not done before: whatever stopped it, no
evaluation is lost.
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
    """See the module.

    Args:
        job: The run; with `job.evaluation`.
        state: What is trained.
        load: Returns the decoded evaluation data, each field (rows, ...).
        device: Where to compute.
        moved: Called after every chunk: a sign that something goes on.
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
        self._untold: list[tuple[int, str]] = []

    def run(self, world: World) -> None:
        """Evaluates the state of now, unless it was done before; a collective of all ranks.

        Raises:
            PeerLostError: A peer left meanwhile; the next generation does it again.
        """
        self.tell()
        job, step, began = self._job, self._state.step, time.perf_counter()
        assert job.evaluation is not None
        if gather(world.rank == 0 and self._is_done(step), world)[0]:
            return
        arrays = self._arrays = self._arrays if self._arrays is not None else self._load()
        size, mine = job.config.evaluate.batch_size, []
        with self._state.eval_model() as model:
            digest = params_digest(model.state_dict())
            manifest = job.evaluation.manifest
            for chunk in score(job.task, model, arrays, size, self._device, world.rank, world.size, manifest=manifest):
                mine.append(chunk)
                self._moved()
        if world.check_device_errors is not None:
            world.check_device_errors()  # the parameters may have come through the device
        shares = gather(mine, world)
        if world.rank != 0:
            return
        scores = combine(job.task, (chunk for share in shares for chunk in share))
        made = Evaluation(
            step=step,
            epoch=Cursor.at(step, job.plan.steps_per_epoch).epoch,
            params_digest=digest,
            rows=manifest.num_rows,
            duration_s=time.perf_counter() - began,
            time_s=time.time(),
            data_digest=manifest.digest,
            **scores.record(job.task.classes),
        )
        self._put(made)

    def tell(self) -> None:
        """Records which evaluations the storage did not take, as soon as it takes that: early stopping waits for it."""
        while self._untold:
            step, reason = self._untold[0]
            if not put_event(self._job.paths, "evaluation_skipped", self._job.fence, step=step, reason=reason):
                return
            self._untold.pop(0)

    def _is_done(self, step: int) -> bool:
        try:
            return step in evaluated_steps(self._job.paths)
        except OSError as error:  # then it is done again, and the first one stays
            logger.warning("The evaluations could not be listed: %s", error)
            return False

    def _put(self, made: Evaluation) -> None:
        """Writes an evaluation; if the storage refuses for as long as a checkpoint is tried, training goes on without
        it.
        """
        paths, fence, reason = self._job.paths, self._job.fence, ""
        for attempt in range(_ATTEMPTS):
            try:
                if put_evaluation(paths, made):
                    put_event(
                        paths, "evaluated", fence, step=made.step, metrics=made.metrics, duration_s=made.duration_s
                    )
                return
            except OSError as error:
                reason = f"{type(error).__name__}: {error}"
                logger.warning(
                    "The evaluation of step %d, attempt %d of %d to write it failed: %s",
                    made.step,
                    attempt + 1,
                    _ATTEMPTS,
                    reason,
                )
            self._moved()
            time.sleep(_FIRST_PAUSE_S * 2**attempt)
        self._untold.append((made.step, reason))
        self.tell()
