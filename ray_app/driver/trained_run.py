"""A run that was trained, from its directory: its task as it was, and the checkpoint that somebody means.

Sends what MLflow lacks of a run that has ended.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, replace

import torch

from ray_app.checkpoint.format import params_digest, unpack_model
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.probes import infer_specs
from ray_app.driver.finalize import late_tracker, mlflow_status, newest_start, settle, stored_job, summarize
from ray_app.errors import CheckpointError, ConfigError, DataError, TrackingError
from ray_app.preflight.prepare import read_training_row
from ray_app.runlog.endings import put_summary
from ray_app.runlog.evaluations import Evaluation, read_scores
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import read_manifest
from ray_app.storage.files import read_json, to_location
from ray_app.task.schema import prepare_task, refuse_other_schema
from ray_app.track.tracker import check_available
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)(?:-(\d+))?")


def trained_job(paths: RunPaths) -> Job:
    """A run with its task prepared from its data, which can be read, as they were for the training; without evaluation
    data.

    Raises:
        ConfigError: It is no run, or its task cannot be made here.
        DataError: The data is not what it was.
    """
    job = stored_job(paths)
    dataset = training_data(paths, job.config)
    refuse_other_schema(
        read_json(paths.schema) or {}, dataset.facts, f"data.path {job.config.data.path}", f"the run {paths.name!r}"
    )
    task = prepare_task(job.task, dataset.facts)
    skips = job.config.data.on_bad_row == "skip"
    fields = infer_specs(read_training_row(job.config, dataset, task)[1], dataset, task.columns(), task.decode, skips)
    return replace(job, task=task, data_root=dataset.root, fields=fields)


def training_data(paths: RunPaths, config: Config) -> Dataset:
    """The data that a run was trained on.

    Raises:
        DataError: It is not what it was.
    """
    dataset = open_dataset(config.data.path)
    if dataset.manifest.digest != read_manifest(paths).digest:
        raise DataError(
            f"The data {config.data.path} of the run {paths.name!r} is not what it was trained on, from which its task"
            f" is made again."
            " Restore it, or use the version that the run was registered as."
        )
    return dataset


def chosen(job: Job, which: str) -> Commit:
    """The checkpoint of a run that is meant.

    Args:
        job: The run.
        which: `best` by the evaluation metric, `newest`, or the name of one below `checkpoints`, as
            `step-00000120-0003` or `step-120`.

    Raises:
        ConfigError: There is none of this name.
        CheckpointError: There is none at all.
    """
    if which == "best":
        return best_commit(job)[0]
    commits = _commits(job)
    if which == "newest":
        return commits[-1]
    named = _STEP.fullmatch(which)
    found = [c for c in commits if named and c.step == int(named[1]) and (named[2] is None or c.fence == int(named[2]))]
    if not found:
        valid = ", ".join(job.paths.checkpoint(c.step, c.fence).name for c in commits)
        raise ConfigError(
            f"The run {job.paths.name!r} has no checkpoint {which!r}; it must be best, newest or one of {valid}."
        )
    return found[-1]


def best_commit(job: Job) -> tuple[Commit, Evaluation | None]:
    """The checkpoint with the best evaluation of those that are there, or the newest if none of them was evaluated.

    Raises:
        CheckpointError: There is none.
    """
    commits = {(c.step, c.params_digest): c for c in _commits(job)}
    evaluations = job.best_first()
    here = [(commits[key], e) for e in evaluations if (key := (e.step, e.params_digest)) in commits]
    commit, found = here[0] if here else (list(commits.values())[-1], None)
    if not any(math.isfinite(e.metrics[job.best_metric]) for e in evaluations) and read_scores(job.paths):
        none = (
            "%s is not a number in any evaluation of %s, so none says which checkpoint is best; that of step %d is"
            " taken."
        )
        logger.warning(none, job.best_metric, job.paths.name, commit.step)
        return commit, None
    if evaluations and found is not evaluations[0]:
        others = "the newest" if found is None else "the best of the others"
        gone = "The best checkpoint, of step %d, is gone (checkpoint.keep_best); %s is taken: step %d."
        logger.warning(gone, evaluations[0].step, others, commit.step)
    return commit, found


def load_model(job: Job, commit: Commit) -> torch.nn.Module:
    """The model of a checkpoint, on the CPU and in evaluation mode, with the very parameters that were committed.

    Raises:
        CheckpointError: It is damaged.
    """
    model = job.task.build_model()
    model.load_state_dict(unpack_model(CheckpointStore(job.paths).load(commit)))
    if params_digest(model.state_dict()) != commit.params_digest:
        raise CheckpointError(f"The model of step {commit.step} has other parameters than were committed.")
    return model.eval()


def _commits(job: Job) -> list[Commit]:
    commits = CheckpointStore(job.paths).commits()
    if not commits:
        raise CheckpointError(f"{job.paths.root} holds no committed checkpoint yet.")
    return commits


@dataclass(frozen=True)
class Replayed:
    """What was sent.

    Args:
        run_id: Id of the MLflow run.
        uri: Where it is, without credentials.
        status: How the run ended, as MLflow calls it.
        points: Points that MLflow lacked, evaluations among them.
        evaluations: Evaluations that it lacked.
    """

    run_id: str
    uri: str
    status: str
    points: int
    evaluations: int


def replay(root: str, uri: str | None = None, experiment: str | None = None) -> Replayed:
    """Sends what MLflow lacks of a run that no driver writes; nothing twice, and in the order of the record.

    Args:
        root: The run's directory, as a path or an S3 URI.
        uri: MLflow tracking URI; not given: the run's own.
        experiment: Name of the experiment, for a run that MLflow does not know; not given: the run's own.

    Raises:
        ConfigError: There is no such run, a driver writes it, or MLflow is no database or server.
        TrackingError: MLflow did not take everything; what it took is not sent again.
    """
    paths = RunPaths(to_location(root))
    newest_start(paths)
    with acquire_lease(paths, closing=True):
        job = stored_job(paths)
        config = job.config.replace(tracking__enabled=True)
        config = config if uri is None else config.replace(tracking__uri=uri)
        config = config if experiment is None else config.replace(tracking__experiment=experiment)
        check_available(config)
        status = settle(job, newest_start(paths))
        tracker = late_tracker(job, config if uri or experiment else job.config)
        try:
            tracker.send_all(mlflow_status(status))
        except Exception as error:
            raise TrackingError(
                f"MLflow at {redact(tracker.uri)} did not take everything: {type(error).__name__}:"
                f" {redact(str(error))}\n"
                f"It took {tracker.sent_points} points now, which are not sent again. Try again when it can be reached."
            ) from error
        if (read_json(paths.summary) or {}).get("mlflow_run_id") != tracker.run_id:
            put_summary(paths, summarize(job, status))
        return Replayed(
            str(tracker.run_id),
            redact(tracker.uri),
            mlflow_status(status),
            tracker.sent_points,
            tracker.sent_evaluations,
        )
