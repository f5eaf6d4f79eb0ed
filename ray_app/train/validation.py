"""Evaluation by the training workers themselves, together, at every planned checkpoint: every row once, each its share of the chunks.

A run that goes on from such a checkpoint evaluates it first, if that was not done before: whatever stopped it, no evaluation is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy.typing as npt
import torch

from ray_app.checkpoint.format import params_digest
from ray_app.plan.cursor import Cursor
from ray_app.record.evaluations import Evaluation, evaluated_steps, put_evaluation
from ray_app.record.journal import put_event
from ray_app.strategy.base import World, gather
from ray_app.task.scoring import combine, score
from ray_app.train.job import Job
from ray_app.train.state import TrainingState

Arrays = dict[str, npt.NDArray]


class Validation:
    """See the module.

    Args:
        job: The run; with `job.evaluation`.
        state: What is trained.
        load: Returns the decoded evaluation data, each field (rows, ...).
        device: Where to compute.
        moved: Called after every chunk: a sign that something goes on.
    """

    def __init__(self, job: Job, state: TrainingState, load: Callable[[], Arrays], device: torch.device, moved: Callable[[], None]) -> None:
        self._job, self._state, self._load, self._device, self._moved = job, state, load, device, moved
        self._arrays: Arrays | None = None

    def run(self, world: World) -> None:
        """Evaluates the state of now, unless it was done before; a collective of all ranks.

        Raises:
            PeerLostError: A peer left meanwhile; the next generation does it again.
        """
        job, step, began = self._job, self._state.step, time.perf_counter()
        if gather(world.rank == 0 and step in evaluated_steps(job.paths), world)[0]:
            return
        arrays = self._arrays = self._arrays if self._arrays is not None else self._load()
        size, mine = job.config.evaluate.batch_size, []
        with self._state.returned() as model:
            digest = params_digest(model.state_dict())
            for chunk in score(job.task, model, arrays, size, self._device, world.rank, world.size):
                mine.append(chunk)
                self._moved()
        shares = gather(mine, world)
        if world.rank != 0:
            return
        assert job.evaluation is not None
        manifest = job.evaluation.manifest
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
        if put_evaluation(job.paths, made):
            put_event(job.paths, "evaluated", job.fence, step=step, metrics=made.metrics, duration_s=made.duration_s)
