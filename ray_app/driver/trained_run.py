"""Trained runs, read from their directories: the prepared task, the choice of a checkpoint, and its model."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass, replace

import torch

from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config
from ray_app.data.folds import open_training_data
from ray_app.driver.finalize import (
    finalize_run,
    make_late_tracker,
    newest_start,
    stored_job,
    summarize,
    to_mlflow_status,
)
from ray_app.errors import CheckpointError, ConfigError, DataError, TrackingError
from ray_app.runlog.evaluations import Evaluation, read_scores
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import read_code_text, read_config, read_manifest
from ray_app.storage.data_files import find_file
from ray_app.storage.files import put_json, read_json, to_location
from ray_app.task.base import Task
from ray_app.task.schema import prepare_task, refuse_other_schema
from ray_app.task.texts import TextEncoder
from ray_app.track.mlflow_client import OpenRun
from ray_app.track.tracker import check_available
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)(?:-(\d+))?")


def load_trained_job(paths: RunPaths, config: Config | None = None) -> Job:
    """Returns the job of a run with its task as it was trained, see `load_trained_task`; without its data.

    `config` is its configuration if it was read already, and compared with a trusted one.
    """
    job = stored_job(paths, config)
    return replace(job, task=load_trained_task(paths, job.config, job.task))


def load_trained_task(paths: RunPaths, config: Config, task: Task) -> Task:
    """Returns the task of a run as it was trained: with the settings that the run keeps, or prepared from its data.

    Args:
        config: Its configuration, perhaps with another task for other metrics, which is prepared from the data.
        task: The task of the configuration.

    Raises:
        ConfigError: The settings that the run keeps name other code than its configuration.
        DataError: The data is needed, and it is not there or has changed since.
    """
    settings = None
    # The settings may name classes, as the configuration does.
    if config.task == read_config(paths).task and paths.task.exists():
        settings = json.loads(read_code_text(paths.task))
    if settings is not None:
        return task.restore(settings, f"The file {paths.task}")
    dataset = open_training_data(config)
    if dataset.manifest.digest != read_manifest(paths).digest:
        raise DataError(
            f"The data {config.data.path} of the run {paths.name!r} has changed since training, but the task is rebuilt"
            " from it. Restore the data, or use the registered version of the run."
        )
    schema = read_json(paths.schema) or {}
    refuse_other_schema(schema, dataset.facts, f"data.path {config.data.path}", f"the run {paths.name!r}")
    return prepare_task(task, dataset.facts, schema)


def choose_checkpoint(job: Job, name: str) -> Commit:
    """Returns the checkpoint of a run that a name stands for, see `ExportOptions.checkpoint`.

    Raises:
        ConfigError: There is no checkpoint of this name.
        CheckpointError: There is no checkpoint at all.
    """
    if name == "best":
        return best_commit(job)[0]
    commits = _commits(job)
    if name == "newest":
        return commits[-1]
    if match := _STEP.fullmatch(name):
        same_step = [c for c in commits if c.step == int(match[1])]
        if matching := [c for c in same_step if match[2] is None or c.fence == int(match[2])]:
            return matching[-1]
    valid = ", ".join(job.paths.checkpoint(c.step, c.fence).name for c in commits)
    raise ConfigError(
        f"The run {job.paths.name!r} has no checkpoint {name!r}; it must be best, newest or one of {valid}."
    )


def best_commit(job: Job) -> tuple[Commit, Evaluation | None]:
    """Returns the existing checkpoint with the best evaluation, or the newest if none of them was evaluated."""
    commits = {(c.step, c.params_digest): c for c in _commits(job)}
    evaluations = job.best_first()
    existing = [(commits[key], e) for e in evaluations if (key := (e.step, e.params_digest)) in commits]
    commit, evaluation = existing[0] if existing else (list(commits.values())[-1], None)
    if not any(math.isfinite(e.metrics[job.best_metric]) for e in evaluations) and read_scores(job.paths):
        problem = f"{job.best_metric} is not a number in any evaluation of {job.paths.name}"
        logger.warning("%s, so no checkpoint is known to be best; the one of step %d is used.", problem, commit.step)
        return commit, None
    if evaluations and evaluation is not evaluations[0]:
        problem = f"The best checkpoint, of step {evaluations[0].step}, is missing"
        substitute = "the newest" if evaluation is None else "the best remaining one"
        logger.warning("%s; %s is used: step %d.", problem, substitute, commit.step)
    return commit, evaluation


def load_model(job: Job, commit: Commit) -> torch.nn.Module:
    """Returns the model of a checkpoint, on the CPU and in evaluation mode, after a check of its parameters' digest."""
    model = job.task.build_model()
    model.load_state_dict(CheckpointStore(job.paths).load_model(commit))
    if params_digest(model.state_dict()) != commit.params_digest:
        raise CheckpointError(f"The model of step {commit.step} has other parameters than its commit recorded.")
    return model.eval()


def read_tokenizer(job: Job) -> bytes | None:
    """Returns the content of the file with the tokenizer of a run's data, None if it has none."""
    file = find_file(job.paths.tokenizer)
    return file.location.read_bytes() if file is not None else None


def read_texts(job: Job) -> TextEncoder | None:
    """Returns what encodes texts as those of a run's data, None if it has no tokenizer."""
    content = read_tokenizer(job)
    return TextEncoder(**json.loads(content)) if content is not None else None


def _commits(job: Job) -> list[Commit]:
    """Returns the checkpoints of a run, at least one."""
    commits = CheckpointStore(job.paths).commits()
    if not commits:
        raise CheckpointError(f"{job.paths.root} has no committed checkpoint yet.")
    return commits


@dataclass(frozen=True)
class SentSummary:
    """What was sent to MLflow: the points that it lacked, those of `evaluations` included, and the run's status there.

    `uri` is without credentials.
    """

    run_id: str
    uri: str
    status: str
    points: int
    evaluations: int


def send_to_mlflow(
    root: str, uri: str | None = None, experiment: str | None = None, open_run: OpenRun = OpenRun()
) -> SentSummary:
    """Sends what MLflow lacks of a run without a driver, each point once, and in the order of the record.

    Args:
        uri: MLflow tracking URI; by default that of the run.
        experiment: Name of the experiment, for a run that MLflow does not have; by default that of the run.
        open_run: The MLflow run in which a new one is recorded.

    Raises:
        ConfigError: There is no such run, a driver writes it, or MLflow is not a database or server.
        TrackingError: MLflow did not take everything; what it took is not sent again.
    """
    paths = RunPaths(to_location(root))
    newest_start(paths)
    with acquire_lease(paths, closing=True):
        job = stored_job(paths)
        config = job.config.replace(tracking__enabled=True)
        if uri is not None:
            config = config.replace(tracking__uri=uri)
        if experiment is not None:
            config = config.replace(tracking__experiment=experiment)
        check_available(config)
        status = finalize_run(job, newest_start(paths))
        tracker = make_late_tracker(job, config if uri or experiment else job.config, open_run)
        try:
            tracker.send_all(to_mlflow_status(status))
        except Exception as error:
            raise TrackingError(
                f"MLflow at {redact(tracker.uri)} did not accept the whole record: {type(error).__name__}:"
                f" {redact(str(error))}\n{tracker.sent_points} points were sent, and are not sent again. Try again when"
                " the server can be reached."
            ) from error
        if (read_json(paths.summary) or {}).get("mlflow_run_id") != tracker.run_id:
            put_json(paths.summary, summarize(job, status))
        sent = tracker.sent_points, tracker.sent_evaluations
        return SentSummary(str(tracker.run_id), redact(tracker.uri), to_mlflow_status(status), *sent)
