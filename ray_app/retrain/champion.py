"""The champion, with what the record of its own retraining says of its data and its figures.

Back to the champion before, with the reason in the audit record.
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
from ray_app.retrain.gate import Files, files_of
from ray_app.retrain.profile import Known, Profile
from ray_app.retrain.rounds import Delivery, RetrainPaths, Round, audit, entries
from ray_app.runlog.lease import Lease, acquire_lease, remove_old_fences
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, put_atomic
from ray_app.task.schema import named_classes
from ray_app.track.mlflow_client import connect

KEY_TAG = "ray_app.retrain_key"


@dataclass(frozen=True)
class Champion:
    """A version that serves, or served when a round began.

    Args:
        version: What MLflow knows of it.
        paths: The model's retrainings.
        uri: Tracking URI.
    """

    version: Version
    paths: RetrainPaths
    uri: str

    @property
    def delivery(self) -> Delivery | None:
        """The data that it was trained and promoted with; None if it was not made by a retraining."""
        files = self._stage("validated").get("delivery")
        return Delivery(**files) if files else None

    @property
    def known(self) -> Known:
        """What a new delivery is held against."""
        stage = self._stage("validated")
        return Known(
            *(Profile.from_json(stage[name]) if stage.get(name) else None for name in ("train", "evaluation", "gate"))
        )

    def accepted(self, metric: str) -> float | None:
        """Its value of a metric on the rows of the gate when it was promoted; None if it is not known, or no number to
        compare with.
        """
        figures, tags = self._stage("judged").get("figures", {}), self.version.tags
        if figures.get("metric") == metric:
            value = float(figures["challenger"])
        elif tags.get("ray_app.metric") == metric:
            value = float(tags["ray_app.metric_value"])
        else:
            return None
        return value if math.isfinite(value) else None

    def export(self) -> Location:
        """Writes its parameters to a file that a run can begin with, unless they are there; returns the file."""
        with tempfile.TemporaryDirectory() as folder:
            found = load_parameters(download_version(self.uri, self.version, Path(folder)))
        place = self.paths.parameters(self.version.params_digest)
        put_atomic(place, safetensors.torch.save(found), if_absent=True)
        return place

    @cached_property
    def files(self) -> Files:
        """Its package."""
        return package(self.uri, self.version)

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of its classes; None if they have none, or if another program has made the version."""
        if not self.version.params_digest:
            return None
        return named_classes(json.loads(self.files[DESCRIPTION]).get("classes") or [])

    def _stage(self, name: str) -> dict[str, Any]:
        key = self.version.tags.get(KEY_TAG)
        return (Round(self.paths, key).read(name) if key else None) or {}


def package(uri: str, version: Version) -> Files:
    """The files of a version's package."""
    with tempfile.TemporaryDirectory() as folder:
        return files_of(download_version(uri, version, Path(folder)))


def roll_back(config: Config, reason: str) -> Rollback:
    """Lets the version serve again that the champion replaced.

    Raises:
        RunHeldError: Somebody else moves the alias at this moment, and does not get done.
        RegistryError: There is no reason, no champion, or nothing that it replaced.
        Exception: Whatever MLflow raises; the champion serves on.
    """
    paths, name = RetrainPaths.of(config), str(config.tracking.registered_model)
    with deciding(paths):
        client = connect(default_tracking_uri(config))
        record_rollbacks(paths, client, name)
        made = rollback(client, name, reason, user_name())
        record_rollbacks(paths, client, name)
    return made


def deciding(paths: RetrainPaths) -> Lease:
    """The right to move a model's alias, for the seconds that this takes; waits for somebody else who does."""
    lease = acquire_lease(RunPaths(paths.deciding), closing=True)
    remove_old_fences(RunPaths(paths.deciding), lease.fence)
    return lease


def record_rollbacks(paths: RetrainPaths, client: Any, name: str) -> None:
    """Adds the rollbacks that MLflow knows to the audit record, also one that was stopped before it could; those that
    are there stay.
    """
    found = {f"rollback {one.version} {one.at}": one for one in rollbacks(client, name)}
    known = {entry["id"] for entry in entries(paths)} if found else set()
    for id, one in found.items():
        if id not in known:
            details = {"version": one.version, "champion": one.to, "rolled_back_at": one.at, "by": one.by}
            audit(paths, id, "rolled back", one.reason, details)
