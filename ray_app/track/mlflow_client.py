"""What MLflow gets to see of a run's record: one point for every block of steps, every evaluation and every look at the
nodes.

A point is a function of the record alone, its time too, so a point that is sent a second time is the same one to the
last bit, and MLflow's SQL stores drop it.

Every call to MLflow for a training run: finding its MLflow run, feeding it, ending it.

`tracking.json`: which MLflow run a run has, and how far that has been fed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import posixpath
import re
import statistics
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError
from ray_app.runlog.evaluations import Evaluation, evaluator_names, read_scores
from ray_app.runlog.history import means
from ray_app.runlog.journal import FirstRecords, StepRecord, read_events
from ray_app.runlog.node_metrics import NodeSample, read_samples
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import Location, list_files, put_json, read_json

_LOST_AFTER_S = 60.0


OWN = ""
"""What stands for the run's own evaluator, which has no name, where a name is needed."""


@dataclass(frozen=True)
class Point:
    """Metrics of one step.

    Args:
        step: Finished steps.
        time_ms: When it was recorded, milliseconds since 1970 (UTC).
        metrics: Value by name; NaN and infinity are left as they are.
        evaluator: Which evaluator found them, see `OWN`; None: none did.
        look: Name of the look at the nodes that they come from; None: they do not. With neither they are of a block of
            steps.
    """

    step: int
    time_ms: int
    metrics: dict[str, float]
    evaluator: str | None = None
    look: str | None = None


@dataclass
class Sent:
    """How far the record was sent.

    Args:
        sent_step: Step of the last point of a block that MLflow has.
        evaluations: For each evaluator, the steps whose evaluation MLflow has.
        look: Name of the last look at the nodes that MLflow has.
    """

    sent_step: int = 0
    evaluations: dict[str, list[int]] = field(default_factory=dict)
    look: str = ""

    def add(self, point: Point) -> None:
        """Notes that a point was sent."""
        if point.look is not None:
            self.look = point.look
        elif point.evaluator is not None:
            self.evaluations.setdefault(point.evaluator, []).append(point.step)
        else:
            self.sent_step = point.step


class Backlog:
    """The part of a run's record that has not been sent; its memory grows with that part, and by some bytes per step.

    Args:
        paths: The run.
        every_steps: Steps of a block; blocks are aligned, so that it does not matter who sends them.
    """

    def __init__(self, paths: RunPaths, every_steps: int) -> None:
        self._paths, self._every_steps = paths, every_steps
        self._evaluations: dict[str, list[Evaluation]] = {}
        self._failed_at_s: list[float] = []
        self._files: dict[Location, int] = {}
        self.rewind()

    def rewind(self) -> None:
        """Reads the record from its beginning at the next `read`."""
        self._reader = FirstRecords(self._paths)
        self._steps: dict[int, StepRecord] = {}
        self._forgotten = self.newest_step = 0
        self._looks: dict[str, NodeSample] = {}

    def read(self, sent: Sent) -> None:
        """Takes what is new in the record.

        Args:
            sent: What is not needed again.

        Raises:
            OSError: The run directory cannot be read for now; the next call starts over and misses nothing.
        """
        self._forgotten = max(self._forgotten, sent.sent_step)
        try:
            for record in self._reader.poll():
                self.newest_step = max(self.newest_step, record.step)
                if record.step > sent.sent_step:
                    self._steps[record.step] = replace(
                        record, rows=[sum(record.rows)], row_hash=[]
                    )  # all that points are made of
        except Exception:
            self.rewind()
            raise
        for name in (OWN, *evaluator_names(self._paths)):
            with self._change(self._paths.evaluations_of(name or None)) as is_new:
                if is_new:
                    self._evaluations[name] = read_scores(self._paths, name or None)
        with self._change(self._paths.events) as is_new:
            if is_new:
                self._failed_at_s = [event.time_s for event in read_events(self._paths, "failed")]
        self._looks |= read_samples(self._paths, sent.look, self._looks)

    def sent(self, sent: Sent) -> None:
        """Forgets what was sent."""
        for known in range(self._forgotten + 1, sent.sent_step + 1):
            self._steps.pop(known, None)
        self._forgotten = max(self._forgotten, sent.sent_step)
        self._looks = {name: look for name, look in self._looks.items() if name > sent.look}

    def unsent_evaluations(self, sent: Sent) -> Iterator[Point]:
        """The points of evaluations that were not sent, of one evaluator after the other, by step."""
        for name, evaluations in self._evaluations.items():
            known = frozenset(sent.evaluations.get(name, ()))
            yield from (
                evaluation_point(evaluation, name) for evaluation in evaluations if evaluation.step not in known
            )

    def points(self, sent: Sent, finished: bool) -> Iterator[Point]:
        """What can be sent now, in the order of the steps, then the evaluations and the looks at the nodes in theirs.

        Args:
            sent: What was sent before this call.
            finished: Whether no more steps will come, so that the last block is what there is of it.
        """
        yield from self._step_points(sent.sent_step, finished)
        yield from list(self.unsent_evaluations(sent))
        yield from [look_point(name, look) for name, look in sorted(self._looks.items()) if name > sent.look]

    def _step_points(self, sent_step: int, finished: bool) -> Iterator[Point]:
        newest, every = max(self._steps, default=0), self._every_steps
        first = sent_step + 1
        while first <= newest:
            last = -(-first // every) * every
            steps = [self._steps[step] for step in range(first, last + 1) if step in self._steps]
            if len(steps) <= last - first and not finished and not self._is_lost(last, newest):
                return
            if steps:
                yield step_point(steps, self._failed_at_s)
            first = last + 1

    def _is_lost(self, last: int, newest: int) -> bool:
        """Whether a step missing from the block that ends with `last` will never come: its writer was killed before it
        wrote it.

        Records come in the order of the steps, except that an attempt that starts over fills what the last one left. So
        a hole is left alone until the steps behind it span a minute.
        """
        behind = next((step for step in range(last + 1, newest + 1) if step in self._steps), newest)
        return self._steps[newest].time_s - self._steps[behind].time_s >= _LOST_AFTER_S

    @contextmanager
    def _change(self, folder: Location) -> Iterator[bool]:
        """Whether a folder of files that are never changed has more of them than were read before; noted when they are
        read.
        """
        files = len(list_files(folder))
        yield files != self._files.get(folder, 0)
        self._files[folder] = files


def step_point(steps: list[StepRecord], failed_at_s: Collection[float]) -> Point:
    """The point of a block.

    Args:
        steps: Its steps in order, at least one.
        failed_at_s: When workers failed, seconds since 1970 (UTC).
    """
    last = steps[-1]
    rows = [sum(record.rows) for record in steps]
    step_ms = [record.step_ms for record in steps]
    metrics = {
        **means(steps),
        "lr": last.lr,
        "grad_norm": _mean(
            [record.grad_norm for record in steps if math.isfinite(record.grad_norm)]
        ),  # infinite where fp16 overflowed
        "step_ms": statistics.median(step_ms),
        "data_wait_ms": statistics.fmean(record.data_wait_ms for record in steps),
        "rows_per_s": _ratio(1e3 * sum(rows), sum(step_ms)),
        "workers": float(last.workers),
        "restarts": float(sum(at_s <= last.time_s for at_s in failed_at_s)),
    }
    if imbalances := [record.imbalance for record in steps if record.imbalance is not None]:
        metrics["imbalance"] = statistics.fmean(imbalances)
    return Point(last.step, int(last.time_s * 1e3), metrics)


def evaluation_point(evaluation: Evaluation, evaluator: str = OWN) -> Point:
    """The point of an evaluation: `eval_<metric>` for each metric that is a number, of a named evaluator
    `eval_<evaluator>_<metric>`.
    """
    prefix = f"eval_{evaluator}_" if evaluator else "eval_"
    metrics = {
        prefix + name: float(value) for name, value in evaluation.metrics.items() if isinstance(value, int | float)
    }
    return Point(evaluation.step, int(evaluation.time_s * 1e3), metrics, evaluator)


def look_point(name: str, look: NodeSample) -> Point:
    """The point of a look at the nodes, `system/<node>/<value>` for each value."""
    metrics = {
        f"system/{node}/{key}": value for node, values in sorted(look.nodes.items()) for key, value in values.items()
    }
    return Point(look.step, int(look.time_s * 1e3), metrics, look=name)


def _mean(values: list[float]) -> float:
    return _ratio(math.fsum(values), len(values))


def _ratio(value: float, by: float) -> float:
    return value / by if by else float("nan")


logger = logging.getLogger(__name__)

METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_KEY_CHARS, _PARAM_CHARS, _TAG_CHARS = 250, 6000, 8000
_DIGEST_CHARS, _NAME_CHARS = 36, 500
_UUID_TAG, _ROOT_TAG, _RESUMED_WITH = "ray_app.run_uuid", "ray_app.run_root", "ray_app.resumed_with."

IMPATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""MLflow's own defaults keep a call to an unreachable server waiting for 4 minutes; the tracker tries again by itself.
"""
_ENVIRONMENT = IMPATIENT | {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Its telemetry removes a variable from the environment in a thread, where it reaches nobody, too: who copies that just
then fails with a `KeyError`.
"""


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
    """One MLflow run, continued by whoever has its id; not thread-safe, and every method may block for as long as
    MLflow does.

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
            found = self._client.search_runs(
                [experiment_id], filter_string=f"tags.`{_UUID_TAG}` = '{run_uuid}'", max_results=1
            )
            tags = {_UUID_TAG: run_uuid, _ROOT_TAG: redact(str(root))}
            run = (
                found[0]
                if found
                else self._client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=root.name)
            )
            run_id = str(run.info.run_id)
        self.run_id = run_id
        return run_id

    def describe(
        self, params: dict[str, Any], tags: dict[str, str], datasets: Sequence[DataSet], is_over: bool
    ) -> None:
        """Sets the run running and gives it what it lacks of these; what it has with another value becomes a tag of its
        own.

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
        for some in _chunks(
            [RunTag(*item) for item in (new_tags | other_params | other_tags).items()], _PARAMS_PER_CALL
        ):
            self._client.log_batch(self.run_id, tags=some, synchronous=True)

    def log(self, points: list[Point]) -> None:
        """Logs points in their order; returns when MLflow has them."""
        from mlflow.entities import Metric

        metrics = [
            Metric(mlflow_key(name), value, p.time_ms, p.step) for p in points for name, value in p.metrics.items()
        ]
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
        """Logs the inputs for what the run has none for yet. MLflow cuts the digest, so the whole of it is in the
        profile.
        """
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
                f"The MLflow experiment {self._experiment!r} is deleted. Restore it (mlflow experiments restore"
                f" --experiment-id"
                f" {found.experiment_id}) or start again with another tracking.experiment."
            )
        return str(found.experiment_id)


def connect(uri: str) -> Any:
    """MLflow's client, quiet and impatient; makes the folder of a SQLite file. Importing MLflow takes about a
    second.
    """
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


@dataclass
class Tracked(Sent):
    """What `tracking.json` holds besides what was sent.

    Args:
        run_uuid: What the MLflow run is tagged with; stored before the run is created.
        run_id: Id of the MLflow run.
        uri: Where it is, without credentials.
    """

    run_uuid: str = ""
    run_id: str | None = None
    uri: str = ""

    @classmethod
    def load(cls, paths: RunPaths) -> Tracked:
        """As the last driver left it; new, and stored at once, if there was none."""
        stored = read_json(paths.tracking)
        if stored is not None:
            if isinstance(stored.get("evaluations"), list):  # of a run that was started before evaluators had names
                stored["evaluations"] = {OWN: stored["evaluations"]}
            return cls(**{name: value for name, value in stored.items() if name in {item.name for item in fields(cls)}})
        cursor = cls(run_uuid=uuid.uuid4().hex)
        cursor.store(paths)
        return cursor

    def store(self, paths: RunPaths) -> None:
        """Writes `tracking.json`."""
        put_json(paths.tracking, asdict(self))

    def forget(self) -> None:
        """Begins anew: MLflow has nothing."""
        self.sent_step, self.evaluations, self.look = 0, {}, ""
