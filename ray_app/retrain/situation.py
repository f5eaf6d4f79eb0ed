"""How things stand at a start: the delivered data, the champion, and whether there is a reason to train.

A look at a delivery of data: what it is like, how it differs from the champion's, and what the champion says to it.

Is there a reason to train? A pure decision.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ray_app.cluster.resources import cluster
from ray_app.config.config import Config, default_tracking_uri
from ray_app.data.dataset import open_dataset
from ray_app.errors import DataError
from ray_app.models.registry import champion, version_of
from ray_app.preflight.prepare import make_task, open_evaluation_source, prepare
from ray_app.retrain.champion import Champion
from ray_app.retrain.gate import Files, Request, gate_rows, old_files, sample, score_packages
from ray_app.retrain.options import RetrainSection
from ray_app.retrain.profile import Agreement, Gate, Profile, profile, psi
from ray_app.retrain.rounds import Delivery, Inputs, RetrainPaths, digest_of, inputs_of
from ray_app.task.base import Task
from ray_app.task.metrics import combine, mode_of
from ray_app.task.schema import refuse_other_names
from ray_app.train.job import Job


@dataclass(frozen=True)
class DataLook:
    """What was found.

    Args:
        train: Profile of the training data.
        evaluation: Profile of the evaluation data.
        gate: What the gate judges on.
        drift: Population stability index of each column against the champion's training data; 0 if not significant.
        agreement: How far the champion agrees with the labels; None if there is none, or its value of then is not
            known.
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
        refuse_other_names(
            champion.classes, job.task.data_schema["classes"], f"data.path {config.data.path}", "the champion"
        )
    train, rows = profile(open_dataset(config.data.path), job.task.columns(), label)
    evaluation, _ = profile(open_dataset(str(config.data.eval_path)), job.task.columns(), label)
    to_judge = gate_request(job, config, section, delivery, {})
    own = (
        profile(open_dataset(section.gate_path), job.task.columns(), label)[0]
        if section.gate_path is not None
        else None
    )
    chosen = to_judge.chosen
    gate = Gate(int(chosen.sum()) if chosen is not None else to_judge.source.manifest.num_rows, own)
    known = champion.known.train if champion is not None else None
    drift = (
        {name: psi(rows[name], column) for name, column in known.columns.items() if name in rows}
        if known is not None
        else {}
    )
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
    job: Job,
    config: Config,
    section: RetrainSection,
    delivery: Delivery,
    models: dict[str, Files],
    blocks: int | None = None,
) -> Request:
    """The rows that the gate judges on: those of `retrain.gate_path`, or the part of the evaluation data that chooses
    no checkpoint.

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
    source = open_evaluation_source(job.task, section.gate_path or str(config.data.eval_path), config.data.read_task_mb)
    if source.fields != job.fields:
        raise DataError(
            f"A decoded row of retrain.gate_path {section.gate_path} is {source.fields}, of data.path"
            f" {config.data.path} it is"
            f" {job.fields}; both must be alike. Ingest them the same way."
        )
    chosen = None if section.gate_path is not None else gate_rows(source.manifest, delivery.evaluation)
    return Request(source, sample(source.manifest, source.manifest.num_rows), models, blocks, chosen)


def label_of(task: Task) -> str | None:
    """The column of class numbers of a classification: what its `label` names, or `label`."""
    name = str(getattr(task, "label", "label"))
    return name if task.classes and name in task.columns() else None


Trigger = Literal["none", "forced", "first", "new data", "drop", "drift", "age"]


@dataclass(frozen=True)
class TriggerFacts:
    """What the decision depends on.

    Args:
        champion: Version of the champion; None: there is none.
        age_days: Days since its promotion; None: not known.
        same_data: Whether the files are those that it was trained and promoted with; None: not known, since it was not
            made by a retraining.
        new_rows: Training rows in files that it was not trained on.
        rows: Training rows.
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        then: Its value when the champion was promoted; None: not known.
        now: Its value on the evaluation data as it is now; None: not known.
        drift: Population stability index of every column that drifted.
        judged: What came of the same data, configuration and code before; None: they are new, or were refused for
            another champion.
    """

    champion: str | None = None
    age_days: float | None = None
    same_data: bool | None = None
    new_rows: int = 0
    rows: int = 0
    metric: str = ""
    mode: str = "max"
    then: float | None = None
    now: float | None = None
    drift: dict[str, float] = field(default_factory=dict)
    judged: str | None = None


@dataclass(frozen=True)
class Triggered:
    """What to do.

    Args:
        retrain: Whether to train.
        trigger: Which reason came first.
        reason: The same in words, with figures.
    """

    retrain: bool
    trigger: Trigger
    reason: str


def decide(facts: TriggerFacts, section: RetrainSection) -> Triggered:
    """Decides whether to train; of several reasons the first of forced, first, new data, drop, drift, age counts.

    With the same data, configuration and code training gives the same bits, so what was judged before is not trained
    again, whatever the reason.
    """
    trigger, reason = _trigger(facts, section)
    if trigger == "none":
        return Triggered(False, trigger, reason)
    if facts.judged is not None:
        return Triggered(
            False, trigger, f"{reason}; but the same data, configuration and code were already judged: {facts.judged}"
        )
    return Triggered(True, trigger, reason)


def _trigger(facts: TriggerFacts, section: RetrainSection) -> tuple[Trigger, str]:  # noqa: PLR0911 - one for each trigger
    if section.force is not None:
        return "forced", f"forced: {section.force}"
    if facts.champion is None:
        return "first", "there is no champion yet"
    if facts.same_data is None:
        return "new data", f"it is not known what data champion version {facts.champion} was trained on"
    if facts.new_rows >= section.min_new_rows:
        return (
            "new data",
            f"new data: {facts.new_rows:,} of {facts.rows:,} training rows are in files that the champion was not"
            f" trained on",
        )
    fall = _fall(facts)
    if section.max_drop is not None and fall is not None and not fall <= section.max_drop:  # also NaN
        return "drop", (
            f"the champion's {facts.metric} on the evaluation data is {facts.now:.4f}, it was {facts.then:.4f} when it"
            f" was promoted: worse"
            f" by {fall:.4f}, more than {section.max_drop:g}"
        )
    drifted = {
        name: value for name, value in facts.drift.items() if section.max_psi is not None and value > section.max_psi
    }
    if drifted:
        worst = sorted(drifted, key=lambda name: -drifted[name])
        return "drift", f"drift: PSI above {section.max_psi:g} in " + ", ".join(
            f"{name} ({drifted[name]:.2f})" for name in worst[:5]
        )
    if section.max_age_days is not None and facts.age_days is not None and facts.age_days > section.max_age_days:
        return "age", f"the champion is {facts.age_days:.1f} days old, more than {section.max_age_days:g}"
    return "none", _nothing(facts, section)


def _fall(facts: TriggerFacts) -> float | None:
    """How much worse the champion's metric has become."""
    if facts.then is None or facts.now is None:
        return None
    return facts.then - facts.now if facts.mode == "max" else facts.now - facts.then


def _nothing(facts: TriggerFacts, section: RetrainSection) -> str:
    if facts.same_data:
        return f"the data is what champion version {facts.champion} was trained on"
    return (
        f"{facts.new_rows:,} new training rows, fewer than {section.min_new_rows:,} (retrain.min_new_rows), and nothing"
        f" else has changed"
    )


@dataclass(frozen=True)
class Situation:
    """What is given at a start.

    Args:
        config: The configuration.
        section: How to retrain.
        paths: The model's retrainings.
        client: MLflow's client.
        delivery: The files of the data.
        champion: What serves, or what served when the round began; None: nothing.
        stack: Ends the connection to the cluster, if one is needed.
    """

    config: Config
    section: RetrainSection
    paths: RetrainPaths
    client: Any
    delivery: Delivery
    champion: Champion | None
    stack: ExitStack

    @property
    def model(self) -> str:
        """Name of the registered model."""
        return str(self.config.tracking.registered_model)

    @property
    def uri(self) -> str:
        """Tracking URI."""
        return default_tracking_uri(self.config)

    @cached_property
    def task(self) -> Task:
        """The configured task, not prepared."""
        return make_task(self.config)

    @property
    def metric(self) -> str:
        """The metric that decides."""
        return self.config.evaluate.metric or self.task.best_metric

    @property
    def _own_mode(self) -> str:
        """Whether less or more of `metric` is better, as far as can be said without the data."""
        return (mode_of(self.metric, None) if self.metric != self.task.best_metric else None) or self.task.best_mode

    @cached_property
    def inputs(self) -> Inputs:
        """What a round would be about; of the champion it counts what the training depends on."""
        parts = []
        if self.champion is not None and self.section.start == "champion":
            parts.append(self.champion.version.params_digest)
        if self.champion is not None and self.section.data == "new_and_sample":
            before = self.champion.delivery
            parts.append(before.digest if before is not None else "")
        return inputs_of(self.config, self.section, self.delivery, digest_of(parts) if parts else "")

    @property
    def same_data(self) -> bool | None:
        """Whether the data is the champion's; None if that is not known."""
        before = self.champion.delivery if self.champion is not None else None
        return None if before is None else before == self.delivery

    @cached_property
    def look(self) -> DataLook:
        """A look at the data; reads all of it.

        Raises:
            DataError: It cannot be used.
        """
        return look_at(self.config, self.section, self.delivery, self.champion, self.connect)

    @cached_property
    def connect(self) -> Callable[[], None]:
        """Connects to the cluster, or starts one, at the first call; what runs later uses the same connection."""
        made: list[bool] = []

        def call() -> None:
            if not made:
                made.append(self.stack.enter_context(cluster(self.config)))

        return call

    def at_champion(self, version: str | None) -> Situation:
        """The situation with another version as the champion: that of when a round began."""
        if version == (self.champion.version.version if self.champion is not None else None):
            return self
        return replace(self, champion=champion_at(self.paths, self.client, self.model, self.uri, version))

    def decide(self, judged: str | None) -> Triggered:
        """Whether to train; what takes time to find out is looked at only if nothing else is a reason.

        Args:
            judged: What came of the same data, configuration and code before.

        Raises:
            DataError: The data cannot be used.
        """
        facts = self._facts(judged)
        decision = decide(facts, self.section)
        measures = self.section.max_drop is not None or self.section.max_psi is not None
        if decision.trigger in ("none", "age") and facts.same_data is False and judged is None and measures:
            agreement = self.look.agreement
            now = agreement.evaluation if agreement is not None else None
            decision = decide(replace(facts, now=now, drift=self.look.drift), self.section)
        return decision

    def _facts(self, judged: str | None) -> TriggerFacts:
        if self.champion is None:
            return TriggerFacts(judged=judged)
        before = self.champion.delivery
        manifest = open_dataset(self.config.data.path).manifest
        old = old_files(self.delivery.train, before.train) if before is not None else set()
        is_new = [path not in old for path in manifest.paths]
        return TriggerFacts(
            champion=self.champion.version.version,
            age_days=self.champion.version.age_days,
            same_data=self.same_data,
            new_rows=sum(
                rows
                for file, rows in zip(manifest.file_of.tolist(), manifest.rows.tolist(), strict=True)
                if is_new[file]
            ),
            rows=manifest.num_rows,
            metric=self.metric,
            mode=self.config.evaluate.mode or self._own_mode,
            then=self.champion.accepted(self.metric),
            judged=judged,
        )


def champion_at(paths: RetrainPaths, client: Any, name: str, uri: str, version: str | None) -> Champion | None:
    """A version with its record; None if there is none."""
    return None if version is None else Champion(version_of(client, name, version), paths, uri)


def champion_now(paths: RetrainPaths, client: Any, name: str, uri: str) -> Champion | None:
    """The version that serves, with its record."""
    serves = champion(client, name)
    return None if serves is None else Champion(serves, paths, uri)
