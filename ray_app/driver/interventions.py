"""Answers the workers' questions between two epochs by the code that intervenes, in the driver's process."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.strategies import list_strategies
from ray_app.errors import ConfigError
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.history import RunningMeans, means
from ray_app.runlog.journal import RecordReader, StepRecord
from ray_app.storage.files import poll_interval_s
from ray_app.task.interventions import EpochEnd, Intervener, Intervention
from ray_app.train.interventions import (
    asked_steps,
    intervened_steps,
    put_intervention,
    read_intervention,
    read_question,
)
from ray_app.train.job import Job


def find_intervener(job: Job, intervene: Intervener | None) -> Intervener | None:
    """Returns what may change a run between two epochs, by default the code of its task; None if nothing does.

    Raises:
        ConfigError: A run with this configuration cannot be changed then.
    """
    config = job.config
    intervene = intervene or job.task.intervener()
    if intervene is None:
        return None
    if not config.train.strategy_traits.can_intervene:
        raise ConfigError(
            f"train.strategy is {config.train.strategy}, but callbacks need the whole model after each epoch. Use"
            f" {list_strategies(lambda traits: traits.can_intervene)}, or replace the callbacks by evaluate.patience"
            " (early stopping) and schedule (learning rate)."
        )
    if job.eval_source is not None and not job.workers_evaluate:
        raise ConfigError(
            f"evaluate.where is {config.evaluate.where}, whose evaluations may end after the next epoch has begun, but"
            " callbacks need them between two epochs. Set evaluate.where to workers."
        )
    return intervene


class Answers:
    """Collects what is known of an epoch, and records the intervention that follows from it.

    Args:
        job: The run.
        intervene: The code that intervenes.
    """

    def __init__(self, job: Job, intervene: Intervener) -> None:
        self._job, self._intervene = job, intervene
        self._reader = RecordReader(job.paths)
        self._records = dict[int, StepRecord]()
        self._is_first = True
        self._polled_s = 0.0
        # The means of the epoch, in the process that trains.
        self._running: RunningMeans | None = None

    def poll(self) -> None:
        """Answers what is asked; looks at a bucket only as often as it suits it."""
        interval_s = poll_interval_s(self._job.paths.root)
        if interval_s > 1 and time.monotonic() - self._polled_s < interval_s:
            return
        self._polled_s = time.monotonic()
        for step in asked_steps(self._job.paths):
            self.answer(step)

    def at_batch(self, record: StepRecord | None) -> bool:
        """Tells the code that intervenes of a step that this process has finished; returns whether its epoch ends."""
        assert record is not None
        number = (record.step - 1) % self._job.steps_per_epoch
        if self._running is None:
            # An epoch that was interrupted goes on.
            self._running = RunningMeans()
            for earlier in RecordReader(self._job.paths).first_records(record.step - number - 1) if number else ():
                if earlier.step < record.step:
                    self._running.add(earlier)
        return self._intervene.at_batch(number, self._running.add(record))

    def resume(self) -> None:
        """Prepares the code that intervenes for a run that goes on within an epoch in this process."""
        commits = CheckpointStore(self._job.paths).commits()
        step = commits[-1].step if commits else 0
        # Otherwise it is asked before the next step.
        if (before := self._newest(step)) is not None and not before.is_last:
            self._intervene.resume(self._collect(step, {}, before))
            self._is_first = False

    def answer(self, step: int) -> None:
        """Answers the question of a step; an exception of the code that intervenes ends the run."""
        paths = self._job.paths
        parameters = read_question(paths, step)
        if parameters is None:
            return
        change = self._intervene(self._collect(step, parameters, self._newest(step) if self._is_first else None))
        self._is_first, self._running = False, None
        self._records = {number: record for number, record in self._records.items() if number > step}
        commits = CheckpointStore(paths).commits()
        put_intervention(paths, step, change, min((commit.step for commit in commits), default=0))

    def _newest(self, step: int) -> Intervention | None:
        """Returns the newest intervention up to a step."""
        steps = [other for other in intervened_steps(self._job.paths) if other <= step]
        return read_intervention(self._job.paths, steps[-1]) if steps else None

    def _collect(self, step: int, parameters: Mapping[str, Tensor], before: Intervention | None) -> EpochEnd:
        """Returns what is known of the epoch that ends with a step."""
        job, every = self._job, self._job.steps_per_epoch
        epoch = -(-step // every)
        self._records |= {record.step: record for record in self._reader.first_records((epoch - 1) * every)}
        records = [self._records[number] for number in range((epoch - 1) * every + 1, step + 1) if step]
        is_live = not job.config.train.strategy_traits.has_workers
        return EpochEnd(
            step=step,
            epoch=epoch,
            epochs=job.config.train.epochs,
            steps_per_epoch=every,
            lr=records[-1].lr if records else float(job.config.optimizer.init_args.get("lr", 0.0)),
            batches=[] if is_live else list(map(RunningMeans().add, records)),
            logs=means(records) if records else {},
            scores=next((e.metrics for e in read_scores(job.paths) if e.step == step), None),
            eval_batches=-(-job.eval_source.manifest.num_rows // job.config.evaluate.batch_size)
            if job.eval_source
            else 0,
            is_live=is_live,
            parameters=parameters,
            build_model=job.task.build_model,
            has_ended=step in intervened_steps(job.paths),
            before=before,
        )
