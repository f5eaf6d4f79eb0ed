"""The champion with the record of its retraining (`Champion`), and the rollback to the version before (`roll_back`).

A rollback is recorded with its reason in the audit record.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch

from ray_app.config.config import Config, default_tracking_uri
from ray_app.driver.model_export import user_name
from ray_app.models.loader import DESCRIPTION
from ray_app.models.registry import Rollback, Version, download_version, load_parameters, rollback, rollbacks
from ray_app.retrain.gate import Files, read_package_files
from ray_app.retrain.profile import Profile, ReferenceProfiles
from ray_app.retrain.rounds import Delivery, RetrainPaths, Round, add_audit_entry, read_audit_entries
from ray_app.runlog.lease import Lease, acquire_lease, remove_old_fences
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, put_atomic
from ray_app.task.schema import named_classes
from ray_app.track.mlflow_client import connect

KEY_TAG = "ray_app.retrain_key"


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
        put_atomic(file, safetensors.torch.save(tensors), if_absent=True)
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
        key = self.version.tags.get(KEY_TAG)
        return (Round(self.paths, key).read(name) if key else None) or {}


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
