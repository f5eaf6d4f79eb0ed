"""Every call to MLflow for a training run: finding its MLflow run, feeding it, ending it."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.config.extras import require
from ray_app.errors import ConfigError
from ray_app.record.files import Location
from ray_app.record.redact import redact
from ray_app.track.points import Point

logger = logging.getLogger(__name__)

METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_KEY_CHARS, _PARAM_CHARS, _TAG_CHARS = 250, 6000, 8000
_DIGEST_CHARS, _NAME_CHARS = 36, 500
_UUID_TAG, _ROOT_TAG, _RESUMED_WITH = "ray_app.run_uuid", "ray_app.run_root", "ray_app.resumed_with."

IMPATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""MLflow's own defaults keep a call to an unreachable server waiting for 4 minutes; the tracker tries again by itself."""
_ENVIRONMENT = IMPATIENT | {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Its telemetry removes a variable from the environment in a thread, where it reaches nobody, too: who copies that just then fails with a
`KeyError`."""


@dataclass(frozen=True)
class DataSet:
    """Data that a run uses.

    Args:
        context: What for: `training` or `evaluation`.
        path: Where it is.
        digest: Digest of its manifest.
        rows: How many it has.
    """

    context: str
    path: str
    digest: str
    rows: int


class MlflowRun:
    """One MLflow run, continued by whoever has its id; not thread-safe, and every method may block for as long as MLflow does.

    Args:
        uri: Tracking URI.
        experiment: Name of the experiment, made when it is not there.
        artifacts: Folder for artifacts where MLflow has no server to keep them; None: MLflow chooses.
    """

    def __init__(self, uri: str, experiment: str, artifacts: Path | None) -> None:
        self._uri, self._experiment, self._artifacts = uri, experiment, artifacts
        self._client: Any = None
        self.run_id = ""
        self.page = uri

    def open(self, run_id: str | None, run_uuid: str, root: Location, start_ms: int) -> str:
        """Finds the run or creates it.

        Args:
            run_id: Its id as far as known.
            run_uuid: What it is tagged with, in case it was created and its id was never stored.
            root: The run directory; its name becomes the run's.
            start_ms: When it started, milliseconds since 1970 (UTC).

        Returns:
            The run's id; another one than `run_id` if MLflow does not have that run any more.

        Raises:
            ConfigError: The experiment is in MLflow's trash.
            Exception: Whatever MLflow raises, mostly because it cannot be reached.
        """
        if self._client is None:
            self._client = connect(self._uri)
        if run_id is None or not self._is_active(run_id):
            experiment_id = self._experiment_id()
            found = self._client.search_runs([experiment_id], filter_string=f"tags.`{_UUID_TAG}` = '{run_uuid}'", max_results=1)
            tags = {_UUID_TAG: run_uuid, _ROOT_TAG: redact(str(root))}
            run = found[0] if found else self._client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=root.name)
            run_id = str(run.info.run_id)
        self.run_id = run_id
        return run_id

    def describe(self, params: dict[str, Any], tags: dict[str, str], datasets: Sequence[DataSet], is_over: bool) -> None:
        """Sets the run running and gives it what it lacks of these; what it has with another value becomes a tag of its own.

        A parameter of an MLflow run can never change, and the first commit of a run is worth keeping.

        Args:
            params: Parameters by name.
            tags: Tags by name.
            datasets: Its inputs.
            is_over: The run has ended, so it is not set running, and what it has stays without a word.
        """
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self.run_id)
        data = known.data
        if self._uri.startswith("http"):
            self.page = f"{self._uri.rstrip('/')}/#/experiments/{known.info.experiment_id}/runs/{self.run_id}"
        new_params, other_params = _compared(params, data.params, data.tags, _PARAM_CHARS)
        new_tags, other_tags = _compared(tags, data.tags, data.tags, _TAG_CHARS)
        if is_over:
            other_params, other_tags = {}, {}
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        self._add_inputs(datasets, known.inputs.dataset_inputs if known.inputs else [])
        for some in _chunks([Param(*item) for item in new_params.items()], _PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=some, synchronous=True)
        for some in _chunks([RunTag(*item) for item in (new_tags | other_params | other_tags).items()], _PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, tags=some, synchronous=True)

    def log(self, points: list[Point]) -> None:
        """Logs points in their order; returns when MLflow has them."""
        from mlflow.entities import Metric

        metrics = [Metric(mlflow_key(name), value, p.time_ms, p.step) for p in points for name, value in p.metrics.items()]
        for some in _chunks(metrics, METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=some, synchronous=True)

    def finish(self, status: str, artifacts: Mapping[str, str]) -> None:
        """Logs texts as artifacts, by their paths, and ends the run, also where that fails."""
        try:
            for path, text in artifacts.items():
                self._client.log_text(self.run_id, redact(text), path)
        finally:
            self._client.set_terminated(self.run_id, status)

    def _add_inputs(self, datasets: Sequence[DataSet], known: Sequence[Any]) -> None:
        """Logs the inputs for what the run has none for yet. MLflow cuts the digest, so the whole of it is in the profile."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

        contexts = {tag.value for found in known for tag in found.tags if tag.key == MLFLOW_DATASET_CONTEXT}
        new = []
        for data in datasets:
            if data.context not in contexts:
                path = redact(data.path)
                name = "/".join(path.rstrip("/").split("/")[-2:])[-_NAME_CHARS:]
                profile = json.dumps({"num_rows": data.rows, "manifest_digest": data.digest})
                source = json.dumps({"uri": path})
                kind = "s3" if "://" in path else "local"
                entity = Dataset(name, data.digest[:_DIGEST_CHARS], kind, source, profile=profile)
                new.append(DatasetInput(entity, [InputTag(MLFLOW_DATASET_CONTEXT, data.context)]))
        if new:
            self._client.log_inputs(self.run_id, new)

    def _is_active(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            artifacts = None if self._artifacts is None or self._uri.startswith("http") else self._artifacts.as_uri()
            return str(self._client.create_experiment(self._experiment, artifacts))
        if found.lifecycle_stage != "active":
            raise ConfigError(
                f"The MLflow experiment {self._experiment!r} is deleted. Restore it (mlflow experiments restore --experiment-id"
                f" {found.experiment_id}) or start again with another tracking.experiment."
            )
        return str(found.experiment_id)


def connect(uri: str) -> Any:
    """MLflow's client, quiet and impatient; makes the folder of a SQLite file. Importing MLflow takes about a second."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    require("mlflow", "MLflow's record or registry")
    from mlflow.tracking import MlflowClient

    for noisy in ("mlflow.store.db.utils", "alembic", "mlflow.pyfunc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if uri.startswith("sqlite"):
        Path(sqlite_file(uri)).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def sqlite_file(uri: str) -> str:
    """The file of a SQLite URI; empty for a database in memory."""
    file = uri.partition(":///")[2].partition("?")[0]
    return "" if file == ":memory:" else file


def _compared(
    values: dict[str, Any], known: dict[str, str], tags: dict[str, str], most_chars: int
) -> tuple[dict[str, str], dict[str, str]]:
    """What the MLflow run lacks, and the tags for what it has with another value than the last driver's."""
    new, other = {}, {}
    for name, value in values.items():
        key, text, tag = mlflow_key(name), redact(str(value))[:most_chars], mlflow_key(_RESUMED_WITH + name)
        if key not in known:
            new[key] = text
        elif tags.get(tag, known[key]) != text:
            other[tag] = text
    return new, other


def _chunks(items: list[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def mlflow_key(name: str) -> str:
    """The name as MLflow takes it: letters, digits and `_-. :/`, and no path that leads elsewhere."""
    key = re.sub(r"[^\w\-. :/]", "_", name)[:_KEY_CHARS]
    is_path = posixpath.normpath(key) == key and not key.startswith(("/", ".."))
    return key if is_path and key != "." else re.sub(r"[/.]", "_", key) or "_"
