"""A look at a delivery of data: what it is like, how it differs from the champion's, and what the champion says to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ray_app.config.config import Config
from ray_app.data.dataset.dataset import open_dataset
from ray_app.errors import DataError
from ray_app.retrain.champion import Champion
from ray_app.retrain.comparison import Files, Request, sample, score_packages
from ray_app.retrain.key import Delivery
from ray_app.retrain.profile import Profile, profile, psi
from ray_app.retrain.section import RetrainSection
from ray_app.retrain.selection import gate_rows
from ray_app.retrain.validate import Agreement, Gate
from ray_app.runs.preparing.prepare import evaluation_source, prepare
from ray_app.task.base import Task
from ray_app.task.schema import refuse_other_names
from ray_app.task.score.scoring import combine
from ray_app.train.job import Job


@dataclass(frozen=True)
class DataLook:
    """What was found.

    Args:
        train: Profile of the training data.
        evaluation: Profile of the evaluation data.
        gate: What the gate judges on.
        drift: Population stability index of each column against the champion's training data; 0 if not significant.
        agreement: How far the champion agrees with the labels; None if there is none, or its value of then is not known.
    """

    train: Profile
    evaluation: Profile
    gate: Gate
    drift: dict[str, float]
    agreement: Agreement | None


def look_at(
    config: Config, section: RetrainSection, delivery: Delivery, champion: Champion | None, connect: Callable[[], None]
) -> DataLook:
    """Reads a delivery once and has the champion score it.

    Args:
        config: The configuration.
        section: How many rows to score, and what the gate judges on.
        delivery: The data.
        champion: What to hold it against.
        connect: Connects to the cluster; called if something is to be scored.

    Raises:
        DataError: The data cannot be used.
    """
    job = prepare(config).job
    assert job.evaluation is not None
    label = label_of(job.task)
    if champion is not None:
        refuse_other_names(champion.classes, job.task.data_schema["classes"], f"data.path {config.data.path}", "the champion")
    train, rows = profile(open_dataset(config.data.path), job.task.columns(), label)
    evaluation, _ = profile(open_dataset(str(config.data.eval_path)), job.task.columns(), label)
    to_judge = gate_request(job, config, section, delivery, {})
    own = profile(open_dataset(section.gate_path), job.task.columns(), label)[0] if section.gate_path is not None else None
    chosen = to_judge.chosen
    gate = Gate(int(chosen.sum()) if chosen is not None else to_judge.source.manifest.num_rows, own)
    known = champion.known.train if champion is not None else None
    drift = {name: psi(rows[name], column) for name, column in known.columns.items() if name in rows} if known is not None else {}
    accepted = champion.accepted(job.best_metric) if champion is not None else None
    agreement = None
    if champion is not None and accepted is not None and (known is None or known.schema == train.schema):
        connect()
        models = {"champion": champion.files}
        requests = [
            Request(job.source, sample(job.plan.manifest, section.sample_rows), models),
            replace(to_judge, models=models),
        ]
        scored = score_packages(job.task, (job.best_metric,), requests, config.evaluate)
        values = [combine(job.task, one["champion"]).values[job.best_metric] for one in scored]
        agreement = Agreement(job.best_metric, job.best_mode, accepted, values[0], values[1])
    return DataLook(train, evaluation, gate, drift, agreement)


def gate_request(
    job: Job, config: Config, section: RetrainSection, delivery: Delivery, models: dict[str, Files], blocks: int | None = None
) -> Request:
    """The rows that the gate judges on: those of `retrain.gate_path`, or the part of the evaluation data that chooses no checkpoint.

    Args:
        job: The prepared run.
        config: The configuration of the retraining; its `data.eval_path` is the whole of the evaluation data.
        section: Names the gate's own data.
        delivery: The data.
        models: See `Request`.
        blocks: See `Request`.

    Raises:
        DataError: The rows are not like those that are trained on.
    """
    source = evaluation_source(job.task, section.gate_path or str(config.data.eval_path), config.data.read_task_mb)
    if source.fields != job.fields:
        raise DataError(
            f"A decoded row of retrain.gate_path {section.gate_path} is {source.fields}, of data.path {config.data.path} it is"
            f" {job.fields}; both must be alike. Ingest them the same way."
        )
    chosen = None if section.gate_path is not None else gate_rows(source.manifest, delivery.evaluation)
    return Request(source, sample(source.manifest, source.manifest.num_rows), models, blocks, chosen)


def label_of(task: Task) -> str | None:
    """The column of class numbers of a classification: what its `label` names, or `label`."""
    name = str(getattr(task, "label", "label"))
    return name if task.classes and name in task.columns() else None
