"""Access to MLflow: the points of a run's record, and the calls that send them to an MLflow run.

`Backlog` has the points that were not sent, `MlflowRun` has the calls for one run, and `TrackingState` is the content
of `tracking.json`: the id of the MLflow run and the last points that were sent.

Each block of steps and each evaluation is one point. A point, including its time, is a function of the record only. A
point that is sent a second time is therefore bit-identical, and MLflow's SQL stores drop it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import posixpath
import re
import statistics
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ray_app.config.import_paths import require
from ray_app.config.variables import DEFAULT_EXPERIMENT, bypass_proxies, find_open_run
from ray_app.errors import ConfigError
from ray_app.runlog.evaluations import Evaluation, evaluator_names, read_scores
from ray_app.runlog.history import means
from ray_app.runlog.journal import RecordReader, StepRecord, read_events
from ray_app.runlog.paths import RunPaths, from_known_fields
from ray_app.runlog.redaction import redact
from ray_app.storage.files import Location, list_files, put_atomic, put_json, read_json

_LOST_AFTER_S = 60.0
"""Time that the steps after a missing one must span before it counts as lost."""

RUN_EVALUATOR = ""
"""The name of the run's own evaluator, which has no other, among named evaluators."""


@dataclass(frozen=True)
class Point:
    """Metrics of one step: of a block of steps that ends with it, or of an evaluation.

    Args:
        step: Finished steps.
        time_ms: Time of the record, milliseconds since 1970 (UTC).
        metrics: Values by name; NaN and infinity stay.
        evaluator: Name of the evaluator, see `RUN_EVALUATOR`; None unless the point is of an evaluation.
    """

    step: int
    time_ms: int
    metrics: dict[str, float]
    evaluator: str | None = None


@dataclass
class SentState:
    """The part of the record that MLflow has.

    Args:
        sent_step: Step of the last point of a block.
        evaluations: For each evaluator, the steps of the evaluations.
    """

    sent_step: int = 0
    evaluations: dict[str, list[int]] = field(default_factory=dict)

    def add(self, point: Point) -> None:
        """Records that a point was sent."""
        if point.evaluator is not None:
            self.evaluations.setdefault(point.evaluator, []).append(point.step)
        else:
            self.sent_step = point.step


class Backlog:
    """The part of a run's record that has not been sent; its memory grows with that part, and by some bytes per step.

    `every_steps` are the steps of a block. Blocks are aligned to the steps of the run, so that every driver sends the
    same. A branch has no steps up to `first_step`.
    """

    def __init__(self, paths: RunPaths, every_steps: int, first_step: int = 0) -> None:
        self._paths, self._every_steps = paths, every_steps
        self._first_step = first_step
        self._evaluations: dict[str, list[Evaluation]] = {}
        self._failed_at_s: list[float] = []
        self._files: dict[Location, int] = {}
        self.rewind()

    def rewind(self) -> None:
        """Reads the record from its beginning at the next `read`."""
        self._reader = RecordReader(self._paths)
        self._steps: dict[int, StepRecord] = {}
        self._dropped_step = self.newest_step = 0

    def read(self, sent: SentState) -> None:
        """Reads the new part of the record after what MLflow has.

        After an `OSError` of the storage the next call starts again and misses nothing.
        """
        self._dropped_step = max(self._dropped_step, sent.sent_step)
        try:
            for record in self._reader.first_records(sent.sent_step):
                # Points need the sum of the rows only; without the lists a record needs less memory.
                self._steps[record.step] = replace(record, rows=[sum(record.rows)], row_hash=[])
                self.newest_step = max(self.newest_step, record.step)
        except Exception:
            self.rewind()
            raise
        for name in (RUN_EVALUATOR, *evaluator_names(self._paths)):
            with self._detect_growth(self._paths.evaluations_of(name or None)) as has_grown:
                if has_grown:
                    self._evaluations[name] = read_scores(self._paths, name or None)
        with self._detect_growth(self._paths.events) as has_grown:
            if has_grown:
                self._failed_at_s = [event.time_s for event in read_events(self._paths, "failed")]

    def sent(self, sent: SentState) -> None:
        """Drops the part that was sent."""
        for step in range(self._dropped_step + 1, sent.sent_step + 1):
            self._steps.pop(step, None)
        self._dropped_step = max(self._dropped_step, sent.sent_step)

    def unsent_evaluations(self, sent: SentState) -> Iterator[Point]:
        """Yields the points of evaluations that were not sent, of one evaluator after the other, by step."""
        for name, evaluations in self._evaluations.items():
            sent_steps = frozenset(sent.evaluations.get(name, ()))
            yield from (
                make_evaluation_point(evaluation, name)
                for evaluation in evaluations
                if evaluation.step not in sent_steps
            )

    def points(self, sent: SentState, finished: bool) -> Iterator[Point]:
        """Yields the points that can be sent now: blocks by step, then evaluations.

        With `finished` no more steps will come, so the last block is complete as it is.
        """
        yield from self._step_points(max(sent.sent_step, self._first_step), finished)
        yield from list(self.unsent_evaluations(sent))

    def _step_points(self, sent_step: int, finished: bool) -> Iterator[Point]:
        newest, every = max(self._steps, default=0), self._every_steps
        first = sent_step + 1
        while first <= newest:
            last = -(-first // every) * every
            steps = [self._steps[step] for step in range(first, last + 1) if step in self._steps]
            if len(steps) <= last - first and not finished and not self._is_lost(last, newest):
                return
            if steps:
                yield make_step_point(steps, self._failed_at_s)
            first = last + 1

    def _is_lost(self, last: int, newest: int) -> bool:
        """Returns whether a step that is missing in the block up to `last` will never come, as its writer was killed.

        Records come in the order of the steps, except that a run that resumes from an earlier step fills the gap that
        it had left. So the tracker waits for a missing step until the steps after it span a minute.
        """
        behind = next((step for step in range(last + 1, newest + 1) if step in self._steps), newest)
        return self._steps[newest].time_s - self._steps[behind].time_s >= _LOST_AFTER_S

    @contextmanager
    def _detect_growth(self, folder: Location) -> Iterator[bool]:
        """Yields whether a folder has another number of files than when the context last ended without an error."""
        files = len(list_files(folder))
        yield files != self._files.get(folder, 0)
        self._files[folder] = files


def make_step_point(steps: list[StepRecord], failed_at_s: Collection[float]) -> Point:
    """Returns the point of a block of steps (at least one); `failed_at_s` are the times of workers' failures."""
    last = steps[-1]
    rows = [sum(record.rows) for record in steps]
    step_ms = [record.step_ms for record in steps]
    # The norm is infinite in steps where fp16 has overflowed.
    finite_norms = [record.grad_norm for record in steps if math.isfinite(record.grad_norm)]
    metrics = {
        **means(steps),
        "lr": last.lr,
        "grad_norm": _ratio(math.fsum(finite_norms), len(finite_norms)),
        "step_ms": statistics.median(step_ms),
        "data_wait_ms": statistics.fmean(record.data_wait_ms for record in steps),
        "rows_per_s": _ratio(1e3 * sum(rows), sum(step_ms)),
        "workers": float(last.workers),
        "restarts": float(sum(at_s <= last.time_s for at_s in failed_at_s)),
    }
    if imbalances := [record.imbalance for record in steps if record.imbalance is not None]:
        metrics["imbalance"] = statistics.fmean(imbalances)
    return Point(last.step, int(last.time_s * 1e3), metrics)


def make_evaluation_point(evaluation: Evaluation, evaluator: str = RUN_EVALUATOR) -> Point:
    """Returns the point of an evaluation, with each metric that is a number.

    Its names are `eval_<metric>`, or `eval_<evaluator>_<metric>` for a named evaluator.
    """
    prefix = f"eval_{evaluator}_" if evaluator else "eval_"
    metrics = {
        prefix + name: float(value) for name, value in evaluation.metrics.items() if isinstance(value, int | float)
    }
    return Point(evaluation.step, int(evaluation.time_s * 1e3), metrics, evaluator)


def _ratio(value: float, by: float) -> float:
    return value / by if by else float("nan")


logger = logging.getLogger(__name__)

METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_KEY_CHARS = 250
_PARAM_CHARS = 6000
_TAG_CHARS = 8000
_DIGEST_CHARS, _NAME_CHARS = 36, 500
_UUID_TAG = "ray_app.run_uuid"
_ROOT_TAG = "ray_app.run_root"
_RESUMED_WITH = "ray_app.resumed_with."

SHORT_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""Environment variables for short timeouts, without retries.

With MLflow's defaults a call to an unreachable server waits for 4 minutes. The tracker retries by itself.
"""
_ENVIRONMENT = SHORT_TIMEOUTS | {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables that configure MLflow.

MLflow's telemetry is off because its thread removes an environment variable, also without a connection: code that
copies the environment at that moment fails with a `KeyError`.
"""


@dataclass(frozen=True)
class DataSet:
    """A data set of a run for a use (`training` or `evaluation`), with the digest of its manifest."""

    context: str
    path: str
    digest: str
    rows: int


@dataclass(frozen=True)
class OpenRun:
    """The MLflow run in which a new run is recorded, as MLflow's environment or the calling program names it.

    Args:
        run_id: `MLFLOW_RUN_ID`, which becomes the run's own unless another run has it; None if it is not set.
        parent_id: Id of the MLflow run that the program has open (`mlflow.start_run`), which becomes its parent.
        experiment_id: `MLFLOW_EXPERIMENT_ID`, or the experiment of the parent.
        name: Name of a new MLflow run; None: that of the run's directory.
    """

    run_id: str | None = None
    parent_id: str | None = None
    experiment_id: str | None = None
    name: str | None = None

    @classmethod
    def find(cls, uri: str) -> OpenRun:
        """Returns what is set in this process and open in this thread at an address of MLflow, which is not asked."""
        address, parent = find_open_run() or ("", None)
        run_id, experiment_id = (os.environ.get(name) or None for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"))
        if parent is None or address != uri:
            return cls(run_id, None, experiment_id)
        return cls(run_id, parent.run_id, experiment_id or parent.experiment_id)


class MlflowRun:
    """One MLflow run, which every process with its id can continue.

    The class is not thread-safe, and each method may block as long as MLflow does.

    Args:
        experiment: Name of the experiment, which is created if it does not exist; None: that of `open_run`.
        artifacts: Folder for the artifacts if MLflow has no server; None: MLflow chooses.
        open_run: The MLflow run in which a new one is recorded.
    """

    def __init__(self, uri: str, experiment: str | None, artifacts: Path | None, open_run: OpenRun = OpenRun()) -> None:
        self._uri = uri
        self.experiment, self._open_run = experiment, open_run
        self._artifacts = artifacts
        self._client: Any = None
        self.run_id = ""
        self.page = uri

    def open(self, run_id: str | None, run_uuid: str, root: Location, start_ms: int) -> str:
        """Finds the run or creates it, and returns its id: another one if MLflow does not have the stored one any more.

        Args:
            run_uuid: Value of a tag; it finds the run if a driver created it but died before it stored the id.
            root: The run directory; its name becomes the name of the MLflow run.
            start_ms: Start of the run, milliseconds since 1970 (UTC).

        Raises:
            ConfigError: The experiment is in MLflow's trash.
            Exception: An error of MLflow, mostly because it cannot be reached.
        """
        client = self._client = self._client or connect(self._uri)
        if run_id is None or not self._is_active(run_id):
            experiment_id = self._experiment_id()
            query = f"tags.`{_UUID_TAG}` = '{run_uuid}'"
            runs = client.search_runs([experiment_id], filter_string=query, max_results=1)
            tags = {_UUID_TAG: run_uuid, _ROOT_TAG: redact(str(root))}
            if runs:
                run_id = str(runs[0].info.run_id)
            elif (run_id := self._take_open_run(tags)) is None:
                fields = {"start_time": start_ms, "tags": tags, "run_name": self._open_run.name or root.name}
                run_id = str(client.create_run(experiment_id, **fields).info.run_id)
        self.run_id = run_id
        return run_id

    def _take_open_run(self, tags: dict[str, str]) -> str | None:
        """Makes the MLflow run of `MLFLOW_RUN_ID` the run's own, and returns its id.

        If there is none, or another run has it, the result is None, and the tags get the parent.
        """
        from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

        parent_id, run_id = self._open_run.parent_id, self._open_run.run_id
        if run_id is not None and not self._is_active(run_id):
            logger.warning("MLFLOW_RUN_ID is %s, but MLflow at %s does not have this run.", run_id, redact(self._uri))
        elif run_id is not None:
            if _UUID_TAG not in self._client.get_run(run_id).data.tags:
                for name, value in tags.items():
                    self._client.set_tag(run_id, name, value)
                return run_id
            parent_id = run_id
        if parent_id is not None:
            tags[MLFLOW_PARENT_RUN_ID] = parent_id
        return None

    def describe(
        self, params: dict[str, Any], tags: dict[str, str], datasets: Sequence[DataSet], is_over: bool
    ) -> None:
        """Sets the status `RUNNING`, and adds the parameters, tags and inputs that the MLflow run lacks.

        A parameter or tag that the run has with another value gets an additional tag with the new value, since a
        parameter of an MLflow run can never change. For a run that has ended (`is_over`) it does not, and the status
        stays.
        """
        from mlflow.entities import Param, RunTag

        run = self._client.get_run(self.run_id)
        data = run.data
        if self._uri.startswith("http"):
            self.page = f"{self._uri.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{self.run_id}"
        new_params, other_params = _diff_values(params, data.params, data.tags, _PARAM_CHARS)
        new_tags, other_tags = _diff_values(tags, data.tags, data.tags, _TAG_CHARS)
        if is_over:
            other_params, other_tags = {}, {}
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        self._add_inputs(datasets, run.inputs.dataset_inputs if run.inputs else [])
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
        """Logs texts as artifacts, by their paths, and ends the MLflow run, also if that raises."""
        try:
            for path, text in artifacts.items():
                self._client.log_text(self.run_id, redact(text), path)
        finally:
            self._client.set_terminated(self.run_id, status)

    def _add_inputs(self, datasets: Sequence[DataSet], existing_inputs: Sequence[Any]) -> None:
        """Logs the data sets for each context without an input; only the profile can have the whole digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

        tags = [tag for existing_input in existing_inputs for tag in existing_input.tags]
        contexts = {tag.value for tag in tags if tag.key == MLFLOW_DATASET_CONTEXT}
        new = []
        for data in datasets:
            if data.context not in contexts:
                path = redact(data.path)
                name = "/".join(path.rstrip("/").split("/")[-2:])[-_NAME_CHARS:]
                profile = json.dumps({"num_rows": data.rows, "manifest_digest": data.digest})
                source = json.dumps({"uri": path})
                kind = path.partition("://")[0] if "://" in path else "local"
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
        if self.experiment is None and self._open_run.experiment_id is not None:
            experiment = self._client.get_experiment(self._open_run.experiment_id)
        else:
            self.experiment = self.experiment or DEFAULT_EXPERIMENT
            experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            artifacts = None if self._artifacts is None or self._uri.startswith("http") else self._artifacts.as_uri()
            return str(self._client.create_experiment(self.experiment, artifacts))
        self.experiment = experiment.name
        if experiment.lifecycle_stage != "active":
            raise ConfigError(
                f"The MLflow experiment {experiment.name!r} is deleted. Restore it (mlflow experiments restore"
                f" --experiment-id"
                f" {experiment.experiment_id}) or start again with another tracking.experiment."
            )
        return str(experiment.experiment_id)


def connect(uri: str) -> Any:
    """Returns a client of MLflow with short timeouts and few log lines; creates a SQLite file that does not exist.

    The import of MLflow takes about a second.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(bypass_proxies(os.environ))
    require("mlflow", "MLflow's record or registry")
    from mlflow.tracking import MlflowClient

    for logger_name in ("mlflow.store.db.utils", "alembic", "mlflow.pyfunc"):
        logging.getLogger(logger_name).setLevel(logging.WARNING)
    if uri.startswith("sqlite") and (file := sqlite_file(uri)) and not Path(file).exists():
        _make_database(Path(file))
    return MlflowClient(tracking_uri=uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or uri)


def _make_database(file: Path) -> None:
    """Writes an empty database of MLflow, unless another process has written it meanwhile.

    MLflow creates its tables in place by dozens of migrations without a lock: two runs that start at once, or a driver
    that is killed meanwhile, leave a file that no later run can use (table _alembic_tmp_params already exists).
    """
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "mlflow.db")
        store = SqlAlchemyStore(f"sqlite:///{database}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store.engine.dispose()
        put_atomic(file, database.read_bytes(), if_absent=True)


def sqlite_file(uri: str) -> str:
    """Returns the file of a SQLite URI; empty for a database in memory.

    Raises:
        ConfigError: SQLAlchemy reads another path, as `?` begins options and `%20` is a blank to some of its versions.
    """
    file, _, options = uri.partition(":///")[2].partition("?")
    if re.search("%[0-9a-fA-F]{2}", file) or (options and ("=" not in options or "/" in options)):
        raise ConfigError(
            f"tracking.uri is {redact(uri)!r}; the path of a SQLite file must not have ? or % before two digits, which"
            " MLflow interprets. Set it to another file (sqlite:////folder/mlflow.db), with literal blanks; by default,"
            " the file is in run.storage_path."
        )
    return "" if file == ":memory:" else file


def _diff_values(
    values: dict[str, Any], current: dict[str, str], tags: dict[str, str], max_chars: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the values that the MLflow run lacks, and additional tags for values that differ from those it has.

    They differ from the newest additional tag, or from the run's value if there is no such tag.
    """
    new, other = {}, {}
    for name, value in values.items():
        key = mlflow_key(name)
        text = redact(str(value))[:max_chars]
        tag = mlflow_key(_RESUMED_WITH + name)
        if key not in current:
            new[key] = text
        elif tags.get(tag, current[key]) != text:
            other[tag] = text
    return new, other


def _chunks(items: list[Any], max_items: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), max_items):
        yield items[start : start + max_items]


def mlflow_key(name: str) -> str:
    """Returns the name in a form that MLflow accepts: letters, digits and `_-. :/`, and a normalized relative path."""
    key = re.sub(r"[^\w\-. :/]", "_", name)[:_KEY_CHARS]
    is_path = posixpath.normpath(key) == key and not key.startswith(("/", ".."))
    return key if is_path and key != "." else re.sub(r"[/.]", "_", key) or "_"


@dataclass
class TrackingState(SentState):
    """The content of `tracking.json`: the part that was sent, and the MLflow run.

    Args:
        run_uuid: Value of a tag of the MLflow run; stored before the run is created.
        uri: Tracking URI, without credentials.
    """

    run_uuid: str = ""
    run_id: str | None = None
    uri: str = ""

    @classmethod
    def load(cls, paths: RunPaths) -> TrackingState:
        """Returns the content that the last driver has stored; stores and returns a new one if there is none."""
        stored = read_json(paths.tracking)
        if stored is None:
            cursor = cls(run_uuid=uuid.uuid4().hex)
            cursor.store(paths)
            return cursor
        # A run that was started before evaluators had names has a list.
        if isinstance(stored.get("evaluations"), list):
            stored["evaluations"] = {RUN_EVALUATOR: stored["evaluations"]}
        return from_known_fields(cls, stored)

    def store(self, paths: RunPaths) -> None:
        """Writes `tracking.json`."""
        put_json(paths.tracking, asdict(self))

    def forget(self) -> None:
        """Resets the part that was sent: MLflow has nothing."""
        self.sent_step = 0
        self.evaluations = {}
