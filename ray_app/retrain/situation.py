"""The input of a retraining decision: the delivered data, the champion, and the reason to train, if there is one.

`inspect_data` reads a delivery and compares it with the champion's data; `decide_trigger` is a pure function of facts
that returns whether to train; `Situation` combines both for one start. `Champion` is the version that serves, with the
record of its retraining; `roll_back` lets the version before it serve again, with a reason in the audit record.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import safetensors.torch

from ray_app.cluster.resources import cluster, keep_connection
from ray_app.config.config import Config, default_tracking_uri
from ray_app.data.dataset import open_dataset
from ray_app.data.folds import open_training_data
from ray_app.driver.model_export import user_name
from ray_app.errors import DataError
from ray_app.models.inputs import open_evaluation_rows, open_rows
from ray_app.models.loader import DESCRIPTION
from ray_app.models.registry import (
    Rollback,
    Version,
    download_version,
    load_parameters,
    rollback,
    rollbacks,
    version_of,
)
from ray_app.preflight.inputs import make_task
from ray_app.preflight.prepare import prepare
from ray_app.retrain.gate import (
    Files,
    ScoringRequest,
    find_old_files,
    read_package_files,
    sample_segments,
    score_packages,
)
from ray_app.retrain.options import RetrainSection
from ray_app.retrain.profile import Agreement, GateRows, Profile, ReferenceProfiles, profile_dataset, psi
from ray_app.retrain.rounds import (
    Delivery,
    Inputs,
    RetrainPaths,
    Round,
    add_audit_entry,
    make_inputs,
    read_audit_entries,
)
from ray_app.runlog.lease import Lease, acquire_lease, remove_old_fences
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, put_atomic
from ray_app.task.base import Task
from ray_app.task.metrics import combine, mode_of
from ray_app.task.schema import named_classes, refuse_other_names
from ray_app.track.mlflow_client import connect
from ray_app.train.job import Job

KEY_TAG = "ray_app.retrain_key"
_AGREEMENT_ROWS = 20_000
"""Training rows, chosen by a keyed hash, on which the champion's agreement with the labels is measured."""


@dataclass(frozen=True)
class Champion:
    """The version of the model that serves, or that served when a round began."""

    version: Version
    paths: RetrainPaths
    uri: str

    @property
    def delivery(self) -> Delivery | None:
        """The data on which it was trained and promoted; None if it was not made by a retraining."""
        files = self._stage("validated").get("delivery")
        return Delivery(**files) if files else None

    @property
    def profiles(self) -> ReferenceProfiles:
        """The profiles of its data, with which a new delivery is compared."""
        stage = self._stage("validated")
        return ReferenceProfiles(
            *(Profile.from_json(stage[name]) if stage.get(name) else None for name in ("train", "evaluation", "gate"))
        )

    def metric_when_promoted(self, metric: str) -> float | None:
        """Returns its value of a metric on the gate's rows at its promotion; None if not recorded or not finite.

        If the record of the gate is missing or has another metric, the value is read from the version's tags.
        """
        gate_figures, tags = self._stage("judged").get("figures", {}), self.version.tags
        if gate_figures.get("metric") == metric:
            value = float(gate_figures["challenger"])
        elif tags.get("ray_app.metric") == metric:
            value = float(tags["ray_app.metric_value"])
        else:
            return None
        return value if math.isfinite(value) else None

    def write_parameters(self) -> Location:
        """Writes its parameters to a file for `train.init_from`, unless the file exists; returns the file."""
        with tempfile.TemporaryDirectory() as folder:
            tensors = load_parameters(download_version(self.uri, self.version, Path(folder)))
        file = self.paths.parameters(self.version.params_digest)
        if not file.exists():
            put_atomic(file, safetensors.torch.save(tensors))
        return file

    @cached_property
    def files(self) -> Files:
        """The files of its package."""
        return fetch_package(self.uri, self.version)

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of its classes; None if they have no names, or if another program has made the version."""
        if not self.version.params_digest:
            return None
        return named_classes(json.loads(self.files[DESCRIPTION]).get("classes") or [])

    def _stage(self, name: str) -> dict[str, Any]:
        """Returns the result of a stage of the round that made it; empty if there is none."""
        key = self.version.tags.get(KEY_TAG, "")
        # A tag is data of the registry, and must not lead out of the folder of the rounds.
        return (Round(self.paths, key).read(name) if re.fullmatch(r"[\w-]+", key) else None) or {}


def fetch_package(uri: str, version: Version) -> Files:
    """Downloads the package of a version; returns its files."""
    with tempfile.TemporaryDirectory() as folder:
        return read_package_files(download_version(uri, version, Path(folder)))


def roll_back(config: Config, reason: str) -> Rollback:
    """Rolls back to the version that the champion replaced: that version serves again.

    Raises:
        RunHeldError: Another process holds the lease of the alias and does not release it in time.
        RegistryError: The reason is empty, there is no champion, or it replaced no version.
        Exception: An error of MLflow; the champion keeps serving.
    """
    paths, name = RetrainPaths.of(config), str(config.tracking.registered_model)
    with acquire_alias_lease(paths):
        client = connect(default_tracking_uri(config))
        record_rollbacks(paths, client, name)
        result = rollback(client, name, reason, user_name())
        record_rollbacks(paths, client, name)
    return result


def acquire_alias_lease(paths: RetrainPaths) -> Lease:
    """Acquires the lease to move a model's alias, which takes seconds; waits for another process that holds it."""
    lease = acquire_lease(RunPaths(paths.deciding), closing=True)
    remove_old_fences(RunPaths(paths.deciding), lease.fence)
    return lease


def record_rollbacks(paths: RetrainPaths, client: Any, name: str) -> None:
    """Adds each rollback in MLflow that the audit record lacks: its process may have died before the entry."""
    rollbacks_by_id = {f"rollback {entry.version} {entry.at}": entry for entry in rollbacks(client, name)}
    recorded_ids = {entry["id"] for entry in read_audit_entries(paths)} if rollbacks_by_id else set()
    for id, entry in rollbacks_by_id.items():
        if id not in recorded_ids:
            details = {"version": entry.version, "champion": entry.to, "rolled_back_at": entry.at, "by": entry.by}
            add_audit_entry(paths, id, "rolled back", entry.reason, details)


@dataclass(frozen=True)
class DataInspection:
    """The result of reading a delivery.

    Args:
        drift: Population stability index of each column against the champion's training data; 0 if not significant.
        agreement: Agreement of the champion with the labels; None without a champion, or if its metric when it was
            promoted is not recorded.
    """

    train: Profile
    evaluation: Profile
    gate: GateRows
    drift: dict[str, float]
    agreement: Agreement | None


def inspect_data(
    config: Config, section: RetrainSection, champion: Champion | None, connect: Callable[[], None]
) -> DataInspection:
    """Reads a delivery once, and scores the champion on it; raises DataError if the data cannot be used."""
    job = prepare(config).job
    assert job.eval_source is not None
    label = label_column(job.task)
    if champion is not None:
        refuse_other_names(
            champion.classes, job.task.data_schema["classes"], f"data.path {config.data.path}", "the champion"
        )
    train, train_sample = profile_dataset(open_training_data(config), job.task.columns(), label)
    classes = job.task.data_schema["classes"]
    evaluation, _ = profile_dataset(open_dataset(str(config.data.eval_path), classes), job.task.columns(), label)
    gate_rows_request = gate_request(job, config, section, {})
    gate_profile = None
    if section.gate_path is not None:
        gate_profile, _ = profile_dataset(open_dataset(section.gate_path, classes), job.task.columns(), label)
    evaluate = job.config.evaluate
    batch_rows = evaluate.batch_size if evaluate.fixed_batches else 1
    gate = GateRows(gate_rows_request.source.manifest.num_rows, gate_profile, batch_rows)
    reference = champion.profiles.train if champion is not None else None
    columns = reference.columns if reference is not None else {}
    drift = {name: psi(train_sample[name], column) for name, column in columns.items() if name in train_sample}
    accepted = champion.metric_when_promoted(job.best_metric) if champion is not None else None
    is_comparable = reference is None or reference.schema == train.schema
    agreement = None
    if champion is not None and accepted is not None and is_comparable:
        connect()
        models = {"champion": champion.files}
        requests = [
            ScoringRequest(job.source, sample_segments(job.plan.manifest, _AGREEMENT_ROWS), models),
            replace(gate_rows_request, models=models),
        ]
        scored = score_packages(job.task, (job.best_metric,), requests, job.config.evaluate)
        values = [combine(job.task, chunks["champion"]).values[job.best_metric] for chunks in scored]
        agreement = Agreement(job.best_metric, job.best_mode, accepted, values[0], values[1])
    return DataInspection(train, evaluation, gate, drift, agreement)


def gate_request(
    job: Job, config: Config, section: RetrainSection, models: dict[str, Files], blocks: int | None = None
) -> ScoringRequest:
    """Returns the request to score models on the rows of the gate, by which no checkpoint is chosen.

    These are `retrain.gate_path`, or half of the evaluation data. Raises DataError if they have other fields than the
    training data.
    """
    if section.gate_path is not None:
        source = open_rows(job.task, section.gate_path, read_mb=config.data.read_task_mb)
    else:
        source = open_evaluation_rows(job.task, config.replace(evaluate__half="report", evaluate__max_rows=None))
    if source.fields != job.fields:
        raise DataError(
            f"A decoded row of retrain.gate_path {section.gate_path} has {source.fields}, one of data.path"
            f" {config.data.path} has {job.fields}; both must be the same. Ingest them with the same options."
        )
    return ScoringRequest(source, sample_segments(source.manifest, source.manifest.num_rows), models, blocks)


def label_column(task: Task) -> str | None:
    """Returns the column of class numbers of a classification; None if the task has no classes or no such column.

    The task's attribute `label` names the column; without it the name is `label`.
    """
    name = str(getattr(task, "label", "label"))
    return name if task.classes and name in task.columns() else None


Trigger = Literal["none", "forced", "first", "new data", "drop", "drift", "age"]


@dataclass(frozen=True)
class TriggerFacts:
    """The facts on which the decision to train depends.

    Args:
        champion: Version of the champion; None: there is none.
        age_days: Days since the champion's promotion; None: not recorded.
        same_data: Whether the files are those with which the champion was trained and promoted; None: not recorded,
            because no retraining made it.
        then: The champion's value when it was promoted; None: not recorded.
        now: The champion's value on the delivered evaluation data; None: not computed.
        judged: Result of an earlier round with the same data, configuration and code; None: they are new, or were
            refused for another champion.
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
class TriggerDecision:
    """The decision whether to train."""

    retrain: bool
    trigger: Trigger
    reason: str


def decide_trigger(facts: TriggerFacts, section: RetrainSection) -> TriggerDecision:
    """Decides whether to train.

    The first trigger that applies counts, in the order forced, first, new data, drop, drift, age. With the same
    data, configuration and code training gives bit-identical parameters, so a combination that was judged before is not
    trained again, whatever the trigger.
    """
    trigger, reason = _find_trigger(facts, section)
    if trigger == "none":
        return TriggerDecision(False, trigger, reason)
    if facts.judged is not None:
        return TriggerDecision(
            False, trigger, f"{reason}; but the same data, configuration and code were already judged: {facts.judged}"
        )
    return TriggerDecision(True, trigger, reason)


def _find_trigger(facts: TriggerFacts, section: RetrainSection) -> tuple[Trigger, str]:  # noqa: PLR0911 - one for each trigger
    if section.force is not None:
        return "forced", f"forced: {section.force}"
    if facts.champion is None:
        return "first", "there is no champion yet"
    if facts.same_data is None:
        return "new data", f"the training data of champion version {facts.champion} is unknown"
    if facts.new_rows >= section.min_new_rows:
        return (
            "new data",
            f"new data: {facts.new_rows:,} of {facts.rows:,} training rows are in files unknown to the champion",
        )
    drop = None
    if facts.then is not None and facts.now is not None:
        drop = facts.then - facts.now if facts.mode == "max" else facts.now - facts.then
    # The negated comparison finds NaN, too.
    if section.max_drop is not None and drop is not None and not drop <= section.max_drop:
        return "drop", (
            f"the champion's {facts.metric} on the evaluation data is {facts.now:.4f}, but was {facts.then:.4f} at its"
            f" promotion: worse by {drop:.4f}, more than {section.max_drop:g}"
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
    if facts.same_data:
        return "none", f"the data is the training data of champion version {facts.champion}"
    return "none", (
        f"{facts.new_rows:,} new training rows, fewer than {section.min_new_rows:,} (retrain.min_new_rows), and nothing"
        f" else has changed"
    )


@dataclass(frozen=True)
class StudyWinner:
    """The winner of a study, which a round judges in place of a run that it trains.

    Args:
        config: The configuration of its run, with the name and the storage of the run.
        tags: Tags of its version, such as the name of the study.
    """

    config: Config
    tags: dict[str, str]


@dataclass(frozen=True)
class Situation:
    """The input of one start, with what is computed on demand; the champion served when the round began."""

    config: Config
    section: RetrainSection
    paths: RetrainPaths
    client: Any
    delivery: Delivery
    champion: Champion | None
    stack: ExitStack
    winner: StudyWinner | None = None

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
        return self._evaluate_field("metric") or self.task.best_metric

    def _evaluate_field(self, name: str) -> str | None:
        """Returns a field of `evaluate` as the configuration or the task sets it."""
        of_task = self.task.configuration_fields().get(f"evaluate.{name}")
        value: str | None = getattr(self.config.evaluate, name) or of_task
        return value

    @property
    def _default_mode(self) -> str:
        """Whether a higher (`max`) or a lower (`min`) value of `metric` is better by default, without the data."""
        return (mode_of(self.metric, None) if self.metric != self.task.best_metric else None) or self.task.best_mode

    @cached_property
    def inputs(self) -> Inputs:
        """The inputs of a round; of the champion only those properties count on which the training depends."""
        starts_from = self.champion if self.section.start == "champion" else None
        params_digest = starts_from.version.params_digest if starts_from is not None else ""
        return make_inputs(self.config, self.section, self.delivery, params_digest)

    @property
    def same_data(self) -> bool | None:
        """Whether the data is the champion's; None if its data is not recorded."""
        delivery = self.champion.delivery if self.champion is not None else None
        return None if delivery is None else delivery == self.delivery

    @cached_property
    def inspection(self) -> DataInspection:
        """The profiles of the delivered data, for which all of it is read; DataError if it cannot be used."""
        return inspect_data(self.config, self.section, self.champion, self.connect)

    @cached_property
    def connect(self) -> Callable[[], None]:
        """A function that connects to the cluster, or starts one, at its first call; later calls do nothing."""
        connections: list[bool] = []

        def call() -> None:
            if not connections:
                self.stack.enter_context(keep_connection())
                with cluster(self.config) as is_local:
                    connections.append(is_local)

        return call

    def at_champion(self, version: str | None) -> Situation:
        """Returns the situation with another version as the champion: the one that served when a round began."""
        if version == (self.champion.version.version if self.champion is not None else None):
            return self
        return replace(self, champion=load_champion(self.paths, self.client, self.model, self.uri, version))

    def decide(self, judged: str | None) -> TriggerDecision:
        """Decides whether to train; reads all of the data only if no other trigger applies."""
        facts = self._facts(judged)
        decision = decide_trigger(facts, self.section)
        has_costly_trigger = self.section.max_drop is not None or self.section.max_psi is not None
        if decision.trigger in ("none", "age") and facts.same_data is False and judged is None and has_costly_trigger:
            agreement = self.inspection.agreement
            current_value = agreement.evaluation if agreement is not None else None
            decision = decide_trigger(replace(facts, now=current_value, drift=self.inspection.drift), self.section)
        return decision

    def _facts(self, judged: str | None) -> TriggerFacts:
        if self.champion is None:
            return TriggerFacts(judged=judged)
        delivery = self.champion.delivery
        manifest = open_training_data(self.config).manifest
        old = find_old_files(self.delivery.train, delivery.train) if delivery is not None else set()
        files = zip(manifest.file_of.tolist(), manifest.rows.tolist(), strict=True)
        return TriggerFacts(
            champion=self.champion.version.version,
            age_days=self.champion.version.age_days,
            same_data=self.same_data,
            new_rows=sum(rows for file, rows in files if manifest.paths[file] not in old),
            rows=manifest.num_rows,
            metric=self.metric,
            mode=self._evaluate_field("mode") or self._default_mode,
            then=self.champion.metric_when_promoted(self.metric),
            judged=judged,
        )


def load_champion(paths: RetrainPaths, client: Any, name: str, uri: str, version: str | None) -> Champion | None:
    """Returns a version with the record of its retraining; None if `version` is None."""
    return None if version is None else Champion(version_of(client, name, version), paths, uri)
