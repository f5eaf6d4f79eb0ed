"""A look at a delivery of data: what it is like, how it differs from the champion's, and what the champion says to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ray_app.config.config import Config
from ray_app.data.dataset.dataset import open_dataset
from ray_app.retrain.champion import Champion
from ray_app.retrain.comparison import Request, sample, score_packages
from ray_app.retrain.profile import Profile, profile, psi
from ray_app.retrain.section import RetrainSection
from ray_app.retrain.validate import Agreement
from ray_app.runs.prepare import prepare
from ray_app.task.base import Task
from ray_app.task.scoring import combine


@dataclass(frozen=True)
class Look:
    """What was found.

    Args:
        train: Profile of the training data.
        evaluation: Profile of the evaluation data.
        drift: Population stability index of each column against the champion's training data; 0 if not significant.
        agreement: How far the champion agrees with the labels; None if there is none, or its value of then is not known.
    """

    train: Profile
    evaluation: Profile
    drift: dict[str, float]
    agreement: Agreement | None


def look_at(config: Config, section: RetrainSection, champion: Champion | None, connect: Callable[[], None]) -> Look:
    """Reads a delivery once and has the champion score it.

    Args:
        config: The configuration.
        section: How many rows to score.
        champion: What to hold it against.
        connect: Connects to the cluster; called if something is to be scored.

    Raises:
        DataError: The data cannot be used.
    """
    job = prepare(config).job
    assert job.evaluation is not None
    label = label_of(job.task)
    train, rows = profile(open_dataset(config.data.path), job.task.columns(), label)
    evaluation, _ = profile(open_dataset(str(config.data.eval_path)), job.task.columns(), label)
    known = champion.known.train if champion is not None else None
    drift = {name: psi(rows[name], column) for name, column in known.columns.items() if name in rows} if known is not None else {}
    accepted = champion.accepted(job.best_metric) if champion is not None else None
    agreement = None
    if champion is not None and accepted is not None and (known is None or known.schema == train.schema):
        connect()
        models = {"champion": champion.files}
        requests = [
            Request(job.source, sample(job.plan.manifest, section.sample_rows), models),
            Request(job.evaluation, sample(job.evaluation.manifest, job.evaluation.manifest.num_rows), models),
        ]
        scored = score_packages(job.task, (job.best_metric,), requests, config.evaluate)
        values = [combine(job.task, one["champion"]).values[job.best_metric] for one in scored]
        agreement = Agreement(job.best_metric, job.best_mode, accepted, values[0], values[1])
    return Look(train, evaluation, drift, agreement)


def label_of(task: Task) -> str | None:
    """The column of class numbers of a classification: what its `label` names, or `label`."""
    name = str(getattr(task, "label", "label"))
    return name if task.classes and name in task.columns() else None
