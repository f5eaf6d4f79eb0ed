"""The champion, with what the record of its own retraining says of its data and its figures."""

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

from ray_app.models.loader import DESCRIPTION
from ray_app.models.versions import Version, fetch, parameters
from ray_app.record.files import Location, put_atomic
from ray_app.retrain.comparison import Files, files_of
from ray_app.retrain.key import Delivery
from ray_app.retrain.paths import RetrainPaths
from ray_app.retrain.profile import Profile
from ray_app.retrain.rounds import Round
from ray_app.retrain.validate import Known
from ray_app.task.schema import named_classes

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
        return Known(*(Profile.from_json(stage[name]) if stage.get(name) else None for name in ("train", "evaluation", "gate")))

    def accepted(self, metric: str) -> float | None:
        """Its value of a metric on the rows of the gate when it was promoted; None if it is not known, or no number to compare with."""
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
            found = parameters(fetch(self.uri, self.version, Path(folder)))
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
        return files_of(fetch(uri, version, Path(folder)))
