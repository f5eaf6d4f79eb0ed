"""How things stand at a start: the delivered data, the champion, and whether there is a reason to train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ray_app.config.config import Config, default_tracking_uri
from ray_app.data.dataset.dataset import open_dataset
from ray_app.models.versions import champion, version_of
from ray_app.retrain.champion import Champion
from ray_app.retrain.key import Delivery, Inputs, digest_of, inputs_of
from ray_app.retrain.look import DataLook, look_at
from ray_app.retrain.paths import RetrainPaths
from ray_app.retrain.section import RetrainSection
from ray_app.retrain.selection import old_files
from ray_app.retrain.triggers import Triggered, TriggerFacts, decide
from ray_app.runs.cluster import cluster
from ray_app.runs.preparing.prepare import make_task
from ray_app.task.base import Task
from ray_app.task.score.deciding import mode_of


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
            new_rows=sum(rows for file, rows in zip(manifest.file_of.tolist(), manifest.rows.tolist(), strict=True) if is_new[file]),
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
